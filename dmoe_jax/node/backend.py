"""One expert as a node keeps it: parameters, optimiser state and compiled programs.

The programs (`dmoe_jax.node.programs`) are shared by every expert of one kind and optimiser; an update donates `params`
and `opt_state`. Rows are padded to powers of two, so that a node compiles two programs per bucket whatever batch sizes
its trainers send; padded rows carry zero gradients and change nothing beyond rounding.

An expert lives in a *place*: on JAX's default device, or where a `Layout` says, whole or in parts.

One gradient of finite numbers can make an expert NaN for everybody, for good. So an update whose outcome is not finite
changes nothing (`UpdateRejected`).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dmoe_jax.experts.base import Expert, init_by_uid, key_of_uid
from dmoe_jax.grid import ExpertUid, expand_grid_pattern
from dmoe_jax.node.orders import Order
from dmoe_jax.node.placement import DEFAULT_PLACE, Place, spread
from dmoe_jax.node.programs import expert_programs, nbytes_of, own_copy, state_nbytes
from dmoe_jax.node.sharding import Layout, put, to_host
from dmoe_jax.types import PyTree
from net.types import Array

MAX_REMEMBERED = 1024
"""Requests of which an expert remembers that it has learnt from them. A retry comes within one call's deadline."""


class UpdateRejected(ValueError):
    """The outcome of a backward request is not finite; the expert is as it was before.

    Attributes:
      reason: "update", for the new parameters or optimiser state, or "input gradient".
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the {reason} is not finite")
        self.reason = reason


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
        self.learnt_from: dict[bytes, None] = {}
        """Names of the newest backward requests among these steps, oldest first, at most `MAX_REMEMBERED`. Saved with
        the expert: a retry that comes after a restart must not train it twice."""
        self.steps_here = 0
        """Those of them that this process took."""
        self.staleness_total = 0.0
        """The staleness of each of these, summed up."""
        self.programs = expert_programs(expert, optimizer, place.layout)
        """Shared by all experts of this kind, optimiser and layout."""
        self._trains = optimizer is not None
        if self.programs.init_opt_state is not None and self.programs.state is not None:
            self._params = jax.tree.map(_laid_out, self.programs.state[0], params)
            self._opt_state = self.programs.init_opt_state(self._params)
        else:
            self._params = jax.tree.map(own_copy, params)
            self._opt_state = jax.tree.map(own_copy, optimizer.init(self._params)) if optimizer is not None else ()
        self.nbytes = nbytes_of((self._params, self._opt_state))
        """Bytes of its parameters and optimiser state, all parts together."""

    @property
    def params(self) -> PyTree:
        """The current parameters. Valid until the next `backward`, which donates them."""
        return self._params

    @property
    def state(self) -> dict[str, PyTree]:
        """Parameters and optimiser state, random keys as their data; valid until the next `backward`, like `params`.

        Whatever spans processes is gathered, by all of them at once, and is NumPy arrays.
        """
        self._tell("gather")
        state = jax.tree.map(_as_data, {"params": self._params, "opt_state": self._opt_state})
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
        own, saved = (self._params, self._opt_state), (state["params"], state["opt_state"])
        self._params, self._opt_state = jax.tree.map(_laid_out_like, own, saved)
        self.update_count = update_count
        if learnt_from is not None:
            self.learnt_from = dict.fromkeys(learnt_from)

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
        rows = inputs[0].shape[0]
        padded, padded_keys = self._for_program((tuple(inputs), keys), rows)
        output = self.programs.apply(self._params, padded, padded_keys)
        return lambda: (np.asarray(output)[:rows],)

    def backward(
        self,
        inputs: Sequence[Array],
        output_grads: Array,
        keys: Array | None = None,
        seen: Array | None = None,
        requests: Sequence[bytes] = (),
    ) -> tuple[Array, ...]:
        """Gradients of the differentiable inputs, taken at the current parameters, which are then updated once.

        Args:
          inputs: as the expert specifies them.
          output_grads: [rows, ...].
          keys: as of the forward.
          seen: int64 [rows], the update count at each row's forward, at least 0. The optimiser is told the rows' mean
            staleness; counts beyond today's, of an expert that was restored since, have none. None: nothing is stale.
          requests: names of the requests in it, see `learnt_from`.

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
        requests: Sequence[bytes] = (),
    ) -> Callable[[], tuple[Array, ...]]:
        """Have XLA begin a `backward`; what is returned waits for it, returns the gradients and counts the update.

        It must be called before anything else is done with this expert.
        """
        self._tell("backward", inputs=tuple(inputs), output_grads=output_grads, keys=keys, seen=seen)
        rows = output_grads.shape[0]
        staleness = 0.0 if seen is None else float(np.maximum(self.update_count - seen, 0).mean())
        arguments = self._for_program((tuple(inputs), output_grads, keys, np.float32(staleness)), rows)
        finite, input_grads, self._params, self._opt_state = self.programs.grad_and_update(
            self._params, self._opt_state, *arguments
        )

        def finish() -> tuple[Array, ...]:
            update_finite, grads_finite = np.asarray(finite)
            if not (update_finite and grads_finite):
                raise UpdateRejected("input gradient" if update_finite else "update")
            if self._trains:
                self.update_count += 1
                self.steps_here += 1
                self.staleness_total += staleness
                self._remember(requests)
            return tuple(np.asarray(grad)[:rows] for grad in input_grads)

        return finish

    def _remember(self, requests: Iterable[bytes]) -> None:
        self.learnt_from.update(dict.fromkeys(requests))
        while len(self.learnt_from) > MAX_REMEMBERED:
            del self.learnt_from[next(iter(self.learnt_from))]

    @property
    def warm_rows(self) -> int:
        """Batches of up to this many rows find their programs compiled, because they were warmed up."""
        return max(tuple(self.programs.warm), default=0)

    def warm_up(self, max_rows: int) -> None:
        """Compile every bucket up to `max_rows` without changing the expert."""
        scratch: PyTree = None
        for bucket in self.buckets_up_to(max_rows):
            scratch = self.warm_up_bucket(bucket, scratch)

    def warm_up_bucket(self, bucket: int, scratch: PyTree = None) -> PyTree:
        """Compile for batches of this many rows, unless that is done.

        May run in another thread than the batches: programs are tried on zeros; what an update donates is not touched.
        With a layout they are compiled from shapes and not tried: of two threads that start programs on the same mesh
        each might hold a device that the other's waits for.

        Args:
          scratch: what the last bucket's call returned, which is donated; None: zeros are made. Parameters and states
            that were made for each bucket anew would leave as many holes in the heap.
        Returns: the state that the programs were tried on.
        """
        if bucket in self.programs.warm:
            return scratch
        if self.place.layout is not None and self.programs.state is not None:
            self._tell("compile", number=bucket)
            self._compile(bucket, self.place.layout, *self.programs.state)
            self._tell("meet")  # warm is what is warm in all processes
            return scratch
        specs = (*self.expert.inputs, self.expert.output)
        *inputs, grads = (np.zeros((bucket, *spec.shape), spec.dtype) for spec in specs)
        for keys in (None, np.zeros((bucket, 2), np.uint32)) if self.expert.takes_key else (None,):
            if scratch is None:
                scratch = jax.tree.map(jnp.zeros_like, (self._params, self._opt_state))
            jax.block_until_ready(self.programs.apply(scratch[0], tuple(inputs), keys))
            arguments = (*scratch, tuple(inputs), grads, keys, np.float32(0))
            _, _, *scratch = jax.block_until_ready(self.programs.grad_and_update(*arguments))
        self.programs.warm.add(bucket)
        return scratch

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
            params, opt_state = jax.tree.unflatten(jax.tree.structure((self._params, self._opt_state)), order.state)
            self.load({"params": params, "opt_state": opt_state}, update_count=order.number)
        else:
            raise ValueError(f"an expert cannot obey an order to {order.kind}")

    def _tell(self, kind: str, **work: Any) -> None:
        """Tell the other processes that hold parts of this expert of what begins now."""
        if self.place.tell is not None:
            self.place.tell(Order(kind=kind, uid=self._uid, **work))

    def _compile(self, bucket: int, layout: Layout, params: PyTree, opt_state: PyTree) -> None:
        def shape(*shape: int, dtype: Any) -> jax.ShapeDtypeStruct:
            return layout.shape_for_program(shape, dtype)

        specs = (*self.expert.inputs, self.expert.output)
        *inputs, grads = (shape(bucket, *spec.shape, dtype=spec.dtype) for spec in specs)
        for keys in (None, shape(bucket, 2, dtype=np.uint32)) if self.expert.takes_key else (None,):
            self.programs.apply.lower(params, tuple(inputs), keys).compile()  # type: ignore[attr-defined]
            arguments = params, opt_state, tuple(inputs), grads, keys, shape(dtype=np.float32)
            self.programs.grad_and_update.lower(*arguments).compile()  # type: ignore[attr-defined]
        self.programs.warm.add(bucket)

    def bucket_of(self, rows: int) -> int:
        """Rows of the program for a batch of so many: a power of two, times the parts into which rows are split."""
        return bucket_of(rows, self._row_parts)

    def buckets_up_to(self, max_rows: int) -> tuple[int, ...]:
        """Every bucket that batches of 1..max_rows rows can fall into, ascending."""
        return buckets_up_to(max_rows, self._row_parts)

    @property
    def _row_parts(self) -> int:
        return 1 if self.place.layout is None else self.place.layout.mesh_shape.data

    def _for_program(self, tree: PyTree, rows: int) -> Any:
        """Padded to the smallest warm bucket for so many rows, if there is one, and where the program wants it."""
        warm = (bucket for bucket in tuple(self.programs.warm) if bucket >= rows)
        padded = _padded(tree, min(warm, default=self.bucket_of(rows)))
        return padded if self.place.layout is None else self.place.layout.for_program(padded)


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
    programs = expert_programs(expert, optimizer, place.layout)
    if programs.init is None:
        params = init_by_uid(key, expert, uid.prefix, uid.coordinates)
    else:
        # As NumPy's, so that processes which share a mesh give the same to each of their devices.
        params = programs.init(np.asarray(jax.random.key_data(key_of_uid(key, uid.prefix, uid.coordinates))))
    return ExpertBackend(expert, optimizer, params, place=place, uid=str(uid))


def bucket_of(rows: int, parts: int = 1) -> int:
    """Programs are compiled for these numbers of rows: the next power of two, of rows in each of so many parts."""
    if rows < 1:
        raise ValueError(f"a batch has at least one row, got {rows}")
    return parts << (math.ceil(rows / parts) - 1).bit_length()


def buckets_up_to(max_rows: int, parts: int = 1) -> tuple[int, ...]:
    """Every bucket that batches of 1..max_rows rows can fall into, ascending."""
    return tuple(parts << power for power in range((bucket_of(max_rows, parts) // parts).bit_length()))


def _as_data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _laid_out_like(own: Any, saved: Any) -> Any:
    if jnp.issubdtype(own.dtype, jax.dtypes.prng_key):
        keys = jax.random.wrap_key_data(jnp.array(saved), impl=jax.random.key_impl(own))
        return jax.device_put(keys, own.sharding) if own.committed else keys
    if not own.committed:
        return jnp.array(saved, dtype=own.dtype)
    # From the host: on the way there no device holds an array of which it shall have a part.
    return put(np.asarray(saved, dtype=own.dtype), own.sharding)


def _laid_out(shape: jax.ShapeDtypeStruct, leaf: Any) -> Any:
    """A buffer of the backend's own, as `shape` says."""
    own = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    return put(own.astype(shape.dtype) if own.dtype != shape.dtype else own, shape.sharding)


def _padded(tree: PyTree, rows: int) -> Any:
    """The tree with zero rows appended to each array that has fewer."""

    def padded(array: Array) -> Array:
        missing = rows - array.shape[0]
        return np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) if missing else array

    return jax.tree.map(lambda leaf: padded(leaf) if leaf.ndim else leaf, tree)
