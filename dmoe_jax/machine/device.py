"""Devices: they run XLA work, at little cost for the event loop.

On a real node XLA calls go through a worker thread, one at a time per device: XLA releases the GIL, so the loop stays
free for the network (a hop costs about 0.2 ms; inline, a 30 ms call would make every ping 30 ms late). Only where there
are no cores to spare, what takes a few milliseconds is run in the loop. In virtual time threads are poison (the clock
jumps ahead while they work), so there the same calls run inline and charge a declared cost to the clock instead.
"""

import functools
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import jax
import numpy as np
import trio

from dmoe_jax.arrays import PyTree
from dmoe_jax.machine.cores import usable_cores

T = TypeVar("T")

_INLINE_S = 4e-3
"""Some small batches, and less than anybody notices in a ping."""
_TURN_S, _LONG_TURN_S = 2e-3, 9e-3
"""Seconds of a turn where the event loop has a core of its own, and where it shares one with XLA. There, each end of a
turn leaves the device without work until the loop is done with what it does; measured in `experiments.node_speed`."""


@dataclass(slots=True)
class DeviceTime:
    """Seconds of work on a device, added up; work that is under way is counted when it ends."""

    seconds: float = 0.0


@runtime_checkable
class Device(Protocol):
    """Runs synchronous array work without blocking the swarm's clock."""

    compiles_aside: bool
    """True if `aside` leaves the device free. If not, compiling takes no time at all, as in virtual time, and nothing
    is gained by compiling before there is need."""
    is_simulated: bool
    """True if its seconds are declared ones, so that a measurement would say nothing and make runs differ."""

    @property
    def turn_s(self) -> float:
        """Work of about so many seconds is worth one call of `run`: the way there and back costs as much as a small
        batch. 0: the way costs nothing."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds of work that `run` was given, without waiting for a turn and the way to the thread; in virtual time
        declared costs."""
        ...

    async def run(
        self, function: Callable[..., T], *args: Any, spent: DeviceTime | None = None, expected_s: float = math.inf
    ) -> T:
        """Return `function(*args)` with every JAX array in it ready.

        If cancelled while the work waits for its turn it is not started; work that has started is waited for, so that
        donated buffers never change hands behind the caller's back.

        Args:
          spent: the seconds of this work are added to it, also if the function raises.
          expected_s: about how long it will take; infinite if nobody knows.
        """
        ...

    async def aside(self, function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)` without a turn on the device: for compilation, beside which others are served. If
        cancelled, work that has started is waited for."""
        ...

    def turn(self) -> AbstractAsyncContextManager[object]:
        """A block during which nothing that was given to `run` runs; it begins when it is this block's turn."""
        ...

    def another(self) -> "Device":
        """A further device of this kind, which works beside this one."""
        ...


class ThreadDevice:
    """One worker thread: calls run in the order in which they were made, off the event loop. Another one compiles.

    Short work may run in the event loop itself, where that shares its cores with XLA.

    Args:
      compiles_beside: False: the same one compiles, in its turn.
      inline_s: work that will take less, seconds, runs in the event loop; 0: nothing does; None: as is best here.
      beside_loop: True if a loop of somebody's own uses JAX's devices, with programs that may wait for this process's
        event loop: nothing runs in the event loop, and experts live on devices of their own
        (`dmoe_jax.machine.own_devices`).
    """

    compiles_aside = True
    is_simulated = False

    def __init__(
        self, *, compiles_beside: bool = True, inline_s: float | None = None, beside_loop: bool = False
    ) -> None:
        self.beside_loop = beside_loop
        self._inline_s = 0.0 if beside_loop else inline_s
        self._limiter = trio.CapacityLimiter(1)
        self._aside = trio.CapacityLimiter(1) if compiles_beside else self._limiter
        self.busy_s = 0.0

    @property
    def turn_s(self) -> float:
        return _LONG_TURN_S if _shares_its_cores() else _TURN_S

    async def run(
        self, function: Callable[..., T], *args: Any, spent: DeviceTime | None = None, expected_s: float = math.inf
    ) -> T:
        def timed() -> T:
            started = time.perf_counter()
            try:
                return _run_ready(function, args)
            finally:
                seconds = time.perf_counter() - started
                self.busy_s += seconds
                if spent is not None:
                    spent.seconds += seconds

        if self._inline_s is None:  # decided with the first work: before, a program may still choose its backend
            self._inline_s = _INLINE_S if _shares_its_cores() else 0.0
        if expected_s < self._inline_s:
            async with self._limiter:
                return timed()
        return await trio.to_thread.run_sync(timed, limiter=self._limiter)

    async def aside(self, function: Callable[..., T], *args: Any) -> T:
        return await trio.to_thread.run_sync(_run_ready, function, args, limiter=self._aside)

    def turn(self) -> AbstractAsyncContextManager[object]:
        return self._limiter

    def another(self) -> "ThreadDevice":
        return ThreadDevice(compiles_beside=self._aside is not self._limiter, inline_s=self._inline_s)


@functools.cache
def _shares_its_cores() -> bool:
    """True if XLA and the event loop have to share the cores of this machine.

    On one or two cores XLA's own threads have all of them anyhow, so that the network gains nothing from the loop that
    is free meanwhile, while every change of threads wakes somebody up. On a GPU or on more cores the loop and the
    device work at the same time.
    """
    return usable_cores() <= 2 and jax.default_backend() == "cpu"


Cost = Callable[[str, int], float]
"""Called with a function's name and the rows of its first array (0 without one): the virtual seconds that it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The cost of a call on a simulated device; measure it on the device that is to be simulated. A trainer's calls are
    its waits for what XLA has computed since the last one."""

    call_s: float = 0.0
    """Seconds of every call: dispatch and the work that does not depend on the batch."""
    row_s: float = 0.0
    """Seconds of every row of the batch."""
    slowdown: float = 1.0
    """Factor of all costs."""

    def __post_init__(self) -> None:
        if not (self.call_s >= 0 and self.row_s >= 0 and self.slowdown > 0):
            raise ValueError(f"expected call_s >= 0, row_s >= 0 and slowdown > 0, got {self}")

    def __call__(self, name: str, rows: int) -> float:
        return self.slowdown * (self.call_s + self.row_s * rows)


class InlineDevice:
    """The calling task itself; for virtual time and tests. One call at a time, in the order in which they were made;
    compiling takes no virtual time.

    Args:
      cost: what a call costs in virtual time: a `CostModel`, or a function of your own; by default nothing.
    """

    compiles_aside = False
    is_simulated = True
    turn_s = 0.0

    def __init__(self, cost: Cost = CostModel()) -> None:
        self._cost = cost
        self._turn = trio.Lock()
        self.busy_s = 0.0

    async def run(
        self, function: Callable[..., T], *args: Any, spent: DeviceTime | None = None, expected_s: float = math.inf
    ) -> T:
        async with self._turn:
            cost = self._cost(*work_of(function, args))
            await trio.sleep(cost)
            self.busy_s += cost
            if spent is not None:
                spent.seconds += cost
            return _run_ready(function, args)

    async def aside(self, function: Callable[..., T], *args: Any) -> T:
        await trio.lowlevel.checkpoint()
        return _run_ready(function, args)

    def turn(self) -> AbstractAsyncContextManager[object]:
        return self._turn

    def another(self) -> "InlineDevice":
        return InlineDevice(self._cost)


class AllDevices:
    """Several devices as one: the first does the work, while the others rest, so that it sees one moment of each."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._first, *self._others = devices
        self.compiles_aside = self._first.compiles_aside
        self.is_simulated = self._first.is_simulated
        self.turn_s = self._first.turn_s

    @property
    def busy_s(self) -> float:
        return sum(device.busy_s for device in (self._first, *self._others))

    async def run(
        self, function: Callable[..., T], *args: Any, spent: DeviceTime | None = None, expected_s: float = math.inf
    ) -> T:
        async with AsyncExitStack() as stack:
            # Always in this order: two that wait for each other's device would wait for ever.
            for device in self._others:
                await stack.enter_async_context(device.turn())
            return await self._first.run(function, *args, spent=spent, expected_s=expected_s)
        raise AssertionError("no device swallows exceptions")

    async def aside(self, function: Callable[..., T], *args: Any) -> T:
        return await self._first.aside(function, *args)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for device in (*self._others, self._first):
                await stack.enter_async_context(device.turn())
            yield

    def another(self) -> "AllDevices":
        return AllDevices([device.another() for device in (self._first, *self._others)])


async def to_host(device: Device, tree: PyTree) -> PyTree:
    """The tree with every JAX array as a NumPy array (zero-copy and read-only on CPU), waited for off the loop unless
    all are on the host already, and computed."""
    if not device.is_simulated and all(map(_is_there, jax.tree.leaves(tree))):
        await trio.lowlevel.checkpoint()
        return _to_host(tree)
    return await device.run(_to_host, tree)


def _is_there(leaf: Any) -> bool:
    """True if NumPy sees its numbers without waiting or copying."""
    if not isinstance(leaf, jax.Array):
        return True
    devices = leaf.devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu" and bool(cast(Any, leaf).is_ready())


def _to_host(tree: PyTree) -> PyTree:
    return jax.tree.map(np.asarray, tree)


def work_of(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, int]:
    """(name of a function, rows of the first array among its arguments: 0 without one): what a `Cost` is asked for."""
    rows = next((leaf.shape[0] for leaf in jax.tree.leaves(args) if getattr(leaf, "shape", ())), 0)
    return getattr(function, "__name__", ""), rows


def _run_ready(function: Callable[..., T], args: tuple[Any, ...]) -> T:
    return jax.block_until_ready(function(*args))
