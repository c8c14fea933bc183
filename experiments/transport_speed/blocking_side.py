"""The baseline: blocking sockets of the standard library, as one writes them for a single caller.

One connection does one thing, named by its first byte: echo small messages, take tensors, or give them. Sizes are
fixed, so there are no headers. A tensor is received into one buffer, made before the first, and acknowledged by
its length in eight bytes; asking for one takes eight bytes too.
"""

import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from experiments.transport_speed.ratios import Slice
from experiments.transport_speed.stopwatch import Pace, Stopwatch
from net.identity import Address

ECHO, TAKE, GIVE = b"E", b"T", b"G"
_HOST = "127.0.0.1"
_NUMBER_BYTES = 8


def write_certificate(path: Path) -> None:
    """A self-signed certificate for loopback and its key, in one PEM file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "transport_speed")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(_HOST))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))


def serve(*, certificate: Path, small_bytes: int, tensor: bytes) -> tuple[Address, Address]:
    """Listen twice, plain and encrypted, in threads that end with the process; the two addresses."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certificate)

    def encrypted(sock: socket.socket) -> socket.socket:
        return context.wrap_socket(sock, server_side=True)

    def plain(sock: socket.socket) -> socket.socket:
        return sock

    addresses = []
    for wrap in (plain, encrypted):
        listener = socket.create_server((_HOST, 0))
        addresses.append(Address(_HOST, listener.getsockname()[1]))
        threading.Thread(target=_accept, args=(listener, wrap, small_bytes, tensor), daemon=True).start()
    return addresses[0], addresses[1]


def _accept(
    listener: socket.socket, wrap: Callable[[socket.socket], socket.socket], small_bytes: int, tensor: bytes
) -> None:
    while True:
        sock, _ = listener.accept()
        with wrap(sock) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _serve_one(connection, small_bytes, tensor)


def _serve_one(connection: socket.socket, small_bytes: int, tensor: bytes) -> None:
    """Until the client closes."""
    kind = connection.recv(1)
    if kind == ECHO:
        message = memoryview(bytearray(small_bytes))
        while _receive(connection, message):
            connection.sendall(message)
    elif kind == TAKE:
        buffer = memoryview(bytearray(len(tensor)))
        while _receive(connection, buffer):
            connection.sendall(len(buffer).to_bytes(_NUMBER_BYTES))
    elif kind == GIVE:
        request = memoryview(bytearray(_NUMBER_BYTES))
        while _receive(connection, request):
            connection.sendall(tensor)


def _receive(connection: socket.socket, buffer: memoryview) -> bool:
    """Fill the buffer; False if the other end closed instead."""
    filled = 0
    while filled < len(buffer):
        nbytes = connection.recv_into(buffer[filled:])
        if nbytes == 0:
            return False
        filled += nbytes
    return True


def measure_calls(address: Address, *, message: bytes, pace: Pace, stopwatch: Stopwatch) -> Slice:
    """One caller, one echo after the other, over plain TCP."""
    answer = memoryview(bytearray(len(message)))
    with _connected(address, ECHO, certificate=None) as connection:

        def call() -> None:
            connection.sendall(message)
            if not _receive(connection, answer) or answer != message:
                raise ConnectionError("the echo is not what was sent")

        return _measure(call, nbytes=0, pace=pace, stopwatch=stopwatch)


def measure_transfer(
    address: Address,
    kind: bytes,
    *,
    tensor: bytes,
    certificate: Path | None,
    pace: Pace,
    stopwatch: Stopwatch,
) -> Slice:
    """Tensors one after the other, each acknowledged; encrypted if there is a certificate to trust."""
    acknowledgement = memoryview(bytearray(_NUMBER_BYTES))
    number = len(tensor).to_bytes(_NUMBER_BYTES)
    buffer = memoryview(bytearray(len(tensor)))
    with _connected(address, kind, certificate=certificate) as connection:

        def send() -> None:
            connection.sendall(tensor)
            if not _receive(connection, acknowledgement) or acknowledgement != number:
                raise ConnectionError("the tensor was not acknowledged")

        def receive() -> None:
            connection.sendall(number)
            if not _receive(connection, buffer):
                raise ConnectionError("the tensor did not come")

        transfer = send if kind == TAKE else receive
        return _measure(transfer, nbytes=len(tensor), pace=pace, stopwatch=stopwatch)


def _measure(call: Callable[[], None], *, nbytes: int, pace: Pace, stopwatch: Stopwatch) -> Slice:
    for _ in range(pace.warm_up_calls):
        call()
    latencies: list[float] = []
    stopwatch.start()
    while pace.goes_on(stopwatch.elapsed_s(), len(latencies)):
        started = stopwatch.elapsed_s()
        call()
        latencies.append(stopwatch.elapsed_s() - started)
    return stopwatch.stop(latencies, nbytes=nbytes * len(latencies), calls=len(latencies))


@contextmanager
def _connected(address: Address, kind: bytes, *, certificate: Path | None) -> Iterator[socket.socket]:
    connection = socket.create_connection((address.host, address.port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if certificate is not None:
        context = ssl.create_default_context(cafile=str(certificate))
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        connection = context.wrap_socket(connection, server_hostname=address.host)
    with connection:
        connection.sendall(kind)
        yield connection
