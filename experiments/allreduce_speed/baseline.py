"""The baseline: blocking sockets of the standard library that carry what an all-reduce carries, and add up nothing.

Every member sends every other one as many bytes as its part of the vector has, twice: once for the values, once for the
average. There is a connection for each direction between two members, with a thread at either end, so that nothing ever
waits for anything but the network. It is received into a buffer that was made and touched before the clock started.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.blocking_sockets import Listener, dial, receive_into
from net.identity import Address

_PASSES = 2
"""There, and the average back."""

Work = Callable[[], None]


class BlockingMember:
    """One member on one network, plain or encrypted.

    Args:
      index: its place among the members.
      part_bytes: of each member's part.
      certificate: certificate and key of all members, PEM; None: plain TCP.
    """

    def __init__(self, index: int, *, part_bytes: int, certificate: Path | None) -> None:
        self._index = index
        self._part = memoryview(bytearray(b"\1") * part_bytes)
        self._certificate = certificate
        self._listener = Listener(certificate)
        self._work: list[Work] = []

    @property
    def address(self) -> Address:
        """Where it listens."""
        return self._listener.address

    def connect(self, addresses: Sequence[Address]) -> None:
        """Connect with all others, who do the same meanwhile."""
        accepting = threading.Thread(target=self._accept, args=(len(addresses) - 1,))
        accepting.start()
        for index, address in enumerate(addresses):
            if index != self._index:
                self._work.append(self._sending(dial(address, certificate=self._certificate)))
        accepting.join()

    def exchange(self) -> tuple[float, float]:
        """Send and receive everything; when that began and ended."""
        threads = [threading.Thread(target=work) for work in self._work]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return started, time.perf_counter()

    def _accept(self, count: int) -> None:
        for _ in range(count):
            self._work.append(self._receiving(self._listener.accept()))

    def _sending(self, connection: socket.socket) -> Work:
        def send() -> None:
            for _ in range(_PASSES):
                connection.sendall(self._part)

        return send

    def _receiving(self, connection: socket.socket) -> Work:
        buffer = memoryview(bytearray(b"\1") * len(self._part))

        def receive() -> None:
            for _ in range(_PASSES):
                if not receive_into(connection, buffer):
                    raise ConnectionError("a member went away")

        return receive
