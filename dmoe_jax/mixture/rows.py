"""A remote layer whose batch lies on the devices of several processes: each asks experts for rows of its own.

The processes that hold a row's shard divide its rows among them, so that each row has one *owner*, and an expert learns
once from it. A process brings its rows to the host, chooses experts for them and asks these, as in one process. Then
one program that all run hands the answers on to whoever holds the rows, and with them what each process has to say
(`dmoe_jax.mesh.agreement`): if the layer fails in one, it fails in all. Gradients come back in the same way.

A model calls one such layer after the other, never two at once: all processes run the same programs in one order.
"""

import math
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import trio
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dmoe_jax.autodiff import Recording, Value
from dmoe_jax.experts.base import Expert
from dmoe_jax.machine.device import Device
from dmoe_jax.machine.remembered import remembered
from dmoe_jax.mesh.agreement import first_devices, from_each, losses_named, of_each, raise_alike, stopped, word_of
from dmoe_jax.mesh.layout import sharding_of_rows
from dmoe_jax.mesh.shards import spans_processes
from dmoe_jax.mixture.config import MixtureConfig
from dmoe_jax.mixture.statistics import TooFewExperts
from dmoe_jax.routing.base import Router, RouterError, Scores, Traffic
from dmoe_net.errors import NetError, NoQuorum
from dmoe_net.types import Array

_KINDS = (TooFewExperts, RouterError, NoQuorum, NetError)


Run = tuple[int, int]
"""First row and end of rows that lie together."""


@runtime_checkable
class Layer(Protocol):
    """The parts of a `RemoteMixture` that this needs, for rows on the host."""

    expert: Expert
    router: Router
    config: MixtureConfig
    device: Device
    select: Callable[..., Any]
    mix: Callable[..., Any]

    @property
    def knows_capacity(self) -> bool: ...
    def dropout_seed(self) -> int | None: ...
    def check_scores(self, scores: Scores) -> None: ...
    async def alive(self) -> Array: ...
    async def choose(self, scores: Scores) -> Any: ...
    async def choose_selected(self, indices: Array, mask: Array, alive: Array) -> Any: ...
    async def forward(self, choice: Any, inputs: Sequence[Array], dropout_seed: int | None) -> tuple[Any, Any, Any]: ...
    async def backward(self, residual: Any, output_grads: Array) -> tuple[Array | None, ...]: ...


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a batch on a mesh, and which process owns each."""

    number: int
    mesh: Mesh

    @cached_property
    def sharding(self) -> NamedSharding:
        """Sharding of arrays with an entry for each row."""
        return sharding_of_rows(self.mesh, self.number)

    @property
    def own_number(self) -> int:
        """Number of this process's rows."""
        return sum(end - start for start, end in self.own)

    @cached_property
    def own(self) -> list[Run]:
        """Rows of this process, in order."""
        return owned_runs(self._holders, jax.process_index())

    @cached_property
    def are_shared(self) -> bool:
        """True if several processes hold some of the rows."""
        return any(len(processes) > 1 for processes in self._holders.values())

    @cached_property
    def _holders(self) -> dict[Run, set[int]]:
        """Rows of each shard -> processes that hold it."""
        holders: dict[Run, set[int]] = {}
        for device, index in self.sharding.devices_indices_map((self.number,)).items():
            holders.setdefault(self._run(index, 0), set()).add(cast(Any, device).process_index)
        return holders

    def taken(self, array: Any) -> Array:
        """This process's rows, from an array on its devices or on the host, or from one of `sharding`."""
        if not spans_processes(array):
            host = np.asarray(array)
            return np.concatenate([host[start:end] for start, end in self.own])
        shards, parts = {self._run(shard.index, 0): shard.data for shard in array.addressable_shards}, []
        for run in self.own:
            held = next(each for each in shards if _is_within(run, each))
            parts.append(np.asarray(shards[held])[run[0] - held[0] : run[1] - held[0]])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def spread(self, numbers: Array) -> jax.Array:
        """This process's part of an array, from its rows; where rows `are_shared`, of stacked copies of it, in which
        each row is there once, with its owner, and the rest is 0."""
        ends = np.cumsum([end - start for start, end in self.own])
        left = dict(zip(self.own, np.split(numbers, ends[:-1]), strict=True))
        if not self.are_shared:
            shape = (self.number, *numbers.shape[1:])
            places = self.sharding.addressable_devices_indices_map(shape)
            held = [jax.device_put(left[self._run(index, 0)], device) for device, index in places.items()]
            return jax.make_array_from_single_device_arrays(shape, self.sharding, held)
        spec = self.sharding.spec
        free = tuple(name for name in self.mesh.axis_names if name not in spec)
        shape = (math.prod(self.mesh.shape[name] for name in free), self.number, *numbers.shape[1:])
        sharding = NamedSharding(self.mesh, PartitionSpec(free, *spec))
        parts = []
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            first, last = self._run(index, 1)
            part = np.zeros((1, last - first, *numbers.shape[1:]), numbers.dtype)
            for run in [run for run in left if _is_within(run, (first, last))]:
                part[0, run[0] - first : run[1] - first] = left.pop(run)
            parts.append(jax.device_put(part, device))
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)

    def _run(self, index: Any, axis: int) -> Run:
        start, end, _ = index[axis].indices(self.number)
        return start, end


def owned_runs(holders: Mapping[Run, Collection[int]], process: int) -> list[Run]:
    """The rows that a process owns, in order: of each shard (rows -> processes that hold it) an equal part."""
    found = []
    for (start, end), processes in sorted(holders.items()):
        if process in processes:
            place, many, size = sorted(processes).index(process), len(processes), end - start
            found.append((start + size * place // many, start + size * (place + 1) // many))
    return found


def _is_within(run: Run, other: Run) -> bool:
    return other[0] <= run[0] and run[1] <= other[1]


def rows_of(scores: Scores) -> Rows | None:
    """The rows that these scores, tape values, are of; None if this process has all of them."""
    array = cast(Any, scores.logits[0]).value
    return Rows(number=array.shape[0], mesh=array.sharding.mesh) if spans_processes(array) else None


@dataclass(frozen=True, slots=True)
class _Asked:
    """The answers that a layer has brought, for the tape: its forward pass has nothing left to do."""

    layer: Layer
    rows: Rows
    answers: tuple[jax.Array, jax.Array]
    """Outputs, and True for each that there is."""
    residual: Any

    async def forward(self, *inputs: Any) -> tuple[Any, Any]:
        del inputs
        return self.answers, self.residual

    async def backward(self, residual: Any, output_grads: tuple[Any, Any]) -> tuple[Any, ...]:
        specs = self.layer.expert.inputs
        blank = [np.zeros((self.rows.own_number, *spec.shape), spec.dtype) for spec in specs if spec.differentiable]

        async def learn(own: list[Array], _: list[Array]) -> _Brought:
            return [grad for grad in await self.layer.backward(residual, own[0]) if grad is not None], []

        grads, _ = await _alike(self.layer, self.rows, [output_grads[0]], [], learn, (blank, []))
        given = iter(grads)
        return tuple(next(given) if spec.differentiable else None for spec in specs)


async def mixed_by_rows(
    layer: Layer, rows: Rows, run: Recording, scores: Scores, inputs: Sequence[Value | Any]
) -> tuple[Value, Value]:
    """Mix as `RemoteMixture` does, whose arguments, result and errors these are. All processes call this alike, and an
    error of one is raised in all."""
    values: Scores = jax.tree.map(lambda value: value.value, scores)
    arrays = [*values.logits, *(each.value if isinstance(each, Value) else each for each in inputs)]
    num_logits, num_inputs = len(values.logits), len(inputs)
    base = layer.dropout_seed() if run.differentiates else None  # the same in all
    seed = None if base is None else random.Random(f"{base} {jax.process_index()}").getrandbits(63)
    slots, alive = layer.config.k_best, None
    if layer.router.whole_grid:  # it may choose for a row by a look at the others, wherever these are
        alive, selected = await _selected(layer, rows, values)
        arrays += selected
        slots = selected[0].shape[1]
    residuals: list[Any] = []

    async def ask(own: list[Array], biases: list[Array]) -> _Brought:
        own_scores = cast(Any, Scores)(tuple(own[:num_logits]), bias=tuple(biases))
        if alive is None:
            choice = await layer.choose(own_scores)
        else:
            layer.check_scores(own_scores)
            choice = await layer.choose_selected(own[-2], own[-1], alive)
        outputs, answered, residual = await layer.forward(choice, own[num_logits : num_logits + num_inputs], seed)
        residuals.append(residual)
        asked = answered if choice.traffic is None else choice.traffic.asked
        return [outputs, answered, choice.indices, asked], [choice.traffic.capacity] if layer.knows_capacity else []

    brought = await _alike(layer, rows, arrays, values.bias, ask, _nothing_asked(layer, rows.own_number, slots))
    (outputs, answered, indices, asked), capacity = brought
    taped = await run.call(_Asked(layer, rows, (outputs, answered), residuals[0]), *inputs)
    traffic = cast(Any, Traffic)(asked, *capacity) if layer.router.heeds_traffic else None
    return run(layer.mix, scores, indices, taped[1], taped[0], inputs[0], traffic)


_Brought = tuple[Sequence[Array], Sequence[Array]]
"""Arrays with an entry for each row that a process owns, and arrays of which only those of process 0 count."""


def _nothing_asked(layer: Layer, number: int, slots: int) -> _Brought:
    """Arrays like those that experts' answers for so many rows are brought in."""
    router, output = layer.router, layer.expert.output
    outputs = np.zeros((number, slots, *output.shape), output.dtype)
    indices, none = np.zeros((number, slots, len(router.grid_size)), np.int32), np.zeros((number, slots), bool)
    return [outputs, none, indices, none], [np.zeros(router.grid_size, np.float32)] if layer.knows_capacity else []


async def _selected(layer: Layer, rows: Rows, scores: Scores) -> tuple[Array, list[jax.Array]]:
    """The living experts as process 0 knows them, and indices and mask of those that the router selects."""

    async def living(*_: Any) -> _Brought:
        return [], [await layer.alive()]

    _, (alive,) = await _alike(layer, rows, [], [], living, ([], [np.zeros(layer.router.grid_size, bool)]))
    return np.asarray(alive), list(layer.select(scores, alive))


async def _alike(
    layer: Layer,
    rows: Rows,
    arrays: Sequence[Any],
    whole: Sequence[Any],
    work: Callable[[list[Array], list[Array]], Awaitable[_Brought]],
    blank: _Brought,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Work on this process's rows, and hand on what that brings; all processes do so alike, or raise alike.

    Args:
      arrays: with an entry for each row of the batch, of which `work` gets this process's.
      whole: arrays of which `work` gets all.
      blank: arrays like those that `work` brings, for where it fails.
    """
    failure: Exception | None = stopped()
    is_stopped, brought = failure is not None, blank
    with trio.CancelScope(shield=True), losses_named():
        spanning = [each for each in arrays if spans_processes(each)]
        laid, everywhere = _laying(rows.sharding)(spanning, list(whole))
        if not is_stopped:
            supply = iter(laid)
            mixed = [next(supply) if spans_processes(each) else each for each in arrays]
            try:
                taken = await layer.device.run(lambda: ([*map(rows.taken, mixed)], [*map(np.asarray, everywhere)]))
                brought = await work(*taken)
            except jax.errors.JaxRuntimeError:
                raise
            except Exception as error:
                failure = error
        led = [from_each(rows.mesh, each) for each in brought[1]]
        word = from_each(rows.mesh, word_of(failure, _KINDS))
        spread = [*map(rows.spread, brought[0])]
        handed, led, words = _handing_on(rows.sharding)(spread if rows.are_shared else [], led, word)
        told = await layer.device.run(of_each, rows.mesh, words)
    if is_stopped:
        await trio.lowlevel.checkpoint()
    raise_alike(told, _KINDS, failure)
    return handed if rows.are_shared else spread, led


@remembered(16)
def _laying(sharding: NamedSharding) -> Any:
    """The program that brings arrays to their rows' sharding, and others to all devices."""
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.jit(lambda rows, whole: (rows, whole), out_shardings=(sharding, everywhere))


@remembered(16)
def _handing_on(sharding: NamedSharding) -> Any:
    """The program (stacked copies of rows, arrays of each process, words) -> (rows, arrays of process 0, words)."""
    everywhere, leader = NamedSharding(sharding.mesh, PartitionSpec()), first_devices(cast(Mesh, sharding.mesh))[0]

    def one(stacked: jax.Array) -> jax.Array:  # all but one are zeros
        return jnp.any(stacked, axis=0) if stacked.dtype == bool else jnp.sum(stacked, axis=0, dtype=stacked.dtype)

    def handed_on(stacked: list[jax.Array], of_each: list[jax.Array], words: jax.Array) -> Any:
        return [*map(one, stacked)], [each[leader] for each in of_each], words

    return jax.jit(handed_on, out_shardings=(sharding, everywhere, everywhere))
