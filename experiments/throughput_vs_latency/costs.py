"""The time that this machine's device takes for a block: the cost model of virtual time."""

import math
import time
from collections.abc import Callable
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
Costs = dict[tuple[str, int], float]
"""Seconds of a batch, by "forward" or "backward" and by the rows that it is padded to."""


def cost_of(costs: Costs, name: str, rows: int) -> float:
    """The cost of a batch: of the smallest size that holds it, since the node pads to it. Other work is free.

    Raises:
      ValueError: no size holds so many rows.
    """
    sizes = [size for kind, size in costs if kind == name]
    if sizes and rows > max(sizes):
        raise ValueError(f"the cost of {rows} rows {name} is not known: at most {max(sizes)} are")
    return costs[name, min(size for size in sizes if size >= rows)] if sizes else 0.0


def under_load(costs: Costs, taken: Taken) -> Costs:
    """The means of what batches took; a size that did not occur is as much slower than alone as the others are."""
    means = {key: mean(taken[key]) for key in costs if key in taken}

    def slower(name: str) -> float:
        return mean([means[key] / costs[key] for key in means if key[0] == name] or [1.0])

    return {key: means[key] if key in means else slower(key[0]) * seconds for key, seconds in costs.items()}


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


def measure_costs(block: Block, *, times: int) -> Costs:
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
    return {key: median(seconds) for key, seconds in found.items()}
