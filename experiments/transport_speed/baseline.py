"""The baseline: blocking sockets of the standard library, as one writes them for a single caller.

One connection does one thing, named by its first byte: echo small messages, take tensors, or give them. Sizes are
fixed, so there are no headers. A tensor is received into one buffer, made before the first, and acknowledged by
its length in eight bytes; asking for one takes eight bytes too.
"""

import socket
import threading
import time
from pathlib import Path

from dmoe_net.identity import Address
from experiments.blocking_sockets import Listener, dial, receive_into
from experiments.transport_speed.slices import ECHO, GIVE, TAKE, SliceTimer

_NUMBER_BYTES = 8


def serve(certificate: Path | None, *, small_bytes: int, tensor: bytes) -> Address:
    """Listen, encrypted if there is a certificate, in a thread that ends with the process; return where."""
    listener = Listener(certificate)

    def accept() -> None:
        while True:
            with listener.accept() as connection:
                _serve_one(connection, small_bytes, tensor)

    threading.Thread(target=accept, daemon=True).start()
    return listener.address


def _serve_one(connection: socket.socket, small_bytes: int, tensor: bytes) -> None:
    """Serve until the client closes."""
    request_bytes, answer = {
        _first_byte(ECHO): (small_bytes, None),
        _first_byte(TAKE): (len(tensor), len(tensor).to_bytes(_NUMBER_BYTES)),
        _first_byte(GIVE): (_NUMBER_BYTES, tensor),
    }[connection.recv(1)]
    request = memoryview(bytearray(request_bytes))
    while receive_into(connection, request):
        connection.sendall(request if answer is None else answer)


def measure(
    address: Address, kind: str, *, certificate: Path | None, payload: bytes, timer: SliceTimer
) -> dict[str, float]:
    """Let one caller make one call after the other, encrypted if there is a certificate to trust."""
    number = len(payload).to_bytes(_NUMBER_BYTES)
    request = number if kind == GIVE else payload
    expected = number if kind == TAKE else payload
    answer = memoryview(bytearray(len(expected)))
    with dial(address, certificate=certificate) as connection:
        connection.sendall(_first_byte(kind))

        def call() -> None:
            connection.sendall(request)
            # A tensor is not looked at: that would take as long as its way here.
            if not receive_into(connection, answer) or (kind != GIVE and answer != expected):
                raise ConnectionError(f"the answer to {kind} is not what was expected")

        for _ in range(timer.warm_up_calls):
            call()
        timer.start()
        while timer.goes_on():
            started = time.perf_counter()
            call()
            timer.latencies_s.append(time.perf_counter() - started)
        return timer.record()


def _first_byte(kind: str) -> bytes:
    return kind[:1].encode()
