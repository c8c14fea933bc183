"""JAX set up for a process that computes: its cache on disk, its memory, and Ctrl-C."""

import gc
import inspect
import os
import platform
from pathlib import Path

import trio

from dmoe_jax.machine.cache_folder import cache_folder
from dmoe_jax.machine.cores import usable_cores
from dmoe_jax.machine.freed_memory import keep_freed_memory
from dmoe_jax.machine.xla_threads import xla_threads


def set_up_jax() -> None:
    """Have freed memory kept (`keep_freed_memory`) and XLA's results, so that a process started again compiles nothing.

    Compiled code is for one processor type, hence a folder for each machine. `DMOE_XLA_CACHE` names another place;
    empty turns the cache off, and so does a user without a home. Of a GPU's memory the process takes what it needs;
    by itself JAX takes three quarters at once (`XLA_PYTHON_CLIENT_PREALLOCATE`).
    """
    keep_freed_memory()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    caches = cache_folder()
    default = "" if caches is None else str(caches / f"xla-{platform.node()}")
    folder = os.environ.get("DMOE_XLA_CACHE", default)
    if folder:
        if (threads := xla_threads()) != usable_cores():
            # Programs are divided among so many, which the names of JAX's files do not say.
            folder = str(Path(folder) / f"threads-{threads}")
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    keep_interrupts_out_of_collections()


def keep_interrupts_out_of_collections() -> None:
    """Have trio deliver a Ctrl-C that comes during a garbage collection when that is over.

    JAX has Python call it then, and what is raised in such a call is lost: the program would go on as if nobody had
    pressed anything.
    """
    for callback in gc.callbacks:
        if inspect.isfunction(callback):
            trio.lowlevel.enable_ki_protection(callback)
