"""Frames on a byte stream: however they are cut, the same frames come out; garbage has one error."""

import random
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from net.errors import LocalProtocolError, RemoteProtocolError
from net.identity import PeerId
from net.wire.codec import encode
from net.wire.frames import MAX_BODY_BYTES, MAX_HEADER_BYTES, EncodedFrame, Frame, FrameReader, encode_frame
from net.wire.messages import (
    MAX_ERROR_CHARACTERS,
    MAX_TIMEOUT_S,
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
from net.wire.tensors import ALIGNMENT

PREAMBLE = struct.Struct("!3sBIQ")


def wire(frame: EncodedFrame) -> bytes:
    """What a link writes."""
    data = b"".join((frame.head, *frame.body))
    assert len(data) == frame.nbytes
    return data


def read(data: bytes, *, sizes: tuple[int, ...] = (2**20,), reader: FrameReader | None = None) -> list[Frame]:
    """All frames in `data`, received in pieces of at most `sizes` bytes, in turn."""
    reader = reader or FrameReader()
    frames: list[Frame] = []
    turn = 0
    while data:
        buffer = reader.buffer()
        assert buffer.nbytes > 0  # receiving into nothing would look like the end of the stream
        nbytes = min(sizes[turn % len(sizes)], buffer.nbytes, len(data))
        buffer[:nbytes] = data[:nbytes]
        reader.received(nbytes)
        data, turn = data[nbytes:], turn + 1
        while (frame := reader.next_frame_untrusted()) is not None:
            frames.append(frame)
    return frames


def content(frame: Frame) -> tuple[Any, ...]:
    """A frame in a form that can be compared."""
    return (dict(frame.header), [(t.dtype.name, t.shape, t.tobytes()) for t in frame.tensors])


FRAMES = [
    encode_frame({"a": 1}),
    encode_frame({}, [np.arange(5, dtype=np.int16)]),
    encode_frame({"b": "x" * 60_000}),
    encode_frame({"c": None}, [np.arange(30_000, dtype=np.float32), np.zeros((3, 0)), np.ones(3, np.bool_)]),
    encode_frame({}),
]
STREAM = b"".join(map(wire, FRAMES))
EXPECTED = [content(encoded.frame) for encoded in FRAMES]


def test_golden_bytes() -> None:
    """One small frame, written by hand from the description at the head of `net.wire.frames`."""
    frame = encode_frame({"a": 1}, [np.array([1, -2], np.int16)])
    header = "a261610167" + b"tensors".hex() + "818265" + b"int16".hex() + "8102"
    assert wire(frame).hex() == b"DMX".hex() + "01000000160000000000000004" + header + "0100feff"


def test_golden_bytes_of_a_message() -> None:
    """A cancellation of call 7, written by hand: no tensors, no table."""
    frame = encode_message(CallCancel(call_id=7))
    header = "a262" + b"id".hex() + "0764" + b"type".hex() + "66" + b"cancel".hex()
    assert wire(frame).hex() == b"DMX".hex() + "01000000110000000000000000" + header


@pytest.mark.parametrize("size", [2**20, 100_000, 4096, 1000, 17])
def test_the_cuts_of_the_stream_do_not_matter(size: int) -> None:
    """Whole or in pieces, the same frames come out, and the reader ends at a boundary."""
    reader = FrameReader()
    assert [content(frame) for frame in read(STREAM, sizes=(size,), reader=reader)] == EXPECTED
    assert reader.at_boundary


def test_byte_by_byte() -> None:
    """One byte at a time, a frame appears with its last byte and not before."""
    encoded = encode_frame({"k": "v"}, [np.arange(3, dtype=np.float64), np.ones(2, np.int8)])
    reader = FrameReader()
    data = wire(encoded)
    assert read(data[:-1], sizes=(1,), reader=reader) == []
    assert not reader.at_boundary
    (frame,) = read(data[-1:], reader=reader)
    assert content(frame) == content(encoded.frame)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 70_000), min_size=1, max_size=8))
def test_any_cuts(sizes: list[int]) -> None:
    """Any sequence of sizes gives the same frames."""
    sizes = [*sizes, 1000]
    assert [content(frame) for frame in read(STREAM, sizes=tuple(sizes))] == EXPECTED


@pytest.mark.parametrize("size", [1, 1000, 2**20])
def test_received_tensors_are_aligned_and_read_only(size: int) -> None:
    """However the body came in, JAX can take its tensors without a copy, and nobody can write to them."""
    (frame,) = read(wire(encode_frame({}, [np.ones(3, np.int8), np.arange(300.0)])), sizes=(size,))
    for tensor in frame.tensors:
        assert tensor.ctypes.data % ALIGNMENT == 0
        assert not tensor.flags.writeable


def test_frames_do_not_share_memory() -> None:
    """The buffer of one frame is not used for the next: JAX may still be reading it."""
    first, second = read(2 * wire(encode_frame({}, [np.arange(10.0)])))
    assert not np.shares_memory(first.tensors[0], second.tensors[0])


@pytest.mark.parametrize(
    "preamble",
    [
        PREAMBLE.pack(b"HTT", 1, 1, 0),
        PREAMBLE.pack(b"DMX", 2, 1, 0),
        PREAMBLE.pack(b"DMX", 1, MAX_HEADER_BYTES + 1, 0),
        PREAMBLE.pack(b"DMX", 1, 2**32 - 1, 0),
        PREAMBLE.pack(b"DMX", 1, 1, MAX_BODY_BYTES + 1),
        PREAMBLE.pack(b"DMX", 1, 1, 2**64 - 1),
    ],
    ids=["magic", "version", "header", "huge header", "body", "huge body"],
)
def test_preambles_are_judged_before_anything_else_arrives(preamble: bytes) -> None:
    """Sixteen bytes are enough to refuse a stranger, another version, and lengths out of bounds."""
    with pytest.raises(RemoteProtocolError):
        read(preamble)


@pytest.mark.parametrize(
    ("header", "body_nbytes"),
    [
        (b"", 0),
        (encode([]), 0),
        (encode(None), 0),
        (encode({}) + b"\x00", 0),
        (encode({}), 1),
        (encode({}), MAX_BODY_BYTES),
        (encode({"tensors": [["int8", [5]]]}), 4),
        (encode({"tensors": [["int8", [5]]]}), 0),
        (encode({"tensors": 5}), 5),
        (encode({"tensors": [["int8", [MAX_BODY_BYTES]]]}), 64),
    ],
)
def test_header_and_lengths_must_agree(header: bytes, body_nbytes: int) -> None:
    """No map, or a table that does not explain the body: refused before its body comes."""
    with pytest.raises(RemoteProtocolError):
        read(PREAMBLE.pack(b"DMX", 1, len(header), body_nbytes) + header)


def test_a_reader_keeps_its_own_bound() -> None:
    """`max_body_bytes` of a reader is enforced on the announced length."""
    data = wire(encode_frame({}, [np.zeros(101, np.int8)]))
    assert len(read(data)) == 1
    with pytest.raises(RemoteProtocolError):
        read(data[:16], reader=FrameReader(max_body_bytes=100))


def test_what_cannot_be_sent_is_refused_locally() -> None:
    """Too large a header or body and the reserved key are LocalProtocolErrors."""
    with pytest.raises(LocalProtocolError):
        encode_frame({"a": bytes(MAX_HEADER_BYTES)})
    with pytest.raises(LocalProtocolError, match="at most 100"):
        encode_frame({}, [np.zeros(101, np.int8)], max_body_bytes=100)
    with pytest.raises(LocalProtocolError, match="reserved"):
        encode_frame({"tensors": []})


MESSAGES: list[Message] = [
    Hello(peer_id=PeerId(bytes(range(32))), port=4001),
    Hello(peer_id=PeerId(bytes(32)), port=None),
    CallStart(call_id=1, method="dht.find", timeout_s=2.5, body={"key": b"k"}, tensors=(np.arange(3.0),)),
    CallReply(call_id=2**63 - 1, body={"ok": [1, None]}, tensors=()),
    CallError(call_id=3, kind=ErrorKind.BUSY, message="full"),
    CallCancel(call_id=4),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_round_trip(message: Message) -> None:
    """Every message comes back as it was."""
    (frame,) = read(wire(encode_message(message)))
    got = parse_untrusted(frame)
    assert type(got) is type(message)
    for name in message.__dataclass_fields__:
        expected = getattr(message, name)
        if name == "tensors":
            assert [t.tolist() for t in getattr(got, name)] == [t.tolist() for t in expected]
        else:
            assert getattr(got, name) == expected


def test_error_messages_are_cut_to_fit() -> None:
    """However long and odd an exception's text is, the error can be sent."""
    error = CallError(call_id=1, kind=ErrorKind.REFUSED, message="\ud800" + "x" * 10**6)
    (frame,) = read(wire(encode_message(error)))
    got = parse_untrusted(frame)
    assert isinstance(got, CallError)
    assert got.message == "?" + "x" * (MAX_ERROR_CHARACTERS - 1)


CALL = {"type": "call", "id": 1, "method": "m", "timeout_s": 1.0, "body": {}}


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"type": 1},
        {"type": None},
        {"type": ["call"]},
        {"type": "shutdown"},
        {"type": "cancel"},
        {"type": "cancel", "id": 1, "extra": 1},
        {"type": "cancel", "id": 0},
        {"type": "cancel", "id": -1},
        {"type": "cancel", "id": True},
        {"type": "cancel", "id": 2**63},
        {"type": "cancel", "id": "1"},
        {"type": "hello", "peer_id": b"short", "port": None},
        {"type": "hello", "peer_id": "0" * 32, "port": None},
        {"type": "hello", "peer_id": bytes(32), "port": 0},
        {"type": "hello", "peer_id": bytes(32), "port": 65536},
        {"type": "hello", "peer_id": bytes(32), "port": True},
        CALL | {"method": ""},
        CALL | {"method": "m" * 200},
        CALL | {"method": b"m"},
        CALL | {"timeout_s": 1},
        CALL | {"timeout_s": 0.0},
        CALL | {"timeout_s": -1.0},
        CALL | {"timeout_s": float("inf")},
        CALL | {"timeout_s": MAX_TIMEOUT_S * 2},
        CALL | {"body": []},
        CALL | {"body": None},
        {"type": "reply", "id": 1, "body": 5},
        {"type": "error", "id": 1, "kind": "strange", "message": ""},
        {"type": "error", "id": 1, "kind": ["busy"], "message": ""},
        {"type": "error", "id": 1, "kind": "busy", "message": None},
        {"type": "error", "id": 1, "kind": "busy", "message": "x" * (MAX_ERROR_CHARACTERS + 1)},
    ],
    ids=repr,
)
def test_malformed_messages_are_refused(header: dict[str, Any]) -> None:
    """Unknown types, missing and additional fields, and values of the wrong type or range."""
    with pytest.raises(RemoteProtocolError):
        parse_untrusted(Frame(header=header))


def test_tensors_only_where_they_belong() -> None:
    """A cancellation that carries a tensor is refused."""
    with pytest.raises(RemoteProtocolError, match="no tensors"):
        parse_untrusted(Frame(header={"type": "cancel", "id": 1}, tensors=(np.zeros(1),)))


def test_damaged_streams_have_one_error() -> None:
    """4000 streams with flipped, inserted and missing bytes: frames, silence, or RemoteProtocolError."""
    rng = random.Random(1)
    seeds = [wire(encode_message(message)) for message in MESSAGES]
    num_refused = 0
    for _ in range(4000):
        data = bytearray(rng.choice(seeds) + rng.choice(seeds))
        for _ in range(rng.randint(1, 3)):
            where = rng.randrange(len(data))
            match rng.randrange(3):
                case 0:
                    data[where] = rng.randrange(256)
                case 1:
                    del data[where]
                case 2:
                    data.insert(where, rng.randrange(256))
        try:
            for frame in read(bytes(data)):
                parse_untrusted(frame)
        except RemoteProtocolError:
            num_refused += 1
    assert 1000 < num_refused < 4000  # both outcomes occurred, or this test says nothing
