"""Settings of a peer's averaging."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from dmoe_net.averaging.gathering import Compute, GatherConfig, inline
from dmoe_net.averaging.grouping.group import Role
from dmoe_net.averaging.grouping.matchmaking import AssemblyConfig
from dmoe_net.averaging.reduction.partition import AllReduceConfig
from dmoe_net.averaging.speeds import UNKNOWN, Speeds
from dmoe_net.averaging.state.sharing import StateSharingConfig
from dmoe_net.wire.compression import Compression


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragerConfig:
    """Settings of an averager and its parts."""

    step_timeout_s: float = 60.0
    """Longest that a step takes."""
    role: Role | None = None
    """None: a client if the caller cannot be called, else a node."""
    cell: int | None = None
    """Place on the grid to begin at, 0 to `grid.num_cells` - 1; None: anywhere."""
    speeds: Speeds | Callable[[], Speeds] = UNKNOWN
    """Speeds of this machine, for the share that it reduces; or a function that returns what is known of them now. What
    they do not say is taken from the last state that was downloaded."""
    compute: Compute = inline
    """Runs work on vectors of which few numbers travel, off the event loop; by default, in it."""
    assembly: AssemblyConfig = field(default_factory=AssemblyConfig)
    """Search for groups."""
    all_reduce: AllReduceConfig = field(default_factory=AllReduceConfig)
    """Averaging within a group."""
    gather: GatherConfig = field(default_factory=GatherConfig)
    """Exchange of sparse vectors within a group."""
    state: StateSharingConfig = field(default_factory=StateSharingConfig)
    """Sharing of whole states."""

    def __post_init__(self) -> None:
        if not 0 < self.step_timeout_s < math.inf:
            raise ValueError(f"step_timeout_s must be a positive number of seconds, got {self.step_timeout_s}")

    def known_speeds(self) -> Speeds:
        """Return what is known of this machine now."""
        return self.speeds if isinstance(self.speeds, Speeds) else self.speeds()

    @classmethod
    def of(
        cls,
        *,
        window_s: float,
        timeout_s: float,
        compression: Compression,
        role: Role | None = None,
        speeds: Speeds = UNKNOWN,
    ) -> "AveragerConfig":
        """Settings from the few that a user gives; all peers that average together should have the same times.

        Args:
          window_s: how long a group waits for more members.
          timeout_s: longest that a round takes.
          compression: how numbers travel.

        Raises:
          ValueError: a setting is out of range.
        """
        return cls(
            step_timeout_s=timeout_s,
            role=role,
            speeds=speeds,
            assembly=AssemblyConfig(window_s=window_s, request_timeout_s=min(3.0, window_s / 2)),
            all_reduce=AllReduceConfig(sender_timeout_s=timeout_s / 3, timeout_s=timeout_s, compression=compression),
            gather=GatherConfig(sender_timeout_s=timeout_s / 4),
        )
