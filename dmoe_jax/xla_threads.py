"""How many threads XLA computes with on a CPU: as many as there are cores, or as `NPROC` says when JAX starts.

Several nodes on one machine are to share its cores. Where each has a thread for every core, the parts of its programs
wait for threads that have no core: a token expert's backward call takes 1.5 times the processor time that it takes
with one thread, and more time (`experiments.node_speed`).
"""

import os

from dmoe_jax.cores import usable_cores

VARIABLE = "NPROC"
"""Where XLA looks."""


def xla_threads() -> int:
    """The threads that XLA's CPU client has, or will have when JAX first computes something."""
    asked = os.environ.get(VARIABLE, "")
    return int(asked) if asked.isdigit() and int(asked) else usable_cores()


def set_xla_threads(threads: int) -> None:
    """Have XLA compute with so many; effective only before JAX's first computation."""
    os.environ[VARIABLE] = str(threads)


def share_of_threads(processes: int, *, may_call_host: bool) -> int:
    """The threads of each of several processes that share this machine's cores.

    Args:
      processes: how many share them.
      may_call_host: whether their programs may call the host, for which XLA needs two (`dmoe_jax.node.host_calls`).
    """
    return max(usable_cores() // processes, 2 if may_call_host else 1)
