"""The life of connections under RPC peers: bounds, ends, shared dials, links that misbehave, and peers of different
versions, which part with a sentence at both ends."""

import gc
import logging
import os
import re
import weakref
from contextlib import AsyncExitStack
from functools import partial

import numpy as np
import pytest
import trio
import trio.testing

from dmoe_net.errors import ConnectionLost, DialFailed, ListenFailed, PeerTimeout, PeerUnavailable, RemoteProtocolError
from dmoe_net.identity import Address, PeerId
from dmoe_net.rpc.base import Reply, Request
from dmoe_net.rpc.connection import HELLO_TIMEOUT_S
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.base import Link, Listener
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.wire.codec import encode
from dmoe_net.wire.frames import Frame, Part
from dmoe_net.wire.messages import CallReply, CallStart, Hello, encode_message
from dmoe_net.wire.versions import CALLS
from tests.net.rpc_peers import ANY_PORT, CLIENT, LONG_S, SERVER, Stuck, echo, hello, part, peers, tcp_listener
from tests.net.wire_parts import WHOLE, preamble, wire


async def test_a_taken_port_fails_on_entry() -> None:
    """ListenFailed names the address and comes out of `async with` bare."""
    async with open_rpc_peer(TcpTransport(), peer_id=SERVER, listen=ANY_PORT) as server:
        with pytest.raises(ListenFailed, match=str(server.address)):
            async with open_rpc_peer(TcpTransport(), peer_id=CLIENT, listen=server.address):
                pytest.fail("two peers listen at one address")


async def test_an_exception_of_the_block_comes_out_bare() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with peers():
            raise KeyError("mine")


async def test_two_processes_with_one_key_are_remarked(caplog: pytest.LogCaptureFixture) -> None:
    """An instance that comes back is another process with a copy of the key: one warning names both and the remedy. A
    peer that is started again and again is no news."""
    async with open_rpc_peer(TcpTransport(), peer_id=SERVER, listen=ANY_PORT) as server:
        for _ in range(3):
            async with open_rpc_peer(TcpTransport(), peer_id=CLIENT, listen=ANY_PORT) as restarted:
                await restarted.call(server.address, "rpc.ping", {}, timeout_s=LONG_S)
        assert "two processes" not in caplog.text
        async with (
            open_rpc_peer(TcpTransport(), peer_id=CLIENT, listen=ANY_PORT) as one,
            open_rpc_peer(TcpTransport(), peer_id=CLIENT, listen=ANY_PORT) as other,
        ):
            for _ in range(3):
                for peer in (one, other):
                    await trio.testing.wait_all_tasks_blocked(0.02)  # the other one's connection has ended
                    await peer.call(server.address, "rpc.ping", {}, timeout_s=LONG_S)
        (warning,) = [record.getMessage() for record in caplog.records if "two processes" in record.getMessage()]
        assert all(text in warning for text in (str(one.address), str(other.address), "--identity"))


async def test_a_peer_that_is_closed_fails_calls_of_other_tasks_and_places_no_more() -> None:
    async with open_rpc_peer(TcpTransport(), peer_id=SERVER, listen=ANY_PORT) as server:
        server.add_handler("stuck", stuck := Stuck())
        async with trio.open_nursery() as nursery, open_rpc_peer(TcpTransport(), peer_id=CLIENT) as client:

            async def call() -> None:
                with pytest.raises(ConnectionLost):
                    await client.call(server.address, "stuck", {}, timeout_s=LONG_S)

            nursery.start_soon(call)
            await stuck.started.wait()
        with pytest.raises(ConnectionLost, match="closed"):
            await client.call(server.address, "rpc.ping", {}, timeout_s=LONG_S)


async def test_handlers_are_registered_once_and_with_sense() -> None:
    async with open_rpc_peer(TcpTransport(), peer_id=CLIENT) as peer:
        peer.add_handler("m", echo)
        for method, bound in [("m", 1), ("rpc.ping", 1), ("", 1), ("x" * 200, 1), ("n", 0)]:
            with pytest.raises(ValueError, match=r"handler|name|max_concurrent"):
                peer.add_handler(method, echo, max_concurrent=bound)


async def test_incoming_connections_are_bounded_and_idle_ones_make_room() -> None:
    """With two places, a third client takes the place of the one that has been idle for longest."""
    async with peers(max_incoming_connections=2) as (_, client, address), AsyncExitStack() as stack:
        await client.call(address, "rpc.ping", {}, timeout_s=LONG_S)
        for index in range(4):
            opening = open_rpc_peer(TcpTransport(), peer_id=PeerId(bytes([index]) * 32))
            other = await stack.enter_async_context(opening)
            await other.call(address, "rpc.ping", {}, timeout_s=LONG_S)
        while client.statistics().outgoing:
            await trio.lowlevel.checkpoint()
        await client.call(address, "rpc.ping", {}, timeout_s=LONG_S)  # dialled again


async def test_incoming_connections_that_are_in_use_are_not_given_up() -> None:
    async with peers(max_incoming_connections=1) as (server, client, address), trio.open_nursery() as nursery:
        server.add_handler("stuck", stuck := Stuck())
        nursery.start_soon(partial(client.call, address, "stuck", {}, timeout_s=LONG_S))
        await stuck.started.wait()
        async with open_rpc_peer(TcpTransport(), peer_id=PeerId(b"n" * 32)) as newcomer:
            with pytest.raises(PeerUnavailable):  # reset while it dials (DialFailed) or just after
                await newcomer.call(address, "rpc.ping", {}, timeout_s=LONG_S)
        stuck.let_go.set()


async def test_outgoing_connections_are_bounded() -> None:
    """A client with one place drops an idle connection for a new one, but not one that is in use."""
    async with (
        open_rpc_peer(TcpTransport(), peer_id=SERVER, listen=ANY_PORT) as one,
        open_rpc_peer(TcpTransport(), peer_id=PeerId(b"t" * 32), listen=ANY_PORT) as other,
        open_rpc_peer(TcpTransport(), peer_id=CLIENT, max_outgoing_connections=1) as client,
        trio.open_nursery() as nursery,
    ):
        one.add_handler("stuck", stuck := Stuck())
        for server in (one, other, one, other):
            await client.call(server.address, "rpc.ping", {}, timeout_s=LONG_S)
        nursery.start_soon(partial(client.call, one.address, "stuck", {}, timeout_s=LONG_S))
        await stuck.started.wait()
        with pytest.raises(DialFailed, match="in use"):
            await client.call(other.address, "rpc.ping", {}, timeout_s=LONG_S)
        stuck.let_go.set()


async def test_nothing_is_left_after_100_connections() -> None:
    gc.collect()
    num_tasks = trio.lowlevel.current_statistics().tasks_living
    num_fds = len(os.listdir("/proc/self/fd"))
    async with open_rpc_peer(TcpTransport(), peer_id=SERVER, listen=ANY_PORT) as server:
        for index in range(100):
            async with open_rpc_peer(TcpTransport(), peer_id=CLIENT) as client:
                await client.call(server.address, "rpc.ping", {}, timeout_s=LONG_S)
            stream = await trio.open_tcp_stream(server.address.host, server.address.port)
            await stream.send_all(hello().pieces[0][: 5 + index % 20])
            await stream.aclose()
        while server.statistics().incoming:
            await trio.lowlevel.checkpoint()
    assert trio.lowlevel.current_statistics().tasks_living == num_tasks
    assert len(os.listdir("/proc/self/fd")) == num_fds


async def test_a_server_that_answers_garbage() -> None:
    listener = await TcpTransport().listen(ANY_PORT)

    async def serve() -> None:
        link = await listener.accept()
        await link.send(hello(SERVER))
        await link.receive()
        await link.receive()  # the client's call
        await link.send(part(CallReply(call_id=99, body={})))
        with pytest.raises(ConnectionLost):
            await link.receive()
        await link.aclose()

    async with open_rpc_peer(TcpTransport(), peer_id=CLIENT) as client, trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        with pytest.raises(RemoteProtocolError, match="never placed"):
            await client.call(listener.address, "m", {}, timeout_s=LONG_S)
    await listener.aclose()


# What sockets do not show on demand: dials that hang, and links to somebody who neither reads nor writes.


class SlowTransport:
    """Dials that take until they are let through; at once if there is a link to give."""

    peer_id = None

    def __init__(self, link: Link | None = None) -> None:
        self.link = link
        self.num_dials = self.num_cancelled = 0
        self.open = trio.Event()
        if link is not None:
            self.open.set()

    async def dial(self, address: Address, *, peer_id: PeerId | None = None) -> Link:
        self.num_dials += 1
        try:
            await self.open.wait()
        except trio.Cancelled:
            self.num_cancelled += 1
            raise
        if self.link is None:
            raise DialFailed(f"nobody at {address}")
        return self.link

    async def listen(self, address: Address) -> Listener:
        raise ListenFailed("not here")


class SilentLink:
    """A link to somebody who writes nothing but what is given, and perhaps does not read."""

    remote_address = Address("10.0.0.1", 9)
    remote_peer_id = None
    when_heard = None
    num_moved = num_received = num_sent = 0

    def __init__(self, *received: Frame, reads: bool = True) -> None:
        self.received = list(received)
        self.sent: list[Part] = []
        self.may_send = trio.Event()
        if reads:
            self.may_send.set()
        self.is_closed = False

    async def handshake(self) -> None:
        await trio.lowlevel.checkpoint()

    async def send(self, *parts: Part) -> None:
        await self.may_send.wait()
        self.sent += parts

    async def receive(self) -> Frame | None:
        if self.received:
            return self.received.pop(0)
        await trio.sleep_forever()
        return None

    async def aclose(self) -> None:
        self.is_closed = True
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        self.is_closed = True


ELSEWHERE = Address("10.0.0.1", 9)


async def test_dialling_ends_at_the_callers_deadline(autojump_clock: trio.testing.MockClock) -> None:
    """Each caller waits as long as it wants for the one dial; it is given up with the last of them."""
    transport = SlowTransport()
    ended: list[tuple[float, float]] = []

    async def call(timeout_s: float) -> None:
        with pytest.raises(DialFailed, match="within"):
            await client.call(ELSEWHERE, "m", {}, timeout_s=timeout_s)
        ended.append((timeout_s, trio.current_time()))

    async with open_rpc_peer(transport, peer_id=CLIENT) as client:
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            for timeout_s in (1.0, 3.0, 2.0):
                nursery.start_soon(call, timeout_s)
            await trio.sleep(2.5)
            assert (transport.num_dials, transport.num_cancelled) == (1, 0)
        await trio.testing.wait_all_tasks_blocked()
        assert (transport.num_dials, transport.num_cancelled) == (1, 1)
        assert [(t, when - start) for t, when in ended] == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


async def test_a_failed_dial_fails_all_who_wait_for_it() -> None:
    """One dial, one reason, an error object for each caller; the next call dials again."""
    transport = SlowTransport()
    errors: list[DialFailed] = []

    async def call() -> None:
        with pytest.raises(DialFailed, match="nobody at") as caught:
            await client.call(ELSEWHERE, "m", {}, timeout_s=LONG_S)
        errors.append(caught.value)

    async with open_rpc_peer(transport, peer_id=CLIENT) as client:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(call)
            await trio.testing.wait_all_tasks_blocked()
            transport.open.set()
        assert len({id(error) for error in errors}) == 5
        assert transport.num_dials == 1
        await call()
        assert transport.num_dials == 2


async def test_a_peer_that_never_says_hello_is_dropped(autojump_clock: trio.testing.MockClock) -> None:
    link = SilentLink()
    async with open_rpc_peer(SlowTransport(link), peer_id=CLIENT) as client:
        start = trio.current_time()
        with pytest.raises(DialFailed, match="did not say who it is"):
            await client.call(ELSEWHERE, "m", {}, timeout_s=10 * HELLO_TIMEOUT_S)
        assert trio.current_time() - start == HELLO_TIMEOUT_S
    assert link.is_closed


async def test_calls_given_up_before_they_could_be_sent(autojump_clock: trio.testing.MockClock) -> None:
    """While the peer takes nothing, given-up calls leave the queue; what is sent later is whole and in order."""
    link = SilentLink(hello(SERVER).frame, reads=False)
    async with open_rpc_peer(SlowTransport(link), peer_id=CLIENT) as client, trio.open_nursery() as nursery:
        for index in range(2000):  # more than may be under way at once
            with pytest.raises(PeerTimeout):
                await client.call(ELSEWHERE, f"given up {index}", {}, timeout_s=0.001)

        async def keep() -> None:
            with pytest.raises(PeerTimeout):
                await client.call(ELSEWHERE, "kept", {}, timeout_s=1.0)

        nursery.start_soon(keep)
        await trio.testing.wait_all_tasks_blocked()
        link.may_send.set()
        await trio.testing.wait_all_tasks_blocked()
        headers = [part.frame.header for part in link.sent if part.frame is not None]
        methods = [header["method"] for header in headers if header["type"] == "call"]
        # The writer had taken its first batch (hello, perhaps the first call) before it got stuck.
        assert methods in (["kept"], ["given up 0", "kept"])
        assert len(headers) <= 4


async def test_a_request_that_was_served_does_not_stay_in_memory() -> None:
    """Not until the connection's next frame, either."""
    tensor = np.zeros(8, np.uint8)
    frame = encode_message(CallStart(call_id=1, method="take", timeout_s=LONG_S, body={}, tensors=(tensor,))).frame
    gone, served = weakref.ref(tensor), trio.Event()
    link = SilentLink(hello(SERVER).frame, frame)
    async with open_rpc_peer(SlowTransport(link), peer_id=CLIENT) as client:

        async def take(request: Request) -> Reply:
            assert request.tensors
            served.set()
            return Reply()

        client.add_handler("take", take)
        del tensor, frame
        with pytest.raises(PeerTimeout):
            await client.call(ELSEWHERE, "m", {}, timeout_s=0.1)
        await served.wait()
        await trio.testing.wait_all_tasks_blocked()
        gc.collect()
        assert gone() is None


async def test_a_bug_in_a_link_ends_its_connection_only(caplog: pytest.LogCaptureFixture) -> None:
    class BrokenLink(SilentLink):
        async def receive(self) -> Frame | None:
            raise ZeroDivisionError("a bug")

    async with open_rpc_peer(SlowTransport(BrokenLink(reads=False)), peer_id=CLIENT) as client:
        for _ in range(2):
            with caplog.at_level(logging.ERROR), pytest.raises(DialFailed):
                await client.call(ELSEWHERE, "m", {}, timeout_s=LONG_S)
    assert "a bug" in caplog.text


THEIRS = PeerId(b"t" * 32)
FIELDS = {"peer_id": THEIRS.raw, "instance": bytes(8), "host": None, "port": None, "window": 2**26, "compressions": []}


def hello_of(version: int, **further: object) -> bytes:
    """The hello of a peer of another version: what all of them share, and what only later ones have."""
    name = "hello" if version == 2 else f"hello of wire version {version}"
    header = encode({"type": name, **FIELDS, **further})
    return preamble(WHOLE, len(header), 0, version=2) + header


OTHER_CALLS = Hello(
    peer_id=THEIRS, instance=bytes(8), port=None, window_bytes=2**26, calls=CALLS + 1, software="dmoe_jax 9.1"
)
OTHERS = {
    "an older one": (hello_of(2), "speaks version 2 of the wire format, this peer version 3"),
    "a newer one": (
        hello_of(71, software="dmoe_jax 9.1", calls="seven", mood="good"),
        r"speaks version 71 of the wire format \(dmoe_jax 9.1\), this peer version 3",
    ),
    "other calls": (
        wire(encode_message(OTHER_CALLS)),
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


@pytest.mark.parametrize("name", OTHERS)
async def test_who_dials_another_version_is_told_both(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The call fails with the sentence, and the other end gets our hello, which says as much to it."""
    hello, sentence = OTHERS[name]
    sending, came = trio.open_memory_channel[bytes](10)

    async def serve(stream: trio.SocketStream) -> None:
        await stream.send_all(hello)
        await sending.send(await what_came(stream))

    async with tcp_listener(serve) as address, open_rpc_peer(TcpTransport(), peer_id=CLIENT) as peer:
        with caplog.at_level(logging.WARNING), pytest.raises(DialFailed, match=f"^{address} {sentence}"):
            await peer.call(address, "m", {}, timeout_s=LONG_S)
        assert_is_our_hello_alone(await came.receive())
    assert "dropping a connection" in caplog.text


@pytest.mark.parametrize("name", OTHERS)
async def test_who_is_dialled_by_another_version_says_both(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """It logs the sentence, and the other end gets our hello and then the end of the connection."""
    hello, sentence = OTHERS[name]
    async with open_rpc_peer(TcpTransport(), peer_id=CLIENT, listen=ANY_PORT) as peer:
        with caplog.at_level(logging.WARNING):
            async with await trio.open_tcp_stream(peer.address.host, peer.address.port) as stream:
                await stream.send_all(hello)
                assert_is_our_hello_alone(await what_came(stream))
    assert re.search(rf"dropping a connection: 127\.0\.0\.1:\d+ {sentence}", caplog.text), caplog.text


async def test_a_peer_says_nothing_before_the_one_that_it_dialled() -> None:
    """An older peer that it dials says its own hello so, before it drops us for ours."""
    listener = await TcpTransport().listen(ANY_PORT)
    async with open_rpc_peer(TcpTransport(), peer_id=CLIENT) as peer, trio.open_nursery() as nursery:

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
