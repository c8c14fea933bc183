"""Experts as a node keeps them: parameters, optimiser state, and the programs that they share.

A group of experts has one state and one set of compiled programs, and runs a batch of each of several of its experts by
one of them. Most experts are alone in their group; small ones of one kind may be stacked (`dmoe_jax.node.stacked`).
Rows are padded to powers of two, so that a node compiles two programs per bucket whatever batch sizes its trainers
send; padded rows carry zero gradients and change nothing beyond rounding.
"""

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
import optax

from dmoe_jax.arrays import PyTree, stored
from dmoe_jax.directory.grid import ExpertUid, patterns_by_uid
from dmoe_jax.experts.base import Expert, numbers_of_uid
from dmoe_jax.mixture.expert_calls import REMEMBERED_S
from dmoe_jax.node.programs import (
    Batch,
    ExpertPrograms,
    Programs,
    Result,
    State,
    Work,
    bucket_of,
    buckets_up_to,
    expert_programs,
    key_data_with,
    nbytes_of,
    state_shapes,
)
from dmoe_jax.node.sharding import DEFAULT_PLACE, Place, spread
from dmoe_net.types import Array

LEAST_REMEMBERED, MOST_REMEMBERED = 64, 65536
"""Newest requests that it always remembers; and the most (10 MB), if it learns from over a thousand a second."""


class UpdateRejected(ValueError):
    """The outcome of a backward request is not finite; the expert is as it was before. One gradient of finite numbers
    could make it NaN for everybody, for good. The `reason` is "update", for the new parameters or optimiser state, or
    "input gradient"."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the {reason} is not finite")
        self.reason = reason


Outcome = tuple[Array, ...] | UpdateRejected
"""The output or the input gradients of a batch, or why its update was rejected."""


class ExpertGroup:
    """Experts that share programs; `state` is that of all of them. One alone is a group of one.

    Another thread than the one in which batches run may read or load an expert: a lock sees to it that nobody takes
    hold of arrays that an update has been given.
    """

    def __init__(self, programs: Programs, state: State) -> None:
        self.programs = programs
        self._state = state
        self._lock = threading.Lock()

    def begin(self, batches: Sequence[tuple["ExpertBackend", Batch]]) -> Callable[[], list[Outcome]]:
        """Have XLA begin one batch each of different experts of the group, all forward or all backward passes; the
        result waits for them, and is called before these experts are asked again. Gradients are taken at the current
        parameters of an expert, which are then updated once."""
        if any(backend.group is not self for backend, _ in batches):
            raise ValueError("experts that share a program must lie in one stack")
        work = [Work(backend.index, batch, backend.staleness_of(batch)) for backend, batch in batches]
        with self._lock:
            self._state, wait = self.programs.begin(self._state, work)
        return lambda: [
            backend.outcome_of(each, result) for (backend, _), each, result in zip(batches, work, wait(), strict=True)
        ]

    def read(self, index: int) -> State:
        """Return the state of one expert; valid until its next update."""
        with self._lock:
            return self.programs.read(self._state, index)

    def write(self, index: int, saved: State) -> None:
        """Take up a state of one expert, of the same structure, laid out over devices as the present one is."""
        with self._lock:
            self._state = self.programs.write(self._state, index, saved)

    def take(self) -> State:
        """Return the state and let go of it: for who moves it elsewhere without holding it twice."""
        state, self._state = self._state, ((), ())
        return state


class ExpertBackend:
    """One expert of a group: what it has learnt, and what can be done with it. Synchronous: call it through a `Device`.

    Args:
      expert: the network and the specification of its inputs.
      optimizer: an Optax optimiser that needs no loss, or None for an expert that never changes.
      params: initial parameters, which are copied: updates donate the buffers, and optimisers such as prodigy keep
        the initial parameters in their state.
      place: where the expert lives.
      uid: its name, for a place that has need of it (`Place.led`).

    Raises:
      ValueError: if the optimiser cannot work on a node, see `check_optimizer`, or a layout does not fit the state.
    """

    def __init__(
        self,
        expert: Expert,
        optimizer: optax.GradientTransformation | None,
        params: PyTree,
        *,
        place: Place = DEFAULT_PLACE,
        uid: str = "",
    ) -> None:
        self.expert = expert
        self.place = place
        self.update_count = 0
        """Optimiser steps taken. Replies carry it, and backward requests that of their forward: hence the staleness."""
        self.learnt_from: dict[bytes, float] = {}
        """Names of the newest backward requests among these steps, oldest first, and when they came; infinity: before a
        restart. Saved with the expert: a retry that comes after a restart must not train it twice. Requests of its
        other copies are among them."""
        self.steps_here = 0
        """Steps that this process took."""
        self.staleness_total = 0.0
        """Sum of the staleness of all these steps."""
        self.optimizer = optimizer
        programs = _programs_of(expert, optimizer, place, uid)
        self.group = ExpertGroup(programs, programs.begin_with(params))
        """Experts with which it shares programs. Replaced while no batch runs, where experts are stacked."""
        self.index = 0
        """Its position in the group."""

    @property
    def programs(self) -> Programs:
        """The compiled programs of its group."""
        return self.group.programs

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters and optimiser state, all parts together."""
        return self.programs.nbytes

    @property
    def params(self) -> PyTree:
        """The current parameters. Valid until the next `backward`, which donates them."""
        return self.group.read(self.index)[0]

    @property
    def state(self) -> dict[str, PyTree]:
        """Parameters and optimiser state, random keys as their data; valid until the next `backward`, like `params`. A
        state that spans processes is gathered, by all of them at once, and is NumPy arrays."""
        params, opt_state = self.group.read(self.index)
        return jax.tree.map(stored, {"params": params, "opt_state": opt_state})

    def load(self, state: dict[str, PyTree], *, update_count: int, learnt_from: Iterable[bytes] | None = None) -> None:
        """Take up a state of the same structure, laid out over devices as the present one is; `learnt_from` comes with
        a saved state. None: the names stay, as where copies of the expert are averaged."""
        self.group.write(self.index, (state["params"], state["opt_state"]))
        self.update_count = update_count
        if learnt_from is not None:
            self.learnt_from = dict.fromkeys(learnt_from, math.inf)

    def forward(self, inputs: Sequence[Array], keys: Array | None = None) -> Array:
        """Output for `inputs`, each [rows, ...]; see `Batch`."""
        return self._run(Batch(inputs=tuple(inputs), keys=keys))[0]

    def backward(
        self,
        inputs: Sequence[Array],
        output_grads: Array,
        keys: Array | None = None,
        seen: Array | None = None,
        requests: Mapping[bytes, float] | None = None,
    ) -> tuple[Array, ...]:
        """Gradients of the differentiable inputs, and one update; see `Batch`. Raises UpdateRejected if the update or a
        gradient is not finite; nothing was changed then."""
        return self._run(
            Batch(inputs=tuple(inputs), output_grads=output_grads, keys=keys, seen=seen, requests=requests or {})
        )

    def staleness_of(self, batch: Batch) -> float:
        """The mean staleness of its rows."""
        return 0.0 if batch.seen is None else float(np.maximum(self.update_count - batch.seen, 0).mean())

    def outcome_of(self, work: Work, result: Result) -> Outcome:
        """The outcome of a batch that was run: an update is counted, or rejected."""
        if result.finite is None:
            return result.arrays
        update_finite, grads_finite = result.finite
        if not (update_finite and grads_finite):
            return UpdateRejected("input gradient" if update_finite else "update")
        if self.optimizer is not None:
            self.update_count += 1
            self.steps_here += 1
            self.staleness_total += work.staleness
            self._remember(work.batch.requests)
        return result.arrays

    def learnt_elsewhere(self, names: Iterable[bytes], came_at: float) -> None:
        """Remember requests from which another copy of this expert has learnt, whose state comes here; told at
        `came_at`, by the clock of `backward`'s requests."""
        self._remember({name: came_at for name in names if name not in self.learnt_from})

    def _remember(self, requests: Mapping[bytes, float]) -> None:
        known = self.learnt_from
        now = max(requests.values(), default=-math.inf)
        if requests and next(iter(known.values()), now) == math.inf:  # those of before a restart count from now on
            self.learnt_from = known = {name: min(came_at, now) for name, came_at in known.items()}
        known.update(requests)
        while len(known) > LEAST_REMEMBERED:
            oldest, came_at = next(iter(known.items()))
            if came_at > now - REMEMBERED_S and len(known) <= MOST_REMEMBERED:
                return
            del known[oldest]

    @property
    def warm_rows(self) -> int:
        """Most rows of a batch that finds its program compiled."""
        return max(tuple(self.programs.warm), default=0)

    def warm_up(self, max_rows: int) -> None:
        """Compile every bucket up to `max_rows`; the expert stays as it is."""
        for bucket in self.buckets_up_to(max_rows):
            self.warm_up_bucket(bucket)

    def warm_up_bucket(self, bucket: int) -> None:
        """Compile for batches of so many rows, unless that is done. May run in another thread than the batches."""
        if bucket not in self.programs.warm:
            self.programs.compile(bucket)

    def bucket_of(self, rows: int) -> int:
        """Rows of the program for a batch of so many: a power of two, times the parts into which rows are split."""
        return bucket_of(rows, self._row_parts)

    def buckets_up_to(self, max_rows: int) -> tuple[int, ...]:
        """Every bucket that batches of 1..max_rows rows are computed in once all are compiled, ascending."""
        least, buckets = self.programs.least_rows, buckets_up_to(max_rows, self._row_parts)
        return tuple(bucket for bucket in buckets if bucket >= least) or (least,)

    def _run(self, batch: Batch) -> tuple[Array, ...]:
        (outcome,) = self.group.begin([(self, batch)])()
        if isinstance(outcome, UpdateRejected):
            raise outcome
        return outcome

    @property
    def _row_parts(self) -> int:
        return 1 if self.place.layout is None else self.place.layout.mesh_shape.data


def make_backends(
    experts: Mapping[str, Expert],
    optimizer: optax.GradientTransformation | None,
    *,
    seed: int,
    places: Sequence[Place] = (DEFAULT_PLACE,),
) -> dict[str, ExpertBackend]:
    """A backend for each uid, with the parameters that the seed and the uid decide (see `init_by_uid`).

    Args:
      experts: uid such as "ffn.3.1", or pattern such as "ffn.[0:4].[0:4]" -> the network.
      optimizer: steps every expert, each with a state of its own; None: the experts never change.
      seed: decides the initial parameters; the same on all nodes of a swarm.
      places: over which the experts are spread, about as many bytes in each.

    Raises:
      ValueError: naming the pattern, if it is malformed, or the uid, if two patterns name it, or if there is no expert;
        or if an expert cannot be made, see `ExpertBackend`.
    """
    patterns = patterns_by_uid(experts)
    if not patterns:
        raise ValueError("expected at least one expert, got none")
    if len(places) == 1:  # sizes decide nothing
        chosen = dict.fromkeys(map(str, patterns), places[0])
    else:
        nbytes = {str(uid): nbytes_of(state_shapes(experts[pattern], optimizer)) for uid, pattern in patterns.items()}
        chosen = spread(nbytes, places)
    return {
        str(uid): make_backend(uid, experts[pattern], optimizer, seed=seed, place=chosen[str(uid)])
        for uid, pattern in patterns.items()
    }


def make_backend(
    uid: ExpertUid,
    expert: Expert,
    optimizer: optax.GradientTransformation | None,
    *,
    seed: int,
    place: Place = DEFAULT_PLACE,
) -> ExpertBackend:
    """One expert as `make_backends` makes it; its parameters begin where they will stay, and nowhere else."""
    key = jax.random.key(seed)
    numbers = np.array(numbers_of_uid(uid.prefix, uid.coordinates), np.uint32)
    # As NumPy's, so that processes which share a mesh give the same to each of their devices.
    key_data = np.asarray(key_data_with(np.asarray(jax.random.key_data(key)), numbers))
    params = _programs_of(expert, optimizer, place, str(uid)).init(key_data)
    return ExpertBackend(expert, optimizer, params, place=place, uid=str(uid))


def _programs_of(
    expert: Expert, optimizer: optax.GradientTransformation | None, place: Place, uid: str
) -> ExpertPrograms:
    programs = expert_programs(expert, optimizer, place.layout)
    return programs if place.led is None else place.led(uid, programs)
