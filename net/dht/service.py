"""Incoming calls of a DHT node. Requests come from anybody: whatever is wrong with them is refused, with a reason."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass

import trio

from net.clock import SwarmClock
from net.dht import messages
from net.dht.config import DhtConfig
from net.dht.messages import FindReply
from net.dht.peer_book import PeerBook
from net.dht.records import Entry, Record, SubkeyEntry, page
from net.dht.storage import RecordStorage
from net.errors import CallRefused, RemoteProtocolError
from net.identity import Contact, PeerId
from net.rpc.base import Caller, Handler, Reply, Request, handlers


@dataclass(eq=False)
class DhtService:
    """Serves ping, find and store from the node's table and storage.

    Args:
      on_check: told of a caller (or an old contact) that is worth a ping.
    """

    peer_id: PeerId
    _: KW_ONLY
    book: PeerBook
    storage: RecordStorage
    clock: SwarmClock
    config: DhtConfig
    on_check: Callable[[Contact], None]

    def __post_init__(self) -> None:
        self._served = ExitStack()

    def register(self, caller: Caller) -> None:
        """Serve on `caller` until `close`.

        Raises:
          ValueError: another DHT node serves on it.
        """
        served = {messages.PING: self._ping, messages.FIND: self._find, messages.STORE: self._store}
        guarded = {method: self._guarded(handler) for method, handler in served.items()}
        self._served.enter_context(handlers(caller, guarded))

    def close(self) -> None:
        """Serve no more: a closed node must not look alive."""
        self._served.close()

    def _guarded(self, handler: Callable[[Request], Reply]) -> Handler:
        async def handle(request: Request) -> Reply:
            try:
                reply = handler(request)
                self._note_caller(request)
                return reply
            except RemoteProtocolError as error:
                raise CallRefused(str(error)) from error

        return handle

    def _ping(self, request: Request) -> Reply:
        return Reply(body=messages.ping_reply_body(self.peer_id, self.clock.now()))

    def _find(self, request: Request) -> Reply:
        target, wants_record, after = messages.parse_find_untrusted(request.body)
        # One more than is answered, since the caller itself may be among them and knows itself already.
        nearest = self.book.table.nearest(target, self.config.bucket_size + 1)
        contacts = [contact for contact in nearest if contact.peer_id != request.peer_id]
        record = self.storage.get(target, self.clock.now()) if wants_record else None
        entries, more = _first_entries(record, after)
        reply = FindReply(
            peer_id=self.peer_id,
            contacts=tuple(contacts[: self.config.bucket_size]),
            entries=entries,
            more=more,
        )
        return Reply(body=messages.find_reply_body(reply))

    def _store(self, request: Request) -> Reply:
        now = self.clock.now()
        target, entries = messages.parse_store_untrusted(
            request.body, latest_expiration=now + self.config.max_lifetime_s
        )
        return Reply(body=messages.store_reply_body(self.peer_id, self.storage.store(target, entries, now)))

    def _note_caller(self, request: Request) -> None:
        if messages.parse_client_untrusted(request.body) or request.peer_address is None:
            return
        contact = Contact(request.peer_id, request.peer_address)
        if (suspect := self.book.heard_from(contact, trio.current_time())) is not None:
            self.on_check(suspect)


def _first_entries(record: Record | None, after: str | None) -> tuple[tuple[SubkeyEntry, ...], bool]:
    if record is None:
        return (), False
    if isinstance(record, Entry):
        return ((None, record),), False
    return page(record, after=after, budget_bytes=messages.PAGE_BYTES)
