"""Incoming calls of a DHT node. Requests come from anybody: whatever is wrong with them is refused, with a reason."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import trio

from net.clock import SwarmClock
from net.dht import messages
from net.dht.config import DhtConfig
from net.dht.peer_book import PeerBook
from net.dht.storage import RecordStorage
from net.errors import CallRefused, RemoteProtocolError
from net.identity import Contact, PeerId
from net.rpc.base import Body, Handler, Reply, Request
from net.wire.fields import FLAG


@dataclass(eq=False, kw_only=True)
class DhtService:
    """Serves ping, find and store from the node's table and storage."""

    peer_id: PeerId
    book: PeerBook
    storage: RecordStorage
    clock: SwarmClock
    config: DhtConfig

    def methods(self) -> dict[str, Handler]:
        """What to serve, by the method's name."""
        served = {messages.PING: self._ping, messages.FIND: self._find, messages.STORE: self._store}
        return {method: partial(self._serve, answer) for method, answer in served.items()}

    async def _serve(self, answer: Callable[[Request], Body], request: Request) -> Reply:
        try:
            body = answer(request)
            is_client = FLAG.of_untrusted(request.body, "client")
        except RemoteProtocolError as error:
            raise CallRefused(str(error)) from error
        if not is_client and request.peer_address is not None:
            self.book.heard_from(Contact(request.peer_id, request.peer_address), trio.current_time())
        return Reply(body={**body, "peer_id": self.peer_id.raw})

    def _ping(self, _: Request) -> Body:
        return {"now": self.clock.now()}

    def _find(self, request: Request) -> Body:
        target, wants_record, after = messages.parse_find_untrusted(request.body)
        # One more than is answered, since the caller itself may be among them and knows itself already.
        nearest = self.book.table.nearest(target, self.config.bucket_size + 1)
        contacts = [contact for contact in nearest if contact.peer_id != request.peer_id]
        record = self.storage.get(target, self.clock.now()) if wants_record else None
        reply = messages.FindReply(tuple(contacts[: self.config.bucket_size]), *messages.page(record, after))
        return messages.find_reply_body(reply)

    def _store(self, request: Request) -> Body:
        now = self.clock.now()
        latest = now + self.config.max_lifetime_s
        target, entries = messages.parse_store_untrusted(request.body, latest_expiration=latest)
        return {"accepted": list(self.storage.store(target, entries, now))}
