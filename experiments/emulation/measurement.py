"""The same order of events in both, and the seconds that each takes."""

import os
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax.arrays import PyTree
from dmoe_jax.data import DataError
from dmoe_jax.emulator import Emulator
from dmoe_jax.emulator.state import SwarmState
from experiments.bench import Experiment, Run
from experiments.emulation.problems import Problem, keys_of, mnist, transformer_xl
from experiments.emulation.settings import EmulationSettings
from experiments.emulation.swarm import train_swarm
from experiments.processes import HelperFailed, HelperProcess, open_helpers
from experiments.results import Bar, Result

BARS = (
    Bar(name="emulator_max_difference", bound=1e-5),
    Bar(name="float64_parameter_difference", bound=1e-10),
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
    for dtype in ("float64", "float32"):
        with jax.enable_x64(dtype == "float64"):
            small = mnist(d_model=16, grid_size=(3, 3), num_layers=2, num_evaluated=1, dtype=dtype)
            _compare(run, small, dtype=dtype)
    if not settings.quick:
        _compare(run, transformer_xl(d_model=16, d_ff=24, seq_len=16, num_updates=settings.updates, dropout=0.1))
    rounds = 1 if settings.quick else settings.rounds
    # One core each: XLA hands small operations from core to core, which takes longer than computing them.
    with open_helpers("experiments.emulation.worker", [{"number": 0, "jobs": os.cpu_count() or 1}]) as (helper,):
        _time_mnist(run, helper, rounds)
        if not settings.quick:
            _time_transformer(run, helper, rounds)


def _compare(run: Run[EmulationSettings], problem: Problem, *, dtype: str = "float32") -> None:
    """One order for each seed, recorded in the swarm while calls fail, and what both make of it."""
    settings = run.settings
    emulator = problem.emulator(_COMPARED_TRAINERS, rows=True, same_kernels=True)
    for seed in range(settings.seed, settings.seed + (1 if settings.quick else settings.seeds)):
        run.say(f"{problem.name}, {dtype}, seed {seed}: {settings.updates} updates of the swarm, recorded")
        differences = _differences(problem, emulator, num_updates=settings.updates, seed=seed)
        run.log("difference", problem=problem.name, dtype=dtype, seed=seed, **differences)
        run.say(
            f"{problem.name}, {dtype}, seed {seed}: greatest difference {_greatest(differences):.1e}, "
            f"{differences['last_bit']:.1e} to itself with another last bit"
        )


def _differences(problem: Problem, emulator: Emulator, *, num_updates: int, seed: int) -> dict[str, float]:
    """The greatest differences of emulator and swarm, and of the emulator to itself, rounded once more.

    Returns: {"losses", "trunk", "experts": of the emulator to the swarm; "last_bit": the greatest of all to an emulator
      that begins with the next greater number for each parameter; "expert_staleness": the mean, in updates}.
    """
    data = problem.data(_COMPARED_TRAINERS, steps=num_updates, seed=seed)
    swarm = train_swarm(
        problem, emulator, data, num_updates=num_updates, failure_rate=_FAILURE_RATE, seed=seed, record=True
    )
    order = swarm.order
    assert order is not None

    def emulated(moved: Callable[[SwarmState], SwarmState]) -> tuple[dict[str, Any], float]:
        state = moved(emulator.init(*keys_of(seed), data, num_updates=num_updates))
        state = emulator.run(state, order, data)
        parts = {"losses": state.totals.losses, "trunk": state.params, "experts": state.expert_params}
        return parts, float(state.expert_staleness)

    ours, staleness = emulated(lambda state: state)
    theirs = {"losses": swarm.losses, "trunk": swarm.params, "experts": swarm.experts}
    moved, _ = emulated(_with_another_last_bit)
    return {
        **{name: _difference(ours[name], theirs[name]) for name in ours},
        "last_bit": max(_difference(ours[name], moved[name]) for name in ours),
        "expert_staleness": staleness,
    }


def _with_another_last_bit(state: SwarmState) -> SwarmState:
    """The next greater number for each parameter of trunk and experts."""

    def moved(params: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.nextafter(leaf, jnp.full_like(leaf, jnp.inf)), params)

    experts = tuple(layer._replace(params=moved(layer.params)) for layer in state.experts)
    return state._replace(params=moved(state.params), experts=experts)


def _greatest(differences: Mapping[str, Any], parts: Sequence[str] = ("losses", "trunk", "experts")) -> float:
    return float(max(differences[part] for part in parts))


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
    # An interrupted run has some of these.
    wide, narrow = ([each for each in differences if each["dtype"] == dtype] for dtype in ("float64", "float32"))
    if wide:  # losses are kept as float32 whatever the parameters are
        figures["float64_parameter_difference"] = max(_greatest(each, ("trunk", "experts")) for each in wide)
    if narrow:
        figures["emulator_max_difference"] = max(map(_greatest, narrow))
    for problem in ("MNIST", "Transformer-XL"):
        compared = [each for each in narrow if each["problem"] == problem]
        if compared:
            figures[f"max_difference_{_key(problem)}"] = max(map(_greatest, compared))
            figures[f"last_bit_difference_{_key(problem)}"] = max(each["last_bit"] for each in compared)
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
        bars=BARS[:3] if run.settings.quick else BARS,
    )


def _key(problem: str) -> str:
    return problem.lower().replace("-", "_")


EXPERIMENT = Experiment(measure=measure, summarise=summarise, expected=(DataError, HelperFailed))
