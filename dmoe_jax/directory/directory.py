"""Living experts and their nodes: announcements in the DHT, and a reader that a training step can afford.

A node announces its experts again and again; silence is how a crashed one disappears. Several nodes may serve one
expert: a reader gets one of them, another one when that fails or has no room, and the expert counts as dead only when
all of them do.

`ExpertDirectory` keeps the records that its trainer uses (`directory.records`) and refreshes them in the background, so
that a training step normally finds everything at hand. Records come from strangers: whatever is malformed is ignored.
"""

import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import trio

from dmoe_jax.directory.grid import Coordinates, ExpertUid, check_prefix, key_prefix, parse_uid
from dmoe_jax.directory.members import list_members
from dmoe_jax.directory.preference import Renewals, by_preference
from dmoe_jax.directory.records import Replicas, announcements, experts_in_untrusted, grid_keys, group_key, key_of
from dmoe_jax.routing.beam_search import search_beams
from dmoe_net.dht.node import DhtNode, StoreItem
from dmoe_net.identity import Contact, PeerId
from dmoe_net.nursery import background_nursery
from dmoe_net.peer_health import Pause, PeerHealth

MAX_CACHED = 16_384
"""Most records that a directory remembers; the least recently used go first. A grid of 100 x 100 experts has 13, and
the largest 12,500."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryConfig:
    """Settings of the look-up of experts: the age of answers, and pauses of hosts and experts that fail."""

    ttl_s: float = 10.0
    """Longest age of what is answered without asking the DHT, seconds. The background asks before that."""
    negative_ttl_s: float = 5.0
    """The same for a record without experts, seconds; at most `ttl_s`: new experts should be seen soon."""
    idle_s: float = 60.0
    """A record that nobody asked for during this time is no longer refreshed, seconds."""
    backoff_base_s: float = 1.0
    """First pause after a host or an expert failed, seconds; doubles with each failure in a row. 0: none is ever
    avoided."""
    backoff_cap_s: float = 60.0
    """Longest pause, seconds."""

    def __post_init__(self) -> None:
        if not 0 < self.negative_ttl_s <= self.ttl_s <= self.idle_s:
            raise ValueError(f"expected 0 < negative_ttl_s <= ttl_s <= idle_s, got {self}")


_REFRESHED_AT = 0.6  # of the longest age: a look every 6 to 7 s, and time for one that is slow

_SERVICE = "expert"
"""RPC's name for the methods of experts: the first word of `expert.forward`."""


def host_target(contact: Contact) -> tuple[PeerId, str]:
    """The target in `dmoe_net.peer_health` of a host's failures to answer for its experts."""
    return contact.peer_id, _SERVICE


def expert_target(contact: Contact, uid: str) -> tuple[PeerId, str]:
    """The same for the failures of a single expert there, whatever its host is like."""
    return contact.peer_id, uid


class Announcer:
    """Keeps a node's experts announced, each announcement for `life_s` seconds."""

    def __init__(self, dht: DhtNode, contact: Contact, *, life_s: float) -> None:
        self._dht, self._contact, self._life_s = dht, contact, life_s
        self._announced: dict[str, int] = {}  # number of entries by key
        self._call_s: float | None = None
        self._uids: set[ExpertUid] = set()
        self._turn = trio.Lock()

    async def announce(self, uids: Iterable[ExpertUid], call_s: float | None = None) -> list[ExpertUid]:
        """Announce experts beside those that are announced already; return those that nobody keeps a record of. With
        them goes `call_s`, as of `dmoe_jax.directory.records.Replica`."""
        async with self._turn:
            self._call_s = call_s
            uids = list(uids)
            self._uids.update(uids)
            failed = await self._store(set(map(key_of, uids)))
            return [uid for uid in uids if key_of(uid) in failed]

    async def withdraw(self, uids: Iterable[ExpertUid]) -> None:
        """Take the announcements of experts back; those of others stay."""
        async with self._turn:
            gone = self._uids.intersection(uids)
            self._uids -= gone
            await self._store(set(map(key_of, gone)))

    async def _store(self, keys: set[str]) -> set[str]:
        """Bring the entries of these keys up to date; return the keys under which some were not taken."""
        values = announcements((uid for uid in self._uids if key_of(uid) in keys), self._contact.address, self._call_s)
        items = [
            StoreItem(key=key, suffix=_suffix(number), value=value, life_s=self._life_s)
            for key, several in values.items()
            for number, value in enumerate(several)
        ]
        gone = [
            (key, _suffix(number))
            for key in sorted(keys)
            for number in range(len(values.get(key, ())), self._announced.pop(key, 0))
        ]
        self._announced |= {key: len(several) for key, several in values.items()}
        counts = await self._dht.store_many(items)
        await self._dht.withdraw_many(gone)
        return {item.key for item, count in zip(items, counts, strict=True) if not count}


async def find_replicas(dht: DhtNode, uids: Iterable[ExpertUid]) -> dict[ExpertUid, Replicas]:
    """The nodes that serve these experts now, straight from the DHT."""
    keys = {uid: key_of(uid) for uid in uids}
    found = await dht.get_many(dict.fromkeys(keys.values()))
    experts = {key: experts_in_untrusted(key, record) for key, record in found.items()}
    return {uid: experts[key].get(uid.coordinates, ()) for uid, key in keys.items()}


@dataclass(slots=True, kw_only=True)
class _Cached:
    used_at: float
    fetched_at: float = -math.inf
    experts: dict[Coordinates, Replicas] = field(default_factory=dict)
    """Each expert's replicas in the order in which this reader prefers them."""
    children: dict[Coordinates, set[int]] = field(default_factory=dict)
    """Partial path -> what may follow."""


class ExpertDirectory:
    """Living experts, as a trainer knows them. Made by `open_expert_directory`.

    Hosts and experts that failed of late (see `dmoe_net.peer_health`) count as dead for a while. Every method may be
    cancelled; what it had asked the DHT for still arrives and is kept.
    """

    def __init__(self, dht: DhtNode, nursery: trio.Nursery, *, swarm: str, config: DirectoryConfig) -> None:
        self.health: PeerHealth = dht.health
        """Record of failures, shared with RPC. Targets are of `host_target` and of `expert_target`."""
        self._dht = dht
        self._nursery = nursery
        self._swarm = swarm
        self._config = config
        self._pause = Pause(first_s=config.backoff_base_s, longest_s=config.backoff_cap_s)
        self._cache: dict[str, _Cached] = {}  # from least to most recently used
        self._in_flight: dict[str, trio.Event] = {}
        self._busy_until: dict[PeerId, float] = {}
        self._renewals = Renewals()

    def call_seconds(self) -> Mapping[PeerId, float]:
        """Seconds that a call has lately spent at each node, as the nodes that are in use announce it."""
        return {
            replica.contact.peer_id: replica.call_s
            for cached in self._cache.values()
            for replicas in cached.experts.values()
            for replica in replicas
            if replica.call_s
        }

    def busy(self, contact: Contact, retry_after_s: float) -> None:
        """A node has no room for so many seconds: its experts are not chosen while there are others."""
        until = trio.current_time() + retry_after_s
        self._busy_until[contact.peer_id] = max(until, self._busy_until.get(contact.peer_id, -math.inf))

    def avoid(self, uid: str, contact: Contact, reason: str) -> None:
        """One expert failed, whatever its host is like: there it counts as dead for 1, 2, 4, ... seconds."""
        now, target = trio.current_time(), expert_target(contact, uid)
        # Calls that were under way together fail together: one failure, not several.
        if not self.health.blocks(target, now, self._pause):
            self.health.failed(target, now, reason)

    def answers(self, uid: str, contact: Contact) -> bool:
        """True if an expert may be asked there, as far as is known: neither it nor its host failed just now."""
        now = trio.current_time()
        targets = host_target(contact), expert_target(contact, uid)
        return not any(self.health.blocks(target, now, self._pause) for target in targets)

    def another(self, uid: str, contact: Contact) -> Contact | None:
        """Another node, from memory, that serves an expert, has not failed of late and is not busy; else None."""
        name = parse_uid(uid)
        cached = self._cache.get(key_of(name))
        others = [
            each
            for each in self._contacts(uid, cached.experts.get(name.coordinates, ()) if cached else ())
            if each.peer_id != contact.peer_id
        ]
        best = self._best(others)
        return None if best is None or self._suspicion(best) > 1 or self._is_busy(best) else best

    async def served_prefixes(self) -> tuple[str, ...]:
        """The prefixes of all experts that the nodes of this swarm list, sorted."""
        members = await list_members(self._dht, self._swarm)
        return tuple(sorted({prefix for member in members for prefix in member.grids}))

    def clock_doubts(self) -> str:
        """A clause for a message that something is not found, see `SwarmClock.doubts`."""
        return self._dht.clock.doubts()

    async def prefetch(self, prefix: str, grid_size: Sequence[int]) -> None:
        """Look all records of a grid up, so that the first step does not wait for them.

        Raises:
          ValueError: the prefix is malformed.
        """
        await self._fetched(grid_keys(check_prefix(prefix), grid_size))

    async def living(self, prefix: str, grid_size: Sequence[int]) -> dict[Coordinates, Contact]:
        """Every living expert of a grid, and who serves it, in the order of coordinates.

        Raises:
          ValueError: the prefix is malformed.
        """
        keys = grid_keys(check_prefix(prefix), grid_size)
        await self._fetched(keys)
        candidates = {
            coordinates: replicas
            for key in keys
            for coordinates, replicas in self._cache[key].experts.items()
            if all(map(int.__lt__, coordinates, grid_size))
        }
        return dict(sorted(self._best_of(prefix, candidates).items()))

    async def beam_search(
        self, prefix: str, scores: Sequence[np.ndarray], k: int, *, bias: np.ndarray | None = None
    ) -> tuple[np.ndarray, dict[Coordinates, Contact]]:
        """The best k living experts of a grid for each sample; see `search_beams`.

        Rows are not looked up: the scores tell how many there are, and one that turns out to be empty drops out.

        Returns: int64 [batch, k, dims], best first, -1 where fewer are alive; and the contacts of the experts seen.

        Raises:
          ValueError: as `search_beams`, or if the prefix is malformed.
        """
        check_prefix(prefix)
        dims = len(scores)
        known: dict[Coordinates, list[int]] = {} if dims == 1 else {(): list(range(scores[0].shape[1]))}
        contacts: dict[Coordinates, Contact] = {}
        while True:
            chosen, missing = search_beams(scores, known, k=k, bias=bias)
            if not missing:
                return chosen, contacts
            if dims == 1:
                found = await self.living(prefix, (scores[0].shape[1],))
                known[()] = [coordinate for (coordinate,) in found]
                contacts |= found
                continue
            keys = {path: group_key(prefix, (*path, *(0,) * (dims - len(path)))) for path in missing}
            await self._fetched(dict.fromkeys(keys.values()))
            for path, key in keys.items():
                cached = self._cache[key]
                known[path] = sorted(cached.children.get(path, ()))
                if len(path) == dims - 1:
                    leaves = {(*path, child): cached.experts[*path, child] for child in known[path]}
                    living = self._best_of(prefix, leaves)
                    known[path] = [coordinates[-1] for coordinates in living]
                    contacts |= living

    async def run(self) -> None:
        """Refresh what is in use before it grows old, and forget the rest. `open_expert_directory` starts it."""
        while True:
            await trio.sleep(self._config.negative_ttl_s / 4)
            now = trio.current_time()
            for key in [key for key, cached in self._cache.items() if cached.used_at < now - self._config.idle_s]:
                if key not in self._in_flight:
                    del self._cache[key]
            due = [k for k, c in self._cache.items() if c.fetched_at <= now - _REFRESHED_AT * self._lifetime(c)]
            await self._refresh(due)

    async def _fetched(self, keys: Iterable[str]) -> None:
        """See to it that these records are at hand: from memory if that is fresh, else from the DHT, once for all who
        ask for the same one."""
        await self._refresh([key for key in keys if not self._touch(key)])

    async def _refresh(self, keys: list[str]) -> None:
        for key in keys:  # one by one: none waits for another that is slow
            if key not in self._in_flight:
                self._in_flight[key] = trio.Event()
                # In a task of the directory: whoever waits may be cancelled without leaving others to wait for nothing.
                self._nursery.start_soon(self._fetch, key)
        await trio.lowlevel.checkpoint()
        for event in [self._in_flight[key] for key in keys if key in self._in_flight]:
            await event.wait()

    async def _fetch(self, key: str) -> None:
        try:
            asked_at = trio.current_time()
            (record,) = (await self._dht.get_many([key])).values()
            now = trio.current_time()
            cached = self._cache.setdefault(key, _Cached(used_at=now))
            prefix = key.rpartition(".")[0]
            cached.experts = by_preference(experts_in_untrusted(key, record), prefix, self._dht.peer_id)
            cached.children = _children(cached.experts)
            cached.fetched_at = now
            replicas = [replica for several in cached.experts.values() for replica in several]
            self._renewals.note(replicas, self._troubled_at, asked_at)
        finally:
            self._in_flight.pop(key).set()

    def _touch(self, key: str) -> bool:
        """Note that a record is in use. Return True if what is known of it is fresh."""
        now = trio.current_time()
        cached = self._cache.pop(key, None) or _Cached(used_at=now)
        cached.used_at = now
        self._cache[key] = cached
        if len(self._cache) > MAX_CACHED:
            del self._cache[next(iter(self._cache))]
        return now < cached.fetched_at + self._lifetime(cached)

    def _best_of(self, prefix: str, experts: Mapping[Coordinates, Replicas]) -> dict[Coordinates, Contact]:
        """The living ones among these experts, each with the node to ask."""
        living: dict[Coordinates, Contact] = {}
        for coordinates, replicas in experts.items():
            uid = key_prefix(prefix, coordinates)[:-1]
            if (best := self._best(self._contacts(uid, replicas))) is not None:
                living[coordinates] = best
        if self._busy_until:
            # Where all are busy they are asked all the same: who waits for its turn learns more than who goes without.
            return {coordinates: who for coordinates, who in living.items() if not self._is_busy(who)} or living
        return living

    def _contacts(self, uid: str, replicas: Replicas) -> list[Contact]:
        """The nodes among these that live, as far as is known, and did not fail of late; last the ones that should have
        announced themselves again, and have not."""
        now = self._dht.clock.ticks()
        living = [each for each in replicas if each.ends_at > now and self.answers(uid, each.contact)]
        return [each.contact for each in sorted(living, key=lambda each: each.due_at < now)]

    def _best(self, contacts: Sequence[Contact]) -> Contact | None:
        """The first of an expert's replicas that has room, if one has.

        One that failed of late comes last until it has announced itself again, though its pause may be over: where
        others serve the expert, nobody need lose a call to find out whether it lives.
        """
        if len(contacts) < 2:
            return contacts[0] if contacts else None
        return min(contacts, key=lambda contact: (self._suspicion(contact), self._is_busy(contact)))

    def _suspicion(self, contact: Contact) -> int:
        """2 for a host that failed and neither answered nor announced itself since, 1 for one that was only late."""
        if not self._renewals.awaits(contact.peer_id, self._troubled_at(contact.peer_id)):
            return 0
        return 2 if self.health.has_failed(host_target(contact)) else 1

    def _troubled_at(self, peer_id: PeerId) -> float | None:
        return self.health.troubled_at((peer_id, _SERVICE))

    def _is_busy(self, contact: Contact) -> bool:
        until = self._busy_until.get(contact.peer_id, -math.inf)
        if trio.current_time() >= until:
            self._busy_until.pop(contact.peer_id, None)
            return False
        return True

    def _lifetime(self, cached: _Cached) -> float:
        return self._config.ttl_s if cached.experts else self._config.negative_ttl_s


@asynccontextmanager
async def open_expert_directory(
    dht: DhtNode,
    *,
    swarm: str = "dmoe",
    config: DirectoryConfig = DirectoryConfig(),
) -> AsyncIterator[ExpertDirectory]:
    """A directory of a swarm's experts that keeps itself fresh until the block ends."""
    async with background_nursery() as nursery:
        directory = ExpertDirectory(dht, nursery, swarm=swarm, config=config)
        nursery.start_soon(directory.run)
        yield directory


def _children(experts: Iterable[Coordinates]) -> dict[Coordinates, set[int]]:
    """Coordinates that may follow each partial path, of at least one coordinate, that leads to one of these experts."""
    children: dict[Coordinates, set[int]] = {}
    for coordinates in experts:
        for length in range(1, len(coordinates)):
            children.setdefault(coordinates[:length], set()).add(coordinates[length])
    return children


def _suffix(number: int) -> str:
    """Suffix of a node's entries under one key: none for the first."""
    return str(number) if number else ""
