"""Standard streams that are missing, full or unread end nothing, and a closed terminal ends a command in order."""

import io
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

from dmoe_jax.runs.endings import ending_signals
from dmoe_jax.runs.speech import say, standard_streams, why_unheard

NO_ROOM = "standard output cannot be written: No space left on device\n"
CLI = [sys.executable, "-m", "dmoe_jax.cli"]


class Disk(io.StringIO):
    """A file on a disk that may be full."""

    is_full = True

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def shell(command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a shell, with `dmoe` in the place of DMOE."""
    line = command.replace("DMOE", " ".join(CLI))
    return subprocess.run(["bash", "-c", line], check=False, capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("redirection", "status", "error"),
    [
        (">&-", 0, ""),
        (">&- 2>&- <&-", 0, ""),
        (">/dev/full", 1, f"error: {NO_ROOM}"),
        ("| true; exit ${PIPESTATUS[0]}", 141, ""),
    ],
)
def test_what_cannot_be_said_shows_in_the_status(redirection: str, status: int, error: str, unbuffered: str) -> None:
    """No traceback, with and without Python's own buffer."""
    done = shell(f"sleep 0; DMOE train --help {redirection}", env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    assert (done.returncode, done.stderr) == (status, error)


@pytest.mark.parametrize("redirection", [">&-", ">&- 2>&-", "> >(true)"])
def test_a_peer_serves_whether_it_is_heard_or_not(redirection: str) -> None:
    """Until it is asked to stop, which ends it in order."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    words = f"exec {' '.join(CLI)} dht --insecure-loopback --listen {address[0]}:{address[1]} {redirection}"
    with subprocess.Popen(["bash", "-c", words], stderr=subprocess.PIPE, text=True) as peer:
        while peer.poll() is None:
            with socket.socket() as caller:
                if caller.connect_ex(address) == 0:
                    break
            time.sleep(0.05)
        peer.send_signal(signal.SIGTERM)
        error = peer.communicate(timeout=30)[1]
    assert (peer.returncode, error) == (130, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "status", "error"),
    [(">/dev/full", 1, f"dmoe: error: nobody can join: {NO_ROOM}"), ("--exit-on-stdin-eof <&-", 130, "")],
)
def test_a_meeting_point_that_nobody_needs_ends(words: str, status: int, error: str) -> None:
    """Its line has no room, so that nobody can learn of it; or whoever it is there for was never there."""
    done = shell(f"timeout 20 DMOE dht --insecure-loopback {words}")
    assert (done.returncode, done.stderr) == (status, error)


def test_a_line_that_finds_no_room_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are written again once there is room again, and nothing is left to complain of."""
    disk = Disk()
    monkeypatch.setattr(sys, "stdout", disk)
    with standard_streams():
        assert not say("lost")
        assert getattr(why_unheard(), "errno", None) == 28
        disk.is_full = False
        assert say("written")
    assert disk.getvalue().endswith("written\n")


def test_a_command_that_was_not_heard_has_not_done_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 0 becomes 1; another status stays."""

    @standard_streams()
    def command(status: int) -> None:
        say("lost")
        sys.exit(status)

    for status, expected in ((0, 1), (3, 3)):
        monkeypatch.setattr(sys, "stdout", Disk())
        with pytest.raises(SystemExit) as exit_:
            command(status)
        assert exit_.value.code == expected


@pytest.mark.parametrize(("handler", "ends"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_closed_terminal_ends_a_command_unless_nohup_has_it_ignored(handler: Any, ends: bool) -> None:
    """`nohup` starts a process with SIGHUP ignored."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert (signal.SIGHUP in ending_signals()) == ends
    finally:
        signal.signal(signal.SIGHUP, before)
