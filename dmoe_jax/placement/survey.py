"""Announcements, claims and members, as a claimer reads and writes them.

A claimer has one entry for its claims in each record of announcements (`dmoe_jax.directory.records`), beside what it
serves there, so that one look finds both:

    DHT, PREFIX.DIMSdGROUP, suffix "claim"     [[u0, u1, ..., u0, u1, ...], [is_confirmed, ...]]

Strangers write these records: whatever is malformed is left out.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import trio

from dmoe_jax.directory.grid import MAX_COORDINATE, ExpertUid, key_prefix
from dmoe_jax.directory.members import Member, list_members
from dmoe_jax.directory.records import MAX_NUMBERS, experts_in_untrusted, group_key, key_of
from dmoe_jax.placement.claiming import MAX_CLAIMABLE, View
from dmoe_jax.placement.sharing import Claimant
from dmoe_net.dht.entries import Found
from dmoe_net.dht.node import DhtNode, StoreItem
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import Contact, PeerId
from dmoe_net.wire.fields import FLAG, Field, integer, row_untrusted, several

MAX_RECORDS = 256
"""Most records in which the experts of one claimer's patterns are announced: each is a look in every scan."""

_CLAIM = "claim"
_CLAIMS: dict[str, Field[Any]] = {
    "coordinates": several(integer(0, MAX_COORDINATE), MAX_NUMBERS),
    "confirmed": several(FLAG, MAX_NUMBERS),
}


def check_claimable(uids: Mapping[str, ExpertUid]) -> None:
    """Make sure that a node can look after these experts.

    Raises:
      ValueError: there is none, or there are too many.
    """
    if not 1 <= len(uids) <= MAX_CLAIMABLE:
        raise ValueError(f"a node claims of 1 to {MAX_CLAIMABLE} experts, got patterns of {len(uids)}")
    if (count := len(set(map(key_of, uids.values())))) > MAX_RECORDS:
        raise ValueError(
            f"the experts to claim are in {count} groups of rows of their grids, at most {MAX_RECORDS} are allowed: "
            "name a part of the grid, or let its last dimension be the largest"
        )


class Claims:
    """This node's claims, as it writes them.

    Args:
      life_s: seconds that a claim lives unless it is written again.
    """

    def __init__(self, dht: DhtNode, uids: Mapping[str, ExpertUid], *, life_s: float) -> None:
        self._dht, self._uids, self._life_s = dht, uids, life_s
        self._written: dict[str, tuple[bool, float]] = {}  # uid -> (is confirmed, when it ends by the clock's ticks)
        self._turn = trio.Lock()  # claims share entries: of two writes the later one must know of the earlier one

    async def write(
        self, new: Iterable[str] = (), *, confirmed: Iterable[str] = (), gone: Iterable[str] = ()
    ) -> dict[str, bool]:
        """Write new and confirmed claims, and take others back.

        Returns: for each claim that was written, True if somebody keeps it.
        """
        async with self._turn:
            now = self._dht.clock.ticks()
            taken_back = [uid for uid in gone if self._written.pop(uid, (False, 0.0))[1] > now]
            written = dict.fromkeys(new, False) | dict.fromkeys(confirmed, True)
            until = now + self._life_s
            self._written = {uid: each for uid, each in self._written.items() if each[1] > now}
            self._written |= {uid: (is_confirmed, until) for uid, is_confirmed in written.items()}
            kept = await self._store(dict.fromkeys(key_of(self._uids[uid]) for uid in (*written, *taken_back)))
            stands = {uid: key_of(self._uids[uid]) in kept for uid in written}
            for uid, is_kept in stands.items():
                if not is_kept:
                    del self._written[uid]
            return stands

    async def withdraw_all(self) -> None:
        """Take all claims back."""
        await self.write(gone=list(self._written))

    async def _store(self, keys: Iterable[str]) -> set[str]:
        """Bring the entries under these keys up to date; return the keys under which somebody keeps them."""
        values: dict[str, list[list[Any]]] = {key: [[], []] for key in keys}
        for uid, (is_confirmed, _) in self._written.items():
            if (value := values.get(key_of(self._uids[uid]))) is not None:
                value[0] += self._uids[uid].coordinates
                value[1].append(is_confirmed)
        items = [
            StoreItem(key=key, suffix=_CLAIM, value=value, life_s=self._life_s)
            for key, value in values.items()
            if value[1]
        ]
        counts = await self._dht.store_many(items)
        await self._dht.withdraw_many((key, _CLAIM) for key, value in values.items() if not value[1])
        return {item.key for item, count in zip(items, counts, strict=True) if count}


def claims_in_untrusted(key: str, record: Iterable[Found], uids: Collection[str]) -> dict[str, dict[PeerId, bool]]:
    """The well-formed claims for these experts under a key: uid -> claimer -> True if it is confirmed."""
    prefix, _, group = key.rpartition(".")
    dims = int(group.partition("d")[0])
    found: dict[str, dict[PeerId, bool]] = {}
    for entry in record:
        if entry.suffix != _CLAIM:
            continue
        try:
            flat, confirmed = row_untrusted(entry.value, "claims", **_CLAIMS)
        except RemoteProtocolError:
            continue
        for coordinates, is_confirmed in zip(zip(*[iter(flat)] * dims, strict=False), confirmed, strict=False):
            uid = key_prefix(prefix, coordinates)[:-1]
            if uid in uids and group_key(prefix, coordinates) == key:
                found.setdefault(uid, {})[entry.owner] = is_confirmed
    return found


class Survey:
    """Reads the DHT for a claimer, and remembers what it has read.

    Args:
      swarm: name under which the members are listed.
      uids: the experts of its patterns, by their names; see `check_claimable`.
    """

    def __init__(self, dht: DhtNode, swarm: str, uids: Mapping[str, ExpertUid]) -> None:
        self._dht, self._swarm, self._uids = dht, swarm, uids
        self._keys = tuple(dict.fromkeys(map(key_of, uids.values())))
        self.scope = hashlib.blake2b("\n".join(sorted(uids)).encode(), digest_size=8).hexdigest()
        """Name of the set of experts: claimers that may claim the same ones count each other, others do not."""
        self._records: dict[str, tuple[Found, ...]] = {}
        self._members: tuple[Member, ...] = ()

    async def scan(self) -> None:
        """Read everything: members, holders and claims."""
        self._members = await list_members(self._dht, self._swarm)
        self._records = await self._dht.get_many(self._keys)

    async def look(self, uids: Iterable[str]) -> None:
        """Read what concerns these experts only, of all who keep it: no claim may be missed that anybody has taken."""
        keys = dict.fromkeys(key_of(self._uids[uid]) for uid in uids)
        self._records |= await self._dht.get_many(keys, thoroughly=True)

    def view(self, own: PeerId, dead: frozenset[PeerId], *, read_at: float) -> View:
        """View of the swarm as of the last reading, which began at `read_at`."""
        claimants = tuple(
            Claimant(peer_id=member.peer_id, room=room, is_warm=member.info.get("state") == "serving")
            for member in self._members
            if member.role == "node" and member.peer_id != own and member.info.get("scope") == self.scope
            if type(room := member.info.get("room")) is int and room > 0
        )
        return View(read_at=read_at, holders=self._holders(), claims=self._claims(), claimants=claimants, dead=dead)

    def nodes(self) -> dict[PeerId, Contact]:
        """Every node that is a member, or announces an expert of the patterns, with its contact."""
        found = {m.peer_id: m.contact for m in self._members if m.role == "node" and m.contact}
        for holders in self._holders().values():
            found |= holders
        return found

    def claimers(self) -> set[PeerId]:
        """Owners of living claims."""
        return {peer_id for rivals in self._claims().values() for peer_id in rivals}

    def _claims(self) -> dict[str, dict[PeerId, bool]]:
        claims: dict[str, dict[PeerId, bool]] = {}
        for key, record in self._living().items():
            claims |= claims_in_untrusted(key, record, self._uids)
        return claims

    def _living(self) -> dict[str, list[Found]]:
        now = self._dht.clock.ticks()
        return {key: [each for each in record if each.ends_at > now] for key, record in self._records.items()}

    def _holders(self) -> dict[str, dict[PeerId, Contact]]:
        return {
            uid: {replica.contact.peer_id: replica.contact for replica in replicas}
            for key, record in self._living().items()
            for coordinates, replicas in experts_in_untrusted(key, record).items()
            if (uid := key_prefix(key.rpartition(".")[0], coordinates)[:-1]) in self._uids
        }
