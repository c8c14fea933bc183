"""What a DHT node does on its own: meet newcomers, hand records over, refresh, find lost peers again, sweep."""

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from net.clock import SwarmClock
from net.dht.calls import PEER_ERRORS, DhtCalls, first_answers, jitter
from net.dht.config import DhtConfig
from net.dht.peer_book import Met, PeerBook
from net.dht.records import as_updates
from net.dht.routing_table import NodeId
from net.dht.storage import RecordStorage
from net.identity import Address, Contact, PeerId, address_of

MAX_JOBS = 256
"""Most jobs waiting. Further ones are dropped: a peer that is met again makes the same job again."""

WORKERS = 4
"""Jobs under way. With silent peers (3 s each) it is 80 checks a minute, far more than a swarm at rest needs."""

MAX_STALE_BUCKETS = 16
"""Most lookups of one refresh; the stalest buckets come first and the others wait for the next round."""

LOST_DRAWS = 8
"""Lost peers tried in one round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Check:
    """Ping the contact: a caller that may be new, or an old contact in whose place a newcomer could stand."""

    contact: Contact


@dataclass(frozen=True, slots=True, kw_only=True)
class _HandOver:
    """Send the contact the records that it should hold now."""

    contact: Contact


class JobQueue:
    """The bounded queue between the calls that meet peers and the workers that follow it up. Never blocks, may
    drop."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[_Check | _HandOver](MAX_JOBS)
        self._checking: set[PeerId] = set()  # at most MAX_JOBS + WORKERS: one check of a peer at a time is enough
        self.dropped = 0
        """Jobs dropped because the queue was full."""

    def on_met(self, contact: Contact, met: Met) -> None:
        """Follow up a peer's answer."""
        if met.is_new:
            self._put(_HandOver(contact=contact))
        if met.suspect is not None:
            self.check(met.suspect)

    def check(self, contact: Contact) -> None:
        """Have a contact pinged soon."""
        if contact.peer_id not in self._checking and self._put(_Check(contact=contact)):
            self._checking.add(contact.peer_id)

    async def next_job(self) -> _Check | _HandOver:
        """Wait for a job. Cancelling loses none."""
        return await self._receive.receive()

    def checked(self, contact: Contact) -> None:
        """A check is over: the contact may be checked again."""
        self._checking.discard(contact.peer_id)

    def _put(self, job: _Check | _HandOver) -> bool:
        try:
            self._send.send_nowait(job)
        except trio.WouldBlock:
            self.dropped += 1
            return False
        return True


@dataclass(eq=False, kw_only=True)
class Maintenance:
    """The background of one node; `run` never returns by itself and never fails because of a peer.

    Args:
      lookup: walks towards an id and thereby fills the table.
    """

    own_address: Address | None
    initial_peers: tuple[Contact | Address, ...]
    book: PeerBook
    storages: Sequence[RecordStorage]
    jobs: JobQueue
    calls: DhtCalls
    lookup: Callable[[NodeId], Awaitable[object]]
    clock: SwarmClock
    config: DhtConfig
    rng: random.Random

    def __post_init__(self) -> None:
        others = (peer for peer in self.initial_peers if address_of(peer) != self.own_address)
        self.initial_peers = tuple(dict.fromkeys(others))
        # A stream of its own for each task: what one draws does not depend on when the others run.
        streams = (random.Random(self.rng.getrandbits(64)) for _ in range(3))
        self._refresh_rng, self._rejoin_rng, self._sweep_rng = streams

    async def join(self) -> tuple[Contact | Address, ...]:
        """Meet the swarm through the initial peers.

        Returns:
          the initial peers (without this node) if none of them answered; empty if one did, or there are none.
        """
        if not self.initial_peers:
            return ()
        grace_s = self.config.bootstrap_grace_s
        if not await first_answers(self.calls, self.initial_peers, grace_s=grace_s):
            return self.initial_peers
        await self.lookup(self.book.table.local_id)
        return ()

    async def run(self) -> None:
        """Do everything below until cancelled."""
        async with trio.open_nursery() as nursery:
            for _ in range(WORKERS):
                nursery.start_soon(self._work)
            nursery.start_soon(self._refresh)
            nursery.start_soon(self._rejoin)
            nursery.start_soon(self._sweep)

    async def _work(self) -> None:
        while True:
            job = await self.jobs.next_job()
            if isinstance(job, _HandOver):
                await self._hand_over(job.contact)
                continue
            try:
                await self.calls.check(job.contact)
            except PEER_ERRORS:
                continue  # the peer book knows
            finally:
                self.jobs.checked(job.contact)

    async def _hand_over(self, newcomer: Contact) -> None:
        # The first storage holds the swarm's records; the cache is nobody's replica.
        for key, record in list(self.storages[0].items(self.clock.now())):
            await trio.lowlevel.checkpoint()  # a full storage takes a while to look through
            if not self.book.owes(newcomer, key, replicas=self.config.replicas):
                continue
            try:
                await self.calls.store(newcomer, key, as_updates(record))
            except PEER_ERRORS:
                return

    async def _refresh(self) -> None:
        """Kademlia, section 2.3: a bucket without lookups is looked up, or it would fill with the dead."""
        period_s = self.config.refresh_period_s
        while True:
            await trio.sleep(jitter(period_s, self._refresh_rng))
            stale = self.book.table.stale_targets(older_than=trio.current_time() - period_s, rng=self._refresh_rng)
            for target in stale[:MAX_STALE_BUCKETS]:
                await self.lookup(target)

    async def _rejoin(self) -> None:
        """Try the initial peers that are not in the table, and some lost ones: so a split swarm becomes one again."""
        due = trio.current_time() + jitter(self.config.rejoin_period_s, self._rejoin_rng)
        while True:
            await trio.sleep(jitter(self.config.lonely_rejoin_period_s, self._rejoin_rng))
            if len(self.book.table) > 0 and trio.current_time() < due:
                continue
            due = trio.current_time() + jitter(self.config.rejoin_period_s, self._rejoin_rng)
            known = {contact.address for contact in self.book.table.contacts()}
            lost = self.book.draw_lost(LOST_DRAWS, self._rejoin_rng)
            wanted = dict.fromkeys((*self.initial_peers, *lost))
            unknown = [target for target in wanted if address_of(target) not in known]
            if await first_answers(self.calls, unknown, grace_s=self.config.rpc_timeout_s):
                await self.lookup(self.book.table.local_id)

    async def _sweep(self) -> None:
        while True:
            await trio.sleep(jitter(self.config.sweep_period_s, self._sweep_rng))
            for storage in self.storages:
                storage.sweep(self.clock.now())
