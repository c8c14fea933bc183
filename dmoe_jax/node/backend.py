"""One expert as a node keeps it: parameters, optimiser state and compiled programs.

The programs (`dmoe_jax.node.programs`) are shared by every expert of one kind and optimiser; an update donates `params`
and `opt_state`. Rows are padded to powers of two, so that a node compiles two programs per bucket whatever batch sizes
its trainers send; padded rows carry zero gradients and change nothing beyond rounding.

An expert lives in a *place*: on JAX's default device, or where a `Layout` says, whole or in parts.

One gradient of finite numbers can make an expert NaN for everybody, for good. So an update whose outcome is not finite
changes nothing (`UpdateRejected`).
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import optax

from dmoe_jax.arrays import stored
from dmoe_jax.experts.base import Expert, numbers_of_uid
from dmoe_jax.grid import ExpertUid, expand_grid_pattern
from dmoe_jax.node.orders import Order
from dmoe_jax.node.placement import DEFAULT_PLACE, Place, spread
from dmoe_jax.node.programs import expert_programs, key_data_with, state_nbytes
from dmoe_jax.node.sharding import to_host
from dmoe_jax.node.strategies.buckets import bucket_of, buckets_up_to
from dmoe_jax.node.strategies.stack import Stack, StackedBatch, StackedStore
from dmoe_jax.node.strategies.store import FinishBackward, Programs, SingleStore, Store
from dmoe_jax.types import PyTree
from net.types import Array

REMEMBERED_S = 60.0
"""For so long an expert remembers, at least, that it has learnt from a request. A retry comes within one call's
deadline, which is 10 s by default."""
LEAST_REMEMBERED, MOST_REMEMBERED = 64, 65536
"""So many of its newest requests it always remembers; and no more (10 MB), if it learns from over a thousand a
second."""

NO_REQUESTS: Mapping[bytes, float] = MappingProxyType({})


class UpdateRejected(ValueError):
    """The outcome of a backward request is not finite; the expert is as it was before.

    Attributes:
      reason: "update", for the new parameters or optimiser state, or "input gradient".
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the {reason} is not finite")
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one expert is to compute at once: the arguments of `ExpertBackend.backward`, or of `forward`."""

    inputs: tuple[Array, ...]
    """Each [rows, ...]."""
    output_grads: Array | None = None
    """[rows, ...]; None: a forward pass."""
    keys: Array | None = None
    """uint32 [rows, 2], or None."""
    seen: Array | None = None
    """int64 [rows], or None; of a backward pass."""
    requests: Mapping[bytes, float] = field(default_factory=dict)
    """Likewise."""


class ExpertBackend:
    """The state of one expert and what can be done with it. Synchronous: call it through a `Device`.

    Args:
      expert: the network and the specification of its inputs.
      optimizer: an Optax optimiser that needs no loss, or None for an expert that never changes.
      params: initial parameters, which are copied: updates donate the buffers, and optimisers such as prodigy keep
        the initial parameters in their state.
      place: where the expert lives.
      uid: its name in orders to other processes, if the place has such.

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
        """Where it lives."""
        self._uid = uid
        self.update_count = 0
        """Optimiser steps taken. Replies carry it, and backward requests that of their forward: hence the staleness."""
        self.learnt_from: dict[bytes, float] = {}
        """Names of the newest backward requests among these steps, oldest first, and when they came; infinity: before a
        restart. Those of the last `REMEMBERED_S` are here, see there. Saved with the expert: a retry that comes after a
        restart must not train it twice. Those of its other copies are among them, where there are such."""
        self.steps_here = 0
        """Those of them that this process took."""
        self.staleness_total = 0.0
        """The staleness of each of these, summed up."""
        self.optimizer = optimizer
        """Steps it."""
        self.store: Store = SingleStore(expert, optimizer, params, place)
        """Where its state lies, and what runs on it. Replaced while no batch runs, where experts are stacked."""

    @property
    def programs(self) -> Programs:
        """Shared by all experts of this kind, optimiser and place."""
        return self.store.programs

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters and optimiser state, all parts together."""
        return self.store.nbytes

    @property
    def params(self) -> PyTree:
        """The current parameters. Valid until the next `backward`, which donates them."""
        return self.store.read()[0]

    @property
    def state(self) -> dict[str, PyTree]:
        """Parameters and optimiser state, random keys as their data; valid until the next `backward`, like `params`.

        Whatever spans processes is gathered, by all of them at once, and is NumPy arrays.
        """
        self._tell("gather")
        params, opt_state = self.store.read()
        state = jax.tree.map(stored, {"params": params, "opt_state": opt_state})
        return jax.tree.map(to_host, state) if self.spans_processes else state

    @property
    def spans_processes(self) -> bool:
        """Whether parts of it are in other processes."""
        return self.place.layout is not None and self.place.layout.spans_processes

    def load(self, state: dict[str, PyTree], *, update_count: int, learnt_from: Iterable[bytes] | None = None) -> None:
        """Take up a state of the same structure, laid out over devices as the present one is.

        Args:
          learnt_from: with a saved state; None: the names stay, as where copies of the expert are averaged.
        """
        if self.place.tell is not None:
            leaves = jax.tree.leaves((state["params"], state["opt_state"]))
            self._tell("load", number=update_count, state=tuple(map(np.asarray, leaves)))
        self.store.write((state["params"], state["opt_state"]))
        self.update_count = update_count
        if learnt_from is not None:
            self.learnt_from = dict.fromkeys(learnt_from, math.inf)

    def forward(self, inputs: Sequence[Array], keys: Array | None = None) -> Array:
        """Output for `inputs`, each [rows, ...]. Rows are padded and cut again.

        Args:
          inputs: as the expert specifies them.
          keys: uint32 [rows, 2], a dropout key for each row; None: evaluation.
        """
        return self.begin_forward(inputs, keys)()[0]

    def begin_forward(self, inputs: Sequence[Array], keys: Array | None = None) -> Callable[[], tuple[Array, ...]]:
        """Have XLA begin a `forward`; what is returned waits for it, and returns the output as the only one."""
        self._tell("forward", inputs=tuple(inputs), keys=keys)
        finish = self.store.begin_forward(tuple(inputs), keys)
        return lambda: (finish(),)

    def backward(
        self,
        inputs: Sequence[Array],
        output_grads: Array,
        keys: Array | None = None,
        seen: Array | None = None,
        requests: Mapping[bytes, float] = NO_REQUESTS,
    ) -> tuple[Array, ...]:
        """Gradients of the differentiable inputs, taken at the current parameters, which are then updated once.

        Args:
          inputs: as the expert specifies them.
          output_grads: [rows, ...].
          keys: as of the forward.
          seen: int64 [rows], the update count at each row's forward, at least 0. The optimiser is told the rows' mean
            staleness; counts beyond today's, of an expert that was restored since, have none. None: nothing is stale.
          requests: names of the requests in it, and when they came, by one clock for all; see `learnt_from`.

        Raises:
          UpdateRejected: the update or a gradient is not finite; nothing was changed.
        """
        return self.begin_backward(inputs, output_grads, keys, seen, requests)()

    def begin_backward(
        self,
        inputs: Sequence[Array],
        output_grads: Array,
        keys: Array | None = None,
        seen: Array | None = None,
        requests: Mapping[bytes, float] = NO_REQUESTS,
    ) -> Callable[[], tuple[Array, ...]]:
        """Have XLA begin a `backward`; what is returned waits for it, returns the gradients and counts the update.

        It must be called before anything else is done with this expert.
        """
        self._tell("backward", inputs=tuple(inputs), output_grads=output_grads, keys=keys, seen=seen)
        staleness = self.staleness_of(seen)
        finish = self.store.begin_backward(tuple(inputs), output_grads, keys, staleness)
        return lambda: self.count_update(*finish(), staleness=staleness, requests=requests)

    def staleness_of(self, seen: Array | None) -> float:
        """The mean staleness of rows that have seen these update counts, see `backward`."""
        return 0.0 if seen is None else float(np.maximum(self.update_count - seen, 0).mean())

    def count_update(
        self, finite: Array, input_grads: tuple[Array, ...], *, staleness: float, requests: Mapping[bytes, float]
    ) -> tuple[Array, ...]:
        """Take note of an update that its store has made, unless it is not finite; returns the gradients.

        Args:
          finite, input_grads: as of `Store.begin_backward`.
          staleness: which the optimiser was told.
          requests: as of `backward`.

        Raises:
          UpdateRejected: the update or a gradient is not finite; nothing was changed.
        """
        update_finite, grads_finite = finite
        if not (update_finite and grads_finite):
            raise UpdateRejected("input gradient" if update_finite else "update")
        if self.optimizer is not None:
            self.update_count += 1
            self.steps_here += 1
            self.staleness_total += staleness
            self._remember(requests)
        return input_grads

    def learnt_elsewhere(self, names: Iterable[bytes], came_at: float) -> None:
        """Remember requests from which another copy of this expert has learnt, whose state comes here.

        Args:
          came_at: when this was told, by the clock of `backward`'s requests.
        """
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
        """Batches of up to this many rows find their programs compiled, because they were warmed up."""
        return max(tuple(self.programs.warm), default=0)

    def warm_up(self, max_rows: int) -> None:
        """Compile every bucket up to `max_rows`; the expert stays as it is."""
        for bucket in self.buckets_up_to(max_rows):
            self.warm_up_bucket(bucket)

    def warm_up_bucket(self, bucket: int) -> None:
        """Compile for batches of this many rows, unless that is done. May run in another thread than the batches."""
        if bucket in self.programs.warm:
            return
        self._tell("compile", number=bucket)
        self.store.compile(bucket)
        self._tell("meet")  # warm is what is warm in all processes

    def obey(self, order: Order) -> None:
        """Do what another process does with the same expert, which told of it by this order.

        Raises:
          UpdateRejected: it was, there as well.
          ValueError: the order does not fit the expert.
        """
        if order.kind == "forward":
            self.forward(order.inputs, order.keys)
        elif order.kind == "backward" and order.output_grads is not None:
            self.backward(order.inputs, order.output_grads, order.keys, order.seen)
        elif order.kind == "compile":
            self.warm_up_bucket(order.number)
        elif order.kind == "gather":
            _ = self.state
        elif order.kind == "load":
            params, opt_state = jax.tree.unflatten(jax.tree.structure(self.store.read()), order.state)
            self.load({"params": params, "opt_state": opt_state}, update_count=order.number)
        else:
            raise ValueError(f"an expert cannot obey an order to {order.kind}")

    def _tell(self, kind: str, **work: Any) -> None:
        """Tell the other processes that hold parts of this expert of what begins now."""
        if self.place.tell is not None:
            self.place.tell(Order(kind=kind, uid=self._uid, **work))

    def bucket_of(self, rows: int) -> int:
        """Rows of the program for a batch of so many: a power of two, times the parts into which rows are split."""
        return bucket_of(rows, self._row_parts)

    def buckets_up_to(self, max_rows: int) -> tuple[int, ...]:
        """Every bucket that batches of 1..max_rows rows are computed in once all are compiled, ascending."""
        buckets = buckets_up_to(max_rows, self._row_parts)
        return tuple(bucket for bucket in buckets if bucket >= self.store.least_rows) or (self.store.least_rows,)

    @property
    def _row_parts(self) -> int:
        return 1 if self.place.layout is None else self.place.layout.mesh_shape.data


def stack_of(backend: ExpertBackend) -> Stack | None:
    """The stack that an expert lies in; None: it lies by itself."""
    return backend.store.stack if isinstance(backend.store, StackedStore) else None


def begin_together(
    batches: Sequence[tuple[ExpertBackend, Batch]],
) -> Callable[[], list[tuple[Array, ...] | UpdateRejected]]:
    """Have XLA begin batches of different experts, of one stack if there are several; all forward, or all backward.

    Returns: waits for them; the output or the input gradients of each batch, or why its update was rejected. What is
      rejected changes nothing of the others.
    """
    if len(batches) > 1:
        return _begin_stacked(batches)
    ((backend, batch),) = batches
    if batch.output_grads is None:
        finish = backend.begin_forward(batch.inputs, batch.keys)
    else:
        finish = backend.begin_backward(batch.inputs, batch.output_grads, batch.keys, batch.seen, batch.requests)
    return lambda: [_unless_rejected(finish)]


def _begin_stacked(
    batches: Sequence[tuple[ExpertBackend, Batch]],
) -> Callable[[], list[tuple[Array, ...] | UpdateRejected]]:
    stores = [backend.store for backend, _ in batches]
    staleness = [backend.staleness_of(batch.seen) for backend, batch in batches]
    stacked = [
        StackedBatch(
            index=store.index, inputs=batch.inputs, output_grads=batch.output_grads, keys=batch.keys, staleness=stale
        )
        for store, (_, batch), stale in zip(stores, batches, staleness, strict=True)
        if isinstance(store, StackedStore)
    ]
    stack = stack_of(batches[0][0])
    if stack is None or any(stack_of(backend) is not stack for backend, _ in batches):
        raise ValueError("experts that share a program must lie in one stack")
    if stacked[0].output_grads is None:
        outputs = stack.begin_forward(stacked)
        return lambda: [(finish(),) for finish in outputs]
    begun = list(zip(stack.begin_backward(stacked), batches, staleness, strict=True))

    def outcome(finish: FinishBackward, backend: ExpertBackend, batch: Batch, stale: float) -> tuple[Array, ...]:
        return backend.count_update(*finish(), staleness=stale, requests=batch.requests)

    return lambda: [
        _unless_rejected(functools.partial(outcome, finish, backend, batch, stale))
        for finish, (backend, batch), stale in begun
    ]


def _unless_rejected(finish: Callable[[], tuple[Array, ...]]) -> tuple[Array, ...] | UpdateRejected:
    try:
        return finish()
    except UpdateRejected as rejected:
        return rejected


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
    patterns: dict[ExpertUid, str] = {}
    for pattern in experts:
        for uid in expand_grid_pattern(pattern):
            if uid in patterns:
                raise ValueError(f"expert {uid} is named twice, by {patterns[uid]!r} and by {pattern!r}")
            patterns[uid] = pattern
    if not patterns:
        raise ValueError("expected at least one expert, got none")
    if len(places) == 1:  # sizes decide nothing
        chosen = dict.fromkeys(map(str, patterns), places[0])
    else:
        nbytes = {str(uid): state_nbytes(experts[pattern], optimizer) for uid, pattern in patterns.items()}
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
    """One expert as `make_backends` makes it; its parameters begin where they will stay, and nowhere else.

    Raises:
      ValueError: see `ExpertBackend`.
    """
    key = jax.random.key(seed)
    if place.tell is not None:
        place.tell(Order(kind="make", uid=str(uid)))
    numbers = np.array(numbers_of_uid(uid.prefix, uid.coordinates), np.uint32)
    # As NumPy's, so that processes which share a mesh give the same to each of their devices.
    key_data = np.asarray(key_data_with(np.asarray(jax.random.key_data(key)), numbers))
    params = expert_programs(expert, optimizer, place.layout).init(key_data)
    return ExpertBackend(expert, optimizer, params, place=place, uid=str(uid))
