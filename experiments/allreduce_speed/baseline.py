"""The baseline: blocking sockets of the standard library that carry what an all-reduce carries, and add up nothing.

Every member sends every other one as many bytes as its part of the vector has, twice: once for the values, once for the
average. There is a connection for each direction between two members, with a thread at either end, so that nothing ever
waits for anything but the network. It is received into a buffer that was made and touched before the clock started.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from dmoe_net.identity import Address
from experiments.blocking_sockets import Listener, dial, receive_into

_PASSES = 2
"""There, and the average back."""


class BlockingMember:
    """One member on one network, plain or encrypted.

    Args:
      part_bytes: of each member's part.
      certificate: certificate and key of all members, PEM; None: plain TCP.

    Attributes:
      address: where it listens.
    """

    def __init__(self, part_bytes: int, *, certificate: Path | None) -> None:
        self._part_bytes = part_bytes
        self._certificate = certificate
        self._listener = Listener(certificate)
        self.address = self._listener.address
        self._work: list[Callable[[], None]] = []

    def connect(self, others: Sequence[Address]) -> None:
        """Connect with all others, who do the same meanwhile."""

        def accept() -> None:
            for _ in others:
                self._work.append(partial(_receive, self._listener.accept(), self._touched_buffer()))

        accepting = threading.Thread(target=accept)
        accepting.start()
        for address in others:
            self._work.append(partial(_send, dial(address, certificate=self._certificate), self._touched_buffer()))
        accepting.join()

    def exchange(self) -> tuple[float, float]:
        """Send and receive everything; return when that began and ended."""
        threads = [threading.Thread(target=work) for work in self._work]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return started, time.perf_counter()

    def _touched_buffer(self) -> memoryview:
        return memoryview(bytearray(b"\1") * self._part_bytes)


def _send(connection: socket.socket, part: memoryview) -> None:
    for _ in range(_PASSES):
        connection.sendall(part)


def _receive(connection: socket.socket, buffer: memoryview) -> None:
    for _ in range(_PASSES):
        if not receive_into(connection, buffer):
            raise ConnectionError("a member went away")
