"""Further connections for bulk: when they come and go, who uses them, and who never hears of them; and answers that are
waited for as long as anything moves, and no longer."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import numpy as np
import pytest
import trio

from dmoe_net.errors import PeerTimeout, PeerUnavailable, RemoteProtocolError
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.rpc.base import Reply, Request, handlers
from dmoe_net.rpc.connections import LANE_IDLE_S
from dmoe_net.rpc.faults import Fault, FaultInjector, FaultPlan
from dmoe_net.rpc.liveness import call_living, ping
from dmoe_net.rpc.peer import RpcPeer, open_rpc_peer
from dmoe_net.rpc.service import LANES, MAX_LANES
from dmoe_net.transport.base import Link, Transport
from dmoe_net.transport.sim import Constant, simulate
from dmoe_net.transport.sim.events import HostDown
from dmoe_net.transport.sim.links import HostOptions
from dmoe_net.transport.sim.network import SimNetwork
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.transport.tls import TlsTransport
from dmoe_net.wire.messages import Goodbye, Hello, encode_message, parse_untrusted
from tests.net.rpc_peers import ANY_PORT, CLIENT, LONG_S, SERVER, hello
from tests.net.sim_hosts import in_simulation, peer
from tests.net.tls_peers import ALICE, BOB, OPEN

NO_LANES = FaultInjector(FaultPlan(rates={Fault.REFUSE: 1.0}, methods=(LANES,)))
"""For a peer of an earlier version, which refuses the method that asks, since it does not know it."""
FAR = FaultInjector(FaultPlan(rates={Fault.LATE: 1.0}, methods=(LANES,), late_mean_s=0.2))
"""For a peer that seems to be at the end of a long line: its answer to that method tells the round trip."""
MIB = 2**20
PIECE = np.zeros(MIB, np.uint8)


async def give(_: Request) -> Reply:
    return Reply(tensors=(PIECE,))


@asynccontextmanager
async def pair(
    *, round_trip_s: float, gbps: float = 1.0, faults: FaultInjector | None = None
) -> AsyncIterator[tuple[RpcPeer, RpcPeer, Address]]:
    """A client, and a server that gives pieces of 1 MiB, over a line."""
    line = HostOptions(up_bps=1e9 * gbps, down_bps=1e9 * gbps)
    async with (
        simulate(latency=Constant(round_trip_s / 2), hosts=line, tick_s=0.0001) as network,
        open_server(network, faults=faults) as server,
        open_rpc_peer(network.transport("a", peer("a")), peer_id=peer("a")) as client,
    ):
        server.add_handler("give", give, max_concurrent=1000)
        yield server, client, server.address


def open_server(network: SimNetwork, **options: FaultInjector | None) -> AbstractAsyncContextManager[RpcPeer]:
    return open_rpc_peer(network.transport("b", peer("b")), peer_id=peer("b"), listen=Address("b", 1), **options)


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
    """Connections beyond the first, in a swarm of two."""
    return caller.statistics().outgoing + caller.statistics().incoming - 1


@in_simulation
async def test_long_lines_get_lanes_and_idle_lanes_go() -> None:
    """128 MiB take little more than 1.07 s at 1 Gb/s and 100 ms, 12.5 MB under way, though a connection has 4 MiB."""
    async with pair(round_trip_s=0.1) as (server, client, address):
        await fetch(client, address, count=64, at_once=32)
        await trio.sleep(1.0)
        assert 2 <= num_lanes(client) <= MAX_LANES
        assert num_lanes(server) == num_lanes(client)
        assert await fetch(client, address, count=128, at_once=32) < 1.35
        for _ in range(2):  # the first connection is not to go for want of calls
            await client.call(address, "rpc.ping", {}, timeout_s=LONG_S)
            await trio.sleep(LANE_IDLE_S)
        assert num_lanes(client) == num_lanes(server) == 0


@pytest.mark.parametrize(("round_trip_s", "gbps"), [(0.0005, 10.0), (0.1, 0.05)])
@in_simulation
async def test_short_and_slow_lines_get_none(round_trip_s: float, gbps: float) -> None:
    """One connection fills the line on one machine, and at 50 Mb/s and 100 ms, which are 0.6 MB under way."""
    async with pair(round_trip_s=round_trip_s, gbps=gbps) as (_, client, address):
        await fetch(client, address, count=32)
        assert num_lanes(client) == 0


@in_simulation
async def test_small_calls_do_not_wait_for_bulk() -> None:
    """A ping beside 16 calls of 1 MiB takes no longer with lanes than behind half a MiB for each on one connection."""
    slowest: list[float] = []
    for faults in (None, NO_LANES):
        async with pair(round_trip_s=0.1, faults=faults) as (server, client, address):
            await fetch(client, address, count=64, at_once=32)
            assert (num_lanes(server) == 0) == (faults is NO_LANES)
            times: list[float] = []

            async def ping() -> None:
                for _ in range(10):
                    began = trio.current_time()
                    await client.call(address, "rpc.ping", {}, timeout_s=LONG_S)
                    times.append(trio.current_time() - began)  # noqa: B023

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ping)
                await fetch(client, address, count=128, at_once=16)
            slowest.append(max(times))
    assert slowest[0] <= slowest[1] + 0.05


class Watched:
    """A transport that remembers the links that it has dialled."""

    def __init__(self, transport: Transport) -> None:
        self.peer_id, self.listen = transport.peer_id, transport.listen
        self.links: list[Link] = []
        self._dial = transport.dial

    async def dial(self, address: Address, *, peer_id: PeerId | None = None) -> Link:
        self.links.append(await self._dial(address, peer_id=peer_id))
        return self.links[-1]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(TcpTransport(), TcpTransport()), (TlsTransport(ALICE, membership=OPEN), TlsTransport(BOB, membership=OPEN))],
    ids=["tcp", "tls"],
)
async def test_lanes_on_real_networks(ours: Transport, theirs: Transport) -> None:
    """Lanes take the bulk calls of both ends, and no others; their end is no end of anything."""
    watched = Watched(theirs)
    async with (
        open_rpc_peer(ours, peer_id=ours.peer_id or SERVER, listen=ANY_PORT, faults=FAR) as server,
        open_rpc_peer(watched, peer_id=theirs.peer_id or CLIENT, faults=FAR) as client,
    ):
        for each in (server, client):
            each.add_handler("give", give)
        await fetch(client, server.address, count=64)
        first, *lanes = watched.links
        assert 1 <= len(lanes) <= MAX_LANES
        with trio.fail_after(20.0):
            while num_lanes(server) < len(lanes):
                await trio.lowlevel.checkpoint()
        before = first.num_moved
        await fetch(client, server.address, count=4, at_once=1)
        sent = sum(lane.num_sent for lane in watched.links[1:])
        nowhere = Contact(client.peer_id, Address("127.0.0.1", 9))
        await server.call(nowhere, "give", {}, timeout_s=LONG_S, bulk_bytes=MIB)
        assert sum(lane.num_sent for lane in watched.links[1:]) >= sent + MIB
        assert first.num_moved < before + MIB
        before = first.num_moved
        await client.call(server.address, "give", {}, timeout_s=LONG_S)  # without a word of bulk
        assert first.num_moved >= before + MIB
        with trio.fail_after(20.0):
            while num_lanes(client) or num_lanes(server):
                for lane in watched.links[1:]:  # one may have come just now
                    lane.abort()
                await trio.lowlevel.checkpoint()
        await fetch(client, server.address, count=4)


@in_simulation
async def test_only_so_many_lanes_are_taken_from_one_peer() -> None:
    async with simulate() as network, open_server(network):
        links, num_parted, transport = list[Link](), 0, network.transport("a", peer("a"))
        for number in range(1 + MAX_LANES + 5):
            links.append(await transport.dial(Address("b", 1)))
            await links[-1].send(hello(peer("a"), lane=number > 0))
            with trio.move_on_after(0.3):
                while (frame := await links[-1].receive()) is not None:
                    num_parted += isinstance(parse_untrusted(frame), Goodbye)
        assert num_parted == 5


@pytest.mark.parametrize("wrong", [False, 1, None])
def test_a_mark_of_a_lane_that_is_none_is_refused(wrong: object) -> None:
    """A greeting has it or has it not; see the golden frames for both."""
    frame = encode_message(Hello(peer_id=peer("a"), instance=bytes(8), port=None, window_bytes=2**20)).frame
    frame.header["lane"] = wrong
    with pytest.raises(RemoteProtocolError, match="must have the fields"):
        parse_untrusted(frame)


def slow(name: str) -> HostOptions:
    return HostOptions(up_bps=1e6) if name == "there" else HostOptions()


@in_simulation
async def test_an_answer_behind_bulk_is_waited_for_and_a_dead_peer_is_not() -> None:
    async def much(request: Request) -> Reply:
        return Reply(tensors=(np.zeros(2**18, np.float32),))

    async with (
        simulate(hosts=slow) as network,
        open_rpc_peer(network.transport("here", peer("here")), peer_id=peer("here")) as here,
        trio.open_nursery() as nursery,
    ):

        async def live() -> None:
            listen = Address("there", 1)
            transport = network.transport("there", peer("there"))
            async with open_rpc_peer(transport, peer_id=peer("there"), listen=listen) as there:
                with handlers(there, {"much": much}):
                    await trio.sleep_forever()

        network.start("there", live)
        target = Contact(peer("there"), Address("there", 1))
        await ping(here, target, silence_s=1.0)

        async def fetch() -> None:
            await here.call(target, "much", {}, timeout_s=100.0)

        for _ in range(4):  # 8 s each alone
            nursery.start_soon(fetch)
        await trio.sleep(1.0)
        began = trio.current_time()
        await call_living(here, target, "much", {}, silence_s=6.0, timeout_s=100.0)
        assert trio.current_time() - began > 12.0
        with pytest.raises(PeerTimeout):
            await call_living(here, target, "much", {}, silence_s=6.0, timeout_s=3.0)

        network.apply(HostDown("there", silent=True))
        began = trio.current_time()
        with pytest.raises(PeerUnavailable):
            await ping(here, target, silence_s=2.0)
        assert trio.current_time() - began <= 2.0 + 1.0
