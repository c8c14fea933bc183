"""The baseline: blocking sockets of the standard library, as one writes them for a single caller.

One connection does one thing, named by its first byte: echo small messages, take tensors, or give them. Sizes are
fixed, so there are no headers. A tensor is received into one buffer, made before the first, and acknowledged by
its length in eight bytes; asking for one takes eight bytes too.
"""

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from experiments.blocking_sockets import Listener, dial, receive_into
from experiments.transport_speed.slice_timer import SliceTimer
from net.identity import Address

ECHO, TAKE, GIVE = b"E", b"T", b"G"
_NUMBER_BYTES = 8


def serve(*, certificate: Path, small_bytes: int, tensor: bytes) -> dict[str, Address]:
    """Listen plain and encrypted, in threads that end with the process; the addresses by network."""
    addresses = {}
    for network, trusted in (("plain", None), ("tls", certificate)):
        listener = Listener(trusted)
        addresses[network] = listener.address
        threading.Thread(target=_accept, args=(listener, small_bytes, tensor), daemon=True).start()
    return addresses


def _accept(listener: Listener, small_bytes: int, tensor: bytes) -> None:
    while True:
        with listener.accept() as connection:
            _serve_one(connection, small_bytes, tensor)


def _serve_one(connection: socket.socket, small_bytes: int, tensor: bytes) -> None:
    """Serve until the client closes."""
    kind = connection.recv(1)
    if kind == ECHO:
        message = memoryview(bytearray(small_bytes))
        while receive_into(connection, message):
            connection.sendall(message)
    elif kind == TAKE:
        buffer = memoryview(bytearray(len(tensor)))
        while receive_into(connection, buffer):
            connection.sendall(len(buffer).to_bytes(_NUMBER_BYTES))
    elif kind == GIVE:
        request = memoryview(bytearray(_NUMBER_BYTES))
        while receive_into(connection, request):
            connection.sendall(tensor)


def measure_calls(address: Address, *, message: bytes, timer: SliceTimer) -> dict[str, float]:
    """Let one caller make one echo after the other, over plain TCP."""
    answer = memoryview(bytearray(len(message)))
    with dial(address, certificate=None) as connection:
        connection.sendall(ECHO)

        def call() -> None:
            connection.sendall(message)
            if not receive_into(connection, answer) or answer != message:
                raise ConnectionError("the echo is not what was sent")

        _repeat(call, timer)
        return timer.record()


def measure_transfer(
    address: Address, kind: bytes, *, certificate: Path | None, tensor: bytes, timer: SliceTimer
) -> dict[str, float]:
    """Send (`TAKE`) or receive (`GIVE`) tensors one after the other, each acknowledged; encrypted if there is a
    certificate to trust."""
    acknowledgement = memoryview(bytearray(_NUMBER_BYTES))
    number = len(tensor).to_bytes(_NUMBER_BYTES)
    buffer = memoryview(bytearray(len(tensor)))
    with dial(address, certificate=certificate) as connection:
        connection.sendall(kind)

        def send() -> None:
            connection.sendall(tensor)
            if not receive_into(connection, acknowledgement) or acknowledgement != number:
                raise ConnectionError("the tensor was not acknowledged")

        def receive() -> None:
            connection.sendall(number)
            if not receive_into(connection, buffer):
                raise ConnectionError("the tensor did not come")

        _repeat(send if kind == TAKE else receive, timer)
        return timer.record(nbytes=len(tensor))


def _repeat(call: Callable[[], None], timer: SliceTimer) -> None:
    for _ in range(timer.warm_up_calls):
        call()
    timer.start()
    while timer.goes_on():
        started = time.perf_counter()
        call()
        timer.latencies_s.append(time.perf_counter() - started)
