"""Freed memory is kept for the next buffer, unless the user has other plans."""

import os
import platform
import subprocess
import sys

import pytest

PAGES = """
import resource, threading
import numpy as np
from dmoe_jax.machine.freed_memory import keep_freed_memory

def touch():  # two large buffers, freed together: their place is at the end of the heap
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        buffers = [np.ones(2**25, np.uint8) for _ in range(2)]
        pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        del buffers

pages = []
done = keep_freed_memory()
thread = threading.Thread(target=touch)
thread.start()
thread.join()
print(int(done), pages[-1])
"""


def faults(**environment: str) -> tuple[bool, int]:
    """Result of `keep_freed_memory`, and the pages that the system brought for the last of several equal buffers."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PAGES]
    done, pages = subprocess.run(
        command, env=inherited | environment, capture_output=True, check=True, text=True
    ).stdout.split()
    return bool(int(done)), int(pages)


ON_GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc's malloc")

HOLES = """
import numpy as np
from dmoe_jax.machine.freed_memory import give_back, keep_freed_memory

def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

keep_freed_memory()
blocks = [np.ones(2**20, np.uint8) for _ in range(256)]
kept = blocks[::2]  # every other MiB is a hole
del blocks
full = resident_mb()
assert not give_back(beyond_bytes=2**30)
same = resident_mb()
assert give_back()
print(full - same, full - resident_mb())
"""


@ON_GLIBC
def test_holes_are_given_back() -> None:
    """128 of 256 MiB are holes: kept if that is not more than asked, else gone but for the pages at their ends."""
    out = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, check=True, text=True).stdout
    before, after = map(float, out.split())
    assert abs(before) < 8
    assert 120 < after < 136


@ON_GLIBC
def test_freed_memory_is_kept() -> None:
    """64 MiB in another thread than the main one: no page of it is brought a second time."""
    done, pages = faults()
    assert done
    assert pages < 100


def test_the_users_own_settings_stay() -> None:
    """Whoever directs malloc by the environment is left alone."""
    assert faults(MALLOC_ARENA_MAX="4")[0] is False
    assert faults(GLIBC_TUNABLES="glibc.malloc.check=0")[0] is False
