"""Settings of this experiment's command line."""

import math
from dataclasses import dataclass
from typing import Literal

from dmoe_net.averaging.grouping.group_key import MoshpitGrid
from experiments.bench import Settings
from experiments.moshpit_averaging.paper import SQUARE, TABLE, Setting

_QUICK_PEERS = (512, 1024)


@dataclass(frozen=True, kw_only=True)
class AveragingSettings(Settings):
    """Count the rounds that averaging takes among peers that may be absent, with Moshpit and what it is compared with.

    Without --peers, --grid and --failure: the paper's whole table.
    """

    quick: bool = False
    """Only the rows of 512 and 1024 peers under "exclude" of the whole table; 10 restarts."""
    peers: int | None = None
    """Number of peers. Default: a full grid."""
    grid: str | None = None
    """Moshpit's grid as side,axes; its side is the size of random groups, too. Default: 32,2, or a larger square."""
    failure: float | None = None
    """Probability that a peer is absent from a round. Default: 0."""
    failure_rule: Literal["exclude", "group-skips"] | None = None
    """Rule for groups that lack a peer: average without it, or skip the round. Default: exclude; in the whole
    table, some rows under each."""
    restarts: int = 100
    """Independent repetitions, the mean over which is reported. The paper has 10."""
    rounds: int = 50
    """Rounds after which a repetition is given up; it counts as that many."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "restarts", "rounds")
        self.require_at_least(2, "peers")
        self.rows()

    @property
    def num_restarts(self) -> int:
        """Repetitions of each row."""
        return min(self.restarts, 10) if self.quick else self.restarts

    def rows(self) -> tuple[Setting, ...]:
        """Return the settings that are to be simulated.

        Raises:
          ValueError: naming the flag whose value cannot be.
        """
        if self.peers is None and self.grid is None and self.failure is None:
            wanted = {None: ("exclude", "group_skips"), "exclude": ("exclude",), "group-skips": ("group_skips",)}
            rows = tuple(row for row in TABLE if row.failure_rule in wanted[self.failure_rule])
            if not self.quick:
                return rows
            quick = (row for row in rows if row.num_peers in _QUICK_PEERS and row.grid == SQUARE)
            return tuple(row for row in quick if self.failure_rule or row.failure_rule == "exclude")
        grid = _default_grid(self.peers) if self.grid is None else _grid(self.grid)
        return (
            Setting(
                num_peers=grid.num_cells if self.peers is None else self.peers,
                grid=grid,
                failure=self.failure or 0.0,
                failure_rule="group_skips" if self.failure_rule == "group-skips" else "exclude",
            ),
        )


def _grid(text: str) -> MoshpitGrid:
    try:
        side, dims = (int(word) for word in text.split(","))
    except ValueError as error:
        raise ValueError(f"--grid is side,axes such as 32,2, got {text!r}") from error
    # Before the power is taken: it could have millions of digits.
    if not (1 <= side <= 2**31 and 1 <= dims <= 31):
        raise ValueError(f"--grid has sides from 1 and from 1 to 31 axes, got {text}")
    return MoshpitGrid(side=side, dims=dims)


def _default_grid(num_peers: int | None) -> MoshpitGrid:
    """The paper's, or for more peers the smallest square that seats them."""
    if num_peers is None or num_peers <= SQUARE.num_cells:
        return SQUARE
    return MoshpitGrid(side=math.isqrt(num_peers - 1) + 1, dims=2)
