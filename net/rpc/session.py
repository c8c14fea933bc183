"""One connection's calls, both directions, without I/O.

Theory of operation. Either end may call the other; the two directions share nothing but the wire. The shell feeds
every frame to `receive_untrusted` and carries out `take_actions`; what is to be sent waits in an `Outbox` that the
shell's one writer empties with `take_parts`. Nothing ever waits for room there, so a caller can be cancelled
at any moment without leaving half a message behind, and its size is bounded by what may put frames there:

- calls placed and not given up: at most `max_outgoing`; giving up an unsent call takes it out again, and of one that
  has left in part the rest is not sent;
- cancellations: one for each call that was sent and given up;
- answers: at most `max_incoming`, since an answered call counts as running until its answer has been taken; while
  answers of more than `max_answer_bytes` wait for a peer that does not read, further calls are turned away and further
  answers are replaced by errors ("busy");
- "busy" errors: one for each call that the peer places beyond that. An honest peer has at most `max_outgoing`
  calls under way; one that goes on without reading the errors runs into `max_queued` and is dropped;
- one each of hello, credit, ping, pong and goodbye.

What comes in is bounded by the window that our `Hello` grants (`net.rpc.outbox` says how it works). A call holds its
share and its place until its handler is done, also if it was called off meanwhile: the handler still has the tensors.

Legal sequences. `Hello` comes first and once. A call's id must not be one that is being served; beyond that ids arrive
in any order, since large calls complete later. An answer to a call that was never placed is an error; to one that was
given up or is answered already it is dropped, for it crossed our cancellation on the way (or is a lie that changes
nothing). A cancellation of a call that is not being served is dropped for the same reason. After both ends have said
`Goodbye` and all calls are answered the session `is_over`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from net.errors import PeerBusy, RemoteProtocolError
from net.identity import PeerId
from net.rpc.base import Body
from net.rpc.outbox import ANSWER, CALL, Key, Outbox
from net.wire.compression import COMPRESSIONS, Compressed
from net.wire.frame_reader import WINDOW_BYTES, window_cost
from net.wire.frames import EncodedFrame, Frame, Part
from net.wire.messages import (
    CallCancel,
    CallError,
    CallReply,
    CallStart,
    Credit,
    ErrorKind,
    Goodbye,
    Hello,
    Message,
    Ping,
    Pong,
    encode_message,
    parse_untrusted,
)
from net.wire.tensors import Outgoing

MAX_OUTGOING_CALLS = 1024
"""Calls of ours under way on one connection; one more is `PeerBusy`. Ten times what a trainer needs."""

MAX_INCOMING_CALLS = 256
"""Calls of the peer's under way on one connection: its share of this process, whatever the method."""

MAX_QUEUED_FRAMES = 4 * MAX_OUTGOING_CALLS
"""Above anything that an honest peer can cause: see the list at the head of this file."""

MAX_ANSWER_BYTES = WINDOW_BYTES
"""Answers that wait for one peer: as much as it may have under way towards us."""


_CREDIT: Key = ("credit", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCall:
    """Run the handler; then `reply`, `fail` or `forget` the call."""

    start: CallStart


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRun:
    """The caller gave this call up: cancel its handler. The session has forgotten it already."""

    call_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishCall:
    """A call of ours was answered."""

    answer: CallReply | CallError


Action = RunCall | CancelRun | FinishCall


def hello_of(
    peer_id: PeerId, *, instance: bytes, port: int | None, host: str | None = None, window_bytes: int = WINDOW_BYTES
) -> EncodedFrame:
    """The greeting of a peer: a `Hello` that names every compression of ours."""
    names = tuple(COMPRESSIONS)
    return encode_message(
        Hello(peer_id=peer_id, instance=instance, port=port, host=host, window_bytes=window_bytes, compressions=names)
    )


class RpcSession:
    """State of one connection: calls placed, calls being served, frames to send.

    Args:
      hello: what we say first, see `hello_of`; one serves all sessions of a peer.
      window_bytes: what the peer may send ahead, as `hello` says.
      max_outgoing, max_incoming, max_queued, max_answer_bytes: the bounds above; smaller in tests.
    """

    def __init__(
        self,
        hello: EncodedFrame,
        *,
        window_bytes: int = WINDOW_BYTES,
        max_outgoing: int = MAX_OUTGOING_CALLS,
        max_incoming: int = MAX_INCOMING_CALLS,
        max_queued: int = MAX_QUEUED_FRAMES,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self._window_bytes = window_bytes
        self._max_outgoing = max_outgoing
        self._max_incoming = max_incoming
        self._max_queued = max_queued
        self._max_answer_bytes = max_answer_bytes
        self._remote: Hello | None = None
        self._last_placed = 0  # highest id that we used
        self._placed: set[int] = set()  # calls of ours without an answer
        self._running: dict[int, int] = {}  # calls of the peer's whose answer has not left, and their window cost
        self._called_off: set[int] = set()  # of these, those that want no answer, while their handler ends
        self._held_bytes = 0  # window cost of all that we have not dealt with
        self._owed_bytes = 0  # what we have dealt with and not said so yet
        self._is_leaving = False
        self._said_goodbye = False
        self._heard_goodbye = False
        self._outbox = Outbox()
        self._actions: list[Action] = []
        self._outbox.put(("hello", 0), hello)

    @property
    def remote(self) -> Hello | None:
        """What the peer said of itself; None until it has."""
        return self._remote

    @property
    def is_idle(self) -> bool:
        """No call is under way in either direction."""
        return not self._placed and not self._running

    @property
    def is_leaving(self) -> bool:
        """One of the two wants to part: place no more calls here."""
        return self._is_leaving

    @property
    def is_over(self) -> bool:
        """Both said goodbye, and nothing is left to be done."""
        return self._said_goodbye and self._heard_goodbye and self.is_idle and not self._outbox

    @property
    def wants_to_write(self) -> bool:
        """`take_parts` may have something, or the session has become over: wake the writer."""
        return bool(self._outbox) or self._owes_credit or self.is_over

    def place_call(self, method: str, body: Body, tensors: Sequence[Outgoing], *, timeout_s: float) -> int:
        """Queue a call; its id is what `FinishCall` will carry. Tensors leave uncompressed if the peer could not undo
        the compression asked for.

        Raises:
          PeerBusy: `max_outgoing` calls are under way.
          LocalProtocolError: the call cannot be sent. The session is as before.
        """
        if len(self._placed) >= self._max_outgoing:
            raise PeerBusy(f"{self._max_outgoing} calls to this peer are under way already")
        call_id = self._last_placed + 1
        start = CallStart(
            call_id=call_id, method=method, timeout_s=timeout_s, body=body, tensors=self._understood(tensors)
        )
        self._enqueue(CALL, call_id, start)
        self._last_placed = call_id
        self._placed.add(call_id)
        return call_id

    def abandon_call(self, call_id: int) -> None:
        """Nobody waits for this call any more: take it back, or tell the peer if it has been sent."""
        if call_id not in self._placed:
            return
        self._placed.remove(call_id)
        if not self._outbox.discard((CALL, call_id)):
            self._enqueue("cancel", call_id, CallCancel(call_id=call_id))
        self._say_goodbye_if_done()

    def reply(self, call_id: int, body: Body, tensors: Sequence[Outgoing]) -> None:
        """Answer a call of the peer's; nothing happens if it was given up meanwhile.

        Raises:
          LocalProtocolError: the answer cannot be sent; the call is still to be answered.
        """
        if self._wants_answer(call_id):
            answer = CallReply(call_id=call_id, body=body, tensors=self._understood(tensors))
            encoded = encode_message(answer)
            if encoded.body_nbytes and self._outbox.answer_bytes > self._max_answer_bytes:
                self.fail(call_id, ErrorKind.BUSY, self._unread())
                return
            self._outbox.put((ANSWER, call_id), encoded)
            self._release(call_id)

    def fail(self, call_id: int, kind: ErrorKind, message: str) -> None:
        """Answer a call of the peer's with an error; nothing happens if it was given up meanwhile."""
        if self._wants_answer(call_id):
            self._enqueue(ANSWER, call_id, CallError(call_id=call_id, kind=kind, message=message))
            self._release(call_id)

    def forget(self, call_id: int) -> None:
        """End a call of the peer's without an answer: its handler is done, and nobody waits."""
        self._outbox.discard((ANSWER, call_id))
        self._called_off.discard(call_id)
        if call_id in self._running:
            self._release(call_id)
            del self._running[call_id]

    def ping(self) -> None:
        """Ask the peer for a sign of life."""
        self._enqueue("ping", 0, Ping())

    def leave(self) -> None:
        """Place no more calls here, and tell the peer once those under way are answered. Idempotent."""
        self._is_leaving = True
        self._say_goodbye_if_done()

    @property
    def _owes_credit(self) -> bool:
        # An eighth: see the sum in `net.rpc.outbox`.
        # One credit at a time: the next one in the queue would take the place of the first.
        return self._owed_bytes >= max(1, self._window_bytes // 8) and _CREDIT not in self._outbox

    def take_parts(self, max_nbytes: int) -> list[Part]:
        """The next parts to write, in order: about `max_nbytes`, but at least one if anything can leave.

        Once taken, they must be written: they cannot be called back.
        """
        if self._owes_credit:
            self._outbox.put(_CREDIT, encode_message(Credit(nbytes=self._owed_bytes)))
            self._held_bytes -= self._owed_bytes
            self._owed_bytes = 0
        parts, done = self._outbox.take(max_nbytes)
        for kind, call_id in done:
            if kind == ANSWER:
                self._running.pop(call_id, None)
        return parts

    def take_actions(self) -> tuple[Action, ...]:
        """What the shell must do now; each action is handed out once."""
        actions = tuple(self._actions)
        self._actions.clear()
        return actions

    def receive_untrusted(self, frame: Frame) -> None:
        """Take in what the peer sent.

        Raises:
          RemoteProtocolError: it is no message, or not one that may come now. The connection must be dropped.
        """
        message = parse_untrusted(frame)
        if self._remote is None:
            if not isinstance(message, Hello):
                raise RemoteProtocolError(f"expected Hello first, got {type(message).__name__}")
            self._remote = message
            self._outbox.open_window(message.window_bytes)
            return
        match message:
            case Hello():
                raise RemoteProtocolError("a second Hello")
            case CallStart():
                self._receive_start_untrusted(message, self._hold_untrusted(frame))
            case CallCancel():
                self._receive_cancel(message.call_id)
            case CallReply() | CallError():
                self._receive_answer_untrusted(message)
            case Credit():
                self._outbox.grant_untrusted(message.nbytes)
            case Ping():
                self._enqueue("pong", 0, Pong())
            case Pong():
                pass  # that something came is all that counts
            case Goodbye():
                if self._heard_goodbye:
                    raise RemoteProtocolError("a second Goodbye")
                self._heard_goodbye = True
                self.leave()

    def _receive_start_untrusted(self, start: CallStart, cost: int) -> None:
        if start.call_id in self._running:
            raise RemoteProtocolError(f"call id {start.call_id} is in use already")
        if self._heard_goodbye:
            raise RemoteProtocolError("a call after Goodbye")
        if len(self._running) >= self._max_incoming:
            busy = f"{self._max_incoming} of your calls are under way already"
        elif self._outbox.answer_bytes > self._max_answer_bytes:
            busy = self._unread()
        else:
            self._running[start.call_id] = cost
            self._actions.append(RunCall(start=start))
            return
        self._owed_bytes += cost
        if len(self._outbox) >= self._max_queued:
            raise RemoteProtocolError(f"{len(self._outbox)} frames wait for a peer that calls and does not read")
        self._enqueue("busy", start.call_id, CallError(call_id=start.call_id, kind=ErrorKind.BUSY, message=busy))

    def _receive_cancel(self, call_id: int) -> None:
        if call_id not in self._running or call_id in self._called_off:
            return
        if (ANSWER, call_id) in self._outbox:
            self.forget(call_id)
        else:
            self._called_off.add(call_id)
            self._actions.append(CancelRun(call_id=call_id))

    def _receive_answer_untrusted(self, answer: CallReply | CallError) -> None:
        if answer.call_id > self._last_placed:
            raise RemoteProtocolError(f"answer to call {answer.call_id}, which was never placed")
        if (CALL, answer.call_id) in self._outbox:
            raise RemoteProtocolError(f"answer to call {answer.call_id}, which has not been sent yet")
        if answer.call_id in self._placed:
            self._placed.remove(answer.call_id)
            self._actions.append(FinishCall(answer=answer))
            self._say_goodbye_if_done()

    def _hold_untrusted(self, frame: Frame) -> int:
        """Count a frame into the window; its cost."""
        cost = window_cost(frame.body_nbytes, self._window_bytes)
        if self._held_bytes + cost > self._window_bytes:
            raise RemoteProtocolError(f"more than the {self._window_bytes} bytes that the window allows")
        self._held_bytes += cost
        return cost

    def _wants_answer(self, call_id: int) -> bool:
        """Whether somebody waits for this call; if not, it is over now."""
        if call_id in self._called_off:
            self.forget(call_id)
        return call_id in self._running

    def _unread(self) -> str:
        return f"answers of {self._outbox.answer_bytes} bytes wait for you to read them"

    def _release(self, call_id: int) -> None:
        """The request of a running call is dealt with."""
        self._owed_bytes += self._running[call_id]
        self._running[call_id] = 0

    def _say_goodbye_if_done(self) -> None:
        if self._is_leaving and not self._said_goodbye and not self._placed:
            self._said_goodbye = True
            self._enqueue("goodbye", 0, Goodbye())

    def _understood(self, tensors: Sequence[Outgoing]) -> tuple[Outgoing, ...]:
        known = self._remote.compressions if self._remote is not None else ()
        return tuple(
            tensor.tensor if isinstance(tensor, Compressed) and tensor.compression.value not in known else tensor
            for tensor in tensors
        )

    def _enqueue(self, kind: str, call_id: int, message: Message) -> None:
        key: Key = (kind, call_id)
        self._outbox.put(key, encode_message(message))
