"""A group that gathers, on the simulated network, and members of it that misbehave."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
import trio

from dmoe_net.averaging.gathering import AllGather, GatherConfig, Gathered
from dmoe_net.averaging.grouping.group import Group, Role
from dmoe_net.rpc.peer import RpcPeer
from dmoe_net.transport.sim.network import SimNetwork
from dmoe_net.types import Array
from tests.net.all_reduce_swarm import open_members

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
        meanwhile: Callable[[], Awaitable[object]] | None = None,
    ) -> dict[int, Gathered]:
        """Results of a gathering, by place, for those of these places that came to an end; others act meanwhile."""
        found: dict[int, Gathered] = {}

        async def one(place: int) -> None:
            gather = AllGather(self.callers[place], prefix="x", config=config)
            payload = payloads.get(place, payload_of(place))
            found[place] = await gather.run(self.group, payload, timeout_s=TIMEOUT_S)

        async with trio.open_nursery() as nursery:
            for place in places:
                nursery.start_soon(one, place)
            if meanwhile is not None:
                await meanwhile()
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
async def open_group(count: int, clients: Collection[int] = ()) -> AsyncIterator[Members]:
    """So many members, of which some cannot be called."""
    roles = [Role.CLIENT if place in clients else Role.NODE for place in range(count)]
    facts = {place: {"role": role, "weight": place + 1.0} for place, role in enumerate(roles)}
    async with open_members(count, facts) as (network, callers, members):
        yield Members(network, callers, Group(group_id=GROUP_ID, members=tuple(members), side=count))
