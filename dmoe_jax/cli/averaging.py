"""The flags of `dmoe train` for averaging with other trainer processes, and what they set up."""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dmoe_jax.cli.common import UsageError
from net.averaging.grouping.group_key import MoshpitGrid, check_prefix

if TYPE_CHECKING:
    from dmoe_jax.cli.swarm import SwarmPeer
    from dmoe_jax.device import Device
    from dmoe_jax.optim.trunk_averaging import TrunkAveraging
    from dmoe_jax.trainer import SharedTrunk
    from net.averaging.averager import AveragerConfig


@dataclass(frozen=True, kw_only=True)
class AveragingOptions:
    """Whether and how this process's trunk is kept together with those of others."""

    average_every: int = 0
    """Trunk updates between two averages of the trunk's parameters with other trainer processes of the swarm; 0: never.
    Give each process its own --data-seed. One that joins late takes the state of the one that is furthest."""
    average_name: str = "trunk"
    """Processes that give the same name average with each other."""
    average_side: int = 4
    """Processes in a full group, the same for all."""
    average_dims: int = 1
    """Axes of the grid of processes: with 1 all are one group, with 2 and side M there are M groups of M in turn."""
    average_window_s: float = 5.0
    """How long a group waits for more members, seconds; a full one begins at once."""
    average_timeout_s: float = 30.0
    """Longest that a round takes, seconds; training goes on meanwhile."""
    average_client: bool = False
    """Average without being called by others: for a machine that cannot be reached. Others must do the work."""
    average_compression: Literal["none", "float16", "bfloat16", "blockwise8"] = "none"
    """How parameters travel."""

    def check(self) -> None:
        """Whether the flags can be meant.

        Raises:
          UsageError: naming the flag.
        """
        if self.average_every < 0:
            raise UsageError(f"--average-every must not be negative, got {self.average_every}")
        for name in ("average_window_s", "average_timeout_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"--{name.replace('_', '-')} must be positive, got {getattr(self, name)}")
        if self.average_side < 2:
            raise UsageError(f"--average-side must be at least 2, got {self.average_side}")
        try:
            check_prefix(self.average_name)
            MoshpitGrid(side=self.average_side, dims=self.average_dims)
            self.config()
        except ValueError as error:
            raise UsageError(f"--average-...: {error}") from error

    def config(self) -> "AveragerConfig":
        """The averager's settings.

        Raises:
          ValueError: one of them is out of range.
        """
        from net.averaging.averager import AveragerConfig
        from net.averaging.grouping.matchmaking import AssemblyConfig
        from net.averaging.reduction.all_reduce import AllReduceConfig
        from net.wire.compression import Compression

        return AveragerConfig(
            step_timeout_s=self.average_timeout_s,
            assembly=AssemblyConfig(
                window_s=self.average_window_s, request_timeout_s=min(3.0, self.average_window_s / 2)
            ),
            all_reduce=AllReduceConfig(
                sender_timeout_s=self.average_timeout_s / 3,
                timeout_s=self.average_timeout_s,
                compression=Compression(self.average_compression),
            ),
        )


@asynccontextmanager
async def open_trunk_averaging(
    options: AveragingOptions,
    peer: "SwarmPeer",
    trunk: "SharedTrunk",
    device: "Device",
    say: Callable[[str], None],
    *,
    max_step: int,
) -> "AsyncIterator[TrunkAveraging | None]":
    """This process's averaging, caught up with others that are ahead; None if there is to be none.

    Args:
      say: tells the user.
      max_step: where the run ends.

    Raises:
      ValueError: a setting is out of range.
    """
    if not options.average_every:
        yield None
        return
    from dmoe_jax.optim.tree_vectors import layout_of
    from dmoe_jax.optim.trunk_averaging import TrunkAveraging, trunk_source
    from net.averaging.averager import open_averager
    from net.averaging.grouping.group import Role

    layout = layout_of(trunk.params)
    async with open_averager(
        peer.rpc,
        peer.dht,
        prefix=options.average_name,
        size=layout.size,
        grid=MoshpitGrid(side=options.average_side, dims=options.average_dims),
        rng=random.SystemRandom(),
        schema=layout.schema,
        role=Role.CLIENT if options.average_client else None,
        state=trunk_source(trunk),
        config=options.config(),
    ) as averager:
        averaging = TrunkAveraging(trunk, averager, layout, device, max_step=max_step)
        if await averaging.catch_up(min_lead=options.average_every):
            say(f"took the state of a process that was ahead: step {trunk.step}")
        elif averaging.why_not:
            say(f"{averaging.why_not}; training alone until then")
        yield averaging
