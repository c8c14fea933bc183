"""Cost of balance, one case after the other, and both parts of the experiment in one report."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dmoe_jax.runs.report import ReportTable
from dmoe_jax.runs.style import FAINT, GREY, dress
from experiments.bench import Experiment, Run
from experiments.compare_routers.runs import finished, router_runs
from experiments.intervals import Interval, t_interval
from experiments.panels import series_style
from experiments.results import Bar, Result
from experiments.routing.settings import BALANCED, BASE, CASES, FIRST, LOSSES, PLAIN, RoutingSettings
from experiments.routing.slow_node import (
    SCENE,
    SLOW_NODE_BARS,
    SLOWDOWN,
    draw_slow_node,
    measure_slow_node,
    slow_figures,
    slow_shares,
)
from experiments.run_summary import balance_lines, summarise_run
from experiments.transformer_xl.side_by_side import train_all
from experiments.transformer_xl.training import open_corpus
from experiments.transformer_xl.trainings import Training

BALANCE_BARS = (
    Bar(name="load_entropy", bound=0.95, comparison=">="),
    Bar(name="idle_experts", bound=0),
    Bar(name="perplexity_cost_low", bound=0),
    Bar(name="over_balancing_loss", bound=0),
)
"""Bars of the balanced router in the first case: entropy of its load over the second half of the runs; experts
without a call in the last tenth; the lower end of the 95 % interval of what balance costs in perplexity, in per
cent, so that above 0 it costs more than the spread of the seeds; and its perplexity over that with a balancing
loss, at the weight whose load is nearest to its own, in per cent."""

SEQ_LEN = 128
"""Words of a sequence of the tiny size."""
QUICK_SEEDS = 3
"""Seeds of the quick run's one case: fewer have no spread."""


class Outcome(NamedTuple):
    """One run.

    Attributes:
      perplexity: validation, at the end.
      entropy: of the load over the second half of the run, mean over windows and layers.
      idle: experts of all layers without a sample in the last window.
    """

    perplexity: float
    entropy: float
    idle: float


Outcomes = Mapping[str, Mapping[int, Outcome]]
"""Router -> seed -> a finished run; of one case."""


def case_trainings(run: Run[RoutingSettings], name: str) -> list[Training]:
    """The runs of a case: all routers with one seed before the next seed, each in a folder of its own."""
    settings, case = run.settings, CASES[name]
    shared: dict[str, Any] = {"data": settings.data, "resume": settings.resume, **BASE, **case.changes}
    shared["steps"] = max(1, round(case.words * settings.chosen_words / (SEQ_LEN * (shared["batch_size"] or 1))))
    seeds = range(settings.seed, settings.seed + (QUICK_SEEDS if settings.quick else settings.seeds))[: case.seeds]
    routers = {router: router for router in case.routers}
    return router_runs(shared, routers, run.folder.path / "balance" / name, seeds=seeds)


def measure_balance(run: Run[RoutingSettings]) -> None:
    """Train the chosen cases, in a run folder for each run.

    Raises:
      UsageError: for a corpus, folder, checkpoint or setting that will not do. KeyboardInterrupt.
    """
    corpus = open_corpus(run)
    for name in run.settings.chosen_cases:
        run.say(f"case {name}: {CASES[name].text}")
        train_all(run, corpus, case_trainings(run, name), num_jobs=run.settings.num_jobs)


def outcomes(run: Run[RoutingSettings]) -> dict[str, Outcomes]:
    """Case -> its finished runs, of those that have any."""
    found: dict[str, Outcomes] = {}
    for name in CASES:
        routers = finished(case_trainings(run, name))
        if routers:
            found[name] = {
                router: {seed: _outcome(metrics) for seed, metrics in seeds.items()}
                for router, seeds in routers.items()
            }
    return found


def _outcome(metrics: Any) -> Outcome:
    summary, entropy = summarise_run(metrics), balance_lines(metrics).entropy
    assert summary.perplexity is not None
    assert summary.final_dead_experts is not None
    later = entropy[:, entropy.shape[1] // 2 :]
    return Outcome(summary.perplexity, float(np.nanmean(later)), summary.final_dead_experts)


def cost(routers: Outcomes, router: str, than: str = PLAIN) -> Interval | None:
    """Return the excess of a router's perplexity over another's, in per cent, paired by seed."""
    ours, theirs = routers.get(router, {}), routers.get(than, {})
    seeds = sorted(ours.keys() & theirs.keys())
    return t_interval([100 * (ours[s].perplexity / theirs[s].perplexity - 1) for s in seeds]) if seeds else None


def balance_figures(found: Mapping[str, Outcomes]) -> dict[str, Any]:
    """The figures of the first case, and every case's below its name."""
    cases = {
        name: {
            router: {**_means(seeds.values()), "seeds": len(seeds), **_cost_figures(cost(routers, router))}
            for router, seeds in routers.items()
        }
        for name, routers in found.items()
    }
    first, figures = found.get(FIRST, {}), dict[str, Any]()
    if BALANCED in first:
        figures |= {
            "load_entropy": _means(first[BALANCED].values())["load_entropy"],
            "idle_experts": max(each.idle for each in first[BALANCED].values()),
            **_cost_figures(cost(first, BALANCED)),
        }
        losses = {router: _means(first[router].values())["load_entropy"] for router in LOSSES if router in first}
        if losses:
            nearest = min(losses, key=lambda router: abs(losses[router] - figures["load_entropy"]))
            figures |= {"nearest_balancing_loss": nearest, "nearest_load_entropy": losses[nearest]}
            if (against := cost(first, BALANCED, nearest)) is not None:
                figures["over_balancing_loss"] = against.mean
    return {**figures, "cases": cases}


def _means(runs: Iterable[Outcome]) -> dict[str, float]:
    means = np.mean(list(runs), axis=0).tolist()
    return dict(zip(("perplexity", "load_entropy", "idle_experts"), means, strict=True))


def _cost_figures(interval: Interval | None) -> dict[str, float]:
    if interval is None:
        return {}
    low_and_high = ("perplexity_cost_low", "perplexity_cost_high")
    return {"perplexity_cost": interval.mean, **dict(zip(low_and_high, interval.ends or (), strict=False))}


def balance_table(found: Mapping[str, Outcomes]) -> ReportTable:
    """A row for each case and router."""
    rows: list[list[object]] = []
    for name, routers in found.items():
        for router, seeds in routers.items():
            interval = None if router == PLAIN else cost(routers, router)
            above = None
            if interval is not None:
                above = f"{interval.mean:+.1f} %"
                if interval.ends is not None:
                    above += " ({:+.1f} to {:+.1f})".format(*interval.ends)
            perplexity, *balance = _means(seeds.values()).values()
            rows.append([f"{name}: {CASES[name].text}", router, len(seeds), perplexity, above, *balance])
    return ReportTable(
        title="What balance costs",
        head=("case", "router", "seeds", "validation perplexity", f"above {PLAIN}", "load entropy", "idle experts"),
        rows=rows,
        note="Differences are paired by seed, with 95 % intervals in brackets. The load's entropy (1: even) is over "
        "the second half of each run; those experts of both layers are idle that no sample went to in its last tenth.",
    )


def draw_cases(cost_axes: Axes, entropy_axes: Axes, found: Mapping[str, Outcomes]) -> None:
    """A row for each case: what the balanced router costs, with its interval, and how even the load is."""
    dress(cost_axes, f"Perplexity above that of {PLAIN}", f"{BALANCED}: per cent; 95 % intervals of the seeds")
    dress(entropy_axes, "Entropy of the load (1: even)", "second half of the run")
    cost_axes.axvline(0, color=GREY, linewidth=0.8)
    for row, routers in enumerate(found.values()):
        colour, _ = series_style(0)
        if (interval := cost(routers, BALANCED)) is not None:
            cost_axes.plot(interval.ends or (), [row] * len(interval.ends or ()), color=colour, linewidth=1.6)
            cost_axes.plot([interval.mean], [row], "o", color=colour, markersize=6)
        for place, router in enumerate((BALANCED, PLAIN)):
            entropies = [each.entropy for each in routers.get(router, {}).values()]
            colour, _ = series_style(place)
            label = router if row == 0 else None
            entropy_axes.plot(entropies, [row] * len(entropies), "o", color=colour, label=label)
    for axes in (cost_axes, entropy_axes):
        axes.set_yticks(range(len(found)), [CASES[name].text for name in found] if axes is cost_axes else [])
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
    entropy_axes.set_xlim(right=1.02)
    entropy_axes.legend(frameon=False, fontsize=8, loc="lower left")


def measure(run: Run[RoutingSettings]) -> None:
    """Measure the parts that are asked for; a resumed run does what is missing. Raises as `measure_balance`."""
    if "slow-node" in run.settings.part:
        measure_slow_node(run)
    if "balance" in run.settings.part:
        measure_balance(run)


def summarise(run: Run[RoutingSettings]) -> Result | None:
    """Return the result of both parts; None before either has anything to tell."""
    shares, found = slow_shares(run), outcomes(run)
    if not (shares or found):
        return None
    figures = (slow_figures(shares) if shares else {}) | (balance_figures(found) if found else {})
    return Result(
        title="What balance does, and what it costs",
        summary=f"Calls to a node that is {SLOWDOWN:g} times slower from update {SCENE.slow_from} to "
        f"{SCENE.slow_until}, over those of the mean of the others; what the balanced router costs in perplexity, and "
        "how even its load is, case by case.",
        figures=figures,
        shown={name: value for name, value in figures.items() if name != "cases"},
        bars=[*(SLOW_NODE_BARS if shares else ()), *(BALANCE_BARS if found else ())],
        tables=[balance_table(found)] if found else [],
    )


def draw(run: Run[RoutingSettings], result: Result) -> Figure:
    """Draw what there is: the slow node's share, and the cases."""
    del result
    shares, found = slow_shares(run), outcomes(run)
    heights = [*([3.0] if shares else []), *([1.2 + 0.3 * len(found)] if found else [])]
    figure = Figure(figsize=(10, 0.4 + sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    if shares:
        draw_slow_node(figure.add_subplot(grid[0]), shares)
    if found:
        cells = grid[-1].subgridspec(1, 2)
        draw_cases(figure.add_subplot(cells[0]), figure.add_subplot(cells[1]), found)
    return figure


EXPERIMENT = Experiment[RoutingSettings](
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Calls to the slow node over the mean of the others, over the updates; and what the balanced router "
    "costs in perplexity and how even its load is, case by case",
)
