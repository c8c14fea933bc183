"""A folder has one holder at a time, who is named and is forgotten with its process; no line is left by halves."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dmoe_jax.machine.disk import HOLDER, FolderInUse, check_not_held, check_room, hold_folder, is_empty
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
        for look in (lambda: check_not_held(folder, "run"), lambda: hold_folder(folder, "run").__enter__()):
            with pytest.raises(
                FolderInUse, match=rf"the run in {folder} is under way: process {os.getpid()} on .* since "
            ):
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
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(FolderInUse, match=f"process {process.pid} on "), hold_folder(tmp_path, "run"):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert (tmp_path / HOLDER).exists()
    check_not_held(tmp_path, "run")
    with hold_folder(tmp_path, "run"):
        assert str(os.getpid()) in (tmp_path / HOLDER).read_text()


def test_room_is_tried_and_given_back(tmp_path: Path) -> None:
    """A file larger than any disk does not fit, and nothing is left of either trial."""
    check_room(tmp_path, 1 << 16)
    if hasattr(os, "posix_fallocate"):
        with pytest.raises(OSError, match=r"space|large|argument"):
            check_room(tmp_path, 1 << 62)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device")
def test_a_record_without_room_is_an_error(tmp_path: Path) -> None:
    """The system's error, with its number."""
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
