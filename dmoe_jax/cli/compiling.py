"""Processes of one machine that need the same programs: one compiles, the others find its results in XLA's cache."""

import hashlib
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import IO

import jax
import trio

from dmoe_jax.machine.xla_threads import xla_threads
from dmoe_jax.runs.speech import say

if sys.platform != "win32":
    import fcntl


@asynccontextmanager
async def compiled_once(programs: str, *, while_waiting: AbstractAsyncContextManager[object]) -> AsyncIterator[None]:
    """Let one process of this machine through a block that compiles, and the others when it is done.

    Nobody waits where somebody has been through the block before: a file beside the cached results, which is locked
    while the first process is in the block, is not empty then. Nor without a cache, nor on Windows.

    Args:
      programs: text that is the same for the same programs.
      while_waiting: is entered if another process is in the block, and left when that is done or gone.
    """
    marker = None if sys.platform == "win32" else _open_marker(programs)
    if marker is None:
        yield
        return
    with marker:
        if not marker.tell():
            try:
                fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("waiting for another process, which compiles the same")
                async with while_waiting:
                    await trio.to_thread.run_sync(fcntl.flock, marker, fcntl.LOCK_SH, abandon_on_cancel=True)
            except OSError:  # a file system without locks
                pass
        yield
        with suppress(OSError):
            marker.write(b"" if marker.tell() else b"compiled\n")


def _open_marker(programs: str) -> IO[bytes] | None:
    """Open the file for these programs at its end; None if there is no folder for it, and so no cache."""
    folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if not folder or "://" in folder:
        return None
    key = repr((jax.__version__, jax.default_backend(), os.environ.get("XLA_FLAGS"), xla_threads(), programs))
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return (Path(folder) / f"dmoe-{hashlib.sha256(key.encode()).hexdigest()[:32]}").open("ab", buffering=0)
    except OSError:
        return None
