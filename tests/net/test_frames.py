"""Frames on a byte stream: however they are cut and interleaved, the same frames come out; garbage has one error, and
claims of a peer cost nothing: memory is taken for bytes that came, not for lengths that were announced."""

import random
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmoe_net.errors import LocalProtocolError, RemoteProtocolError
from dmoe_net.wire.codec import encode
from dmoe_net.wire.frame_reader import FrameReader, window_cost
from dmoe_net.wire.frames import (
    CHUNK_BYTES,
    MAX_BODY_BYTES,
    MAX_CHUNK_BYTES,
    MAX_HEADER_BYTES,
    NUM_STREAMS,
    EncodedFrame,
    OutgoingStream,
    encode_frame,
)
from dmoe_net.wire.tensors import ALIGNMENT
from tests.net.wire_parts import (
    CHUNK,
    KIB,
    MIB,
    OPEN,
    RESET,
    WHOLE,
    bytes_header,
    chunk,
    content,
    interleave,
    opening,
    part_bytes,
    parts_of,
    preamble,
    read,
    wire,
)

LARGE = CHUNK_BYTES + 1
"""The smallest body that travels in chunks."""


def bytes_frame(nbytes: int, *, key: str = "k") -> EncodedFrame:
    """A frame with one tensor of `nbytes` bytes, no two neighbours alike."""
    return encode_frame({key: nbytes}, [np.resize(np.arange(251, dtype=np.uint8), nbytes)])


SMALL_FRAMES = [
    encode_frame({"a": 1}),
    encode_frame({}),
    encode_frame({"i": 2}, [np.arange(5, dtype=np.int16)]),
    encode_frame({"b": "x" * 60_000}),
    encode_frame({"c": None}, [np.arange(30_000, dtype=np.float32), np.zeros((3, 0)), np.ones(3, np.bool_)]),
    bytes_frame(CHUNK_BYTES),
]
LARGE_FRAMES = [
    bytes_frame(LARGE),
    encode_frame({"d": 1}, [np.array(1.5), np.arange(70_000, dtype=np.float64), np.ones((7, 3), np.int8)]),
    bytes_frame(MAX_CHUNK_BYTES + 70),
]


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[Any]]:
    """A legal byte stream, and the contents of the frames that must come out of it, in order."""
    frames = draw(st.lists(st.sampled_from(SMALL_FRAMES + LARGE_FRAMES), max_size=7))
    data, completed = interleave(frames, random.Random(draw(st.integers(0, 2**32))))
    return data, [content(frame) for frame in completed]


@settings(max_examples=60)
@given(streams(), st.lists(st.integers(1, 300_000), min_size=1, max_size=8), st.binary(max_size=15))
def test_cuts_interleaving_and_what_follows_do_not_matter(
    stream: tuple[bytes, list[Any]], sizes: list[int], tail: bytes
) -> None:
    """Whole or cut anywhere, frames come out in the order of their completion; given-up ones never do."""
    data, expected = stream
    whole = FrameReader()
    assert [content(frame) for frame in read(data, reader=whole)] == expected
    assert whole.at_boundary
    cut = FrameReader()
    assert [content(frame) for frame in read(data + tail, sizes=[*sizes, 1000], reader=cut)] == expected
    assert cut.at_boundary == (not tail)


def test_byte_by_byte() -> None:
    frames = [LARGE_FRAMES[0], SMALL_FRAMES[2], SMALL_FRAMES[1]]
    first, second, *rest = parts_of(frames[0])
    parts = [first, second, *parts_of(frames[1]), *parts_of(frames[2]), *rest]
    ends = np.cumsum([len(part) for part in parts])[[2, 3, 4]]  # after which bytes one more frame is there
    reader = FrameReader()
    start = 0
    for end, encoded in zip(ends.tolist(), (frames[1], frames[2], frames[0]), strict=True):
        data = b"".join(parts)[start:end]
        assert read(data[:-1], sizes=(1,), reader=reader) == []
        assert not reader.at_boundary
        (got,) = read(data[-1:], reader=reader)
        assert content(got) == content(encoded.frame)
        start = end
    assert reader.at_boundary
    for byte in wire(SMALL_FRAMES[2])[:-1]:  # inside a frame there is no boundary
        assert read(bytes([byte]), reader=reader) == []
        assert not reader.at_boundary


@settings(max_examples=40)
@given(st.lists(st.integers(0, 200_000), max_size=6), st.booleans())
def test_what_a_sender_cuts_a_receiver_joins(sizes: list[int], reverse: bool) -> None:
    """Tensors of any sizes survive; parts bear no more than their share, and complete the frame with the last one."""
    tensors = [np.resize(np.arange(251, dtype=np.uint8), size) for size in sizes]
    encoded = encode_frame({"n": len(sizes)}, [tensor[::-1] for tensor in tensors] if reverse else tensors)
    parts = parts_of(encoded)
    assert all(len(part) <= 16 + CHUNK_BYTES + len(encoded.head) for part in parts)
    assert sum(map(len, parts)) == len(encoded.head) + encoded.body_nbytes + 16 * len(parts)
    (frame,) = read(b"".join(parts), sizes=(50_000,))
    assert content(frame) == content(encoded.frame)


@pytest.mark.parametrize("size", [1000, 70_000, MIB])
def test_received_tensors_are_aligned_read_only_and_alone(size: int) -> None:
    """However the body came in, JAX can take its tensors without a copy, and nobody writes to them, nor do we."""
    frames = read(2 * wire(SMALL_FRAMES[4]) + wire(LARGE_FRAMES[1], LARGE_FRAMES[1]), sizes=(size,))
    for frame in frames:
        for tensor in frame.tensors:
            assert tensor.ctypes.data % ALIGNMENT == 0 or not tensor.size
            assert not tensor.flags.writeable
    assert not np.shares_memory(frames[0].tensors[0], frames[1].tensors[0])
    assert not np.shares_memory(frames[2].tensors[1], frames[3].tensors[1])


def test_a_frame_given_up_is_forgotten() -> None:
    reader = FrameReader(window_bytes=2 * LARGE)
    for number in range(5):
        data = opening(LARGE) + (chunk(number, bytes(100)) if number % 2 else b"")
        assert read(data, reader=reader) == []
        assert not reader.at_boundary
        assert read(preamble(RESET, number, 0), reader=reader) == []
        assert reader.at_boundary
    assert len(read(opening(LARGE) + chunk(5, bytes(LARGE)), reader=reader)) == 1


def test_limits_can_be_reached() -> None:
    header = encode({"a": bytes(MAX_HEADER_BYTES - 6)})
    assert len(header) == MAX_HEADER_BYTES
    assert len(read(preamble(WHOLE, len(header), 0) + header)) == 1
    assert len(read(opening(CHUNK_BYTES, kind=WHOLE) + bytes(CHUNK_BYTES))) == 1
    assert len(read(opening(MAX_CHUNK_BYTES) + chunk(0, bytes(MAX_CHUNK_BYTES)))) == 1


def test_window() -> None:
    """Frames under way fit the window together; each counts for at most half of it, small frames for nothing."""
    window = 2 * MIB
    assert [window_cost(nbytes, window) for nbytes in (LARGE, MIB, 50 * MIB)] == [LARGE, MIB, MIB]
    two = opening(50 * MIB) + opening(MIB)
    reader = FrameReader(window_bytes=window)
    assert len(read(two + wire(SMALL_FRAMES[5]), reader=reader)) == 1
    with pytest.raises(RemoteProtocolError, match="under way together"):
        read(two + opening(LARGE)[:16], reader=FrameReader(window_bytes=window))
    assert len(read(chunk(1, bytes(MIB)) + opening(MIB) + chunk(2, bytes(MIB)), reader=reader)) == 2
    assert read(preamble(RESET, 0, 0) + 2 * opening(MIB), reader=reader) == []


def test_stream_numbers_wrap() -> None:
    """After 2**32 streams the numbers begin again; one that is still in use is not given away."""
    reader = FrameReader()
    assert read(opening(LARGE), reader=reader) == []
    reader._num_opened = NUM_STREAMS - 1
    assert len(read(opening(LARGE) + chunk(NUM_STREAMS - 1, bytes(LARGE)), reader=reader)) == 1
    with pytest.raises(RemoteProtocolError, match="still open"):
        read(opening(LARGE), reader=reader)


OPENED = opening(LARGE)
DONE = OPENED + chunk(0, bytes(LARGE))
VIOLATIONS: list[tuple[str, bytes, str]] = [
    ("magic", preamble(WHOLE, 1, 0, magic=b"HT"), "not a part"),
    ("older version", preamble(WHOLE, 1, 0, version=1), "not a part"),
    ("newer version", preamble(WHOLE, 1, 0, version=4), "not a part"),
    ("second part as a hello's", opening(0, kind=WHOLE) + preamble(WHOLE, 1, 0, version=2), "not a part"),
    ("kind 4", preamble(4, 1, 0), "unknown kind"),
    ("kind 255", preamble(255, 1, 0), "unknown kind"),
    ("header too large", preamble(WHOLE, MAX_HEADER_BYTES + 1, 0), "announces a header"),
    ("huge header", preamble(OPEN, 2**32 - 1, LARGE), "announces a header"),
    ("body too large", preamble(OPEN, 1, MAX_BODY_BYTES + 1), "and a body of"),
    ("huge body", preamble(OPEN, 1, 2**64 - 1), "and a body of"),
    ("whole part, large body", preamble(WHOLE, 1, LARGE), "comes in chunks if"),
    ("whole part, huge body", preamble(WHOLE, 1, MAX_BODY_BYTES), "comes in chunks if"),
    ("open part, small body", preamble(OPEN, 1, CHUNK_BYTES), "comes in chunks if"),
    ("open part, no body", preamble(OPEN, 1, 0), "comes in chunks if"),
    ("chunk before any stream", preamble(CHUNK, 0, 1), "not open"),
    ("chunk of the next stream", OPENED + preamble(CHUNK, 1, 1), "not open"),
    ("chunk of a finished stream", DONE + preamble(CHUNK, 0, 1), "not open"),
    ("chunk after a reset", OPENED + preamble(RESET, 0, 0) + preamble(CHUNK, 0, 1), "not open"),
    ("reset before any stream", preamble(RESET, 0, 0), "not open"),
    ("reset of a finished stream", DONE + preamble(RESET, 0, 0), "not open"),
    ("two resets", OPENED + 2 * preamble(RESET, 0, 0), "not open"),
    ("reset with a length", OPENED + preamble(RESET, 0, 1), "expected none"),
    ("empty chunk", OPENED + preamble(CHUNK, 0, 0), "a chunk of 0"),
    ("chunk above 1 MiB", opening(4 * MIB) + preamble(CHUNK, 0, MIB + 1), "a chunk of 1048577"),
    ("chunk beyond the body", OPENED + preamble(CHUNK, 0, LARGE + 1), "a chunk of"),
    ("second chunk beyond the body", OPENED + chunk(0, b"ab") + preamble(CHUNK, 0, LARGE - 1), "a chunk of"),
    ("many frames under way", 128 * OPENED, "under way together"),
]


@pytest.mark.parametrize(("data", "message"), [row[1:] for row in VIOLATIONS], ids=[row[0] for row in VIOLATIONS])
def test_preambles_are_judged_before_anything_else_arrives(data: bytes, message: str) -> None:
    """Each rule about parts can be broken by a preamble alone, and is enforced when its last byte is there."""
    last = 16 if data != 128 * OPENED else len(OPENED)
    reader = FrameReader()
    read(data[:-last], reader=reader)
    read(data[-last:][:15], sizes=(1,), reader=reader)
    with pytest.raises(RemoteProtocolError, match=message):
        read(data[-last:][15:], reader=reader)


DISAGREEING: dict[str, tuple[Callable[[int], bytes], str]] = {
    "empty": (lambda nbytes: b"", "malformed CBOR"),
    "list": (lambda nbytes: encode([]), "must be a map"),
    "null": (lambda nbytes: encode(None), "must be a map"),
    "trailing byte": (lambda nbytes: bytes_header(nbytes) + b"\x00", "not canonical"),
    "cut": (lambda nbytes: bytes_header(nbytes)[:-1], "malformed CBOR"),
    "indefinite length": (lambda nbytes: b"\xbf" + bytes_header(nbytes)[1:] + b"\xff", "malformed CBOR"),
    "the same key twice": (lambda nbytes: b"\xa2" + 2 * bytes_header(nbytes)[1:], "malformed CBOR"),
    "no table": (lambda nbytes: encode({}), "disagree"),
    "empty table": (lambda nbytes: encode({"tensors": []}), "absent when there are none"),
    "longer table": (lambda nbytes: bytes_header(nbytes + 1), "disagree"),
    "shorter table": (lambda nbytes: bytes_header(nbytes - 1), "disagree"),
    "no list": (lambda nbytes: encode({"tensors": 5}), "must be a list"),
    "negative dimension": (lambda nbytes: encode({"tensors": [["uint8", [-1]]]}), "a dimension must be"),
    "dtype": (lambda nbytes: encode({"tensors": [["object", [nbytes]]]}), "unknown dtype"),
    "huge shape without elements": (
        lambda nbytes: encode({"tensors": [["uint8", [nbytes]], ["int8", [2**40, 2**40, 0]]]}),
        "1099511627776",
    ),
}


@pytest.mark.parametrize("kind", [WHOLE, OPEN])
@pytest.mark.parametrize(("make_header", "message"), DISAGREEING.values(), ids=DISAGREEING)
def test_header_and_lengths_must_agree(kind: int, make_header: Callable[[int], bytes], message: str) -> None:
    """No canonical map, or a table that does not explain the body: refused before the body comes."""
    nbytes = 5 if kind == WHOLE else LARGE
    header = make_header(nbytes)
    with pytest.raises(RemoteProtocolError, match=message):
        read(preamble(kind, len(header), nbytes) + header)


def test_a_reader_keeps_its_own_bound() -> None:
    data = wire(bytes_frame(101))
    assert len(read(data)) == 1
    with pytest.raises(RemoteProtocolError, match="at most 65536 and 100 "):
        read(data[:16], reader=FrameReader(max_body_bytes=100))


def test_what_cannot_be_sent_is_refused_locally(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LocalProtocolError, match="at most 65536"):
        encode_frame({"a": bytes(MAX_HEADER_BYTES)})
    with pytest.raises(LocalProtocolError, match="reserved"):
        encode_frame({"tensors": []})
    monkeypatch.setattr("dmoe_net.wire.frames.MAX_BODY_BYTES", 100)
    with pytest.raises(LocalProtocolError, match="at most 100"):
        encode_frame({}, [np.zeros(101, np.int8)])


def test_parts_are_copied_from_nowhere() -> None:
    """A sender's parts alias its tensors: nothing of 16 MiB is copied to cut it up."""
    tensor = np.zeros(16 * MIB, np.uint8)
    stream = OutgoingStream(encode_frame({}, [tensor]), 7)
    stream.next_part()
    part = stream.next_part()
    assert np.shares_memory(np.frombuffer(part.pieces[1], np.uint8), tensor)
    assert part_bytes(part)[:16] == preamble(CHUNK, 7, CHUNK_BYTES)


@pytest.mark.parametrize(
    "data",
    [
        preamble(OPEN, 16, MAX_BODY_BYTES + 1),
        preamble(OPEN, 16, 2**64 - 1),
        preamble(WHOLE, 16, MAX_BODY_BYTES),
        preamble(WHOLE, 2**32 - 1, 0),
        preamble(OPEN, len(bytes_header(MAX_BODY_BYTES - 1)), MAX_BODY_BYTES) + bytes_header(MAX_BODY_BYTES - 1),
        preamble(WHOLE, len(bytes_header(2**39)), 1) + bytes_header(2**39),
    ],
    ids=["body", "huge body", "whole body", "header", "table below the body", "table above the body"],
)
def test_refused_lengths_allocate_nothing(data: bytes) -> None:
    """A length beyond a limit, or one that the table does not confirm, costs what its error message costs."""
    read(opening(0, kind=WHOLE) + opening(5, kind=WHOLE) + bytes(5))  # what imports and caches take is taken
    reader = FrameReader()
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            read(data, reader=reader)
        assert tracemalloc.get_traced_memory()[1] < 32 * KIB
    finally:
        tracemalloc.stop()


def test_a_header_that_does_not_come_takes_no_more_than_its_limit() -> None:
    """The scratch buffer grows to the largest header and stays there."""
    reader = FrameReader()
    header = encode({"a": bytes(MAX_HEADER_BYTES - 6)})
    data = preamble(WHOLE, len(header), 0) + header
    tracemalloc.start()
    try:
        read((2 * data)[:-1], sizes=(1000,), reader=reader)
        assert reader.buffer().nbytes < MAX_HEADER_BYTES
        assert tracemalloc.get_traced_memory()[0] < 2 * MAX_HEADER_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_announced_bodies_cost_no_real_memory() -> None:
    """Sixty-four bodies of 256 MiB, announced and not sent, touch less than a hundredth of their pages."""
    before = _resident_bytes()
    readers = [FrameReader() for _ in range(32)]
    for reader in readers:
        read(2 * opening(MAX_BODY_BYTES) + chunk(1, bytes(100)), reader=reader)
        assert not reader.at_boundary
    assert _resident_bytes() - before < 64 * MAX_BODY_BYTES // 100


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
