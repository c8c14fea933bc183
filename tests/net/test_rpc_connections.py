"""The life of connections under RPC peers: bounds, ends, shared dials, and links that misbehave."""

import gc
import logging
import os
import weakref
from contextlib import AsyncExitStack
from functools import partial

import numpy as np
import pytest
import trio
import trio.testing

from dmoe_net.errors import (
    ConnectionLost,
    DialFailed,
    ListenFailed,
    PeerTimeout,
    PeerUnavailable,
    RemoteProtocolError,
)
from dmoe_net.identity import Address, PeerId
from dmoe_net.rpc.base import Reply, Request
from dmoe_net.rpc.connection import HELLO_TIMEOUT_S
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.base import Link, Listener
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.wire.frames import Frame, Part
from dmoe_net.wire.messages import CallReply, CallStart, encode_message
from tests.net.rpc_peers import ANY_PORT, CLIENT, LONG_S, SERVER, Stuck, echo, hello, part, peers


async def test_a_taken_port_fails_on_entry() -> None:
    """ListenFailed names the address and comes out of `async with` bare."""
    async with open_rpc_peer(TcpTransport(), peer_id=SERVER, listen=ANY_PORT) as server:
        with pytest.raises(ListenFailed, match=str(server.address)):
            async with open_rpc_peer(TcpTransport(), peer_id=CLIENT, listen=server.address):
                pytest.fail("two peers listen at one address")


async def test_an_exception_of_the_block_comes_out_bare() -> None:
    """No group around it, though there is a nursery inside."""
    with pytest.raises(KeyError, match="mine"):
        async with peers():
            raise KeyError("mine")


async def test_a_closed_peer_places_no_calls() -> None:
    """After its block a peer answers every call with ConnectionLost."""
    async with peers() as (_, client, address):
        await client.call(address, "rpc.ping", {}, timeout_s=LONG_S)
    with pytest.raises(ConnectionLost, match="closed"):
        await client.call(address, "rpc.ping", {}, timeout_s=LONG_S)


async def test_two_processes_with_one_key_are_remarked(caplog: pytest.LogCaptureFixture) -> None:
    """A peer that is started again and again is no news; an instance that comes back is another process with a copy of
    the key, and one warning names both addresses and the remedy."""
    async with open_rpc_peer(TcpTransport(), peer_id=SERVER, listen=ANY_PORT) as server:
        assert server.address is not None
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
        assert str(one.address) in warning
        assert str(other.address) in warning
        assert "--identity" in warning


async def test_closing_a_peer_fails_calls_of_other_tasks() -> None:
    """A task outside the block that still waits is told, not left hanging."""
    stuck = Stuck()
    async with open_rpc_peer(TcpTransport(), peer_id=SERVER, listen=ANY_PORT) as server:
        server.add_handler("stuck", stuck)
        async with trio.open_nursery() as nursery, open_rpc_peer(TcpTransport(), peer_id=CLIENT) as client:

            async def call() -> None:
                with pytest.raises(ConnectionLost):
                    await client.call(server.address, "stuck", {}, timeout_s=LONG_S)

            nursery.start_soon(call)
            await stuck.started.wait()


async def test_handlers_are_registered_once_and_with_sense() -> None:
    """A second handler for a method, an empty name and a bound of zero are ValueErrors."""
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
        while list(client._connections):
            await trio.lowlevel.checkpoint()
        await client.call(address, "rpc.ping", {}, timeout_s=LONG_S)  # dialled again


async def test_incoming_connections_that_are_in_use_are_not_given_up() -> None:
    """When every place is in use, a newcomer is turned away."""
    stuck = Stuck()
    async with peers(max_incoming_connections=1) as (server, client, address), trio.open_nursery() as nursery:
        server.add_handler("stuck", stuck)

        nursery.start_soon(partial(client.call, address, "stuck", {}, timeout_s=LONG_S))
        await stuck.started.wait()
        async with open_rpc_peer(TcpTransport(), peer_id=PeerId(b"n" * 32)) as newcomer:
            with pytest.raises(PeerUnavailable):  # reset while it dials (DialFailed) or just after
                await newcomer.call(address, "rpc.ping", {}, timeout_s=LONG_S)
        stuck.let_go.set()


async def test_outgoing_connections_are_bounded() -> None:
    """A client with one place drops an idle connection for a new one, but not one that is in use."""
    stuck = Stuck()
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(open_rpc_peer(TcpTransport(), peer_id=peer_id, listen=ANY_PORT))
            for peer_id in (SERVER, PeerId(b"t" * 32))
        ]
        servers[0].add_handler("stuck", stuck)
        client = await stack.enter_async_context(
            open_rpc_peer(TcpTransport(), peer_id=CLIENT, max_outgoing_connections=1)
        )
        nursery = await stack.enter_async_context(trio.open_nursery())
        for server in (*servers, *servers):
            await client.call(server.address, "rpc.ping", {}, timeout_s=LONG_S)

        nursery.start_soon(partial(client.call, servers[0].address, "stuck", {}, timeout_s=LONG_S))
        await stuck.started.wait()
        with pytest.raises(DialFailed, match="in use"):
            await client.call(servers[1].address, "rpc.ping", {}, timeout_s=LONG_S)
        stuck.let_go.set()


async def test_nothing_is_left_after_100_connections() -> None:
    """100 peers that call and leave, 100 links cut in mid-frame: no descriptor and no task remains."""
    gc.collect()
    num_tasks = trio.lowlevel.current_statistics().tasks_living
    num_fds = len(os.listdir("/proc/self/fd"))
    async with open_rpc_peer(TcpTransport(), peer_id=SERVER, listen=ANY_PORT) as server:
        assert server.address is not None
        for index in range(100):
            async with open_rpc_peer(TcpTransport(), peer_id=CLIENT) as client:
                await client.call(server.address, "rpc.ping", {}, timeout_s=LONG_S)
            stream = await trio.open_tcp_stream(server.address.host, server.address.port)
            await stream.send_all(hello().pieces[0][: 5 + index % 20])
            await stream.aclose()
        while list(server._connections):
            await trio.lowlevel.checkpoint()
    assert trio.lowlevel.current_statistics().tasks_living == num_tasks
    assert len(os.listdir("/proc/self/fd")) == num_fds


async def test_a_server_that_answers_garbage() -> None:
    """The caller learns that the answer broke the rules."""
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
    """Dials that take until they are let through."""

    def __init__(self, link: Link | None = None) -> None:
        self.link = link
        self.num_dials = 0
        self.num_cancelled = 0
        self.open = trio.Event()

    peer_id = None

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
    """A link to somebody who does not read, and writes nothing but what is given."""

    remote_address = Address("10.0.0.1", 9)
    remote_peer_id = None
    when_heard = None
    num_moved = num_received = num_sent = 0

    def __init__(self, *received: Frame) -> None:
        self.received = list(received)
        self.sent: list[Part] = []
        self.may_send = trio.Event()
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
    """After HELLO_TIMEOUT_S the connection ends and the call on it with it."""
    link = SilentLink()
    link.may_send.set()
    transport = SlowTransport(link)
    transport.open.set()
    async with open_rpc_peer(transport, peer_id=CLIENT) as client:
        start = trio.current_time()
        with pytest.raises(DialFailed, match="did not say who it is"):
            await client.call(ELSEWHERE, "m", {}, timeout_s=10 * HELLO_TIMEOUT_S)
        assert trio.current_time() - start == HELLO_TIMEOUT_S
    assert link.is_closed


async def test_calls_given_up_before_they_could_be_sent(autojump_clock: trio.testing.MockClock) -> None:
    """While the peer takes nothing, given-up calls leave the queue; what is sent later is whole and in order."""
    greeting = hello(SERVER).frame
    assert greeting is not None
    link = SilentLink(greeting)
    transport = SlowTransport(link)
    transport.open.set()
    async with open_rpc_peer(transport, peer_id=CLIENT) as client, trio.open_nursery() as nursery:
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
    greeting = hello(SERVER).frame
    assert greeting is not None
    gone, served = weakref.ref(tensor), trio.Event()
    link = SilentLink(greeting, frame)
    link.may_send.set()
    transport = SlowTransport(link)
    transport.open.set()
    async with open_rpc_peer(transport, peer_id=CLIENT) as client:

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
    """An error that nobody foresaw is logged; the call fails and the peer lives on."""

    class BrokenLink(SilentLink):
        async def receive(self) -> Frame | None:
            raise ZeroDivisionError("a bug")

    transport = SlowTransport(BrokenLink())
    transport.open.set()
    async with open_rpc_peer(transport, peer_id=CLIENT) as client:
        for _ in range(2):
            with caplog.at_level(logging.ERROR), pytest.raises(DialFailed):
                await client.call(ELSEWHERE, "m", {}, timeout_s=LONG_S)
    assert "a bug" in caplog.text
