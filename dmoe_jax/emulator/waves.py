"""Events of an order put together by what they need.

Experts of different layers share nothing, and neither do a call of one trainer and a stage of another: which of them is
handled first makes no difference. So an order is cut into waves: first every layer handles calls of its experts, in the
order of its own, then the trainers compute. What comes out is what the order says, but one layer's experts and one kind
of event at a time are what caches hold and the program looks for.
"""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int32

from dmoe_jax.emulator.order import STAGE, EventOrder
from dmoe_jax.emulator.state import Events


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
      length: every array is filled up to it, so that all pieces of an order are one compiled program. At least as many
        as there are events.
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
        queues.append(Events(**{name: _filled(array, length) for name, array in events.items()}))
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


def _filled(array: np.ndarray, length: int) -> np.ndarray:
    return np.pad(array, (0, length - len(array)))
