"""One live connection: a link, its session, one reader, one writer, and a task for each call being served."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import trio

from net.errors import CallFailed, ConnectionLost, NetError, RemoteProtocolError, VersionMismatch
from net.identity import Address
from net.rpc.base import CALL_ERRORS, Body, Reply, Request, kind_of
from net.rpc.faults import FaultInjector, misbehave
from net.rpc.service import Method, Service
from net.rpc.session import Action, RpcSession
from net.transport.base import Link
from net.wire.frames import Frame, Part
from net.wire.messages import CallCancel, CallError, CallPartial, CallReply, CallStart, Hello
from net.wire.sinks import put_into
from net.wire.tensors import Outgoing, Tensor, plain

_log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
"""A connection whose peer does not say who it is does not keep its place for longer."""

_CLOSE_TIMEOUT_S = 1.0
"""How long the transport may take to say farewell; then the link is aborted."""

_LONGEST_SILENCE_S = 1.0
"""Wait for the greeting of a peer that was dialled, before it is greeted all the same."""

_WRITE_BYTES = 512 * 1024
"""Parts written in one go, at least. Small calls placed meanwhile leave together; larger batches gain nothing and make
small calls wait."""

_READ_FRAMES = 8
"""Frames read before others get a turn. Answers to the first calls of a batch then leave while the rest of it is read,
and both ends work at the same time instead of by turns."""

SILENCE_S = 30.0
"""A peer that is silent for so long while calls are under way is pinged, and after as long again it is taken for gone.
TCP alone would wait a quarter of an hour for a peer that vanished without a word."""

CHECK_PERIOD_S = 5.0
"""How often all connections are looked at: one timer for each peer, not for each connection."""

IDLE_S = 120.0
"""The first connection with a peer is closed after so long without calls. Trainers call every few seconds, DHT peers
every minute or so."""

LEAVE_S = 10.0
"""How long the other end's goodbye is waited for once nothing else is under way."""

_MIN_TIMEOUT_S = 0.001
"""What a call says on the wire when its caller's deadline is here already."""


class _PendingCall:
    """A caller waiting: `answer` stays None if the connection ends first."""

    __slots__ = ("answer", "is_done", "news", "partials")

    def __init__(self) -> None:
        self.partials: list[CallPartial] = []  # that the caller has not seen yet
        self.answer: CallReply | CallError | None = None
        self.is_done = False
        self.news = trio.Event()

    def end(self, answer: CallReply | CallError | None = None) -> None:
        self.answer, self.is_done = answer, True
        self.news.set()

    def add(self, partial: CallPartial) -> None:
        self.partials.append(partial)
        self.news.set()

    async def wait(self, on_partial: Callable[[Reply], None] | None) -> None:
        """Return when it is done; show the caller what comes before."""
        while True:
            await self.news.wait()
            if self.is_done and not self.partials:
                return
            self.news = trio.Event()
            partials, self.partials = self.partials, []
            for each in partials:
                assert on_partial is not None  # the session lets none through otherwise
                on_partial(Reply(body=each.body, tensors=each.tensors))
            if self.is_done:
                return


class Connection:
    """Multiplexes calls in both directions over `link`, while `run` runs.

    Args:
      link: fresh from a transport; the connection closes it.
      is_outgoing: whether we dialled it.
      hello: who we are and where we listen, for the peer.
      service: what the other end may call.
      on_hello: called once, when the other end has said who it is; may raise an error that ends the connection.
      faults: what is to go wrong with our answers; None for nothing.
      is_lane: we dialled it as one; of one that the other end dialled the greeting says so.
    """

    def __init__(
        self,
        link: Link,
        *,
        is_outgoing: bool,
        hello: Hello,
        service: Service,
        on_hello: Callable[["Connection", Hello], None],
        faults: FaultInjector | None = None,
        is_lane: bool = False,
    ) -> None:
        self.link = link
        self.is_outgoing = is_outgoing
        self.session = RpcSession(hello)
        self.cause: NetError | None = None
        """Why it ended; None while it lives."""
        self.is_lane = is_lane
        """It is a further one beside the first with this peer; see `net.rpc.lanes`."""
        self.bulk_bytes = 0
        """Of calls that are under way."""
        self.idle_s = IDLE_S
        """Without calls for so long it is closed."""
        self.last_heard = self.last_used = trio.current_time()
        """When the last frame came in, and when the last call was placed or served, seconds of trio's clock."""
        self._service = service
        self._on_hello = on_hello
        self._faults = faults
        self._pending: dict[int, _PendingCall] = {}
        self._handler_scopes: dict[int, trio.CancelScope] = {}
        self._scope = trio.CancelScope()
        self._wake = trio.Event()
        self._was_greeted = trio.Event()
        self._refusal: VersionMismatch | None = None
        self._last_part: Part | None = None
        self._num_moved = 0  # of the link when it was looked at last
        self._pinged_at = -math.inf
        self._leaving_since = math.inf

    @property
    def remote(self) -> Hello | None:
        """Who is at the other end; None until it has said so."""
        return self.session.remote

    @property
    def peer_address(self) -> Address | None:
        """Address at which the other end listens; None: it listens nowhere, or has not said so yet."""
        if self.remote is None or self.remote.port is None:
            return None
        return Address(self.remote.host or self.link.remote_address.host, self.remote.port)

    @property
    def takes_calls(self) -> bool:
        """Whether calls can be placed."""
        return self.cause is None and not self.session.is_leaving

    def end(self, cause: NetError) -> None:
        """End the connection: `run` returns soon, calls under way fail with `cause` or `ConnectionLost`. Idempotent."""
        if self.cause is not None:
            return
        self.cause = cause
        self._scope.cancel()
        for pending in self._pending.values():
            pending.end()

    def leave(self) -> None:
        """Place no more calls here; the connection ends when both sides are done with theirs. Idempotent."""
        if not self.session.is_leaving:
            self.session.leave()
            self._wake.set()

    def check(self, now: float) -> None:
        """Part from a peer without calls, ping a silent one, give up a dead one. To be called every few seconds."""
        if self.link.num_moved != self._num_moved:
            # Not only frames: a large one takes its time on a slow line, in either direction.
            self._num_moved, self.last_heard = self.link.num_moved, now
        if self.session.is_idle and self.session.is_leaving:
            self._leaving_since = min(self._leaving_since, now)
            if now - self._leaving_since >= LEAVE_S:
                self.end(ConnectionLost("parting took too long"))
        elif self.session.is_idle:
            if now - max(self.last_used, self.last_heard) >= self.idle_s:
                self.leave()
        elif now - self.last_heard >= SILENCE_S:
            if self._pinged_at <= self.last_heard:
                self._pinged_at = now
                self.session.ping()
                self._wake.set()
            elif now - self._pinged_at >= SILENCE_S:
                silent_s = now - self.last_heard
                self.end(ConnectionLost(f"{self.link.remote_address} was silent for {silent_s:.0f} s"))

    async def run(self) -> None:
        """Serve until the connection ends, for whatever reason; then nothing is left open or running.

        Does not raise (besides `trio.Cancelled`): a connection's trouble is its own. Its end cancels the handlers
        that serve it and fails the calls that wait on it.
        """
        # For the handshake and the greeting; whoever does not say who it is keeps no place for longer.
        self._scope.deadline = trio.current_time() + HELLO_TIMEOUT_S
        where = self.link.remote_address
        try:
            with self._scope:
                await self.link.handshake()
                await trio.lowlevel.checkpoint_if_cancelled()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    await self._read(nursery)
        except NetError as exc:  # of the handshake
            _log.info("refused %s: %s", where, exc)
            self.end(exc)
        except Exception:
            _log.exception("connection with %s failed", where)
        finally:
            is_mute = self._scope.cancelled_caught and self.remote is None
            self.end(ConnectionLost(f"{where} did not say who it is" if is_mute else "this peer was closed"))
            if not isinstance(self.cause, RemoteProtocolError):
                with trio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
                    await self.link.aclose()
            self.link.abort()

    async def call(
        self,
        method: str,
        body: Body,
        tensors: Sequence[Outgoing],
        *,
        deadline: float,
        on_partial: Callable[[Reply], None] | None = None,
        into: Tensor | None = None,
    ) -> Reply:
        """Call the peer and wait. If cancelled, the call is taken back or called off; nobody waits for that.

        Args:
          deadline: the caller's, seconds of trio's clock. It is sent along; enforcing it here is the caller's
            part.
          on_partial, into: see `net.rpc.base.Caller.call`.
        """
        if self.cause is not None:
            raise self._lost()
        self.last_used = trio.current_time()
        timeout_s = max(deadline - self.last_used, _MIN_TIMEOUT_S)
        takes_partials = on_partial is not None
        call_id = self.session.place_call(method, body, tensors, timeout_s=timeout_s, partials=takes_partials)
        pending = self._pending[call_id] = _PendingCall()
        self._wake.set()
        try:
            if into is not None:
                self.link.sinks.offer(call_id, into)
            await pending.wait(on_partial)
        finally:
            if into is not None:
                self.link.sinks.withdraw(call_id)
            # A no-op when the call has been answered. Synchronous: a cancelled task could not wait here.
            if self._pending.pop(call_id, None) is not None:
                self.session.abandon_call(call_id)
                self._wake.set()
        match pending.answer:
            case None:
                raise self._lost()
            case CallError(kind=kind, message=message):
                raise CALL_ERRORS[kind](message)
            case CallReply(body=body, tensors=tensors):
                return Reply(body=body, tensors=tuple(tensors) if into is None else put_into(into, tensors))

    def _lost(self) -> NetError:
        """A fresh error for each caller, since raising one object in several tasks would mix their tracebacks."""
        kind = RemoteProtocolError if isinstance(self.cause, RemoteProtocolError) else ConnectionLost
        error = kind(str(self.cause))
        error.__cause__ = self.cause
        return error

    async def _write(self) -> None:
        """The only task that sends: parts leave whole and in order, whoever is cancelled meanwhile."""
        try:
            if self.is_outgoing:
                # Whoever is dialled speaks first: an older peer that got our hello at once would drop us for our
                # version and not say its own. It costs no time: no call leaves before the other end's hello. Who stays
                # silent may be a peer over TLS that is dialled in plain, which closes the connection when it hears us.
                with trio.move_on_after(_LONGEST_SILENCE_S):
                    await self._was_greeted.wait()
            while True:
                if self._last_part is not None:
                    await self.link.send(self._last_part)
                    return self.end(ConnectionLost("ended on purpose"))
                parts = self.session.take_parts(_WRITE_BYTES)
                if parts:
                    await self.link.send(*parts)
                elif self._refusal is not None:  # our hello has left: both ends can say why
                    return self.end(self._refusal)
                elif self.session.is_over:
                    return self.end(ConnectionLost("both ends were done"))
                else:
                    self._wake = trio.Event()
                    await self._wake.wait()
        except NetError as exc:
            self.end(exc)

    async def _read(self, nursery: trio.Nursery) -> None:
        link, num_read = self.link, 0
        try:
            while (frame := await link.receive()) is not None:
                num_read += 1
                if num_read % _READ_FRAMES == 0:
                    await trio.lowlevel.checkpoint()
                self._take_untrusted(frame, nursery)
                del frame  # it would stay in memory until the next one comes
            self.end(ConnectionLost(f"{link.remote_address} closed the connection"))
        except VersionMismatch as exc:
            self._refusal = VersionMismatch(f"{link.remote_address} {exc}")
            _log.warning("dropping a connection: %s", self._refusal)
            self._was_greeted.set()
            self._wake.set()
        except NetError as exc:
            if isinstance(exc, RemoteProtocolError):
                _log.warning("dropping the connection with %s: %s", link.remote_address, exc)
            self.end(exc)

    def _take_untrusted(self, frame: Frame, nursery: trio.Nursery) -> None:
        action = self.session.receive_untrusted(frame)
        self.last_heard = trio.current_time()
        if self._scope.deadline != math.inf and self.session.remote is not None:
            self._scope.deadline = math.inf
            self._was_greeted.set()
            self._on_hello(self, self.session.remote)
        if action is not None:
            self._carry_out(action, nursery)
        if self.session.wants_to_write:
            self._wake.set()

    def _carry_out(self, action: Action, nursery: trio.Nursery) -> None:
        match action:
            case CallReply() | CallError():
                self._pending.pop(action.call_id).end(action)
            case CallPartial():
                self._pending[action.call_id].add(action)
            case CallCancel():
                self._handler_scopes[action.call_id].cancel()
            case CallStart():
                self.last_used = self.last_heard
                self._start(action, nursery)

    def _start(self, start: CallStart, nursery: trio.Nursery) -> None:
        """Serve a call that has come in, if it is admitted."""
        try:
            method = self._service.admit(start.method)
        except CallFailed as exc:
            self._fail(start.call_id, exc)
            return
        scope = trio.CancelScope(deadline=self.last_heard + start.timeout_s)
        self._handler_scopes[start.call_id] = scope
        nursery.start_soon(self._serve, start, scope, method)

    async def _serve(self, start: CallStart, scope: trio.CancelScope, method: Method) -> None:
        """Run one handler, whose place is taken already, within its deadline, and queue the answer."""
        try:
            with scope:
                try:
                    with method.serving(self.link.remote_address):
                        reply = await self._reply(start, method)
                        self.session.reply(start.call_id, reply.body, reply.tensors)
                except CallFailed as exc:
                    self._fail(start.call_id, exc)
            if scope.cancelled_caught:
                self.session.forget(start.call_id)
        finally:
            del self._handler_scopes[start.call_id]
            self._wake.set()

    async def _reply(self, start: CallStart, method: Method) -> Reply:
        request = self._request(start)
        fate = None if self._faults is None else self._faults.draw(request.peer_id, request.method)
        if fate is None:
            return await method.run(request)
        whole = replace(request, send_partial=None)  # a fault strikes all of the answer
        return await misbehave(*fate, lambda: method.run(whole), self._send_last)

    def _send_partial(self, call_id: int, reply: Reply) -> bool:
        is_queued = self.session.reply_partly(call_id, reply.body, reply.tensors)
        self._wake.set()
        return is_queued

    def _send_last(self, part: Part) -> None:
        """Send one more part, whatever else waits, and end the connection: a fault on purpose."""
        self._last_part = part
        self._wake.set()

    def _fail(self, call_id: int, error: CallFailed) -> None:
        self.session.fail(call_id, kind_of(error), str(error))

    def _request(self, start: CallStart) -> Request:
        remote = self.session.remote
        assert remote is not None  # the session lets no call through before Hello
        return Request(
            method=start.method,
            body=start.body,
            tensors=tuple(plain(tensor) for tensor in start.tensors),
            peer_id=remote.peer_id,
            peer_address=self.peer_address,
            send_partial=partial(self._send_partial, start.call_id) if start.partials else None,
        )


async def look_after(connections: Iterable[Connection]) -> None:
    """Close idle connections and notice dead ones, for ever.

    Args:
      connections: looked at again each time.
    """
    while True:
        await trio.sleep(CHECK_PERIOD_S)
        now = trio.current_time()
        for connection in connections:
            connection.check(now)
