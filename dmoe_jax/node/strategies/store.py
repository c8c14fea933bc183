"""Where the state of one expert lies, and what runs on it: the protocol, and a store for a single expert.

`ExpertBackend` counts updates, remembers requests and refuses what is not finite; how a batch reaches XLA is its
store's business.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dmoe_jax.experts.base import Expert
from dmoe_jax.node.placement import Place
from dmoe_jax.node.programs import expert_programs, nbytes_of, own_copy
from dmoe_jax.node.sharding import Layout, put
from dmoe_jax.node.strategies.buckets import bucket_of
from dmoe_jax.types import PyTree
from net.types import Array

State = tuple[PyTree, PyTree]
"""Parameters and optimiser state of one expert."""
FinishForward = Callable[[], Array]
"""Waits for XLA; the output, [rows, ...]."""
FinishBackward = Callable[[], tuple[Array, tuple[Array, ...]]]
"""Waits for XLA; `finite` as of `ExpertPrograms.grad_and_update`, and the input gradients, each [rows, ...]."""


@runtime_checkable
class Programs(Protocol):
    """Compiled programs; experts that share them are of one kind and in one place."""

    @property
    def warm(self) -> set[int]:
        """Numbers of rows for which they are compiled."""
        ...


@runtime_checkable
class Store(Protocol):
    """The state of one expert and what runs on it."""

    @property
    def programs(self) -> Programs:
        """Shared by all experts of this kind, optimiser and place."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters and optimiser state, all parts together."""
        ...

    def read(self) -> State:
        """The state; valid until the next `begin_backward`."""
        ...

    def write(self, saved: State) -> None:
        """Take up a state of the same structure, laid out over devices as the present one is."""
        ...

    def begin_forward(self, inputs: tuple[Array, ...], keys: Array | None) -> FinishForward:
        """Have XLA begin a forward pass of [rows, ...]."""
        ...

    def begin_backward(
        self, inputs: tuple[Array, ...], output_grads: Array, keys: Array | None, staleness: float
    ) -> FinishBackward:
        """Have XLA begin a backward pass and the update; what is begun after it sees the new state."""
        ...

    def warm_up_bucket(self, bucket: int, scratch: PyTree) -> PyTree:
        """Compile for batches of so many rows; see `ExpertBackend.warm_up_bucket`."""
        ...


class SingleStore:
    """An expert by itself, on programs of its own.

    Args:
      expert, optimizer, params, place: as of `ExpertBackend`.

    Raises:
      ValueError: see `ExpertBackend`.
    """

    def __init__(
        self, expert: Expert, optimizer: optax.GradientTransformation | None, params: PyTree, place: Place
    ) -> None:
        self.programs = programs = expert_programs(expert, optimizer, place.layout)
        self._expert, self._layout = expert, place.layout
        if programs.init_opt_state is not None and programs.state is not None:
            self._params = jax.tree.map(_laid_out, programs.state[0], params)
            self._opt_state = programs.init_opt_state(self._params)
        else:
            self._params = jax.tree.map(own_copy, params)
            self._opt_state = jax.tree.map(own_copy, optimizer.init(self._params)) if optimizer is not None else ()
        self.nbytes = nbytes_of((self._params, self._opt_state))

    def read(self) -> State:
        return self._params, self._opt_state

    def write(self, saved: State) -> None:
        self._params, self._opt_state = jax.tree.map(laid_out_like, self.read(), saved)

    def take(self) -> State:
        """The state, which is not here any more: for who moves it elsewhere without holding it twice."""
        state = self.read()
        self._params = self._opt_state = None
        return state

    def begin_forward(self, inputs: tuple[Array, ...], keys: Array | None) -> FinishForward:
        rows = inputs[0].shape[0]
        padded, padded_keys = self._for_program((inputs, keys), rows)
        output = self.programs.apply(self._params, padded, padded_keys)
        return lambda: np.asarray(output)[:rows]

    def begin_backward(
        self, inputs: tuple[Array, ...], output_grads: Array, keys: Array | None, staleness: float
    ) -> FinishBackward:
        rows = output_grads.shape[0]
        arguments = self._for_program((inputs, output_grads, keys, np.float32(staleness)), rows)
        finite, input_grads, self._params, self._opt_state = self.programs.grad_and_update(
            self._params, self._opt_state, *arguments
        )
        return lambda: (np.asarray(finite), tuple(np.asarray(grad)[:rows] for grad in input_grads))

    def warm_up_bucket(self, bucket: int, scratch: PyTree) -> PyTree:
        if self._layout is not None and self.programs.state is not None:
            self._compile(bucket, self._layout, *self.programs.state)
            return scratch
        specs = (*self._expert.inputs, self._expert.output)
        *inputs, grads = (np.zeros((bucket, *spec.shape), spec.dtype) for spec in specs)
        for keys in (None, np.zeros((bucket, 2), np.uint32)) if self._expert.takes_key else (None,):
            if scratch is None:
                scratch = jax.tree.map(jnp.zeros_like, self.read())
            jax.block_until_ready(self.programs.apply(scratch[0], tuple(inputs), keys))
            arguments = (*scratch, tuple(inputs), grads, keys, np.float32(0))
            _, _, *scratch = jax.block_until_ready(self.programs.grad_and_update(*arguments))
        self.programs.warm.add(bucket)
        return scratch

    def _compile(self, bucket: int, layout: Layout, params: PyTree, opt_state: PyTree) -> None:
        def shape(*shape: int, dtype: Any) -> jax.ShapeDtypeStruct:
            return layout.shape_for_program(shape, dtype)

        specs = (*self._expert.inputs, self._expert.output)
        *inputs, grads = (shape(bucket, *spec.shape, dtype=spec.dtype) for spec in specs)
        for keys in (None, shape(bucket, 2, dtype=np.uint32)) if self._expert.takes_key else (None,):
            self.programs.apply.lower(params, tuple(inputs), keys).compile()  # type: ignore[attr-defined]
            arguments = params, opt_state, tuple(inputs), grads, keys, shape(dtype=np.float32)
            self.programs.grad_and_update.lower(*arguments).compile()  # type: ignore[attr-defined]
        self.programs.warm.add(bucket)

    def _for_program(self, tree: PyTree, rows: int) -> Any:
        """Padded to the smallest warm bucket for so many rows, if there is one, and where the program wants it."""
        parts = 1 if self._layout is None else self._layout.mesh_shape.data
        padded = _padded(tree, warm_bucket_of(rows, self.programs, parts))
        return padded if self._layout is None else self._layout.for_program(padded)


def warm_bucket_of(rows: int, programs: Programs, parts: int = 1) -> int:
    """Rows of the program that so many are computed by: the smallest that is compiled; if none is, the next power of
    two, of rows in each of so many parts."""
    warm = (bucket for bucket in tuple(programs.warm) if bucket >= rows)
    return min(warm, default=bucket_of(rows, parts))


def laid_out_like(own: Any, saved: Any) -> Any:
    """A saved array as a buffer of its own, of the type and in the place of the array that it follows."""
    if jnp.issubdtype(own.dtype, jax.dtypes.prng_key):
        keys = jax.random.wrap_key_data(jnp.array(saved), impl=jax.random.key_impl(own))
        return jax.device_put(keys, own.sharding) if own.committed else keys
    if not own.committed:
        return jnp.array(saved, dtype=own.dtype)
    # From the host: on the way there no device holds an array of which it shall have a part.
    return put(np.asarray(saved, dtype=own.dtype), own.sharding)


def _laid_out(shape: jax.ShapeDtypeStruct, leaf: Any) -> Any:
    """A buffer of the store's own, as `shape` says."""
    own = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    return put(own.astype(shape.dtype) if own.dtype != shape.dtype else own, shape.sharding)


def _padded(tree: PyTree, rows: int) -> Any:
    """The tree with zero rows appended to each array that has fewer."""

    def padded(array: Array) -> Array:
        missing = rows - array.shape[0]
        return np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) if missing else array

    return jax.tree.map(lambda leaf: padded(leaf) if leaf.ndim else leaf, tree)
