"""The peers that one node knows: those that answer, those that are left alone, and those that got lost.

A peer enters the table when it has *answered* (a claim in a request is checked by a ping first, unless its bucket is
full). A peer that does not answer leaves the table, is left alone for a while, and is remembered among the lost, to be
tried again later: so a swarm that was split finds itself again. One answer clears everything.
"""

import random
from collections.abc import Callable, Iterable

from dmoe_net.dht.config import DhtConfig
from dmoe_net.dht.routing_table import NodeId, RoutingTable, node_id
from dmoe_net.identity import Contact, PeerId
from dmoe_net.peer_health import PeerHealth

ANSWERS = "dht.answers"
"""`(peer_id, ANSWERS)` is healthy if the peer answers as one of the DHT does; to RPC, which feeds `(peer_id, "dht")`,
nonsense and refusals are answers, too."""

MAX_LOST = 256
"""Most lost peers remembered: enough to find one survivor of the other half."""


class PeerBook:
    """Every `now` is a time of the clock of `health`.

    Args:
      check: called with each contact to be pinged: a caller that may be new, or a contact that was not seen for long
        and in whose place a newcomer could stand.
      hand_over: called with each newcomer to the table, to which records may have to be handed over.
    """

    def __init__(
        self,
        local_id: NodeId,
        *,
        config: DhtConfig,
        health: PeerHealth,
        now: float,
        check: Callable[[Contact], None],
        hand_over: Callable[[Contact], None],
    ) -> None:
        self.table = RoutingTable(local_id, bucket_size=config.bucket_size, depth_modulo=config.depth_modulo, now=now)
        self._health = health
        self._pause = config.pause
        self._check_after_s = config.check_after_s
        self._check = check
        self._hand_over = hand_over
        self._lost: dict[PeerId, Contact] = {}  # from longest to most recently lost

    def answered(self, contact: Contact, now: float) -> None:
        """Note that the peer answered a call at this address."""
        self._health.succeeded((contact.peer_id, ANSWERS))
        self._lost.pop(contact.peer_id, None)
        was_known = contact.peer_id in self.table
        self._add(contact, now)
        if not was_known and contact.peer_id in self.table:
            self._hand_over(contact)

    def failed(self, contact: Contact, now: float, reason: str) -> None:
        """Note that the peer did not answer, or answered what no peer of the DHT answers."""
        target = (contact.peer_id, ANSWERS)
        if not self._health.blocks(target, now, self._pause):  # calls that were under way together fail together
            self._health.failed(target, now, reason)
        if self.table.remove(contact.peer_id):
            self._lost[contact.peer_id] = contact
            if len(self._lost) > MAX_LOST:
                del self._lost[next(iter(self._lost))]

    def heard_from(self, contact: Contact, now: float) -> None:
        """Note that the peer called, and says that it listens at this address."""
        if node_id(contact.peer_id) == self.table.local_id:
            return
        seen = self.table.get(contact.peer_id)
        if self.table.has_room(contact.peer_id) if seen is None else seen.contact != contact:
            self._check(contact)
        else:
            # It is known; or it is one of the many callers in a large swarm that fall into full buckets. To ping them
            # all would double the traffic: they wait among the replacements until they are first asked something.
            self._add(contact, now)

    def _add(self, contact: Contact, now: float) -> None:
        oldest = self.table.add(contact, now)
        if oldest is not None and oldest.last_seen <= now - self._check_after_s:
            self._check(oldest.contact)

    def usable(self, contacts: Iterable[Contact], now: float) -> tuple[Contact, ...]:
        """The contacts that are not left alone."""
        return tuple(
            contact for contact in contacts if not self._health.blocks((contact.peer_id, ANSWERS), now, self._pause)
        )

    def left_alone(self, now: float) -> tuple[PeerId, ...]:
        """Every peer that is left alone, sorted."""
        return tuple(
            sorted(
                target[0]
                for target in self._health.blocked(now, self._pause)
                if isinstance(target, tuple) and target[1:] == (ANSWERS,)
            )
        )

    def owes(self, newcomer: Contact, key: NodeId, *, replicas: int) -> bool:
        """True if this node has to hand the record under `key` over to a peer that has just been met: the newcomer is
        among the `replicas` nearest, and this node is the nearest of the others."""
        others = (c for c in self.table.nearest(key, replicas + 1) if c.peer_id != newcomer.peer_id)
        own = self.table.local_id ^ key
        distances = sorted([own, *(node_id(contact.peer_id) ^ key for contact in others)])[:replicas]
        if distances[0] != own:
            return False
        return len(distances) < replicas or node_id(newcomer.peer_id) ^ key < distances[-1]

    def draw_lost(self, count: int, rng: random.Random) -> tuple[Contact, ...]:
        """Up to `count` lost peers, drawn at random, also those that are left alone."""
        return tuple(rng.sample(list(self._lost.values()), min(count, len(self._lost))))
