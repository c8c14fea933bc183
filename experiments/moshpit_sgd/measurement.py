"""Train the same model with each method until the target is reached, and set the virtual times side by side."""

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, get_args

import trio
from matplotlib.figure import Figure
from rich.progress import Progress

import dmoe_net
from dmoe_jax.data import DataError
from dmoe_jax.runs.style import GREY, dress
from experiments.bench import Experiment, Run
from experiments.moshpit_sgd import tasks
from experiments.moshpit_sgd.settings import MethodName, ModelName, MoshpitSgdSettings
from experiments.moshpit_sgd.swarm import PeerLearner, Swarm, make_method
from experiments.panels import series_style
from experiments.results import Result, finals_of

TITLES: Mapping[str, str] = {"all_reduce": "All-Reduce", "pushsum": "PushSum (SGP)", "moshpit": "Moshpit"}
"""Names of the methods for readers, in order."""

_EVALUATIONS_S = range(10, 1501, 10)
"""Virtual times of evaluations; after the last one a method is given up."""
_EVALUATED_PEERS = 8
_IN_A_ROW = 3
"""Evaluations whose mean must reach the target: one of them alone may be lucky."""

Record = Mapping[str, Any]
"""A line of metrics.jsonl: an evaluation, or the result of one method."""


def measure(run: Run[MoshpitSgdSettings]) -> None:
    """Train every model in every swarm with every method."""
    settings = run.settings
    for model in settings.models:
        task = tasks.make_task(model)
        for num_peers in settings.swarms:
            for method in get_args(MethodName):
                _train(run, task, model=model, num_peers=num_peers, method=method)


def _train(
    run: Run[MoshpitSgdSettings], task: tasks.Task, *, model: ModelName, num_peers: int, method: MethodName
) -> None:
    """Train until the target is reached or the time is up, and log it."""
    clock, size = run.settings.clock, {"num_peers": num_peers, "seed": run.settings.seed}
    what = {"model": model, "peers": num_peers, "method": method}
    learner = PeerLearner(task, local_steps=clock.local_steps, **size)

    async def race(progress: Progress) -> float | None:
        """Virtual seconds to the target; None if it is not reached."""
        losses: list[float] = []
        bar = progress.add_task(f"{model}, {num_peers} peers, {method}", total=_EVALUATIONS_S[-1])
        async with trio.open_nursery() as nursery:
            swarm = Swarm(clock, learner, nursery, **size)
            swarm.start(make_method(method, swarm))
            for virtual_s in _EVALUATIONS_S:
                await trio.sleep_until(virtual_s)
                progress.update(bar, completed=virtual_s)
                if up := swarm.up:
                    # The same each time, as far as they are there: others would add their differences to the noise.
                    own = learner.losses([up[place * len(up) // _EVALUATED_PEERS] for place in range(_EVALUATED_PEERS)])
                    losses.append(float(own.mean()))
                    run.log("evaluation", **what, virtual_s=virtual_s, loss=losses[-1])
                if len(losses) >= _IN_A_ROW and fmean(losses[-_IN_A_ROW:]) <= task.target:
                    nursery.cancel_scope.cancel()
                    return virtual_s
            nursery.cancel_scope.cancel()
        return None

    with Progress(console=run.console, transient=True) as progress:
        reached_s = dmoe_net.run(race, progress)
    run.log("result", **what, target=task.target, reached_s=reached_s)
    outcome = "not reached" if reached_s is None else f"reached after {reached_s:.0f} virtual seconds"
    run.say(f"{model}, {num_peers} peers, {method}: {task.target} {outcome}")


def summarise(run: Run[MoshpitSgdSettings]) -> Result | None:
    """Set the methods that are finished side by side; None before the first evaluation."""
    if not run.records("evaluation"):
        return None
    results = run.records("result")
    figures, missed = figures_of(results)
    return Result(
        title="Time to a target loss among unequal peers that come and go",
        summary="Virtual seconds to a validation loss, by model, number of peers and method.",
        figures=figures,
        missed=missed,
        runs=finals_of(({**each, "seed": run.settings.seed} for each in results), "model", "peers", "method"),
    )


def figures_of(results: Sequence[Record]) -> tuple[dict[str, float | None], list[str]]:
    """Compute times to the target and their ratios to Moshpit's, by model and number of peers; and the missed bars."""
    reached = {(each["model"], each["peers"], each["method"]): each["reached_s"] for each in results}
    figures: dict[str, float | None] = {}
    missed = []
    for (model, peers, method), other_s in reached.items():
        figures[f"{model}_{peers}_{method}_s"] = other_s
        if method != "moshpit" and (model, peers, "moshpit") in reached:
            name, moshpit_s = f"{model}_{peers}_{method}_over_moshpit", reached[model, peers, "moshpit"]
            figures[name] = None if other_s is None or moshpit_s is None else other_s / moshpit_s
            # Whoever never got there took for ever.
            if method == "all_reduce" and (moshpit_s is None or moshpit_s >= (other_s or math.inf)):
                missed.append(name)
    return figures, missed


def draw(run: Run[MoshpitSgdSettings], result: Result) -> Figure:
    """Draw validation loss over virtual time: a panel for each model and number of peers, a line for each method."""
    models, sizes = run.settings.models, run.settings.swarms
    figure = Figure(figsize=(1.5 + 5 * len(sizes), 0.6 + 3.2 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), len(sizes), squeeze=False).flat
    for axes, (model, peers) in zip(panels, itertools.product(models, sizes), strict=True):
        dress(axes, f"{model}, {peers} peers: validation loss (nats)", "virtual time (s)")
        own = [each for each in run.records("evaluation") if (each["model"], each["peers"]) == (model, peers)]
        if not own:
            continue
        for place, (method, title) in enumerate(TITLES.items()):
            if points := [(each["virtual_s"], each["loss"]) for each in own if each["method"] == method]:
                reached_s = result.figures.get(f"{model}_{peers}_{method}_s")
                label = title if reached_s is None else f"{title}, {reached_s:.0f} s"
                axes.plot(*zip(*points, strict=True), color=series_style(place)[0], linewidth=1.4, label=label)
        for target in {each["target"] for each in run.records("result") if each["model"] == model}:
            axes.axhline(target, color=GREY, linestyle="--", linewidth=1)
            # From the target to where training has begun in earnest: the first evaluations would flatten the rest.
            start = sorted(each["loss"] for each in own)[int(0.95 * len(own))]
            axes.set_ylim(target - 0.1 * (start - target), start)
        axes.set_xlim(left=0)
        axes.legend(fontsize=8, frameon=False)
    return figure


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Validation loss over virtual time, a line for each method",
    expected=(DataError,),
)
