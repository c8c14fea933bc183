"""The baseline: blocking sockets of the standard library that carry what an all-reduce carries, and add up nothing.

Every member sends every other one as many bytes as its part of the vector has, twice: once for the values, once for the
average. There is a connection for each direction between two members, with a thread at either end, so that nothing ever
waits for anything but the network. It is received into a buffer that was made and touched before the clock started.
"""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from net.identity import Address

_HOST = "127.0.0.1"
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
        self._listener = socket.create_server((_HOST, 0), backlog=64)
        self.address = Address(_HOST, self._listener.getsockname()[1])
        self._work: list[Work] = []

    def connect(self, addresses: Sequence[Address]) -> None:
        """Connect with all others, who do the same meanwhile."""
        accepting = threading.Thread(target=self._accept, args=(len(addresses) - 1,))
        accepting.start()
        for index, address in enumerate(addresses):
            if index != self._index:
                self._work.append(self._sending(self._dial(address)))
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
        context = None
        if self._certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_cert_chain(self._certificate)
        for _ in range(count):
            connection, _ = self._listener.accept()
            if context is not None:
                connection = context.wrap_socket(connection, server_side=True)
            self._work.append(self._receiving(connection))

    def _dial(self, address: Address) -> socket.socket:
        connection = socket.create_connection((address.host, address.port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._certificate is None:
            return connection
        context = ssl.create_default_context(cafile=str(self._certificate))
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context.wrap_socket(connection, server_hostname=address.host)

    def _sending(self, connection: socket.socket) -> Work:
        def send() -> None:
            for _ in range(_PASSES):
                connection.sendall(self._part)

        return send

    def _receiving(self, connection: socket.socket) -> Work:
        buffer = memoryview(bytearray(b"\1") * len(self._part))

        def receive() -> None:
            for _ in range(_PASSES):
                filled = 0
                while filled < len(buffer):
                    nbytes = connection.recv_into(buffer[filled:])
                    if nbytes == 0:
                        raise ConnectionError("a member went away")
                    filled += nbytes

        return receive
