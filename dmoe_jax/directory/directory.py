"""Which experts are alive, and where: announcements in the DHT, and a reader that a training step can afford.

An expert `ffn.3.17` is announced under each of its prefixes: key `ffn.` has a subkey `3` (there is something in row
3) and key `ffn.3.` a subkey `17` with the contact that serves it. Entries live until their expiration: owners announce
again and again, and silence is how a crashed one disappears. Several nodes may serve one expert, each in a slot of its
own (`directory.slots`): a reader gets one of them, another one when that fails or has no room, and the expert counts as
dead only when all of them do.

`ExpertDirectory` keeps the children of the prefixes that its trainer uses and refreshes them in the background, so
that a training step normally finds everything at hand. Records come from strangers: whatever is malformed is ignored.
"""

import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import trio

from dmoe_jax.directory.grid import ExpertUid, check_prefix, key_prefix, steps
from dmoe_jax.directory.members import list_members, withdraw
from dmoe_jax.directory.slots import Child, Renewals, Replica, by_preference, children_of_untrusted, subkey_of
from dmoe_jax.routing.beam_search import Coordinates, search_beams
from dmoe_net.dht.messages import contact_to_wire, parse_contact_untrusted
from dmoe_net.dht.node import DhtNode, StoreItem
from dmoe_net.dht.records import Record, Value, live, merge
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import Contact, PeerId
from dmoe_net.nursery import background_nursery
from dmoe_net.peer_health import Pause, PeerHealth

MAX_CACHED_PREFIXES = 16_384
"""Most prefixes that a directory remembers; the least recently used go first. A 4-D grid of 16^4 experts has
4369."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryConfig:
    """Settings of the look-up of experts: the age of answers, and pauses of hosts and experts that fail."""

    ttl_s: float = 10.0
    """Longest age of what is answered without asking the DHT, seconds. Half of it is when the background asks."""
    negative_ttl_s: float = 5.0
    """The same for a prefix without children, seconds; at most `ttl_s`: new experts should be seen soon."""
    idle_s: float = 60.0
    """A prefix that nobody asked for during this time is no longer refreshed, seconds."""
    backoff_base_s: float = 1.0
    """First pause after a host or an expert failed, seconds; doubles with each failure in a row. 0: none is ever
    avoided."""
    backoff_cap_s: float = 60.0
    """Longest pause, seconds."""

    def __post_init__(self) -> None:
        if not 0 < self.negative_ttl_s <= self.ttl_s <= self.idle_s:
            raise ValueError(f"expected 0 < negative_ttl_s <= ttl_s <= idle_s, got {self}")


_SERVICE = "expert"
"""RPC's name for the methods of experts: the first word of `expert.forward`."""


def host_target(contact: Contact) -> tuple[PeerId, str]:
    """The target in `dmoe_net.peer_health` of a host's failures to answer for its experts."""
    return contact.peer_id, _SERVICE


def expert_target(contact: Contact, uid: str) -> tuple[PeerId, str]:
    """The same for the failures of a single expert there, whatever its host is like."""
    return contact.peer_id, uid


async def declare_experts(
    dht: DhtNode,
    uids: Sequence[ExpertUid],
    contact: Contact,
    *,
    expiration: float,
    slots: Mapping[ExpertUid, int] | None = None,
) -> dict[ExpertUid, bool]:
    """Announce that `contact` serves these experts until `expiration` (swarm time, seconds).

    Args:
      slots: the slot of each expert, see `dmoe_jax.directory.slots`; 0 for those that are not named.

    Returns: for each uid whether its announcement stands (see `DhtNode.store_many`). It does not if another host has
      announced the same expert for longer in that slot, or nobody could be reached.

    Raises:
      ValueError: there is no such slot.
    """
    slots = slots or {}
    items: dict[tuple[str, str], StoreItem] = {}
    for uid in uids:
        *inner, last = _steps(uid, slots)
        values = {**dict.fromkeys(inner, True), last: contact_to_wire(contact)}
        for (key, subkey), value in values.items():
            items[key, subkey] = StoreItem(key=key, subkey=subkey, value=value, expiration=expiration)
    accepted = dict(zip(items, await dht.store_many(items.values()), strict=True))
    # Only the last step counts. An inner one is rejected when another host vouches for the row for longer: just as
    # good.
    return {uid: accepted[_steps(uid, slots)[-1]] for uid in uids}


async def withdraw_experts(
    dht: DhtNode, uids: Sequence[ExpertUid], contact: Contact, *, slots: Mapping[ExpertUid, int] | None = None
) -> None:
    """Take this contact's announcements back: its entries become None and end just after they would have ended.

    Entries of rows (`ffn.` -> `3`) stay until they end, since others may serve experts there; readers cope
    with rows that have no living child. Announcements of other hosts stay.
    """
    await withdraw(dht, [_steps(uid, slots or {})[-1] for uid in uids], lambda value: _is_of(value, contact))


async def find_replicas(dht: DhtNode, uids: Sequence[ExpertUid]) -> dict[ExpertUid, tuple[Replica, ...]]:
    """The nodes that serve these experts now, in the order of slots, straight from the DHT."""
    rows = {uid: steps(uid)[-1][0] for uid in uids}
    found = await dht.get_many(rows.values())
    children = {row: children_of_untrusted(record) for row, record in found.items()}
    now = dht.clock.now()
    return {uid: children[row].get(uid.coordinates[-1], Child()).living(now) for uid, row in rows.items()}


@dataclass(slots=True, kw_only=True)
class _Cached:
    used_at: float
    fetched_at: float = -math.inf
    record: Record | None = None
    children: dict[int, Child] = field(default_factory=dict)


class ExpertDirectory:
    """What a trainer knows of the living experts. Made by `open_expert_directory`.

    Hosts and experts that failed of late (see `dmoe_net.peer_health`) count as dead for a while. Every method may be
    cancelled; what it had asked the DHT for still arrives and is kept.
    """

    def __init__(self, dht: DhtNode, nursery: trio.Nursery, *, swarm: str, config: DirectoryConfig) -> None:
        self.health: PeerHealth = dht.health
        """Who failed, shared with RPC. Targets are of `host_target` and of `expert_target`."""
        self._dht = dht
        self._nursery = nursery
        self._swarm = swarm
        self._config = config
        self._pause = Pause(first_s=config.backoff_base_s, longest_s=config.backoff_cap_s)
        self._cache: dict[str, _Cached] = {}  # from least to most recently used
        self._in_flight: dict[str, trio.Event] = {}
        self._call_seconds: dict[PeerId, float] = {}
        self._busy_until: dict[PeerId, float] = {}
        self._renewals = Renewals()
        self._loads_asked_at = -math.inf

    def call_seconds(self) -> Mapping[PeerId, float]:
        """How long a call has lately spent at each node, as the nodes publish it, seconds; those that had any.

        What is known, at once; it is asked for in the background when it is older than `ttl_s`.
        """
        now = self._now()
        if now >= self._loads_asked_at + self._config.ttl_s:
            self._loads_asked_at = now
            self._nursery.start_soon(self._fetch_loads)
        return self._call_seconds

    async def _fetch_loads(self) -> None:
        members = await list_members(self._dht, self._swarm)
        published = {member.peer_id: member.info.get("call_s") for member in members if member.role == "node"}
        self._call_seconds = {
            peer: seconds
            for peer, seconds in published.items()
            if isinstance(seconds, float) and 0 < seconds < math.inf
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
        return not self._is_avoided(contact, uid)

    def another(self, uid: str, contact: Contact) -> Contact | None:
        """Who else serves an expert and has neither failed of late nor is busy, from memory; None if nobody does."""
        name, _, coordinate = uid.rpartition(".")
        cached = self._cache.get(f"{name}.")
        child = cached.children.get(int(coordinate)) if cached else None
        others = [
            replica.contact
            for replica in (child.living(self._now()) if child else ())
            if replica.contact.peer_id != contact.peer_id and not self._is_avoided(replica.contact, uid)
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

    async def children(self, prefixes: Iterable[str]) -> dict[str, dict[int, Contact | None]]:
        """The living children of prefixes such as `ffn.3.`: coordinate -> who serves the expert, None for a
        row.

        Answers from memory if that is fresh; otherwise asks the DHT, once for all who ask for the same prefix.
        """
        names = list(dict.fromkeys(prefixes))
        await self._refresh([name for name in names if not self._touch(name)])
        now = self._now()
        return {name: self._living(name, now) for name in names}

    async def living(self, prefix: str, grid_size: Sequence[int]) -> dict[Coordinates, Contact]:
        """Every living expert of a grid, and who serves it, in the order of coordinates.

        Asks for all prefixes of the grid that lead somewhere; see `beam_search` for the few that matter to a sample.

        Raises:
          ValueError: if the prefix is malformed.
        """
        check_prefix(prefix)
        paths: dict[Coordinates, Contact | None] = {(): None}
        for dim, size in enumerate(grid_size):
            found = await self._followers(prefix, paths, is_leaf=dim == len(grid_size) - 1)
            paths = {
                (*path, child): who
                for path, children in found.items()
                for child, who in children.items()
                if child < size
            }
        return {path: who for path, who in sorted(paths.items()) if who is not None}

    async def beam_search(
        self, prefix: str, scores: Sequence[np.ndarray], k: int, *, bias: np.ndarray | None = None
    ) -> tuple[np.ndarray, dict[Coordinates, Contact]]:
        """The best k living experts of a grid for each sample; see `search_beams`.

        Returns: int64 [batch, k, dims], best first, -1 where fewer are alive; and the contacts of the experts seen.

        Raises:
          ValueError: as `search_beams`, or if the prefix is malformed.
        """
        check_prefix(prefix)
        known: dict[Coordinates, list[int]] = {}
        contacts: dict[Coordinates, Contact] = {}
        while True:
            chosen, missing = search_beams(scores, known, k=k, bias=bias)
            if not missing:
                return chosen, contacts
            # Paths that are missing together are all of one length.
            found = await self._followers(prefix, missing, is_leaf=len(missing[0]) == len(scores) - 1)
            for path, children in found.items():
                known[path] = list(children)
                contacts |= {(*path, child): who for child, who in children.items() if who is not None}

    async def _followers(
        self, prefix: str, paths: Iterable[Coordinates], *, is_leaf: bool
    ) -> dict[Coordinates, dict[int, Contact | None]]:
        """The children of partial paths. A row where an expert should be, or the reverse, belongs to another grid."""
        names = {path: key_prefix(prefix, path) for path in paths}
        found = await self.children(names.values())
        return {
            path: {child: who for child, who in found[name].items() if (who is not None) == is_leaf}
            for path, name in names.items()
        }

    async def run(self) -> None:
        """Refresh what is in use before it grows old, and forget the rest. `open_expert_directory` starts it."""
        while True:
            await trio.sleep(self._config.negative_ttl_s / 4)
            now = self._now()
            for name in [n for n, cached in self._cache.items() if cached.used_at < now - self._config.idle_s]:
                if name not in self._in_flight:
                    del self._cache[name]
            await self._refresh([n for n, c in self._cache.items() if c.fetched_at <= now - self._lifetime(c) / 2])

    async def _refresh(self, names: list[str]) -> None:
        wanted = [name for name in names if name not in self._in_flight]
        for name in wanted:
            self._in_flight[name] = trio.Event()
        if wanted:
            # In a task of the directory: whoever waits may be cancelled without leaving others to wait for nothing.
            self._nursery.start_soon(self._fetch, wanted)
        await trio.lowlevel.checkpoint()
        for event in [self._in_flight[name] for name in names if name in self._in_flight]:
            await event.wait()

    async def _fetch(self, names: list[str]) -> None:
        try:
            asked_at = trio.current_time()
            found = await self._dht.get_many(names)
            now = self._now()
            for name in names:
                cached = self._cache.setdefault(name, _Cached(used_at=now))
                # Merged, not replaced: a lookup that missed a replica must not make experts disappear.
                cached.record = live(merge(cached.record, found[name]), now)
                cached.children = by_preference(children_of_untrusted(cached.record), name, self._dht.peer_id)
                cached.fetched_at = now
            children = [each for name in names if name in self._cache for each in self._cache[name].children.values()]
            self._renewals.note(children, self._troubled_at, asked_at)
        finally:
            for name in names:
                self._in_flight.pop(name).set()

    def _touch(self, name: str) -> bool:
        """Note that a prefix is in use. Return True if what is known of it is fresh."""
        now = self._now()
        cached = self._cache.pop(name, None) or _Cached(used_at=now)
        cached.used_at = now
        self._cache[name] = cached
        if len(self._cache) > MAX_CACHED_PREFIXES:
            del self._cache[next(iter(self._cache))]
        return now < cached.fetched_at + self._lifetime(cached)

    def _living(self, name: str, now: float) -> dict[int, Contact | None]:
        cached = self._cache.get(name)
        living: dict[int, Contact | None] = {}
        for coordinate, child in cached.children.items() if cached else ():
            if child.row_until > now:
                living[coordinate] = None
                continue
            uid = f"{name}{coordinate}"
            contacts = [each.contact for each in child.living(now) if not self._is_avoided(each.contact, uid)]
            if (best := self._best(contacts)) is not None:
                living[coordinate] = best
        if self._busy_until:
            # Where all are busy they are asked all the same: who waits for its turn learns more than who goes without.
            free = {coordinate: who for coordinate, who in living.items() if who is None or not self._is_busy(who)}
            return free or living
        return living

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

    def _is_avoided(self, contact: Contact, uid: str) -> bool:
        now = trio.current_time()
        targets = host_target(contact), expert_target(contact, uid)
        return any(self.health.blocks(target, now, self._pause) for target in targets)

    def _lifetime(self, cached: _Cached) -> float:
        return self._config.ttl_s if cached.children else self._config.negative_ttl_s

    def _now(self) -> float:
        return self._dht.clock.now()


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


def _steps(uid: ExpertUid, slots: Mapping[ExpertUid, int]) -> list[tuple[str, str]]:
    """Key and subkey of each step that leads to an expert, the last one to its slot."""
    *inner, (key, coordinate) = steps(uid)
    return [*inner, (key, subkey_of(coordinate, slots.get(uid, 0)))]


def _is_of(value: Value, contact: Contact) -> bool:
    try:
        return parse_contact_untrusted(value).peer_id == contact.peer_id
    except RemoteProtocolError:
        return False
