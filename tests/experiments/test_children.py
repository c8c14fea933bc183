"""Experiments that run as processes of another one."""

import signal
import threading
import time
from pathlib import Path

import pytest

from experiments.children import run_child

CHILD = """
import json, signal, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("progress", file=sys.stderr, flush=True)
if "wait" in sys.argv:
    try:
        time.sleep(60)
    finally:
        print("ended in order", file=sys.stderr)
if "fail" in sys.argv:
    sys.exit("the disk is full\\n")
print("a line for readers")
print(json.dumps({"figure": 1}))
"""


@pytest.fixture(autouse=True)
def _child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `child`, as small as can be, which processes find."""
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_headline_is_the_last_line_and_errors_pass_through(capfd: pytest.CaptureFixture[str]) -> None:
    """Standard output is kept, standard error is shown."""
    ended = run_child(["child"])
    assert (ended.status, ended.headline, ended.failure) == (0, {"figure": 1}, "")
    assert capfd.readouterr() == ("", "progress\n")


def test_failure_is_its_last_line() -> None:
    """And there are no figures."""
    ended = run_child(["child", "fail"])
    assert (ended.status, ended.headline, ended.failure) == (1, None, "the disk is full")


@pytest.mark.parametrize("words", [["wait"], ["wait", "stubborn"]])
def test_interrupt_ends_the_child(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is left when the interrupt arrives at the caller; one that does not end is killed."""
    monkeypatch.setattr("experiments.children.END_GRACE_S", 0.2)
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(1.0, signal.pthread_kill, (main, signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_child(["child", *words])
    assert time.monotonic() - began < 30
