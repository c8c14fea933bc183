"""Further connections for bulk: when they come and go, who uses them, and who never hears of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio

from dmoe_net.errors import CallRefused
from dmoe_net.identity import Address
from dmoe_net.rpc.base import Reply, Request
from dmoe_net.rpc.connections import LANE_IDLE_S
from dmoe_net.rpc.lanes import _State
from dmoe_net.rpc.peer import RpcPeer, open_rpc_peer
from dmoe_net.rpc.service import LANES, MAX_LANES
from dmoe_net.transport.sim import Constant, HostOptions, simulate
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.transport.tls import TlsTransport
from dmoe_net.wire.messages import Hello, encode_message, parse_untrusted
from tests.net.rpc_peers import ANY_PORT, CLIENT, LONG_S, SERVER
from tests.net.sim_hosts import in_simulation, peer
from tests.net.tls_peers import ALICE, BOB, OPEN

MIB = 2**20
PIECE = np.zeros(MIB, np.uint8)


async def give(_: Request) -> Reply:
    return Reply(tensors=(PIECE,))


@asynccontextmanager
async def pair(*, round_trip_s: float, gbps: float = 1.0) -> AsyncIterator[tuple[RpcPeer, RpcPeer, Address]]:
    """A client, and a server that gives pieces of 1 MiB, over a line."""
    line = HostOptions(up_bps=1e9 * gbps, down_bps=1e9 * gbps)
    async with (
        simulate(latency=Constant(round_trip_s / 2), hosts=line, tick_s=0.0001) as network,
        open_rpc_peer(network.transport("b", peer("b")), peer_id=peer("b"), listen=Address("b", 1)) as server,
        open_rpc_peer(network.transport("a", peer("a")), peer_id=peer("a")) as client,
    ):
        server.add_handler("give", give, max_concurrent=1000)
        assert server.address is not None
        yield server, client, server.address


async def fetch(client: RpcPeer, address: Address, *, count: int, at_once: int = 16) -> float:
    """So many pieces; how long that takes."""
    began, left = trio.current_time(), iter(range(count))

    async def some() -> None:
        for _ in left:
            reply = await client.call(address, "give", {}, timeout_s=LONG_S, bulk_bytes=MIB)
            assert len(reply.tensors) == 1

    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(some)
    return trio.current_time() - began


def num_lanes(caller: RpcPeer) -> int:
    return sum(connection.is_lane for connection in caller._connections)


@in_simulation
async def test_long_lines_get_lanes_and_idle_lanes_go() -> None:
    """1 Gb/s at 100 ms is 12.5 MB under way, and one connection has 4 MiB: with lanes 128 MiB take little more than the
    1.07 s that the line takes. Afterwards both ends close them, and keep the first connection."""
    async with pair(round_trip_s=0.1) as (server, client, address):
        await fetch(client, address, count=64, at_once=32)
        assert 2 <= num_lanes(client) <= MAX_LANES
        assert num_lanes(server) == num_lanes(client)
        assert await fetch(client, address, count=128, at_once=32) < 1.35
        await trio.sleep(2 * LANE_IDLE_S)
        assert num_lanes(client) == num_lanes(server) == 0
        assert len(list(client._connections)) == 1


@pytest.mark.parametrize(("round_trip_s", "gbps"), [(0.0005, 10.0), (0.1, 0.05)])
def test_short_and_slow_lines_get_none(round_trip_s: float, gbps: float) -> None:
    """As on one machine; and 50 Mb/s at 100 ms, which are 0.6 MB under way."""

    @in_simulation
    async def test() -> None:
        async with pair(round_trip_s=round_trip_s, gbps=gbps) as (_, client, address):
            await fetch(client, address, count=32)
            assert num_lanes(client) == 0

    test()


@in_simulation
async def test_a_peer_of_an_earlier_version_is_left_in_peace() -> None:
    """It does not know the method that asks: one connection, and all goes on over that."""
    async with pair(round_trip_s=0.1) as (server, client, address):
        del server._service._methods[LANES]
        with pytest.raises(CallRefused, match="unknown method"):
            await client.call(address, LANES, {}, timeout_s=LONG_S)
        await fetch(client, address, count=64, at_once=32)
        assert len(list(server._connections)) == 1


@in_simulation
async def test_small_calls_do_not_wait_for_bulk() -> None:
    """While 16 calls of 1 MiB are under way, a ping takes no longer with lanes than it takes on one connection alone,
    where it waits for what the link has taken over: the uplink that all share holds half a MiB for each."""
    slowest: dict[bool, float] = {}
    for with_lanes in (True, False):
        async with pair(round_trip_s=0.1) as (server, client, address):
            if not with_lanes:
                del server._service._methods[LANES]
            await fetch(client, address, count=64, at_once=32)
            times: list[float] = []

            async def ping() -> None:
                for _ in range(10):
                    began = trio.current_time()
                    await client.call(address, "rpc.ping", {}, timeout_s=LONG_S)
                    times.append(trio.current_time() - began)  # noqa: B023

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ping)
                await fetch(client, address, count=128, at_once=16)
            slowest[with_lanes] = max(times)
    assert slowest[True] <= slowest[False] + 0.05


async def check_a_lane(server: RpcPeer, client: RpcPeer) -> None:
    """A lane that the client dials takes bulk calls of both ends and no others, and its end is no end of anything."""
    address = server.address
    assert address is not None
    server.add_handler("give", give)
    client.add_handler("give", give)
    for caller in (client, server):
        caller._connections.has_room_for_a_lane = lambda: False  # no others, whatever a busy machine makes of the way
    await client.call(address, "rpc.ping", {}, timeout_s=LONG_S)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client._lanes._open, server.peer_id, address, _State(num_opening=1))
        with trio.fail_after(20.0):
            while not (client._connections.lanes(server.peer_id) and num_lanes(server)):
                await trio.lowlevel.checkpoint()
        for caller, other in ((client, server), (server, client)):
            (lane,) = caller._connections.lanes(other.peer_id)
            first = caller._connections.find(other.peer_id)
            assert first is not None
            assert first is not lane
            target = address if caller is client else Address("127.0.0.1", 9)
            before = lane.session._last_placed
            await caller._lanes.call(
                first, target, "give", {}, (), deadline=trio.current_time() + LONG_S, bulk_bytes=MIB
            )
            assert lane.session._last_placed == before + 1
        await client.call(address, "rpc.ping", {}, timeout_s=LONG_S)
        (lane,) = client._connections.lanes(server.peer_id)
        lane.leave()
        with trio.fail_after(20.0):
            while num_lanes(server):
                await trio.lowlevel.checkpoint()
    await client.call(address, "give", {}, timeout_s=LONG_S, bulk_bytes=MIB)


async def test_lanes_over_tcp() -> None:
    """On the real network."""
    async with (
        open_rpc_peer(TcpTransport(), peer_id=SERVER, listen=ANY_PORT) as server,
        open_rpc_peer(TcpTransport(), peer_id=CLIENT) as client,
    ):
        await check_a_lane(server, client)


async def test_lanes_over_tls() -> None:
    """Encrypted and proved."""
    ours, theirs = TlsTransport(ALICE, membership=OPEN), TlsTransport(BOB, membership=OPEN)
    async with (
        open_rpc_peer(ours, peer_id=ALICE.peer_id, listen=ANY_PORT) as server,
        open_rpc_peer(theirs, peer_id=BOB.peer_id) as client,
    ):
        await check_a_lane(server, client)


@in_simulation
async def test_only_so_many_lanes_are_taken_from_one_peer() -> None:
    """One that dials more than it was told gets no further ones."""
    async with pair(round_trip_s=0.01) as (server, client, address), trio.open_nursery() as nursery:
        await client.call(address, "rpc.ping", {}, timeout_s=LONG_S)
        for _ in range(MAX_LANES + 5):
            nursery.start_soon(client._lanes._open, server.peer_id, address, _State(num_opening=1))
        await trio.sleep(5.0)
        # Each end parts from those that come when it has as many; in which order they come may differ.
        assert 2 < len(server._connections.lanes(client.peer_id)) <= MAX_LANES
        assert len(client._connections.lanes(server.peer_id)) == len(server._connections.lanes(client.peer_id))
        nursery.cancel_scope.cancel()


def test_the_mark_of_a_lane() -> None:
    """Is there or is not: without it a greeting has the very bytes that it always had, and no other value will do."""
    hello = Hello(peer_id=peer("a"), instance=bytes(8), port=None, window_bytes=2**20)
    assert "lane" not in encode_message(hello).frame.header
    marked = encode_message(Hello(peer_id=peer("a"), instance=bytes(8), port=None, window_bytes=2**20, lane=True))
    assert parse_untrusted(marked.frame).lane  # type: ignore[union-attr]
    for wrong in (False, 1, None):
        frame = encode_message(hello).frame
        frame.header["lane"] = wrong
        with pytest.raises(Exception, match="must have the fields"):
            parse_untrusted(frame)
