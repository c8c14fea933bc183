"""Calls of a peer to itself: a trainer and the experts that it calls may live in one process."""

import logging
from collections.abc import Sequence

import trio

from net.errors import CallFailed, ConnectionLost, LocalProtocolError, RemoteFailure
from net.identity import Address, PeerId
from net.rpc.base import Body, Reply, Request
from net.rpc.service import Service
from net.wire.codec import decode_untrusted, encode
from net.wire.tensors import Outgoing, as_received

_log = logging.getLogger(__name__)


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
        with trio.CancelScope() as scope:
            self._running[scope] = None
            try:
                reply = await self._serve(request)
            finally:
                del self._running[scope]
            try:
                return Reply(body=_copied(reply.body), tensors=tuple(map(as_received, reply.tensors)))
            except LocalProtocolError as exc:
                _log.error("the answer of %r to this peer itself could not travel: %s", method, exc)
                raise RemoteFailure(f"the handler of {method!r} failed; the log says why") from exc
        raise ConnectionLost("this peer was closed")

    async def _serve(self, request: Request) -> Reply:
        method = self._service.admit(request.method)
        try:
            return await self._service.run(method, request)
        except CallFailed:
            raise
        except Exception as exc:
            raise _failed(request) from exc
        except BaseExceptionGroup as group:
            # The handler failed while it was being cancelled: its trouble is logged here, the rest goes on its way.
            cancelled, failed = group.split(trio.Cancelled)
            if failed is not None:
                _failed(request)
            if cancelled is not None:
                raise cancelled from None
            raise
        finally:
            self._service.release(method)


def _copied(body: Body) -> Body:
    """A body as it comes out of a connection: nothing shared, and nothing in it that could not travel."""
    copied: Body = decode_untrusted(encode(dict(body)))
    return copied


def _failed(request: Request) -> RemoteFailure:
    """In an except clause: log what a handler raised."""
    _log.exception("serving %r to this peer itself failed", request.method)
    return RemoteFailure(f"the handler of {request.method!r} failed; the log says why")
