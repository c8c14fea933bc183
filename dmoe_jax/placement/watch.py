"""Watch over other nodes: a claimer probes some of them, to see which still live.

Announcements outlive their node by half a minute. A probe is the smallest call that there is; several in a row without
an answer are taken for the node's death. Any answer is life, an error too.

Claims can be renewed for ever by a program that serves nothing. Whoever has claimed for two lives of a claim is probed
therefore, by everybody whom it is in the way; one that is not even listed as a node counts as dead then.
"""

import logging
from collections.abc import Callable, Iterable, Mapping

import trio

from dmoe_jax.placement.config import PlacementConfig
from dmoe_net.dht.copies import nearest
from dmoe_net.dht.routing_table import node_id
from dmoe_net.errors import CallFailed, PeerUnavailable, RemoteProtocolError
from dmoe_net.identity import Contact, PeerId
from dmoe_net.nursery import for_each
from dmoe_net.rpc.base import Caller
from dmoe_net.rpc.service import PING

logger = logging.getLogger(__name__)


class Watch:
    """Probes nodes.

    Args:
      nodes: returns the nodes that there are; called before each round of probes.
      claimers: returns the owners of claims; called then, too.
      on_change: called when a node is taken for dead, or has come back.
    """

    def __init__(
        self,
        caller: Caller,
        config: PlacementConfig,
        *,
        nodes: Callable[[], Mapping[PeerId, Contact]],
        claimers: Callable[[], Iterable[PeerId]],
        on_change: Callable[[], None],
    ) -> None:
        self._caller, self._config = caller, config
        self._nodes, self._claimers, self._on_change = nodes, claimers, on_change
        self._misses: dict[PeerId, int] = {}  # of those that are watched
        self._claims_since: dict[PeerId, float] = {}
        self._unlisted: frozenset[PeerId] = frozenset()  # whoever claims for long and is no node

    @property
    def dead(self) -> frozenset[PeerId]:
        """Peers that have missed so many probes in a row that they are taken for dead."""
        missed = {peer_id for peer_id, misses in self._misses.items() if misses >= self._config.max_misses}
        return self._unlisted | missed

    async def run(self) -> None:
        """Probe for ever."""
        while True:
            started = trio.current_time()
            nodes, own = self._nodes(), self._caller.peer_id
            others = (contact for peer_id, contact in nodes.items() if peer_id != own)
            watched = dict.fromkeys(nearest(others, node_id(own), self._config.max_watched))
            watched |= dict.fromkeys(self._long_claimers(nodes, started))
            self._misses = {contact.peer_id: self._misses.get(contact.peer_id, 0) for contact in watched}
            await for_each(self._probe, watched)
            await trio.sleep_until(started + self._config.probe_period_s)

    def _long_claimers(self, nodes: Mapping[PeerId, Contact], now: float) -> list[Contact]:
        """The nodes that have claimed for long, those that began first, as many as are watched at most."""
        claimers = [peer_id for peer_id in sorted(self._claimers()) if peer_id != self._caller.peer_id]
        self._claims_since = {peer_id: self._claims_since.get(peer_id, now) for peer_id in claimers}
        long = [peer_id for peer_id in claimers if self._claims_since[peer_id] <= now - 2 * self._config.claim_life_s]
        self._unlisted = frozenset(long).difference(nodes)
        listed = sorted((peer_id for peer_id in long if peer_id in nodes), key=self._claims_since.__getitem__)
        return [nodes[peer_id] for peer_id in listed[: self._config.max_watched]]

    async def _probe(self, contact: Contact) -> None:
        was_dead = contact.peer_id in self.dead
        try:
            await self._caller.call(contact, PING, {}, timeout_s=self._config.probe_period_s)
        except CallFailed:
            self._misses[contact.peer_id] = 0
        except (PeerUnavailable, RemoteProtocolError):
            self._misses[contact.peer_id] += 1
        else:
            self._misses[contact.peer_id] = 0
        is_dead = contact.peer_id in self.dead
        if is_dead != was_dead:
            text = "does not answer: its experts count as vacant" if is_dead else "answers again"
            logger.warning("node %s %s", contact, text)
            self._on_change()
