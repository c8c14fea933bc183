"""The time that this machine's device takes for a block: the cost model of virtual time."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, TypeVar

import jax
import numpy as np
import optax
import trio

from dmoe_jax.experts import Expert, make_expert
from dmoe_jax.machine.device import DeviceTime, ThreadDevice, work_of
from dmoe_jax.node.backend import ExpertBackend
from experiments.throughput_vs_latency.settings import JOINED, Block

T = TypeVar("T")

OPTIMIZER = optax.adam(1e-6)
"""Optimiser of each block on real computing: it costs what Adam costs, and hours of random gradients spoil nothing."""

Taken = dict[tuple[str, int], list[float]]
"""Seconds of batches, by the function's name and by rows."""


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

    def under_load(self, taken: Taken) -> "CostTable":
        """The means of what batches took; a size that did not occur is as much slower than here as the others are."""
        found = {}
        for name, sizes in self.seconds.items():
            means = {rows: mean(taken[name, rows]) for rows in sizes if (name, rows) in taken}
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
        self.taken: Taken = {}
        self._turn = trio.Lock()

    async def run(
        self, function: Callable[..., T], *args: Any, spent: DeviceTime | None = None, expected_s: float = math.inf
    ) -> T:
        async with self._turn:
            started = trio.current_time()
            result = await super().run(function, *args, spent=spent, expected_s=expected_s)
            self.taken.setdefault(work_of(function, args), []).append(trio.current_time() - started)
        return result


def random_inputs(expert: Expert, rows: int) -> list[np.ndarray]:
    """A batch for an expert: random numbers, and an empty memory."""
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal((rows, *spec.shape)).astype(spec.dtype)
        if spec.differentiable
        else np.zeros((rows, *spec.shape), spec.dtype)
        for spec in expert.inputs
    ]


def measure_costs(block: Block, *, times: int) -> CostTable:
    """Time forward and backward calls of a node's own backend, from NumPy arrays to NumPy arrays.

    Sizes and kinds take turns, so that other work on the machine slows all of them alike.

    Args:
      block: to be measured, for one trainer's batch and for as many as a server joins.
      times: how often; each cost is the median.
    """
    expert = make_expert(block.kind, **block.config)
    sizes = (block.rows, JOINED * block.rows)
    backend = ExpertBackend(expert, OPTIMIZER, expert.init(jax.random.key(0)))
    for rows in sizes:
        backend.warm_up_bucket(rows)
    found: Taken = {}
    for _ in range(times):
        for rows in sizes:
            inputs = random_inputs(expert, rows)
            started = time.perf_counter()
            output = backend.forward(inputs)
            between = time.perf_counter()
            backend.backward(inputs, output)
            found.setdefault(("forward", rows), []).append(between - started)
            found.setdefault(("backward", rows), []).append(time.perf_counter() - between)
    return CostTable({kind: {rows: median(found[kind, rows]) for rows in sizes} for kind in ("forward", "backward")})
