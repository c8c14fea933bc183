"""Simulate the rows that are asked for, one after the other, and set them beside the paper and the theory."""

import time
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE
from rich.progress import track
from rich.table import Table

from dmoe_jax.runs.report import ReportTable
from experiments.bench import Experiment, Run
from experiments.moshpit_averaging.figure import averaging_figure
from experiments.moshpit_averaging.paper import TITLES, Mixing, Rounds, Row
from experiments.moshpit_averaging.settings import AveragingSettings
from experiments.moshpit_averaging.simulation import measure_mixing, row_of, simulate
from experiments.results import Result

_SUMMARY = (
    "Each peer holds a number of N(0, 1). Mean rounds until the variance over the peers is at most 1e-9 (at most "
    "1e-4); in square brackets what the paper's simulators need."
)
_MIXING_ROUNDS, _MIXING_NUMBERS = 3, 2**21
"""Rounds beside the formula, and the numbers averaged in all runs of them: 2048 runs of 1024 peers; at least 200."""


def measure(run: Run[AveragingSettings]) -> None:
    """Simulate every row, then random groups beside the formula, at the size of the last row."""
    settings, rows = run.settings, run.settings.rows()
    started = time.perf_counter()
    for setting in track(rows, "averaging", console=run.console, transient=True):
        variances = simulate(setting, restarts=settings.num_restarts, rounds=settings.rounds, seed=settings.seed)
        row = row_of(setting, variances)
        numbers = {"rounds": row.rounds, "variances": row.variances}
        run.log("setting", **row.summary(), **numbers, wall_s=time.perf_counter() - started)
    num_peers, group_size = rows[-1].num_peers, rows[-1].grid.side
    if num_peers >= 2 * group_size:  # one group would be exact at once
        runs = max(200, min(2048, _MIXING_NUMBERS // num_peers))
        mixing = measure_mixing(num_peers, group_size, runs=runs, rounds=_MIXING_ROUNDS, seed=settings.seed)
        run.log("mixing", mixing=mixing, wall_s=time.perf_counter() - started)


def summarise(run: Run[AveragingSettings]) -> Result | None:
    """Set what was simulated beside the paper; None where no row was finished."""
    rows, mixing = finished(run)
    if not rows:
        return None
    missed = [text for row in rows for text in row.missed_bars()] + (mixing.missed_bars() if mixing else [])
    facts = {
        "mixing_ratio": None if mixing is None else mixing.factor_ratio,
        "restarts": run.settings.num_restarts,
        "rounds": run.settings.rounds,
        "wall_s": [*run.records("setting"), *run.records("mixing")][-1]["wall_s"],
    }
    # The paper's rounds beside ours would be too wide for a terminal.
    rounds = _rounds_table(rows, with_paper=False)
    printed = Table(*rounds.head, title=rounds.title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for cells in rounds.rows:
        printed.add_row(*map(str, cells))
    return Result(
        title="Rounds of averaging among peers that may be absent",
        summary=_SUMMARY,
        figures={
            **(rows[0].summary() if len(rows) == 1 else {"table": [row.summary() for row in rows]}),
            **facts,
        },
        missed=missed,
        shown={**facts, "missed_bars": "; ".join(missed) or "none"},
        printed=[
            printed,
            *(f"{name}: {value}" for name, value in facts.items()),
            *(f"missed: {text}" for text in missed),
        ],
        tables=[_rounds_table(rows, with_paper=True), *([_mixing_table(mixing)] if mixing is not None else [])],
    )


def finished(run: Run[AveragingSettings]) -> tuple[list[Row], Mixing | None]:
    """Read from the run's records the rows that are done, in order, and random groups beside the formula."""
    rows = [
        Row(setting=setting, rounds=record["rounds"], variances=record["variances"])
        for setting, record in zip(run.settings.rows(), run.records("setting"), strict=False)
    ]
    return rows, next((Mixing(**record["mixing"]) for record in run.records("mixing")), None)


def _rounds_table(rows: Sequence[Row], *, with_paper: bool) -> ReportTable:
    cells = []
    for row in rows:
        setting, paper = row.setting, row.paper if with_paper else {}
        rounds = [_cell(row.rounds[method], paper.get(method)) for method in TITLES]
        cells.append((str(setting.num_peers), setting.grid_text, setting.failure_text, *rounds))
    return ReportTable(title="Mean rounds to 1e-9 (to 1e-4)", head=("peers", "grid", "p", *TITLES.values()), rows=cells)


def _cell(ours: Mapping[str, float], theirs: Rounds | None) -> str:
    """Our rounds, and in brackets the paper's."""
    text = f"{ours['1e-9']:.1f} ({ours['1e-4']:.1f})"
    if theirs is None:
        return text
    return text + (f" [{theirs[0]:.1f}]" if theirs[1] is None else f" [{theirs[0]:.1f} ({theirs[1]:.1f})]")


def _mixing_table(mixing: Mixing) -> ReportTable:
    formula = [mixing.factor**number for number in range(len(mixing.kept))]
    return ReportTable(
        title="Random groups beside the theory",
        head=("rounds", "variance left", "formula", "ratio"),
        rows=[(t, kept, formula[t], kept / formula[t]) for t, kept in enumerate(mixing.kept)],
        note=f"{mixing.num_peers} peers in groups of {mixing.group_size}, all present, mean over {mixing.runs} runs; "
        "the formula is ((r - 1)/N + r/N^2)^T.",
    )


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=lambda run, _: averaging_figure(*finished(run)),
    figure_text="Variance over rounds for each method, and rounds to 1e-9 beside the paper's",
)
