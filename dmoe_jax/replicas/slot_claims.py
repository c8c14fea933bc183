"""Which slot a node takes for each of its experts, as pure decisions; `listing` carries them out.

A node takes the lowest slot that nobody holds, announces itself there, waits a moment and looks again. Of two that took
one slot at once the DHT keeps the entry that ends later, at all its replicas and for all readers; so the other sees
that it has lost and takes the next free one. Whoever has a slot looks before each announcement in the same way.
"""

from collections.abc import Mapping, Sequence

from dmoe_jax.directory.grid import ExpertUid
from dmoe_jax.directory.slots import Replica, lowest_free
from dmoe_net.identity import PeerId

Found = Mapping[ExpertUid, Sequence[Replica]]
"""Who stands in the slots of each expert."""


class SlotClaims:
    """The slots of one node.

    Args:
      peer_id: the node.
    """

    def __init__(self, peer_id: PeerId) -> None:
        self._peer_id = peer_id
        self.held: dict[ExpertUid, int] = {}
        """Slots that are this node's, as far as it knows."""
        self.taken: dict[ExpertUid, int] = {}
        """Slots that it has announced itself in, and has not looked at since."""
        self.lost = 0
        """Times that another node turned out to stand in a slot of this one."""
        self._refused: dict[ExpertUid, set[int]] = {}

    @property
    def slots(self) -> dict[ExpertUid, int]:
        """Where it is announced, for sure or not."""
        return {**self.held, **self.taken}

    def look(self, uids: Sequence[ExpertUid], found: Found) -> list[ExpertUid]:
        """Take notice of who stands where: confirm slots, give up those that others have, and take free ones.

        Returns: the experts for which a slot was taken just now. For those without any slot there is none left.
        """
        changed = []
        for uid in uids:
            holders = {replica.slot: replica.contact.peer_id for replica in found.get(uid, ())}
            slot = self.taken.pop(uid, self.held.get(uid))
            if slot is None:  # a node that was started again, as the same peer
                slot = next((each for each, holder in holders.items() if holder == self._peer_id), None)
            if slot is not None and holders.get(slot) == self._peer_id:
                self.held[uid] = slot
                continue
            if slot is not None and slot not in holders and uid in self.held:
                continue  # its announcement has run out; nobody else has come
            if slot is not None and slot in holders:
                self.lost += 1
            self.held.pop(uid, None)
            free = lowest_free({*holders, *self._refused.get(uid, ())})
            if free is not None:
                self.taken[uid] = free
                changed.append(uid)
        return changed

    def refused(self, uid: ExpertUid) -> None:
        """The DHT did not take the announcement: something there ends later, such as that of one who has withdrawn."""
        slot = self.taken.pop(uid, None)
        if slot is not None:
            self._refused.setdefault(uid, set()).add(slot)

    def forget_refusals(self) -> None:
        """Refused slots may be tried again: what stood there may have ended."""
        self._refused.clear()
