"""Train the same model with each method until the target is reached, and set the virtual times side by side."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.progress import Progress

from dmoe_jax.data import DataError
from dmoe_jax.runs.report import ReportTable
from experiments.bench import Experiment, Run
from experiments.moshpit_sgd import tasks
from experiments.moshpit_sgd.figure import losses_figure
from experiments.moshpit_sgd.learning import PeerLearner, Programs
from experiments.moshpit_sgd.methods import make_method
from experiments.moshpit_sgd.paper import PAPER_ALBERT, PAPER_RESNET, TITLES, Record, by_swarm
from experiments.moshpit_sgd.settings import MethodName, ModelName, MoshpitSgdSettings
from experiments.moshpit_sgd.simulation import Simulation
from experiments.results import Result

_EVALUATED_PEERS = 8
_IN_A_ROW = 3
"""Evaluations whose mean must reach the target: one of them alone may be lucky."""
_COUNTS = {"stretches": "stretches", "averaged_peers": "averaged", "repeated": "hit", "departures": "left"}
"""What the report shows of a simulation's counts, and what it calls them."""


def measure(run: Run[MoshpitSgdSettings]) -> None:
    """Train every model in every swarm with every method."""
    settings = run.settings
    for model in settings.models:
        programs = Programs(tasks.make_task(model), local_steps=settings.local_steps, seed=settings.seed)
        for num_peers in settings.swarms:
            for method in settings.methods:
                _train(run, programs, model=model, num_peers=num_peers, method=method)


def _train(
    run: Run[MoshpitSgdSettings], programs: Programs, *, model: ModelName, num_peers: int, method: MethodName
) -> None:
    """Train until the target is reached or the time is up, and log it."""
    settings, what = run.settings, {"model": model, "peers": num_peers, "method": method}
    target = programs.task.target if settings.target is None else settings.target
    started = time.perf_counter()
    learner = PeerLearner(programs, num_peers=num_peers, seed=settings.seed)
    simulation = Simulation(settings.times(), learner, num_peers, settings.local_steps, settings.seed)
    simulation.start(make_method(method, simulation))
    losses: list[float] = []
    reached_s = None
    with Progress(console=run.console, transient=True) as progress:
        bar = progress.add_task(f"{model}, {num_peers} peers, {method}", total=settings.max_virtual_s)
        while reached_s is None and simulation.now < settings.max_virtual_s:
            simulation.run_until(min(simulation.now + settings.evaluate_every_s, settings.max_virtual_s))
            progress.update(bar, completed=simulation.now)
            up = simulation.up
            if not up:
                continue
            # The same peers each time, as far as they are there: others would add their differences to the noise.
            own = learner.losses([up[place * len(up) // _EVALUATED_PEERS] for place in range(_EVALUATED_PEERS)])
            losses.append(float(own.mean()))
            run.log("evaluation", **what, virtual_s=simulation.now, loss=losses[-1], worst=own.max(), up=len(up))
            last = losses[-_IN_A_ROW:]
            if len(last) == _IN_A_ROW and sum(last) / _IN_A_ROW <= target:
                reached_s = simulation.now
    wall_s = time.perf_counter() - started
    result = {"target": target, "reached_s": reached_s, "loss": losses[-1] if losses else None, "wall_s": wall_s}
    run.log("result", **what, **result, **asdict(simulation.counts))
    outcome = "not reached" if reached_s is None else f"reached after {reached_s:.0f} virtual seconds"
    run.say(f"{model}, {num_peers} peers, {method}: {target} {outcome} ({wall_s:.0f} s)")


def summarise(run: Run[MoshpitSgdSettings]) -> Result | None:
    """Set the methods that are finished side by side; None before the first evaluation."""
    results = run.records("result")
    if not results and not run.records("evaluation"):
        return None
    figures, missed = figures_of(results)
    clock = list(asdict(run.settings.times()).items())
    return Result(
        title="Time to a target loss among unequal peers that come and go",
        summary=f"Virtual seconds to a validation loss; peers average every {run.settings.local_steps} of their steps.",
        figures=figures,
        missed=missed,
        tables=[_result_table(results), ReportTable(title="The clock", head=("constant", "value"), rows=clock)],
    )


def figures_of(results: Sequence[Record]) -> tuple[dict[str, Any], list[str]]:
    """Times to the target and their ratios to Moshpit's, by model and number of peers; and the missed bars."""
    figures: dict[str, Any] = {}
    missed = []
    for (model, peers), methods in by_swarm(results).items():
        reached: Mapping[str, float | None] = {method: record["reached_s"] for method, record in methods.items()}
        figures |= {f"{model}_{peers}_{method}_s": reached_s for method, reached_s in reached.items()}
        if "moshpit" not in reached:
            continue
        moshpit_s = reached["moshpit"]
        for method in ("all_reduce", "pushsum"):
            if method in reached:
                name, other_s = f"{model}_{peers}_{method}_over_moshpit", reached[method]
                figures[name] = None if other_s is None or moshpit_s is None else other_s / moshpit_s
                # Whoever never got there took for ever.
                if method == "all_reduce" and (moshpit_s is None or moshpit_s >= (other_s or math.inf)):
                    missed.append(name)
    figures |= {"paper_pushsum_over_moshpit_resnet": PAPER_RESNET, "paper_all_reduce_over_moshpit_albert": PAPER_ALBERT}
    return figures, missed


def _result_table(results: Sequence[Record]) -> ReportTable:
    rows = []
    for (model, peers), methods in by_swarm(results).items():
        base = methods.get("moshpit", {}).get("reached_s")
        for method, record in methods.items():
            reached_s = record["reached_s"]
            ratio = reached_s / base if reached_s and base else None
            counts = (record[name] for name in _COUNTS)
            rows.append((model, peers, TITLES[method], record["target"], reached_s, ratio, *counts))
    return ReportTable(
        title="Time to the target",
        head=("model", "peers", "method", "target", "virtual s", "over Moshpit", *_COUNTS.values()),
        rows=rows,
        note=f"The paper: SGP over Moshpit {PAPER_RESNET} for ResNet-50, All-Reduce over Moshpit {PAPER_ALBERT} for "
        "ALBERT. Stretches of local steps, and peers that then averaged; all-reduces that were hit by a departure; "
        "departures.",
    )


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=lambda run, _: losses_figure(run.records("evaluation"), run.records("result")),
    figure_text="Validation loss over virtual time, a line for each method",
    expected=(DataError,),
)
