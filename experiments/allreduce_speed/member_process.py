"""The measuring process's end of the members' processes."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

_END_GRACE_S = 5.0
"""A member ends with its standard input, at once; then it is killed."""


class MemberFailed(Exception):
    """A member's process ended too early; it has said why on standard error."""


class MemberProcesses:
    """The members of one side on one network.

    Args:
      processes: freshly started, in member order.
    """

    def __init__(self, processes: Sequence["subprocess.Popen[str]"]) -> None:
        self._processes = processes
        self._members = [_read(process)["where"] for process in processes]

    def exchange(self, group: str) -> list[dict[str, Any]]:
        """Let all of them exchange their vectors; what each says of it.

        Args:
          group: its id in hexadecimal, fresh.

        Raises:
          MemberFailed: one of them has ended.
        """
        order = json.dumps({"group": group, "members": self._members}) + "\n"
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(order)
                process.stdin.flush()
            except BrokenPipeError as exc:
                raise MemberFailed("a member's process ended too early") from exc
        return [_read(process) for process in self._processes]


@contextmanager
def open_members(side: str, network: str, *, peers: int, options: Sequence[str]) -> Iterator[MemberProcesses]:
    """All members of a side on a network; they are gone when the block ends, and also if this process is killed.

    Raises:
      MemberFailed: one of them did not start.
    """
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                _open_process(
                    ["--side", side, "--network", network, "--index", str(index), "--peers", str(peers), *options]
                )
            )
            for index in range(peers)
        ]
        yield MemberProcesses(processes)


@contextmanager
def _open_process(arguments: Sequence[str]) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.allreduce_speed.member", *arguments],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches the measuring process alone, which ends the others
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_END_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _read(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise MemberFailed("a member's process ended too early")
    answer: dict[str, Any] = json.loads(line)
    return answer
