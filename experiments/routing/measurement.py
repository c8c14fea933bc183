"""Both parts of the experiment in one report.

`slow-node`: a swarm one of whose nodes becomes ten times slower for a while, on a simulated network. The code is that
of a real swarm: nodes that publish their load, trainers that time their calls, in virtual time. Only the network and
the devices are simulated. What counts is the share of the calls that goes to the slow node's experts.

`balance`: what balance costs, one case after the other.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dmoe_jax import CallStatistics, Router, product_key
from dmoe_jax.machine.cores import usable_cores
from dmoe_jax.machine.device import CostModel, InlineDevice
from dmoe_jax.routing import balanced
from dmoe_jax.runs.report import ReportTable
from dmoe_jax.runs.style import FAINT, GREY, KILLED, TRAIN, VALID, dress
from dmoe_jax.trainer import StepRecord
from dmoe_net.transport.sim import run as run_in_virtual_time
from experiments.bench import Experiment, Run
from experiments.compare_routers.runs import finished, router_runs
from experiments.emulation.problems import mnist
from experiments.emulation.swarm import Scenery, train_in_scenery
from experiments.intervals import Interval, t_interval
from experiments.panels import series_style
from experiments.results import Bar, Result
from experiments.routing.settings import BALANCED, BASE, CASES, FIRST, LOSSES, PLAIN, RoutingSettings
from experiments.run_summary import balance_lines, summarise_run
from experiments.transformer_xl.side_by_side import train_all
from experiments.transformer_xl.training import open_corpus
from experiments.transformer_xl.trainings import Training

SLOW_NODE_BARS = (Bar(name="slow_share", bound=0.5), Bar(name="recovered_share", bound=0.75, comparison=">="))
"""The slow node's calls over those of the mean of the others: in the last quarter of the first hundred updates after it
became slow, and in the last hundred of the run."""

SLOW = "node1"
"""The host that becomes slow; of each layer it serves the experts 1, 1 + nodes, and so on."""
SLOWDOWN = 10.0
"""Factor by which its work takes longer then."""
NUM_NODES = 8

_SECONDS = 0.02
"""Virtual seconds that a batch costs a node's device, and that every message takes."""
_GRID = (4, 4)

Shares = Mapping[str, np.ndarray]
"""Router -> [seeds, windows]."""


class Scene(NamedTuple):
    """One run.

    Attributes:
      num_updates: of the trunk. slow_from, slow_until: the updates between which one node is slow.
      num_trainers: trainers of batch 4, each a process of its own but for the trunk.
      window: updates in each of which calls are counted.
    """

    num_updates: int = 600
    slow_from: int = 200
    slow_until: int = 400
    num_trainers: int = 8
    window: int = 25


SCENE = Scene()

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


_MEANS = ("perplexity", "load_entropy", "idle_experts")
"""Names of an outcome's fields among the figures."""

Outcomes = Mapping[str, Mapping[int, Outcome]]
"""Router -> seed -> a finished run; of one case."""


def slow_node_shares(router: Router, scene: Scene, *, seed: int) -> np.ndarray:
    """The slow node's rows of every window over the mean of the other nodes' rows, [windows]."""
    problem = mnist(d_model=16, grid_size=_GRID, num_layers=2, router=router, num_evaluated=16)
    emulator = problem.emulator(scene.num_trainers)
    step, totals = 0, [np.zeros(NUM_NODES)]

    def device(host: str) -> InlineDevice:
        ordinary, slow = (CostModel(call_s=_SECONDS, slowdown=factor) for factor in (1.0, SLOWDOWN))

        def cost(name: str, batch: int) -> float:
            is_slow = host == SLOW and scene.slow_from <= step < scene.slow_until
            return (slow if is_slow else ordinary)(name, batch)

        return InlineDevice(cost)

    def note(record: StepRecord, counted: Sequence[CallStatistics]) -> None:
        nonlocal step
        step = record.step
        if step % scene.window == 0:
            rows = np.zeros(NUM_NODES)
            for uid, load in (asked for statistics in counted for asked in statistics.asked.items()):
                _, row, column = uid.split(".")
                rows[(_GRID[1] * int(row) + int(column)) % NUM_NODES] += load
            totals.append(rows)

    scenery = Scenery(delay_s=_SECONDS, nodes={"num_nodes": NUM_NODES, "device": device})
    train = partial(train_in_scenery, num_updates=scene.num_updates, seed=seed, note=note)
    run_in_virtual_time(train, problem, emulator, scenery, seed=seed)
    grown = np.diff(totals, axis=0)
    slow = int(SLOW.removeprefix("node"))
    return grown[:, slow] / np.delete(grown, slow, axis=1).mean(axis=1)


def measure_slow_node(run: Run[RoutingSettings]) -> None:
    """Train the swarm with each router and seed; a resumed run does what is missing."""
    settings = run.settings
    routers = {PLAIN: product_key(_GRID), BALANCED: balanced(product_key(_GRID))}
    done = {(record["router"], record["seed"]) for record in run.records("slow_node")}
    for seed in range(settings.seed, settings.seed + (1 if settings.quick else settings.seeds)):
        for name, router in routers.items():
            if (name, seed) not in done:
                run.say(f"{name}, seed {seed}: {SCENE.num_updates} updates, one node slow from {SCENE.slow_from} on")
                shares = slow_node_shares(router, SCENE, seed=seed)
                run.log("slow_node", router=name, seed=seed, shares=shares.tolist())


def slow_shares(run: Run[RoutingSettings]) -> Shares:
    """Return the shares that have been measured so far; none before the balanced router has any."""
    found: dict[str, list[list[float]]] = {}
    for record in run.records("slow_node"):
        found.setdefault(record["router"], []).append(record["shares"])
    return {name: np.array(shares) for name, shares in found.items()} if BALANCED in found else {}


def slow_figures(found: Shares) -> dict[str, Any]:
    """The shares before the node is slow, while it is, and after, of the balanced router under their bare names."""
    window = SCENE.window
    parts = {
        "before": slice(SCENE.slow_from // window // 2, SCENE.slow_from // window),
        "slow": slice((SCENE.slow_from + 75) // window, (SCENE.slow_from + 100) // window),
        "recovered": slice((SCENE.num_updates - 100) // window, SCENE.num_updates // window),
    }
    figures: dict[str, Any] = {"seeds": len(found[BALANCED])}
    for name, shares in found.items():
        suffix = "" if name == BALANCED else f"_{name}"
        for part, windows in parts.items():
            means, key = shares[:, windows].mean(axis=1), f"{part}_share{suffix}"
            figures |= {key: float(means.mean()), f"{key}_min": means.min(), f"{key}_max": means.max()}
    return figures


def draw_slow_node(axes: Axes, found: Shares) -> None:
    """Draw the share over the updates, a line for each seed."""
    axes.axvspan(SCENE.slow_from, SCENE.slow_until, color=KILLED, alpha=0.1, linewidth=0)
    axes.axhline(1.0, color=GREY, linewidth=0.8)
    for (name, shares), colour in zip(sorted(found.items()), (TRAIN, VALID), strict=False):
        ends = SCENE.window * (1 + np.arange(shares.shape[1]))
        for number, line in enumerate(shares):
            axes.plot(ends, line, color=colour, linewidth=1.3, label=None if number else name)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("calls, over the mean of the other nodes", fontsize=9, color=GREY)
    axes.legend(frameon=False, fontsize=8)
    dress(axes, f"Calls to a node {SLOWDOWN:g} times slower in the shaded part", "updates of the trunk")


def case_trainings(run: Run[RoutingSettings], name: str) -> list[Training]:
    """The runs of a case: all routers with one seed before the next seed, each in a folder of its own."""
    settings, case = run.settings, CASES[name]
    shared: dict[str, Any] = {"data": settings.data, "resume": settings.resume, **BASE, **case.changes}
    shared["steps"] = max(1, round(case.words * settings.chosen_words / (SEQ_LEN * (shared["batch_size"] or 1))))
    seeds = range(settings.seed, settings.seed + (QUICK_SEEDS if settings.quick else settings.seeds))[: case.seeds]
    routers = {router: router for router in case.routers}
    return router_runs(shared, routers, run.folder.path / "balance" / name, seeds=seeds)


def measure_balance(run: Run[RoutingSettings]) -> None:
    """Train the chosen cases, in a run folder for each run; two at once where there are two cores.

    Raises:
      UsageError: for a corpus, folder, checkpoint or setting that will not do. KeyboardInterrupt.
    """
    corpus = open_corpus(run)
    for name in run.settings.chosen_cases:
        run.say(f"case {name}: {CASES[name].text}")
        train_all(run, corpus, case_trainings(run, name), num_jobs=min(2, usable_cores()))


def outcomes(run: Run[RoutingSettings]) -> dict[str, Outcomes]:
    """Case -> its finished runs, of those that have any."""
    found: dict[str, Outcomes] = {}
    for name in CASES:
        if routers := finished(case_trainings(run, name)):
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


def _figures_of(routers: Outcomes, router: str) -> dict[str, Any]:
    """Means of a router's runs in one case, and what it costs."""
    seeds, interval = routers[router], cost(routers, router)
    figures = dict(zip(_MEANS, np.mean(list(seeds.values()), axis=0).tolist(), strict=True)) | {"seeds": len(seeds)}
    if interval is not None:
        figures["perplexity_cost"] = interval.mean
        figures |= dict(zip(("perplexity_cost_low", "perplexity_cost_high"), interval.ends or (), strict=False))
    return figures


def balance_figures(found: Mapping[str, Outcomes]) -> dict[str, Any]:
    """The figures of the first case, and every case's below its name."""
    cases = {name: {router: _figures_of(routers, router) for router in routers} for name, routers in found.items()}
    own, figures = cases.get(FIRST, {}), dict[str, Any]()
    if BALANCED in own:
        figures = {name: own[BALANCED][name] for name in own[BALANCED] if name not in ("perplexity", "seeds")}
        figures["idle_experts"] = max(each.idle for each in found[FIRST][BALANCED].values())
        losses = {router: own[router]["load_entropy"] for router in LOSSES if router in own}
        if losses:
            nearest = min(losses, key=lambda router: abs(losses[router] - figures["load_entropy"]))
            figures |= {"nearest_balancing_loss": nearest, "nearest_load_entropy": losses[nearest]}
            if (against := cost(found[FIRST], BALANCED, nearest)) is not None:
                figures["over_balancing_loss"] = against.mean
    return {**figures, "cases": cases}


def balance_table(cases: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> ReportTable:
    """A row for each case and router, from their figures."""
    rows: list[list[object]] = []
    for name, routers in cases.items():
        for router, own in routers.items():
            above = None
            if router != PLAIN and "perplexity_cost" in own:
                above = f"{own['perplexity_cost']:+.1f} %"
                if "perplexity_cost_low" in own:
                    above += f" ({own['perplexity_cost_low']:+.1f} to {own['perplexity_cost_high']:+.1f})"
            perplexity, *balance = (own[mean] for mean in _MEANS)
            rows.append([f"{name}: {CASES[name].text}", router, own["seeds"], perplexity, above, *balance])
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
        tables=[balance_table(figures["cases"])] if found else [],
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
