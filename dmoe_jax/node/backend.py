"""One expert as a node keeps it: parameters, optimiser state and compiled programs.

The programs (`ExpertPrograms`) are pure and jitted, and shared by every expert of one kind and optimiser. The backward
recomputes the forward (Learning@home section 3.3), with the same dropout keys, and applies the optimiser at once;
`params` and `opt_state` are donated. Rows are padded to powers of two, so that a node compiles two programs per bucket
whatever batch sizes its trainers send; padded rows carry zero gradients and change nothing beyond rounding.

One gradient of finite numbers can make an expert NaN for everybody, for good. So the step itself looks whether its
outcome is finite, and keeps the old parameters and state if it is not (`UpdateRejected`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dmoe_jax.experts.base import Expert, init_by_uid
from dmoe_jax.grid import ExpertUid, expand_grid_pattern
from dmoe_jax.types import PyTree
from net.types import Array


class UpdateRejected(ValueError):
    """The outcome of a backward request is not finite; the expert is as it was before.

    Attributes:
      reason: "update", for the new parameters or optimiser state, or "input gradient".
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the {reason} is not finite")
        self.reason = reason


class ExpertPrograms(NamedTuple):
    """The compiled programs of one expert kind. `keys` is None, or a dropout key for each row.

    Attributes:
      apply: (params, inputs, keys) -> output.
      grad_and_update: (params, opt_state, inputs, output_grads, keys, staleness) -> (finite, input_grads, params,
        opt_state), with a gradient for each differentiable input, in order. `staleness` is for the optimiser, float32.
        `finite` is bool [2]: the update, and the input gradients. If one of them is not finite, params and opt_state
        are returned as they came.
      warm: the buckets for which they are compiled.
    """

    apply: Callable[..., Any]
    grad_and_update: Callable[..., tuple[Any, tuple[Any, ...], PyTree, PyTree]]
    warm: set[int]


@functools.cache
def expert_programs(expert: Expert, optimizer: optax.GradientTransformation | None) -> ExpertPrograms:
    """Programs for `expert` trained by `optimizer`; cached, so equal arguments share their compiled code.

    Raises:
      ValueError: if the optimiser cannot work on a node, see `check_optimizer`.
    """
    if optimizer is not None:
        check_optimizer(expert, optimizer)
        optimizer = optax.with_extra_args_support(optimizer)
    positions = tuple(i for i, spec in enumerate(expert.inputs) if spec.differentiable)

    def apply(params: PyTree, inputs: tuple[Any, ...], keys: Any) -> Any:
        return expert.apply(params, *inputs, keys=keys) if expert.takes_key else expert.apply(params, *inputs)

    def grad_and_update(
        params: PyTree, opt_state: PyTree, inputs: tuple[Any, ...], output_grads: Any, keys: Any, staleness: Any
    ) -> tuple[Any, tuple[Any, ...], PyTree, PyTree]:
        def output(params: PyTree, chosen: tuple[Any, ...]) -> Any:
            merged = list(inputs)
            for position, value in zip(positions, chosen, strict=True):
                merged[position] = value
            return apply(params, tuple(merged), keys)

        _, pull_back = jax.vjp(output, params, tuple(inputs[i] for i in positions))
        param_grads, input_grads = pull_back(output_grads)
        old = new = params, opt_state
        if optimizer is not None:
            updates, new_state = optimizer.update(param_grads, opt_state, params, staleness=staleness)
            new = optax.apply_updates(params, updates), new_state
        zeros = jax.tree.map(jnp.zeros_like, input_grads)
        finite = jnp.stack([_stays_finite(old, new), _stays_finite(zeros, input_grads)])

        def chosen(before: Any, after: Any) -> Any:
            # In the type that it had: a state that changed its type would be compiled for again.
            return jnp.where(finite.all(), after if after.dtype == before.dtype else after.astype(before.dtype), before)

        return finite, input_grads, *jax.tree.map(chosen, old, new)

    return ExpertPrograms(jax.jit(apply), jax.jit(grad_and_update, donate_argnums=(0, 1)), set())


def check_optimizer(expert: Expert, optimizer: optax.GradientTransformation) -> None:
    """Make sure, without computing anything, that an optimiser can step this expert from gradients alone.

    Raises:
      ValueError: if its update needs more than gradients, state, parameters and staleness, such as the loss, or changes
        the structure of its state.
    """
    params = jax.eval_shape(expert.init, jax.random.key(0))
    try:
        before = jax.eval_shape(optimizer.init, params)
        update = optax.with_extra_args_support(optimizer).update
        _, after = jax.eval_shape(update, params, before, params, staleness=np.float32(0))
    except Exception as error:  # an optimiser of a user's own may raise anything
        raise ValueError(
            "this optimiser cannot train an expert on a node, which has gradients but no loss (so no "
            f"reduce_on_plateau, polyak_sgd or line search): its update raised {type(error).__name__}: {error}"
        ) from error
    shapes = [jax.tree.map(lambda leaf: leaf.shape, state) for state in (before, after)]
    if shapes[0] != shapes[1]:
        raise ValueError("this optimiser cannot train an expert on a node: its update changes the shape of its state")


class ExpertBackend:
    """The state of one expert and what can be done with it. Synchronous: call it through a `Device`.

    Args:
      expert: the network and the specification of its inputs.
      optimizer: an Optax optimiser that needs no loss, or None for an expert that never changes.
      params: initial parameters, which are copied: updates donate the buffers, and optimisers such as prodigy keep
        the initial parameters in their state.

    Raises:
      ValueError: if the optimiser cannot work on a node, see `check_optimizer`.
    """

    def __init__(self, expert: Expert, optimizer: optax.GradientTransformation | None, params: PyTree) -> None:
        self.expert = expert
        self.update_count = 0
        """Optimiser steps taken. Replies carry it, and backward requests that of their forward: hence the staleness."""
        self.steps_here = 0
        """Those of them that this process took."""
        self.staleness_total = 0.0
        """The staleness of each of these, summed up."""
        self.programs = expert_programs(expert, optimizer)
        """Shared by all experts of this kind and optimiser."""
        self._trains = optimizer is not None
        self._params = jax.tree.map(_own_copy, params)
        self._opt_state = jax.tree.map(_own_copy, optimizer.init(self._params)) if optimizer is not None else ()

    @property
    def params(self) -> PyTree:
        """The current parameters. Valid until the next `backward`, which donates them."""
        return self._params

    @property
    def state(self) -> dict[str, PyTree]:
        """Parameters and optimiser state, random keys as their data; valid until the next `backward`, like `params`."""
        return jax.tree.map(_as_data, {"params": self._params, "opt_state": self._opt_state})

    def load(self, state: dict[str, PyTree], *, update_count: int) -> None:
        """Take up a saved state of the same structure, laid out over devices as the present one is."""
        own, saved = (self._params, self._opt_state), (state["params"], state["opt_state"])
        self._params, self._opt_state = jax.tree.map(_laid_out_like, own, saved)
        self.update_count = update_count

    def forward(self, inputs: Sequence[Array], keys: Array | None = None) -> Array:
        """Output for `inputs`, each [rows, ...]. Rows are padded and cut again.

        Args:
          inputs: as the expert specifies them.
          keys: uint32 [rows, 2], a dropout key for each row; None: evaluation.
        """
        return self.begin_forward(inputs, keys)()[0]

    def begin_forward(self, inputs: Sequence[Array], keys: Array | None = None) -> Callable[[], tuple[Array, ...]]:
        """Have XLA begin a `forward`; what is returned waits for it, and returns the output as the only one."""
        rows = inputs[0].shape[0]
        padded, padded_keys = _padded((tuple(inputs), keys), self._bucket(rows))
        output = self.programs.apply(self._params, padded, padded_keys)
        return lambda: (np.asarray(output)[:rows],)

    def backward(
        self, inputs: Sequence[Array], output_grads: Array, keys: Array | None = None, seen: Array | None = None
    ) -> tuple[Array, ...]:
        """Gradients of the differentiable inputs, taken at the current parameters, which are then updated once.

        Args:
          inputs: as the expert specifies them.
          output_grads: [rows, ...].
          keys: as of the forward.
          seen: int64 [rows], the update count at each row's forward, at least 0. The optimiser is told the rows' mean
            staleness; counts beyond today's, of an expert that was restored since, have none. None: nothing is stale.

        Raises:
          UpdateRejected: the update or a gradient is not finite; nothing was changed.
        """
        return self.begin_backward(inputs, output_grads, keys, seen)()

    def begin_backward(
        self, inputs: Sequence[Array], output_grads: Array, keys: Array | None = None, seen: Array | None = None
    ) -> Callable[[], tuple[Array, ...]]:
        """Have XLA begin a `backward`; what is returned waits for it, returns the gradients and counts the update.

        It must be called before anything else is done with this expert.
        """
        rows = output_grads.shape[0]
        staleness = 0.0 if seen is None else float(np.maximum(self.update_count - seen, 0).mean())
        arguments = _padded((tuple(inputs), output_grads, keys), self._bucket(rows))
        finite, input_grads, self._params, self._opt_state = self.programs.grad_and_update(
            self._params, self._opt_state, *arguments, np.float32(staleness)
        )

        def finish() -> tuple[Array, ...]:
            update_finite, grads_finite = np.asarray(finite)
            if not (update_finite and grads_finite):
                raise UpdateRejected("input gradient" if update_finite else "update")
            if self._trains:
                self.update_count += 1
                self.steps_here += 1
                self.staleness_total += staleness
            return tuple(np.asarray(grad)[:rows] for grad in input_grads)

        return finish

    @property
    def warm_rows(self) -> int:
        """Batches of up to this many rows find their programs compiled, because they were warmed up."""
        return max(tuple(self.programs.warm), default=0)

    def warm_up(self, max_rows: int) -> None:
        """Compile every bucket up to `max_rows` without changing the expert."""
        scratch: PyTree = None
        for bucket in buckets_up_to(max_rows):
            scratch = self.warm_up_bucket(bucket, scratch)

    def warm_up_bucket(self, bucket: int, scratch: PyTree = None) -> PyTree:
        """Compile for batches of this many rows, unless that is done.

        May run in another thread than the batches: programs are tried on zeros; what an update donates is not touched.

        Args:
          scratch: what the last bucket's call returned, which is donated; None: zeros are made. Parameters and states
            that were made for each bucket anew would leave as many holes in the heap.
        Returns: the state that the programs were tried on.
        """
        if bucket in self.programs.warm:
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

    def _bucket(self, rows: int) -> int:
        """What so many rows are padded to: the smallest warm bucket that holds them, if there is one."""
        return min((bucket for bucket in tuple(self.programs.warm) if bucket >= rows), default=bucket_of(rows))


def make_backends(
    experts: Mapping[str, Expert], optimizer: optax.GradientTransformation | None, *, seed: int
) -> dict[str, ExpertBackend]:
    """A backend for each uid, with the parameters that the seed and the uid decide (see `init_by_uid`).

    Args:
      experts: uid such as "ffn.3.1", or pattern such as "ffn.[0:4].[0:4]" -> the network.
      optimizer: steps every expert, each with a state of its own; None: the experts never change.
      seed: decides the initial parameters; the same on all nodes of a swarm.

    Raises:
      ValueError: naming the pattern, if it is malformed, or the uid, if two patterns name it, or if there is no expert.
    """
    patterns: dict[ExpertUid, str] = {}
    for pattern in experts:
        for uid in expand_grid_pattern(pattern):
            if uid in patterns:
                raise ValueError(f"expert {uid} is named twice, by {patterns[uid]!r} and by {pattern!r}")
            patterns[uid] = pattern
    if not patterns:
        raise ValueError("expected at least one expert, got none")
    key = jax.random.key(seed)
    backends = {}
    for uid, pattern in patterns.items():
        params = init_by_uid(key, experts[pattern], uid.prefix, uid.coordinates)
        backends[str(uid)] = ExpertBackend(experts[pattern], optimizer, params)
    return backends


def bucket_of(rows: int) -> int:
    """The next power of two: programs are compiled for these numbers of rows."""
    if rows < 1:
        raise ValueError(f"a batch has at least one row, got {rows}")
    return 1 << (rows - 1).bit_length()


def buckets_up_to(max_rows: int) -> tuple[int, ...]:
    """Every bucket that batches of 1..max_rows rows can fall into, ascending."""
    return tuple(1 << power for power in range(bucket_of(max_rows).bit_length()))


def _stays_finite(old: PyTree, new: PyTree) -> Any:
    """Whether no number became NaN or infinite. What was so before may stay: some optimisers start from infinity."""
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    inexact = [(before, after) for before, after in pairs if jnp.issubdtype(before.dtype, jnp.inexact)]
    sound = [(jnp.isfinite(after) | ~jnp.isfinite(before)).all() for before, after in inexact]
    return jnp.stack(sound or [jnp.array(True)]).all()


def _own_copy(leaf: Any) -> Any:
    """A buffer of the backend's own, strongly typed: a weak type would be compiled for once more after one update."""
    return jnp.array(leaf, dtype=jnp.result_type(leaf))


def _as_data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _laid_out_like(own: Any, saved: Any) -> Any:
    if jnp.issubdtype(own.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.array(saved), impl=jax.random.key_impl(own))
    array = jnp.array(saved, dtype=own.dtype)
    return jax.device_put(array, own.sharding) if own.committed else array


def _padded(tree: PyTree, rows: int) -> Any:
    """The tree with zero rows appended to each array that has fewer."""

    def padded(array: Array) -> Array:
        missing = rows - array.shape[0]
        return np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) if missing else array

    return jax.tree.map(padded, tree)
