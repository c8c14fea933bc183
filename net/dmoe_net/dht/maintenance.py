"""The background of a DHT node: meet newcomers, hand records over, refresh, find lost peers again, sweep."""

import random
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial

import trio

from dmoe_net.dht.calls import PEER_ERRORS, DhtCalls
from dmoe_net.dht.copies import Copies, nearest
from dmoe_net.dht.routing_table import NodeId
from dmoe_net.dht.storage import EntryStorage
from dmoe_net.errors import DialFailed
from dmoe_net.identity import Address, Contact, address_of

MAX_JOBS = 256
"""Most jobs waiting. Further ones are dropped: a peer that is met again makes the same job again."""

WORKERS = 4
"""Jobs under way. With silent peers (3 s each) it is 80 checks a minute, far more than a swarm at rest needs."""

MAX_STALE_BUCKETS = 16  # looked up in one refresh, the stalest first
LOST_DRAWS = 8  # lost peers tried in one round

Lookup = Callable[[NodeId, int], Awaitable[object]]
"""Walks towards an id until so many of the nearest peers have answered, and thereby fills the table."""


class JobQueue:
    """The bounded queue between the peer book and the workers. Never blocks, may drop."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Contact, bool]] = []
        """Contacts, each with True to ping it, or False to send it the records that it should hold."""
        self.checking: set[Contact] = set()
        """Contacts whose check waits or is under way: one at a time is enough."""
        self.dropped = 0
        """Jobs dropped because the queue was full."""
        self.begin: Callable[[], object] = lambda: None
        """Called with each job that waits, to have it worked on."""

    def check(self, contact: Contact) -> None:
        """Have a contact pinged soon."""
        if contact not in self.checking and self._put(contact, True):
            self.checking.add(contact)

    def hand_over(self, contact: Contact) -> None:
        """Have a contact sent the records that it should hold."""
        self._put(contact, False)

    def _put(self, contact: Contact, is_check: bool) -> bool:
        if len(self.waiting) >= MAX_JOBS:
            self.dropped += 1
            return False
        self.waiting.append((contact, is_check))
        self.begin()
        return True


class Maintenance:
    """The background of one node.

    It does not hold the node, which holds it: what a node has read goes when the node does, and not when a collector of
    circles comes by. So a `Lookup` is lent to it.

    Args:
      read: what the node has read of others.
      stored_at: the peers that keep this node's own entries.
    """

    def __init__(
        self,
        *,
        jobs: JobQueue,
        calls: DhtCalls,
        read: EntryStorage,
        stored_at: Copies,
        rng: random.Random,
    ) -> None:
        self.jobs, self.calls = jobs, calls
        self.book, self.storage, self.config = calls.book, calls.storage, calls.config
        self.read, self.stored_at = read, stored_at
        self.initial_peers: tuple[Contact | Address, ...] = ()
        self._rng = rng
        self._working = 0

    def name_initial_peers(self, peers: Iterable[Contact | Address]) -> None:
        """Put peers in the place of the initial ones, for the next time that this node rejoins."""
        others = (peer for peer in peers if address_of(peer) != self.calls.caller.address)
        self.initial_peers = tuple(dict.fromkeys(others))

    async def join(
        self, initial_peers: Iterable[Contact | Address], remembered: Iterable[Contact], lookup: Lookup
    ) -> None:
        """Meet the swarm through the initial peers, and those remembered; DialFailed if initial ones were named, and
        nobody answered."""
        self.name_initial_peers(initial_peers)
        known = tuple(peer for peer in remembered if peer.peer_id != self.calls.caller.peer_id)
        self.book.remember(known)
        targets = (*self.initial_peers, *known)
        if not targets:
            return
        if not await self._ask(targets, grace_s=self.config.bootstrap_grace_s):
            if not self.initial_peers:
                return  # they are tried again by and by
            raise DialFailed(f"none of the initial peers answered: {', '.join(map(str, self.initial_peers))}")
        await self._meet_neighbours(lookup)
        self.calls.clock.follow()

    async def _meet_neighbours(self, lookup: Lookup) -> None:
        """Walk to the own id: those who keep what is near it, and as many again, learn of this node."""
        await lookup(self.book.table.local_id, 2 * self.config.replicas)

    async def run(self, nursery: trio.Nursery, lookup: Lookup) -> None:
        """Do everything below, in a nursery, until cancelled, whatever peers do.

        At rest it is one task: a simulation has thousands of nodes.
        """
        self.jobs.begin = partial(self._begin, nursery)
        for _ in self.jobs.waiting:  # those that joining has left
            self._begin(nursery)
        try:
            await self._tend(nursery, lookup)
        finally:
            self.jobs.begin = lambda: None

    def _begin(self, nursery: trio.Nursery) -> None:
        if self._working < WORKERS:
            self._working += 1
            nursery.start_soon(self._work)

    async def _work(self) -> None:
        while self.jobs.waiting:
            contact, is_check = self.jobs.waiting.pop(0)
            with suppress(*PEER_ERRORS):  # the peer book knows
                await (self.calls.check(contact) if is_check else self._hand_over(contact))
            if is_check:
                self.jobs.checking.discard(contact)
        self._working -= 1

    async def _tend(self, nursery: trio.Nursery, lookup: Lookup) -> None:
        """Sweep, and start what is due."""
        config = self.config
        sweep_at, rejoin_at = self._after(config.sweep_period_s), self._after(config.rejoin_period_s)
        refresh_at, lonely_at = self._after(config.refresh_period_s), self._after(config.lonely_rejoin_period_s)
        while True:
            await trio.sleep_until(min(sweep_at, refresh_at, lonely_at))
            now = trio.current_time()
            if now >= sweep_at:
                sweep_at = self._after(config.sweep_period_s)
                for storage in (self.storage, self.read):
                    storage.sweep(self.calls.clock.ticks())
                self.calls.patience.sweep(now)
                self.calls.clock.follow()
            if now >= refresh_at:
                refresh_at = self._after(config.refresh_period_s)
                nursery.start_soon(self._refresh, lookup)
            if now >= lonely_at:
                lonely_at = self._after(config.lonely_rejoin_period_s)
                if now >= rejoin_at or len(self.book.table) == 0:
                    rejoin_at = self._after(config.rejoin_period_s)
                    nursery.start_soon(self._rejoin, lookup)

    def _after(self, period_s: float) -> float:
        """Return the time after a period +-25 %."""
        return trio.current_time() + period_s * self._rng.uniform(0.75, 1.25)

    async def _hand_over(self, newcomer: Contact) -> None:
        for key in [key for key, _ in self.storage.items(self.calls.clock.ticks())]:
            await trio.lowlevel.checkpoint()  # a full storage takes a while
            now = self.calls.clock.ticks()
            held = self.storage.get(key, now)
            if not self.book.owes(newcomer, key, replicas=self.config.replicas):
                # Peers nearer than this node may be newcomers too, without the record. An owner knows its holders.
                holders = self.stored_at.holders(key, trio.current_time())
                wanted = nearest((*holders, newcomer), key, self.config.replicas)
                if not holders or newcomer in holders or newcomer not in wanted:
                    continue
                held = tuple(each for each in held if each.entry.owner == self.calls.caller.peer_id)
                self.stored_at.changed(key, wanted)
            if held:
                await self.calls.store(newcomer, key, [(each.entry, each.ends_at - now) for each in held])

    async def _refresh(self, lookup: Lookup) -> None:
        """Look up buckets without lookups, which would fill with the dead (Kademlia, section 2.3)."""
        before = trio.current_time() - self.config.refresh_period_s
        stale = self.book.table.stale_targets(older_than=before, rng=self._rng)
        for target in stale[:MAX_STALE_BUCKETS]:
            await lookup(target, self.config.replicas)

    async def _rejoin(self, lookup: Lookup) -> None:
        """Try the initial peers and some lost ones: a split swarm becomes one again, and clocks stay together."""
        known = {contact.address for contact in self.book.table.contacts()}
        lost = self.book.draw_lost(LOST_DRAWS, self._rng)
        answered = await self._ask(dict.fromkeys((*self.initial_peers, *lost)), grace_s=self.config.rpc_timeout_s)
        if any(contact.address not in known for contact in answered):
            await self._meet_neighbours(lookup)

    async def _ask(self, targets: Iterable[Contact | Address], *, grace_s: float) -> tuple[Contact, ...]:
        """Ping peers, follow their clocks, and return those that answered."""
        answered = await self.calls.ping_all(targets, grace_s=grace_s)
        guides = {address_of(peer) for peer in self.initial_peers}
        self.calls.clock.follow(contact.peer_id for contact in answered if contact.address in guides)
        return answered
