"""Parts of frames made by hand or by the library, and a reader of byte streams, for the tests of the wire format."""

import random
import struct
from collections.abc import Sequence
from typing import Any

from dmoe_net.wire.codec import encode
from dmoe_net.wire.frame_reader import FrameReader
from dmoe_net.wire.frames import EncodedFrame, Frame, OutgoingStream, Part, whole_part

PREAMBLE = struct.Struct("!2sBBIQ")
WHOLE, OPEN, CHUNK, RESET = range(4)
KIB, MIB = 2**10, 2**20
WHOLE_BYTES = 512 * KIB
"""The largest body of a WHOLE part."""


def preamble(kind: int, number: int, nbytes: int, *, magic: bytes = b"DX", version: int = 3) -> bytes:
    """The sixteen bytes at the head of every part."""
    return PREAMBLE.pack(magic, version, kind, number, nbytes)


def bytes_header(body_nbytes: int) -> bytes:
    """The header of a frame with one tensor of `body_nbytes` bytes."""
    return encode({"tensors": [["uint8", [body_nbytes]]]} if body_nbytes else {})


def opening(body_nbytes: int, *, kind: int = OPEN) -> bytes:
    """A part that begins a frame of `body_nbytes` bytes, without its body."""
    header = bytes_header(body_nbytes)
    return preamble(kind, len(header), body_nbytes) + header


def chunk(stream: int, data: bytes) -> bytes:
    """The next bytes of a stream."""
    return preamble(CHUNK, stream, len(data)) + data


def part_bytes(part: Part) -> bytes:
    """Bytes that a link writes for a part."""
    data = b"".join(part.pieces)
    assert len(data) == part.nbytes
    return data


def parts_of(encoded: EncodedFrame, number: int = 0) -> list[bytes]:
    """All parts of a frame as the library cuts them; a large one is stream `number` of its link."""
    if not encoded.is_large:
        return [part_bytes(whole_part(encoded))]
    stream = OutgoingStream(encoded, number)
    parts = []
    while not stream.is_done:
        parts.append(part_bytes(stream.next_part()))
    return parts


def wire(*frames: EncodedFrame) -> bytes:
    """The bytes of whole frames, one after the other."""
    data = b""
    num_opened = 0
    for encoded in frames:
        data += b"".join(parts_of(encoded, num_opened))
        num_opened += encoded.is_large
    return data


def interleave(frames: Sequence[EncodedFrame], rng: random.Random) -> tuple[bytes, list[Frame]]:
    """A legal stream drawn at random: in any order, in chunks of any size, with some large frames given up.

    Returns:
      the bytes, and the frames that must come out, in order.
    """
    data: list[bytes] = []
    completed: list[Frame] = []
    waiting = list(frames)
    under_way: list[tuple[int, EncodedFrame, bytes]] = []  # stream number, frame, what is left of its body
    num_opened = 0
    while waiting or under_way:
        if waiting and rng.random() < 0.5:
            encoded = waiting.pop(rng.randrange(len(waiting)))
            body = b"".join(encoded.body)
            kind = OPEN if encoded.is_large else WHOLE
            head = preamble(kind, len(encoded.head), len(body)) + encoded.head
            if kind == OPEN:
                data.append(head)
                under_way.append((num_opened, encoded, body))
                num_opened += 1
            else:
                data.append(head + body)
                completed.append(encoded.frame)
        elif under_way:
            number, encoded, body = under_way.pop(rng.randrange(len(under_way)))
            if rng.random() < 0.05:
                data.append(preamble(RESET, number, 0))
                continue
            nbytes = min(len(body), rng.choice((1, rng.randint(1, 5000), 100_000, WHOLE_BYTES, MIB)))
            data.append(chunk(number, body[:nbytes]))
            if nbytes < len(body):
                under_way.append((number, encoded, body[nbytes:]))
            else:
                completed.append(encoded.frame)
    return b"".join(data), completed


def read(data: bytes, *, sizes: Sequence[int] = (MIB,), reader: FrameReader | None = None) -> list[Frame]:
    """All frames in `data`, received in pieces of at most `sizes` bytes, in turn."""
    reader = reader or FrameReader()
    frames: list[Frame] = []
    start = turn = 0
    while start < len(data):
        buffer = reader.buffer()
        assert buffer.nbytes > 0  # receiving into nothing would look like the end of the stream
        nbytes = min(sizes[turn % len(sizes)], buffer.nbytes, len(data) - start)
        buffer[:nbytes] = data[start : start + nbytes]
        reader.received(nbytes)
        start, turn = start + nbytes, turn + 1
        while (frame := reader.next_frame_untrusted()) is not None:
            frames.append(frame)
    return frames


def content(frame: Frame) -> tuple[Any, ...]:
    """A frame without compressed tensors in a form that can be compared."""
    return (dict(frame.header), [(t.dtype.name, t.shape, t.tobytes()) for t in frame.tensors])
