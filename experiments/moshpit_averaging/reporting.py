"""What a run came to, as records, tables, one JSON object and a report with its figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from dmoe_jax.runs.report import ReportTable, write_report
from dmoe_jax.runs.run_folder import FIGURE, RunFolder
from experiments.moshpit_averaging.figure import averaging_figure
from experiments.moshpit_averaging.paper import (
    BARRED,
    TARGETS,
    TITLES,
    TOLERANCE,
    MethodName,
    Rounds,
    Setting,
    paper_rounds,
)
from experiments.moshpit_averaging.simulation import Mixing, mean_rounds, measure_mixing

_TITLE = "Rounds of averaging among peers that may be absent"
_SUMMARY = (
    "Each peer holds a number of N(0, 1). Mean rounds until the variance over the peers is at most 1e-9 (at most "
    "1e-4); in square brackets what the paper's simulators need."
)
_FIGURE_TEXT = "Variance over rounds for each method, and rounds to 1e-9 beside the paper's"

MIXING_ROUNDS, MIXING_TOLERANCE = 3, 0.05
_MIXING_NUMBERS = 2**21
"""Numbers averaged beside the formula: 2048 runs of 1024 peers; at least 200 runs."""
_MIN_MIXING_GROUPS = 8
"""Below this many groups what a round leaves varies so much that the mean over 200 runs is itself not known to 5 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the methods needed in one setting."""

    setting: Setting
    """Which swarm."""
    rounds: Mapping[MethodName, Mapping[str, float]]
    """Mean rounds to each target."""
    variances: Mapping[MethodName, Sequence[float]]
    """Mean over the restarts, before the first round and after each."""
    paper: Mapping[MethodName, Rounds]
    """The paper's mean rounds to 1e-9 and to 1e-4, where it has them."""

    def record(self) -> dict[str, Any]:
        """For the metrics."""
        return {**self.summary(), "variances": dict(self.variances)}

    def summary(self) -> dict[str, Any]:
        """Setting and rounds, for JSON."""
        return {
            "peers": self.setting.num_peers,
            "grid": [self.setting.grid.side, self.setting.grid.dims],
            "failure": self.setting.failure,
            "failure_rule": self.setting.failure_rule.replace("_", "-"),
            "methods": {
                method: {f"rounds_to_{target}": value for target, value in of_method.items()}
                for method, of_method in self.rounds.items()
            },
            "paper": {
                method: {f"rounds_to_{target}": value for target, value in zip(TARGETS, of_method, strict=True)}
                for method, of_method in self.paper.items()
            },
        }

    def missed_bars(self) -> list[str]:
        """Methods and targets that are further from the paper than they may be."""
        if self.setting.failure_rule != "exclude":
            return []
        pairs = [
            (method, target, self.rounds[method][target], theirs)
            for method in BARRED
            for target, theirs in zip(TARGETS, self.paper.get(method, ()), strict=False)
            if theirs is not None
        ]
        return [
            f"{TITLES[method]} to {target}, {self.setting}: {ours:.2f}, paper {theirs:g}"
            for method, target, ours, theirs in pairs
            if abs(ours - theirs) > TOLERANCE
        ]


def result_of(setting: Setting, variances: Mapping[MethodName, np.ndarray]) -> Result:
    """From [restarts, rounds + 1] for each method."""
    return Result(
        setting=setting,
        rounds={method: mean_rounds(found) for method, found in variances.items()},
        variances={
            method: tuple(float(value) for value in found.mean(axis=0, dtype=np.float64))
            for method, found in variances.items()
        },
        paper=paper_rounds(setting),
    )


def mixing_of(setting: Setting, *, seed: int) -> Mixing | None:
    """Random groups beside the formula at this size; None where there is one group, which is exact at once."""
    if setting.num_peers < 2 * setting.grid.side:
        return None
    runs = max(200, min(2048, _MIXING_NUMBERS // setting.num_peers))
    return measure_mixing(setting.num_peers, setting.grid.side, runs=runs, rounds=MIXING_ROUNDS, seed=seed)


def headline_of(
    results: Sequence[Result], mixing: Mixing | None, *, wall_s: float, restarts: int, rounds: int
) -> dict[str, Any]:
    """The JSON object: of one setting flat, of several under "table"."""
    missed = [text for result in results for text in result.missed_bars()]
    last = results[-1].setting
    is_known = last.num_peers // last.grid.side >= _MIN_MIXING_GROUPS
    if mixing is not None and is_known and abs(mixing.factor_ratio - 1) > MIXING_TOLERANCE:
        missed.append(f"mixing of random groups: {mixing.factor_ratio:.3f} of the formula")
    return {
        **(results[0].summary() if len(results) == 1 else {"table": [result.summary() for result in results]}),
        "mixing_ratio": None if mixing is None else mixing.factor_ratio,
        "restarts": restarts,
        "rounds": rounds,
        "wall_s": wall_s,
        "missed_bars": missed,
    }


def console_table(results: Sequence[Result]) -> Table:
    """Rounds for a terminal; the report has the paper's beside them."""
    table = Table(title="Mean rounds to 1e-9 (to 1e-4)", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("peers", no_wrap=True)
    table.add_column("p", no_wrap=True)
    for name in TITLES.values():
        table.add_column(name.replace("-", "- "), overflow="fold")
    for result in results:
        setting, cells = result.setting, [_cell(result.rounds[method], None) for method in TITLES]
        failure = f"{setting.failure:g}" + (" skips" if setting.failure_rule == "group_skips" else "")
        table.add_row(f"{setting.num_peers} on {setting.grid_text}", failure, *cells)
    return table


def write(folder: RunFolder, results: Sequence[Result], mixing: Mixing | None, headline: Mapping[str, Any]) -> None:
    """Draw figure.png and write report.md."""
    averaging_figure(results, mixing, folder.path / FIGURE)
    shown = {"restarts": headline["restarts"], "wall_s": headline["wall_s"]}
    if mixing is not None:
        shown["random_groups_over_formula"] = mixing.factor_ratio
    shown["missed_bars"] = "; ".join(headline["missed_bars"]) or "none"
    tables = [ReportTable(title="Rounds", head=_head(), rows=[_row(result) for result in results])]
    if mixing is not None:
        last = results[-1].setting
        rows = [(t, kept, mixing.factor**t, kept / mixing.factor**t) for t, kept in enumerate(mixing.kept)]
        tables.append(
            ReportTable(
                title="Random groups beside the theory",
                head=("rounds", "variance left", "formula", "ratio"),
                rows=rows,
                note=f"{last.num_peers} peers in groups of {last.grid.side}, all present, mean over {mixing.runs} "
                "runs; the formula is ((r - 1)/N + r/N^2)^T.",
            )
        )
    write_report(folder, shown, title=_TITLE, summary=_SUMMARY, figure_text=_FIGURE_TEXT, tables=tables)


def _head() -> list[str]:
    return ["peers", "grid", "p", *TITLES.values()]


def _row(result: Result) -> list[str]:
    setting = result.setting
    failure = f"{setting.failure:g}" + (", groups skip" if setting.failure_rule == "group_skips" else "")
    cells = [_cell(result.rounds[method], result.paper.get(method)) for method in TITLES]
    return [str(setting.num_peers), setting.grid_text, failure, *cells]


def _cell(ours: Mapping[str, float], theirs: Rounds | None) -> str:
    """Ours, and in brackets the paper's."""
    text = f"{ours['1e-9']:.1f} ({ours['1e-4']:.1f})"
    if theirs is None:
        return text
    return text + (f" [{theirs[0]:.1f}]" if theirs[1] is None else f" [{theirs[0]:.1f} ({theirs[1]:.1f})]")
