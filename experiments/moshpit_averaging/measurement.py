"""Simulate the rows of the table one after the other, and set them beside the paper and the theory."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dmoe_jax.runs.report import ReportTable
from dmoe_jax.runs.style import GREY, dress, end_labels
from experiments.bench import Experiment, Run
from experiments.moshpit_averaging.paper import TARGETS, TITLES, MethodName, Rounds, Setting, paper_rounds
from experiments.moshpit_averaging.settings import AveragingSettings
from experiments.moshpit_averaging.simulation import mean_rounds, measure_mixing, simulate
from experiments.panels import series_style
from experiments.results import Result

ROUNDS = 50
"""Rounds after which a restart is given up; it counts as that many."""

BARRED: tuple[MethodName, ...] = ("random_groups", "moshpit")
"""Methods to which the bar applies, under "exclude". Deterministic ones agree anyway or differ by definition."""

TOLERANCE = 0.5
"""Rounds by which these may differ from the paper's."""

_MIXING_TOLERANCE = 0.05
"""Parts of the formula by which random groups may mix otherwise."""
_MIXING_RUNS, _MIXING_ROUNDS = 2048, 3

_FLOOR = 1e-12
"""Least variance drawn: below the targets, and above what float32 rounds away."""
_MOST_ROUNDS = 20
"""Rounds drawn: by then Moshpit and random groups are done, and gossip and PushSum never would be."""

_SUMMARY = (
    "Each peer holds a number of N(0, 1). Mean rounds until the variance over the peers is at most 1e-9 (at most "
    f"1e-4), {ROUNDS} where it never is; in square brackets what the paper's simulators need."
)


def measure(run: Run[AveragingSettings]) -> None:
    """Simulate every row, then random groups beside the formula."""
    settings, started = run.settings, time.perf_counter()
    for row in settings.rows:
        found = simulate(row, restarts=settings.restarts, rounds=ROUNDS, seed=settings.seed)
        methods = {method: mean_rounds(variances) for method, variances in found.items()}
        run.log(
            "setting",
            peers=row.num_peers,
            grid=[row.grid.side, row.grid.dims],
            failure=row.failure,
            failure_rule=row.failure_rule.replace("_", "-"),
            methods=methods,
            variances={method: each.mean(axis=0, dtype=np.float64).tolist() for method, each in found.items()},
            wall_s=time.perf_counter() - started,
        )
        texts = (f"{TITLES[method]} {rounds['rounds_to_1e-9']:.1f}" for method, rounds in methods.items())
        run.say(f"{row}, rounds to 1e-9: {', '.join(texts)}")
    of_a_round, of_all = measure_mixing(runs=_MIXING_RUNS, rounds=_MIXING_ROUNDS, seed=settings.seed)
    ratios = {"mixing_ratio": of_a_round, f"mixing_ratio_of_{_MIXING_ROUNDS}_rounds": of_all}
    run.log("mixing", **ratios, wall_s=time.perf_counter() - started)


def finished(run: Run[AveragingSettings]) -> list[tuple[Setting, Mapping[str, Any]]]:
    """Rows that are done, in order, with their records."""
    return list(zip(run.settings.rows, run.records("setting"), strict=False))


def summarise(run: Run[AveragingSettings]) -> Result | None:
    """Set what was simulated beside the paper; None where no row was finished."""
    rows = finished(run)
    if not rows:
        return None
    last = [*run.records("setting"), *run.records("mixing")][-1]
    facts = {name: last[name] for name in last if name.startswith("mixing_ratio")}
    missed = [text for row, record in rows for text in missed_bars(row, record["methods"])]
    if abs(facts.get("mixing_ratio", 1.0) - 1) > _MIXING_TOLERANCE:
        missed.append(f"mixing of random groups: {facts['mixing_ratio']:.3f} of the formula")
    facts |= {"restarts": run.settings.restarts, "wall_s": last["wall_s"]}
    keys = ("peers", "grid", "failure", "failure_rule", "methods")
    cells = [
        (str(row), *(_cell(record["methods"][method], paper_rounds(row).get(method)) for method in TITLES))
        for row, record in rows
    ]
    return Result(
        title="Rounds of averaging among peers that may be absent",
        summary=_SUMMARY,
        figures={"table": [{key: record[key] for key in keys} for _, record in rows], **facts},
        missed=missed,
        shown={**facts, "missed_bars": "; ".join(missed) or "none"},
        tables=[ReportTable(title="Mean rounds to 1e-9 (to 1e-4)", head=("", *TITLES.values()), rows=cells)],
    )


def missed_bars(row: Setting, methods: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Name the methods and targets whose mean rounds are further from the paper's than they may be."""
    if row.failure_rule != "exclude":
        return []
    missed = []
    for method in BARRED:
        for target, theirs in zip(TARGETS, paper_rounds(row).get(method, ()), strict=False):
            ours = methods[method][f"rounds_to_{target}"]
            if theirs is not None and abs(ours - theirs) > TOLERANCE:
                missed.append(f"{TITLES[method]} to {target}, {row}: {ours:.2f}, paper {theirs:g}")
    return missed


def _cell(ours: Mapping[str, float], theirs: Rounds | None) -> str:
    """Our rounds, and in brackets the paper's."""
    text = f"{ours['rounds_to_1e-9']:.1f} ({ours['rounds_to_1e-4']:.1f})"
    if theirs is None:
        return text
    return text + (f" [{theirs[0]:.1f}]" if theirs[1] is None else f" [{theirs[0]:.1f} ({theirs[1]:.1f})]")


def draw(run: Run[AveragingSettings], _: Result) -> Figure:
    """Draw the mean variance after each round in one row, and rings where the paper's means of rounds lie."""
    # Methods differ where peers fail, but not so often that all do badly.
    published = [(row, record) for row, record in finished(run) if row.failure_rule == "exclude"]
    row, record = max(published, key=lambda each: (each[0].num_peers, -abs(each[0].failure - 0.005)))
    figure = Figure(figsize=(8.0, 4.4), layout="constrained")
    axes = figure.subplots()
    labels = []
    for place, (method, title) in enumerate(TITLES.items()):
        colour, _ = series_style(place)
        drawn = [max(value, _FLOOR) for value in record["variances"][method][: _MOST_ROUNDS + 1]]
        drawn = drawn[: drawn.index(_FLOOR) + 1] if _FLOOR in drawn else drawn
        axes.plot(range(len(drawn)), drawn, color=colour, linewidth=1.6)
        for target, theirs in zip(TARGETS, paper_rounds(row).get(method, ()), strict=False):
            if theirs is not None and theirs <= _MOST_ROUNDS:
                axes.plot(theirs, float(target), "o", mfc="white", mec=colour, markersize=6, zorder=3)
        labels.append((drawn[-1], title, colour))
    for target in TARGETS:
        axes.axhline(float(target), color=GREY, linewidth=0.9, linestyle=(0, (5, 3)), zorder=1)
    axes.set_yscale("log")
    axes.set_ylim(_FLOOR, 3)
    axes.set_xlim(0, _MOST_ROUNDS)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    dress(axes, f"Variance: {row}", "round (rings: the paper's mean rounds to the dashed lines)")
    end_labels(axes, labels)
    return figure


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Variance over rounds for each method, with rings where the paper's mean rounds lie",
)
