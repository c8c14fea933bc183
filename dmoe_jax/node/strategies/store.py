"""Where the state of one expert lies, and what runs on it: the protocol, and a store for a single expert.

`ExpertBackend` counts updates, remembers requests and refuses what is not finite; how a batch reaches XLA is its
store's business.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
import optax

from dmoe_jax.arrays import kept_like
from dmoe_jax.experts.base import Expert
from dmoe_jax.node.placement import Place
from dmoe_jax.node.programs import expert_programs, nbytes_of, own_copies
from dmoe_jax.node.sharding import put
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

    @property
    def least_rows(self) -> int:
        """For fewer rows than these no program is worth its memory."""
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

    def compile(self, bucket: int) -> None:
        """Compile for batches of so many rows, from shapes; may run beside the device."""
        ...


class SingleStore:
    """An expert by itself, on programs of its own.

    Args:
      expert, optimizer, params, place: as of `ExpertBackend`.

    Raises:
      ValueError: see `ExpertBackend`.
    """

    least_rows = 1

    def __init__(
        self, expert: Expert, optimizer: optax.GradientTransformation | None, params: PyTree, place: Place
    ) -> None:
        self.programs = programs = expert_programs(expert, optimizer, place.layout)
        self._layout = place.layout
        if place.layout is None:
            self._params = own_copies(params)
        else:
            self._params = jax.tree.map(_laid_out, programs.state[0], params)
        # Waited for: else the first call would.
        self._opt_state = jax.block_until_ready(programs.init_opt_state(self._params))
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
        bucket = self._bucket_of(rows)
        forward, _ = self.programs.of_rows(bucket, has_keys=keys is not None)
        output = forward(self._params, *self._for_program((inputs, keys), bucket))
        return lambda: np.asarray(output)[:rows]

    def begin_backward(
        self, inputs: tuple[Array, ...], output_grads: Array, keys: Array | None, staleness: float
    ) -> FinishBackward:
        rows = output_grads.shape[0]
        bucket = self._bucket_of(rows)
        _, backward = self.programs.of_rows(bucket, has_keys=keys is not None)
        arguments = self._for_program((inputs, output_grads, keys, np.float32(staleness)), bucket)
        finite, self._params, self._opt_state, input_grads = backward(self._params, self._opt_state, *arguments)

        def finish() -> tuple[Array, tuple[Array, ...]]:
            try:
                return np.asarray(finite), tuple(np.asarray(grad)[:rows] for grad in input_grads)
            except Exception:  # of XLA: what the program was given is lost, with others' buffers
                self.programs.forget_grads()
                raise

        return finish

    def compile(self, bucket: int) -> None:
        self.programs.compile(bucket)

    def _bucket_of(self, rows: int) -> int:
        """The smallest warm bucket for so many rows, if there is one, and else that of `bucket_of`."""
        parts = 1 if self._layout is None else self._layout.mesh_shape.data
        return warm_bucket_of(rows, self.programs, parts)

    def _for_program(self, tree: PyTree, bucket: int) -> Any:
        """Padded to so many rows, and where the program wants it."""
        padded = _padded(tree, bucket)
        return padded if self._layout is None else self._layout.for_program(padded)


def warm_bucket_of(rows: int, programs: Programs, parts: int = 1) -> int:
    """Rows of the program that so many are computed by: the smallest that is compiled; if none is, the next power of
    two, of rows in each of so many parts."""
    warm = (bucket for bucket in tuple(programs.warm) if bucket >= rows)
    return min(warm, default=bucket_of(rows, parts))


def laid_out_like(own: Any, saved: Any) -> Any:
    """A saved array as a buffer of its own, of the type and in the place of the array that it follows."""
    if own.is_fully_addressable:
        return kept_like(own, saved)
    # From the host: on the way there no device holds an array of which it shall have a part.
    return put(np.asarray(saved, dtype=own.dtype), own.sharding)


def _laid_out(shape: jax.ShapeDtypeStruct, leaf: Any) -> Any:
    """A buffer of the store's own, as `shape` says."""
    own = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    return put(own.astype(shape.dtype) if own.dtype != shape.dtype else own, shape.sharding)


def _padded(tree: PyTree, rows: int) -> Any:
    """The tree with zero rows appended to each array that has fewer."""

    def padded(array: Array) -> Array:
        count = array.shape[0]
        if count == rows:
            return array
        whole = np.zeros((rows, *array.shape[1:]), array.dtype)  # np.pad takes as long as a small expert's forward pass
        whole[:count] = array
        return whole

    return jax.tree.map(lambda leaf: padded(leaf) if leaf.ndim else leaf, tree)
