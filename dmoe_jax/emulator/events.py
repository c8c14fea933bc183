"""Events put together by what they need, and the loop over them.

Experts of different layers share nothing, and neither do a call of one trainer and a stage of another. So an order is
cut into waves: first every layer handles calls of its experts, in the order of its own, then the trainers compute. The
result is that of the order, but caches hold one layer's experts, and the program looks for one kind of event at a time.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int32

from dmoe_jax.emulator.order import STAGE, EventOrder


class Events(NamedTuple):
    """An `EventOrder`'s arrays, or one event."""

    kind: Any
    trainer: Any
    layer: Any
    pair: Any
    expert: Any
    answered: Any
    computed: Any


class Waves(NamedTuple):
    """Events in queues, one of each layer's calls and one of all stages.

    Attributes:
      calls: events of each layer; `expert` is a cell of that layer, or -1. stages: the others.
      ends: for each wave, where it ends in each queue, the stages' last.
    """

    calls: tuple[Events, ...]
    stages: Events
    ends: Int32[np.ndarray | jax.Array, "waves queues"]


def cut_into_waves(order: EventOrder, first: int, last: int, *, num_cells: int, length: int) -> tuple[Waves, int]:
    """(events `first` to `last` of an order; the number of waves).

    Args:
      num_cells: experts of a layer.
      length: every array is filled up to it, so that all pieces of an order are one compiled program.
    """
    part = slice(first, last)
    is_stage = order.kind[part] >= STAGE
    queue = np.where(is_stage, order.num_layers, order.layer[part])
    wave = np.array(_waves_of(queue.tolist(), order.trainer[part].tolist(), order.num_layers), np.int64)
    num_waves = int(wave.max(initial=-1)) + 1
    ends = np.zeros((length, order.num_layers + 1), np.int32)
    queues = []
    for number in range(order.num_layers + 1):
        own = np.flatnonzero(queue == number)
        events = {name: getattr(order, name)[part][own] for name in Events._fields}
        expert = events["expert"]
        events["expert"] = np.where(expert < 0, expert, expert - number * num_cells)
        queues.append(Events(**{name: np.pad(array, (0, length - len(own))) for name, array in events.items()}))
        ends[:num_waves, number] = np.searchsorted(wave[own], np.arange(num_waves), side="right")
    return Waves(tuple(queues[:-1]), queues[-1], ends), num_waves


def _waves_of(queues: list[int], trainers: list[int], stages: int) -> list[int]:
    """The first wave in which each event can be: not before another of its queue, nor before what its trainer did."""
    last = [0] * (stages + 1)  # the wave of the last event of each queue
    own_calls: dict[int, int] = {}  # the last wave of a trainer's calls
    own_stage: dict[int, int] = {}  # the first wave after its last stage
    waves = []
    for queue, trainer in zip(queues, trainers, strict=True):
        if queue == stages:
            wave = max(last[queue], own_calls.get(trainer, 0), own_stage.get(trainer, 1) - 1)
            own_stage[trainer] = wave + 1
        else:
            wave = max(last[queue], own_stage.get(trainer, 0))
            own_calls[trainer] = max(own_calls.get(trainer, 0), wave)
        last[queue] = wave
        waves.append(wave)
    return waves


Handler = tuple[Callable[[Events, Any], Any], Callable[[Any, Events], Any]]
"""((event, state) -> True if the event is of this kind, (state, event) -> the state after it)."""


def run_events(
    handlers: Sequence[Handler], events: Events, first: Any, last: Any, state: Any
) -> tuple[Int32[jax.Array, ""], Any]:
    """(`last`; the state after events `first` to `last`, each handled by the one handler that it is for).

    XLA copies what passes through a conditional, but a loop changes in place what it carries. So each handler is a loop
    that runs while the next event is of its kind, and around them a loop goes on until no event is left.
    """

    def event_at(place: Any) -> Events:
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False), events)

    def round_of_all(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        for matches, handle in handlers:

            def more(carry: tuple[Any, Any], matches: Any = matches) -> Any:
                place, state = carry
                return (place < last) & matches(event_at(place), state)

            def one(carry: tuple[Any, Any], handle: Any = handle) -> tuple[Any, Any]:
                place, state = carry
                return place + 1, handle(state, event_at(place))

            carry = jax.lax.while_loop(more, one, carry)
        return carry

    return jax.lax.while_loop(lambda carry: carry[0] < last, round_of_all, (first, state))


@functools.cache
def compiler_options(*, in_place: bool, same_kernels: bool) -> dict[str, Any] | None:
    """Compiler options for the loop, on CPUs only: other backends have none.

    XLA's newer library for products and sums on CPUs (YNNPACK) shares out small operations among cores, which makes a
    run half as fast on two cores as on one: it is switched off where it can be, and so is the sharing out of the older
    one's products.

    Args:
      in_place: XLA must see that it may change a place of an array without a copy of the array, although nothing but
        the order in which the operations are written keeps the write behind the reads.
      same_kernels: leave that library on, as nodes and trainers have it: sums are rounded in the same order then.

    Returns: None: there are no such options.
    """
    if jax.default_backend() != "cpu":
        return None
    small: dict[str, Any] = {}
    if not same_kernels:
        small = _accepted({"xla_cpu_experimental_ynn_fusion_type": ""})
        small |= _accepted({"xla_cpu_multi_thread_eigen": False})
    if not in_place:
        return small or None
    regions = _accepted({"xla_cpu_copy_insertion_use_region_analysis": True})
    return {**small, **regions} if regions else None


def _accepted(options: dict[str, Any]) -> dict[str, Any]:
    try:
        jax.jit(lambda value: value, compiler_options=options).lower(0).compile()
    except (jax.errors.JaxRuntimeError, ValueError):  # a version of XLA without it
        return {}
    return options
