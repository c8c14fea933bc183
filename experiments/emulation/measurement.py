"""The same order of events in both, and the seconds that each takes."""

import os
from statistics import median
from typing import Any

import jax
import numpy as np

from dmoe_jax.data import DataError
from experiments.bench import Experiment, Run
from experiments.emulation.problems import Problem, keys_of, mnist, transformer_xl
from experiments.emulation.settings import EmulationSettings
from experiments.emulation.swarm import train_swarm
from experiments.processes import HelperFailed, HelperProcess, open_helpers
from experiments.results import Bar, Result

BARS = (
    Bar(name="emulator_max_difference", bound=1e-5),
    Bar(name="emulator_speedup", bound=15.0, comparison=">="),
    Bar(name="emulator_over_one_jit", bound=0.7, comparison=">="),
)

_COMPARED_TRAINERS = 3
_FAILURE_RATE = 0.1


def measure(run: Run[EmulationSettings]) -> None:
    """Log a record `difference` for each model, and records `speed` for each round.

    Raises:
      HelperFailed: the process that is timed ended too early.
    """
    settings = run.settings
    small = mnist(d_model=16, grid_size=(3, 3), num_layers=2, num_evaluated=1)
    _compare(run, small)
    if not settings.quick:
        _compare(run, transformer_xl(d_model=16, d_ff=24, seq_len=16, num_updates=settings.updates, dropout=0.1))
    rounds = 1 if settings.quick else settings.rounds
    # One core each: XLA hands small operations from core to core, which takes longer than computing them.
    with open_helpers("experiments.emulation.worker", [{"number": 0, "jobs": os.cpu_count() or 1}]) as (helper,):
        _time_mnist(run, helper, rounds)
        if not settings.quick:
            _time_transformer(run, helper, rounds)


def _compare(run: Run[EmulationSettings], problem: Problem) -> None:
    """One order, recorded in the swarm while calls fail, and what both make of it."""
    settings = run.settings
    run.say(f"{problem.name}: {settings.updates} updates of the swarm, recorded")
    emulator = problem.emulator(_COMPARED_TRAINERS, rows=True)
    data = problem.data(_COMPARED_TRAINERS, steps=settings.updates, seed=settings.seed)
    swarm = train_swarm(
        problem,
        emulator,
        data,
        num_updates=settings.updates,
        failure_rate=_FAILURE_RATE,
        seed=settings.seed,
        record=True,
    )
    assert swarm.order is not None
    state = emulator.init(*keys_of(settings.seed), data, num_updates=settings.updates)
    state = emulator.run(state, swarm.order, data)
    pairs = {
        "losses": (state.totals.losses, swarm.losses),
        "trunk": (state.params, swarm.params),
        "experts": (state.expert_params, swarm.experts),
    }
    differences = {name: _difference(*pair) for name, pair in pairs.items()}
    run.log("difference", problem=problem.name, expert_staleness=float(state.expert_staleness), **differences)
    run.say(f"{problem.name}: greatest difference {max(differences.values()):.1e}")


def _difference(ours: Any, theirs: Any) -> float:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max()) for a, b in pairs)


def _time_mnist(run: Run[EmulationSettings], helper: HelperProcess, rounds: int) -> None:
    """Updates a second of the emulator and of the simulated swarm, in turns: one seed each."""
    settings, problem = run.settings, mnist(num_evaluated=1)
    emulator = problem.emulator(settings.trainers)
    steps = 2 * settings.timed_updates // settings.trainers + 32
    data = problem.data(settings.trainers, steps=steps, seed=settings.seed)
    order = {"what": "mnist", "trainers": settings.trainers, "updates": 4 * settings.timed_updates}
    for number in range(1, rounds + 1):
        swarm = train_swarm(problem, emulator, data, num_updates=settings.timed_updates, seed=settings.seed + number)
        rate = helper.ask(speed={**order, "seed": settings.seed})["rate"]
        rates = {"swarm": swarm.timed / swarm.wall_s, "emulator": rate}
        run.log("speed", problem=problem.name, round=number, ratio=rates["emulator"] / rates["swarm"], **rates)
        run.say(
            f"{problem.name}, round {number}/{rounds}: {rates['emulator']:.0f} updates/s in the emulator, "
            f"{rates['swarm']:.1f} in the simulated swarm"
        )


def _time_transformer(run: Run[EmulationSettings], helper: HelperProcess, rounds: int) -> None:
    """Updates a second of the emulator and of one jit without asynchrony, in turns, both on one core."""
    settings = run.settings
    order = {"trainers": 32, "updates": 4 * settings.timed_updates, "seed": settings.seed}
    for number in range(1, rounds + 1):
        rates = {
            name: helper.ask(speed={**order, "what": what})["rate"]
            for name, what in (("one_jit", "transformer-xl-one-jit"), ("emulator", "transformer-xl"))
        }
        run.log("speed", problem="Transformer-XL", round=number, ratio=rates["emulator"] / rates["one_jit"], **rates)
        run.say(
            f"Transformer-XL, round {number}/{rounds}: {rates['emulator']:.1f} updates/s in the emulator, "
            f"{rates['one_jit']:.1f} in one jit"
        )


def summarise(run: Run[EmulationSettings]) -> Result | None:
    """Take the greatest difference, and medians over the rounds; None where nothing was compared."""
    differences = run.records("difference")
    if not differences:
        return None
    figures: dict[str, Any] = {}
    for each in differences:
        greatest = max(each["losses"], each["trunk"], each["experts"])
        figures[f"max_difference_{_key(each['problem'])}"] = greatest
    figures["emulator_max_difference"] = max(figures.values())
    rates = run.records("speed")
    for problem, name in (("MNIST", "emulator_speedup"), ("Transformer-XL", "emulator_over_one_jit")):
        own = [each for each in rates if each["problem"] == problem]
        if own:
            figures[name] = median(each["ratio"] for each in own)
            figures[f"updates_per_s_{_key(problem)}"] = median(each["emulator"] for each in own)
    return Result(
        title="The emulator beside the swarm",
        summary=f"{run.settings.updates} updates on the swarm's own order of events, with failing calls; then updates "
        "a second of one seed, in turns.",
        figures=figures,
        bars=BARS[:2] if run.settings.quick else BARS,
    )


def _key(problem: str) -> str:
    return problem.lower().replace("-", "_")


EXPERIMENT = Experiment(measure=measure, summarise=summarise, expected=(DataError, HelperFailed))
