"""How a node is listed in the DHT: itself as a member of its swarm, and each of its experts."""

import logging
import math
from collections.abc import Collection, Mapping, Sequence

from dmoe_jax.directory import declare_experts
from dmoe_jax.grid import ExpertUid
from dmoe_jax.members import MAX_GRIDS, declare_member, withdraw_member
from dmoe_jax.node.listing import ExpertListing, SoleListing
from net.dht.node import DhtNode
from net.dht.records import Value
from net.identity import Contact

logger = logging.getLogger(__name__)


class Announcements:
    """Announces a node and its experts, for a while each time.

    Args:
      dht: where.
      contact: where the node is called.
      swarm: under which name it is listed.
      lifetime_s: seconds for which an announcement is valid; at most the DHT's `max_lifetime_s`.
      listing: keeps the experts listed; None: a `SoleListing`.
    """

    def __init__(
        self, dht: DhtNode, contact: Contact, *, swarm: str, lifetime_s: float, listing: ExpertListing | None = None
    ) -> None:
        if lifetime_s > dht.config.max_lifetime_s:
            longest_s = dht.config.max_lifetime_s
            raise ValueError(f"announcements are valid for at most {longest_s:g} s, got a lifetime of {lifetime_s:g} s")
        self.listing = listing or SoleListing(dht, contact)
        """Announces the experts."""
        self._dht, self._contact, self._swarm, self._lifetime_s = dht, contact, swarm, lifetime_s
        self._outlasted: dict[ExpertUid, float] = {}  # at most one for each expert that the node serves

    async def member(self, info: Mapping[str, Value], uids: Collection[ExpertUid]) -> None:
        """List the node as a member.

        Args:
          info: facts about it, see `dmoe_jax.members.Member.info`, besides those that follow from `uids`.
          uids: its experts.
        """
        grids = list(dict.fromkeys(uid.prefix for uid in uids))[:MAX_GRIDS]
        facts = {"role": "node", "experts": len(uids), "grids": grids, **self.listing.facts(), **info}
        peer_id = self._contact.peer_id
        await declare_member(self._dht, self._swarm, peer_id, self._contact, facts, expiration=self._expiration())

    async def experts(self, uids: Collection[ExpertUid]) -> None:
        """List experts; those whose announcement does not stand are warned of."""
        usual = self._expiration()
        self._outlasted = {uid: others for uid, others in self._outlasted.items() if others >= usual}
        by_expiration: dict[float, list[ExpertUid]] = {}
        for uid in uids:
            others = self._outlasted.get(uid)
            # A little later than the announcement that it is to replace.
            expiration = usual if others is None else others + 1e-3
            by_expiration.setdefault(expiration, []).append(uid)
        missing: list[ExpertUid] = []
        for expiration, some in by_expiration.items():
            listed = await self.listing.announce(some, expiration=expiration)
            missing += [uid for uid, stands in listed.items() if not stands]
        if missing:
            doubts = self._dht.clock.doubts()
            logger.warning(
                "%d experts could not be announced, among them %s%s", len(missing), missing[0], doubts and f"; {doubts}"
            )

    def outlast(self, uid: ExpertUid, expiration: float) -> None:
        """Announce this expert, from the next time on and as long as it matters, for longer than until `expiration`."""
        if math.isfinite(expiration):
            self._outlasted[uid] = expiration

    async def hand_over(self, uid: ExpertUid, to: Contact) -> None:
        """Replace the announcement of an expert by one of the node that serves it from now on.

        Nobody finds the expert vacant until that node announces it the next time.
        """
        self._outlasted.pop(uid, None)
        await declare_experts(self._dht, [uid], to, expiration=self._expiration())

    async def withdraw(self, uids: Sequence[ExpertUid]) -> None:
        """Take all announcements back; what cannot be reached expires."""
        await self.listing.withdraw(uids)
        await withdraw_member(self._dht, self._swarm, self._contact.peer_id, "node")

    def _expiration(self) -> float:
        return self._dht.clock.now() + self._lifetime_s


class LoadReport:
    """What trainers that balance their load want to know of a node: its load since the last report.

    Args:
      now: by the clock of `since_last`.
    """

    def __init__(self, now: float) -> None:
        self._last = (now, 0, 0, 0.0)

    def since_last(self, now: float, *, requests: int, rows: int, seconds: float) -> dict[str, Value]:
        """Rows a second, and `call_s`, the mean seconds that a call spent here.

        `call_s` is left out while there was no call: what was true before may not be true now.

        Args:
          requests, rows, seconds: totals of the calls that were answered, and of the time that they spent here.
        """
        since, *before = self._last
        self._last = (now, requests, rows, seconds)
        new_requests, new_rows, new_s = (after - earlier for after, earlier in zip(self._last[1:], before, strict=True))
        load: dict[str, Value] = {"rows_per_s": new_rows / max(now - since, 1e-9)}
        return load | {"call_s": new_s / new_requests} if new_requests else load
