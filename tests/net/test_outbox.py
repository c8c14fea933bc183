"""Order in which frames leave: small before large, large ones by turns, and never more than the window allows."""

import random

import numpy as np
import pytest

from dmoe_net.errors import RemoteProtocolError
from dmoe_net.rpc.outbox import MAX_STREAMS, Outbox
from dmoe_net.rpc.session import RpcSession
from dmoe_net.wire.frame_reader import FrameReader, window_cost
from dmoe_net.wire.frames import CHUNK_BYTES, EncodedFrame, Frame, Part, encode_frame
from dmoe_net.wire.messages import CallCancel, CallError, CallReply, CallStart
from tests.net.test_session import ALICE, BOB, session_of
from tests.net.wire_parts import KIB, MIB, part_bytes, read

WRITE_BYTES = 512 * KIB
WINDOW = 4 * MIB


def frame(nbytes: int, name: int = 0) -> EncodedFrame:
    """A frame with a body of `nbytes` bytes."""
    return encode_frame({"name": name}, [np.full(nbytes, name % 251, np.uint8)] if nbytes else [])


def outbox(window_bytes: int = 64 * MIB) -> Outbox:
    box = Outbox()
    box.open_window(window_bytes)
    return box


def completed(parts: list[Part]) -> list[int]:
    """The names of the frames that these parts complete."""
    return [part.frame.header["name"] for part in parts if part.frame is not None]


def writes_of(box: Outbox) -> list[list[int]]:
    """Names of the frames that each write completes, until nothing can leave."""
    writes = []
    while parts := box.take(WRITE_BYTES)[0]:
        writes.append(completed(parts))
    return writes


def drain(box: Outbox) -> list[int]:
    """Names of all frames that can leave, in their order."""
    return [name for names in writes_of(box) for name in names]


def test_a_small_frame_waits_for_one_chunk_at_most() -> None:
    """Placed while 16 MiB are being sent, it is the first part of the next write."""
    box = outbox()
    box.put(("call", 1), frame(16 * MIB, 1))
    for _ in range(5):
        assert completed(box.take(WRITE_BYTES)[0]) == []
    box.put(("call", 2), frame(0, 2))
    box.put(("call", 3), frame(1000, 3))
    parts, done = box.take(WRITE_BYTES)
    assert completed(parts[:2]) == [2, 3]
    assert done == [("call", 2), ("call", 3)]
    assert sum(part.nbytes for part in parts) <= WRITE_BYTES + CHUNK_BYTES


def test_a_flood_of_small_frames_does_not_stop_a_large_one() -> None:
    """Every write carries a chunk of it, however much waits before."""
    box = outbox()
    box.put(("call", 0), frame(2 * MIB, 0))
    for write in range(4):
        for index in range(150):
            box.put(("call", 1 + 150 * write + index), frame(4 * KIB, 1))
        assert any(part.nbytes > CHUNK_BYTES for part in box.take(WRITE_BYTES)[0])


def test_large_frames_take_turns() -> None:
    """Equal ones that start together end together; one more than may take part waits for a place."""
    box = outbox()
    for name in range(MAX_STREAMS + 1):
        box.put(("call", name), frame(1 * MIB, name))
    ends = [(write, name) for write, names in enumerate(writes_of(box)) for name in names]
    writes = [write for write, _ in ends]
    assert [name for _, name in ends] == list(range(MAX_STREAMS + 1))
    assert writes[MAX_STREAMS - 1] - writes[0] <= MAX_STREAMS
    assert writes[MAX_STREAMS] > writes[MAX_STREAMS - 1]


def test_nothing_with_a_body_leaves_before_the_window_is_known() -> None:
    box = Outbox()
    box.put(("call", 1), frame(10, 1))
    box.put(("call", 2), frame(1 * MIB, 2))
    box.put(("call", 3), frame(0, 3))
    assert writes_of(box) == [[3]]
    box.open_window(WINDOW)
    assert drain(box) == [1, 2]


def test_the_window_is_kept_and_a_part_of_it_is_for_small_frames() -> None:
    """Large frames leave an eighth free; what the receiver gives back lets the next one start."""
    box = outbox(WINDOW)
    for name in range(4):
        box.put(("call", name), frame(1 * MIB, name))
    assert drain(box) == [0, 1, 2]  # a fourth would leave nothing
    box.put(("call", 9), frame(200 * KIB, 9))
    assert writes_of(box) == [[9]]
    box.grant_untrusted(1 * MIB)
    assert drain(box) == [3]


def test_a_frame_larger_than_the_window_still_passes() -> None:
    box = outbox(MIB)
    box.put(("call", 1), frame(16 * MIB, 1))
    assert drain(box) == [1]
    box.grant_untrusted(window_cost(16 * MIB, MIB))
    with pytest.raises(RemoteProtocolError, match="more than was sent"):
        box.grant_untrusted(1)


@pytest.mark.parametrize("num_writes", [0, 1, 3])
def test_a_frame_that_is_taken_back_is_never_seen(num_writes: int) -> None:
    """A frame taken back, whole or after parts have left, frees its room in the window; the next one arrives whole."""
    box = outbox(WINDOW)
    reader, data = FrameReader(window_bytes=WINDOW), b""
    box.put(("call", 1), frame(2 * MIB, 1))
    for _ in range(num_writes):
        data += b"".join(part_bytes(part) for part in box.take(WRITE_BYTES)[0])
    assert box.discard(("call", 1))
    assert not box.discard(("call", 1))
    assert box.answer_bytes == 0
    box.put(("call", 2), frame(2 * MIB, 2))
    while parts := box.take(WRITE_BYTES)[0]:
        data += b"".join(part_bytes(part) for part in parts)
    (arrived,) = read(data, reader=reader)
    assert arrived.header["name"] == 2
    assert (arrived.tensors[0] == 2).all()
    assert reader.at_boundary
    assert len(box) == 0


def test_a_frame_that_has_left_cannot_be_taken_back() -> None:
    box = outbox()
    box.put(("call", 1), frame(10, 1))
    drain(box)
    assert not box.discard(("call", 1))


class Traffic:
    """Two sessions, joined by bytes, that call, answer and give up at random."""

    SIZES = (0, 0, 100, 50 * KIB, 512 * KIB, 513 * KIB, 1100 * KIB, 3 * MIB)

    def __init__(self, window_bytes: int) -> None:
        self.rng = random.Random(window_bytes)
        self.arrays = {size: np.zeros(size, np.uint8) for size in self.SIZES}
        self.sessions = [session_of(each, window_bytes=window_bytes, max_incoming=8) for each in (ALICE, BOB)]
        self.readers = [FrameReader(window_bytes=window_bytes) for _ in self.sessions]
        self.waiting: tuple[set[int], set[int]] = (set(), set())
        self.serving: tuple[list[int], list[int]] = ([], [])
        self.num_answered = 0

    def step(self, side: int) -> None:
        """Any one thing that `side` may do."""
        what = self.rng.choice(["place", "abandon", "answer", "move", "move", "move"])
        if what == "place" and len(self.waiting[side]) < 20:
            # Some with a large header: credits must find their way past a queue of those.
            body, tensors = {"x": bytes(self.rng.choice([0, 60_000]))}, (self._array(),)
            self.waiting[side].add(self.sessions[side].place_call("m", body, tensors, timeout_s=1.0))
        elif what == "abandon" and self.waiting[side] and self.rng.random() < 0.3:
            call_id = self.rng.choice(sorted(self.waiting[side]))
            self.waiting[side].remove(call_id)
            self.sessions[side].abandon_call(call_id)
        elif what == "answer" and self.serving[side]:
            self.answer(side)
        elif what == "move":
            self.move(side)

    def answer(self, side: int) -> None:
        """Any of the calls that `side` serves."""
        call_id = self.serving[side].pop(self.rng.randrange(len(self.serving[side])))
        self.sessions[side].reply(call_id, {}, (self._array(),))

    def move(self, source: int) -> bool:
        """Carry to the other side what `source` has to write; whether there was anything."""
        parts = self.sessions[source].take_parts(self.rng.choice([1, 300, WRITE_BYTES]))
        for part in parts:
            for piece in part.pieces:
                for each in read(piece, reader=self.readers[source]):
                    self._receive(each, 1 - source)
        return bool(parts)

    def finish(self) -> None:
        """Until nobody has anything to say."""
        while any([self.move(0), self.move(1), *map(self._answer_all, (0, 1))]):
            pass

    def _answer_all(self, side: int) -> bool:
        had_calls = bool(self.serving[side])
        while self.serving[side]:
            self.answer(side)
        return had_calls

    def _receive(self, frame: Frame, side: int) -> None:
        match self.sessions[side].receive_untrusted(frame):
            case CallStart(call_id=call_id):
                self.serving[side].append(call_id)
            case CallCancel(call_id=call_id):
                self.serving[side].remove(call_id)
                self.sessions[side].forget(call_id)  # its handler is done
            case CallReply(call_id=call_id) | CallError(call_id=call_id):
                self.waiting[side].remove(call_id)  # KeyError if it is answered twice or was given up
                self.num_answered += 1

    def _array(self) -> np.ndarray:
        return self.arrays[self.rng.choice(self.SIZES)]


@pytest.mark.parametrize("window_bytes", [64 * KIB, MIB, 5 * MIB])
def test_traffic_of_all_sizes_gets_through_and_keeps_the_window(window_bytes: int) -> None:
    """The reader and the session, which enforce the window, never complain; nothing deadlocks; every call that was
    kept is answered."""
    traffic = Traffic(window_bytes)
    for _ in range(400):
        traffic.step(traffic.rng.randrange(2))
    traffic.finish()
    assert traffic.waiting == (set(), set())
    assert all(session.is_idle for session in traffic.sessions)
    assert all(reader.at_boundary for reader in traffic.readers)
    assert traffic.num_answered > 30
    for side in (0, 1):  # nothing of the window is lost
        held, owed = traffic.sessions[side]._held_bytes, traffic.sessions[side]._owed_bytes
        assert traffic.sessions[1 - side]._outbox._free_bytes == window_bytes - held
        assert held == owed


def test_credit_is_not_sent_for_every_small_tensor() -> None:
    """Up to an eighth of the window is given back together."""
    alice, bob = (session_of(each, window_bytes=MIB) for each in (ALICE, BOB))

    def pass_on(source: RpcSession, target: RpcSession) -> list[str]:
        kinds = []
        for part in source.take_parts(WRITE_BYTES):
            if part.frame is not None:
                target.receive_untrusted(part.frame)
                kinds.append(part.frame.header["type"])
        return kinds

    pass_on(alice, bob)
    pass_on(bob, alice)
    kinds: list[str] = []
    for _ in range(27):
        call_id = alice.place_call("m", {}, (np.zeros(10 * KIB, np.uint8),), timeout_s=1.0)
        pass_on(alice, bob)
        bob.reply(call_id, {}, ())
        kinds += pass_on(bob, alice)
    assert kinds.count("credit") == 2
