"""A folder has one holder at a time; no line is left by halves; and freed memory is kept for the next buffer."""

import errno
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from dmoe_jax.machine.disk import (
    HOLDER,
    FolderInUse,
    check_not_held,
    check_room,
    hold_folder,
    is_empty,
    may_be_held,
)
from dmoe_jax.runs import run_folder

no_locks = pytest.mark.skipif(sys.platform == "win32", reason="nobody is kept out there")

HOLD = """
import sys, time
from pathlib import Path
from dmoe_jax.machine.disk import hold_folder
with hold_folder(Path(sys.argv[1]), "run"):
    print("held", flush=True)
    time.sleep(60)
"""


@no_locks
def test_a_folder_has_one_holder(tmp_path: Path) -> None:
    """The second is told who the first is; afterwards no trace of the lock is left."""
    folder = tmp_path / "new" / "run"
    with hold_folder(folder, "run"):
        assert is_empty(folder)
        told = rf"the run in {folder} is under way: process {os.getpid()} on .* since "
        for look in (lambda: check_not_held(folder, "run"), lambda: hold_folder(folder, "run").__enter__()):
            with pytest.raises(FolderInUse, match=told):
                look()
    check_not_held(folder, "run")
    assert not folder.exists()
    with hold_folder(folder, "run"):
        (folder / "kept").touch()
    assert [path.name for path in folder.iterdir()] == ["kept"]
    check_not_held(tmp_path / "nowhere", "run")


@no_locks
def test_a_holder_that_is_killed_keeps_nobody_out(tmp_path: Path) -> None:
    """The file with its name stays, the lock does not."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            with pytest.raises(FolderInUse, match=f"process {process.pid} on "), hold_folder(tmp_path, "run"):
                pass
        finally:
            process.kill()
    assert (tmp_path / HOLDER).exists()
    check_not_held(tmp_path, "run")
    with hold_folder(tmp_path, "run"):
        assert str(os.getpid()) in (tmp_path / HOLDER).read_text()


@no_locks
def test_a_folder_may_be_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever holds it; and by whoever has left a mark, where nobody can tell. Looking changes nothing."""
    with hold_folder(tmp_path / "run", "run"):
        assert may_be_held(tmp_path / "run")
        (tmp_path / "run" / "kept").touch()
    (tmp_path / "file").touch()
    for name in ("run", "file", "nowhere"):
        assert not may_be_held(tmp_path / name)
    (tmp_path / "run" / HOLDER).write_text("process 1 on a machine that is off")
    assert not may_be_held(tmp_path / "run")

    def no_lock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr("fcntl.flock", no_lock)
    assert may_be_held(tmp_path / "run")
    assert sorted(path.name for path in tmp_path.rglob("*")) == [HOLDER, "file", "kept", "run"]


def test_room_is_tried_and_given_back(tmp_path: Path) -> None:
    """A file larger than any disk does not fit, and nothing is left of either trial."""
    check_room(tmp_path, 1 << 16)
    if hasattr(os, "posix_fallocate"):
        with pytest.raises(OSError, match=r"space|large|argument"):
            check_room(tmp_path, 1 << 62)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device")
def test_a_record_without_room_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError) as caught:  # noqa: PT011 (the number says it)
        run_folder.append_metric(tmp_path / "metrics.jsonl", kind="train")
    assert caught.value.errno == errno.ENOSPC


def test_half_a_record_is_taken_back(tmp_path: Path) -> None:
    """Else the next one would be in the same line."""
    resource = pytest.importorskip("resource")
    path = tmp_path / "metrics.jsonl"
    run_folder.append_metric(path, kind="a")
    size = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, before[1]))
    try:
        with pytest.raises(OSError, match="only 5 of"):
            run_folder.append_metric(path, kind="b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run_folder.append_metric(path, kind="c")
    assert [record["kind"] for record in run_folder.read_metrics(path)] == ["a", "c"]


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
"""Prints the result of `keep_freed_memory`, and the pages that the system brought for the last of equal buffers."""


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


def printed(program: str, **environment: str) -> list[float]:
    """Numbers that a process prints to which nobody has given settings of malloc but these."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command, environment = [sys.executable, "-c", program], inherited | environment
    done = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    return [float(number) for number in done.stdout.split()]


@ON_GLIBC
def test_holes_are_given_back() -> None:
    """128 of 256 MiB are holes: kept if that is not more than asked, else gone but for the pages at their ends."""
    before, after = printed(HOLES)
    assert abs(before) < 8
    assert 120 < after < 136


@ON_GLIBC
def test_freed_memory_is_kept() -> None:
    """64 MiB in another thread than the main one: no page of it is brought a second time."""
    done, pages = printed(PAGES)
    assert done
    assert pages < 100


def test_the_users_own_settings_stay() -> None:
    """Whoever directs malloc by the environment is left alone."""
    assert printed(PAGES, MALLOC_ARENA_MAX="4")[0] == 0
    assert printed(PAGES, GLIBC_TUNABLES="glibc.malloc.check=0")[0] == 0
