"""Memory that was freed: kept for the next buffer, or given back to the system.

XLA on a CPU allocates the temporary buffers of every call. Those of a training step have hundreds of megabytes, which
glibc maps and unmaps: the system clears each of their pages in every step, a third of the time of a small model. So a
process may keep them (`keep_freed_memory`). Then it holds the most memory that it ever had at once, with all the holes
that compiling left; so one that has nothing to do gives back what it does not use (`give_back`).
"""

import ctypes
import functools
import os
import platform
from typing import Any

_MALLOPT = {
    -8: 1,  # M_ARENA_MAX: one heap for all threads; those of other arenas cannot hold a large buffer
    -4: 0,  # M_MMAP_MAX: large buffers come from the heap, too
    -1: -1,  # M_TRIM_THRESHOLD: what is freed at its end stays, however much
    -2: 64 << 20,  # M_TOP_PAD: it grows by this many bytes at least
}
"""Options of glibc's `mallopt`, see malloc.h."""


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`, from 2.33 on."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def keep_freed_memory() -> bool:
    """Have glibc keep memory that is freed for the next buffer. Only threads that start later share the one heap: call
    it early. Return True if it was done; not on other C libraries, nor where the environment already directs malloc
    (`MALLOC_ARENA_MAX` and the like, or `GLIBC_TUNABLES`)."""
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
        return False
    libc = _glibc()
    return libc is not None and all(libc.mallopt(option, value) == 1 for option, value in _MALLOPT.items())


def give_back(beyond_bytes: int = 0) -> bool:
    """Give freed memory back to the system, if more than so many bytes of the heap are free. Return True if it was
    done; not on C libraries other than glibc 2.33 and later.

    Nobody can allocate meanwhile, about 0.1 s for each GB, and the system must clear what is wanted again: so not after
    every call.
    """
    libc = _glibc()
    if libc is None or not hasattr(libc, "mallinfo2"):
        return False
    libc.mallinfo2.restype = _Mallinfo2
    if libc.mallinfo2().fordblks <= beyond_bytes:
        return False
    libc.malloc_trim(0)
    return True


@functools.cache
def _glibc() -> Any:
    """The C library of this process; None if it is another one."""
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
