"""The same order of events in both, and the seconds that each takes."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax.arrays import PyTree
from dmoe_jax.autodiff import without_waiting
from dmoe_jax.data import DataError, load_corpus
from dmoe_jax.emulator import Emulator
from dmoe_jax.routing import product_key
from dmoe_jax.trainer import unheard
from experiments import worker
from experiments.bench import Experiment, Run
from experiments.emulation.problems import Problem, keys_of, mnist, transformer_xl
from experiments.emulation.settings import EmulationSettings
from experiments.emulation.swarm import train_swarm
from experiments.emulation.trials import Trial, run_trial
from experiments.processes import HelperFailed, open_helpers
from experiments.results import Bar, Result
from experiments.rounds import SLICE, Measurement, Ratio, measure_rounds, round_figures
from experiments.transformer_xl.presets import PRESETS
from experiments.transformer_xl.settings import Place, TrainingSettings
from experiments.transformer_xl.setup import Setup
from experiments.transformer_xl.training import make_engine

DIFFERENCES = (Bar(name="emulator_max_difference", bound=1e-5), Bar(name="float64_parameter_difference", bound=1e-10))

_RATE = "updates_per_s"
MNIST_RATIO = Ratio("emulator_speedup", _RATE, "mnist", "mnist_swarm", ">=", 15.0)
XL_RATIO = Ratio("emulator_over_one_jit", _RATE, "transformer_xl", "transformer_xl_one_jit", ">=", 0.7)

_TRAINERS, _UPDATES, _SEEDS = 3, 50, 5
"""Trainers and updates of the comparison on one order of events; orders that are compared, each of other parameters,
batches, delays and failures."""
_TIMED = Trial(
    label="timed", problem="mnist", sizes={"num_evaluated": 1}, num_trainers=64, num_updates=768, num_points=4
)
"""A round of the timings; the simulated swarm makes a quarter of the updates."""


def measure(run: Run[EmulationSettings]) -> None:
    """Log a record `difference` for each model and seed, and the rounds of the timings. Raises HelperFailed."""
    settings, is_whole = run.settings, not run.settings.quick
    for dtype in ("float64", "float32"):
        with jax.enable_x64(dtype == "float64"):
            small = mnist(d_model=16, grid_size=(3, 3), num_layers=2, num_evaluated=1, dtype=dtype)
            _compare(run, small, dtype)
    if is_whole:
        text = transformer_xl(d_model=16, d_ff=24, seq_len=16, num_updates=_UPDATES, dropout=0.1)
        _compare(run, text, "float32")
    timed = replace(_TIMED, seed=settings.seed)
    in_swarm = replace(timed, in_swarm=True, num_updates=timed.num_updates // 4)
    # One core each: XLA hands small operations from core to core, which takes longer than computing them.
    with open_helpers(worker.MODULE, [{"jobs": os.cpu_count() or 1}]) as (helper,):

        def asked(name: str, call: Callable[[], Mapping[str, Any]]) -> Measurement:
            return lambda: {name: {_RATE: worker.ask(helper, call)[_RATE]}}

        measurements = [
            lambda: {"mnist_swarm": {_RATE: run_trial(in_swarm)[_RATE]}},  # in this process, on all cores
            asked("mnist", partial(run_trial, timed)),
        ]
        if is_whole:
            places: Mapping[str, Place] = {"transformer_xl": "emulated", "transformer_xl_one_jit": "local"}
            measurements += [
                asked(name, partial(time_engine, place=at, seed=settings.seed)) for name, at in places.items()
            ]
        ratios = (MNIST_RATIO, XL_RATIO) if is_whole else (MNIST_RATIO,)
        measure_rounds(run, measurements, ratios, rounds=3 if is_whole else 1)


def _compare(run: Run[EmulationSettings], problem: Problem, dtype: str) -> None:
    """One order for each seed, recorded in the swarm while calls fail, and what both make of it."""
    emulator = problem.emulator(_TRAINERS, rows=True, same_kernels=True)
    for seed in range(run.settings.seed, run.settings.seed + (1 if run.settings.quick else _SEEDS)):
        found = _differences(problem, emulator, seed=seed)
        run.log("difference", problem=problem.name, dtype=dtype, seed=seed, **found)
        run.say(
            f"{problem.name}, {dtype}, seed {seed}: after {_UPDATES} updates {_greatest([found]):.1e} apart, "
            f"{found['last_bit']:.1e} from itself with another last bit"
        )


def _differences(problem: Problem, emulator: Emulator, *, seed: int) -> dict[str, float]:
    """The greatest differences of emulator and swarm, and of the emulator to itself, rounded once more.

    Returns: {"losses", "trunk", "experts": of the emulator to the swarm; "last_bit": the greatest of all to an emulator
      that begins with the next greater number for each parameter}.
    """
    data = problem.data(_TRAINERS, steps=_UPDATES, seed=seed)
    swarm = train_swarm(problem, emulator, num_updates=_UPDATES, failure_rate=0.1, seed=seed, record=True)
    order = swarm.order
    assert order is not None

    def emulated(moved: Callable[[PyTree], PyTree]) -> dict[str, Any]:
        state = emulator.init(*keys_of(seed), data, num_updates=_UPDATES)
        experts = tuple(layer._replace(params=moved(layer.params)) for layer in state.experts)
        state = emulator.run(state._replace(params=moved(state.params), experts=experts), order, data)
        return {"losses": state.totals.losses, "trunk": state.params, "experts": state.expert_params}

    def next_greater(params: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.nextafter(leaf, jnp.full_like(leaf, jnp.inf)), params)

    ours, moved = emulated(lambda params: params), emulated(next_greater)
    theirs = {"losses": swarm.losses, "trunk": swarm.params, "experts": swarm.experts}
    return {
        **{name: _difference(ours[name], theirs[name]) for name in ours},
        "last_bit": max(_difference(ours[name], moved[name]) for name in ours),
    }


def _difference(ours: Any, theirs: Any) -> float:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max()) for a, b in pairs)


def time_engine(*, place: Place, seed: int) -> dict[str, float]:
    """Updates a second of the model of `experiments.transformer_xl`, which learns from one sequence at a time."""
    updates, preset = _TIMED.num_updates, PRESETS["dmoe", "tiny"]
    router = product_key(preset.config.grid_size)
    settings = TrainingSettings(where=place, batch_size=1, failure_rate=0.0)  # calls that fail are not computed
    setup = Setup(preset=preset, corpus=load_corpus(), steps=updates, seed=seed, router=router, settings=settings)
    engine = make_engine(setup)
    without_waiting(engine.advance(updates // 4, unheard, unheard))  # compiles if no run before has
    began = time.perf_counter()
    without_waiting(engine.advance(updates - engine.step, unheard, unheard))
    return {_RATE: (updates - updates // 4) / (time.perf_counter() - began)}


def _greatest(differences: Iterable[Mapping[str, Any]], parts: Sequence[str] = ("losses", "trunk", "experts")) -> float:
    return max(float(each[part]) for each in differences for part in parts)


def summarise(run: Run[EmulationSettings]) -> Result | None:
    """Take the greatest difference, and medians over the rounds; None where nothing was compared."""
    differences = run.records("difference")
    if not differences:
        return None
    figures: dict[str, Any] = {}
    # An interrupted run has some of these.
    wide, narrow = ([each for each in differences if each["dtype"] == dtype] for dtype in ("float64", "float32"))
    if wide:  # losses are kept as float32 whatever the parameters are
        figures["float64_parameter_difference"] = _greatest(wide, ("trunk", "experts"))
    if narrow:
        figures["emulator_max_difference"] = _greatest(narrow)
    for name in dict.fromkeys(each["problem"] for each in narrow):
        compared, key = [each for each in narrow if each["problem"] == name], name.lower().replace("-", "_")
        figures[f"max_difference_{key}"] = _greatest(compared)
        figures[f"last_bit_difference_{key}"] = _greatest(compared, ("last_bit",))
    ratios = (MNIST_RATIO,) if run.settings.quick else (MNIST_RATIO, XL_RATIO)
    figures |= round_figures(run.records(SLICE), ratios, (_RATE,)) or {}
    return Result(
        title="The emulator beside the swarm",
        summary=f"{_UPDATES} updates on the swarm's own order of events, with failing calls; then updates "
        "a second of one seed, in turns.",
        figures=figures,
        bars=[*DIFFERENCES, *(ratio.bar for ratio in ratios)],
    )


EXPERIMENT = Experiment(measure=measure, summarise=summarise, expected=(DataError, HelperFailed))
