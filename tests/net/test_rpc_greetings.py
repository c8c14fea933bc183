"""Hello and goodbye on two connections: which peer says them on which, and when."""

import functools
from collections.abc import Awaitable, Callable
from contextlib import suppress

import numpy as np
import pytest
import trio

from dmoe_net.errors import ConnectionLost, DialFailed, PeerTimeout
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.rpc.base import Reply, Request
from dmoe_net.rpc.connection import HELLO_TIMEOUT_S, LEAVE_S
from dmoe_net.rpc.connections import CHECK_PERIOD_S
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.base import Link, Transport
from dmoe_net.transport.sim import simulate
from dmoe_net.wire.messages import CallReply, Goodbye
from tests.net.rpc_peers import LONG_S, hello, part
from tests.net.sim_hosts import in_simulation
from tests.net.test_rpc_simulated import ALICE, EVE, contact, pair, ping


@in_simulation
async def test_a_slow_call_on_the_connection_that_gives_way_is_answered() -> None:
    """Two that dial at once: the connection that is not preferred lives until its calls are answered, then ends."""
    async with pair() as (network, alice, bob):

        async def slow(_: Request) -> Reply:
            await trio.sleep(3 * LEAVE_S)
            return Reply()

        async with trio.open_nursery() as nursery:
            for caller, target in ((alice, bob), (bob, alice)):
                caller.add_handler("slow", slow)
                nursery.start_soon(functools.partial(caller.call, contact(target), "slow", {}, timeout_s=LONG_S))
        assert network.statistics().dials == 2
        for _ in range(3):
            await ping(alice, contact(bob))
            await trio.sleep((LEAVE_S + 2 * CHECK_PERIOD_S) / 3)
        assert network.statistics().links == 1


@in_simulation
async def test_a_peer_that_says_hello_and_goodbye_in_one_breath_is_not_dialled_in_a_loop() -> None:
    """A call that waits for the hello is one dial and fails at once; connections with others stay. One without tensors
    has left by then, and its answer is waited for no longer than it says."""
    async with pair() as (network, alice, bob), trio.open_nursery() as nursery:
        await ping(alice, contact(bob))

        async def leave_at_once(link: Link) -> None:
            await link.send(hello(EVE), part(Goodbye()))
            await trio.sleep_forever()

        address = await listen_as(network.transport("e", EVE), "e", leave_at_once, nursery)
        for target in (address, Contact(EVE, address)):
            num_dials, started = network.statistics().dials, trio.current_time()
            with pytest.raises(DialFailed, match="parted"):
                await alice.call(target, "rpc.ping", {}, [np.zeros(1, np.float32)], timeout_s=10.0)
            assert trio.current_time() - started < 0.5
            assert network.statistics().dials == num_dials + 1
        with pytest.raises(PeerTimeout):
            await ping(alice, target, timeout_s=1.0)
        await ping(alice, contact(bob))
        assert network.statistics().dials == 4
        nursery.cancel_scope.cancel()


@in_simulation
async def test_a_peer_that_prefers_its_own_connection_may_say_hello_there_later() -> None:
    """Both dialled, and the goodbye on ours overtakes the hello on theirs: the call waits for that."""
    async with pair() as (network, alice, _), trio.open_nursery() as nursery:
        transport = network.transport("e", EVE)
        target = Contact(EVE, await listen_as(transport, "e", prefers_own(transport, contact(alice)), nursery))
        await ping(alice, target)
        await ping(alice, target)
        assert network.statistics().dials == 2
        nursery.cancel_scope.cancel()


@in_simulation
async def test_a_stranger_that_stays_mute_is_not_waited_for_for_ever() -> None:
    """It might have been the one who parted; when it is dropped, the call fails."""
    async with pair() as (network, alice, _), trio.open_nursery() as nursery:
        transport = network.transport("e", EVE)
        serve = prefers_own(transport, contact(alice), says_hello=False)
        address = await listen_as(transport, "e", serve, nursery)
        started = trio.current_time()
        with pytest.raises(DialFailed, match="parted"):
            await alice.call(address, "ping", {}, timeout_s=LONG_S)
        assert trio.current_time() - started <= HELLO_TIMEOUT_S + 1.0
        nursery.cancel_scope.cancel()


@in_simulation
async def test_the_bound_of_outgoing_connections_counts_a_connection_once() -> None:
    """Eight places, eight peers that are slow to say hello: all are reached, and none is thrown out for a ninth."""
    async with simulate() as network, trio.open_nursery() as nursery:
        hosts = [f"h{index}" for index in range(9)]
        transport = network.transport("a", ALICE)
        async with open_rpc_peer(transport, peer_id=ALICE, max_outgoing_connections=8) as alice:
            addresses = [
                await listen_as(network.transport(host, named(index)), host, slow_to_say_hello(named(index)), nursery)
                for index, host in enumerate(hosts)
            ]
            async with trio.open_nursery() as calls:
                for address in addresses[:8]:
                    calls.start_soon(ping, alice, address)
                    await trio.sleep(0.02)
                for _ in range(4):  # while some dial, some wait for Hello, and some are there
                    with pytest.raises(DialFailed, match="in use"):
                        await ping(alice, addresses[8])
                    await trio.sleep(0.1)
            await ping(alice, addresses[8])  # now one that is idle makes room
        nursery.cancel_scope.cancel()


def named(index: int) -> PeerId:
    return PeerId(bytes([index]) * 32)


def slow_to_say_hello(peer_id: PeerId) -> Callable[[Link], Awaitable[None]]:
    async def serve(link: Link) -> None:
        await trio.sleep(0.5)
        await link.send(hello(peer_id))
        while (frame := await link.receive()) is not None:
            if frame.header["type"] == "call":
                await link.send(part(CallReply(call_id=frame.header["id"], body={})))

    return serve


def prefers_own(transport: Transport, target: Contact, *, says_hello: bool = True) -> Callable[[Link], Awaitable[None]]:
    """Dials whoever has dialled it, says goodbye on the one link, then hello on the other."""

    async def serve(link: Link) -> None:
        own = await transport.dial(target.address)
        await trio.sleep(0.5)
        await link.send(hello(EVE), part(Goodbye()))
        if says_hello:
            await slow_to_say_hello(EVE)(own)
        await trio.sleep_forever()

    return serve


async def listen_as(
    transport: Transport, host: str, serve: Callable[[Link], Awaitable[None]], nursery: trio.Nursery
) -> Address:
    """Listen without a peer: each link that comes in is served by `serve`."""
    listener = await transport.listen(Address(host, 7))

    async def accept() -> None:
        while True:
            link = await listener.accept()
            await link.handshake()
            nursery.start_soon(serve_until_lost, link)

    async def serve_until_lost(link: Link) -> None:
        with suppress(ConnectionLost):
            await serve(link)

    nursery.start_soon(accept)
    return listener.address
