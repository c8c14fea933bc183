"""The peers that one node knows: those that answer, those that are left alone, and those that got lost.

A peer enters the table when it has *answered at its address*: on a connection that was dialled there, for a peer that
called us answers on its own connection, whatever it says of its address. Others are checked by a dial first, unless
their bucket is full. A peer that does not answer leaves the table, is left alone for a while, and is remembered among
the lost, to be tried again later: so a swarm that was split finds itself again. One answer clears everything.
"""

import math
import random
from collections.abc import Callable, Iterable

from dmoe_net.dht.config import DhtConfig
from dmoe_net.dht.messages import MAX_DEAD
from dmoe_net.dht.routing_table import NodeId, RoutingTable, node_id
from dmoe_net.identity import Contact, PeerId
from dmoe_net.peer_health import PeerHealth

ANSWERS = "dht.answers"
"""`(contact, ANSWERS)` is healthy if the peer answers there as one of the DHT does. To RPC, which feeds
`(peer_id, "dht")`, nonsense and refusals are answers, too."""

_DEAD_S = 60.0  # for which a peer that died is named to others
_DOUBT_S = 5.0  # a contact seen since then is not checked because another peer doubts it

MAX_LOST = 256
"""Most lost peers remembered: enough to find one survivor of the other half."""


class PeerBook:
    """Every `now` is a time of the clock of `health`.

    Args:
      check: called with each contact to be pinged: a caller that may be new, or a contact that was not seen for long
        and in whose place a newcomer could stand.
      hand_over: called with each newcomer to the table, to which records may have to be handed over.
      is_reached: returns True if a connection with the contact was dialled at its address.
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
        is_reached: Callable[[Contact], bool],
    ) -> None:
        self.table = RoutingTable(local_id, bucket_size=config.bucket_size, depth_modulo=config.depth_modulo, now=now)
        self._health = health
        self._pause = config.pause
        self._check_after_s = config.check_after_s
        self._check = check
        self._hand_over = hand_over
        self._is_reached = is_reached
        self._died: dict[PeerId, float] = {}  # when, the last one last
        self._doubted: dict[PeerId, float] = {}  # by others, and checked then
        self._lost: dict[PeerId, Contact] = {}  # from longest to most recently lost

    def answered(self, contact: Contact, now: float) -> None:
        """Note that the peer answered a call."""
        self._health.succeeded((contact, ANSWERS))
        self._died.pop(contact.peer_id, None)
        seen = self.table.get(contact.peer_id)
        if (seen is None or seen.contact != contact) and not self._is_reached(contact):
            self._check(contact)
            return
        self._lost.pop(contact.peer_id, None)
        self._add(contact, now)
        if seen is None and contact.peer_id in self.table:
            self._hand_over(contact)

    def failed(self, contact: Contact, now: float, reason: str) -> None:
        """Note that the peer did not answer, or answered what no peer of the DHT answers."""
        target = (contact, ANSWERS)
        if not self._health.blocks(target, now, self._pause):  # calls that were under way together fail together
            self._health.failed(target, now, reason)
        seen = self.table.get(contact.peer_id)
        # A stranger may have named a peer at an address that is not its own: that says nothing of the peer.
        if seen is not None and seen.contact == contact and self.table.remove(contact.peer_id):
            self._died.pop(contact.peer_id, None)
            self._died[contact.peer_id] = now
            if len(self._died) > MAX_DEAD:
                del self._died[next(iter(self._died))]
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
        elif seen is not None:
            self._add(seen.contact, now)
        # Else it is one of the many callers in a large swarm that fall into full buckets: to check them all would
        # double the traffic.

    def dead(self, now: float) -> tuple[PeerId, ...]:
        """Peers that were in the table and did not answer of late, for others to check."""
        return tuple(peer_id for peer_id, at in self._died.items() if at >= now - _DEAD_S)

    def doubted(self, peer_id: PeerId, now: float) -> None:
        """Note that another peer found this one dead: it is checked, unless it was seen since at its address."""
        seen = self.table.get(peer_id)
        if seen is None or self._doubted.get(peer_id, -math.inf) >= now - _DEAD_S:
            return
        if seen.last_seen >= now - _DOUBT_S and self._is_reached(seen.contact):
            return
        self._doubted.pop(peer_id, None)
        self._doubted[peer_id] = now
        if len(self._doubted) > MAX_LOST:
            del self._doubted[next(iter(self._doubted))]
        self._check(seen.contact)

    def _add(self, contact: Contact, now: float) -> None:
        oldest = self.table.add(contact, now)
        if oldest is not None and oldest.last_seen <= now - self._check_after_s:
            self._check(oldest.contact)

    def usable(self, contacts: Iterable[Contact], now: float) -> tuple[Contact, ...]:
        """The contacts that are not left alone."""
        return tuple(contact for contact in contacts if not self._health.blocks((contact, ANSWERS), now, self._pause))

    def left_alone(self, now: float) -> tuple[PeerId, ...]:
        """Every peer that is left alone at some address, sorted."""
        found = {
            target[0].peer_id
            for target in self._health.blocked(now, self._pause)
            if isinstance(target, tuple) and target[1:] == (ANSWERS,)
        }
        return tuple(sorted(found))

    def owes(self, newcomer: Contact, key: NodeId, *, replicas: int) -> bool:
        """True if this node has to hand the record under `key` over to a peer that has just been met: the newcomer is
        among the `replicas` nearest, and this node is the nearest of the others."""
        others = (c for c in self.table.nearest(key, replicas + 1) if c.peer_id != newcomer.peer_id)
        own = self.table.local_id ^ key
        distances = sorted([own, *(node_id(contact.peer_id) ^ key for contact in others)])[:replicas]
        if distances[0] != own:
            return False
        return len(distances) < replicas or node_id(newcomer.peer_id) ^ key < distances[-1]

    def remember(self, contacts: Iterable[Contact]) -> None:
        """Take peers of an earlier life in among the lost, to be tried by and by."""
        self._lost |= {contact.peer_id: contact for contact in list(contacts)[:MAX_LOST]}

    def draw_lost(self, count: int, rng: random.Random) -> tuple[Contact, ...]:
        """Up to `count` lost peers, drawn at random, also those that are left alone."""
        return tuple(rng.sample(list(self._lost.values()), min(count, len(self._lost))))
