"""A node of the DHT: the public face, and the shell around the lookup.

async with open_dht_node(peer, identity=identity, clock=clock, rng=rng, initial_peers=[address]) as dht:
    await dht.store("answer", 42, life_s=60)
    found = await dht.get("answer")   # found[0].value == 42, found[0].owner == peer.peer_id
"""

import random
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

import trio

from dmoe_net.clock import SwarmClock
from dmoe_net.dht.calls import PEER_ERRORS, DhtCalls
from dmoe_net.dht.config import DhtConfig
from dmoe_net.dht.copies import Copies, nearest
from dmoe_net.dht.entries import (
    MAX_LIFE_S,
    MAX_SKEW_S,
    Entry,
    EntryReader,
    Found,
    SignedEntries,
    Subkey,
    Value,
    check_life,
    check_suffix,
    encode_value,
    sign_entry,
)
from dmoe_net.dht.lookup import Lookup, LookupConfig
from dmoe_net.dht.maintenance import JobQueue, Maintenance
from dmoe_net.dht.peer_book import PeerBook
from dmoe_net.dht.reading import RecordReader
from dmoe_net.dht.routing_table import MAX_KEY_BYTES, NodeId, key_id, node_id
from dmoe_net.dht.storage import EntryStorage, Held, Verdict
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.keys import OPEN_SWARM, Identity
from dmoe_net.nursery import background_nursery, for_each
from dmoe_net.rpc.base import Caller, handlers

_COPIES = 2
"""Copies of a record that a reader takes: one holder may have come too late for some of its entries."""

_STORE_BEAM = 8
"""Nearest peers that a writer asks: more than keep the record, for some of them may not take it."""

_LINGER_S = 2.0
"""Seconds by which an entry outlives its end as its owner sees it: holders count from when it came to them."""

_MAX_ISSUED = 65_536
"""Entries of this node that are remembered; beyond it those that have ended are forgotten."""

_CONTACTS = 12
"""Contacts wanted of each peer on the way to a record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreItem:
    """One thing to store."""

    key: str
    """Name of the record, at most 512 bytes."""
    value: Value
    """A value as `dmoe_net.dht.entries` allows it."""
    life_s: float
    """Seconds that it lives, at most `MAX_LIFE_S`."""
    suffix: str = ""
    """Tells several entries of this peer under one key apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DhtStatistics:
    """A snapshot of a node's state and counters since it started."""

    contacts: int
    """Peers in the routing table."""
    buckets: int
    """Buckets of the routing table."""
    records: int
    """Records kept for the swarm."""
    record_bytes: int
    """Bytes of their entries."""
    verified: int
    """Signatures of entries verified."""
    blacklisted: tuple[PeerId, ...]
    """Peers left alone now."""
    lookups: int
    """Lookups finished."""
    queries: int
    """Questions asked in them."""
    dropped_jobs: int
    """Follow-ups dropped because their queue was full."""
    clock_skew_s: float | None
    """See `SwarmClock.skew_s`."""


class _Issued(NamedTuple):
    """The last entry that was issued under a subkey of this node."""

    sequence: int
    ends_at: float  # by the clock's ticks
    life_s: float


class DhtNode:
    """One peer's part of the DHT. Made by `open_dht_node`; every method may be cancelled at any time.

    No method raises because of other peers: a store that reached nobody counts 0, a get that found nothing is empty.
    """

    def __init__(
        self,
        caller: Caller,
        *,
        identity: Identity,
        swarm: bytes,
        clock: SwarmClock,
        rng: random.Random,
        is_client: bool,
        config: DhtConfig,
    ) -> None:
        self.peer_id = caller.peer_id
        self.address = caller.address
        self.clock = clock
        self.config = config
        self.health = caller.health
        self._identity = identity
        self._own_contact = None if is_client or self.address is None else Contact(self.peer_id, self.address)
        # Chance that changes nothing, not even in a simulation: it is only compared with another.
        epoch = int.from_bytes(secrets.token_bytes(8))
        self._storage = EntryStorage(max_bytes=config.max_storage_bytes, epoch=epoch)
        self._stored_at = Copies(life_s=config.holders_life_s)
        self._issued: dict[tuple[NodeId, str], _Issued] = {}
        self._reader = EntryReader(swarm)
        self._jobs = JobQueue()
        self._book = PeerBook(
            node_id(self.peer_id),
            config=config,
            health=self.health,
            now=trio.current_time(),
            check=self._jobs.check,
            hand_over=self._jobs.hand_over,
            is_reached=caller.is_reached,
        )
        self._calls = DhtCalls(
            caller=caller,
            book=self._book,
            storage=self._storage,
            reader=self._reader,
            clock=clock,
            config=config,
            is_client=self.is_client,
        )
        self._reading = RecordReader(self._calls)
        self._maintenance = Maintenance(
            jobs=self._jobs,
            calls=self._calls,
            read=self._reading.entries,
            stored_at=self._stored_at,
            rng=rng,
        )
        # A table of thousands of keys must not open thousands of lookups: each is some ten calls and their memory.
        self._gets, self._stores = (trio.CapacityLimiter(config.max_concurrent_operations) for _ in range(2))
        self._lookups = 0
        self._queries = 0

    @property
    def is_client(self) -> bool:
        """True if the node only asks: it serves nothing, keeps nothing for others, and is in nobody's table."""
        return self._own_contact is None

    async def store(self, key: str, value: Value, *, life_s: float, suffix: str = "") -> int:
        """Store one value, as `store_many` does."""
        return (await self.store_many([StoreItem(key=key, value=value, life_s=life_s, suffix=suffix)]))[0]

    async def store_many(self, items: Iterable[StoreItem]) -> list[int]:
        """Store values, signed by this peer, on the `replicas` peers nearest to each key.

        A value takes the place of what this peer stored under the same key and suffix before; nobody else's entries
        change. Items of one key share a lookup and its calls. This node is one of the replicas if it is among the
        nearest, and never in client mode. If cancelled, any of the stores may or may not have happened.

        Returns:
          for each item the number of peers that keep it now; 0 if nobody could be reached, or had room.

        Raises:
          ValueError: a key, suffix, value or life is not allowed; nothing has been stored then.
        """
        items = list(items)
        by_key: dict[NodeId, list[int]] = {}
        values = [encode_value(item.value) for item in items]
        for index, item in enumerate(items):
            by_key.setdefault(key_id(check_key(item.key)), []).append(index)
            check_suffix(item.suffix)
            check_life(item.life_s)
        counts = [0] * len(items)

        async def store_key(key: NodeId, indices: list[int]) -> None:
            def issue() -> SignedEntries:
                return [self._issue(key, items[i].suffix, values[i], items[i].life_s) for i in indices]

            taken = await self._store(key, issue)
            for index, count in zip(indices, taken, strict=True):
                counts[index] = count

        await for_each(store_key, by_key.keys(), by_key.values())
        return counts

    async def withdraw(self, key: str, suffix: str = "") -> None:
        """Take back what this peer stored under a key and suffix, if that still lives."""
        await self.withdraw_many([(key, suffix)])

    async def withdraw_many(self, names: Iterable[tuple[str, str]]) -> None:
        """Take back several entries of this peer, by key and suffix."""
        by_key: dict[NodeId, list[str]] = {}
        for key, suffix in names:
            target = key_id(check_key(key))
            issued = self._issued.get((target, check_suffix(suffix)))
            if issued is not None and issued.ends_at + _LINGER_S > self.clock.ticks():
                by_key.setdefault(target, []).append(suffix)

        async def withdraw_key(key: NodeId, suffixes: list[str]) -> None:
            def issue() -> SignedEntries:
                # It has to stand for as long as somebody could still believe what it takes back.
                lives = [min(self._issued[key, suffix].life_s + MAX_SKEW_S, MAX_LIFE_S) for suffix in suffixes]
                return [self._issue(key, suffix, None, life) for suffix, life in zip(suffixes, lives, strict=True)]

            await self._store(key, issue)

        await for_each(withdraw_key, by_key.keys(), by_key.values())

    async def get(self, key: str, *, thoroughly: bool = False) -> tuple[Found, ...]:
        """Look a record up: its living entries, in the order of owners and suffixes.

        What was read before is remembered while it lives: a holder that lacks an entry does not take it away. Asks a
        peer that held the record a moment ago for what changed since, else the peers nearest to the key, until two of
        them have a copy; where these have several pages, until one has come whole.

        Args:
          thoroughly: True to read the copies of all peers that should keep the record: then an entry that one of them
            has taken is found.

        Raises:
          ValueError: the key is not a string of at most 512 bytes.
        """
        target = key_id(check_key(key))
        if thoroughly or not await self._reading.read_changes(target):
            await self._walk_to_record(target, thoroughly=thoroughly)
        return self._living(target)

    async def get_many(self, keys: Iterable[str], *, thoroughly: bool = False) -> dict[str, tuple[Found, ...]]:
        """`get` for several keys, some at a time; each distinct key is looked up once."""
        found: dict[str, tuple[Found, ...]] = {check_key(key): () for key in keys}

        async def get_one(key: str) -> None:
            async with self._gets:
                found[key] = await self.get(key, thoroughly=thoroughly)

        await for_each(get_one, found)
        return found

    async def find_nearest(self, target: NodeId, beam_size: int | None = None) -> tuple[Contact, ...]:
        """The peers nearest to an id that answer, nearest first, `bucket_size` of them unless told; without this node
        itself."""
        size = self.config.bucket_size if beam_size is None else beam_size
        return (await self._walk(target, beam_size=size)).closest()

    def rejoin_through(self, peers: Iterable[Contact | Address]) -> None:
        """Take other peers for the initial ones from now on: they are tried every minute, and by whoever knows nobody
        every five seconds (`DhtConfig.rejoin_period_s`)."""
        self._maintenance.name_initial_peers(peers)

    def contacts(self) -> tuple[Contact, ...]:
        """The routing table's contacts."""
        return self._book.table.contacts()

    def statistics(self) -> DhtStatistics:
        """A snapshot."""
        return DhtStatistics(
            contacts=len(self._book.table),
            buckets=self._book.table.bucket_count,
            records=len(self._storage),
            record_bytes=self._storage.bytes_held,
            verified=self._reader.verified,
            blacklisted=self._book.left_alone(trio.current_time()),
            lookups=self._lookups,
            queries=self._queries,
            dropped_jobs=self._jobs.dropped,
            clock_skew_s=self.clock.skew_s,
        )

    def _issue(self, key: NodeId, suffix: str, value: bytes | None, life_s: float) -> tuple[Entry, float]:
        """Sign the next entry of this node under a subkey."""
        now, ticks = self.clock.now(), self.clock.ticks()
        before = self._issued.get((key, suffix))
        # A process that is started again goes on above what it issued before, unless its clock was set back.
        sequence = max(int(now * 1000), 0 if before is None else before.sequence + 1)
        if len(self._issued) > _MAX_ISSUED:
            self._issued = {name: each for name, each in self._issued.items() if each.ends_at > ticks}
        self._issued[key, suffix] = _Issued(sequence, ticks + life_s, life_s)
        entry = sign_entry(
            self._identity,
            key,
            suffix=suffix,
            value=value,
            sequence=sequence,
            issued_at=now,
            life_s=life_s,
            swarm=self._reader.swarm,
        )
        return entry, entry.life_s

    async def _store(self, target: NodeId, issue: Callable[[], SignedEntries]) -> list[int]:
        """Store what `issue` signs at the nearest peers; return for each entry the number of those that took it."""
        async with self._stores:
            taken, is_outrun = await self._store_once(target, issue())
            if is_outrun:  # an earlier life of this process, or another one with its key, has issued higher sequences
                taken, _ = await self._store_once(target, issue())
        return taken

    async def _store_once(self, target: NodeId, entries: SignedEntries) -> tuple[list[int], bool]:
        """Store entries; return the number of peers that took each, and True if one was outrun by another of ours."""
        now = trio.current_time()
        verdicts: dict[Contact, list[Verdict]] = {}
        named: list[Contact] = []
        failed: list[Contact] = []

        async def store_at(contact: Contact) -> None:
            if contact == self._own_contact:
                verdicts[contact] = self._calls.take(target, entries, self.peer_id)
                return
            try:
                verdicts[contact], theirs = await self._calls.store(contact, target, entries)
            except PEER_ERRORS:
                failed.append(contact)
            else:
                named.extend(self._book.usable(theirs, trio.current_time()))

        async def fill(candidates: Sequence[Contact]) -> None:
            """Store at the nearest of these, and where one fails at the next."""
            wanted = [contact for contact in candidates[: self.config.replicas] if contact not in verdicts]
            remaining = iter([contact for contact in candidates if contact not in verdicts])

            async def fill_one(*_: object) -> None:
                for contact in remaining:  # shared: each task takes the nearest that has not been tried
                    await store_at(contact)
                    if any(v is None or v.held is not None for v in verdicts.get(contact, ())):
                        return

            await for_each(fill_one, wanted)

        known = self._stored_at.holders(target, now)
        await for_each(store_at, known)
        has_walked = not known or bool(failed)
        if has_walked:
            walk = await self._walk(target, beam_size=max(_STORE_BEAM, self.config.replicas))
            own = () if self._own_contact is None else (self._own_contact,)
            await fill(nearest((c for c in (*walk.closest(), *own) if c not in failed), target))
        # Peers that came since the last walk, and are nearer than some of those that took it.
        near = nearest((*verdicts, *named), target, self.config.replicas)
        known_or_failed = {contact.peer_id for contact in (*verdicts, *failed)} | {self.peer_id}
        await for_each(store_at, [contact for contact in near if contact.peer_id not in known_or_failed])
        keepers = (c for c, each in verdicts.items() if any(v is None or v.held is not None for v in each))
        holders = nearest(keepers, target, self.config.replicas)
        if has_walked:
            self._stored_at.walked(target, holders, trio.current_time())
        else:
            self._stored_at.changed(target, holders)
        counts = [sum(verdict is None for verdict in votes) for votes in zip(*verdicts.values(), strict=True)]
        return counts or [0] * len(entries), self._learn_sequences(target, verdicts.values())

    def _learn_sequences(self, target: NodeId, verdicts: Iterable[Sequence[Verdict]]) -> bool:
        """Take note of entries of this node that stand in the way of later ones; True if there are any."""
        is_outrun = False
        for verdict in (verdict for each in verdicts for verdict in each):
            if verdict is not None and verdict.ahead_s:
                self.clock.refused(verdict.ahead_s)
            held = None if verdict is None else verdict.held
            if held is None or held.owner != self.peer_id:
                continue
            issued = self._issued.get((target, held.suffix))
            if issued is not None and held.sequence > issued.sequence:
                self._issued[target, held.suffix] = issued._replace(sequence=held.sequence)
                is_outrun = True
        return is_outrun

    def _living(self, target: NodeId) -> tuple[Found, ...]:
        """Living entries of a record, from what was read and what is kept here: the newest version of each."""
        now, newest = self.clock.ticks(), dict[Subkey, Held]()
        for held in (*self._reading.entries.get(target, now), *self._storage.get(target, now)):
            before = newest.get(held.entry.subkey)
            if before is None or before.entry.sequence < held.entry.sequence:
                newest[held.entry.subkey] = held
        return tuple(
            Found(*subkey, held.entry.value, held.ends_at, held.entry.life_s)
            for subkey, held in sorted(newest.items(), key=lambda item: (item[0].owner.raw, item[0].suffix))
            if not held.entry.is_withdrawn
        )

    async def _walk_to_record(self, target: NodeId, *, thoroughly: bool) -> None:
        """Walk to the peers that hold a record, until enough copies were read, and remember them."""
        copies = self.config.replicas if thoroughly else _COPIES
        own = self._own_contact is not None and bool(self._storage.get(target, self.clock.ticks()))
        # Further pages are no part of the walk, in which a peer that takes long is passed over.
        async with self._reading.reading_on(target, all_copies=thoroughly) as read_on:
            walk = await self._walk(target, beam_size=self.config.replicas, copies=copies - own, read_on=read_on)
        self._reading.holders.walked(target, walk.holders, trio.current_time())

    async def _walk(
        self,
        target: NodeId,
        *,
        beam_size: int,
        copies: int = 0,
        read_on: Callable[[Contact], None] = lambda holder: None,
    ) -> Lookup:
        """Walk towards an id; `read_on` is called for each holder of whose copy further pages are to be read."""
        table, local_id = self._book.table, self._book.table.local_id
        now = trio.current_time()
        seeds = self._book.usable(table.nearest(target, self.config.bucket_size), now)
        lookup = Lookup(
            target,
            seeds,
            local_id=local_id,
            config=LookupConfig(beam_size=beam_size, parallelism=self.config.parallelism, copies=copies),
            patience=lambda peer_id: self._calls.patience.of(peer_id, trio.current_time()),
        )
        table.looked_up(target, now)
        with trio.move_on_after(self.config.lookup_timeout_s):
            await self._carry_out(lookup, read_on)
        for contact in lookup.unresponsive():
            self._jobs.check(contact)
        self._lookups += 1
        self._queries += lookup.queries
        return lookup

    async def _carry_out(self, lookup: Lookup, read_on: Callable[[Contact], None]) -> None:
        changed = trio.Event()
        contacts, record = max(_CONTACTS, lookup.config.beam_size), lookup.config.copies > 0

        async def ask(contact: Contact) -> None:
            try:
                found = await self._reading.find(contact, lookup.target, contacts=contacts, record=record)
            except PEER_ERRORS:
                lookup.on_failure(contact.peer_id)
            else:
                usable = self._book.usable(found.contacts, trio.current_time())
                # Anybody can say that nothing in its copy is news; of a copy something must have been seen.
                is_seen = found.entries or self._reading.holders.position(lookup.target, contact.peer_id) is not None
                lookup.on_success(contact.peer_id, usable, holds=found.position is not None and bool(is_seen))
                if found.pages:
                    read_on(contact)
            changed.set()

        async with trio.open_nursery() as nursery:
            while (step := lookup.next(trio.current_time())) is not None:
                if isinstance(step, Contact):
                    nursery.start_soon(ask, step)
                    continue
                changed = trio.Event()
                with trio.CancelScope(deadline=step):
                    await changed.wait()
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_dht_node(
    caller: Caller,
    *,
    identity: Identity,
    clock: SwarmClock,
    rng: random.Random,
    swarm: bytes = OPEN_SWARM,
    initial_peers: Sequence[Contact | Address] = (),
    remembered: Sequence[Contact] = (),
    client_mode: bool = False,
    config: DhtConfig = DhtConfig(),  # noqa: B008 (frozen)
) -> AsyncIterator[DhtNode]:
    """Join the DHT, and stay in it until the block ends. Records held for others are not handed on then: owners declare
    again, replicas remain.

    Args:
      caller: places and serves the calls; one DHT node at a time serves on it.
      identity: key of the same peer; signs its entries.
      swarm: tag of the swarm for which they are signed, see `dmoe_net.keys.Membership.tag`.
      initial_peers: peers to join through, tried all at once; a contact must be who it says, an address may be anybody.
        Without any, the node is the first of a new swarm.
      remembered: peers of an earlier life of this one, tried beside the initial ones; none of them need answer.
      client_mode: only ask, never serve; implied when `caller` listens nowhere.

    Raises:
      DialFailed: naming the initial peers, when there are any and none answered.
      ValueError: another DHT node serves on `caller`, or the identity is another peer's.
    """
    if identity.peer_id != caller.peer_id:
        raise ValueError(f"the identity is that of {identity.peer_id}, the caller is {caller.peer_id}")
    node = DhtNode(
        caller,
        identity=identity,
        swarm=swarm,
        clock=clock,
        rng=rng,
        is_client=client_mode or caller.address is None,
        config=config,
    )
    with handlers(caller, node._calls.handlers()):
        await node._maintenance.join(initial_peers, remembered, node.find_nearest)
        async with background_nursery() as nursery:
            nursery.start_soon(node._maintenance.run, nursery, node.find_nearest)
            yield node


def check_key(key: str) -> str:
    """Return a record's key. Raises ValueError if it is no string of at most `MAX_KEY_BYTES`."""
    if not isinstance(key, str) or len(key.encode()) > MAX_KEY_BYTES:
        raise ValueError(f"a DHT key is a string of at most {MAX_KEY_BYTES} bytes, got {key!r:.80}")
    return key
