"""Number of threads that XLA computes with on a CPU: as many as there are cores, or as `NPROC` says when JAX starts.

Several nodes on one machine are to share its cores. Where each has a thread for every core, the parts of its programs
wait for threads that have no core: a token expert's backward call takes 1.5 times the processor time that it takes
with one thread, and more time (`experiments.node_speed`).
"""

import functools
import logging
import os

from dmoe_jax.machine.cores import usable_cores

_log = logging.getLogger(__name__)

VARIABLE = "NPROC"
"""Environment variable that XLA reads."""
MAX_WAITING_CALLS = 16
"""Callbacks of remote layers that may wait for the network at once in one process."""


def xla_threads() -> int:
    """The threads that XLA's CPU client has, or will have when JAX first computes something."""
    asked = os.environ.get(VARIABLE, "")
    return int(asked) if asked.isdigit() and int(asked) else usable_cores()


def set_xla_threads(threads: int) -> None:
    """Have XLA compute with so many; effective only before JAX's first computation."""
    os.environ[VARIABLE] = str(threads)


def share_of_threads(processes: int, *, may_call_host: bool) -> int:
    """The threads of each of several processes that share this machine's cores; two at least if their programs may call
    the host, see `dmoe_jax.node.host_calls`."""
    return max(usable_cores() // processes, 2 if may_call_host else 1)


@functools.cache
def make_room() -> bool:
    """Give XLA's CPU client threads to spare for callbacks that wait; effective only before JAX's first computation.

    Returns: True if it has one for each of `MAX_WAITING_CALLS` on each device, and one to work. Otherwise callbacks get
      large arrays in pieces, which costs about a millisecond a megabyte.
    """
    import jax  # here, for the commands that need no JAX start without

    asked, threads = os.environ.get(VARIABLE), xla_threads()
    if threads <= MAX_WAITING_CALLS and not _has_computed():
        threads = usable_cores() + MAX_WAITING_CALLS
        set_xla_threads(threads)
        try:
            jax.local_devices(backend="cpu")  # makes the client
        finally:
            # Processes that this one starts are to have threads as ever.
            os.environ.pop(VARIABLE)
            if asked is not None:
                os.environ[VARIABLE] = asked
    elif threads <= MAX_WAITING_CALLS and jax.local_device_count("cpu") > 1:
        _log.warning(
            "JAX has computed already, so XLA keeps its %d threads. With so few it stops for good, also without "
            "dmoe_jax, when a loop over several CPU devices has 32 steps under way: call connect() first, set %s=%d "
            "before JAX starts, or read a result every 16 steps",
            threads,
            VARIABLE,
            usable_cores() + MAX_WAITING_CALLS,
        )
    return threads > MAX_WAITING_CALLS * jax.local_device_count("cpu")


def _has_computed() -> bool:
    """True if JAX's clients exist already. Nothing public tells; without the private function: True, to be safe."""
    try:
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:
        return True
    return bool(backends_are_initialized())
