"""How a node's experts are announced: alone, or beside others who serve them too (`dmoe_jax.replicas`)."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from dmoe_jax.directory import declare_experts, find_replicas, withdraw_experts
from dmoe_jax.grid import ExpertUid
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
        """What `node.status` says of it, as plain CBOR data."""
        ...

    def facts(self) -> dict[str, Value]:
        """What the node tells of it as a member of the swarm, see `dmoe_jax.members.Member.info`."""
        ...


class SoleListing:
    """Announces experts that nobody else is to serve: in slot 0, whoever is there.

    Args:
      dht: where. contact: the node.
      warns: of others that announce the same experts; not of use to a node that claims experts, and decides with the
        others who serves them.
    """

    def __init__(self, dht: DhtNode, contact: Contact, *, warns: bool = True) -> None:
        self._dht = dht
        self._warns = warns
        self._contact = contact
        self._looked_for: set[ExpertUid] = set()

    async def announce(self, uids: Sequence[ExpertUid], *, expiration: float) -> Mapping[ExpertUid, bool]:
        """See `ExpertListing.announce`. Looks once who else serves an expert, and warns by name."""
        if self._warns and (fresh := [uid for uid in uids if uid not in self._looked_for]):
            self._looked_for.update(fresh)
            await self._warn_of_others(fresh)
        return await declare_experts(self._dht, uids, self._contact, expiration=expiration)

    async def _warn_of_others(self, uids: Sequence[ExpertUid]) -> None:
        found = await find_replicas(self._dht, uids)
        others = {
            uid: next((each.contact for each in found[uid] if each.contact.peer_id != self._contact.peer_id), None)
            for uid in uids
        }
        taken = [f"{uid} ({contact})" for uid, contact in others.items() if contact is not None]
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
        """See `ExpertListing.withdraw`."""
        await withdraw_experts(self._dht, uids, self._contact)

    def status(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def facts(self) -> dict[str, Value]:
        """Nothing."""
        return {}
