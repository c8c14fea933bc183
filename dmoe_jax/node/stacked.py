"""Many small experts of one kind that share a program: their states lie stacked, and change in place.

A small expert takes XLA less time than it takes to start a program, with its dozens of arguments. Where experts of one
kind lie stacked along a leading axis, one program carries out the batches of many of them: it takes the state of those
that were asked out of the stack, does with each what its own program would have done (`dmoe_jax.node.programs`), with
its look whether the outcome is finite, and puts it back, in place.

Size and device decide which experts are stacked, and `NodeConfig.strategy` overrides it.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

from dmoe_jax.arrays import PyTree
from dmoe_jax.experts.base import Expert
from dmoe_jax.machine.freed_memory import give_back
from dmoe_jax.node.backend import ExpertBackend, ExpertGroup
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.programs import (
    Result,
    State,
    Work,
    bucket_of,
    compiled_alone,
    functions_of,
    laid_out_like,
    nbytes_of,
    warm_bucket_of,
    without_grads,
)
from dmoe_jax.node.sharding import Place, PlacedDevice
from dmoe_net.types import Array

logger = logging.getLogger(__name__)

Form = Literal["looped", "vmapped"]
"""Looped programs take one expert after the other: its state is copied out of the stack and into it and nothing else
is, and they compute bit by bit what an expert alone does. They are faster where a device does one thing at a time, and
since the number of batches may vary there is one program for each number of rows. Vmapped programs compute all experts
at once, which is what a GPU is good at; the batches beyond the real ones are computed for nothing."""

MOST_STACKED_BYTES: dict[Form, int] = {"looped": 512 << 10, "vmapped": 16 << 20}
"""Bytes of the parameters of an expert that gains by sharing a program, from the tables of `experiments.node_speed`: on
two cores experts of 0.4 MB make 1.3 to 2.5 times the samples when they are stacked, those of 0.9 MB 0.94 to 0.99 times
as many; on an H200 those of 6 MB make 4 to 15 times as many."""
MAX_TOGETHER: dict[Form, int] = {"looped": 16, "vmapped": 64}
"""Most experts of one program. One after the other, of 16 small ones the program's start is a small part already. At
once, on an H200, 64 experts of width 256 with 16 rows each take 2.2 times as long as 16."""
_FEW_TOGETHER = 16
"""Experts of a further vmapped program, for turns that have no more."""
_MAX_ROWS: dict[Form, int] = {"looped": 512, "vmapped": 4096}
_MAX_BYTES: dict[Form, int] = {"looped": 1 << 20, "vmapped": 16 << 20}
"""Rows of one program, and bytes of each of its inputs; a single expert's may be more. Beyond it starting a program is
little."""
_IDLE_BYTES = 64 << 20
"""Bytes of the states of a vmapped program. Up to so many it may well compute all of them for one that was asked;
beyond it there is another program for one."""
LEAST_ROWS = 4
"""Fewest rows of a batch in a program: for experts that are small enough to gain by a stack, fewer save a seventh of
the time at most (d_model 64), and each number of rows takes some 8 MB of programs."""
_LARGE_BYTES = 16 << 20
"""Bytes of a stacked array whose freed parts are worth giving back to the system."""

_ForwardBackward = tuple[Callable[..., Any], Callable[..., tuple[Any, PyTree, tuple[Any, ...]]]]


class StackPrograms:
    """The `Programs` of one group of experts that lie stacked.

    Every array of the batches has the axes [batches, rows, ...]; what is compiled is

        forward: (params, index, count, inputs, keys) -> outputs
        backward: (state, index, count, inputs, output_grads, keys, staleness) -> (finite, state, input_grads)

    where `index` names the expert of each batch, the first `count` batches are real, `state` is donated, `finite` is
    bool [batches, 2], and `staleness` is float32 [batches].

    Args:
      states: one for each; only their shapes are used.
      place: a single device.
      form: None: the one that suits the device.
    """

    least_rows = LEAST_ROWS

    def __init__(
        self,
        expert: Expert,
        optimizer: optax.GradientTransformation | None,
        states: Sequence[State],
        place: Place,
        form: Form | None = None,
    ) -> None:
        self.size = len(states)
        self.expert = expert
        self.form: Form = form or form_for(place)
        self.at_once, self.calls_host = self.form == "vmapped", False
        self.nbytes = nbytes_of(states[0])
        self.warm: set[int] = set()
        self.kind = id(self)
        self.forward: dict[tuple[int, int, bool], Callable[..., Any]] = {}
        """By rows, batches, and whether there are dropout keys."""
        self.backward: dict[tuple[int, int, bool], Callable[..., Any]] = {}
        """Likewise."""
        self._access: tuple[Callable[..., PyTree], Callable[..., PyTree]] | None = None  # reads and writes one expert
        apply, with_grads = functions_of(expert, optimizer)
        make = _looped if self.form == "looped" else _vmapped
        self._functions = make(apply, without_grads(with_grads))
        sharding = None if place.layout is None else SingleDeviceSharding(place.layout.devices[0])

        def shape(leaf: Any, *before: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*before, *leaf.shape), leaf.dtype, sharding=sharding)

        self._one: State = jax.tree.map(shape, states[0])
        self._all: State = jax.tree.map(lambda leaf: shape(leaf, self.size), states[0])

    def most_together(self, rows: int) -> int:
        return most_in_program(self.expert, self.size, warm_bucket_of(rows, self), self.form)

    def compile(self, bucket: int) -> None:
        for count in self._counts(bucket):
            for has_keys in (False, True) if self.expert.takes_key else (False,):
                self._program(bucket, count, has_keys, is_backward=False)
                self._program(bucket, count, has_keys, is_backward=True)
        self._reader_and_writer()
        self.warm.add(bucket)

    def begin(self, state: State, work: Sequence[Work]) -> tuple[State, Callable[[], list[Result]]]:
        index, rows, (inputs, grads, keys, staleness) = self._joined(work)
        program = self._program(rows, len(index), keys is not None, is_backward=grads is not None)
        count = np.int32(len(work))
        if grads is None:
            outputs = program(state[0], index, count, inputs, keys)
            return state, lambda: _shared_out(work, None, (np.asarray(outputs),))
        finite, state, input_grads = program(state, index, count, inputs, grads, keys, staleness)
        return state, lambda: _shared_out(work, np.asarray(finite), tuple(map(np.asarray, input_grads)))

    def read(self, state: State, index: int) -> State:
        own: State = self._reader_and_writer()[0](state, np.int32(index))
        return own

    def write(self, state: State, index: int, saved: State) -> State:
        own = jax.tree.map(laid_out_like, self.read(state, index), saved)
        whole: State = self._reader_and_writer()[1](state, np.int32(index), own)
        return whole

    def _program(self, rows: int, count: int, has_keys: bool, *, is_backward: bool) -> Callable[..., Any]:
        known, function = (self.backward if is_backward else self.forward), self._functions[is_backward]
        if (size := (rows, count, has_keys)) not in known:
            inputs, grads, keys, staleness = self._batch_shapes(*size)
            if is_backward:
                batches = _int32(count), _int32(), inputs, grads, keys, staleness
                known[size] = compiled_alone(function, (self._all, *batches), of=self, donate_argnums=0)
            else:
                known[size] = compiled_alone(function, (self._all[0], _int32(count), _int32(), inputs, keys), of=self)
        return known[size]

    def _reader_and_writer(self) -> tuple[Callable[..., PyTree], Callable[..., PyTree]]:
        if self._access is None:
            read = compiled_alone(_read, (self._all, _int32()))
            write = compiled_alone(_write, (self._all, _int32(), self._one), donate_argnums=0)
            self._access = read, write
        return self._access

    def _joined(self, work: Sequence[Work]) -> tuple[Array, int, Any]:
        """(which experts, rows of each, the arguments of a program behind `count`), batches and rows filled up."""
        rows = warm_bucket_of(max(each.batch.rows for each in work), self)
        counts = self._counts(rows)
        if len(work) > counts[-1]:
            raise ValueError(f"expected at most {counts[-1]} experts with {rows} rows in one program, got {len(work)}")
        count = min(count for count in counts if count >= len(work))
        columns = zip(*((*each.batch.inputs, each.batch.output_grads) for each in work), strict=True)
        *inputs, grads = (_filled(arrays, count, rows) for arrays in columns)
        keys = _filled([each.batch.keys for each in work], count, rows)
        index, staleness = np.zeros(count, np.int32), np.zeros(count, np.float32)
        index[: len(work)] = [each.position for each in work]
        staleness[: len(work)] = [each.staleness for each in work]
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


def most_in_program(expert: Expert, size: int, bucket: int, form: Form) -> int:
    """The most experts, of a stack of so many, that a program of this form for this bucket takes; a power of two."""
    specs = (*expert.inputs, expert.output)
    row_bytes = max(1, *(math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize for spec in specs))
    room = min(_MAX_ROWS[form] // bucket, _MAX_BYTES[form] // (bucket * row_bytes))
    most = max(1, min(MAX_TOGETHER[form], bucket_of(size), room))
    return 1 << (most.bit_length() - 1)


def form_for(place: Place) -> Form:
    """A CPU does one thing after the other; elsewhere many small products at once are what pays."""
    device = jax.local_devices()[0] if place.layout is None else place.layout.devices[0]
    return "looped" if device.platform == "cpu" else "vmapped"


def why_not_alike(states: Sequence[State]) -> str:
    """The reason why these states cannot be stacked; empty: they can."""
    if not states or not jax.tree.leaves(states[0]):
        return "they have no state"
    first, *others = (
        (jax.tree.structure(state), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]) for state in states
    )
    if any(other != first for other in others):
        return "their states differ in shape or type"
    return ""


def stack_up(backends: Sequence[ExpertBackend], form: Form | None = None) -> None:
    """Move experts of one kind, each alone so far, into one group while none of their batches runs; blocks. Raises
    ValueError if they have no state, or their states differ in structure, shapes or types."""
    first = backends[0]
    states = [backend.group.read(backend.index) for backend in backends]
    if reason := why_not_alike(states):
        raise ValueError(f"experts {first.expert.name} cannot be stacked: {reason}")
    programs = StackPrograms(first.expert, first.optimizer, states, first.place, form)
    for backend in backends:
        backend.group.take()
    group = ExpertGroup(programs, stacked(states))
    for index, backend in enumerate(backends):
        backend.group, backend.index = group, index


class Strategies:
    """The strategies by which the experts of a node are run; of each kind in each place. `may_adopt`: experts come and
    go. Raises ValueError if all are to be stacked, and some cannot be."""

    def __init__(
        self,
        backends: dict[str, ExpertBackend],
        devices: Sequence[PlacedDevice],
        config: NodeConfig,
        *,
        may_adopt: bool,
    ) -> None:
        self._devices, self._strategy = devices, config.strategy
        kinds: dict[tuple[int, int], list[str]] = {}  # the uids of those that could share a stack
        for uid, backend in backends.items():
            kinds.setdefault((backend.place.number, backend.programs.kind), []).append(uid)
        self._kinds = {uids[0]: [backends[uid] for uid in uids] for uids in kinds.values()}
        self._why = {uid: _why_single(own, may_adopt=may_adopt) for uid, own in self._kinds.items()}
        self._choices: list[dict[str, Any]] = []
        if config.strategy == "stacked" and may_adopt:
            raise ValueError("the strategy stacked does not do for a node that claims experts: a stack cannot grow")
        if config.strategy == "stacked" and (refused := [(uid, why) for uid, why in self._why.items() if why]):
            raise ValueError(f"the strategy stacked does not do for {refused[0][0]} and its kind: {refused[0][1]}")

    async def settle(self, on_progress: Callable[[str], None]) -> None:
        """Choose, and stack what is to be stacked; once, before anything is announced."""
        for uid, backends in self._kinds.items():
            device = self._devices[backends[0].place.number].device
            strategy, why = self._choose(backends, self._why[uid], is_simulated=device.is_simulated)
            if strategy == "stacked" and backends[0].programs.size == 1:
                await device.run(stack_up, backends)
            kind, place, count = backends[0].expert.name, backends[0].place.name, len(backends)
            self._choices.append({"expert": kind, "place": place, "experts": count, "strategy": strategy, "why": why})
            text = f"{count} experts {kind} in place {place}: {strategy}, since {why}"
            logger.info("%s", text)
            if strategy == "stacked":
                on_progress(text)
        self._kinds.clear()

    def status(self) -> list[dict[str, Any]]:
        """Return the choice for each kind in each place, as plain CBOR data: `expert`, the kind's name; `place`;
        `experts`, how many; `strategy`; `why`."""
        return list(self._choices)

    def _choose(
        self, backends: Sequence[ExpertBackend], why_single: str, *, is_simulated: bool
    ) -> tuple[Literal["single", "stacked"], str]:
        """(strategy, the reason in a sentence without its stop)."""
        if backends[0].programs.size > 1:
            return "stacked", "they have been stacked before"
        if self._strategy != "auto":
            return self._strategy, "it was asked for"
        if why_single:
            return "single", why_single
        if is_simulated:
            return "single", "in virtual time starting a program costs nothing"
        nbytes, form = nbytes_of(backends[0].params), form_for(backends[0].place)
        most, device = MOST_STACKED_BYTES[form], "a CPU" if form == "looped" else "such a device"
        if nbytes <= most:
            return "stacked", f"parameters of {nbytes} bytes are at most {most}, the bound on {device}"
        return "single", f"parameters of {nbytes} bytes are more than {most}, the bound on {device}"


def _why_single(backends: Sequence[ExpertBackend], *, may_adopt: bool) -> str:
    """The reason why experts of one kind in one place cannot be stacked; empty: they can."""
    first = backends[0]
    if first.place.led is not None:
        return "the node is several processes"
    if first.place.layout is not None and first.place.layout.mesh_shape.num_devices > 1:
        return f"they lie on a mesh, {first.place.layout.mesh_shape}"
    if may_adopt:
        return "experts that a node claims come and go, and a stack cannot grow while it serves"
    if len(backends) == 1:
        return "there is only one of them here"
    return "" if first.programs.size > 1 else why_not_alike([each.group.read(each.index) for each in backends])


def stacked(states: list[State]) -> PyTree:
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
            programs[kind] = compiled_alone(lambda *leaves: jnp.stack(leaves), shapes)
        stacked.append(jax.block_until_ready(programs[kind](*column)))
        column.clear()
        if stacked[-1].nbytes > _LARGE_BYTES:
            give_back()  # what was freed lies in pieces too small for the next array
    return jax.tree.unflatten(structure, stacked)


def _shared_out(work: Sequence[Work], finite: Array | None, arrays: tuple[Array, ...]) -> list[Result]:
    """The rows of each, as copies: answers are remembered, and one of them shall not keep those of all experts."""
    return [
        Result(
            tuple(array[number, : each.batch.rows].copy() for array in arrays),
            None if finite is None else finite[number],
        )
        for number, each in enumerate(work)
    ]


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


def _read(state: PyTree, index: Any) -> PyTree:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), state)


def _write(state: PyTree, index: Any, own: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf, part: jax.lax.dynamic_update_index_in_dim(leaf, part, index, 0), state, own)


def _looped(apply: Callable[..., Any], grad_and_update: Callable[..., Any]) -> _ForwardBackward:
    def forward(params: PyTree, index: Any, count: Any, inputs: tuple[Any, ...], keys: Any) -> Any:
        def one(number: Any) -> Any:
            own_inputs, own_keys = _read((inputs, keys), number)
            return apply(_read(params, index[number]), own_inputs, own_keys)

        def body(number: Any, outputs: Any) -> Any:
            return _write(outputs, number, one(number))

        return jax.lax.fori_loop(0, count, body, _zeros(one, index.shape[0]))

    def backward(
        state: PyTree, index: Any, count: Any, inputs: tuple[Any, ...], output_grads: Any, keys: Any, staleness: Any
    ) -> tuple[Any, PyTree, tuple[Any, ...]]:
        def one(state: PyTree, number: Any) -> tuple[tuple[Any, tuple[Any, ...]], PyTree]:
            batch = _read((inputs, output_grads, keys, staleness), number)
            finite, *new, input_grads = grad_and_update(*_read(state, index[number]), *batch)
            return (finite, input_grads), tuple(new)

        def body(number: Any, carried: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            state, results = carried
            result, new = one(state, number)
            return _write(state, index[number], new), _write(results, number, result)

        results = _zeros(lambda number: one(state, number)[0], index.shape[0])
        state, (finite, input_grads) = jax.lax.fori_loop(0, count, body, (state, results))
        return finite, state, input_grads

    return forward, backward


def _vmapped(apply: Callable[..., Any], grad_and_update: Callable[..., Any]) -> _ForwardBackward:
    def chosen(state: PyTree, index: Any) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.at[index].get(mode="clip"), state)

    def forward(params: PyTree, index: Any, count: Any, inputs: tuple[Any, ...], keys: Any) -> Any:
        del count
        return jax.vmap(apply)(chosen(params, index), inputs, keys)

    def backward(
        state: PyTree, index: Any, count: Any, inputs: tuple[Any, ...], output_grads: Any, keys: Any, staleness: Any
    ) -> tuple[Any, PyTree, tuple[Any, ...]]:
        batches = (inputs, output_grads, keys, staleness)
        finite, *new, input_grads = jax.vmap(grad_and_update)(*chosen(state, index), *batches)
        # Those that are not real go nowhere, each to a place of its own beyond the end.
        capacity = jax.tree.leaves(state)[0].shape[0]
        numbers = jnp.arange(index.shape[0])
        places = jnp.where(numbers < count, index, capacity + numbers)

        def put(leaf: Any, part: Any) -> Any:
            return leaf.at[places].set(part, mode="drop", unique_indices=True)

        return finite, jax.tree.map(put, state, tuple(new)), input_grads

    return forward, backward


def _zeros(function: Callable[[Any], PyTree], batches: int) -> PyTree:
    """Room for the results of so many batches, given what computes those of one."""
    shapes = jax.eval_shape(function, jax.ShapeDtypeStruct((), jnp.int32))
    return jax.tree.map(lambda shape: jnp.zeros((batches, *shape.shape), shape.dtype), shapes)
