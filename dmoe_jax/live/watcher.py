"""Readings of a swarm, one after the other: for the live page, and for recordings."""

from dataclasses import dataclass, field

import trio

from dmoe_jax.directory.members import list_members, node_statuses
from dmoe_jax.live.events import State
from dmoe_jax.live.snapshot import Reading, snapshot
from dmoe_net.dht.node import DhtNode
from dmoe_net.rpc.base import Caller


@dataclass(kw_only=True, eq=False)
class Watcher:
    """Looks at a swarm as one of its clients."""

    rpc: Caller
    dht: DhtNode
    swarm: str
    began: float = field(default_factory=trio.current_time)
    """Time by trio's clock from which seconds count."""
    _last: Reading | None = field(default=None, init=False)
    _state: State = field(default_factory=dict, init=False)

    async def look(self) -> tuple[float, State]:
        """Ask everybody; return the seconds since the beginning, and the state. Nodes that do not answer within two
        seconds are shown so."""
        members = await list_members(self.dht, self.swarm)
        statuses = await node_statuses(self.rpc, members)
        now = Reading(time_s=trio.current_time() - self.began, members=members, statuses=statuses)
        self._state = snapshot(now, self._last, self._state.get("news", ()))
        self._last = now
        return now.time_s, self._state
