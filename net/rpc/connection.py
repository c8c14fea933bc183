"""One live connection: a link, its session, one reader, one writer, and a task for each call being served."""

import logging
import math
from collections.abc import Sequence

import trio

from net.errors import (
    CallFailed,
    CallRefused,
    ConnectionLost,
    NetError,
    PeerBusy,
    RemoteFailure,
    RemoteProtocolError,
)
from net.identity import Address, PeerId
from net.rpc.base import Body, Reply, Request
from net.rpc.service import Service
from net.rpc.session import Action, CancelRun, FinishCall, RpcSession, RunCall
from net.transport.base import Link
from net.wire.messages import CallError, CallReply, CallStart, ErrorKind
from net.wire.tensors import Tensor

_log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
"""A connection whose peer does not say who it is does not keep its place for longer."""

_CLOSE_TIMEOUT_S = 1.0
"""For the transport's farewell; then the link is aborted."""

_WRITE_BYTES = 256 * 1024
"""Frames written in one go. Small calls placed meanwhile leave together; larger batches gain nothing."""

_MIN_TIMEOUT_S = 0.001
"""What a call says on the wire when its caller's deadline is here already."""

_ERRORS: dict[ErrorKind, type[CallFailed]] = {
    ErrorKind.REFUSED: CallRefused,
    ErrorKind.BUSY: PeerBusy,
    ErrorKind.FAILURE: RemoteFailure,
}


class _PendingCall:
    """A caller waiting: `answer` stays None if the connection ends first."""

    __slots__ = ("answer", "done")

    def __init__(self) -> None:
        self.answer: CallReply | CallError | None = None
        self.done = trio.Event()


class Connection:
    """Multiplexes calls in both directions over `link`, while `run` runs.

    Args:
      link: fresh from a transport; the connection closes it.
      peer_id, port: who we are and where we listen, for the peer.
      service: what the other end may call.
    """

    def __init__(self, link: Link, *, peer_id: PeerId, port: int | None, service: Service) -> None:
        self._link = link
        self._service = service
        self._session = RpcSession(peer_id=peer_id, port=port)
        self._pending: dict[int, _PendingCall] = {}
        self._handler_scopes: dict[int, trio.CancelScope] = {}
        self._scope = trio.CancelScope()
        self._wake = trio.Event()
        self._cause: NetError | None = None  # why it ended; None while it lives
        self.last_used = trio.current_time()
        """When the last call was placed here or the last frame came in, seconds of trio's clock."""

    @property
    def is_open(self) -> bool:
        """Calls can be placed."""
        return self._cause is None

    @property
    def is_idle(self) -> bool:
        """No call is under way in either direction."""
        return self._session.is_idle

    def close(self, reason: str) -> None:
        """End the connection: `run` returns soon, calls under way fail with `ConnectionLost`. Idempotent."""
        self._end(ConnectionLost(reason))

    async def run(self) -> None:
        """Serve until the connection ends, for whatever reason; then nothing is left open or running.

        Does not raise (besides `trio.Cancelled`): a connection's trouble is its own. Its end cancels the handlers
        that serve it and fails the calls that wait on it.
        """
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    await self._read(nursery)
        except Exception:
            _log.exception("connection with %s failed", self._link.remote_address)
        finally:
            is_clean = self._cause is None or not isinstance(self._cause, RemoteProtocolError)
            self._end(ConnectionLost("this peer was closed"))
            if is_clean:
                with trio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
                    await self._link.aclose()
            self._link.abort()

    async def call(self, method: str, body: Body, tensors: Sequence[Tensor], *, deadline: float) -> Reply:
        """Call the peer and wait. If cancelled, the call is taken back or called off; nobody waits for that.

        Args:
          deadline: the caller's, seconds of trio's clock. It is sent along; enforcing it here is the caller's
            part.
        """
        if self._cause is not None:
            raise self._lost()
        self.last_used = trio.current_time()
        timeout_s = max(deadline - self.last_used, _MIN_TIMEOUT_S)
        call_id = self._session.place_call(method, body, tensors, timeout_s=timeout_s)
        pending = self._pending[call_id] = _PendingCall()
        self._wake.set()
        try:
            await pending.done.wait()
        finally:
            # A no-op when the call has been answered. Synchronous: a cancelled task could not wait here.
            self._pending.pop(call_id, None)
            self._session.abandon_call(call_id)
            self._wake.set()
        match pending.answer:
            case None:
                raise self._lost()
            case CallError(kind=kind, message=message):
                raise _ERRORS[kind](message)
            case CallReply(body=body, tensors=tensors):
                return Reply(body=body, tensors=tuple(tensors))

    def _lost(self) -> NetError:
        """A fresh error for each caller, since raising one object in several tasks would mix their tracebacks."""
        kind = RemoteProtocolError if isinstance(self._cause, RemoteProtocolError) else ConnectionLost
        error = kind(str(self._cause))
        error.__cause__ = self._cause
        return error

    def _end(self, cause: NetError) -> None:
        if self._cause is not None:
            return
        self._cause = cause
        self._scope.cancel()
        for pending in self._pending.values():
            pending.done.set()

    async def _write(self) -> None:
        """The only task that sends: frames leave whole and in order, whoever is cancelled meanwhile."""
        try:
            while True:
                frames = self._session.take_frames(_WRITE_BYTES)
                if frames:
                    await self._link.send(*frames)
                else:
                    self._wake = trio.Event()
                    await self._wake.wait()
        except NetError as exc:
            self._end(exc)

    async def _read(self, nursery: trio.Nursery) -> None:
        try:
            with trio.move_on_after(HELLO_TIMEOUT_S) as hello:
                while (frame := await self._link.receive()) is not None:
                    self._session.receive_untrusted(frame)
                    hello.deadline = math.inf
                    self.last_used = trio.current_time()
                    for action in self._session.take_actions():
                        self._carry_out(action, nursery)
                    self._wake.set()
            if hello.cancelled_caught:
                self._end(ConnectionLost(f"{self._link.remote_address} did not say hello"))
            else:
                self._end(ConnectionLost(f"{self._link.remote_address} closed the connection"))
        except NetError as exc:
            if isinstance(exc, RemoteProtocolError):
                _log.warning("dropping the connection with %s: %s", self._link.remote_address, exc)
            self._end(exc)

    def _carry_out(self, action: Action, nursery: trio.Nursery) -> None:
        match action:
            case FinishCall(answer=answer):
                pending = self._pending.pop(answer.call_id)
                pending.answer = answer
                pending.done.set()
            case CancelRun(call_id=call_id):
                self._handler_scopes[call_id].cancel()
            case RunCall(start=start):
                try:
                    self._service.admit(start.method)
                except CallFailed as exc:
                    self._fail(start.call_id, exc)
                    return
                scope = trio.CancelScope(deadline=trio.current_time() + start.timeout_s)
                self._handler_scopes[start.call_id] = scope
                nursery.start_soon(self._serve, start, scope)

    async def _serve(self, start: CallStart, scope: trio.CancelScope) -> None:
        """Run one handler within its deadline and queue the answer; the supervisor of handlers.

        The place in the service is taken already.
        """
        try:
            with scope:
                try:
                    reply = await self._service.run(self._request(start))
                    self._session.reply(start.call_id, reply.body, reply.tensors)
                except CallFailed as exc:  # the handler's own words for its caller
                    self._fail(start.call_id, exc)
            if scope.cancelled_caught:
                self._session.forget(start.call_id)
        except Exception:
            # Around the scope: a handler that fails while it is cancelled raises a group with both in it.
            _log.exception("serving %r to %s failed", start.method, self._link.remote_address)
            text = f"the handler of {start.method!r} failed; the peer's log says why"
            self._fail(start.call_id, RemoteFailure(text))
        finally:
            del self._handler_scopes[start.call_id]
            self._service.release(start.method)
            self._wake.set()

    def _fail(self, call_id: int, error: CallFailed) -> None:
        kind = next(kind for kind, error_type in _ERRORS.items() if isinstance(error, error_type))
        self._session.fail(call_id, kind, str(error))

    def _request(self, start: CallStart) -> Request:
        remote = self._session.remote
        assert remote is not None  # the session lets no call through before Hello
        host = self._link.remote_address.host
        return Request(
            method=start.method,
            body=start.body,
            tensors=start.tensors,
            peer_id=remote.peer_id,
            peer_address=None if remote.port is None else Address(host, remote.port),
        )
