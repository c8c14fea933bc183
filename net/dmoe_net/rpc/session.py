"""One connection's calls, both directions, without I/O.

Theory of operation. Either end may call the other; the two directions share nothing but the wire. The shell feeds
every frame to `receive_untrusted` and carries out the `Action` that it returns; what is to be sent waits in an `Outbox`
that the shell's one writer empties with `take_parts`. Nothing ever waits for room there, so a caller can be cancelled
at any moment without leaving half a message behind, and its size is bounded by what may put frames there:

- calls placed and not given up: at most `max_outgoing`; giving up an unsent call takes it out again, and of one that
  has left in part the rest is not sent;
- cancellations: one for each call that was sent and given up;
- answers: at most `max_incoming`, since an answered call counts as running until its answer has been taken; while
  answers of more than `max_answer_bytes` wait for a peer that does not read, further calls are turned away and further
  answers are replaced by errors ("busy");
- partials, which are parts of answers: one for each call that is being served;
- "busy" errors: one for each call that the peer places beyond that. An honest peer has at most `max_outgoing`
  calls under way; one that goes on without reading the errors runs into `max_queued` and is dropped;
- one each of hello, credit, ping, pong and goodbye.

What comes in is bounded by the window that our `Hello` grants (`dmoe_net.rpc.outbox` says how it works). A call holds
its share and its place until its handler is done, also if it was called off meanwhile: the handler still has the
tensors.

Legal sequences. `Hello` comes first and once. A call's id must not be one that is being served; beyond that ids arrive
in any order, since large calls complete later. An answer to a call that was never placed is an error; to one that was
given up or is answered already it is dropped, for it crossed our cancellation on the way (or is a lie that changes
nothing). A partial of a call that did not ask for any is an error; an answer leaves after the partials of its call, for
what comes later is dropped. A cancellation of a call that is not being served is dropped for the same reason. After
both ends have said `Goodbye` and all calls are answered the session `is_over`.
"""

from collections.abc import Sequence

from dmoe_net.errors import PeerBusy, RemoteProtocolError, VersionMismatch
from dmoe_net.rpc.base import Body
from dmoe_net.rpc.outbox import ANSWER, CALL, PARTIAL, Key, Outbox
from dmoe_net.wire.compression import Compressed
from dmoe_net.wire.frame_reader import WINDOW_BYTES, window_cost
from dmoe_net.wire.frames import EncodedFrame, Frame, Part
from dmoe_net.wire.messages import (
    CallCancel,
    CallError,
    CallPartial,
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
from dmoe_net.wire.tensors import Outgoing
from dmoe_net.wire.versions import versions_differ

MAX_OUTGOING_CALLS = 1024
"""Calls of ours under way on one connection; one more is `PeerBusy`. Ten times what a trainer needs."""

MAX_INCOMING_CALLS = 256
"""Calls of the peer's under way on one connection: its share of this process, whatever the method."""

MAX_QUEUED_FRAMES = 4 * MAX_OUTGOING_CALLS
"""Above anything that an honest peer can cause: see the list at the head of this file."""

MAX_ANSWER_BYTES = WINDOW_BYTES
"""Answers that wait for one peer: as much as it may have under way towards us."""

_CREDIT: Key = ("credit", 0)

Action = CallStart | CallCancel | CallReply | CallPartial | CallError
"""Request of the peer to the shell: run the handler of a call and then `reply`, `fail` or `forget` it; cancel the
handler of a call; give the caller of a call of ours part of the answer, or finish the call with its answer."""


class RpcSession:
    """State of one connection: calls placed, calls being served, frames to send; `hello` is what we say first."""

    def __init__(self, hello: Hello) -> None:
        self.max_outgoing = MAX_OUTGOING_CALLS
        self.max_incoming = MAX_INCOMING_CALLS
        self.max_queued = MAX_QUEUED_FRAMES
        self.max_answer_bytes = MAX_ANSWER_BYTES
        """The bounds above."""
        self.remote: Hello | None = None
        """Hello of the peer; None until it has come."""
        self.is_leaving = False
        """One of the two wants to part: place no more calls here."""
        self._calls = hello.calls
        self._window_bytes = hello.window_bytes
        # Of credit at most; see the sum in `dmoe_net.rpc.outbox`.
        self._gathered_bytes = max(1, hello.window_bytes // 8)
        self._last_placed = 0  # highest id that we used
        self._placed: dict[int, bool] = {}  # calls of ours without an answer, and whether they take partials
        self._running: dict[int, int] = {}  # calls of the peer's whose answer has not left, and their window cost
        self._called_off: set[int] = set()  # of these, those that want no answer, while their handler ends
        self._held: dict[int, EncodedFrame] = {}  # answers that leave when the partial before them has left
        self._held_bytes = 0  # window cost of all that we have not dealt with
        self._owed_bytes = 0  # what we have dealt with and not said so yet
        self._said_goodbye = False
        self._heard_goodbye = False
        self._outbox = Outbox()
        self._enqueue("hello", 0, hello)

    @property
    def is_idle(self) -> bool:
        """True if no call is under way in either direction."""
        return not self._placed and not self._running

    @property
    def num_placed(self) -> int:
        """Calls of ours that wait for their answer."""
        return len(self._placed)

    @property
    def num_running(self) -> int:
        """Calls of the other end that are being served."""
        return len(self._running)

    @property
    def is_over(self) -> bool:
        """True if both ends have said goodbye and nothing is left to be done."""
        return self._said_goodbye and self._heard_goodbye and self.is_idle and not self._outbox

    @property
    def wants_to_write(self) -> bool:
        """True if the writer must be woken: `take_parts` may have something, or the session has become over."""
        return bool(self._outbox) or self._owes_credit or self.is_over

    def place_call(
        self, method: str, body: Body, tensors: Sequence[Outgoing], *, timeout_s: float, partials: bool = False
    ) -> int:
        """Queue a call, and return the id that its answer will carry. Tensors leave uncompressed if the peer could not
        undo the compression asked for. `partials`: take parts of the answer as they become ready.

        Raises:
          PeerBusy: `max_outgoing` calls are under way.
          LocalProtocolError: the call cannot be sent. The session is as before.
        """
        if len(self._placed) >= self.max_outgoing:
            raise PeerBusy(f"{self.max_outgoing} calls to this peer are under way already")
        call_id = self._last_placed + 1
        start = CallStart(
            call_id=call_id,
            method=method,
            timeout_s=timeout_s,
            body=body,
            tensors=self._understood(tensors),
            partials=partials,
        )
        self._enqueue(CALL, call_id, start)
        self._last_placed = call_id
        self._placed[call_id] = partials
        return call_id

    def abandon_call(self, call_id: int) -> None:
        """Take back a call for which nobody waits any more, or tell the peer if it has been sent."""
        if call_id not in self._placed:
            return
        del self._placed[call_id]
        if not self._outbox.discard((CALL, call_id)):
            self._enqueue("cancel", call_id, CallCancel(call_id=call_id))
        self._say_goodbye_if_done()

    def reply_partly(self, call_id: int, body: Body, tensors: Sequence[Outgoing]) -> bool:
        """Answer part of a call of the peer's that takes partials; whether it was queued. It is not while an earlier
        partial of the call waits to leave, too much else waits, or nobody waits for the answer any more.

        Raises:
          LocalProtocolError: it cannot be sent.
        """
        key = (PARTIAL, call_id)
        is_wanted = call_id in self._running and call_id not in self._called_off
        if not is_wanted or key in self._outbox or self._unread_bytes > self.max_answer_bytes:
            return False
        self._outbox.put(
            key, encode_message(CallPartial(call_id=call_id, body=body, tensors=self._understood(tensors)))
        )
        return True

    def reply(self, call_id: int, body: Body, tensors: Sequence[Outgoing]) -> None:
        """Answer a call of the peer's; nothing happens if it was given up meanwhile.

        Raises:
          LocalProtocolError: the answer cannot be sent; the call is still to be answered.
        """
        if self._wants_answer(call_id):
            answer = CallReply(call_id=call_id, body=body, tensors=self._understood(tensors))
            encoded = encode_message(answer)
            if encoded.body_nbytes and self._unread_bytes > self.max_answer_bytes:
                self.fail(call_id, ErrorKind.BUSY, self._unread())
                return
            self._answer(call_id, encoded)

    def fail(self, call_id: int, kind: ErrorKind, message: str) -> None:
        """Answer a call of the peer's with an error; nothing happens if it was given up meanwhile."""
        if self._wants_answer(call_id):
            self._answer(call_id, encode_message(CallError(call_id=call_id, kind=kind, message=message)))

    def forget(self, call_id: int) -> None:
        """End a call of the peer's without an answer: its handler is done, and nobody waits."""
        self._held.pop(call_id, None)
        self._outbox.discard((PARTIAL, call_id))
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
        self.is_leaving = True
        self._say_goodbye_if_done()

    @property
    def _owes_credit(self) -> bool:
        # One credit at a time: the next one in the queue would take the place of the first.
        return self._owed_bytes >= self._gathered_bytes and _CREDIT not in self._outbox

    def take_parts(self, max_nbytes: int) -> list[Part]:
        """The next parts to write, in order: about `max_nbytes`, but at least one if anything can leave.

        Once taken, they must be written: they cannot be called back.
        """
        if self._owes_credit:
            self._enqueue(*_CREDIT, Credit(nbytes=self._owed_bytes))
            self._held_bytes -= self._owed_bytes
            self._owed_bytes = 0
        parts, done = self._outbox.take(max_nbytes)
        for kind, call_id in done:
            if kind == ANSWER:
                self._running.pop(call_id, None)
            elif kind == PARTIAL and call_id in self._held:
                self._outbox.put((ANSWER, call_id), self._held.pop(call_id))
        return parts

    def receive_untrusted(self, frame: Frame) -> Action | None:
        """Take in what the peer sent, and say what the shell must do about it, if anything.

        Raises:
          RemoteProtocolError: it is no message, or not one that may come now. The connection must be dropped.
          VersionMismatch: the peer speaks another version; send it our hello all the same, and nothing after that.
        """
        message = parse_untrusted(frame)
        if self.remote is None:
            if not isinstance(message, Hello):
                raise RemoteProtocolError(f"expected Hello first, got {type(message).__name__}")
            if message.calls != self._calls:
                what = "calls and records"
                raise VersionMismatch(versions_differ(what, message.calls, self._calls, software=message.software))
            self.remote = message
            self._outbox.open_window(message.window_bytes)
            return None
        match message:
            case Hello():
                raise RemoteProtocolError("a second Hello")
            case CallStart():
                return self._receive_start_untrusted(message, frame.body_nbytes)
            case CallCancel():
                return self._receive_cancel(message)
            case CallReply() | CallPartial() | CallError():
                return self._receive_answer_untrusted(message)
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
        return None

    def _receive_start_untrusted(self, start: CallStart, nbytes: int) -> CallStart | None:
        cost = window_cost(nbytes, self._window_bytes)
        if self._held_bytes + cost > self._window_bytes:
            raise RemoteProtocolError(f"more than the {self._window_bytes} bytes that the window allows")
        self._held_bytes += cost
        if start.call_id in self._running:
            raise RemoteProtocolError(f"call id {start.call_id} is in use already")
        if self._heard_goodbye:
            raise RemoteProtocolError("a call after Goodbye")
        if len(self._running) >= self.max_incoming:
            busy = f"{self.max_incoming} of your calls are under way already"
        elif self._unread_bytes > self.max_answer_bytes:
            busy = self._unread()
        else:
            self._running[start.call_id] = cost
            return start
        self._owed_bytes += cost
        if len(self._outbox) >= self.max_queued:
            raise RemoteProtocolError(f"{len(self._outbox)} frames wait for a peer that calls and does not read")
        self._enqueue("busy", start.call_id, CallError(call_id=start.call_id, kind=ErrorKind.BUSY, message=busy))
        return None

    def _receive_cancel(self, cancel: CallCancel) -> CallCancel | None:
        call_id = cancel.call_id
        if call_id not in self._running or call_id in self._called_off:
            return None
        if call_id in self._held or (ANSWER, call_id) in self._outbox:
            self.forget(call_id)
            return None
        self._called_off.add(call_id)
        return cancel

    def _receive_answer_untrusted(
        self, answer: CallReply | CallPartial | CallError
    ) -> CallReply | CallPartial | CallError | None:
        if answer.call_id > self._last_placed:
            raise RemoteProtocolError(f"answer to call {answer.call_id}, which was never placed")
        if (CALL, answer.call_id) in self._outbox:
            raise RemoteProtocolError(f"answer to call {answer.call_id}, which has not been sent yet")
        if answer.call_id not in self._placed:
            return None
        if isinstance(answer, CallPartial):
            if not self._placed[answer.call_id]:
                raise RemoteProtocolError(f"part of an answer to call {answer.call_id}, which did not ask for parts")
            return answer
        del self._placed[answer.call_id]
        self._say_goodbye_if_done()
        return answer

    def _wants_answer(self, call_id: int) -> bool:
        """Return True if somebody waits for the answer to this call; if not, the call is over now."""
        if call_id in self._called_off:
            self.forget(call_id)
        return call_id in self._running

    @property
    def _unread_bytes(self) -> int:
        """Tensors of answers that wait to leave."""
        return self._outbox.answer_bytes + sum(encoded.body_nbytes for encoded in self._held.values())

    def _unread(self) -> str:
        return f"answers of {self._unread_bytes} bytes wait for you to read them"

    def _answer(self, call_id: int, encoded: EncodedFrame) -> None:
        """Queue the answer to a running call, behind the partial that may still wait, and count the call as dealt
        with."""
        if (PARTIAL, call_id) in self._outbox:
            self._held[call_id] = encoded
        else:
            self._outbox.put((ANSWER, call_id), encoded)
        self._release(call_id)

    def _release(self, call_id: int) -> None:
        """Count the request of a running call as dealt with."""
        self._owed_bytes += self._running[call_id]
        self._running[call_id] = 0

    def _say_goodbye_if_done(self) -> None:
        if self.is_leaving and not self._said_goodbye and not self._placed:
            self._said_goodbye = True
            self._enqueue("goodbye", 0, Goodbye())

    def _understood(self, tensors: Sequence[Outgoing]) -> tuple[Outgoing, ...]:
        known = self.remote.compressions if self.remote is not None else ()
        return tuple(
            tensor.tensor if isinstance(tensor, Compressed) and tensor.compression.value not in known else tensor
            for tensor in tensors
        )

    def _enqueue(self, kind: str, call_id: int, message: Message) -> None:
        self._outbox.put((kind, call_id), encode_message(message))
