"""Where XLA work runs, and what it costs the event loop.

On a real node XLA calls go through a worker thread, one at a time per device: XLA releases the GIL, so the loop stays
free for the network (a hop costs about 0.2 ms; inline, a 30 ms call would make every ping 30 ms late). In virtual time
threads are poison (the clock jumps ahead while they work), so there the same calls run inline and charge a declared
cost to the clock instead.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
import trio

T = TypeVar("T")


@runtime_checkable
class Device(Protocol):
    """Runs synchronous array work without blocking the swarm's clock."""

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)` with every JAX array in it ready.

        If cancelled while the work waits for its turn it is not started; work that has started is waited for, so that
        donated buffers never change hands behind the caller's back.
        """
        ...


class ThreadDevice:
    """One worker thread: calls run in the order in which they were made, off the event loop."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(1)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """See `Device.run`."""
        return await trio.to_thread.run_sync(_run_ready, function, args, limiter=self._limiter)


class InlineDevice:
    """The calling task itself; for virtual time and tests.

    Args:
      cost_s: cost model, called with the function's name; seconds of virtual time that a call takes.
    """

    def __init__(self, cost_s: Callable[[str], float] = lambda _name: 0.0) -> None:
        self._cost_s = cost_s
        self._turn = trio.Lock()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """See `Device.run`."""
        async with self._turn:
            await trio.sleep(self._cost_s(getattr(function, "__name__", "")))
            return _run_ready(function, args)


async def to_host(device: Device, tree: Any) -> Any:
    """The tree with every JAX array as a NumPy array (zero-copy and read-only on CPU), waited for off the loop."""
    return await device.run(_to_host, tree)


def _to_host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def _run_ready(function: Callable[..., T], args: tuple[Any, ...]) -> T:
    return jax.block_until_ready(function(*args))
