"""A node of the DHT: the public face, and the shell around the lookup.

async with open_dht_node(peer, clock=clock, rng=rng, initial_peers=[address]) as dht:
    await dht.store("answer", 42, expiration=clock.now() + 60)
    found = await dht.get("answer")
"""

import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import trio

from dmoe_net.clock import SwarmClock
from dmoe_net.dht.calls import PEER_ERRORS, DhtCalls
from dmoe_net.dht.config import DhtConfig
from dmoe_net.dht.lookup import Lookup
from dmoe_net.dht.maintenance import JobQueue, Maintenance
from dmoe_net.dht.peer_book import PeerBook
from dmoe_net.dht.records import MAX_KEY_BYTES, Record, SubkeyEntry, Value, check_subkey, live, make_entry, merge
from dmoe_net.dht.routing_table import NodeId, key_id, node_id
from dmoe_net.dht.storage import RecordStorage
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.nursery import background_nursery
from dmoe_net.rpc.base import Caller, handlers
from dmoe_net.wire.codec import decode_untrusted, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreItem:
    """One thing to store."""

    key: str
    """Name of the record, at most 512 bytes."""
    value: Value
    """A value as `dmoe_net.dht.records` allows it."""
    expiration: float
    """Absolute swarm time, seconds; brought down to now plus `DhtConfig.max_lifetime_s`."""
    subkey: str | None = None
    """Name in the key's dictionary; None for the key's plain value."""


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
    """Their encoded size (an upper bound)."""
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


class DhtNode:
    """One peer's part of the DHT. Made by `open_dht_node`; every method may be cancelled at any time.

    No method raises because of other peers: a store that reached nobody is False, a get that found nothing None.
    """

    def __init__(
        self,
        caller: Caller,
        *,
        clock: SwarmClock,
        rng: random.Random,
        initial_peers: Sequence[Contact | Address],
        is_client: bool,
        config: DhtConfig,
    ) -> None:
        self.peer_id = caller.peer_id
        self.address = caller.address
        self.clock = clock
        self.config = config
        self.health = caller.health
        self._own_contact = None if is_client or self.address is None else Contact(self.peer_id, self.address)
        self._storage = RecordStorage(max_keys=config.max_keys, max_bytes=config.max_storage_bytes)
        self._jobs = JobQueue()
        self._book = PeerBook(
            node_id(self.peer_id),
            config=config,
            health=self.health,
            now=trio.current_time(),
            check=self._jobs.check,
            hand_over=self._jobs.hand_over,
        )
        self._calls = DhtCalls(
            caller=caller,
            book=self._book,
            storage=self._storage,
            clock=clock,
            config=config,
            is_client=self.is_client,
        )
        self._maintenance = Maintenance(
            initial_peers=initial_peers, jobs=self._jobs, calls=self._calls, lookup=self.find_nearest, rng=rng
        )
        # A table of thousands of keys must not open thousands of lookups: each is some twenty calls and their memory.
        self._operations = trio.CapacityLimiter(config.max_concurrent_operations)
        self._lookups = 0
        self._queries = 0

    @property
    def is_client(self) -> bool:
        """True if the node only asks: it serves nothing, keeps nothing for others, and is in nobody's table."""
        return self._own_contact is None

    async def store(self, key: str, value: Value, *, expiration: float, subkey: str | None = None) -> bool:
        """Store one value, as `store_many` does."""
        item = StoreItem(key=key, value=value, expiration=expiration, subkey=subkey)
        return (await self.store_many([item]))[0]

    async def store_many(self, items: Iterable[StoreItem]) -> list[bool]:
        """Store values on the `replicas` peers nearest to each key. Items of one key share a lookup and its calls.

        This node is one of the replicas if it is among the nearest, and never in client mode. If cancelled, any of
        the stores may or may not have happened.

        Returns:
          for each item True if most of the replicas that answered accepted it. They do not if they hold something that
          expires later (or, at the same time, differs), or if the item has expired.

        Raises:
          ValueError: a key, subkey, value or expiration is not allowed; nothing has been stored then.
        """
        items = list(items)
        latest = self._calls.latest_expiration
        by_key: dict[str, list[int]] = {}
        updates: list[SubkeyEntry] = []
        for index, item in enumerate(items):
            by_key.setdefault(_check_key(item.key), []).append(index)
            entry = make_entry(item.value, min(item.expiration, latest))
            # A copy: the caller may change a list afterwards.
            entry = replace(entry, value=decode_untrusted(encode(entry.value)))
            updates.append((check_subkey(item.subkey), entry))
        results = [False] * len(items)

        async def store_key(key: str, indices: list[int]) -> None:
            async with self._operations:
                verdicts = await self._store(key_id(key), [updates[index] for index in indices])
            for index, verdict in zip(indices, verdicts, strict=True):
                results[index] = verdict

        async with trio.open_nursery() as nursery:
            for key, indices in by_key.items():
                nursery.start_soon(store_key, key, indices)
        return results

    async def get(self, key: str) -> Record | None:
        """Look a key up: ask all of the nearest peers and merge their copies; later expirations win.

        Returns:
          the part that has not expired, read-only: an `Entry`, a `Dictionary` of entries by subkey, or None.

        Raises:
          ValueError: the key is not a string of at most 512 bytes.
        """
        target = key_id(_check_key(key))
        lookup = await self._walk(target, record=True)
        now = self.clock.now()
        return live(merge(self._storage.get(target, now), lookup.record), now)

    async def get_many(self, keys: Iterable[str]) -> dict[str, Record | None]:
        """`get` for several keys, some at a time; each distinct key is looked up once."""
        found: dict[str, Record | None] = dict.fromkeys(_check_key(key) for key in keys)

        async def get_one(key: str) -> None:
            async with self._operations:
                found[key] = await self.get(key)

        async with trio.open_nursery() as nursery:
            for key in found:
                nursery.start_soon(get_one, key)
        return found

    async def find_nearest(self, target: NodeId) -> tuple[Contact, ...]:
        """The peers nearest to an id that answer, nearest first; without this node itself."""
        return (await self._walk(target, record=False)).closest()

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
            blacklisted=self._book.left_alone(trio.current_time()),
            lookups=self._lookups,
            queries=self._queries,
            dropped_jobs=self._jobs.dropped,
            clock_skew_s=self.clock.skew_s,
        )

    async def _store(self, target: NodeId, updates: Sequence[SubkeyEntry]) -> list[bool]:
        candidates = list(await self.find_nearest(target))
        if self._own_contact is not None:
            candidates.append(self._own_contact)
            candidates.sort(key=lambda contact: node_id(contact.peer_id) ^ target)
        remaining = iter(candidates)
        verdicts: list[tuple[bool, ...]] = []

        async def fill_one_replica() -> None:
            for contact in remaining:  # shared: each takes the nearest that has not been tried
                if contact == self._own_contact:
                    verdicts.append(self._storage.store(target, updates, self.clock.now()))
                    return
                try:
                    verdicts.append(await self._calls.store(contact, target, updates))
                except PEER_ERRORS:
                    continue
                return

        async with trio.open_nursery() as nursery:
            for _ in range(self.config.replicas):
                nursery.start_soon(fill_one_replica)
        return [2 * sum(votes) > len(votes) for votes in zip(*verdicts, strict=True)] or [False] * len(updates)

    async def _walk(self, target: NodeId, *, record: bool) -> Lookup:
        table, local_id = self._book.table, self._book.table.local_id
        now = trio.current_time()
        seeds = self._book.usable(table.nearest(target, self.config.lookup.beam_size), now)
        lookup = Lookup(target, seeds, local_id=local_id, config=self.config.lookup)
        table.looked_up(target, now)
        with trio.move_on_after(self.config.lookup_timeout_s):
            await self._carry_out(lookup, record=record)
        for contact in lookup.unresponsive():
            self._jobs.check(contact)
        self._lookups += 1
        self._queries += lookup.queries
        return lookup

    async def _carry_out(self, lookup: Lookup, *, record: bool) -> None:
        changed = trio.Event()

        async def ask(contact: Contact) -> None:
            try:
                contacts, found = await self._calls.find(contact, lookup.target, record=record)
            except PEER_ERRORS:
                lookup.on_failure(contact.peer_id)
            else:
                usable = self._book.usable(contacts, trio.current_time())
                lookup.on_success(contact.peer_id, usable, found)
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
    clock: SwarmClock,
    rng: random.Random,
    initial_peers: Sequence[Contact | Address] = (),
    client_mode: bool = False,
    config: DhtConfig = DhtConfig(),  # noqa: B008 (frozen)
) -> AsyncIterator[DhtNode]:
    """Join the DHT, and stay in it until the block ends. Records held for others are not handed on then: owners declare
    again, replicas remain.

    Args:
      caller: places and serves the calls; one DHT node at a time serves on it.
      initial_peers: peers to join through, tried all at once; a contact must be who it says, an address may be anybody.
        Without any, the node is the first of a new swarm.
      client_mode: only ask, never serve; implied when `caller` listens nowhere.

    Raises:
      DialFailed: naming the initial peers, when there are any and none answered.
      ValueError: another DHT node serves on `caller`.
    """
    is_client = client_mode or caller.address is None
    node = DhtNode(caller, clock=clock, rng=rng, initial_peers=initial_peers, is_client=is_client, config=config)
    with handlers(caller, node._calls.handlers()):
        await node._maintenance.join()
        async with background_nursery() as nursery:
            nursery.start_soon(node._maintenance.run)
            yield node


def _check_key(key: str) -> str:
    if not isinstance(key, str) or len(key.encode()) > MAX_KEY_BYTES:
        raise ValueError(f"a DHT key is a string of at most {MAX_KEY_BYTES} bytes, got {key!r:.80}")
    return key
