"""Emulated trainings of one setting and one seed, and many of them side by side."""

import functools
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax import routing
from dmoe_jax.arrays import PyTree
from dmoe_jax.emulator import Emulator, EventOrder, SwarmState, draw_order, exponential_delays
from dmoe_jax.emulator.events import Events
from dmoe_jax.emulator.order import STAGE
from experiments.bench import Run
from experiments.emulation.problems import DEFAULT, Problem, Remedy, dense_mnist, keys_of, mnist, transformer_xl
from experiments.emulation.settings import FIRST_SEARCH_SEED
from experiments.emulation.swarm import train_swarm
from experiments.engines import open_engine
from experiments.results import Finals, finals_of
from experiments.sweep import Task, completed


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training.

    Attributes:
      label: the setting's name; seeds of one setting share it. seed: of parameters, batches, delays and failures.
      problem: "mnist", "mnist-dense" or "transformer-xl".
      sizes: arguments of the problem.
      frozen_gate: True for the gate of the authors' emulator, False for trained product keys.
      num_trainers, num_updates: of the swarm. num_points: evaluations, evenly spread.
      delay_s: mean of the exponential delay of a call. An order knows no unit: what counts is who overtakes whom.
      failure_rate: share of failing calls.
      in_swarm: True to train the simulated swarm itself, which takes much longer; without evaluations.
      fresh_experts: True if calls are computed at the end of their step, so that no expert is stale.
      remedy: against staleness.
    """

    label: str
    seed: int = 0
    problem: str
    sizes: dict[str, Any]
    frozen_gate: bool = False
    num_trainers: int
    num_updates: int
    num_points: int = 10
    delay_s: float = 0.125
    failure_rate: float = 0.0
    in_swarm: bool = False
    fresh_experts: bool = False
    remedy: Remedy = DEFAULT

    def __str__(self) -> str:
        return f"{self.problem}, {self.label}, seed {self.seed}"

    def __hash__(self) -> int:
        return hash((self.problem, self.label, self.seed))

    @property
    def program(self) -> "Trial":
        """A trial in the place of all that share one compiled program with this one."""
        return replace(self, label="", seed=0, delay_s=0.0, failure_rate=0.0, in_swarm=False, fresh_experts=False)


def seeds_of(rows: Sequence[Trial], *, first: int, count: int) -> list[Trial]:
    """So many seeds of each of these; those of a row stand together."""
    return [replace(row, seed=seed) for row in rows for seed in range(first, first + count)]


def train_missing(run: Run[Any], trials: Sequence[Trial], *, num_jobs: int | None = None) -> None:
    """Train those that the run has no record "trial" of, so many at a time or as its settings say, and log each.

    Raises:
      HelperFailed: one of them failed, or was lost again and again. UsageError: the engine cannot be reached.
    """
    have = {(each["problem"], each["label"], each["seed"]) for each in run.records("trial")}
    missing = {str(trial): trial for trial in trials if (trial.problem, trial.label, trial.seed) not in have}
    if not missing:
        return
    tasks = [
        Task(key=key, call=partial(run_trial, trial), kin=(trial.program, trial.seed)) for key, trial in missing.items()
    ]
    with open_engine(run, len(tasks), num_jobs=num_jobs) as engine:
        for number, (task, found) in enumerate(completed(engine, tasks, run.say), start=1):
            trial = missing[task.key]
            run.log("trial", problem=trial.problem, label=trial.label, seed=trial.seed, **found)
            loss = found["points"][-1]["loss"]
            run.say(f"{trial}: loss {loss:.3f}; {len(tasks) - number} are left")


def trained(run: Run[Any]) -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    """(problem, label) -> seed -> what `run_trial` has returned."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for record in run.records("trial"):
        found.setdefault((record["problem"], record["label"]), {})[record["seed"]] = record
    return found


def final_figures(run: Run[Any]) -> Finals:
    """The figures at the end of every training that is reported: none of a search."""
    records = (
        record | record["points"][-1] | {"problem": problem, "setting": label, "seed": seed}
        for (problem, label), seeds in trained(run).items()
        for seed, record in seeds.items()
        if seed < FIRST_SEARCH_SEED
    )
    return finals_of(records, "problem", "setting")


def run_trial(trial: Trial) -> dict[str, Any]:
    """Train.

    Returns: `points`, a list of {step, loss (mean over the updates since the last point), metrics such as accuracy};
      `expert_staleness`, the mean over the run; and `updates_per_s`, after the first point.
    """
    problem, emulator = _compiled(trial.program)
    if trial.in_swarm:
        return _run_swarm(trial, problem, emulator)
    order = draw_order(
        num_updates=trial.num_updates,
        num_trainers=trial.num_trainers,
        num_layers=emulator.num_layers,
        num_pairs=problem.batch_size * emulator.k_best,
        delay=exponential_delays(trial.delay_s),
        failure_rate=trial.failure_rate,
        seed=trial.seed,
    )
    if trial.fresh_experts:
        order = with_fresh_experts(order)
    steps = -(-order.steps // 32) * 32  # in multiples, so that seeds share compiled programs
    data = jax.tree.map(jnp.asarray, problem.data(trial.num_trainers, steps=steps, seed=trial.seed))
    spare = _SPARE.pop(trial.program, None)
    _SPARE.clear()  # before there is another state: there may not be room for both
    experts, (trunk_key, _) = _initial_experts(trial.program, trial.seed), keys_of(trial.seed)
    state = emulator.init(trunk_key, experts, data, num_updates=trial.num_updates, spare=spare)
    points, start, times = [], 0, []
    for first, step in _pieces(trial):
        stop = int(order.updates[step - 1]) + 1
        state = emulator.run(state, order, data, start=start, stop=stop)
        (evaluation,) = emulator.evaluate(state, problem.evaluation)
        points.append({"step": step, "loss": _mean(state.totals.losses[first:step]), **evaluation.metrics})
        times.append(time.perf_counter())
        start = stop
    _SPARE[trial.program] = state
    rate = (trial.num_updates - points[0]["step"]) / (times[-1] - times[0])
    return {"points": points, "expert_staleness": float(state.expert_staleness), "updates_per_s": rate}


# To draw thousands of experts takes as long as half their training, and to touch gigabytes of fresh memory as long
# again: so a trial leaves both to the next one with its program.
_SPARE: dict[Trial, SwarmState] = {}


@functools.lru_cache(maxsize=1)
def _initial_experts(program: Trial, seed: int) -> tuple[PyTree, ...]:
    return jax.block_until_ready(_compiled(program)[1].init_experts(keys_of(seed)[1]))


@functools.lru_cache(maxsize=1)
def _compiled(program: Trial) -> tuple[Problem, Emulator]:
    own: dict[str, Any] = {**program.sizes, "remedy": program.remedy}
    if program.problem == "transformer-xl":
        problem = transformer_xl(**own, num_updates=program.num_updates)
    elif program.problem == "mnist-dense":
        problem = dense_mnist(**own)
    else:
        problem = mnist(**own, router=routing.frozen_random(own["grid_size"]) if program.frozen_gate else None)
    return problem, problem.emulator(program.num_trainers)


def with_fresh_experts(order: EventOrder) -> EventOrder:
    """The same steps of the same trainers, but all their calls are computed at once, when the step ends.

    Then no update of an expert comes between a call's forward and its backward: only the trunk is stale.
    """
    last, never = order.kind.max(), len(order.kind)
    when = np.arange(never)
    for trainer in range(order.num_trainers):
        own = np.flatnonzero(order.trainer == trainer)
        ends = np.append(own[order.kind[own] == last], never)
        when[own] = ends[np.searchsorted(ends, own)]
    when = np.where(order.kind == STAGE, np.arange(never), when)
    kept = np.argsort(when, kind="stable")[: np.sum(when < never)]
    return replace(order, **{name: getattr(order, name)[kept] for name in Events._fields})


def _run_swarm(trial: Trial, problem: Problem, emulator: Emulator) -> dict[str, Any]:
    swarm = train_swarm(
        problem,
        emulator,
        num_updates=trial.num_updates,
        delay_s=trial.delay_s,
        failure_rate=trial.failure_rate,
        seed=trial.seed,
    )
    points = [{"step": step, "loss": _mean(swarm.losses[first:step])} for first, step in _pieces(trial)]
    return {"points": points, "updates_per_s": swarm.updates_per_s}


def _pieces(trial: Trial) -> list[tuple[int, int]]:
    """(the updates before each piece of the training, those at its end, where it is evaluated)."""
    ends = [math.ceil(trial.num_updates * number / trial.num_points) for number in range(1, trial.num_points + 1)]
    return list(itertools.pairwise([0, *ends]))


def _mean(losses: Any) -> float:
    return float(np.nanmean(np.asarray(losses)))
