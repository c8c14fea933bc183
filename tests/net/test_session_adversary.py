"""Duties of a session core to its peer and itself under the worst of orders: windows, places and answers."""

import weakref

import numpy as np
import pytest

from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import PeerId
from dmoe_net.rpc.session import RpcSession
from dmoe_net.wire.frame_reader import FREE_BYTES
from dmoe_net.wire.messages import CallCancel, CallError, CallReply, CallStart, Credit, ErrorKind
from tests.net.test_session import ALICE, BOB, deliver, hello_of, place, queued, receive, session_of
from tests.net.wire_parts import KIB, MIB

WRITE_BYTES = 512 * KIB
EVE = PeerId(b"e" * 32)


def pair(**bounds: int) -> tuple[RpcSession, RpcSession]:
    """Two sessions that know each other, with windows of 1 MiB. `bounds` are Bob's."""
    alice, bob = session_of(ALICE, window_bytes=MIB), session_of(BOB, window_bytes=MIB, **bounds)
    assert deliver(alice, bob) == deliver(bob, alice) == ()
    return alice, bob


def bob_and_eve(**bounds: int) -> RpcSession:
    """Bob, connected to somebody who sends what she likes."""
    bob = session_of(BOB, window_bytes=MIB, **bounds)
    receive(bob, hello_of(EVE, window_bytes=MIB))
    queued(bob)
    return bob


def start(call_id: int, nbytes: int = 0) -> CallStart:
    tensors = (np.zeros(nbytes, np.uint8),) if nbytes else ()
    return CallStart(call_id=call_id, method="m", timeout_s=1.0, body={}, tensors=tensors)


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
    alice, bob = pair()
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
    assert isinstance(busy, CallError)
    assert (busy.call_id, busy.kind) == (2, ErrorKind.BUSY)
    assert not bob.is_idle
    bob.forget(1)
    assert bob.is_idle
    assert receive(bob, start(3)) == (start(3),)


@pytest.mark.parametrize("ending", ["forget", "reply", "fail"])
def test_the_id_of_a_call_that_is_called_off_is_in_use_until_its_handler_is_done(ending: str) -> None:
    """However the handler ends; a second call of that id before is an error."""
    bob = bob_and_eve()
    receive(bob, start(1), CallCancel(call_id=1))
    with pytest.raises(RemoteProtocolError, match="in use"):
        receive(bob, start(1))
    match ending:
        case "forget":
            bob.forget(1)
        case "reply":
            bob.reply(1, {}, ())
        case _:
            bob.fail(1, ErrorKind.FAILURE, "cancelled")
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
    alice, bob = pair(max_answer_bytes=MIB)
    for _ in range(3):
        place_large(bob, 4 * MIB)
    bob.take_parts(1)
    call_id = place(alice)
    (run,) = deliver(alice, bob)
    assert isinstance(run, CallStart)
    assert run.call_id == call_id


def test_answers_and_small_calls_leave_while_requests_hold_the_whole_window() -> None:
    """Those requests may wait for just these, in handlers that call back."""
    alice, bob = pair()
    for nbytes in (448 * KIB, 448 * KIB, 128 * KIB, FREE_BYTES, FREE_BYTES + 1):  # the third fills the window
        place_large(alice, nbytes)
    assert len(deliver(alice, bob)) == 4
    call_back = place(bob)
    deliver(bob, alice)
    alice.reply(call_back, {}, (np.zeros(3 * MIB, np.uint8),))
    (answer,) = deliver(alice, bob)
    assert isinstance(answer, CallReply)
    assert answer.tensors[0].nbytes == 3 * MIB


def test_calls_are_turned_away_while_answers_wait() -> None:
    """A peer that calls and does not read costs a bounded amount of memory."""
    bob = bob_and_eve(max_answer_bytes=MIB)
    ran = []
    for call_id in range(1, 5):
        for call in receive(bob, start(call_id)):
            ran.append(call.call_id)
            bob.reply(call.call_id, {}, (np.zeros(800 * KIB, np.uint8),))
    assert ran == [1, 2]


def test_answers_beyond_the_bound_become_busy_errors() -> None:
    """Also those of calls that ran already when the first answers began to wait."""
    bob = bob_and_eve(max_answer_bytes=MIB)
    assert len(receive(bob, *map(start, range(1, 7)))) == 6
    for call_id in range(1, 6):
        bob.reply(call_id, {}, (np.zeros(800 * KIB, np.uint8),))
    bob.reply(6, {"small": True}, ())
    answers = queued(bob)
    errors = [answer for answer in answers if isinstance(answer, CallError)]
    assert [(error.call_id, error.kind) for error in errors] == [(id_, ErrorKind.BUSY) for id_ in (3, 4, 5)]
    assert sorted(answer.call_id for answer in answers if isinstance(answer, CallReply)) == [1, 2, 6]
    assert bob.is_idle


@pytest.mark.parametrize("cancelled", ["before it is ready", "before it leaves", "when a part of it has left"])
def test_an_answer_whose_caller_has_gone_is_not_kept(cancelled: str) -> None:
    """Its tensors are free at once, it does not count as waiting, and the next call finds all as before."""
    alice, bob = pair(max_answer_bytes=MIB)
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
    (run,) = deliver(alice, bob)
    assert isinstance(run, CallStart)
    bob.reply(kept, {}, (np.zeros(3 * MIB, np.uint8),))
    assert [type(action) for action in deliver(bob, alice)] == [CallReply]
