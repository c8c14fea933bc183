"""The calls of a DHT node, outgoing and incoming: send, serve, check what comes, and keep the peer book."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import trio

from dmoe_net.clock import SwarmClock
from dmoe_net.dht import messages
from dmoe_net.dht.config import DhtConfig
from dmoe_net.dht.peer_book import PeerBook
from dmoe_net.dht.records import Record, SubkeyEntry, merge_entries
from dmoe_net.dht.routing_table import NodeId
from dmoe_net.dht.storage import RecordStorage
from dmoe_net.errors import CallFailed, CallRefused, PeerBusy, PeerUnavailable, RemoteProtocolError
from dmoe_net.identity import Address, Contact, address_of
from dmoe_net.rpc.base import Body, Caller, Handler, Reply, Request
from dmoe_net.wire.fields import FLAG, PEER_ID

PEER_ERRORS = (PeerUnavailable, CallFailed, RemoteProtocolError)
"""Errors that a peer can cause. `LocalProtocolError` would be a bug here and has to surface."""

MAX_PAGES = 64
"""Most pages of one record: 2.5 MiB, more than any record may hold."""


@dataclass(eq=False, kw_only=True)
class DhtCalls:
    """The three calls of `dmoe_net.dht.messages`, in both directions.

    Every answer and every failure of a call to others goes into the peer book. These calls raise `PEER_ERRORS` after at
    most `config.rpc_timeout_s`; cancelling one changes nothing in the book. Wrong requests are refused with a reason.
    """

    caller: Caller
    book: PeerBook
    storage: RecordStorage
    clock: SwarmClock
    config: DhtConfig
    is_client: bool

    @property
    def latest_expiration(self) -> float:
        """Latest expiration that a record may have now, swarm time."""
        return self.clock.now() + self.config.max_lifetime_s

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
        """Ping a contact; if it does not answer, or another peer does, the contact goes."""
        with self._noting(contact):
            await self._ask_who(contact)

    async def _ask_who(self, target: Contact | Address) -> Contact:
        body = await self._call(target, messages.PING, {})
        return Contact(PEER_ID.of_untrusted(body, "peer_id"), address_of(target))

    async def find(
        self, contact: Contact, target: NodeId, *, record: bool
    ) -> tuple[tuple[Contact, ...], Record | None]:
        """Contacts near `target` and, if wanted, the peer's copy of the record."""
        found: Record | None = None
        after: str | None = None
        contacts: tuple[Contact, ...] = ()
        for _ in range(MAX_PAGES):
            with self._noting(contact):
                body = await self._call(contact, messages.FIND, messages.find_body(target, record=record, after=after))
                reply = messages.parse_find_reply_untrusted(body, latest_expiration=self.latest_expiration)
                last = reply.entries[-1][0] if reply.entries else None
                if reply.more and (last is None or (after is not None and last <= after)):
                    raise RemoteProtocolError(f"{contact} pages a record without getting on")
            contacts = contacts or reply.contacts
            now = self.clock.now()
            found, _ = merge_entries(found, [update for update in reply.entries if update[1].expiration > now])
            if not reply.more:
                break
            after = last
        return contacts, found

    async def store(self, contact: Contact, target: NodeId, entries: Sequence[SubkeyEntry]) -> tuple[bool, ...]:
        """Store entries at one peer; True for each that the peer accepted."""
        accepted: list[bool] = []
        for batch in messages.batches(entries):
            with self._noting(contact):
                answer = await self._call(contact, messages.STORE, messages.store_body(target, batch))
                accepted += messages.parse_store_reply_untrusted(answer, count=len(batch))
        return tuple(accepted)

    async def _call(self, target: Contact | Address, method: str, body: Body) -> Body:
        body = {**body, "client": self.is_client}
        asked_at = self.clock.ticks()
        answer = (await self.caller.call(target, method, body, timeout_s=self.config.rpc_timeout_s)).body
        peer_id = PEER_ID.of_untrusted(answer, "peer_id")
        if isinstance(target, Contact) and peer_id != target.peer_id:
            raise RemoteProtocolError(f"expected {target}, but {peer_id.short} answered there")
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
        served = {
            messages.PING: self._answer_ping,
            messages.FIND: self._answer_find,
            messages.STORE: self._answer_store,
        }
        return {} if self.is_client else {method: partial(self._serve, answer) for method, answer in served.items()}

    async def _serve(self, answer: Callable[[Request], Body], request: Request) -> Reply:
        try:
            body = answer(request)
            is_client = FLAG.of_untrusted(request.body, "client")
        except RemoteProtocolError as error:
            raise CallRefused(str(error)) from error
        if not is_client and request.peer_address is not None:
            self.book.heard_from(Contact(request.peer_id, request.peer_address), trio.current_time())
        return Reply(body={**body, "peer_id": self.caller.peer_id.raw, "now": self.clock.now()})

    def _answer_ping(self, _: Request) -> Body:
        return {}

    def _answer_find(self, request: Request) -> Body:
        target, wants_record, after = messages.parse_find_untrusted(request.body)
        # One more than is answered, since the caller itself may be among them and knows itself already.
        nearest = self.book.table.nearest(target, self.config.bucket_size + 1)
        contacts = [contact for contact in nearest if contact.peer_id != request.peer_id]
        record = self.storage.get(target, self.clock.now()) if wants_record else None
        reply = messages.FindReply(tuple(contacts[: self.config.bucket_size]), *messages.page(record, after))
        return messages.find_reply_body(reply)

    def _answer_store(self, request: Request) -> Body:
        body, latest = request.body, self.latest_expiration
        target, entries = messages.parse_store_untrusted(body, latest_expiration=latest)
        return {"accepted": list(self.storage.store(target, entries, self.clock.now()))}
