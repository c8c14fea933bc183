"""One connection's protocol: two session cores joined by a function, no I/O, and duties in the worst of orders."""

import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dmoe_net.errors import LocalProtocolError, PeerBusy, RemoteProtocolError
from dmoe_net.identity import PeerId
from dmoe_net.rpc.session import Action, RpcSession
from dmoe_net.wire.compression import Compressed, Compression
from dmoe_net.wire.frame_reader import FREE_BYTES, WINDOW_BYTES
from dmoe_net.wire.frames import Frame
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
from tests.net.wire_parts import KIB, MIB

ALICE, BOB, EVE = (PeerId(letter * 32) for letter in (b"a", b"b", b"e"))
EVERYTHING, WRITE_BYTES = 2**40, 512 * KIB


def hello_of(peer_id: PeerId, *, port: int | None = None, window_bytes: int = WINDOW_BYTES) -> Hello:
    known = ("float16", "bfloat16", "blockwise8")
    return Hello(peer_id=peer_id, instance=peer_id.raw[:8], port=port, window_bytes=window_bytes, compressions=known)


def session_of(
    peer_id: PeerId, *, port: int | None = None, window_bytes: int = WINDOW_BYTES, **bounds: int
) -> RpcSession:
    """A session, perhaps with other bounds than usual."""
    session = RpcSession(hello_of(peer_id, port=port, window_bytes=window_bytes))
    for name, bound in bounds.items():
        setattr(session, name, bound)
    return session


def frames(session: RpcSession, max_nbytes: int = EVERYTHING) -> list[Frame]:
    """The frames that the next parts of a session complete."""
    return [part.frame for part in session.take_parts(max_nbytes) if part.frame is not None]


def deliver(source: RpcSession, target: RpcSession) -> tuple[Action, ...]:
    """Move every queued frame of `source` to `target`; what that has to do then."""
    return receive(target, *frames(source))


def receive(session: RpcSession, *received: Frame | Message) -> tuple[Action, ...]:
    """Actions that a session has to take when these come in."""
    actions = []
    for each in received:
        frame = each if isinstance(each, Frame) else encode_message(each).frame
        if (action := session.receive_untrusted(frame)) is not None:
            actions.append(action)
    return tuple(actions)


def pair(*, window_bytes: int = WINDOW_BYTES, **bounds: int) -> tuple[RpcSession, RpcSession]:
    """Two sessions that know each other. `bounds` are Bob's."""
    alice, bob = session_of(ALICE, window_bytes=window_bytes), session_of(BOB, window_bytes=window_bytes, **bounds)
    assert deliver(alice, bob) == deliver(bob, alice) == ()
    return alice, bob


def place(session: RpcSession, method: str = "m", body: dict[str, Any] | None = None, **options: Any) -> int:
    return session.place_call(method, body or {}, (), timeout_s=1.0, **options)


def start(call_id: int, nbytes: int = 0) -> CallStart:
    tensors = (np.zeros(nbytes, np.uint8),) if nbytes else ()
    return CallStart(call_id=call_id, method="m", timeout_s=1.0, body={}, tensors=tensors)


def call_under_way(*, partials: bool = False, **bounds: int) -> tuple[RpcSession, RpcSession, int]:
    """Two sessions, and a call of Alice's that Bob serves."""
    alice, bob = pair(**bounds)
    call_id = place(alice, partials=partials)
    (placed,) = deliver(alice, bob)
    assert placed.partials == partials
    return alice, bob, call_id


def queued(session: RpcSession) -> list[Message]:
    """Messages that a session sends now."""
    return [parse_untrusted(frame) for frame in frames(session)]


def test_hello_comes_first() -> None:
    session = session_of(ALICE, port=7)
    place(session)
    hello, call = queued(session)
    assert hello == hello_of(ALICE, port=7)
    assert isinstance(call, CallStart)


def test_sessions_learn_who_the_other_is() -> None:
    """Peer id and port arrive with Hello; in client mode there is no port."""
    alice, bob = session_of(ALICE), session_of(BOB, port=4001)
    assert deliver(alice, bob) == deliver(bob, alice) == ()
    assert alice.remote == hello_of(BOB, port=4001)
    assert bob.remote == hello_of(ALICE)


def test_a_call_and_its_reply() -> None:
    alice, bob = pair()
    call_id = alice.place_call("sum", {"terms": [1, 2]}, (), timeout_s=2.5)
    (run,) = deliver(alice, bob)
    assert run == CallStart(call_id=call_id, method="sum", timeout_s=2.5, body={"terms": [1, 2]})
    assert [alice.is_idle, bob.is_idle] == [False, False]
    bob.reply(call_id, {"sum": 3}, ())
    (finish,) = deliver(bob, alice)
    assert finish == CallReply(call_id=call_id, body={"sum": 3})
    assert [alice.is_idle, bob.is_idle] == [True, True]


def test_errors_travel_with_kind_and_message() -> None:
    alice, bob, call_id = call_under_way()
    bob.fail(call_id, ErrorKind.REFUSED, "expected 3 rows, got 2")
    error = CallError(call_id=call_id, kind=ErrorKind.REFUSED, message="expected 3 rows, got 2")
    assert deliver(bob, alice) == (error,)


def test_the_directions_do_not_share_ids() -> None:
    """Both may use the same number at the same time; each answer finds its own call."""
    alice, bob = pair()
    assert place(alice, "from_alice") == place(bob, "from_bob") == 1
    (at_bob,), (at_alice,) = deliver(alice, bob), deliver(bob, alice)
    assert (at_bob.method, at_alice.method) == ("from_alice", "from_bob")
    bob.reply(1, {"by": "bob"}, ())
    assert deliver(bob, alice) == (CallReply(call_id=1, body={"by": "bob"}),)
    assert not bob.is_idle  # his own call is still open


def test_a_call_given_up_before_it_was_sent_leaves_no_trace() -> None:
    """Neither the call nor a cancellation is sent; later calls are not affected."""
    alice, bob = pair()
    alice.abandon_call(place(alice))
    assert alice.is_idle
    kept = place(alice)
    assert [action.call_id for action in deliver(alice, bob)] == [kept]


def test_a_call_given_up_after_it_was_sent_is_called_off() -> None:
    """The other side is told to cancel its handler; its late answer changes nothing there."""
    alice, bob, call_id = call_under_way()
    alice.abandon_call(call_id)
    alice.abandon_call(call_id)  # idempotent
    assert deliver(alice, bob) == (CallCancel(call_id=call_id),)
    bob.reply(call_id, {}, ())
    bob.fail(call_id, ErrorKind.FAILURE, "cancelled")
    assert queued(bob) == []
    assert bob.is_idle


@pytest.mark.parametrize("has_left", [False, True])
def test_an_answer_to_a_call_that_is_given_up_is_dropped(has_left: bool) -> None:
    """Neither side minds: one that has not left is taken back, and one on its way is no action at the caller."""
    alice, bob, call_id = call_under_way()
    bob.reply(call_id, {}, ())
    crossing = frames(bob) if has_left else []
    alice.abandon_call(call_id)
    assert receive(alice, *crossing) == ()
    assert deliver(alice, bob) == ()  # the finished handler needs no cancelling
    assert queued(bob) == []


def test_a_forgotten_call_is_not_answered() -> None:
    """After its deadline the server says nothing, and its place is free."""
    alice, bob, call_id = call_under_way(max_incoming=1)
    bob.forget(call_id)
    bob.reply(call_id, {}, ())
    assert queued(bob) == []
    place(alice)
    assert len(deliver(alice, bob)) == 1


def test_outgoing_calls_are_bounded() -> None:
    _, bob = pair(max_outgoing=2)
    first = place(bob)
    place(bob)
    with pytest.raises(PeerBusy, match="2 calls"):
        place(bob)
    frames(bob)
    receive(bob, CallReply(call_id=first, body={}))
    place(bob)


def test_incoming_calls_are_bounded_until_their_answers_have_left() -> None:
    """A call beyond the bound is answered busy; an answer that waits to be written still counts."""
    alice, bob = pair(max_incoming=2)
    first, second, third = place(alice), place(alice), place(alice)
    assert [type(action) for action in deliver(alice, bob)] == [CallStart, CallStart]
    (busy,) = deliver(bob, alice)
    assert (busy.call_id, busy.kind) == (third, ErrorKind.BUSY)
    bob.reply(first, {}, ())
    place(alice)
    assert deliver(alice, bob) == ()  # refused: the answer to `first` is still in the queue
    deliver(bob, alice)
    place(alice)
    assert len(deliver(alice, bob)) == 1
    bob.reply(second, {}, ())


def test_a_peer_that_floods_and_does_not_read_is_dropped() -> None:
    """The queue of busy errors is bounded; at the bound the peer has broken the rules."""
    _, bob = pair(max_incoming=1, max_queued=5)
    starts = [start(call_id) for call_id in range(1, 8)]
    receive(bob, *starts[:6])  # one that runs, five that are refused
    with pytest.raises(RemoteProtocolError, match="does not read"):
        receive(bob, starts[6])
    assert len(queued(bob)) == 5


def test_a_call_that_cannot_be_sent_changes_nothing() -> None:
    """A body outside CBOR is the caller's error; the next call has the id that it would have had."""
    alice, _ = pair()
    with pytest.raises(LocalProtocolError):
        place(alice, body={"x": object()})
    assert alice.is_idle
    assert place(alice) == 1


def test_an_answer_that_cannot_be_sent_leaves_the_call_to_be_answered() -> None:
    alice, bob, call_id = call_under_way()
    with pytest.raises(LocalProtocolError):
        bob.reply(call_id, {"x": {1, 2}}, ())
    bob.fail(call_id, ErrorKind.FAILURE, "sorry")
    assert len(deliver(bob, alice)) == 1


def test_frames_are_taken_in_order_and_in_batches() -> None:
    session = session_of(ALICE)
    frames(session)
    for size in (10, 10, 5000, 10):
        place(session, body={"x": bytes(size)})
    sizes = [[len(frame.header["body"]["x"]) for frame in frames(session, 250)] for _ in range(3)]
    assert sizes == [[10, 10, 5000], [10], []]


REPLY = CallReply(call_id=1, body={})
START = start(5)
HELLO = hello_of(ALICE)
UNSENT = CallReply(call_id=1, body={"to": "a call that is still in the queue"})


ILLEGAL: list[list[Message]] = [[START], [REPLY], [CallCancel(call_id=1)], [HELLO, HELLO], [HELLO, START, START]]
ILLEGAL += [[HELLO, Credit(nbytes=1)], [HELLO, Goodbye(), Goodbye()], [HELLO, Goodbye(), START], [HELLO, UNSENT]]
ILLEGAL += [[HELLO, CallReply(call_id=2, body={})], [HELLO, CallError(call_id=9, kind=ErrorKind.BUSY, message="")]]
ILLEGAL += [[HELLO, CallPartial(call_id=call_id, body={})] for call_id in (1, 2)]


@pytest.mark.parametrize(
    "messages", ILLEGAL, ids=lambda messages: "-".join(type(message).__name__ for message in messages)
)
def test_illegal_sequences(messages: list[Message]) -> None:
    """Each sequence is legal up to its last message, which is a RemoteProtocolError."""
    session = session_of(BOB)
    place(session)
    receive(session, *messages[:-1])
    with pytest.raises(RemoteProtocolError):
        receive(session, messages[-1])


@pytest.mark.parametrize("fails", [False, True])
def test_a_partial_arrives_ahead_of_the_answer(fails: bool) -> None:
    """Even if it is so large that the answer, a small frame, could overtake it; one at a time waits to leave."""
    alice, bob, call_id = call_under_way(partials=True)
    large = np.zeros(2**20, np.uint8)
    assert bob.reply_partly(call_id, {"number": 0}, (large,))
    assert not bob.reply_partly(call_id, {"number": 1}, ())
    if fails:
        bob.fail(call_id, ErrorKind.REFUSED, "the rest")
    else:
        bob.reply(call_id, {"number": 1}, ())
    got: list[Action] = []
    while bob.wants_to_write:
        got += deliver(bob, alice)
    partial, answer = got
    assert isinstance(partial, CallPartial)
    assert (partial.call_id, partial.body) == (call_id, {"number": 0})
    last = CallError(call_id=call_id, kind=ErrorKind.REFUSED, message="the rest")
    assert answer == (last if fails else CallReply(call_id=call_id, body={"number": 1}))
    assert [alice.is_idle, bob.is_idle] == [True, True]


def test_what_is_called_off_sends_no_more_partials() -> None:
    """Neither the one that waits, nor the answer that waits behind it, nor a later one; one on its way is dropped."""
    alice, bob, call_id = call_under_way(partials=True)
    assert bob.reply_partly(call_id, {"number": 0}, ())
    on_its_way = frames(bob)
    assert bob.reply_partly(call_id, {"number": 1}, (np.zeros(2**20, np.uint8),))
    alice.abandon_call(call_id)
    assert deliver(alice, bob) == (CallCancel(call_id=call_id),)
    assert not bob.reply_partly(call_id, {"number": 2}, ())
    bob.forget(call_id)
    assert receive(alice, *on_its_way) == ()
    assert queued(bob) == []
    assert bob.is_idle

    alice, bob, call_id = call_under_way(partials=True)
    assert bob.reply_partly(call_id, {"number": 0}, (np.zeros(2**20, np.uint8),))
    bob.reply(call_id, {}, ())
    alice.abandon_call(call_id)
    assert deliver(alice, bob) == ()
    assert queued(bob) == []
    assert bob.is_idle


def test_partials_count_as_answers_that_wait_to_be_read() -> None:
    """To a peer that does not read no more of them are queued, nor are its calls served."""
    alice, bob = pair(max_answer_bytes=1000)
    calls = [place(alice, partials=True) for _ in range(2)]
    deliver(alice, bob)
    assert bob.reply_partly(calls[0], {}, (np.zeros(1001, np.uint8),))
    assert not bob.reply_partly(calls[1], {}, ())
    bob.reply(calls[0], {}, (np.zeros(9, np.uint8),))
    place(alice)
    assert deliver(alice, bob) == ()
    busy, partial, error = [message for _ in range(3) for message in queued(bob)]
    assert isinstance(partial, CallPartial)
    assert (type(busy), type(error)) == (CallError, CallError)
    assert busy.kind == error.kind == ErrorKind.BUSY
    assert busy.message == error.message == "answers of 1001 bytes wait for you to read them"


def test_calls_arrive_in_any_order() -> None:
    """Large calls complete later; a cancellation of a call that is not being served changes nothing."""
    _, bob = pair()
    starts = [start(call_id) for call_id in (5, 4, 9)]
    assert receive(bob, *starts) == tuple(starts)
    assert receive(bob, CallCancel(call_id=7)) == ()


def test_a_ping_is_answered_and_pings_do_not_pile_up() -> None:
    """However many pings come before we write, one pong leaves."""
    alice, bob = pair()
    alice.ping()
    assert queued(alice) == [Ping()]
    assert receive(bob, *[Ping()] * 10) == ()
    assert queued(bob) == [Pong()]
    assert receive(alice, Pong()) == ()


def test_parting_waits_for_the_calls_under_way() -> None:
    """Goodbye leaves once our calls are answered; the session is over when both have said it and answered."""
    alice, bob = pair()
    mine, theirs = place(alice), place(bob)
    deliver(alice, bob)
    deliver(bob, alice)
    alice.leave()
    assert alice.is_leaving
    assert queued(alice) == []
    bob.reply(mine, {}, ())
    deliver(bob, alice)
    assert deliver(alice, bob) == ()  # Goodbye
    assert bob.is_leaving
    assert queued(bob) == []  # his own call is not answered yet
    assert [alice.is_over, bob.is_over] == [False, False]
    alice.reply(theirs, {}, ())
    deliver(alice, bob)
    assert alice.is_idle
    assert not alice.is_over
    deliver(bob, alice)
    assert [alice.is_over, bob.is_over] == [True, True]


def test_a_call_given_up_while_parting_lets_goodbye_go() -> None:
    alice, _, call_id = call_under_way()
    alice.leave()
    alice.abandon_call(call_id)
    assert queued(alice) == [CallCancel(call_id=call_id), Goodbye()]


def test_compression_that_the_peer_does_not_know_is_not_used() -> None:
    """The tensor leaves as it is: a choice of ours must not make a peer drop the connection."""
    array = np.linspace(-1, 1, 64, dtype=np.float32)
    alice = session_of(ALICE)
    receive(alice, replace(hello_of(BOB), compressions=("float16", "x")))
    tensors = [Compressed(array, Compression.FLOAT16), Compressed(array, Compression.BFLOAT16)]
    alice.place_call("m", {}, tensors, timeout_s=1.0)
    (_, call) = frames(alice)
    assert call.body_nbytes == 128 + 256


def bob_and_eve(**bounds: int) -> RpcSession:
    """Bob, connected to somebody who sends what she likes."""
    bob = session_of(BOB, window_bytes=MIB, **bounds)
    receive(bob, hello_of(EVE, window_bytes=MIB))
    queued(bob)
    return bob


def place_large(session: RpcSession, nbytes: int) -> int:
    return session.place_call("m", {}, (np.zeros(nbytes, np.uint8),), timeout_s=1.0)


def send_a_write(source: RpcSession, target: RpcSession) -> list[int]:
    """Move one write of `source` and answer the calls in it; their ids."""
    frames = [part.frame for part in source.take_parts(WRITE_BYTES) if part.frame is not None]
    call_ids = [action.call_id for action in receive(target, *frames) if isinstance(action, CallStart)]
    for call_id in call_ids:
        target.reply(call_id, {}, ())
    return call_ids


def test_credits_that_wait_together_all_count() -> None:
    """Behind more than a write of frames without tensors: the whole window is there again afterwards."""
    alice, bob = pair(window_bytes=MIB)
    for _ in range(8):
        for _ in range(40):
            place(alice, body={"x": bytes(60_000)})
        for _ in range(3):  # each of them is an eighth of the window, for which a credit is due at once
            place_large(bob, MIB // 8)
            send_a_write(bob, alice)
            send_a_write(alice, bob)
        while any([send_a_write(alice, bob), send_a_write(bob, alice), not alice.is_idle, not bob.is_idle]):
            pass
    call_id = place_large(bob, 600 * KIB)
    assert [send_a_write(bob, alice) for _ in range(3)] == [[], [call_id], []]


def test_a_call_that_is_called_off_keeps_its_place_until_its_handler_is_done() -> None:
    """Whoever calls and cancels in a loop runs no more handlers than whoever waits."""
    bob = bob_and_eve(max_incoming=1)
    cancel = CallCancel(call_id=1)
    assert receive(bob, start(1), cancel, cancel, start(2)) == (start(1), cancel)
    (busy,) = queued(bob)
    assert (busy.call_id, busy.kind) == (2, ErrorKind.BUSY)
    assert not bob.is_idle
    bob.forget(1)
    assert bob.is_idle
    assert receive(bob, start(3)) == (start(3),)


@pytest.mark.parametrize(
    ("ending", "arguments"), [("forget", ()), ("reply", ({}, ())), ("fail", (ErrorKind.FAILURE, "cancelled"))]
)
def test_the_id_of_a_call_that_is_called_off_is_in_use_until_its_handler_is_done(
    ending: str, arguments: tuple[Any, ...]
) -> None:
    """However the handler ends; a second call of that id before is an error."""
    bob = bob_and_eve()
    receive(bob, start(1), CallCancel(call_id=1))
    with pytest.raises(RemoteProtocolError, match="in use"):
        receive(bob, start(1))
    getattr(bob, ending)(1, *arguments)
    assert receive(bob, start(1)) == (start(1),)
    assert queued(bob) == []


def test_a_call_that_is_called_off_keeps_its_share_of_the_window_until_its_handler_is_done() -> None:
    """The handler still has the tensors: no credit before, and a peer that sends on is dropped; then a credit."""
    bob = bob_and_eve()
    receive(bob, start(1, MIB // 2), CallCancel(call_id=1), start(2, MIB // 2), CallCancel(call_id=2))
    assert queued(bob) == []
    with pytest.raises(RemoteProtocolError, match="window"):
        receive(bob, start(3, 5000))
    bob.forget(1)
    assert queued(bob) == [Credit(nbytes=MIB // 2)]
    receive(bob, start(3, 5000))


def test_own_calls_that_wait_do_not_make_the_peers_calls_busy() -> None:
    """Only answers that the peer does not read speak against it."""
    alice, bob = pair(window_bytes=MIB, max_answer_bytes=MIB)
    for _ in range(3):
        place_large(bob, 4 * MIB)
    bob.take_parts(1)
    call_id = place(alice)
    assert [(type(run), run.call_id) for run in deliver(alice, bob)] == [(CallStart, call_id)]


def test_answers_and_small_calls_leave_while_requests_hold_the_whole_window() -> None:
    """Those requests may wait for just these, in handlers that call back."""
    alice, bob = pair(window_bytes=MIB)
    for nbytes in (448 * KIB, 448 * KIB, 128 * KIB, FREE_BYTES, FREE_BYTES + 1):  # the third fills the window
        place_large(alice, nbytes)
    assert len(deliver(alice, bob)) == 4
    call_back = place(bob)
    deliver(bob, alice)
    alice.reply(call_back, {}, (np.zeros(3 * MIB, np.uint8),))
    (answer,) = deliver(alice, bob)
    assert isinstance(answer, CallReply)
    assert answer.tensors[0].nbytes == 3 * MIB


def test_answers_that_wait_to_be_read_are_bounded() -> None:
    """A peer that calls and does not read costs a bounded amount of memory: its calls are turned away, and answers of
    those that ran already become busy errors."""
    bob = bob_and_eve(max_answer_bytes=MIB)
    ran = []
    for call_id in range(1, 5):
        for call in receive(bob, start(call_id)):
            ran.append(call.call_id)
            bob.reply(call.call_id, {}, (np.zeros(800 * KIB, np.uint8),))
    assert ran == [1, 2]
    bob = bob_and_eve(max_answer_bytes=MIB)
    assert len(receive(bob, *map(start, range(1, 7)))) == 6
    for call_id in range(1, 6):
        bob.reply(call_id, {}, (np.zeros(800 * KIB, np.uint8),))
    bob.reply(6, {"small": True}, ())
    answers = queued(bob)
    errors = [(answer.call_id, answer.kind) for answer in answers if isinstance(answer, CallError)]
    assert errors == [(call_id, ErrorKind.BUSY) for call_id in (3, 4, 5)]
    assert sorted(answer.call_id for answer in answers if isinstance(answer, CallReply)) == [1, 2, 6]
    assert bob.is_idle


@pytest.mark.parametrize("cancelled", ["before it is ready", "before it leaves", "when a part of it has left"])
def test_an_answer_whose_caller_has_gone_is_not_kept(cancelled: str) -> None:
    """Its tensors are free at once, it does not count as waiting, and the next call finds all as before."""
    alice, bob = pair(window_bytes=MIB, max_answer_bytes=MIB)
    for _ in range(5):
        call_id = place(alice)
        deliver(alice, bob)
        answer = np.zeros(3 * MIB, np.uint8)
        is_kept = weakref.ref(answer)
        alice.abandon_call(call_id)
        if cancelled == "before it is ready":
            assert deliver(alice, bob) == (CallCancel(call_id=call_id),)
        bob.reply(call_id, {}, (answer,))
        if cancelled == "when a part of it has left":
            assert [part.frame for part in bob.take_parts(1)] == [None, None]
        deliver(alice, bob)
        del answer
        assert queued(bob) == []
        assert is_kept() is None
        assert bob.is_idle
    kept = place(alice)
    deliver(alice, bob)
    bob.reply(kept, {}, (np.zeros(3 * MIB, np.uint8),))
    assert [type(action) for action in deliver(bob, alice)] == [CallReply]
