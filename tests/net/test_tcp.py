"""Plain TCP links over the loopback interface."""

import errno
import os
import socket
import sys
from contextlib import ExitStack
from typing import Any

import pytest
import trio
import trio.testing

from dmoe_net.errors import DialFailed, ListenFailed, RemoteProtocolError
from dmoe_net.identity import Address
from dmoe_net.keys import Identity
from dmoe_net.transport.sockets import BATCH_BYTES, SocketListener, batches
from dmoe_net.transport.tcp import TcpLink, TcpTransport
from dmoe_net.wire.frames import Frame, Part
from tests.net.link_frames import numbered, parts_of

ANY_PORT = Address("127.0.0.1", 0)


async def test_nobody_is_proven() -> None:
    """Plain TCP takes whoever answers, says so, and has no handshake to fail."""
    transport = TcpTransport()
    listener = await transport.listen(ANY_PORT)
    dialled = await transport.dial(listener.address, peer_id=Identity.from_seed(bytes(32)).peer_id)
    accepted = await listener.accept()
    await accepted.handshake()
    await dialled.handshake()
    assert (transport.peer_id, dialled.remote_peer_id, accepted.remote_peer_id) == (None, None, None)
    for resource in (dialled, accepted, listener):
        await resource.aclose()


@pytest.mark.parametrize(
    "sizes", [(1,), (0, 0), (5, 0, 7), (16_384,), (20, 300_000), (300_000, 20, 20_000), (3,) * 500]
)
def test_batches_keep_the_bytes(sizes: tuple[int, ...]) -> None:
    """Whatever the pieces, batches hold their bytes in order, none empty, none larger than twice the usual."""
    pieces = tuple(bytes([index % 251]) * size for index, size in enumerate(sizes))
    part = Part(pieces=pieces, nbytes=sum(sizes), frame=Frame(header={}))
    found = list(batches([part, part]))
    assert b"".join(piece for batch in found for piece in batch) == b"".join(pieces * 2)
    for batch in found:
        assert 0 < sum(map(len, batch)) < 2 * BATCH_BYTES
        assert all(map(len, batch))


def test_small_pieces_make_one_write_and_large_ones_are_not_copied() -> None:
    """A hundred small calls leave in one system call; a tensor leaves from where it lies."""
    (batch,) = batches(parts_of(*(numbered(index, 100) for index in range(100))))
    assert len(batch) == 1
    large = memoryview(bytearray(BATCH_BYTES))
    (batch,) = batches([Part(pieces=(b"head", large), nbytes=4 + len(large), frame=None)])
    assert batch[1] is large


async def test_garbage_is_a_remote_protocol_error() -> None:
    listener = await TcpTransport().listen(ANY_PORT)
    stream = await trio.open_tcp_stream("127.0.0.1", listener.address.port)
    link = await listener.accept()
    await listener.aclose()
    await stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(RemoteProtocolError, match="not a part of a frame"):
        await link.receive()
    await stream.aclose()
    link.abort()


async def test_the_transports_bound_on_bodies_is_kept() -> None:
    transport = TcpTransport(max_body_bytes=1000)
    listener = await transport.listen(ANY_PORT)
    dialled = await transport.dial(listener.address)
    accepted = await listener.accept()
    await listener.aclose()
    await dialled.send(*parts_of(numbered(1, 1000), numbered(2, 1001)))
    assert await accepted.receive() is not None
    with pytest.raises(RemoteProtocolError, match="1001"):
        await accepted.receive()
    dialled.abort()
    accepted.abort()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
async def test_loopback_addresses_can_be_listened_on(host: str) -> None:
    if host == "::1" and not _has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    listener = await TcpTransport().listen(Address(host, 0))
    assert listener.address.port > 0
    assert listener.address.host == ("127.0.0.1" if host == "localhost" else host)
    link = await TcpTransport().dial(listener.address)
    assert link.remote_address == listener.address
    accepted = await listener.accept()
    assert accepted.remote_address.host == ("::1" if host == "::1" else "127.0.0.1")
    for resource in (link, accepted, listener):
        await resource.aclose()


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "::ffff:10.0.0.1", "example.com", "localhost.evil"])
async def test_other_addresses_cannot(host: str) -> None:
    """Plain TCP stays on this machine, and says why."""
    with pytest.raises(ListenFailed, match="loopback only"):
        await TcpTransport().listen(Address(host, 0))


class _Resolver(trio.abc.HostnameResolver):
    """Every name has these addresses of IPv4."""

    def __init__(self, *addresses: tuple[str, int]) -> None:
        self._addresses = addresses

    async def getaddrinfo(self, *_: Any, **__: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in self._addresses]

    async def getnameinfo(self, *_: Any) -> Any:
        raise NotImplementedError


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a full backlog does not keep silent")
async def test_an_address_that_keeps_silent_does_not_hold_up_the_next() -> None:
    """A name's first address swallows what it is sent; the second one is dialled beside it."""
    listener = await TcpTransport().listen(ANY_PORT)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent, ExitStack() as fill:
        for _ in range(4):  # more than it queues; nobody accepts them
            client = fill.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(silent.getsockname())
        trio.socket.set_custom_hostname_resolver(_Resolver(silent.getsockname(), ("127.0.0.1", listener.address.port)))
        with trio.fail_after(5):
            link = await TcpTransport().dial(Address("two.example", 1))
        await link.aclose()
    await listener.aclose()


async def test_every_address_says_why_it_cannot_be_had() -> None:
    listener = await TcpTransport().listen(ANY_PORT)
    await listener.aclose()
    refused = ("127.0.0.1", listener.address.port)
    trio.socket.set_custom_hostname_resolver(_Resolver(refused, refused, ("255.255.255.255", 9)))
    with pytest.raises(DialFailed, match=r"two.example:1: Connection refused; [A-Z][a-z ]+$"):
        await TcpTransport().dial(Address("two.example", 1))


class ExhaustedSocket:
    """A listening socket whose `accept` fails with the given errors before it works."""

    def __init__(self, *errors: int) -> None:
        self.errors = list(errors)

    async def accept(self) -> tuple[trio.socket.SocketType, tuple[str, int]]:
        await trio.lowlevel.checkpoint()
        if self.errors:
            code = self.errors.pop(0)
            raise OSError(code, os.strerror(code))
        return trio.socket.socket(), ("127.0.0.1", 9)


async def test_accept_survives_a_shortage(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """No descriptors: log, wait, try again; a peer that gave up in the queue is passed over at once."""
    sock = ExhaustedSocket(errno.EMFILE, errno.ECONNABORTED, errno.ENFILE)
    listener = SocketListener(sock, ANY_PORT, TcpLink)  # type: ignore[arg-type]
    link = await listener.accept()
    assert link.remote_address == Address("127.0.0.1", 9)
    assert len(caplog.records) == 2
    assert trio.current_time() == pytest.approx(0.2)
    link.abort()


async def test_accept_passes_other_errors_on() -> None:
    with pytest.raises(ListenFailed, match="Bad file descriptor"):
        await SocketListener(ExhaustedSocket(errno.EBADF), ANY_PORT, TcpLink).accept()  # type: ignore[arg-type]


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True
