"""Simulate the rows that are asked for, one after the other, and set them beside the paper and the theory."""

import time
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
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

_SETTING = ("peers", "grid", "p")
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
            numbers = {"rounds": row.rounds, "variances": row.variances}
            run.log("setting", **row.summary(), **numbers, wall_s=time.perf_counter() - started)
        progress.update(task, description="random groups and the formula")
        if mixing := mixing_of(rows[-1], seed=settings.seed):
            run.log("mixing", mixing=mixing, wall_s=time.perf_counter() - started)


def summarise(run: Run[AveragingSettings]) -> Result | None:
    """Set what was simulated beside the paper; None where no row was finished."""
    rows = finished_rows(run)
    if not rows:
        return None
    mixing = finished_mixing(run)
    wall_s = [*run.records("setting"), *run.records("mixing")][-1]["wall_s"]
    missed = [text for row in rows for text in row.missed_bars()] + (mixing.missed_bars() if mixing else [])
    ratio, restarts = None if mixing is None else mixing.factor_ratio, run.settings.num_restarts
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


def finished_rows(run: Run[AveragingSettings]) -> list[Row]:
    """The rows that are done, in order, read from the run's records."""
    records = run.records("setting")
    return [
        Row(setting=setting, rounds=record["rounds"], variances=record["variances"])
        for setting, record in zip(run.settings.rows(), records, strict=False)
    ]


def finished_mixing(run: Run[AveragingSettings]) -> Mixing | None:
    """Random groups beside the formula, once they were simulated."""
    return next((Mixing(**record["mixing"]) for record in run.records("mixing")), None)


def _console_table(rows: Sequence[Row]) -> Table:
    """Rounds for a terminal; the report has the paper's beside them."""
    table = Table(title="Mean rounds to 1e-9 (to 1e-4)", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for name in (*_SETTING, *(title.replace("-", "- ") for title in TITLES.values())):
        table.add_column(name, overflow="fold", no_wrap=name in _SETTING)
    for row in rows:
        table.add_row(*_cells(row, with_paper=False))
    return table


def _report_tables(rows: Sequence[Row], mixing: Mixing | None) -> list[ReportTable]:
    """All rows with the paper's figures, and random groups beside the theory."""
    cells = [_cells(row, with_paper=True) for row in rows]
    tables = [ReportTable(title="Rounds", head=(*_SETTING, *TITLES.values()), rows=cells)]
    if mixing is not None:
        formula = [mixing.factor**number for number in range(len(mixing.kept))]
        note = f"{mixing.num_peers} peers in groups of {mixing.group_size}, all present, mean over {mixing.runs} runs; "
        tables.append(
            ReportTable(
                title="Random groups beside the theory",
                head=("rounds", "variance left", "formula", "ratio"),
                rows=[(t, kept, formula[t], kept / formula[t]) for t, kept in enumerate(mixing.kept)],
                note=note + "the formula is ((r - 1)/N + r/N^2)^T.",
            )
        )
    return tables


def _cells(row: Row, *, with_paper: bool) -> list[str]:
    """The setting, and the rounds of each method."""
    setting, paper = row.setting, row.paper if with_paper else {}
    rounds = [_cell(row.rounds[method], paper.get(method)) for method in TITLES]
    return [str(setting.num_peers), setting.grid_text, setting.failure_text, *rounds]


def _cell(ours: Mapping[str, float], theirs: Rounds | None) -> str:
    """Our rounds, and in brackets the paper's."""
    text = f"{ours['1e-9']:.1f} ({ours['1e-4']:.1f})"
    if theirs is None:
        return text
    return text + (f" [{theirs[0]:.1f}]" if theirs[1] is None else f" [{theirs[0]:.1f} ({theirs[1]:.1f})]")


def _draw(run: Run[AveragingSettings], result: Result) -> Figure:
    del result
    return averaging_figure(finished_rows(run), finished_mixing(run))


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=_draw,
    figure_text="Variance over rounds for each method, and rounds to 1e-9 beside the paper's",
)
