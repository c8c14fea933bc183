"""Emulated trainings of one setting and one seed, and many of them side by side."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax.arrays import PyTree
from dmoe_jax.emulator import Data, Emulator, EventOrder, SwarmState, draw_order, exponential_delays
from dmoe_jax.emulator.events import Events
from dmoe_jax.emulator.order import STAGE, num_stages
from dmoe_jax.machine.freed_memory import give_back
from experiments.emulation.dense import DenseProblem, dense_mnist
from experiments.emulation.dense_emulator import DenseEmulator, draw_turns
from experiments.emulation.problems import Problem, Remedy, keys_of, mnist, transformer_xl
from experiments.emulation.released_gate import released_gate
from experiments.emulation.swarm import train_swarm
from experiments.processes import HelperProcess, open_helpers

_STEPS_ROUNDING = 32
"""Batches of a trainer are given in multiples of this, so that seeds share compiled programs."""

_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""For glibc: large arrays lie in pages of 2 MB where the system has them. A training of 256 experts takes three
quarters of the time so, one of 4,096 half."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training. JSON carries it to another process.

    Attributes:
      label: the setting's name; seeds of one setting share it. seed: of parameters, batches, delays and failures.
      problem: "mnist", "mnist-dense" or "transformer-xl".
      sizes: arguments of the problem.
      gate: of the mixtures: "trained" product keys, or the "frozen" gate of the authors' emulator.
      num_trainers, num_updates: of the swarm. num_points: evaluations, evenly spread.
      num_places: for trainers in the compiled program, so that settings with fewer can share it; None: one for each.
      delay_s: mean of the exponential delay of a call. An order knows no unit: what counts is who overtakes whom.
      failure_rate: share of failing calls.
      in_swarm: whether the simulated swarm itself is trained, which takes much longer; without evaluations.
      fresh_experts: whether calls are computed at the end of their step, so that no expert is stale.
      remedy: arguments of `Remedy`.
    """

    label: str
    seed: int
    problem: str
    sizes: dict[str, Any]
    gate: str = "trained"
    num_trainers: int
    num_updates: int
    num_points: int = 10
    num_places: int | None = None
    delay_s: float = 0.125
    failure_rate: float = 0.0
    in_swarm: bool = False
    fresh_experts: bool = False
    remedy: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_places is not None and self.num_places < self.num_trainers:
            raise ValueError(f"expected places for {self.num_trainers} trainers, got {self.num_places}")

    @property
    def places(self) -> int:
        """For trainers, in the compiled program."""
        return self.num_places or self.num_trainers

    def setting(self) -> str:
        """Return the arguments that two trials with one compiled program have in common, as JSON."""
        same = ("problem", "sizes", "gate", "places", "num_updates", "remedy")
        return json.dumps({name: getattr(self, name) for name in same}, sort_keys=True)


def run_trials(trials: Sequence[Trial], *, num_jobs: int, on_done: Callable[[Trial, dict[str, Any]], None]) -> None:
    """Run these in `num_jobs` processes, and tell of each when it is done.

    A process goes on with trials of the setting that it has compiled, as long as there are any, see `next_of`.

    Raises:
      HelperFailed: a process ended too early.
    """
    waiting = list(trials)
    jobs = max(1, min(num_jobs, len(waiting)))

    last: dict[HelperProcess, Trial] = {}
    choosing = Lock()

    def next_trial(helper: HelperProcess) -> Trial | None:
        with choosing:
            if not waiting:
                return None
            trial = waiting.pop(next_of(waiting, last.get(helper), last.values()))
            last[helper] = trial
            return trial

    def work(helper: HelperProcess) -> Iterator[tuple[Trial, dict[str, Any]]]:
        while (trial := next_trial(helper)) is not None:
            yield trial, helper.ask(**dataclasses.asdict(trial))

    settings = [{"number": number, "jobs": jobs} for number in range(jobs)]
    with open_helpers("experiments.emulation.worker", settings, environment=_HUGE_PAGES) as helpers:
        pool = ThreadPoolExecutor(jobs)
        streams = [work(helper) for helper in helpers]
        try:
            running = {pool.submit(next, stream, None): stream for stream in streams}
            while running:
                done = next(as_completed(running))
                stream = running.pop(done)
                if (answer := done.result()) is not None:
                    running[pool.submit(next, stream, None)] = stream
                    on_done(*answer)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def next_of(waiting: Sequence[Trial], last: Trial | None, last_of_all: Collection[Trial]) -> int:
    """The place of the trial that is best for a process: one of the setting that it has compiled for its `last` one,
    and of the same seed if there is one; else the first that no process has compiled; else the first."""
    own = [place for place, trial in enumerate(waiting) if last is not None and trial.setting() == last.setting()]
    if last is not None and own:
        return next((place for place in own if waiting[place].seed == last.seed), own[0])
    compiled = {trial.setting() for trial in last_of_all}
    return next((place for place, trial in enumerate(waiting) if trial.setting() not in compiled), 0)


def run_trial(trial: Trial) -> dict[str, Any]:
    """Train.

    Returns: `points`, a list of {step, loss (mean over the updates since the last point), validation_loss, and metrics
      such as accuracy}; and `trunk_staleness`, `expert_staleness`, means over the run, if there are experts.
    """
    if trial.problem == "mnist-dense":
        return _run_dense(trial)
    problem, emulator = _compiled(trial.setting())
    num_updates = trial.num_updates
    if trial.in_swarm:
        return _run_swarm(trial, problem, emulator)
    order = draw_order(
        num_updates=num_updates,
        num_trainers=trial.num_trainers,
        num_layers=emulator.num_layers,
        num_pairs=problem.batch_size * emulator.k_best,
        delay=exponential_delays(trial.delay_s),
        failure_rate=trial.failure_rate,
        seed=trial.seed,
    )
    if trial.fresh_experts:
        order = with_fresh_experts(order)
    order = dataclasses.replace(order, num_trainers=trial.places)  # some of whom never begin a step
    data = jax.tree.map(jnp.asarray, problem.data(trial.places, steps=_rounded(order.steps), seed=trial.seed))
    state = _LEFTOVERS.begin(trial, emulator, data)
    points, done, began = [], 0, 0
    for step in _steps_of_points(trial):
        end = int(order.updates[step - 1]) + 1
        state = emulator.run(state, order, data, start=began, stop=end)
        (evaluation,) = emulator.evaluate(state, problem.evaluation)
        losses = np.asarray(state.totals.losses)[done:step]
        points.append(_point(step, losses, evaluation.loss, evaluation.metrics))
        done, began = step, end
    answer = {
        "points": points,
        "trunk_staleness": float(np.asarray(state.totals.staleness).mean()),
        "expert_staleness": float(state.expert_staleness),
        "rejected": int(state.rejected),
    }
    _LEFTOVERS.end(trial, state)
    return answer


def with_fresh_experts(order: EventOrder) -> EventOrder:
    """The same steps of the same trainers, but all their calls are computed at once, when the step ends.

    Then no update of an expert comes between a call's forward and its backward: only the trunk is stale.
    """
    last = STAGE + num_stages(order.num_layers) - 1
    place = np.arange(len(order.kind))
    when = np.full(len(order.kind), -1)
    for trainer in range(order.num_trainers):
        own = np.flatnonzero(order.trainer == trainer)
        ends = own[order.kind[own] == last]
        step = np.searchsorted(ends, own)  # which of them ends the step of each event
        ended = step < len(ends)
        when[own[ended]] = ends[step[ended]]
    reads = order.kind == STAGE
    when[reads] = place[reads]
    kept = np.flatnonzero(when >= 0)
    kept = kept[np.lexsort((kept, when[kept]))]
    return dataclasses.replace(order, **{name: getattr(order, name)[kept] for name in Events._fields})


def _run_swarm(trial: Trial, problem: Problem, emulator: Emulator) -> dict[str, Any]:
    # A trainer that is lucky takes at most twice its share of the steps, and a few more at the beginning.
    steps = 2 * trial.num_updates // trial.num_trainers + 32
    swarm = train_swarm(
        problem,
        emulator,
        problem.data(trial.num_trainers, steps=steps, seed=trial.seed),
        num_updates=trial.num_updates,
        delay_s=trial.delay_s,
        failure_rate=trial.failure_rate,
        seed=trial.seed,
    )
    ends = _steps_of_points(trial)
    parts = zip([0, *ends[:-1]], ends, strict=True)
    return {"points": [{"step": end, "loss": float(np.nanmean(swarm.losses[first:end]))} for first, end in parts]}


def _run_dense(trial: Trial) -> dict[str, Any]:
    problem, emulator = _compiled_dense(trial.setting())
    turns = draw_turns(
        num_updates=trial.num_updates,
        num_trainers=trial.num_trainers,
        delay=exponential_delays(trial.delay_s),
        seed=trial.seed,
    )
    steps = _rounded(int(np.bincount(turns).max()))
    data = jax.tree.map(jnp.asarray, problem.data(trial.places, steps=steps, seed=trial.seed))
    state = emulator.init(problem.init(keys_of(trial.seed)[0]), num_updates=trial.num_updates)
    points, done = [], 0
    for step in _steps_of_points(trial):
        state = emulator.run(state, turns[done:step], data)
        loss, accuracy = problem.evaluate(state.params)
        points.append(_point(step, np.asarray(state.losses)[done:step], loss, {"accuracy": accuracy}))
        done = step
    return {"points": points, "rejected": int(np.isnan(np.asarray(state.losses)).sum())}


@functools.lru_cache(maxsize=1)
def _compiled(setting: str) -> tuple[Problem, Emulator]:
    wanted = json.loads(setting)
    sizes, remedy = dict(wanted["sizes"]), Remedy(**wanted["remedy"])
    sizes["grid_size"] = tuple(sizes["grid_size"])
    if wanted["problem"] == "mnist":
        router = released_gate(sizes["grid_size"]) if wanted["gate"] == "frozen" else None
        problem = mnist(**sizes, router=router, remedy=remedy)
    else:
        problem = transformer_xl(**sizes, num_updates=wanted["num_updates"], remedy=remedy)
    return problem, problem.emulator(wanted["places"])


@functools.lru_cache(maxsize=1)
def _compiled_dense(setting: str) -> tuple[DenseProblem, DenseEmulator]:
    wanted = json.loads(setting)
    problem = dense_mnist(**wanted["sizes"], remedy=Remedy(**wanted["remedy"]))
    return problem, DenseEmulator(problem.loss, optimizer=problem.optimizer, num_trainers=wanted["places"])


_KEPT_BYTES = 1 << 30
"""Freed memory that is kept at most: thousands of experts do not fit into the holes that others left."""


class _Leftovers:
    """Leftovers of a trial for the next one in this process: its experts as they began, and the memory of its state.

    To draw thousands of experts takes as long as half their training, and to touch gigabytes of fresh memory as long
    again.
    """

    def __init__(self) -> None:
        self._experts: dict[tuple[str, int], tuple[PyTree, ...]] = {}
        self._states: dict[str, SwarmState] = {}

    def begin(self, trial: Trial, emulator: Emulator, data: Data) -> SwarmState:
        """The swarm before its first event."""
        sizes, setting = json.dumps([trial.problem, trial.sizes], sort_keys=True), trial.setting()
        trunk_key, expert_key = keys_of(trial.seed)
        spare = self._states.pop(setting, None)
        self._states.clear()  # before there are others: there may not be room for both
        if (sizes, trial.seed) not in self._experts:
            self._experts.clear()
            self._experts[sizes, trial.seed] = jax.block_until_ready(emulator.init_experts(expert_key))
        give_back(_KEPT_BYTES)
        experts = self._experts[sizes, trial.seed]
        return emulator.init(trunk_key, experts, data, num_updates=trial.num_updates, spare=spare)

    def end(self, trial: Trial, state: SwarmState) -> None:
        """`state` is not needed any more."""
        self._states[trial.setting()] = state


_LEFTOVERS = _Leftovers()


def _steps_of_points(trial: Trial) -> list[int]:
    return [math.ceil(trial.num_updates * (i + 1) / trial.num_points) for i in range(trial.num_points)]


def _rounded(steps: int) -> int:
    return -(-steps // _STEPS_ROUNDING) * _STEPS_ROUNDING


def _point(step: int, losses: np.ndarray, validation_loss: float, metrics: Any) -> dict[str, Any]:
    return {"step": step, "loss": float(np.nanmean(losses)), "validation_loss": validation_loss, **metrics}
