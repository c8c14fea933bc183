"""The calls of a DHT node, outgoing and incoming: send, serve, check what comes, and keep the peer book."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import trio

from dmoe_net.clock import SwarmClock
from dmoe_net.dht import messages
from dmoe_net.dht.config import DhtConfig
from dmoe_net.dht.copies import Position
from dmoe_net.dht.entries import EntryReader, SignedEntries
from dmoe_net.dht.messages import Find, FindReply
from dmoe_net.dht.patience import Patience
from dmoe_net.dht.peer_book import PeerBook
from dmoe_net.dht.routing_table import NodeId
from dmoe_net.dht.storage import EntryStorage, Refusal, Verdict
from dmoe_net.errors import CallFailed, CallRefused, PeerBusy, PeerUnavailable, RemoteProtocolError
from dmoe_net.identity import Address, Contact, PeerId, address_of
from dmoe_net.rpc.base import Body, Caller, Handler, Reply, Request
from dmoe_net.wire.fields import FLAG, PEER_ID

PEER_ERRORS = (PeerUnavailable, CallFailed, RemoteProtocolError)
"""Errors that a peer can cause. `LocalProtocolError` would be a bug here and has to surface."""


@dataclass(eq=False, kw_only=True)
class DhtCalls:
    """The three calls of `dmoe_net.dht.messages`, in both directions.

    Every answer and every failure of a call to others goes into the peer book. These calls raise `PEER_ERRORS` after at
    most `config.rpc_timeout_s`; cancelling one changes nothing in the book. Wrong requests are refused with a reason.
    """

    caller: Caller
    book: PeerBook
    storage: EntryStorage
    reader: EntryReader
    clock: SwarmClock
    config: DhtConfig
    is_client: bool
    patience: Patience = field(default_factory=Patience)

    async def ping(self, target: Contact | Address) -> Contact:
        """Ask who listens there. Only an answer goes into the book: of a failure nobody is known."""
        contact = await self._ask_who(target)
        self.book.answered(contact, trio.current_time())
        return contact

    async def ping_all(self, targets: Iterable[Contact | Address], *, grace_s: float) -> tuple[Contact, ...]:
        """Ping all at once; return those that answered at most `grace_s` after the first, in the order of answers."""
        answered: list[Contact] = []

        async def ping(target: Contact | Address, scope: trio.CancelScope) -> None:
            try:
                answered.append(await self.ping(target))
            except PEER_ERRORS:
                return
            scope.deadline = min(scope.deadline, trio.current_time() + grace_s)

        async with trio.open_nursery() as nursery:
            for target in targets:
                nursery.start_soon(ping, target, nursery.cancel_scope)
        return tuple(answered)

    async def check(self, contact: Contact) -> None:
        """Reach a contact at its own address; if it is not there, or another peer is, the contact goes.

        A peer that has called us answers on its own connection whatever it says of its address, so that does not count.
        """
        with self._noting(contact):
            if self.caller.is_reached(contact):
                await self._ask_who(contact)
            else:
                await self.caller.reach(contact, timeout_s=self.config.rpc_timeout_s)

    async def _ask_who(self, target: Contact | Address) -> Contact:
        body = await self._call(target, messages.PING, {})
        return Contact(PEER_ID.of_untrusted(body, "peer_id"), address_of(target))

    async def find(
        self, contact: Contact, target: NodeId, *, contacts: int, record: bool = False, since: Position | None = None
    ) -> FindReply:
        """Ask a peer for contacts near `target` and, if wanted, for a page of the changes of its copy of the record."""
        question = Find(target, contacts, record, since, self.book.dead(trio.current_time()))
        with self._noting(contact):
            body = await self._call(contact, messages.FIND, messages.find_body(question))
            found = messages.parse_found_untrusted(body, target, self.reader)
            found = found._replace(contacts=found.contacts[:contacts])
            if found.pages and (not found.entries or found.position == since):
                raise RemoteProtocolError(f"{contact} pages a record without getting on")
        return found

    async def store(
        self, contact: Contact, target: NodeId, entries: SignedEntries
    ) -> tuple[list[Verdict], tuple[Contact, ...]]:
        """Store entries at one peer.

        Returns: the verdict for each, and the peers nearest to the target that the peer knows.
        """
        verdicts: list[Verdict] = []
        nearest: tuple[Contact, ...] = ()
        for batch in messages.batches(entries):
            with self._noting(contact):
                body = messages.store_body(target, batch, self.book.dead(trio.current_time()))
                answer = await self._call(contact, messages.STORE, body)
                verdicts += messages.parse_stored_untrusted(answer, target, self.reader, count=len(batch))
                nearest = messages.contacts_untrusted(answer)
        return verdicts, nearest

    async def _call(self, target: Contact | Address, method: str, body: Body) -> Body:
        body = {**body, "client": self.is_client}
        asked_at, started = self.clock.ticks(), trio.current_time()
        answer = (await self.caller.call(target, method, body, timeout_s=self.config.rpc_timeout_s)).body
        peer_id = PEER_ID.of_untrusted(answer, "peer_id")
        if isinstance(target, Contact):
            if peer_id != target.peer_id:
                raise RemoteProtocolError(f"expected {target}, but {peer_id.short} answered there")
            peer_id = target.peer_id  # which others hold too: what came is a copy
        self.patience.note(peer_id, trio.current_time() - started, trio.current_time())
        self.clock.read(peer_id, messages.SECONDS.of_untrusted(answer, "now"), asked_at=asked_at)
        return answer

    @contextmanager
    def _noting(self, contact: Contact) -> Iterator[None]:
        """Note the end of a call of the contact in the book."""
        try:
            yield
        except PEER_ERRORS as error:
            if not isinstance(error, PeerBusy):  # a busy peer is alive: ask it again another time
                self.book.failed(contact, trio.current_time(), str(error))
            raise
        self.book.answered(contact, trio.current_time())

    def handlers(self) -> dict[str, Handler]:
        """Handlers of others' calls, by the method's name; none in client mode."""
        served: dict[str, Callable[[Request], Body]] = {
            messages.PING: lambda _: {},
            messages.FIND: self._answer_find,
            messages.STORE: self._answer_store,
        }
        return {} if self.is_client else {method: partial(self._serve, answer) for method, answer in served.items()}

    async def _serve(self, answer: Callable[[Request], Body], request: Request) -> Reply:
        try:
            body = answer(request)
            is_client = FLAG.of_untrusted(request.body, "client")
            dead = messages.dead_untrusted(request.body)
        except RemoteProtocolError as error:
            raise CallRefused(str(error)) from error
        now = trio.current_time()
        if not is_client and request.peer_address is not None:
            self.book.heard_from(Contact(request.peer_id, request.peer_address), now)
        for peer_id in dead:
            self.book.doubted(peer_id, now)
        return Reply(body={**body, "peer_id": self.caller.peer_id.raw, "now": self.clock.now()})

    def _answer_find(self, request: Request) -> Body:
        question, now = messages.parse_find_untrusted(request.body), self.clock.ticks()
        held = self.storage.get(question.target, now) if question.record else ()
        # Near a copy there are others, so that few contacts will do: most of an answer's cost are its contacts.
        most = min(question.contacts, self.config.replicas) if held else question.contacts
        contacts = self._nearest(question.target, most, request.peer_id)
        if not held:
            return messages.found_body(FindReply(contacts))
        newest = held[-1].change
        if question.since is not None and question.since.epoch == self.storage.epoch:
            held = self.storage.since(question.target, question.since.change, now)
        entries, changes = messages.page(held, now)
        pages = tuple(Position(self.storage.epoch, change) for change in changes)
        position = pages[0] if pages else Position(self.storage.epoch, newest)
        return messages.found_body(FindReply(contacts, position, entries, pages))

    def _answer_store(self, request: Request) -> Body:
        target, entries = messages.parse_store_untrusted(request.body, self.reader)
        verdicts = self.take(target, entries, request.peer_id)
        nearest = self._nearest(target, self.config.replicas, request.peer_id)
        return messages.stored_body(verdicts, nearest, owner=request.peer_id)

    def take(self, target: NodeId, entries: SignedEntries, account: PeerId) -> list[Verdict]:
        """Keep entries that a peer brought, this one or another; return a verdict for each."""
        now, verdicts = self.clock.now(), list[Verdict]()
        for entry, said_s in entries:
            left_s = entry.left(now, said_s)
            verdicts += (
                self.storage.store(target, [(entry, left_s)], account=account, now=self.clock.ticks(), swarm_now=now)
                if left_s > 0
                else [Refusal(ahead_s=entry.issued_at - now)]
            )
        return verdicts

    def _nearest(self, target: NodeId, count: int, asker: PeerId) -> tuple[Contact, ...]:
        # One more than is answered, since the caller itself may be among them and knows itself already.
        nearest = self.book.table.nearest(target, count + 1) if count else ()
        return tuple(contact for contact in nearest if contact.peer_id != asker)[:count]
