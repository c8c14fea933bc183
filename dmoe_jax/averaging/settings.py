"""Settings of a peer that averages, and records of its rounds."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from dmoe_jax.optim.compression import ErrorFeedback
from dmoe_net.averaging.config import AveragerConfig
from dmoe_net.averaging.grouping.group import Role
from dmoe_net.averaging.grouping.group_key import MoshpitGrid
from dmoe_net.averaging.speeds import UNKNOWN, Speeds
from dmoe_net.identity import PeerId
from dmoe_net.meaning import check_meaning
from dmoe_net.wire.compression import Compression

RoleName = Literal["auto", "node", "client"]
CompressionName = Literal["none", "float16", "bfloat16", "blockwise8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeAveragerConfig:
    """Settings of a peer that averages; side, dims and share are the same for all peers."""

    side: int = 4
    """Peers in a full group."""
    dims: int = 1
    """Axes of the grid of peers: with 1 all are one group, with 2 and side M there are M groups of M, others in each
    round."""
    window_s: float = 5.0
    """Seconds that a group waits for more members; a full one begins at once."""
    timeout_s: float = 30.0
    """Longest that a round takes, seconds."""
    compression: CompressionName = "none"
    """Form in which numbers travel."""
    sparse: ErrorFeedback | None = None
    """Compression of an optimiser whose `moshpit_average` was made with `compress`, which decides: given here, it must
    be the same. The largest of each block travel in two or four bits, by an all-gather, in place of `compression`."""
    share: float = 1.0
    """Share of the parameters, drawn anew for each group, that is averaged; the rest stays as it is (SPARTA). Only for
    an optimiser that averages parameters."""
    role: RoleName = "auto"
    """A "client" is never called by others, who reduce its part, too. "auto": a client where nobody can call, else a
    node."""
    speeds: Speeds = UNKNOWN
    """Bytes a second that this machine sends, receives and adds up, for the share that it reduces. Tell them
    where lines differ: averages do not show whose line is slow. What they do not say is taken from the last state that
    was downloaded."""
    meaning: str = ""
    """Meaning of the model's numbers beyond their names and shapes, as `Model.meaning`: peers of another one are not
    met, their state is not taken, and both are told."""

    def __post_init__(self) -> None:
        if self.role not in get_args(RoleName):
            raise ValueError(f"role is one of {', '.join(get_args(RoleName))}, got {self.role!r}")
        if self.side < 2:
            raise ValueError(f"side must be at least 2, got {self.side}: a group of one peer averages with nobody")
        for name in ("window_s", "timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a positive number of seconds, got {getattr(self, name)}")
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {self.share}")
        check_meaning(self.meaning)
        # The parts check the rest: a wrong value is refused here, and not when it is used.
        self.grid()
        self.averager()

    def grid(self) -> MoshpitGrid:
        """The grid of peers."""
        return MoshpitGrid(side=self.side, dims=self.dims)

    def averager(self) -> AveragerConfig:
        """Settings of the averager of vectors."""
        return AveragerConfig.of(
            window_s=self.window_s,
            timeout_s=self.timeout_s,
            compression=Compression(self.compression),
            role=None if self.role == "auto" else Role(self.role),
            speeds=self.speeds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The end of one round."""

    number: int
    """Rounds of this peer before it."""
    fragment: int = 0
    """Number of the part of the model, where these are averaged one by one (`streaming_diloco`)."""
    peers: int = 1
    """Members of the group, this peer included."""
    received: float = 0.0
    """Share of the numbers that came back averaged, 0 to 1; the rest stay this peer's own."""
    took_s: float
    """Seconds from its beginning to its end."""
    why_lost: str
    """Reason for there being no average; empty if there is one."""
    moved_bytes: float = 0.0
    """Bytes that this peer sent: with sparse payloads just those, else as of float32 in the all-reduce."""
    lost: Mapping[PeerId, str] = field(default_factory=dict)
    """Members of the group that the average goes without, and why."""
    group: str = ""
    """Mark of the group, the same for all of its members, see `mark_of`; empty for a lost round."""


def mark_of(peers: Iterable[PeerId]) -> str:
    """Return eight hexadecimal digits that tell a group of peers from others, whatever their order."""
    return hashlib.sha256(b"".join(sorted(peer.raw for peer in peers))).hexdigest()[:8]


@dataclass(slots=True, kw_only=True)
class AveragingTotals:
    """Counts of the rounds so far."""

    done: int = 0
    """Averages that were received and given to the optimiser."""
    missed: int = 0
    """Rounds in which nobody was met, the network failed, or this peer was held back (see `TreeAverager.why_not`)."""
    rejected: int = 0
    """Rounds in which the average, or what this peer would have sent, was not finite or of no valid weight."""
    peers_met: int = 0
    """Other members of the groups of all rounds that were done, added up."""
    moved_bytes: float = 0.0
    """Sent in the rounds that were done; see `Round.moved_bytes`."""
    piece_bytes: int = 0
    """Bytes of the largest vector that this process took part with: of a model over several processes, those of its own
    piece."""
    peers_lost: Counter[str] = field(default_factory=Counter)
    """Members of these groups that an average went without, by reason."""
    states_taken: int = 0
    """Whole states taken from others."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of lost rounds by reason."""
    last: Round | None = None
    """The last round that was done."""

    def facts(self) -> dict[str, int | str]:
        """Facts for the swarm: averages so far, and the mark and the size of the last group."""
        met: dict[str, int | str] = {} if self.last is None else {"met": self.last.group, "met_peers": self.last.peers}
        return {"averages": self.done, **met}

    def headline(self) -> dict[str, Any]:
        """The totals by the names that reports give them."""
        return {
            "averages_done": self.done,
            "averages_missed": self.missed,
            "averages_rejected": self.rejected,
            "mean_group_size": 1 + self.peers_met / self.done if self.done else None,
            "states_taken": self.states_taken,
            "averaged_mb_sent": self.moved_bytes / 1e6,
            "averaging_peers_lost": self.peers_lost.total(),
        }
