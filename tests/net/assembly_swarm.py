"""Peers that look for groups on a simulated network, for the tests of averaging."""

import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import trio

from dmoe_net.averaging.grouping.group import Group, Member, Role
from dmoe_net.averaging.grouping.group_key import MoshpitGrid, group_key
from dmoe_net.averaging.grouping.join_messages import Candidate, declaration_of
from dmoe_net.averaging.grouping.matchmaker import Matchmaker
from dmoe_net.averaging.grouping.matchmaking import AssemblyConfig
from dmoe_net.dht.config import DhtConfig
from dmoe_net.dht.node import DhtNode
from dmoe_net.identity import Address, PeerId
from dmoe_net.rpc.base import Handler, Reply, Request
from dmoe_net.rpc.peer import RpcPeer
from dmoe_net.transport.sim import simulate
from dmoe_net.transport.sim.events import HostDown
from dmoe_net.transport.sim.links import Constant, Latency
from dmoe_net.transport.sim.network import SimNetwork
from tests.net.averaging_swarm import open_place_on

LATENCY = Constant(0.02)
LINE = MoshpitGrid(side=8, dims=1)
"""One group, of everybody: one key."""
SQUARE = MoshpitGrid(side=8, dims=2)
SCHEMA = b"a vector of 3"
CONFIG = AssemblyConfig()
SMALL_DHT = DhtConfig(bucket_size=6, replicas=3)
"""Enough for 64 peers, and a third of the calls."""


@dataclass(kw_only=True)
class Peer:
    """A process that averages."""

    host: str
    rpc: RpcPeer
    dht: DhtNode
    matchmaker: Matchmaker

    def member(self, **facts: Any) -> Member:
        role = Role.CLIENT if self.rpc.address is None else Role.NODE
        return Member(**{"peer_id": self.rpc.peer_id, "address": self.rpc.address, "role": role} | facts)

    async def find(self, seconds: float = 20.0, *, cell: int = 0, round_number: int = 0, **facts: Any) -> Group | None:
        """Search for so long at most; it must have ended by then."""
        deadline = self.dht.clock.now() + seconds
        group = await self.matchmaker.find_group(
            self.member(**facts), cell=cell, round_number=round_number, deadline=deadline
        )
        assert self.dht.clock.now() <= deadline + 1e-6
        return group

    async def find_with(
        self, peers: "Sequence[Peer]", begins_at: float, *, told_after_s: float, told: float
    ) -> Group | None:
        """Search with peers that are known to begin at that time, too; after a while it hears that they begin later."""

        async def hear() -> None:
            await trio.sleep(told_after_s)
            self.matchmaker.postpone(told)

        others = [each.member().contact for each in peers if each is not self]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hear)
            return await self.matchmaker.find_group(
                self.member(), cell=0, round_number=0, deadline=begins_at + 2.0, begins_at=begins_at, hints=others
            )


class Swarm:
    """Peers on a simulated network, each a program of a host."""

    def __init__(self, network: SimNetwork) -> None:
        self.network = network
        self.peers: list[Peer] = []

    async def add(
        self,
        *,
        grid: MoshpitGrid = LINE,
        schema: bytes = SCHEMA,
        client: bool = False,
        config: AssemblyConfig = CONFIG,
        fakes: Mapping[str, Handler] = MappingProxyType({}),
    ) -> Peer:
        """One more peer, in the DHT; with `fakes`, handlers by method, it has no searches of its own."""
        host = f"host{len(self.peers)}"
        is_ready = trio.Event()

        async def live() -> None:
            rng, root = random.Random(host), Address("host0", 1)
            opened = open_place_on(self.network, host, rng, client_mode=client, root=root, config=SMALL_DHT)
            async with opened as place:
                rpc, dht = place.rpc, place.dht
                for method, handler in fakes.items():
                    rpc.add_handler(f"averaging.model.{method}", handler)
                prefix = "unused" if fakes else "model"
                matchmaker = Matchmaker(rpc, dht, prefix=prefix, grid=grid, schema=schema, rng=rng, config=config)
                self.peers.append(Peer(host=host, rpc=rpc, dht=dht, matchmaker=matchmaker))
                is_ready.set()
                await trio.sleep_forever()

        self.network.start(host, live)
        await is_ready.wait()
        return self.peers[-1]

    def take_down(self, peer: Peer) -> None:
        """It dies without a word."""
        self.network.apply(HostDown(peer.host, silent=True))


@asynccontextmanager
async def swarm(count: int = 0, *, latency: Latency = LATENCY, seed: int = 0, **options: Any) -> AsyncIterator[Swarm]:
    """So many peers of one kind, and room for others."""
    async with simulate(latency=latency, seed=seed) as network:
        peers = Swarm(network)
        for _ in range(count):
            await peers.add(**options)
        yield peers


async def cancelled_after(delay_s: float, search: Callable[[], Awaitable[Any]]) -> None:
    """Begin a search and give it up before it ends."""
    with trio.move_on_after(delay_s):
        await search()
        raise AssertionError("it found a group")


async def gather(*searches: Callable[[], Awaitable[Group | None]]) -> list[Group | None]:
    """Their outcomes, all at once."""
    found: list[Group | None] = [None] * len(searches)

    async def search(index: int) -> None:
        found[index] = await searches[index]()

    async with trio.open_nursery() as nursery:
        for index in range(len(searches)):
            nursery.start_soon(search, index)
    return found


async def find_later(peer: Peer, delay_s: float, seconds: float = 20.0) -> Group | None:
    await trio.sleep(delay_s)
    return await peer.find(seconds)


def ids(group: Group | None) -> set[PeerId]:
    """Ids of the members of a group, which must not be None."""
    return {member.peer_id for member in group.members}


def check_disjoint(peers: Sequence[Peer], found: Sequence[Group | None]) -> None:
    """Those with one group id have one and the same group, are in it, and nobody is in two."""
    groups = {group.group_id: group for group in found if group is not None}
    for peer, group in zip(peers, found, strict=True):
        assert group is None or (group == groups[group.group_id] and peer.rpc.peer_id in ids(group))
    counts = Counter(peer_id for group in groups.values() for peer_id in ids(group))
    assert set(counts.values()) <= {1}


def declare(peer: Peer, *, grid: MoshpitGrid = LINE, lives_s: float = 1.0) -> Awaitable[int]:
    """Leave a declaration in the DHT as if the peer looked for a group."""
    expiration = peer.dht.clock.now() + lives_s
    value = declaration_of(Candidate(contact=peer.member().contact, expiration=expiration))
    return peer.dht.store(group_key("model", grid, 0, 0), value, life_s=lives_s)


def willing_until(end_s: float) -> Handler:
    """Serve `ask`: we gather until so many seconds from the start of the simulation."""

    async def ask(request: Request) -> Reply:
        del request
        return Reply(body={"expiration": end_s})

    return ask
