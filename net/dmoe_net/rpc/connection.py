"""One live connection: a link, its session, one reader, one writer, and a task for each call being served.

A connection without calls *rests* where its link can call back (the simulator's): neither reader nor writer runs, until
the link has heard something or this end wants something. Most connections of a large simulation rest.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import trio

from dmoe_net.errors import CallFailed, ConnectionLost, NetError, RemoteProtocolError, VersionMismatch
from dmoe_net.identity import Address, PeerId
from dmoe_net.rpc.base import CALL_ERRORS, Body, Reply, Request, kind_of
from dmoe_net.rpc.faults import misbehave
from dmoe_net.rpc.service import Method, Service
from dmoe_net.rpc.session import RpcSession
from dmoe_net.transport.base import Link
from dmoe_net.wire.frames import Frame, Part
from dmoe_net.wire.messages import CallCancel, CallError, CallPartial, CallReply, CallStart, Hello
from dmoe_net.wire.sinks import put_into
from dmoe_net.wire.tensors import Outgoing, Tensor, plain

_log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
"""Seconds for which a connection whose peer does not say who it is keeps its place."""

_CLOSE_TIMEOUT_S = 1.0
"""Seconds that the transport may take to say farewell; then the link is aborted."""

_LONGEST_SILENCE_S = 1.0
"""Seconds after which a peer that was dialled is greeted although it has not spoken yet."""

_WRITE_BYTES = 512 * 1024
"""Parts written in one go, at least. Larger batches gain nothing and make small calls wait."""

_READ_FRAMES = 8
"""Frames read before others get a turn: answers to the first calls of a batch leave while the rest of it is read."""

SILENCE_S = 30.0
"""Seconds of silence, while calls are under way, after which a peer is pinged, and after as long again taken for gone.
TCP alone would wait a quarter of an hour for a peer that vanished without a word."""

IDLE_S = 30.0
"""Seconds without calls after which the first connection with a peer is closed. Trainers call every few seconds, DHT
peers every minute or so."""

_REST_S = 5.0
"""A connection that is used again so soon after it began to rest stays awake for `_AWAKE_S`, seconds: to fall asleep
and wake up takes a third of the time of a call."""

_AWAKE_S = 10.0

_YOUNG_S = 4.0
"""Seconds for which a new connection stays awake: a first call is often followed by others."""

LEAVE_S = 10.0
"""Seconds to wait for the other end's goodbye once nothing else is under way."""

_MIN_TIMEOUT_S = 0.001
"""Timeout on the wire of a call whose caller's deadline is here already."""


class _PendingCall:
    """Messages for a caller that waits: parts of the answer, then the answer, or None if the connection ends first."""

    __slots__ = ("_arrived", "_news")

    def __init__(self) -> None:
        self._arrived: deque[CallPartial | CallReply | CallError | None] = deque()
        self._news = trio.Event()

    def put(self, message: CallPartial | CallReply | CallError | None) -> None:
        self._arrived.append(message)
        self._news.set()

    async def get(self) -> CallPartial | CallReply | CallError | None:
        if not self._arrived:
            self._news = trio.Event()
            await self._news.wait()
        return self._arrived.popleft()


class Connection:
    """Multiplexes calls in both directions over `link`, while `run` runs.

    Args:
      link: fresh from a transport; the connection closes it.
      service: our end: our greeting, and what the other end may call.
      on_hello: called once, when the other end has said who it is; may raise an error that ends the connection.
      run_again: called when it rests and has something to do; has `run` called soon.
      is_outgoing: True if we dialled it.
      is_lane: True if we dialled it as a lane; of one that the other end dialled, its greeting says so.
    """

    def __init__(
        self,
        link: Link,
        service: Service,
        on_hello: Callable[["Connection", Hello], None],
        run_again: Callable[["Connection"], None],
        *,
        is_outgoing: bool,
        is_lane: bool = False,
    ) -> None:
        self.link = link
        self.is_outgoing = is_outgoing
        self.session = RpcSession(replace(service.hello, lane=True) if is_lane else service.hello)
        self.cause: NetError | None = None
        """Reason of its end; None while it lives."""
        self.is_lane = is_lane
        """True if it is a further one beside the first with this peer; see `dmoe_net.rpc.lanes`."""
        self.bulk_bytes = 0
        """Bytes of the bulk calls under way."""
        self.idle_s = IDLE_S
        """Seconds without calls after which it is closed."""
        self.last_heard = self.last_used = trio.current_time()
        """Times of the last frame that came in, and of the last call placed or served, seconds of trio's clock."""
        self.speaks_first = False
        """True if what we have to say leaves before the other end's greeting; see `_write`."""
        self.rests = False
        """True if `run` has returned although the connection lives."""
        self._rested_at, self._awake_until = -math.inf, self.last_used + _YOUNG_S
        self._service = service
        self._on_hello: Callable[[Connection, Hello], None] | None = on_hello
        self._run_again = run_again
        self._pending: dict[int, _PendingCall] = {}
        self._handler_scopes: dict[int, trio.CancelScope] = {}
        self._scope = self._reader_scope = trio.CancelScope()
        self._wake = trio.Event()
        self._is_sending = False
        self._refusal: VersionMismatch | None = None
        self._last_part: Part | None = None
        self._num_moved = 0  # of the link when it was looked at last
        self._pinged_at = -math.inf
        self._leaving_since = math.inf

    @property
    def remote(self) -> Hello | None:
        """The other end's greeting; None until it has come."""
        return self.session.remote

    @property
    def remote_peer_id(self) -> PeerId | None:
        """The other end: as it says, or before that as the network proves; None until either."""
        return self.link.remote_peer_id if self.remote is None else self.remote.peer_id

    @property
    def peer_address(self) -> Address | None:
        """Address at which the other end listens; None if nowhere, or not known yet."""
        if self.remote is None or self.remote.port is None:
            return None
        return Address(self.remote.host or self.link.remote_address.host, self.remote.port)

    @property
    def is_written(self) -> bool:
        """True if nothing waits to be sent, or the connection has ended."""
        return self.cause is not None or not (self.session.wants_to_write or self._is_sending)

    @property
    def takes_calls(self) -> bool:
        """True if calls can be placed."""
        return self.cause is None and not self.session.is_leaving

    def end(self, cause: NetError) -> None:
        """End the connection: `run` returns soon, calls under way fail with `cause` or `ConnectionLost`. Idempotent."""
        if self.cause is not None:
            return
        self.cause = cause
        self._scope.cancel()
        for pending in self._pending.values():
            pending.put(None)
        self._stir()

    def leave(self) -> None:
        """Place no more calls here; the connection ends when both sides are done with theirs. Idempotent."""
        if not self.session.is_leaving:
            self.session.leave()
            self._stir()

    def check(self, now: float) -> None:
        """Part from a peer without calls, ping a silent one, give up a dead one."""
        if self.link.num_moved != self._num_moved:  # bytes and not frames: a large one takes its time on a slow line
            self._num_moved, self.last_heard = self.link.num_moved, now
        if self.session.is_idle and self.session.is_leaving:
            self._leaving_since = min(self._leaving_since, now)
            if now - self._leaving_since >= LEAVE_S:
                self.end(ConnectionLost("parting took too long"))
        elif self.session.is_idle:
            if now - max(self.last_used, self.last_heard) >= self.idle_s:
                self.leave()
            elif self._may_rest():
                self._reader_scope.cancel()
        elif now - self.last_heard >= SILENCE_S:
            if self._pinged_at <= self.last_heard:
                self._pinged_at = now
                self.session.ping()
                self._wake.set()
            elif now - self._pinged_at >= SILENCE_S:
                silent_s = now - self.last_heard
                self.end(ConnectionLost(f"{self.link.remote_address} was silent for {silent_s:.0f} s"))

    async def run(self) -> None:
        """Serve until the connection rests, or ends for whatever reason; then nothing is left open or running.

        Raises nothing besides `trio.Cancelled`. The end cancels the handlers and fails the calls that wait.
        """
        where = self.link.remote_address
        try:
            while self.cause is None and not self.rests:
                await self._serve_calls()
                if self._may_rest() and self.link.when_heard is not None:
                    self.rests = self.link.when_heard(self._stir)
                    self._rested_at = trio.current_time()
        except NetError as exc:  # of the handshake
            _log.info("refused %s: %s", where, exc)
            self.end(exc)
        except Exception:
            _log.exception("connection with %s failed", where)
        finally:
            if not self.rests:
                self.end(ConnectionLost("this peer was closed"))
                if not isinstance(self.cause, RemoteProtocolError):
                    with trio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
                        await self.link.aclose()
                self.link.abort()

    async def _serve_calls(self) -> None:
        """Read, write and serve calls until the connection ends, or may rest."""
        self._scope = trio.CancelScope()
        with self._scope:
            if self.remote is None:
                self._scope.deadline = trio.current_time() + HELLO_TIMEOUT_S
                await self.link.handshake()
                await trio.lowlevel.checkpoint_if_cancelled()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                # The reader alone decides to rest: nobody else starts handlers, which must not be cancelled by it.
                while self.cause is None and self._refusal is None:
                    with trio.CancelScope() as self._reader_scope:
                        await self._read(nursery)
                    if self._reader_scope.cancelled_caught and self._may_rest():
                        self._scope.cancel()
                        break
        if self._scope.cancelled_caught and self.remote is None:
            self.end(ConnectionLost(f"{self.link.remote_address} did not say who it is"))

    def _may_rest(self) -> bool:
        if self.link.when_heard is None or not self.session.is_idle or self._is_sending:  # asked at every frame
            return False
        is_known = self.takes_calls and self.remote is not None
        return is_known and not self.session.wants_to_write and self._awake_until <= trio.current_time()

    def _stir(self) -> None:
        """Let the writer look for something to write; if nothing runs, let the connection run again."""
        if self.rests:
            self.rests = False
            if (now := trio.current_time()) - self._rested_at < _REST_S:
                self._awake_until = now + _AWAKE_S
            self._run_again(self)
        else:
            self._wake.set()

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
        """Call the peer and wait, see `Caller.call`. If cancelled, the call is taken back or called off. `deadline`, in
        seconds of trio's clock, is sent along; the caller enforces it here."""
        if self.cause is not None:
            raise self._lost()
        self.last_used = trio.current_time()
        timeout_s = max(deadline - self.last_used, _MIN_TIMEOUT_S)
        call_id = self.session.place_call(method, body, tensors, timeout_s=timeout_s, partials=on_partial is not None)
        pending = self._pending[call_id] = _PendingCall()
        self._stir()
        try:
            if into is not None:
                self.link.sinks.offer(call_id, into)
            while isinstance(message := await pending.get(), CallPartial):
                assert on_partial is not None  # the session lets none through otherwise
                on_partial(Reply(body=message.body, tensors=message.tensors))
        finally:
            if into is not None:
                self.link.sinks.withdraw(call_id)
            # A no-op when the call has been answered. Synchronous: a cancelled task could not wait here.
            if self._pending.pop(call_id, None) is not None:
                self.session.abandon_call(call_id)
                self._wake.set()
        if message is None:
            raise self._lost()
        if isinstance(message, CallError):
            raise CALL_ERRORS[message.kind](message.message)
        received = message.tensors
        return Reply(body=message.body, tensors=tuple(received) if into is None else put_into(into, received))

    def _lost(self) -> NetError:
        """A fresh error for each caller, since raising one object in several tasks would mix their tracebacks."""
        kind = RemoteProtocolError if isinstance(self.cause, RemoteProtocolError) else ConnectionLost
        error = kind(str(self.cause))
        error.__cause__ = self.cause
        return error

    async def _write(self) -> None:
        """The only task that sends: parts leave whole and in order, whoever is cancelled meanwhile."""
        try:
            if self.is_outgoing and not self.speaks_first:
                # The end that was dialled speaks first: an older peer that got our hello at once would drop us for our
                # version and not say its own. A silent end may be a peer over TLS that is dialled in plain, which
                # closes the connection when it hears us.
                with trio.move_on_after(_LONGEST_SILENCE_S):
                    while self.remote is None and self._refusal is None:
                        self._wake = trio.Event()
                        await self._wake.wait()
            while not self._scope.cancel_called:  # a cancelled send would spoil the link
                if self._last_part is not None:
                    self._is_sending = True
                    await self.link.send(self._last_part)
                    return self.end(ConnectionLost("ended on purpose"))
                parts = self.session.take_parts(_WRITE_BYTES)
                if parts:
                    self._is_sending = True
                    await self.link.send(*parts)
                    self._is_sending = False
                elif self._refusal is not None:  # our hello has left: both ends can say why
                    return self.end(self._refusal)
                elif self.session.is_over:
                    return self.end(ConnectionLost("both ends were done"))
                else:
                    if self._may_rest():
                        self._reader_scope.cancel()
                    self._wake = trio.Event()
                    await self._wake.wait()
        except NetError as exc:
            self.end(exc)

    async def _read(self, nursery: trio.Nursery) -> None:
        link, num_read = self.link, 0
        try:
            while (frame := await link.receive()) is not None:
                self._take_untrusted(frame, nursery)
                del frame  # it would stay in memory until the next one comes
                num_read += 1
                if num_read % _READ_FRAMES == 0:
                    await trio.lowlevel.checkpoint()
            self.end(ConnectionLost(f"{link.remote_address} closed the connection"))
        except VersionMismatch as exc:
            self._refusal = VersionMismatch(f"{link.remote_address} {exc}")
            _log.warning("dropping a connection: %s", self._refusal)
            self._wake.set()
        except NetError as exc:
            if isinstance(exc, RemoteProtocolError):
                _log.warning("dropping the connection with %s: %s", link.remote_address, exc)
            self.end(exc)

    def _take_untrusted(self, frame: Frame, nursery: trio.Nursery) -> None:
        action = self.session.receive_untrusted(frame)
        self.last_heard = trio.current_time()
        if self._on_hello is not None and self.session.remote is not None:
            self._scope.deadline = math.inf
            on_hello, self._on_hello = self._on_hello, None  # what it holds is not needed any more
            on_hello(self, self.session.remote)
        match action:
            case CallReply() | CallError():
                self._pending.pop(action.call_id).put(action)
            case CallPartial():
                self._pending[action.call_id].put(action)
            case CallCancel():
                self._handler_scopes[action.call_id].cancel()
            case CallStart():
                self.last_used = self.last_heard
                self._start(action, nursery)
        if self.session.wants_to_write:
            self._wake.set()
        elif self._may_rest():
            self._reader_scope.cancel()

    def _start(self, start: CallStart, nursery: trio.Nursery) -> None:
        """Serve a call that has come in, if it is admitted."""
        try:
            method = self._service.admit(start.method)
        except CallFailed as exc:
            self.session.fail(start.call_id, kind_of(exc), str(exc))
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
                    self.session.fail(start.call_id, kind_of(exc), str(exc))
            if scope.cancelled_caught:
                self.session.forget(start.call_id)
        finally:
            del self._handler_scopes[start.call_id]
            self._wake.set()

    async def _reply(self, start: CallStart, method: Method) -> Reply:
        remote, faults = self.session.remote, self._service.faults
        assert remote is not None  # the session lets no call through before Hello
        fate = None if faults is None else faults.draw(remote.peer_id, start.method)
        sends_partials = start.partials and fate is None  # a fault strikes all of the answer
        request = Request(
            method=start.method,
            body=start.body,
            tensors=tuple(plain(tensor) for tensor in start.tensors),
            peer_id=remote.peer_id,
            peer_address=self.peer_address,
            send_partial=partial(self._send_partial, start.call_id) if sends_partials else None,
        )
        if fate is None:
            return await method.answer(request)
        return await misbehave(*fate, lambda: method.answer(request), self._send_last)

    def _send_partial(self, call_id: int, reply: Reply) -> bool:
        is_queued = self.session.reply_partly(call_id, reply.body, reply.tensors)
        self._wake.set()
        return is_queued

    def _send_last(self, part: Part) -> None:
        """Send one more part, whatever else waits, and end the connection: a fault on purpose."""
        self._last_part = part
        self._wake.set()
