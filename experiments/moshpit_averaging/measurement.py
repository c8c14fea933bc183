"""Simulate the rows that are asked for, one after the other, and set them beside the paper and the theory."""

import time
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE
from rich.progress import Progress
from rich.table import Table

from dmoe_jax.runs.report import ReportTable
from experiments.bench import Experiment, Run
from experiments.moshpit_averaging.figure import averaging_figure
from experiments.moshpit_averaging.paper import TITLES, Mixing, Rounds, Row
from experiments.moshpit_averaging.settings import AveragingSettings
from experiments.moshpit_averaging.simulation import mixing_of, row_of, simulate
from experiments.results import Result

_SUMMARY = (
    "Each peer holds a number of N(0, 1). Mean rounds until the variance over the peers is at most 1e-9 (at most "
    "1e-4); in square brackets what the paper's simulators need."
)


def measure(run: Run[AveragingSettings]) -> None:
    """Simulate every row, then random groups beside the formula, at the size of the last row."""
    settings, rows = run.settings, run.settings.rows()
    started = time.perf_counter()
    with Progress(console=run.console, transient=True) as progress:
        task = progress.add_task("averaging", total=len(rows))
        for setting in rows:
            progress.update(task, description=str(setting))
            variances = simulate(
                setting,
                restarts=settings.num_restarts,
                rounds=settings.rounds,
                seed=settings.seed,
                on_progress=lambda share: progress.advance(task, share),
            )
            row = row_of(setting, variances)
            run.log("setting", **row.summary(), variances=row.variances, wall_s=time.perf_counter() - started)
        progress.update(task, description="random groups and the formula")
        if mixing := mixing_of(rows[-1], seed=settings.seed):
            run.log("mixing", **mixing.record(), wall_s=time.perf_counter() - started)


def summarise(run: Run[AveragingSettings]) -> Result | None:
    """Set what was simulated beside the paper; None where no row was finished."""
    rows, mixing, wall_s = read_records(run)
    if not rows:
        return None
    missed = [text for part in (*rows, *([mixing] if mixing else [])) for text in part.missed_bars()]
    ratio = None if mixing is None else mixing.factor_ratio
    restarts = run.settings.num_restarts
    return Result(
        title="Rounds of averaging among peers that may be absent",
        summary=_SUMMARY,
        figures={
            **(rows[0].summary() if len(rows) == 1 else {"table": [row.summary() for row in rows]}),
            "mixing_ratio": ratio,
            "restarts": restarts,
            "rounds": run.settings.rounds,
            "wall_s": wall_s,
        },
        missed=missed,
        shown={
            "restarts": restarts,
            "wall_s": wall_s,
            "random_groups_over_formula": ratio,
            "missed_bars": "; ".join(missed) or "none",
        },
        printed=[
            _console_table(rows),
            *([f"A round of random groups left {ratio:.3f} times the variance that the formula has."] if ratio else []),
            *(f"missed: {text}" for text in missed),
        ],
        tables=_report_tables(rows, mixing),
    )


def read_records(run: Run[AveragingSettings]) -> tuple[list[Row], Mixing | None, float]:
    """The rows that are finished, random groups beside the formula, and the seconds that both took."""
    rows, mixing = run.records("setting"), run.records("mixing")
    # Records are in the order of the settings, so that a row need not be read from its summary.
    done = zip(run.settings.rows(), rows, strict=False)
    ...


def _console_table(rows: Sequence[Row]) -> Table:
    """Rounds for a terminal; the report has the paper's beside them."""
    table = Table(title="Mean rounds to 1e-9 (to 1e-4)", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for name in ("peers", "p"):
        table.add_column(name, no_wrap=True)
    for name in TITLES.values():
        table.add_column(name.replace("-", "- "), overflow="fold")
    for row in rows:
        setting, cells = row.setting, [_cell(row.rounds[method], None) for method in TITLES]
        table.add_row(f"{setting.num_peers} on {setting.grid_text}", setting.failure_text, *cells)
    return table
