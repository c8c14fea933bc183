"""The rows of the paper's averaging table (Ryabinin et al., NeurIPS 2021), the paper's rounds, and ours beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dmoe_net.averaging.grouping.group_key import MoshpitGrid

MethodName = Literal["all_reduce", "gossip", "push_sum", "push_sum_weighted", "random_groups", "moshpit"]

TITLES: Mapping[MethodName, str] = {
    "all_reduce": "All-Reduce",
    "gossip": "Gossip",
    "push_sum": "PushSum",
    "push_sum_weighted": "True PushSum",
    "random_groups": "Random groups",
    "moshpit": "Moshpit",
}
"""Names of the methods for readers, in the order of the table. The fourth is not in the paper; see README.md."""

TARGETS: Mapping[str, float] = {"1e-9": 1e-9, "1e-4": 1e-4}
"""Variances over the peers at which averaging counts as done."""

TOLERANCE = 0.5
"""Rounds by which ours may differ from the paper's."""

BARRED: tuple[MethodName, ...] = ("random_groups", "moshpit")
"""Methods to which the tolerance applies, under "exclude". Deterministic ones agree anyway or differ by definition."""

_MIXING_TOLERANCE = 0.05
"""Parts of the formula by which random groups may mix otherwise."""

_MIN_MIXING_GROUPS = 8
"""Below this many groups what a round leaves varies so much that the mean over 200 runs is itself not known to 5 %."""

_MAX_CELLS = 2**22
"""All cells of each restart are shuffled to seat its peers."""


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

    def __post_init__(self) -> None:
        if self.grid.num_cells > _MAX_CELLS:
            raise ValueError(f"simulated grids have at most {_MAX_CELLS} cells, got {self.grid_text}")
        if not 2 <= self.num_peers <= self.grid.num_cells:
            seats = self.grid.num_cells
            raise ValueError(f"the grid {self.grid_text} seats from 2 to {seats} peers, got {self.num_peers}")
        if not 0 <= self.failure < 1:
            raise ValueError(f"the probability of failure is from 0 to below 1, got {self.failure:g}")

    @property
    def grid_text(self) -> str:
        """Side and axes: 32^2."""
        return f"{self.grid.side}^{self.grid.dims}"

    @property
    def failure_text(self) -> str:
        """Probability of failure, and the failure rule where it is not the published one."""
        return f"{self.failure:g}" + (", groups skip" if self.failure_rule == "group_skips" else "")

    def __str__(self) -> str:
        return f"{self.num_peers} peers on {self.grid_text}, p = {self.failure_text}"


SQUARE, CUBE = MoshpitGrid(side=32, dims=2), MoshpitGrid(side=8, dims=3)
FAILURES = (0.0, 0.001, 0.005, 0.01)

TABLE = (
    *(Setting(num_peers=n, grid=SQUARE, failure=p) for n in (512, 768, 900, 1024) for p in FAILURES),
    *(Setting(num_peers=512, grid=CUBE, failure=p) for p in FAILURES),
    *(Setting(num_peers=1024, grid=SQUARE, failure=p, failure_rule="group_skips") for p in FAILURES[1:]),
)
"""The published table, the cube that its simulator also runs, and the rule of the simulator's first version."""

Rounds = tuple[float, float | None]
"""Mean rounds to 1e-9, and to 1e-4 where known."""

# Rows to 900: the output stored in the published notebook, which stops there. 1024: the published simulator, run.
_ORDER: tuple[MethodName, ...] = ("all_reduce", "gossip", "push_sum", "random_groups", "moshpit")
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
_GROUP_SKIPS: dict[tuple[int, float], Rounds] = {
    (1024, 0.001): (5.7, None),
    (1024, 0.005): (11.3, None),
    (1024, 0.01): (17.1, None),
}


def paper_rounds(setting: Setting) -> dict[MethodName, Rounds]:
    """Return the rounds of the paper's simulators in this setting, by method; empty if it is not one of theirs."""
    row = (setting.num_peers, setting.failure)
    if setting.grid != SQUARE:
        return {}
    if setting.failure_rule == "group_skips":
        return {"moshpit": _GROUP_SKIPS[row]} if row in _GROUP_SKIPS else {}
    known = zip(_ORDER, _EXCLUDE.get(row, ()), strict=False)
    return {method: rounds for method, rounds in known if rounds is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """Random groups of peers who are all there, beside the theory."""

    num_peers: int
    """N."""
    group_size: int
    """Peers of a group."""
    runs: int
    """Runs over which means were taken."""
    factor: float
    """Share of the variance that one round leaves by the formula."""
    factor_ratio: float
    """Share of the variance that a round leaves, mean over all rounds of all runs, over the formula's factor."""
    kept: Sequence[float]
    """Mean over the runs of what 0, 1, 2, ... rounds leave of the variance; the formula has factor^t."""

    def missed_bars(self) -> list[str]:
        """Return a line if mixing is further from the formula than it may be and there are groups enough to know."""
        is_known = self.num_peers // self.group_size >= _MIN_MIXING_GROUPS
        is_off = is_known and abs(self.factor_ratio - 1) > _MIXING_TOLERANCE
        return [f"mixing of random groups: {self.factor_ratio:.3f} of the formula"] if is_off else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The rounds that the methods needed in one setting."""

    setting: Setting
    """Setting of the swarm."""
    rounds: Mapping[MethodName, Mapping[str, float]]
    """Mean rounds to each target."""
    variances: Mapping[MethodName, Sequence[float]]
    """Mean over the restarts, before the first round and after each."""

    @property
    def paper(self) -> dict[MethodName, Rounds]:
        """The paper's mean rounds in this setting, where it has them."""
        return paper_rounds(self.setting)

    def summary(self) -> dict[str, Any]:
        """Setting and rounds, for JSON."""
        setting = self.setting
        paper = {method: dict(zip(TARGETS, rounds, strict=True)) for method, rounds in self.paper.items()}

        def named(table: Mapping[MethodName, Mapping[str, float | None]]) -> dict[str, dict[str, float | None]]:
            return {
                method: {f"rounds_to_{target}": value for target, value in rounds.items()}
                for method, rounds in table.items()
            }

        return {
            "peers": setting.num_peers,
            "grid": [setting.grid.side, setting.grid.dims],
            "failure": setting.failure,
            "failure_rule": setting.failure_rule.replace("_", "-"),
            "methods": named(self.rounds),
            "paper": named(paper),
        }

    def missed_bars(self) -> list[str]:
        """Methods and targets that are further from the paper than they may be."""
        if self.setting.failure_rule != "exclude":
            return []
        return [
            f"{TITLES[method]} to {target}, {self.setting}: {ours:.2f}, paper {theirs:g}"
            for method in BARRED
            for (target, ours), theirs in zip(self.rounds[method].items(), self.paper.get(method, ()), strict=False)
            if theirs is not None and abs(ours - theirs) > TOLERANCE
        ]
