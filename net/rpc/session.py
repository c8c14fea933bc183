"""One connection's calls, both directions, without I/O.

Theory of operation. Either end may call the other; the two directions share nothing but the wire. The shell feeds
every frame to `receive_untrusted` and carries out `take_actions`; what is to be sent waits in a queue that the
shell's one writer empties with `take_frames`. Nothing ever waits for room in that queue, so a caller can be cancelled
at any moment without leaving half a message behind, and its size is bounded by what may put frames there:

- calls placed and not given up: at most `max_outgoing`; giving up an unsent call takes it out again;
- cancellations: one for each call that was sent and given up;
- answers: at most `max_incoming`, since an answered call counts as running until its answer has been taken;
- "busy" errors: one for each call that the peer places beyond that. An honest peer has at most `max_outgoing`
  calls under way; one that goes on without reading the errors runs into `max_queued` and is dropped.

Legal sequences. `Hello` comes first and once. Call ids grow. An answer to a call that was never placed is an error;
to one that was given up or is answered already it is dropped, for it crossed our cancellation on the way (or is a lie
that changes nothing). The same holds for cancellations of calls.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from net.errors import PeerBusy, RemoteProtocolError
from net.identity import PeerId
from net.rpc.base import Body
from net.wire.frames import EncodedFrame, Frame
from net.wire.messages import (
    CallCancel,
    CallError,
    CallReply,
    CallStart,
    ErrorKind,
    Hello,
    Message,
    encode_message,
    parse_untrusted,
)
from net.wire.tensors import Tensor

MAX_OUTGOING_CALLS = 1024
"""Calls of ours under way on one connection; one more is `PeerBusy`. Ten times what a trainer needs."""

MAX_INCOMING_CALLS = 256
"""Calls of the peer's under way on one connection: its share of this process, whatever the method."""

MAX_QUEUED_FRAMES = 4 * MAX_OUTGOING_CALLS
"""Above anything that an honest peer can cause: see the list at the head of this file."""


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


class RpcSession:
    """State of one connection: calls placed, calls being served, frames to send.

    Args:
      peer_id: who we are.
      port: where we listen; None in client mode.
      max_outgoing, max_incoming, max_queued: the bounds above; smaller in tests.
    """

    def __init__(
        self,
        *,
        peer_id: PeerId,
        port: int | None,
        max_outgoing: int = MAX_OUTGOING_CALLS,
        max_incoming: int = MAX_INCOMING_CALLS,
        max_queued: int = MAX_QUEUED_FRAMES,
    ) -> None:
        self._max_outgoing = max_outgoing
        self._max_incoming = max_incoming
        self._max_queued = max_queued
        self._remote: Hello | None = None
        self._last_placed = 0  # highest id that we used
        self._last_seen = 0  # highest id that the peer used
        self._placed: set[int] = set()  # calls of ours without an answer
        self._running: set[int] = set()  # calls of the peer's whose answer has not been taken
        self._queue: OrderedDict[tuple[str, int], EncodedFrame] = OrderedDict()
        self._actions: list[Action] = []
        self._enqueue("hello", 0, Hello(peer_id=peer_id, port=port))

    @property
    def remote(self) -> Hello | None:
        """What the peer said of itself; None until it has."""
        return self._remote

    @property
    def is_idle(self) -> bool:
        """No call is under way in either direction."""
        return not self._placed and not self._running

    def place_call(self, method: str, body: Body, tensors: Sequence[Tensor], *, timeout_s: float) -> int:
        """Queue a call; its id is what `FinishCall` will carry.

        Raises:
          PeerBusy: `max_outgoing` calls are under way.
          LocalProtocolError: the call cannot be sent. The session is as before.
        """
        if len(self._placed) >= self._max_outgoing:
            raise PeerBusy(f"{self._max_outgoing} calls to this peer are under way already")
        call_id = self._last_placed + 1
        start = CallStart(call_id=call_id, method=method, timeout_s=timeout_s, body=body, tensors=tuple(tensors))
        self._enqueue("call", call_id, start)
        self._last_placed = call_id
        self._placed.add(call_id)
        return call_id

    def abandon_call(self, call_id: int) -> None:
        """Nobody waits for this call any more: take it back, or tell the peer if it has been sent."""
        if call_id not in self._placed:
            return
        self._placed.remove(call_id)
        if self._queue.pop(("call", call_id), None) is None:
            self._enqueue("cancel", call_id, CallCancel(call_id=call_id))

    def reply(self, call_id: int, body: Body, tensors: Sequence[Tensor]) -> None:
        """Answer a call of the peer's; nothing happens if it was given up meanwhile.

        Raises:
          LocalProtocolError: the answer cannot be sent; the call is still to be answered.
        """
        if call_id in self._running:
            self._enqueue("answer", call_id, CallReply(call_id=call_id, body=body, tensors=tuple(tensors)))

    def fail(self, call_id: int, kind: ErrorKind, message: str) -> None:
        """Answer a call of the peer's with an error; nothing happens if it was given up meanwhile."""
        if call_id in self._running:
            self._enqueue("answer", call_id, CallError(call_id=call_id, kind=kind, message=message))

    def forget(self, call_id: int) -> None:
        """End a call of the peer's without an answer: its deadline passed, nobody waits."""
        self._running.discard(call_id)
        self._queue.pop(("answer", call_id), None)

    def take_frames(self, max_nbytes: int) -> tuple[EncodedFrame, ...]:
        """The next frames to write, in order: as many as fit into `max_nbytes`, but at least one if there are any.

        Once taken, they must be written: they cannot be called back.
        """
        frames: list[EncodedFrame] = []
        nbytes = 0
        while self._queue and (not frames or nbytes + next(iter(self._queue.values())).nbytes <= max_nbytes):
            (kind, call_id), frame = self._queue.popitem(last=False)
            if kind == "answer":
                self._running.discard(call_id)
            frames.append(frame)
            nbytes += frame.nbytes
        return tuple(frames)

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
            return
        match message:
            case Hello():
                raise RemoteProtocolError("a second Hello")
            case CallStart():
                self._receive_start(message)
            case CallCancel():
                self._receive_cancel(message.call_id)
            case CallReply() | CallError():
                self._receive_answer(message)

    def _receive_start(self, start: CallStart) -> None:
        if start.call_id <= self._last_seen:
            raise RemoteProtocolError(f"call id {start.call_id} after {self._last_seen}: ids must grow")
        self._last_seen = start.call_id
        if len(self._running) < self._max_incoming:
            self._running.add(start.call_id)
            self._actions.append(RunCall(start=start))
            return
        if len(self._queue) >= self._max_queued:
            raise RemoteProtocolError(f"{len(self._queue)} frames wait for a peer that calls and does not read")
        text = f"{self._max_incoming} of your calls are under way already"
        busy = CallError(call_id=start.call_id, kind=ErrorKind.BUSY, message=text)
        self._enqueue("busy", start.call_id, busy)

    def _receive_cancel(self, call_id: int) -> None:
        if call_id > self._last_seen:
            raise RemoteProtocolError(f"cancellation of call {call_id}, which was never placed")
        if call_id in self._running:
            is_answered = ("answer", call_id) in self._queue
            self.forget(call_id)
            if not is_answered:
                self._actions.append(CancelRun(call_id=call_id))

    def _receive_answer(self, answer: CallReply | CallError) -> None:
        if answer.call_id > self._last_placed:
            raise RemoteProtocolError(f"answer to call {answer.call_id}, which was never placed")
        if ("call", answer.call_id) in self._queue:
            raise RemoteProtocolError(f"answer to call {answer.call_id}, which has not been sent yet")
        if answer.call_id in self._placed:
            self._placed.remove(answer.call_id)
            self._actions.append(FinishCall(answer=answer))

    def _enqueue(self, kind: str, call_id: int, message: Message) -> None:
        self._queue[kind, call_id] = encode_message(message)
