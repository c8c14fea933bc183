"""A swarm of DHT nodes, each on a host of its own, on the full simulator or on the light network."""

import itertools
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import trio

from dmoe_jax.directory.directory import Announcer
from dmoe_jax.directory.grid import ExpertUid
from dmoe_net.clock import SwarmClock
from dmoe_net.dht.node import DhtNode, open_dht_node
from dmoe_net.identity import Address, Contact
from dmoe_net.keys import Identity
from dmoe_net.rpc.base import Caller
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.sim import SimNetwork, simulate
from dmoe_net.transport.sim.calls import PORT, CallingPeer, CallNetwork
from dmoe_net.transport.sim.links import Exponential

Kind = Literal["full", "light"]

ROUND_TRIP_S = 0.1
"""Mean round trip between two hosts; each way is exponentially distributed, as in the paper."""

_AT_ONCE = 20  # nodes that join at the same time


@dataclass(eq=False)
class World:
    """The network and who is on it."""

    kind: Kind
    network: SimNetwork | CallNetwork
    seed: int
    rng: random.Random
    nodes: dict[str, DhtNode] = field(default_factory=dict)
    """Living nodes that listen, by host."""
    callers: dict[str, Caller] = field(default_factory=dict)
    """All callers that were opened, by host."""

    @property
    def light(self) -> CallNetwork:
        """The light network. Raises TypeError on the full one."""
        if not isinstance(self.network, CallNetwork):
            raise TypeError("this study wants the light network")
        return self.network

    @asynccontextmanager
    async def opened(
        self,
        host: str,
        *,
        listens: bool = True,
        initial: Sequence[Contact] | None = None,
        ahead_s: float = 0.0,
        remembered: Sequence[Contact] = (),
    ) -> AsyncIterator[DhtNode]:
        """A node that joins through three that are there, drawn at random, and leaves at the end of the block."""
        identity = Identity.from_seed(random.Random(f"{self.seed}/{host}").randbytes(32))
        if initial is None:
            known = list(self.nodes.values())
            initial = [contact_of(node) for node in self.rng.sample(known, min(3, len(known)))]
        async with AsyncExitStack() as stack:
            caller: Caller
            if isinstance(self.network, CallNetwork):
                caller = self.network.caller(host, identity.peer_id, listens=listens)
            else:
                transport = self.network.transport(host, identity.peer_id)
                here = Address(host, PORT) if listens else None
                caller = await stack.enter_async_context(
                    open_rpc_peer(transport, peer_id=identity.peer_id, listen=here)
                )
            self.callers[host] = caller
            clock = SwarmClock(start_s=1e9 + trio.current_time() + ahead_s)
            node = await stack.enter_async_context(
                open_dht_node(
                    caller,
                    identity=identity,
                    clock=clock,
                    rng=random.Random(f"{self.seed}/{host}/draws"),
                    initial_peers=initial,
                    remembered=remembered,
                )
            )
            if listens:
                self.nodes[host] = node
            try:
                yield node
            finally:
                self.nodes.pop(host, None)

    async def grow(self, count: int, stack: AsyncExitStack, *, ahead_s: Callable[[], float] = lambda: 0.0) -> None:
        """Let nodes `node0`, `node1`, ... join, some at a time, until there are so many; they stay as long as the
        stack is open."""
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)

        async def live(host: str, task_status: trio.TaskStatus[None]) -> None:
            async with self.opened(host, ahead_s=ahead_s()):
                task_status.started()
                await trio.sleep_forever()

        if not self.nodes and count:
            await nursery.start(live, "node0")
        for start in range(len(self.nodes), count, _AT_ONCE):
            async with trio.open_nursery() as joining:
                for index in range(start, min(count, start + _AT_ONCE)):
                    joining.start_soon(nursery.start, live, f"node{index}")

    def announcers(self, life_s: float = 30.0) -> list[Announcer]:
        """An announcer for each node, in the order of hosts' numbers."""
        return [Announcer(node, contact_of(node), life_s=life_s) for node in self.nodes.values()]


@asynccontextmanager
async def open_world(kind: Kind, *, seed: int, counts_bytes: bool = False) -> AsyncIterator[World]:
    """An empty network."""
    async with AsyncExitStack() as stack:
        latency = Exponential(ROUND_TRIP_S / 2)
        network: SimNetwork | CallNetwork = (
            CallNetwork(seed=seed, latency=latency, counts_bytes=counts_bytes)
            if kind == "light"
            else await stack.enter_async_context(simulate(seed=seed, latency=latency))
        )
        yield World(kind, network, seed, random.Random(f"{seed}/world"))


async def announce_all(announcers: Sequence[Announcer], uids: Sequence[Sequence[ExpertUid]]) -> None:
    """Announce experts, those of fifty nodes at a time."""
    pairs = list(zip(announcers, uids, strict=True))
    for start in range(0, len(pairs), 50):
        async with trio.open_nursery() as nursery:
            for announcer, own in pairs[start : start + 50]:
                nursery.start_soon(announcer.announce, own)


async def keep_announced(announcer: Announcer, uids: Sequence[ExpertUid], *, period_s: float, offset_s: float) -> None:
    """Announce experts every period, for ever."""
    await trio.sleep(offset_s)
    while True:
        await announcer.announce(uids)
        await trio.sleep(period_s)


def contact_of(node: DhtNode) -> Contact:
    """Contact of a node that listens."""
    assert node.address is not None
    return Contact(node.peer_id, node.address)


def dealt(uids: Sequence[ExpertUid], count: int) -> list[list[ExpertUid]]:
    """Cut experts into so many blocks of neighbours, as equal as can be."""
    each, rest = divmod(len(uids), count)
    cuts = [0]
    for index in range(count):
        cuts.append(cuts[-1] + each + (index < rest))
    return [list(uids[start:stop]) for start, stop in itertools.pairwise(cuts)]


def square(count: int) -> tuple[int, int]:
    """Sides of the smallest square grid with so many cells."""
    side = math.isqrt(count - 1) + 1
    return side, side


def calls_and_bytes(world: World, hosts: Sequence[str]) -> tuple[int, int, int]:
    """Calls that some hosts have placed, and bytes that they sent and received, on the light network."""
    callers = [caller for host in hosts if isinstance(caller := world.callers[host], CallingPeer)]
    return (
        sum(caller.num_placed for caller in callers),
        sum(caller.sent_bytes for caller in callers),
        sum(caller.received_bytes for caller in callers),
    )
