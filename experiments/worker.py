"""A process that computes what it is handed, one call after another: the helper of `experiments.engines`."""

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import trio

from dmoe_jax.machine.xla_threads import set_xla_threads
from dmoe_jax.runs.setting_up import set_up_jax
from experiments.processes import HelperProcess, orders, run_helper, say

T = TypeVar("T")

MODULE = "experiments.worker"


def ask(helper: HelperProcess, call: Callable[[], T]) -> T:
    """Have a helper compute a call that can be pickled. Raises HelperFailed if it raises, or its process ends."""
    found: T = pickle.loads(bytes.fromhex(helper.ask(call=pickle.dumps(call).hex())["value"]))
    return found


async def work(
    *, number: int = 0, jobs: int = 1, threads: int | None = None, command: Sequence[str] = (), folder: str = ""
) -> None:
    """Take this process's share of the cores, and compute what is ordered.

    Args:
      threads: of XLA; None for one on each of its cores.
      command: words that started the sweep, which the configuration of a run names; () for our own.
      folder: working folder of the sweep, from which its relative paths lead.
    """
    with suppress(OSError):  # another machine may lack it, and needs it only for such paths
        os.chdir(folder)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[number::jobs] or cores)
    if threads is not None:
        set_xla_threads(threads)
    sys.orig_argv = [*command] or sys.orig_argv
    set_up_jax()  # before a call is unpickled, which loads JAX: it counts the cores then
    say(ready=True)

    async def compute(call: str) -> None:
        # In a thread: a simulated swarm is a run of trio of its own.
        value = await trio.to_thread.run_sync(lambda: pickle.loads(bytes.fromhex(call))())
        say(value=pickle.dumps(value).hex())

    async with trio.open_nursery() as nursery:
        async for order in orders():
            nursery.start_soon(compute, order["call"])
        os._exit(0)  # nobody waits any more: a training would go on to its end


if __name__ == "__main__":
    run_helper(work)
