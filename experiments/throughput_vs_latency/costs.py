"""Blocks as experts, and how long this machine's device takes for each: the cost model of virtual time."""

import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, TypeVar

import jax
import numpy as np
import optax
import trio

from dmoe_jax.experts.base import Expert, TensorSpec
from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.experts.transformer_xl import transformer_xl_layer
from dmoe_jax.machine.device import DeviceTime, ThreadDevice, work_of
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.programs import buckets_up_to
from dmoe_net.types import Array
from experiments.throughput_vs_latency.settings import Block

T = TypeVar("T")

OPTIMIZER = optax.adam(1e-6)
"""Optimiser of each block on real computing: it costs what Adam costs, and hours of random gradients spoil nothing."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds that a node's device takes, as `dmoe_jax.machine.device.InlineDevice` asks for it.

    Attributes:
      seconds: by "forward" and "backward", and then by the rows that a batch is padded to.
    """

    seconds: Mapping[str, Mapping[int, float]]

    def __call__(self, name: str, rows: int) -> float:
        """The cost of a batch: of the smallest size that holds it, since the node pads to it. Other work is free.

        Raises:
          ValueError: no size holds so many rows.
        """
        if name not in self.seconds:
            return 0.0
        sizes = [size for size in self.seconds[name] if size >= rows]
        if not sizes:
            raise ValueError(f"the cost of {rows} rows {name} is not known: at most {max(self.seconds[name])} are")
        return self.seconds[name][min(sizes)]

    def least_row_s(self, name: str) -> float:
        """Seconds for each row at the size where rows are cheapest."""
        return min(seconds / rows for rows, seconds in self.seconds[name].items())

    def mean(self, other: "CostTable") -> "CostTable":
        """The mean of two tables of the same sizes, such as of before and after a measurement."""
        return CostTable(
            {
                name: {rows: (seconds + other.seconds[name][rows]) / 2 for rows, seconds in sizes.items()}
                for name, sizes in self.seconds.items()
            }
        )

    def under_load(self, taken: Mapping[str, Mapping[int, Sequence[float]]]) -> "CostTable":
        """The means of what batches took; a size that did not occur is as much slower than here as the others are.

        Args:
          taken: by kind and rows, as `TimedDevice.taken` has them.
        """
        found = {}
        for name, sizes in self.seconds.items():
            means = {rows: mean(each) for rows, each in taken.get(name, {}).items() if rows in sizes}
            slower = mean(seconds / sizes[rows] for rows, seconds in means.items()) if means else 1.0
            found[name] = {rows: means.get(rows, slower * seconds) for rows, seconds in sizes.items()}
        return CostTable(found)


class TimedDevice(ThreadDevice):
    """A node's device that notes how long it is taken by each batch: until the event loop knows that it is free again.

    An event loop that is busy hands the next batch over late, and a device that has nothing to do meanwhile is slower
    than what it computes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._turn = trio.Lock()
        self._taken: dict[str, dict[int, list[float]]] = {}

    async def run(
        self, function: Callable[..., T], *args: Any, spent: DeviceTime | None = None, expected_s: float = math.inf
    ) -> T:
        name, rows = work_of(function, args)
        async with self._turn:
            started = trio.current_time()
            result = await super().run(function, *args, spent=spent, expected_s=expected_s)
            self._taken.setdefault(name, {}).setdefault(rows, []).append(trio.current_time() - started)
        return result

    def taken(self) -> dict[str, dict[int, list[float]]]:
        """Seconds of every batch since the last time that somebody asked, by the function's name and by rows."""
        taken, self._taken = self._taken, {}
        return taken


def expert_of(block: Block) -> Expert:
    """The block from the library. A Transformer block remembers one position, the least that it can."""
    if block.name == "feedforward":
        return feedforward(d_model=block.d_model)
    return transformer_xl_layer(
        d_model=block.d_model, num_heads=block.num_heads, d_ff=block.d_ff, seq_len=block.seq_len, mem_len=1
    )


_NUMBER = TensorSpec(name="number", shape=(1,), dtype="float32", differentiable=True)
STAND_IN = Expert("stand_in", lambda key: {}, lambda params, number: number, (_NUMBER,), _NUMBER)
"""Expert that nodes serve in virtual time: one number for each row, returned as it came."""


@functools.cache
def echo_of(expert: Expert) -> Expert:
    """An expert with the same inputs that returns the first of them: a call costs what it costs to travel."""
    return expert._replace(name="echo", init=lambda key: {}, apply=lambda params, first, *others: first)


def warm_backend(expert: Expert, optimizer: optax.GradientTransformation | None, sizes: Sequence[int]) -> ExpertBackend:
    """A backend whose programs for batches of these rows are compiled, for all backends of this kind."""
    backend = ExpertBackend(expert, optimizer, expert.init(jax.random.key(0)))
    for rows in sizes:
        backend.warm_up_bucket(rows)
    return backend


def random_inputs(expert: Expert, rows: int) -> list[Array]:
    """A batch for an expert: random numbers, and an empty memory."""
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal((rows, *spec.shape)).astype(spec.dtype)
        if spec.differentiable
        else np.zeros((rows, *spec.shape), spec.dtype)
        for spec in expert.inputs
    ]


def start_device() -> None:
    """Start JAX's device; a CPU with one thread, so that the event loop has the other cores to itself.

    XLA makes as many threads as there are cores that the process may use when the device starts. Costs that are
    measured while the loop is idle would be those of all cores, of which the loop takes one as soon as it works.
    """
    if not hasattr(os, "sched_setaffinity"):
        jax.devices()
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        jax.devices()
    finally:
        os.sched_setaffinity(0, cores)


def measure_costs(block: Block, *, joined: int, times: int) -> CostTable:
    """Time forward and backward calls of a node's own backend, from NumPy arrays to NumPy arrays.

    Sizes and kinds take turns, so that other work on the machine slows all of them alike.

    Args:
      block: to be measured.
      joined: sizes are 1, 2, 4, ... trainers' batches up to so many.
      times: how often; each cost is the median.
    """
    expert = expert_of(block)
    sizes = [batches * block.batch_rows for batches in buckets_up_to(joined)]
    backend = warm_backend(expert, OPTIMIZER, sizes)
    found: dict[str, dict[int, list[float]]] = {kind: {rows: [] for rows in sizes} for kind in ("forward", "backward")}
    for _ in range(times):
        for rows in sizes:
            inputs = random_inputs(expert, rows)
            started = time.perf_counter()
            output = backend.forward(inputs)
            between = time.perf_counter()
            backend.backward(inputs, output)
            found["forward"][rows].append(between - started)
            found["backward"][rows].append(time.perf_counter() - between)
    return CostTable({kind: {rows: median(each) for rows, each in costs.items()} for kind, costs in found.items()})
