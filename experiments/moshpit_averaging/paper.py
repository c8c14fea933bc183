"""The rows of the paper's averaging table (Ryabinin et al., NeurIPS 2021), and the rounds of its simulators."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dmoe_net import MoshpitGrid

MethodName = Literal["all_reduce", "gossip", "push_sum", "random_groups", "moshpit"]

TITLES: Mapping[MethodName, str] = {
    "all_reduce": "All-Reduce",
    "gossip": "Gossip",
    "push_sum": "PushSum",
    "random_groups": "Random groups",
    "moshpit": "Moshpit",
}
"""Names of the methods for readers, in the order of the table."""

TARGETS = ("1e-9", "1e-4")
"""Variances over the peers at which averaging counts as done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row of the table."""

    num_peers: int
    """N; seated at random on cells of the grid."""
    grid: MoshpitGrid
    """Moshpit's; its side is the size of the random groups, too."""
    failure: float
    """Probability that a peer is absent from a round."""
    failure_rule: Literal["exclude", "group_skips"] = "exclude"
    """Rule for groups that lack a peer: average without it, or skip the round."""

    def __str__(self) -> str:
        rule = ", groups skip" if self.failure_rule == "group_skips" else ""
        return f"{self.num_peers} peers on {self.grid.side}^{self.grid.dims}, p = {self.failure:g}{rule}"


SQUARE, CUBE = MoshpitGrid(side=32, dims=2), MoshpitGrid(side=8, dims=3)
FAILURES = (0.0, 0.001, 0.005, 0.01)

TABLE = (
    *(Setting(num_peers=n, grid=SQUARE, failure=p) for n in (512, 768, 900, 1024) for p in FAILURES),
    *(Setting(num_peers=512, grid=CUBE, failure=p) for p in FAILURES),
    *(Setting(num_peers=1024, grid=SQUARE, failure=p, failure_rule="group_skips") for p in FAILURES[1:]),
)
"""The published table, the cube that its simulator also runs, and the rule of the simulator's first version."""

Rounds = tuple[float, float | None]
"""Mean rounds to each of `TARGETS`; the second is not known everywhere."""

# Rows to 900: the output stored in the published notebook, which stops there. 1024: the published simulator, run.
_EXCLUDE: dict[tuple[int, float], tuple[Rounds | None, ...]] = {
    (512, 0.0): ((1.0, 1.0), (50, 50), (47.6, 15.6), (6.1, 3.0), (8.2, 3.6)),
    (512, 0.001): ((1.6, 1.6), (50, 50), (47.6, 15.6), (6.3, 3.0), (8.5, 3.3)),
    (512, 0.005): ((10.9, 10.9), (50, 50), (47.8, 15.6), (6.3, 3.0), (8.8, 3.9)),
    (512, 0.01): ((41.7, 41.7), (50, 50), (47.8, 15.6), (6.6, 3.0), (8.8, 3.9)),
    (768, 0.0): ((1.0, 1.0), (50, 50), (43.2, 13.8), (6.2, 3.0), (6.0, 3.0)),
    (768, 0.001): ((1.8, 1.8), (50, 50), (43.2, 13.8), (6.5, 3.0), (6.0, 3.0)),
    (768, 0.005): ((28.7, 28.7), (50, 50), (43.2, 14.1), (6.6, 3.0), (6.6, 3.0)),
    (768, 0.01): ((50, 50), (50, 50), (43.9, 14.2), (7.0, 3.0), (6.9, 3.0)),
    (900, 0.0): ((1.0, 1.0), (50, 50), (45.0, 14.7), (6.4, 3.0), (5.0, 2.9)),
    (900, 0.001): ((1.8, 1.8), (50, 50), (45.0, 14.7), (6.3, 3.0), (5.1, 2.9)),
    (900, 0.005): ((50, 50), (50, 50), (45.2, 14.7), (6.7, 3.0), (5.9, 3.1)),
    (900, 0.01): ((50, 50), (50, 50), (45.6, 14.9), (7.0, 3.1), (6.5, 3.0)),
    (1024, 0.0): ((1.0, 1.0), (50, 50), (49.0, 16.2), (6.2, 3.0), (2.0, 2.0)),
    (1024, 0.001): ((2.0, 2.0), None, (49.0, 16.3), (6.5, 3.0), (3.4, 2.2)),
    (1024, 0.005): ((42.6, 42.6), None, (49.5, 16.3), (6.7, 3.0), (5.1, 3.0)),
    (1024, 0.01): ((50, 50), None, (49.5, 16.3), (6.9, 3.1), (5.7, 3.0)),
}
_GROUP_SKIPS = {0.001: 5.7, 0.005: 11.3, 0.01: 17.1}
"""Rounds of Moshpit to 1e-9 among 1024 peers."""


def paper_rounds(setting: Setting) -> dict[MethodName, Rounds]:
    """Return the rounds of the paper's simulators in this row, by method; empty if it is not one of theirs."""
    if setting.grid != SQUARE:
        return {}
    if setting.failure_rule == "group_skips":
        return {"moshpit": (_GROUP_SKIPS[setting.failure], None)}
    known = zip(TITLES, _EXCLUDE[setting.num_peers, setting.failure], strict=True)
    return {method: rounds for method, rounds in known if rounds is not None}
