"""Train the same model with each method until the target is reached, and set the virtual times side by side."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.progress import Progress

from dmoe_jax.data import DataError
from dmoe_jax.runs.report import ReportTable
from experiments.bench import Experiment, Run
from experiments.moshpit_sgd import tasks
from experiments.moshpit_sgd.figure import TITLES, Record, by_swarm, losses_figure
from experiments.moshpit_sgd.learning import PeerLearner, Programs
from experiments.moshpit_sgd.methods import make_method
from experiments.moshpit_sgd.settings import MethodName, ModelName, MoshpitSgdSettings
from experiments.moshpit_sgd.simulation import Simulation
from experiments.results import Result

PAPER = {"paper_pushsum_over_moshpit_resnet": 1.3, "paper_all_reduce_over_moshpit_albert": 1.5}
"""Ryabinin et al., NeurIPS 2021: SGP over Moshpit for ResNet-50, All-Reduce over Moshpit for ALBERT."""

_EVALUATED_PEERS = 8
_IN_A_ROW = 3
"""Evaluations whose mean must reach the target: one of them alone may be lucky."""
_COUNTS = {"stretches": "stretches", "averaged_peers": "averaged", "repeated": "hit", "departures": "left"}
"""Counts of a simulation that the report shows -> their names there."""


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
    simulation = Simulation(settings.clock, learner, num_peers, settings.local_steps, settings.seed)
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
    return Result(
        title="Time to a target loss among unequal peers that come and go",
        summary=f"Virtual seconds to a validation loss; peers average every {run.settings.local_steps} of their steps.",
        figures=figures | PAPER,
        missed=missed,
        tables=[_result_table(results)],
    )


def figures_of(results: Sequence[Record]) -> tuple[dict[str, float | None], list[str]]:
    """Compute times to the target and their ratios to Moshpit's, by model and number of peers; and the missed bars."""
    figures: dict[str, float | None] = {}
    missed = []
    for (model, peers), methods in by_swarm(results).items():
        reached: dict[str, float | None] = {method: records[-1]["reached_s"] for method, records in methods.items()}
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
    return figures, missed


def _result_table(results: Sequence[Record]) -> ReportTable:
    rows: list[tuple[Any, ...]] = []
    for record in results:
        counts = (record[name] for name in _COUNTS)
        rows.append(
            (record["model"], record["peers"], TITLES[record["method"]], record["target"], record["reached_s"], *counts)
        )
    return ReportTable(
        title="Time to the target",
        head=("model", "peers", "method", "target", "virtual s", *_COUNTS.values()),
        rows=rows,
        note="Stretches of local steps, and peers that then averaged; all-reduces that were hit by a departure; "
        "departures.",
    )


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=lambda run, _: losses_figure(by_swarm(run.records("evaluation")), by_swarm(run.records("result"))),
    figure_text="Validation loss over virtual time, a line for each method",
    expected=(DataError,),
)
