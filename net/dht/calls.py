"""Outgoing calls of a DHT node: send, check the answer, and keep the peer book."""

import random
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import trio

from net.clock import SwarmClock
from net.dht import messages
from net.dht.config import DhtConfig
from net.dht.messages import FindReply
from net.dht.peer_book import Met, PeerBook
from net.dht.records import Record, SubkeyEntry, merge_entries
from net.dht.routing_table import NodeId
from net.errors import CallFailed, PeerBusy, PeerUnavailable, RemoteProtocolError
from net.identity import Address, Contact, PeerId, address_of
from net.rpc.base import Body, Caller

PEER_ERRORS = (PeerUnavailable, CallFailed, RemoteProtocolError)
"""What a peer can do to a call. `LocalProtocolError` is not among them: it would be a bug here and has to surface."""

MAX_PAGES = 64
"""Most pages of one record: 2.5 MiB, more than any record may hold; a peer that says `more` again is broken."""


def jitter(period_s: float, rng: random.Random) -> float:
    """The period +-25 %."""
    return period_s * rng.uniform(0.75, 1.25)


@dataclass(eq=False)
class DhtCalls:
    """The three calls of `net.dht.messages`, each bounded by `config.rpc_timeout_s`.

    Every answer and every failure goes into the peer book; `on_met` hears what follows from an answer. All methods
    raise `PEER_ERRORS`; cancelling one abandons the call and changes nothing in the book.
    """

    caller: Caller
    _: KW_ONLY
    book: PeerBook
    clock: SwarmClock
    config: DhtConfig
    is_client: bool
    on_met: Callable[[Contact, Met], None]

    def __post_init__(self) -> None:
        self.clock_skew_s: float | None = None
        """The last pinged peer's swarm time minus the own, seconds, to within half a round trip; None before."""

    @property
    def latest_expiration(self) -> float:
        """The latest expiration that a record may have now."""
        return self.clock.now() + self.config.max_lifetime_s

    async def ping(self, target: Contact | Address) -> Contact:
        """Who listens there? The answer goes into the book; a failure does not (nobody is known to fail)."""
        sent = self.clock.now()
        body = await self._call(target, messages.PING, messages.ping_body(client=self.is_client))
        peer_id, their_now = messages.parse_ping_reply_untrusted(body)
        contact = Contact(peer_id, address_of(target))
        self._note_answer(contact)
        self.clock_skew_s = their_now - (sent + self.clock.now()) / 2
        return contact

    async def check(self, contact: Contact) -> None:
        """Ping a contact; if it does not answer, or another peer does, the contact goes."""
        try:
            answerer = await self.ping(contact)
        except PEER_ERRORS as error:
            self._note_failure(contact, error)
            raise
        if answerer.peer_id != contact.peer_id:
            self.book.failed(contact, trio.current_time(), f"{answerer.peer_id.short} answers at {contact.address}")

    async def find(
        self, contact: Contact, target: NodeId, *, record: bool
    ) -> tuple[tuple[Contact, ...], Record | None]:
        """Contacts near `target` and, if wanted, the peer's copy of the record, read page by page."""
        found: Record | None = None
        after: str | None = None
        contacts: tuple[Contact, ...] = ()
        for number in range(MAX_PAGES):
            reply = await self._find_page(contact, target, record=record, after=after)
            contacts = contacts or reply.contacts
            now = self.clock.now()
            fresh = [update for update in reply.entries if update[1].expiration > now]
            found, _ = merge_entries(found, fresh)
            if not reply.more or number + 1 == MAX_PAGES:
                break
            after = reply.entries[-1][0] if reply.entries else None
        return contacts, found

    async def store(self, contact: Contact, target: NodeId, entries: Sequence[SubkeyEntry]) -> tuple[bool, ...]:
        """Store entries at one peer; for each, whether the peer accepted it."""
        accepted: list[bool] = []
        for batch in messages.batches(entries):
            body = messages.store_body(target, batch, client=self.is_client)
            try:
                answer = await self._call(contact, messages.STORE, body)
                peer_id, verdicts = messages.parse_store_reply_untrusted(answer, count=len(batch))
                self._expect(contact, peer_id)
            except PEER_ERRORS as error:
                self._note_failure(contact, error)
                raise
            self._note_answer(contact)
            accepted += verdicts
        return tuple(accepted)

    async def _find_page(self, contact: Contact, target: NodeId, *, record: bool, after: str | None) -> FindReply:
        body = messages.find_body(target, client=self.is_client, record=record, after=after)
        try:
            answer = await self._call(contact, messages.FIND, body)
            reply = messages.parse_find_reply_untrusted(answer, latest_expiration=self.latest_expiration)
            self._expect(contact, reply.peer_id)
            if reply.more and (not reply.entries or (after is not None and (reply.entries[-1][0] or "") <= after)):
                raise RemoteProtocolError(f"{contact} pages a record without getting on")
        except PEER_ERRORS as error:
            self._note_failure(contact, error)
            raise
        self._note_answer(contact)
        return reply

    async def _call(self, target: Contact | Address, method: str, body: Body) -> Body:
        reply = await self.caller.call(target, method, body, timeout_s=self.config.rpc_timeout_s)
        return reply.body

    def _expect(self, contact: Contact, peer_id: PeerId) -> None:
        if peer_id != contact.peer_id:
            raise RemoteProtocolError(f"expected {contact}, but {peer_id.short} answered there")

    def _note_answer(self, contact: Contact) -> None:
        self.on_met(contact, self.book.answered(contact, trio.current_time()))

    def _note_failure(self, contact: Contact, error: Exception) -> None:
        if not isinstance(error, PeerBusy):  # a busy peer is alive: ask it again another time
            self.book.failed(contact, trio.current_time(), str(error))


async def first_answers(
    calls: DhtCalls, targets: Sequence[Contact | Address], *, grace_s: float
) -> tuple[Contact, ...]:
    """Ping contacts or addresses all at once; wait for every answer, but only `grace_s` after the first.

    Returns:
      who answered, in the order of answers; empty if nobody did.
    """
    answered: list[Contact] = []

    async def ping(target: Contact | Address, scope: trio.CancelScope) -> None:
        try:
            answered.append(await calls.ping(target))
        except PEER_ERRORS:
            return
        scope.deadline = min(scope.deadline, trio.current_time() + grace_s)

    async with trio.open_nursery() as nursery:
        for target in targets:
            nursery.start_soon(ping, target, nursery.cancel_scope)
    return tuple(answered)
