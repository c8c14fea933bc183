"""A process that runs one trial after another, see `trials.train_missing`, or is timed, see `measurement`."""

import os
import pickle
import threading
import time
from functools import partial

import trio

from dmoe_jax.runs.setting_up import set_up_jax
from experiments.processes import orders, run_helper, say


def _end_with(parent: int) -> None:
    """End this process soon after its parent: a training hears nothing until it is done, and may take long."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


async def work(number: int, jobs: int) -> None:
    """Take this process's share of the cores, and run what is ordered."""
    threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[number::jobs] or cores)
    set_up_jax()
    from experiments.emulation.measurement import time_engine  # JAX counts the cores when it is loaded
    from experiments.emulation.trials import run_trial

    say(ready=True)
    async for order in orders():
        # In a thread: a trial of the simulated swarm is a run of trio of its own.
        if "engine" in order:
            say(**await trio.to_thread.run_sync(partial(time_engine, **order["engine"])))
        else:
            say(**await trio.to_thread.run_sync(run_trial, pickle.loads(bytes.fromhex(order["trial"]))))


if __name__ == "__main__":
    run_helper(work)
