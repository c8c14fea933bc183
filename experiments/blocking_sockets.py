"""Blocking sockets of the standard library, plain or encrypted: the baseline of what measures the network layer."""

import socket
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dmoe_net import Address, Identity, Membership
from dmoe_net.keys import certificate_chain

_HOST = "127.0.0.1"


@contextmanager
def temporary_certificate() -> Iterator[Path]:
    """Yield a PEM file with a certificate, its key and what vouches for it; it is gone when the block ends."""
    chain = certificate_chain(Identity.generate(), Membership())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "certificate.pem")
        path.write_bytes(chain.pem + ssl.DER_cert_to_PEM_cert(chain.swarm_certificate).encode())
        yield path


class Listener:
    """Accepts connections on a port of loopback that the system chooses.

    Args:
      certificate: certificate and key, PEM, for TLS 1.3; None for plain TCP.
    """

    def __init__(self, certificate: Path | None) -> None:
        self._socket = socket.create_server((_HOST, 0), backlog=64)
        self.address = Address(_HOST, self._socket.getsockname()[1])
        self._context = None
        if certificate is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.minimum_version = ssl.TLSVersion.TLSv1_3
            self._context.load_cert_chain(certificate)

    def accept(self) -> socket.socket:
        """Wait for the next connection."""
        connection, _ = self._socket.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection if self._context is None else self._context.wrap_socket(connection, server_side=True)


def dial(address: Address, *, certificate: Path | None) -> socket.socket:
    """Connect; encrypted if there is a certificate to trust."""
    connection = socket.create_connection((address.host, address.port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if certificate is None:
        return connection
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # our certificates name no host
    context.load_verify_locations(certificate)
    return context.wrap_socket(connection)


def receive_into(connection: socket.socket, buffer: memoryview) -> bool:
    """Fill the buffer; False if the other end closed instead."""
    filled = 0
    while filled < len(buffer):
        nbytes = connection.recv_into(buffer[filled:])
        if nbytes == 0:
            return False
        filled += nbytes
    return True
