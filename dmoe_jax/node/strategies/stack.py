"""`stacked`: the states of many experts of one kind in one place, and what runs on them.

Each array of an expert's state is one row of an array here; an update changes the rows of its experts in place. A
program takes the batches of up to `most_together` experts. There is one for each number of rows (and where large
experts are computed at the same time another one for a single batch); they are compiled from shapes alone, beside the
device, and nothing is tried on the states.

Batches begin in the device's thread, and another one may read or load an expert meanwhile: a lock sees to it that
nobody takes hold of arrays that an update has been given.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

from dmoe_jax.experts.base import Expert, TensorSpec
from dmoe_jax.freed_memory import give_back
from dmoe_jax.node.placement import Place
from dmoe_jax.node.programs import compiled_alone, nbytes_of
from dmoe_jax.node.strategies.buckets import bucket_of
from dmoe_jax.node.strategies.programs import Form, stack_functions
from dmoe_jax.node.strategies.store import FinishBackward, FinishForward, State, laid_out_like, warm_bucket_of
from dmoe_jax.types import PyTree
from net.types import Array

MAX_TOGETHER: dict[Form, int] = {"looped": 16, "vmapped": 64}
"""Experts of one program at most. One after the other, of 16 small ones the program's start is a small part already. At
once, on an H200, 64 experts of width 256 with 16 rows each take 2.2 times as long as 16."""
_FEW_TOGETHER = 16
"""Experts of a further program, for turns that have no more, where all are computed at once."""
_MAX_ROWS: dict[Form, int] = {"looped": 512, "vmapped": 4096}
_MAX_BYTES: dict[Form, int] = {"looped": 1 << 20, "vmapped": 16 << 20}
"""Rows of one program, and bytes of each of its inputs; a single expert's may be more. Beyond it starting a program is
little; where all are computed at once, still more than the computing for long."""
_IDLE_BYTES = 64 << 20
"""Of the states of a vmapped program. Up to so many it may well compute all of them for one that was asked; beyond it
there is another program for one."""
LEAST_ROWS = 4
"""Of a batch in a program: for experts that are small enough to gain by a stack, fewer rows save a seventh of the time
at most (d_model 64), and each number of rows takes some 8 MB of programs."""
_LARGE_BYTES = 16 << 20
"""Of a stacked array: so much freed memory is worth giving back to the system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedBatch:
    """A batch of one expert: the arguments of `Store.begin_forward` or, with `output_grads`, `begin_backward`."""

    index: int
    """Which expert of the stack; each at most once in a program."""
    inputs: tuple[Array, ...]
    """Each [rows, ...]."""
    output_grads: Array | None = None
    """[rows, ...]."""
    keys: Array | None = None
    """uint32 [rows, 2]. All batches of a program have them, or none has."""
    staleness: float = 0.0
    """For the optimiser."""

    @property
    def rows(self) -> int:
        """How many it has."""
        return self.inputs[0].shape[0]


@dataclass(slots=True)
class StackPrograms:
    """The compiled programs of one stack."""

    warm: set[int] = field(default_factory=set)
    """Rows for which they are compiled."""
    forward: dict[tuple[int, int, bool], Callable[..., Any]] = field(default_factory=dict)
    """By rows, batches, and whether there are dropout keys."""
    backward: dict[tuple[int, int, bool], Callable[..., Any]] = field(default_factory=dict)
    """Likewise."""
    access: tuple[Callable[..., PyTree], Callable[..., PyTree]] | None = None
    """What reads and what writes the state of one expert."""


class Stack:
    """The stacked states of experts of one kind in one place.

    Args:
      expert, optimizer: what they all are.
      states: one for each; the list is emptied on the way, so that each array is freed as soon as it has been stacked.
      place: where they live, on a single device.
      form: see `dmoe_jax.node.strategies.programs`; None: what suits the device.

    Raises:
      ValueError: there is no state, it has no arrays, or they differ in structure, shapes or types.
    """

    def __init__(
        self,
        expert: Expert,
        optimizer: optax.GradientTransformation | None,
        states: list[State],
        place: Place,
        *,
        form: Form | None = None,
    ) -> None:
        if reason := why_not_alike(states):
            raise ValueError(f"experts {expert.name} cannot be stacked: {reason}")
        self.size = len(states)
        """How many experts."""
        self.expert = expert
        self.form: Form = form or form_for(place)
        self.programs = StackPrograms()
        """What is compiled."""
        self.nbytes = nbytes_of(states[0])
        """Bytes of one expert's state."""
        self._functions = stack_functions(expert, optimizer, self.form)
        self._sharding = None if place.layout is None else SingleDeviceSharding(place.layout.devices[0])
        self._lock = threading.Lock()
        self._one = jax.tree.map(self._shape_of, states[0])
        self._state = _stacked(states)

    def read(self, index: int) -> State:
        """A copy of the state of one expert."""
        program = self._access()[0]
        with self._lock:
            return program(self._state, np.int32(index))

    def write(self, index: int, saved: State) -> None:
        """Take up a state of one expert, see `Store.write`."""
        own = jax.tree.map(laid_out_like, self.read(index), saved)
        program = self._access()[1]
        with self._lock:
            self._state = program(self._state, np.int32(index), own)

    def begin_forward(self, batches: Sequence[StackedBatch]) -> list[FinishForward]:
        """Have XLA begin the forward passes of several experts; what waits for each."""
        index, rows, (inputs, _, keys, _) = self._joined(batches)
        program = self._forward(rows, len(index), keys is not None)
        with self._lock:
            outputs = program(self._state[0], index, np.int32(len(batches)), inputs, keys)
        on_host = _fetched(outputs)

        def finish(number: int, batch: StackedBatch) -> Array:
            return _own_rows(on_host(), number, batch)

        return [functools.partial(finish, number, batch) for number, batch in enumerate(batches)]

    def begin_backward(self, batches: Sequence[StackedBatch]) -> list[FinishBackward]:
        """Have XLA begin the backward passes and updates of several experts; what waits for each."""
        index, rows, (inputs, grads, keys, staleness) = self._joined(batches)
        program = self._backward(rows, len(index), keys is not None)
        count = np.int32(len(batches))
        with self._lock:
            finite, self._state, input_grads = program(self._state, index, count, inputs, grads, keys, staleness)
        on_host = _fetched((finite, input_grads))

        def finish(number: int, batch: StackedBatch) -> tuple[Array, tuple[Array, ...]]:
            finite, input_grads = on_host()
            return finite[number], tuple(_own_rows(grad, number, batch) for grad in input_grads)

        return [functools.partial(finish, number, batch) for number, batch in enumerate(batches)]

    def most_together(self, rows: int) -> int:
        """The most experts of a program for so many rows of each."""
        return most_in_program(self.expert, self.size, warm_bucket_of(rows, self.programs), self.form)

    def compile(self, bucket: int) -> None:
        """Compile for batches of so many rows, from shapes; may run beside the device."""
        for count in self._counts(bucket):
            for has_keys in (False, True) if self.expert.takes_key else (False,):
                self._forward(bucket, count, has_keys)
                self._backward(bucket, count, has_keys)
        self._access()
        self.programs.warm.add(bucket)

    def _forward(self, rows: int, count: int, has_keys: bool) -> Callable[..., Any]:
        if (size := (rows, count, has_keys)) not in self.programs.forward:
            inputs, _, keys, _ = self._batch_shapes(*size)
            arguments = self._shapes()[0], _int32(count), _int32(), inputs, keys
            self.programs.forward[size] = compiled_alone(self._functions.forward, arguments)
        return self.programs.forward[size]

    def _backward(self, rows: int, count: int, has_keys: bool) -> Callable[..., Any]:
        if (size := (rows, count, has_keys)) not in self.programs.backward:
            arguments = self._shapes(), _int32(count), _int32(), *self._batch_shapes(*size)
            self.programs.backward[size] = compiled_alone(self._functions.backward, arguments, donate_argnums=0)
        return self.programs.backward[size]

    def _access(self) -> tuple[Callable[..., PyTree], Callable[..., PyTree]]:
        """What reads and writes one expert."""
        if self.programs.access is None:
            state = self._shapes()
            read = compiled_alone(self._functions.read, (state, _int32()))
            write = compiled_alone(self._functions.write, (state, _int32(), self._one), donate_argnums=0)
            self.programs.access = read, write
        return self.programs.access

    def _joined(self, batches: Sequence[StackedBatch]) -> tuple[Array, int, Any]:
        """(which experts, rows of each, the arguments of a program behind `count`), batches and rows filled up."""
        rows = warm_bucket_of(max(batch.rows for batch in batches), self.programs)
        counts = self._counts(rows)
        if len(batches) > counts[-1]:
            raise ValueError(
                f"expected at most {counts[-1]} experts with {rows} rows in one program, got {len(batches)}"
            )
        count = min(count for count in counts if count >= len(batches))
        *inputs, grads = (
            _filled(
                [arrays[number] for arrays in ((*batch.inputs, batch.output_grads) for batch in batches)], count, rows
            )
            for number in range(len(self.expert.inputs) + 1)
        )
        keys = _filled([batch.keys for batch in batches], count, rows)
        index, staleness = np.zeros(count, np.int32), np.zeros(count, np.float32)
        index[: len(batches)] = [batch.index for batch in batches]
        staleness[: len(batches)] = [batch.staleness for batch in batches]
        return index, rows, (tuple(inputs), grads, keys, staleness)

    def _counts(self, rows: int) -> tuple[int, ...]:
        """Batches of the programs for so many rows, ascending: few, since compiling one may take seconds."""
        most = most_in_program(self.expert, self.size, rows, self.form)
        if self.form == "looped":
            return (most,)
        few = min(most, _FEW_TOGETHER)
        return tuple(sorted({1 if few * self.nbytes > _IDLE_BYTES else few, few, most}))

    def _batch_shapes(self, rows: int, count: int, has_keys: bool) -> Any:
        specs = (*self.expert.inputs, self.expert.output)
        *inputs, grads = (jax.ShapeDtypeStruct((count, rows, *spec.shape), jnp.dtype(spec.dtype)) for spec in specs)
        keys = jax.ShapeDtypeStruct((count, rows, 2), np.uint32) if has_keys else None
        return tuple(inputs), grads, keys, jax.ShapeDtypeStruct((count,), np.float32)

    def _shapes(self) -> PyTree:
        """Of the stacked state."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((self.size, *leaf.shape), leaf.dtype, sharding=leaf.sharding), self._one
        )

    def _shape_of(self, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._sharding)


class StackedStore:
    """The store of one expert of a stack.

    Args:
      index: which one.
    """

    least_rows = LEAST_ROWS

    def __init__(self, stack: Stack, index: int) -> None:
        self.stack, self.index = stack, index
        self.programs = stack.programs
        self.nbytes = stack.nbytes

    def read(self) -> State:
        return self.stack.read(self.index)

    def write(self, saved: State) -> None:
        self.stack.write(self.index, saved)

    def begin_forward(self, inputs: tuple[Array, ...], keys: Array | None) -> FinishForward:
        (finish,) = self.stack.begin_forward([StackedBatch(index=self.index, inputs=inputs, keys=keys)])
        return finish

    def begin_backward(
        self, inputs: tuple[Array, ...], output_grads: Array, keys: Array | None, staleness: float
    ) -> FinishBackward:
        batch = StackedBatch(index=self.index, inputs=inputs, output_grads=output_grads, keys=keys, staleness=staleness)
        (finish,) = self.stack.begin_backward([batch])
        return finish

    def compile(self, bucket: int) -> None:
        self.stack.compile(bucket)


def most_in_program(expert: Expert, size: int, bucket: int, form: Form) -> int:
    """The most experts, of a stack of so many, that a program of this form for this bucket takes; a power of two."""
    row_bytes = max(1, *(_row_bytes(spec) for spec in (*expert.inputs, expert.output)))
    room = min(_MAX_ROWS[form] // bucket, _MAX_BYTES[form] // (bucket * row_bytes))
    return _power_below(min(MAX_TOGETHER[form], bucket_of(size), room))


def form_for(place: Place) -> Form:
    """A CPU does one thing after the other; elsewhere many small products at once are what pays."""
    device = jax.local_devices()[0] if place.layout is None else place.layout.devices[0]
    return "looped" if device.platform == "cpu" else "vmapped"


def why_not_alike(states: Sequence[State]) -> str:
    """Why these states cannot be stacked; empty: they can."""
    if not states or not jax.tree.leaves(states[0]):
        return "they have no state"
    first, *others = (
        (jax.tree.structure(state), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]) for state in states
    )
    if any(other != first for other in others):
        return "their states differ in shape or type"
    return ""


def _stack(*leaves: Any) -> Any:
    return jnp.stack(leaves)


def _stacked(states: list[State]) -> PyTree:
    """The states stacked, array by array; those that were stacked are let go of, so that hardly any is there twice."""
    structure = jax.tree.structure(states[0])
    columns = [list(column) for column in zip(*map(jax.tree.leaves, states), strict=True)]
    states.clear()
    stacked: list[Any] = []
    programs: dict[tuple[tuple[int, ...], Any], Callable[..., Any]] = {}
    while columns:
        column = columns.pop(0)
        kind = column[0].shape, column[0].dtype
        if kind not in programs:
            sharding = column[0].sharding if column[0].committed else None
            shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for leaf in column]
            programs[kind] = compiled_alone(_stack, shapes)
        stacked.append(jax.block_until_ready(programs[kind](*column)))
        column.clear()
        if stacked[-1].nbytes > _LARGE_BYTES:
            give_back()  # what was freed lies in pieces too small for the next array
    return jax.tree.unflatten(structure, stacked)


def _fetched(results: PyTree) -> Callable[[], Any]:
    """Waits for arrays and returns them as NumPy's; all who wait share them."""
    found: list[Any] = []

    def fetch() -> Any:
        if not found:
            found.append(jax.tree.map(np.asarray, results))
        return found[0]

    return fetch


def _own_rows(results: Array, number: int, batch: StackedBatch) -> Array:
    """A copy: answers are remembered, and one of them shall not keep those of all experts."""
    return results[number, : batch.rows].copy()


def _filled(arrays: Sequence[Array | None], count: int, rows: int) -> Array | None:
    """[count, rows, ...]: each array with zeros below it, and zeros behind the last; None if they are None."""
    first = arrays[0]
    if first is None:
        return None
    filled = np.zeros((count, rows, *first.shape[1:]), first.dtype)
    for number, array in enumerate(arrays):
        if array is None:
            raise ValueError("expected batches that all have dropout keys, or none")
        filled[number, : array.shape[0]] = array
    return filled


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.int32)


def _row_bytes(spec: TensorSpec) -> int:
    return int(np.prod(spec.shape, dtype=np.int64)) * jnp.dtype(spec.dtype).itemsize


def _power_below(count: int) -> int:
    """The largest power of two that is not larger, at least 1."""
    return 1 << (max(count, 1).bit_length() - 1)
