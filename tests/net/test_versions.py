"""Peers of different versions part with a sentence at both ends, whoever dialled."""

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from dmoe_net.errors import ConnectionLost, DialFailed
from dmoe_net.identity import Address, PeerId
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.wire.codec import encode
from dmoe_net.wire.frame_reader import WINDOW_BYTES
from dmoe_net.wire.messages import Hello, encode_message
from dmoe_net.wire.versions import CALLS
from tests.net.rpc_peers import ANY_PORT, LONG_S
from tests.net.wire_parts import WHOLE, preamble, wire

OURS, THEIRS = PeerId(b"o" * 32), PeerId(b"t" * 32)
FIELDS = {"peer_id": THEIRS.raw, "instance": bytes(8), "host": None, "port": None, "window": 2**26, "compressions": []}


def hello_of(version: int, **further: object) -> bytes:
    """The hello of a peer of another version: what all of them share, and what only later ones have."""
    name = "hello" if version == 2 else f"hello of wire version {version}"
    header = encode({"type": name, **FIELDS, **further})
    return preamble(WHOLE, len(header), 0, version=2) + header


OTHERS = {
    "an older one": (hello_of(2), "speaks version 2 of the wire format, this peer version 3"),
    "a newer one": (
        hello_of(71, software="dmoe_jax 9.1", calls="seven", mood="good"),
        r"speaks version 71 of the wire format \(dmoe_jax 9.1\), this peer version 3",
    ),
    "other calls": (
        wire(
            encode_message(
                Hello(
                    peer_id=THEIRS,
                    instance=bytes(8),
                    port=None,
                    window_bytes=WINDOW_BYTES,
                    calls=CALLS + 1,
                    software="dmoe_jax 9.1",
                )
            )
        ),
        rf"speaks version {CALLS + 1} of calls and records \(dmoe_jax 9.1\), this peer version {CALLS} \(dmoe_jax",
    ),
}


async def what_came(stream: trio.SocketStream) -> bytes:
    """All bytes until the other end closes."""
    data = b""
    async for piece in stream:
        data += piece
    return data


def assert_is_our_hello_alone(data: bytes) -> None:
    """One part, whose form all versions know, and which says our version and our program."""
    assert data[:4] == b"DX\x02\x00"
    assert int.from_bytes(data[4:8], "big") == len(data) - 16
    assert b"hello of wire version 3" in data
    assert b"dmoe_jax" in data


@asynccontextmanager
async def other_peer(hello: bytes, came: trio.MemorySendChannel[bytes]) -> AsyncIterator[Address]:
    """A listener that says this to whoever comes, and passes on what it is told."""

    async def serve(stream: trio.SocketStream) -> None:
        await stream.send_all(hello)
        await came.send(await what_came(stream))

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        yield Address("127.0.0.1", listeners[0].socket.getsockname()[1])
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("name", OTHERS)
async def test_who_dials_another_version_is_told_both(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The call fails with the sentence, and the other end gets our hello, which says as much to it."""
    hello, sentence = OTHERS[name]
    sending, came = trio.open_memory_channel[bytes](10)
    async with other_peer(hello, sending) as address, open_rpc_peer(TcpTransport(), peer_id=OURS) as peer:
        with caplog.at_level(logging.WARNING), pytest.raises(DialFailed, match=f"^{address} {sentence}"):
            await peer.call(address, "m", {}, timeout_s=LONG_S)
        assert_is_our_hello_alone(await came.receive())
    assert "dropping a connection" in caplog.text


@pytest.mark.parametrize("name", OTHERS)
async def test_who_is_dialled_by_another_version_says_both(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """It logs the sentence, and the other end gets our hello and then the end of the connection."""
    hello, sentence = OTHERS[name]
    async with open_rpc_peer(TcpTransport(), peer_id=OURS, listen=ANY_PORT) as peer:
        assert peer.address is not None
        with caplog.at_level(logging.WARNING):
            async with await trio.open_tcp_stream(peer.address.host, peer.address.port) as stream:
                await stream.send_all(hello)
                assert_is_our_hello_alone(await what_came(stream))
    assert re.search(rf"dropping a connection: 127\.0\.0\.1:\d+ {sentence}", caplog.text), caplog.text


async def test_a_peer_says_nothing_before_the_one_that_it_dialled() -> None:
    """An older peer that it dials says its own hello so, before it drops us for ours."""
    listener = await TcpTransport().listen(ANY_PORT)
    async with open_rpc_peer(TcpTransport(), peer_id=OURS) as peer, trio.open_nursery() as nursery:

        async def call() -> None:
            with pytest.raises((DialFailed, ConnectionLost)):
                await peer.call(listener.address, "m", {}, timeout_s=LONG_S)

        nursery.start_soon(call)
        link = await listener.accept()
        with trio.move_on_after(0.05) as scope:
            await link.receive()
        assert scope.cancelled_caught
        link.abort()
    await listener.aclose()
