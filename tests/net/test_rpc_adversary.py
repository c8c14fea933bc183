"""Malice, haste and bad luck of peers, and the harm that must not come of it."""

import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio

from dmoe_net.errors import ConnectionLost, DialFailed, LocalProtocolError, PeerTimeout
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.rpc.base import Reply, Request
from dmoe_net.rpc.connection import HELLO_TIMEOUT_S, LEAVE_S
from dmoe_net.rpc.connections import CHECK_PERIOD_S
from dmoe_net.rpc.peer import RpcPeer, open_rpc_peer
from dmoe_net.transport.base import Link, Transport
from dmoe_net.transport.sim import simulate
from dmoe_net.transport.sim.events import Heal, Partition
from dmoe_net.transport.sim.links import HostOptions
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.wire.messages import CallCancel, CallReply, CallStart, Goodbye, Ping
from dmoe_net.wire.tensors import Tensor
from tests.net.each_network import NETWORKS, Ends, Network, drop, on_every_link, on_every_network
from tests.net.link_frames import assert_same, parts_of
from tests.net.rpc_peers import CLIENT, LONG_S, SERVER, Clumsy, Stuck, echo, hello, part
from tests.net.sim_hosts import in_simulation
from tests.net.test_rpc_simulated import ALICE, BOB, EVE, MIB, contact, frozen, open_peer, pair, ping
from tests.net.test_transport_conformance import LARGE, large_frame


async def read_to_the_end(link: Link) -> None:
    """Whatever comes, until the other end has had enough."""
    with suppress(ConnectionLost):
        while await link.receive() is not None:
            pass


async def is_over(link: Link) -> bool:
    """Return True if the other end has closed or broken the link, or does so within 0.1 s."""
    with trio.move_on_after(0.1):
        await read_to_the_end(link)
        return True
    return False


@in_simulation
async def test_no_place_in_the_service_leaks() -> None:
    """A peer that uses a call's id again before its handler is done is dropped, and its calls with it."""
    async with pair() as (network, alice, bob):
        bob.add_handler("stuck", Stuck(), max_concurrent=1)
        bob.add_handler("few", echo, max_concurrent=1)
        for _ in range(3):
            link = await network.transport("e", EVE).dial(Address("b", 7))
            first, again = (CallStart(call_id=1, method=each, timeout_s=5.0, body={}) for each in ("stuck", "few"))
            await link.send(hello(EVE), part(first), part(CallCancel(call_id=1)), part(again))
            await read_to_the_end(link)
        await alice.call(contact(bob), "few", {}, timeout_s=1.0)
        with pytest.raises(PeerTimeout):  # and not PeerBusy
            await alice.call(contact(bob), "stuck", {}, timeout_s=1.0)


@in_simulation
async def test_calls_that_are_called_off_hold_the_window_until_their_handlers_are_done() -> None:
    """Two requests of 20 MiB are in memory at a time, however impatient their callers are; later ones get through."""
    num_running: list[int] = [0]

    async def stubborn(_: Request) -> Reply:
        num_running.append(num_running[-1] + 1)
        with trio.CancelScope(shield=True):
            await trio.sleep(20.0)  # as work on a device, which nothing interrupts
        num_running.append(num_running[-1] - 1)
        return Reply()

    async with pair() as (network, alice, bob):
        bob.add_handler("stubborn", stubborn)
        for _ in range(4):
            with pytest.raises(PeerTimeout):
                await alice.call(contact(bob), "stubborn", {}, [frozen(20 * MIB)], timeout_s=4.0)
        await alice.call(contact(bob), "stubborn", {}, [frozen(20 * MIB)], timeout_s=100.0)
        assert max(num_running) == 2
        assert network.statistics().dials == 1


@in_simulation
async def test_a_handler_may_call_its_caller_back_for_a_large_answer() -> None:
    """Although the request in work and the answer would not fit the window together."""
    async with pair() as (_, alice, bob):

        async def fetch(_: Request) -> Reply:
            return Reply(tensors=(frozen(40 * MIB),))

        async def outer(_: Request) -> Reply:
            fetched = await bob.call(contact(alice), "fetch", {}, [frozen(40 * MIB)], timeout_s=30.0)
            return Reply(body={"nbytes": fetched.tensors[0].nbytes})

        alice.add_handler("fetch", fetch)
        bob.add_handler("outer", outer)
        reply = await alice.call(contact(bob), "outer", {}, [frozen(40 * MIB)], timeout_s=60.0)
        assert reply.body == {"nbytes": 40 * MIB}


@on_every_network
async def test_contacts_that_name_a_wrong_peer_do_not_lock_the_right_one_out(ends: Ends) -> None:
    """Whoever spreads them cannot make us leave the address alone; only the wrong contacts are given up."""
    server_id, client_id = ends.server.peer_id or SERVER, ends.client.peer_id or CLIENT
    async with (
        open_rpc_peer(ends.server, peer_id=server_id, listen=ends.any_port) as server,
        open_rpc_peer(ends.client, peer_id=client_id) as client,
    ):
        address = contact(server).address
        reasons = []
        for index in (1, 1, 1, 2, 3, 4):
            with pytest.raises(DialFailed) as caught:
                await ping(client, Contact(PeerId(bytes([index]) * 32), address))
            reasons.append(str(caught.value))
        assert ["not tried" in reason for reason in reasons] == [False, False, True, False, False, False]
        await ping(client, contact(server))


@pytest.mark.parametrize("slow_host", ["a", "b"])
@in_simulation
async def test_a_large_call_over_a_slow_line_is_not_taken_for_silence(slow_host: str) -> None:
    """A request or an answer of 4 MiB at 200 kbit/s takes three minutes, in which no frame is complete."""
    hosts = {slow_host: HostOptions(up_bps=2e5)}
    async with pair(hosts=lambda host: hosts.get(host, HostOptions())) as (network, alice, bob):
        reply = await alice.call(contact(bob), "echo", {}, [frozen(4 * MIB)], timeout_s=3600.0)
        assert reply.tensors[0].nbytes == 4 * MIB
        assert trio.current_time() > 160.0
        assert network.statistics().dials == 1


@pytest.mark.parametrize("caller", ["another peer", "this peer itself"])
@in_simulation
async def test_a_handler_that_fails_while_its_peer_is_closed(caller: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its error is logged, the caller's call fails, and the block ends as if nothing had been."""
    clumsy = Clumsy(ValueError)

    async def call(peer: RpcPeer) -> None:
        with pytest.raises(ConnectionLost):
            await peer.call(contact(bob), "clumsy", {}, timeout_s=LONG_S)

    async with simulate() as network, open_peer(network, "a", ALICE) as alice, trio.open_nursery() as nursery:
        async with open_peer(network, "b", BOB) as bob:
            bob.add_handler("clumsy", clumsy)
            nursery.start_soon(call, bob if caller == "this peer itself" else alice)
            await clumsy.started.wait()
        await ping(alice, contact(alice))
    assert "while cleaning up" in caplog.text


@in_simulation
async def test_calls_of_a_peer_to_itself_end_when_it_is_closed() -> None:
    """Their handlers are cancelled and their callers told, at once."""
    async with simulate() as network, trio.open_nursery() as nursery:
        async with open_peer(network, "a", ALICE) as alice:
            alice.add_handler("stuck", stuck := Stuck())

            async def call() -> None:
                with pytest.raises(ConnectionLost, match="closed"):
                    await alice.call(contact(alice), "stuck", {}, timeout_s=LONG_S)

            nursery.start_soon(call)
            await stuck.started.wait()
            closed_at = trio.current_time()
        await stuck.cancelled.wait()
        assert trio.current_time() == closed_at
        with pytest.raises(ConnectionLost, match="closed"):
            await ping(alice, contact(alice))


@in_simulation
async def test_calls_of_a_peer_to_itself_share_no_body() -> None:
    kept, given = {"list": [1]}, {"list": [1]}

    async def give(request: Request) -> Reply:
        request.body["list"].append(2)
        return Reply(body=kept)

    async with pair() as (_, alice, _):
        alice.add_handler("give", give)
        reply = await alice.call(contact(alice), "give", given, timeout_s=1.0)
        reply.body["list"].append(3)
    assert kept == given == {"list": [1]}


@pytest.mark.parametrize(
    ("body", "dtype"),
    [({"x": {1, 2}}, np.float32), ({"x": bytes(10**6)}, np.float32), ({"x": math.nan}, np.float32), ({}, np.complex64)],
    ids=["a set", "a megabyte", "no number", "a complex tensor"],
)
@in_simulation
async def test_calls_of_a_peer_to_itself_refuse_what_could_not_travel(body: dict[str, object], dtype: type) -> None:
    """A program that works in one process works in two."""
    async with pair() as (_, alice, bob):
        for target in (alice, bob):
            with pytest.raises(LocalProtocolError):
                await alice.call(contact(target), "echo", body, [np.zeros(1, dtype)], timeout_s=1.0)
            await ping(alice, contact(target))


@in_simulation
async def test_a_read_only_view_of_an_array_that_its_owner_writes_to_is_copied() -> None:
    """In a request and in an answer, to another peer and to this one: as if its bytes had left."""
    kept: list[Tensor] = []
    owned = np.zeros(8, np.float32)
    view = owned[:]
    view.flags.writeable = False

    async def keep(request: Request) -> Reply:
        kept.extend(request.tensors)
        return Reply(tensors=(view,))

    async with pair() as (_, alice, bob):
        for target in (alice, bob):
            target.add_handler("keep", keep)
            reply = await alice.call(contact(target), "keep", {}, [view], timeout_s=1.0)
            kept.extend(reply.tensors)
    owned[:] = 7.0
    assert len(kept) == 4
    assert all((tensor == 0.0).all() for tensor in kept)


@in_simulation
async def test_strangers_who_only_connect_do_not_take_the_places_of_peers() -> None:
    """They take each other's: an idle connection of a peer outlives any number of them."""
    async with (
        simulate() as network,
        open_peer(network, "a", ALICE) as alice,
        open_peer(network, "b", BOB, max_incoming_connections=4) as bob,
    ):
        await ping(alice, contact(bob))
        links = [await network.transport("e", EVE).dial(Address("b", 7)) for _ in range(20)]
        assert [await is_over(link) for link in links] == [True] * 17 + [False] * 3
        await ping(alice, contact(bob))
        assert network.statistics().dials == 21
        drop(*links)


@in_simulation
async def test_callers_that_give_up_early_do_not_lock_an_address() -> None:
    """Cancelled, or with too little time left to dial at all: a patient caller gets through afterwards."""
    async with pair() as (_, alice, bob):
        for turn in range(12):
            with trio.move_on_after(0.05 if turn % 2 else math.inf):
                with pytest.raises(DialFailed, match="within"):
                    await ping(alice, contact(bob), timeout_s=LONG_S if turn % 2 else 0.05)
                assert turn % 2 == 0
        await ping(alice, contact(bob))


class StrictResolver(trio.abc.HostnameResolver):
    """The system's resolver where a NUL is an error; elsewhere the name ends there."""

    async def getaddrinfo(self, host: Any, *_: Any, **__: Any) -> Any:
        await trio.lowlevel.checkpoint()
        raise ValueError("embedded null character")

    async def getnameinfo(self, *_: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("host", ["a\0b", "\0", "a..b", "x" * 70 + ".example"])
async def test_a_host_that_no_name_can_be_is_a_failed_dial(host: str) -> None:
    """Such names come from other peers: the one that dials lives on."""
    if "\0" in host:
        trio.socket.set_custom_hostname_resolver(StrictResolver())
    async with open_rpc_peer(TcpTransport(), peer_id=CLIENT) as client:
        for _ in range(2):
            with pytest.raises(DialFailed, match="resolve"):
                await client.call(Address(host, 9), "rpc.ping", {}, timeout_s=LONG_S)


@on_every_link
async def test_what_moves_is_counted_at_both_ends(ends: Ends, dialled: Link, accepted: Link) -> None:
    """A frame larger than all buffers: its receiver counts its bytes, its sender at least those that had to wait."""
    before = dialled.num_moved, accepted.num_moved
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dialled.send, *parts_of(large_frame()))
        await ends.settle()
        assert_same(await accepted.receive(), large_frame())
    assert dialled.num_moved > before[0]
    assert accepted.num_moved >= before[1] + LARGE


@pytest.mark.parametrize("network", [each for each in NETWORKS if each.run is trio.run], ids=lambda each: each.name)
def test_what_finds_room_in_the_systems_buffer_is_no_sign_of_life(network: Network) -> None:
    """A ping, and calls of some kilobytes, to somebody who does not read."""

    @on_every_link
    async def send(ends: Ends, dialled: Link, accepted: Link) -> None:
        before = dialled.num_moved
        await dialled.send(part(Ping()))
        await dialled.send(part(CallStart(call_id=1, method="m", timeout_s=1.0, body={"x": bytes(20_000)})))
        await ends.settle()
        assert dialled.num_moved == before

    send(network)


@in_simulation
async def test_what_a_cut_network_holds_back_is_no_sign_of_life() -> None:
    """A simulated link counts what arrives: at both ends, if it is more than a ping."""
    async with simulate() as network:
        listener = await network.transport("b", BOB).listen(Address("b", 7))
        link = await network.transport("a", ALICE).dial(listener.address)
        network.apply(Partition(groups=(frozenset({"a"}),)))
        before = link.num_moved
        await link.send(part(CallStart(call_id=1, method="m", timeout_s=1.0, body={"x": bytes(8000)})))
        await trio.sleep(5.0)
        assert link.num_moved == before
        network.apply(Heal())
        await trio.sleep(30.0)
        assert link.num_moved > before
        drop(link)


# Hello and goodbye on two connections: which peer says them on which, and when.


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
                nursery.start_soon(partial(caller.call, contact(target), "slow", {}, timeout_s=LONG_S))
        assert network.statistics().dials == 2
        for _ in range(3):
            await ping(alice, contact(bob))
            await trio.sleep((LEAVE_S + 2 * CHECK_PERIOD_S) / 3)
        assert network.statistics().links == 1


@in_simulation
async def test_a_peer_that_says_hello_and_goodbye_in_one_breath_is_not_dialled_in_a_loop() -> None:
    """A call that waits for the hello is one dial and fails at once; one without tensors has left by then, and its
    answer is waited for no longer than it says. Connections with others stay."""
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
        transport = network.transport("a", ALICE)
        async with open_rpc_peer(transport, peer_id=ALICE, max_outgoing_connections=8) as alice:
            addresses = []
            for index in range(9):
                peer_id, host = PeerId(bytes([index]) * 32), f"h{index}"
                serve = slow_to_say_hello(peer_id)
                addresses.append(await listen_as(network.transport(host, peer_id), host, serve, nursery))
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
