"""Keeping a node and its experts listed in the DHT."""

import logging
from collections.abc import Callable, Sequence

import trio

from dmoe_jax.directory import declare_experts, withdraw_experts
from dmoe_jax.grid import ExpertUid
from dmoe_jax.members import MAX_GRIDS, declare_member, withdraw_member
from net.dht.node import DhtNode
from net.identity import Contact

logger = logging.getLogger(__name__)


class Announcer:
    """Lists a node, and its experts while they are served.

    Args:
      dht: where they are listed.
      uids: the experts. contact: where they are called.
      swarm: name under which the node is listed.
      period_s: seconds between announcements.
      lifetime_s: seconds for which an announcement is valid.
      state: what the node is at: its experts are announced when it is "serving".
    """

    def __init__(
        self,
        dht: DhtNode,
        uids: Sequence[ExpertUid],
        contact: Contact,
        *,
        swarm: str,
        period_s: float,
        lifetime_s: float,
        state: Callable[[], str],
    ) -> None:
        self._dht = dht
        self._uids = list(uids)
        self._contact = contact
        self._swarm = swarm
        self._period_s = period_s
        self._lifetime_s = lifetime_s
        self._state = state

    async def announce(self) -> None:
        """Announce once what there is to be found now."""
        expiration = self._dht.clock.now() + self._lifetime_s
        state = self._state()
        grids = list(dict.fromkeys(uid.prefix for uid in self._uids))[:MAX_GRIDS]
        info = {"role": "node", "state": state, "experts": len(self._uids), "grids": grids}
        peer_id = self._contact.peer_id
        await declare_member(self._dht, self._swarm, peer_id, self._contact, info, expiration=expiration)
        if state != "serving":
            return
        listed = await declare_experts(self._dht, self._uids, self._contact, expiration=expiration)
        if missing := [str(uid) for uid, stands in listed.items() if not stands]:
            logger.warning("%d experts could not be announced, among them %s", len(missing), missing[0])

    async def run(self) -> None:
        """Announce again and again."""
        while True:
            await trio.sleep(self._period_s)
            await self.announce()

    async def withdraw(self) -> None:
        """Take the announcements back, so that trainers stop calling at once; what cannot be reached expires."""
        await withdraw_experts(self._dht, self._uids, self._contact)
        await withdraw_member(self._dht, self._swarm, self._contact.peer_id, "node")
