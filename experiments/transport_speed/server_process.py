"""The measuring process's end of a server process."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from net.identity import Address

_END_GRACE_S = 5.0
"""A server ends with its standard input, at once; then it is killed."""


class ServerFailed(Exception):
    """A server process ended too early; it has said why on standard error."""


class ServerProcess:
    """A running server.

    Attributes:
      plain, encrypted: where it listens.
      peak_bytes_at_start: the most memory that it had held when it began to listen; None where nobody knows.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        addresses = self._read()
        self.plain = Address.parse(addresses["plain"])
        self.encrypted = Address.parse(addresses["encrypted"])
        self.peak_bytes_at_start = self._usage()["peak_bytes"]

    def cpu_s(self) -> float:
        """Its processor time so far."""
        return float(self._usage()["cpu_s"])

    def peak_growth_mib(self) -> float | None:
        """The most memory that it ever held beyond what it began with, MiB."""
        peak_bytes = self._usage()["peak_bytes"]
        return None if peak_bytes is None else (peak_bytes - self.peak_bytes_at_start) / 2**20

    def _usage(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError as exc:
            raise ServerFailed("a server process ended too early") from exc
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ServerFailed("a server process ended too early")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def open_server(
    side: str, *, certificate: Path, small_bytes: int, tensor_bytes: int, seed: int
) -> Iterator[ServerProcess]:
    """A server that is gone when the block ends, and also if this process is killed.

    Raises:
      ServerFailed: it did not start.
    """
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "experiments.transport_speed.server", "--side", side),
            *("--certificate", str(certificate), "--small-bytes", str(small_bytes)),
            *("--tensor-bytes", str(tensor_bytes), "--seed", str(seed)),
        ],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches this process alone, which ends the other
    )
    try:
        yield ServerProcess(process)
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
