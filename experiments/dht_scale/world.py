"""A swarm of DHT nodes, each on a host of its own, on the full simulator or on the light network."""

import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import trio

from dmoe_jax.directory.directory import Announcer
from dmoe_jax.directory.grid import ExpertUid, all_uids
from dmoe_net import Address, Caller, Contact, DhtNode, Identity, PeerId, SwarmClock, open_dht_node, open_rpc_peer
from dmoe_net.transport.sim import SimNetwork, simulate
from dmoe_net.transport.sim.calls import PORT, CallingPeer, CallNetwork
from dmoe_net.transport.sim.links import Exponential

Kind = Literal["full", "light"]

_AT_ONCE = 20  # nodes that join at the same time, or a twentieth of a larger swarm


@dataclass(eq=False)
class World:
    """The network and who is on it. Made by `open_world`."""

    network: SimNetwork | CallNetwork
    seed: int
    stack: AsyncExitStack
    """Holds what stays until the end."""
    nursery: trio.Nursery
    """Tasks that go on until the end."""
    rng: random.Random
    nodes: dict[str, DhtNode] = field(default_factory=dict)
    """Living nodes that listen, by host."""
    callers: dict[str, CallingPeer] = field(default_factory=dict)
    """All callers that were opened on the light network, by host."""

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
        async with (
            self._caller(host, identity.peer_id, listens) as caller,
            open_dht_node(
                caller,
                identity=identity,
                clock=SwarmClock(start_s=1e9 + trio.current_time() + ahead_s),
                rng=random.Random(f"{self.seed}/{host}/draws"),
                initial_peers=self._drawn() if initial is None else initial,
                remembered=remembered,
            ) as node,
        ):
            if listens:
                self.nodes[host] = node
            try:
                yield node
            finally:
                self.nodes.pop(host, None)
                if not listens and host in self.callers:  # who listens may die silently
                    self.callers.pop(host).hang_up(tells=True)

    def _drawn(self) -> list[Contact]:
        """Contacts of three nodes."""
        known = list(self.nodes.values())
        return [contact_of(node) for node in self.rng.sample(known, min(3, len(known)))]

    def _caller(self, host: str, peer_id: PeerId, listens: bool) -> AbstractAsyncContextManager[Caller]:
        """The caller of a node."""
        if isinstance(self.network, CallNetwork):
            self.callers[host] = self.network.caller(host, peer_id, listens=listens)
            return nullcontext(self.callers[host])
        here = Address(host, PORT) if listens else None
        return open_rpc_peer(self.network.transport(host, peer_id), peer_id=peer_id, listen=here)

    async def grow(self, count: int, *, ahead_s: Callable[[], float] = lambda: 0.0) -> list[str]:
        """Let nodes `node0`, `node1`, ... join, some at a time, until there are so many; return their hosts."""

        async def live(host: str, task_status: trio.TaskStatus[None]) -> None:
            async with self.opened(host, ahead_s=ahead_s()):
                task_status.started()
                await trio.sleep_forever()

        await self.nursery.start(live, "node0")
        start = 1
        while start < count:
            end = min(count, start + max(_AT_ONCE, start // 20))
            async with trio.open_nursery() as joining:
                for index in range(start, end):
                    joining.start_soon(self.nursery.start, live, f"node{index}")
            start = end
        return list(self.nodes)

    async def announcers(self, uids: Sequence[Sequence[ExpertUid]], *, life_s: float = 30.0) -> list[Announcer]:
        """An announcer for each node, in the order of hosts' numbers, that has announced its experts."""
        announcers = [Announcer(node, contact_of(node), life_s=life_s) for node in self.nodes.values()]
        pairs = list(zip(announcers, uids, strict=True))
        at_once = max(50, len(pairs) // 20)
        for start in range(0, len(pairs), at_once):
            async with trio.open_nursery() as nursery:
                for announcer, own in pairs[start : start + at_once]:
                    nursery.start_soon(announcer.announce, own)
        return announcers

    def keep_announced(
        self, announcers: Sequence[Announcer], uids: Sequence[Sequence[ExpertUid]], nursery: trio.Nursery
    ) -> None:
        """Have experts announced every ten seconds, each announcer from a moment of its own on."""
        for announcer, own in zip(announcers, uids, strict=True):
            nursery.start_soon(keep_announced, announcer, own, self.rng.uniform(0, 10))

    def traffic(self, host: str) -> np.ndarray:
        """Calls that a host has placed on the light network, and bytes that it received, if they are counted."""
        return np.array([self.callers[host].num_placed, self.callers[host].received_bytes])


@asynccontextmanager
async def open_world(kind: Kind, *, seed: int) -> AsyncIterator[World]:
    """An empty network."""
    async with AsyncExitStack() as stack:
        latency = Exponential(0.05)  # each way; a round trip takes 100 ms in the mean, as in the paper
        network: SimNetwork | CallNetwork = (
            CallNetwork(seed=seed, latency=latency)
            if kind == "light"
            else await stack.enter_async_context(simulate(seed=seed, latency=latency))
        )
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        yield World(network, seed, stack, nursery, random.Random(f"{seed}/world"))


async def keep_announced(announcer: Announcer, uids: Sequence[ExpertUid], offset_s: float) -> None:
    """Announce experts every ten seconds, for ever."""
    await trio.sleep(offset_s)
    while True:
        await announcer.announce(uids)
        await trio.sleep(10.0)


def contact_of(node: DhtNode) -> Contact:
    """Contact of a node that listens."""
    assert node.address is not None
    return Contact(node.peer_id, node.address)


def square(count: int) -> tuple[int, int]:
    """Sides of the smallest square grid with so many cells."""
    side = math.isqrt(count - 1) + 1
    return side, side


def dealt(uids: Sequence[ExpertUid], count: int) -> list[list[ExpertUid]]:
    """Cut experts into so many blocks of neighbours, as equal as can be."""
    return [[uids[index] for index in block] for block in np.array_split(np.arange(len(uids)), count)]


def one_each(count: int) -> list[list[ExpertUid]]:
    """The first experts of a square grid, one for each of so many nodes."""
    return [[uid] for uid in all_uids("layer0", square(count))[:count]]
