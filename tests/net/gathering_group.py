"""A group that gathers, on the simulated network, and members of it that misbehave."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
import trio

from net.averaging.gathering import AllGather, GatherConfig, Gathered
from net.averaging.grouping.group import Group, Member, Role
from net.identity import Address
from net.rpc.peer import RpcPeer, open_rpc_peer
from net.transport.sim import run, simulate
from net.transport.sim.links import Constant
from net.transport.sim.network import SimNetwork
from net.types import Array
from tests.net.sim_hosts import peer

T = 2.0
CONFIG = GatherConfig(chunk_bytes=100, window_bytes=200, sender_timeout_s=T)
TIMEOUT_S = 20.0
"""Two pieces under way towards each of the others."""
NBYTES = 950
"""Ten pieces, the last of 50 bytes."""
GROUP_ID = b"g" * 16


def payload_of(place: int, nbytes: int = NBYTES) -> Array:
    """A member's own bytes."""
    return np.random.default_rng(place).integers(0, 256, nbytes, np.uint8)


class Members:
    """Peers 50 ms apart that make one group."""

    def __init__(self, network: SimNetwork, callers: Sequence[RpcPeer], group: Group) -> None:
        self.network = network
        self.callers = callers
        self.group = group

    async def gather(
        self,
        places: Collection[int],
        config: GatherConfig = CONFIG,
        payloads: Mapping[int, Array] = MappingProxyType({}),
    ) -> dict[int, Gathered]:
        """What came of it, for those of these places that came to an end."""
        found: dict[int, Gathered] = {}

        async def one(place: int) -> None:
            gather = AllGather(self.callers[place], prefix="x", config=config)
            payload = payloads.get(place, payload_of(place))
            found[place] = await gather.run(self.group, payload, timeout_s=TIMEOUT_S)

        async with trio.open_nursery() as nursery:
            for place in places:
                nursery.start_soon(one, place)
        return found

    async def bring(self, of: int, to: int, starts: Sequence[int], piece: Any = None, **body: Any) -> None:
        """One member brings pieces of its payload to another, or what a test wants in their place."""
        payload = payload_of(of)
        for start in starts:
            sent = payload[start : start + CONFIG.chunk_bytes] if piece is None else piece
            named = {"group": GROUP_ID, "size": NBYTES, "start": start, **body}
            contact = self.group.members[to].contact
            await self.callers[of].call(contact, "averaging.x.bring", named, (sent,), timeout_s=5.0)


@asynccontextmanager
async def open_members(count: int, clients: Collection[int] = ()) -> AsyncIterator[Members]:
    """So many, of which some cannot be called."""
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(simulate(latency=Constant(0.05)))
        callers, members = [], []
        for place in range(count):
            host, is_client = f"host{place}", place in clients
            opened = open_rpc_peer(
                network.transport(host, peer(host)), peer_id=peer(host), listen=None if is_client else Address(host, 7)
            )
            callers.append(await stack.enter_async_context(opened))
            role = Role.CLIENT if is_client else Role.NODE
            members.append(
                Member(
                    peer_id=peer(host), address=callers[-1].address, role=role, wanted_slot=place, weight=place + 1.0
                )
            )
        yield Members(network, callers, Group(group_id=GROUP_ID, members=tuple(members), side=count))


def with_members(body: Callable[[Members], Awaitable[None]], count: int, clients: Collection[int] = ()) -> None:
    """Run a test's body in virtual time."""

    async def main() -> None:
        async with open_members(count, clients) as members:
            await body(members)

    run(main)
