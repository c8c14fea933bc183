"""Blocking sockets of the standard library, plain or encrypted: the baseline of what measures the network layer."""

import datetime
import ipaddress
import socket
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dmoe_net.identity import Address

HOST = "127.0.0.1"


@contextmanager
def temporary_certificate() -> Iterator[Path]:
    """Yield a PEM file with a self-signed certificate for loopback and its key; it is gone when the block ends."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "baseline")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "certificate.pem")
        path.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
        yield path


class Listener:
    """Accepts connections on a port of loopback that the system chooses.

    Args:
      certificate: certificate and key, PEM, for TLS 1.3; None for plain TCP.
    """

    def __init__(self, certificate: Path | None) -> None:
        self._socket = socket.create_server((HOST, 0), backlog=64)
        self.address = Address(HOST, self._socket.getsockname()[1])
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
    context = ssl.create_default_context(cafile=str(certificate))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context.wrap_socket(connection, server_hostname=address.host)


def receive_into(connection: socket.socket, buffer: memoryview) -> bool:
    """Fill the buffer; False if the other end closed instead."""
    filled = 0
    while filled < len(buffer):
        nbytes = connection.recv_into(buffer[filled:])
        if nbytes == 0:
            return False
        filled += nbytes
    return True
