"""Frames: what a link carries. A small CBOR header and the tensors' raw bytes, cut into parts that may interleave.

A byte stream is a sequence of parts, each with a preamble of 16 bytes:

    2 bytes   magic "DX"
    1 byte    version: 2 in the first part of each direction, which holds the hello; 3 in all others
    1 byte    kind of part
    4 bytes   number, unsigned, big-endian
    8 bytes   length, unsigned, big-endian

    kind      number          length          what follows
    0 WHOLE   header length   body length     a complete frame: header, then body (at most 512 KiB)
    1 OPEN    header length   body length     the header of a frame with a larger body, which comes in chunks
    2 CHUNK   stream          chunk length    the next bytes of that frame's body (1 byte to 1 MiB)
    3 RESET   stream          0               nothing: the sender gave the frame up, as if it had never begun

The frames that a sender opens on a link are numbered as streams 0, 1, 2, ... (modulo 2**32) in the order of their OPEN
parts; the number is not sent, so it cannot be forged. Chunks of several streams may interleave and WHOLE parts may
stand between them: that is why a small call never waits for a large tensor. A frame is complete, and delivered, with
the last byte of its body; so frames arrive in the order in which they were completed.

The header is a canonical CBOR map (`dmoe_net.wire.codec`) of at most 64 KiB; its key "tensors", present when there are
any, is their table, and the body holds them (`dmoe_net.wire.tensors` gives the layout). `dmoe_net.wire.frame_reader`
parses all this.
"""

import enum
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dmoe_net.errors import LocalProtocolError
from dmoe_net.wire.codec import MAX_ENCODED_BYTES, encode
from dmoe_net.wire.tensors import Outgoing, buffers_of, describe

MAGIC = b"DX"
VERSION = 3
"""Version of frames and messages; it rises with each change of a byte of a test vector. Version 1 had no parts."""

HELLO_VERSION = 2
"""Version in the part that carries a hello, for good: so peers of all versions can read which one the sender speaks."""

MAX_HEADER_BYTES = MAX_ENCODED_BYTES
MAX_BODY_BYTES = 128 * 2**20
"""Most bytes of a body. The largest message is an expert's state (tens of MB); the rest travels in several messages."""

CHUNK_BYTES = 512 * 1024
"""The largest body that travels in one part, and the size into which larger ones are cut. A small call waits for the
chunk that is being written: half a millisecond at the gigabyte a second of an encrypted link. Chunks of half the size
cost a sixth of that rate, for each has its turn of the event loop and its system calls at both ends."""

MAX_CHUNK_BYTES = 2**20
"""Most bytes of a chunk that a receiver accepts: room for senders on faster links to choose otherwise."""

PREAMBLE = struct.Struct("!2sBBIQ")
NUM_STREAMS = 2**32


class PartKind(enum.IntEnum):
    """Kind of a part; the head of this file explains each."""

    WHOLE = 0
    OPEN = 1
    CHUNK = 2
    RESET = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message's content.

    Attributes:
      header: small CBOR map; the key "tensors" belongs to this module.
      tensors: arrays. On the sending side they may ask for compression (`dmoe_net.wire.compression.Compressed`); on the
        receiving side they are plain, read-only, 64-byte aligned, in a fresh buffer of the frame's own.
      body_nbytes: length of the body on the wire, bytes.
    """

    header: Mapping[str, Any]
    tensors: tuple[Outgoing, ...] = ()
    body_nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedFrame:
    """A frame ready to be cut into parts.

    Attributes:
      frame: what a simulated link hands over without decoding.
      head: the encoded header.
      body: the tensors' bytes, aliasing the tensors: they must not be written to before the frame has left.
      version: what its preamble says.
    """

    frame: Frame
    head: bytes
    body: tuple[bytes | memoryview, ...]
    version: int = VERSION

    @property
    def body_nbytes(self) -> int:
        """Length of the body."""
        return self.frame.body_nbytes

    @property
    def is_large(self) -> bool:
        """True if the frame must be sent as an `OutgoingStream` and not as a `whole_part`."""
        return self.body_nbytes > CHUNK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes that a link sends in one go.

    Attributes:
      pieces: its bytes in order, preamble included. Large ones alias the tensors.
      nbytes: their total.
      frame: the frame that this part completes, None if more of it is to come: what a simulated link delivers.
    """

    pieces: tuple[bytes | memoryview, ...]
    nbytes: int
    frame: Frame | None


def encode_frame(header: dict[str, Any], tensors: Sequence[Outgoing] = ()) -> EncodedFrame:
    """Lay out a frame; the bytes of tensors that are not to be compressed are not copied.

    Raises:
      LocalProtocolError: the header is not encodable or too large, a tensor cannot be sent, or the body
        exceeds `MAX_BODY_BYTES`.
    """
    if "tensors" in header:
        raise LocalProtocolError("the header's key 'tensors' is reserved for the tensor table")
    table = describe(tensors)
    told = {**header, "tensors": table} if table else header
    head = encode(dict(sorted(told.items(), key=_place_of)))  # in this order it is encoded faster
    body = buffers_of(tensors)
    body_nbytes = sum(len(buffer) for buffer in body)
    if body_nbytes > MAX_BODY_BYTES:
        raise LocalProtocolError(f"tensors take {body_nbytes} bytes, a message carries at most {MAX_BODY_BYTES}")
    frame = Frame(header=header, tensors=tuple(tensors), body_nbytes=body_nbytes)
    return EncodedFrame(frame=frame, head=head, body=body)


def whole_part(encoded: EncodedFrame) -> Part:
    """The one part of a frame that is not large."""
    assert not encoded.is_large
    numbers = PREAMBLE.pack(MAGIC, encoded.version, PartKind.WHOLE, len(encoded.head), encoded.body_nbytes)
    head = numbers + encoded.head
    return Part(pieces=(head, *encoded.body), nbytes=len(head) + encoded.body_nbytes, frame=encoded.frame)


class OutgoingStream:
    """A large frame on its way, part by part.

    Args:
      encoded: a large frame.
      number: how many streams were opened on this link before, modulo `NUM_STREAMS`.
    """

    def __init__(self, encoded: EncodedFrame, number: int) -> None:
        assert encoded.is_large
        self._encoded = encoded
        self._number = number
        self._is_open = False
        self._index = 0  # the buffer of the body that comes next,
        self._offset = 0  # and how much of it has left
        self._left = encoded.body_nbytes

    @property
    def is_done(self) -> bool:
        """All parts have been taken."""
        return self._left == 0

    def next_part(self) -> Part:
        """The next part: first the header, then the body in chunks of `CHUNK_BYTES`."""
        if not self._is_open:
            self._is_open = True
            head = _preamble(PartKind.OPEN, len(self._encoded.head), self._encoded.body_nbytes) + self._encoded.head
            return Part(pieces=(head,), nbytes=len(head), frame=None)
        nbytes = min(CHUNK_BYTES, self._left)
        pieces: list[bytes | memoryview] = [_preamble(PartKind.CHUNK, self._number, nbytes)]
        wanted = nbytes
        while wanted:
            buffer = self._encoded.body[self._index]
            piece = memoryview(buffer)[self._offset : self._offset + wanted]
            pieces.append(piece)
            wanted -= len(piece)
            self._offset += len(piece)
            if self._offset == len(buffer):
                self._index, self._offset = self._index + 1, 0
        self._left -= nbytes
        frame = None if self._left else self._encoded.frame
        return Part(pieces=tuple(pieces), nbytes=PREAMBLE.size + nbytes, frame=frame)

    def reset_part(self) -> Part:
        """Return the part to send instead of the rest."""
        return Part(pieces=(_preamble(PartKind.RESET, self._number, 0),), nbytes=PREAMBLE.size, frame=None)


def _place_of(item: tuple[str, Any]) -> tuple[int, str]:
    """Sort key that puts the items of a map in canonical order."""
    return len(item[0]), item[0]


def _preamble(kind: PartKind, number: int, nbytes: int) -> bytes:
    return PREAMBLE.pack(MAGIC, VERSION, kind, number, nbytes)
