"""Calls of a peer to itself: a trainer and the experts that it calls may live in one process."""

from collections.abc import Sequence

import trio

from net.errors import ConnectionLost
from net.identity import Address, PeerId
from net.rpc.base import Body, Reply, Request
from net.rpc.service import Service, reported
from net.wire.codec import decode_untrusted, encode
from net.wire.tensors import Outgoing, as_received


class OwnCalls:
    """Serves them without a connection, and yet nothing in a request or a reply is shared between both ends."""

    def __init__(self, service: Service, peer_id: PeerId, address: Address | None) -> None:
        self._service = service
        self._peer_id = peer_id
        self._address = address
        self._running: dict[trio.CancelScope, None] = {}

    def close(self) -> None:
        """End those that run: there is no connection that would."""
        for scope in self._running:
            scope.cancel()

    async def call(self, method: str, body: Body, tensors: Sequence[Outgoing]) -> Reply:
        """Serve a copy of the request.

        Raises:
          CallFailed: as a caller elsewhere would get it.
          ConnectionLost: `close` was called meanwhile.
        """
        request = Request(
            method=method,
            body=_copied(body),
            tensors=tuple(map(as_received, tensors)),
            peer_id=self._peer_id,
            peer_address=self._address,
        )
        entry = self._service.admit(method)
        with trio.CancelScope() as scope:
            self._running[scope] = None
            try:
                with reported(method, "this peer itself"):
                    reply = await self._service.run(entry, request)
                    return Reply(body=_copied(reply.body), tensors=tuple(map(as_received, reply.tensors)))
            finally:
                del self._running[scope]
                self._service.release(entry)
        raise ConnectionLost("this peer was closed")


def _copied(body: Body) -> Body:
    """A body as it comes out of a connection: nothing shared, and nothing in it that could not travel."""
    copied: Body = decode_untrusted(encode(dict(body)))
    return copied
