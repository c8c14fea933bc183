"""What a claimer reads: announcements, claims and members."""

from collections.abc import Iterable, Mapping

from dmoe_jax.claims.claiming import View
from dmoe_jax.claims.records import claims_key, read_claims, read_listings, row_of, scope_of
from dmoe_jax.claims.sharing import Claimant
from dmoe_jax.directory.grid import ExpertUid
from dmoe_jax.directory.members import Member, list_members
from dmoe_net.dht.node import DhtNode
from dmoe_net.dht.records import Record, live, merge
from dmoe_net.identity import Contact, PeerId


class Survey:
    """Reads the DHT for a claimer, and remembers what it has read.

    Args:
      dht, swarm: where, and under which name the members are listed.
      uids: the experts of its patterns, by their names; see `check_claimable`.
    """

    def __init__(self, dht: DhtNode, swarm: str, uids: Mapping[str, ExpertUid]) -> None:
        self._dht, self._swarm, self._uids = dht, swarm, uids
        self._rows = tuple(dict.fromkeys(map(row_of, uids.values())))
        self._prefixes = tuple(dict.fromkeys(uid.prefix for uid in uids.values()))
        self.scope = scope_of(uids)
        """What the node calls the set of experts that it may claim."""
        self._records: dict[str, Record] = {}
        self._members: tuple[Member, ...] = ()

    async def scan(self) -> None:
        """Read everything: who is there, who announces which expert, and all claims."""
        self._members = await list_members(self._dht, self._swarm)
        await self._read([*self._rows, *map(claims_key, self._prefixes)])

    async def look(self, uids: Iterable[str]) -> None:
        """Read what concerns these experts only."""
        some = [self._uids[uid] for uid in uids]
        await self._read({*map(row_of, some), *(claims_key(uid.prefix) for uid in some)})

    async def _read(self, keys: Iterable[str]) -> None:
        found = await self._dht.get_many(sorted(keys))
        now = self._dht.clock.now()
        for key, record in found.items():
            # Merged, not replaced: a lookup that missed a replica must not make experts disappear.
            known = live(merge(self._records.get(key), record), now)
            if known is None:
                self._records.pop(key, None)
            else:
                self._records[key] = known

    def view(self, own: PeerId, dead: frozenset[PeerId], *, read_at: float) -> View:
        """What is known, as of the last reading, which began at `read_at`."""
        now = self._dht.clock.now()
        view_listed, view_claims = {}, {}
        for row in self._rows:
            view_listed.update(read_listings(row, self._records.get(row), self._uids, now=now, dead=dead))
        for prefix in self._prefixes:
            view_claims.update(read_claims(prefix, self._records.get(claims_key(prefix)), self._uids, now=now))
        claimants = tuple(
            Claimant(peer_id=member.peer_id, room=room, is_warm=member.info.get("state") == "serving")
            for member in self._members
            if member.role == "node" and member.peer_id != own and member.info.get("scope") == self.scope
            if type(room := member.info.get("room")) is int and room > 0
        )
        return View(read_at=read_at, listed=view_listed, claims=view_claims, claimants=claimants, dead=dead)

    def nodes(self) -> dict[PeerId, Contact]:
        """Every node that is a member, or announces an expert of the patterns."""
        now = self._dht.clock.now()
        found = {m.peer_id: m.contact for m in self._members if m.role == "node" and m.contact and m.expiration > now}
        for row in self._rows:
            for listing in read_listings(row, self._records.get(row), self._uids, now=now).values():
                found[listing.contact.peer_id] = listing.contact
        return found
