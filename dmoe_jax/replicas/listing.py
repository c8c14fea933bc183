"""Announcing experts in slots of this node's own: the shell around `slot_claims`."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import trio

from dmoe_jax.directory.directory import declare_experts, find_replicas, withdraw_experts
from dmoe_jax.directory.grid import ExpertUid
from dmoe_jax.directory.slots import MAX_SLOTS, own_expiration
from dmoe_jax.replicas.slot_claims import SlotClaims
from dmoe_net.dht.node import DhtNode
from dmoe_net.identity import Contact

logger = logging.getLogger(__name__)


class SlotListing:
    """Keeps a node's experts listed, each in a slot that no other node has.

    Args:
      dht: where. contact: the node.
      settle_s: how long after a slot was taken it is looked at again.
    """

    def __init__(self, dht: DhtNode, contact: Contact, *, settle_s: float) -> None:
        self.claims = SlotClaims(contact.peer_id)
        self._dht = dht
        self._contact = contact
        self._settle_s = settle_s
        self._turn = trio.Lock()

    async def announce(self, uids: Sequence[ExpertUid], *, expiration: float) -> Mapping[ExpertUid, bool]:
        """Announce experts until `expiration`, swarm time in seconds; for each whether it stands in a slot.

        Those that have a slot keep it, unless another node turns out to stand there; the others take the lowest free
        one. There are as many looks as slots, at most. If cancelled, slots may be taken that were not looked at again;
        the next call does that.
        """
        async with self._turn:
            self.claims.forget_refusals()
            expiration, stands = own_expiration(expiration, self._contact.peer_id), dict.fromkeys(uids, False)
            for look in range(MAX_SLOTS + 1):
                changed = self.claims.look(uids, await find_replicas(self._dht, uids))
                slots = self.claims.slots
                wanted = changed if look else [uid for uid in uids if uid in slots]
                if wanted:
                    declared = await declare_experts(
                        self._dht, wanted, self._contact, expiration=expiration, slots=slots
                    )
                    stands.update(declared)
                    for uid in changed:
                        if not declared[uid]:
                            self.claims.refused(uid)
                if not changed:
                    break
                await trio.sleep(self._settle_s)
            if without := [uid for uid in uids if uid not in self.claims.held]:
                logger.warning("%d experts have no free slot of %d, among them %s", len(without), MAX_SLOTS, without[0])
            return {uid: stands[uid] and uid in self.claims.held for uid in uids}

    async def withdraw(self, uids: Sequence[ExpertUid]) -> None:
        """Take the announcements back; those of others stay."""
        slots = self.claims.slots
        await withdraw_experts(self._dht, [uid for uid in uids if uid in slots], self._contact, slots=slots)

    @property
    def summary(self) -> str:
        """How many experts it has in each slot, such as "0:12 1:4"."""
        counts = Counter(self.claims.held.values())
        return " ".join(f"{slot}:{counts[slot]}" for slot in sorted(counts))
