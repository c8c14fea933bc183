"""A node and its experts in the DHT: the node as a member of its swarm, each expert by itself.

Experts are listed alone, or beside others who serve them too (`dmoe_jax.replicas`).
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from dmoe_jax.directory import declare_experts, find_replicas, withdraw_experts
from dmoe_jax.grid import ExpertUid
from dmoe_jax.members import MAX_GRIDS, declare_member, withdraw_member
from net.dht.node import DhtNode
from net.dht.records import Value
from net.identity import Contact

logger = logging.getLogger(__name__)

_NAMED = 4
"""Experts that a warning names."""


@runtime_checkable
class ExpertListing(Protocol):
    """Keeps a node's experts listed in the DHT."""

    async def announce(self, uids: Sequence[ExpertUid], *, expiration: float) -> Mapping[ExpertUid, bool]:
        """Announce experts until `expiration` (swarm time, seconds); for each whether it is announced."""
        ...

    async def withdraw(self, uids: Sequence[ExpertUid]) -> None:
        """Take the announcements back."""
        ...

    def status(self) -> dict[str, Any]:
        """Its part of `node.status`, as plain CBOR data."""
        ...

    def facts(self) -> dict[str, Value]:
        """Facts that the node tells as a member of the swarm, see `dmoe_jax.members.Member.info`."""
        ...


class SoleListing:
    """Announces experts that nobody else is to serve: in slot 0, whoever is there.

    Args:
      dht: where. contact: the node.
      warns: of others that announce the same experts, once for each expert; not of use to a node that claims experts,
        and decides with the others who serves them.
    """

    def __init__(self, dht: DhtNode, contact: Contact, *, warns: bool = True) -> None:
        self._dht, self._contact, self._warns = dht, contact, warns
        self._looked_for: set[ExpertUid] = set()

    async def announce(self, uids: Sequence[ExpertUid], *, expiration: float) -> Mapping[ExpertUid, bool]:
        if self._warns and (fresh := [uid for uid in uids if uid not in self._looked_for]):
            self._looked_for.update(fresh)
            await self._warn_of_others(fresh)
        return await declare_experts(self._dht, uids, self._contact, expiration=expiration)

    async def _warn_of_others(self, uids: Sequence[ExpertUid]) -> None:
        own, taken = self._contact.peer_id, []
        for uid, replicas in (await find_replicas(self._dht, uids)).items():
            others = [replica.contact for replica in replicas if replica.contact.peer_id != own]
            taken += [f"{uid} ({contact})" for contact in others[:1]]
        if taken:
            named = ", ".join(taken[:_NAMED]) + (", ..." if len(taken) > _NAMED else "")
            logger.warning(
                "%d experts are announced by other nodes as well: %s. A node that claimed one gives it up; otherwise "
                "trainers call whoever announced them last, and the copies go apart, unless all of them replicate "
                "(--replicate); a node that has died goes by itself",
                len(taken),
                named,
            )

    async def withdraw(self, uids: Sequence[ExpertUid]) -> None:
        await withdraw_experts(self._dht, uids, self._contact)

    def status(self) -> dict[str, Any]:
        return {}

    def facts(self) -> dict[str, Value]:
        return {}


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
            # A little later than the announcement that it is to replace.
            expiration = self._outlasted[uid] + 1e-3 if uid in self._outlasted else usual
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
