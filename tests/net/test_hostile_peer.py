"""A real listener, one peer that breaks the format in every way, and another one whose calls are served meanwhile."""

import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio

from dmoe_net.errors import PeerUnavailable, RemoteProtocolError
from dmoe_net.identity import Address, PeerId
from dmoe_net.rpc.base import Reply, Request
from dmoe_net.rpc.peer import RpcPeer, open_rpc_peer
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.wire.codec import encode
from dmoe_net.wire.frames import MAX_BODY_BYTES
from dmoe_net.wire.messages import CallCancel, CallReply, CallStart, Credit, Goodbye, Hello, encode_message
from tests.net.rpc_peers import ANY_PORT, LONG_S, echo, peers
from tests.net.wire_parts import CHUNK, MIB, OPEN, RESET, WHOLE, chunk, opening, preamble, wire

HELLO = wire(encode_message(Hello(peer_id=PeerId(b"h" * 32), instance=bytes(8), port=None, window_bytes=MIB)))
CALL = wire(encode_message(CallStart(call_id=1, method="echo", timeout_s=LONG_S, body={})))
STUCK = wire(encode_message(CallStart(call_id=1, method="stuck", timeout_s=LONG_S, body={})))
LARGE = 70 * MIB


def frame(header: bytes, body: bytes = b"") -> bytes:
    return preamble(WHOLE, len(header), len(body)) + header + body


ATTACKS = {
    "noise": random.Random(0).randbytes(5000),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "older version": preamble(WHOLE, 1, 0, version=1),
    "body too large": HELLO + preamble(OPEN, 100, MAX_BODY_BYTES + 1),
    "header too large": HELLO + preamble(WHOLE, 2**32 - 1, 0),
    "chunk of nothing": HELLO + chunk(0, b"x"),
    "chunk beyond the body": HELLO + opening(300_000) + preamble(CHUNK, 0, 300_001),
    "reset with a length": HELLO + opening(300_000) + preamble(RESET, 0, 1),
    "window": HELLO + 3 * opening(LARGE),
    "no map": HELLO + frame(encode([1, 2])),
    "no CBOR": HELLO + frame(b"\xff" * 100),
    "deep": HELLO + frame(b"\x81" * 60_000),
    "table": HELLO + frame(encode({"type": "ping", "tensors": [["float32", [2]]]}), b"1234"),
    "a shape beyond all bounds": HELLO + frame(encode({"type": "ping", "tensors": [["int8", [2**40, 2**40, 0]]]})),
    "no such message": HELLO + frame(encode({"type": "shutdown"})),
    "call before hello": CALL,
    "second hello": HELLO + HELLO,
    "an id in use": HELLO + STUCK + STUCK,
    "answer to nothing": HELLO + wire(encode_message(CallReply(call_id=1, body={}))),
    "credit for nothing": HELLO + wire(encode_message(Credit(nbytes=1))),
    "call after goodbye": HELLO + STUCK + wire(encode_message(Goodbye())) + wire(encode_message(CallStart(
        call_id=2, method="echo", timeout_s=LONG_S, body={}))),
}  # fmt: skip


async def stuck(request: Request) -> Reply:
    await trio.sleep_forever()
    raise AssertionError


async def is_dropped(stream: trio.SocketStream) -> bool:
    """Return True if the other end goes away within `LONG_S` / 6; anything that it says before is read."""
    with trio.move_on_after(LONG_S / 6):
        try:
            while await stream.receive_some(MIB):
                pass
        except trio.BrokenResourceError:
            pass
        return True
    return False


class Calls:
    """An innocent peer that calls all the time."""

    def __init__(self, client: RpcPeer, address: Address) -> None:
        self.client = client
        self.address = address
        self._served = trio.Event()

    async def run(self) -> None:
        """Call for ever; every call must go well."""
        tensor = np.arange(100_000, dtype=np.float32)
        while True:
            reply = await self.client.call(self.address, "echo", {"a": 1}, (tensor,), timeout_s=LONG_S)
            assert reply.body == {"a": 1}
            assert np.array_equal(reply.tensors[0], tensor)
            self._served.set()
            self._served = trio.Event()

    async def go_on(self) -> None:
        """Wait until the third call from now is done: the second one began later than now."""
        with trio.fail_after(LONG_S):
            for _ in range(3):
                await self._served.wait()


@asynccontextmanager
async def served() -> AsyncIterator[Calls]:
    """A server with two methods that an innocent peer calls."""
    async with peers() as (server, client, address):
        server.add_handler("echo", echo)
        server.add_handler("stuck", stuck)
        calls = Calls(client, address)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(calls.run)
            yield calls
            nursery.cancel_scope.cancel()


async def connect(address: Address) -> trio.SocketStream:
    return await trio.open_tcp_stream(address.host, address.port)


async def test_a_peer_that_breaks_the_format_is_dropped_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Each violation ends the connection on which it came, within one line of the log; the other peer is served."""
    async with served() as calls:
        for name, attack in ATTACKS.items():
            caplog.clear()
            stream = await connect(calls.address)
            async with stream:
                await stream.send_all(attack)
                assert await is_dropped(stream), name
            await calls.go_on()
            assert [record.levelno for record in caplog.records] == [logging.WARNING], name
            assert "dropping the connection" in caplog.text, name


async def test_the_start_of_the_attacks_is_legal() -> None:
    """Without their last fault these peers would not have been dropped: they are answered."""
    async with served() as calls:
        stream = await connect(calls.address)
        async with stream:
            legal = [HELLO, 2 * opening(LARGE), preamble(RESET, 0, 0), opening(LARGE), chunk(1, b"x"), CALL]
            legal.append(wire(encode_message(CallCancel(call_id=77))))
            for data in legal:
                await stream.send_all(data)
            received = b""
            with trio.fail_after(LONG_S):
                while b"reply" not in received:
                    received += await stream.receive_some(MIB)
            assert wire(encode_message(CallReply(call_id=1, body={}))) in received


async def test_an_end_inside_a_frame() -> None:
    """Peers that vanish in the middle, twenty at a time, disturb nobody."""
    async with served() as calls:
        for cut in range(1, len(HELLO + CALL), 20):
            stream = await connect(calls.address)
            await stream.send_all((HELLO + CALL)[:cut])
            await stream.aclose()
        await calls.go_on()


@pytest.mark.parametrize("answer", [b"\x00" * 16, HELLO + preamble(OPEN, 5, 2**40), HELLO + HELLO])
async def test_a_hostile_server_fails_only_its_own_callers(answer: bytes) -> None:
    """Whoever calls a peer that answers with garbage gets an error; the caller's other connections live on."""
    async with served() as calls:

        async def answer_with_garbage(stream: trio.SocketStream) -> None:
            await stream.send_all(answer)
            await is_dropped(stream)

        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, answer_with_garbage, [listener])
            port = listener.socket.getsockname()[1]
            with pytest.raises((RemoteProtocolError, PeerUnavailable)) as raised:
                await calls.client.call(Address("127.0.0.1", port), "echo", {}, timeout_s=LONG_S)
            assert len(str(raised.value)) < 300
            await calls.go_on()
            nursery.cancel_scope.cancel()


async def test_a_client_that_is_dropped_can_come_again() -> None:
    """Nothing is held against an address: the next connection from there is served."""
    async with open_rpc_peer(TcpTransport(), peer_id=PeerId(b"s" * 32), listen=ANY_PORT) as server:
        server.add_handler("echo", echo)
        assert server.address is not None
        for _ in range(3):
            stream = await connect(server.address)
            async with stream:
                await stream.send_all(HELLO + HELLO)
                assert await is_dropped(stream)
        async with open_rpc_peer(TcpTransport(), peer_id=PeerId(b"h" * 32)) as client:
            reply = await client.call(server.address, "echo", {"a": 1}, timeout_s=LONG_S)
            assert reply.body == {"a": 1}
