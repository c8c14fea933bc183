"""Frames: what a link carries. A preamble of fixed size, a small CBOR header, and the tensors' raw bytes.

On a byte stream, a frame is

    3 bytes   magic "DMX"
    1 byte    version of everything on the wire (1)
    4 bytes   header length, unsigned, big-endian, at most 64 KiB
    8 bytes   body length, unsigned, big-endian
    header    canonical CBOR map (`net.wire.codec`); its key "tensors", present when there are any, is their
    table body      the tensors (`net.wire.tensors` gives the layout)

`FrameReader` is the stream's parser without the stream: the shell asks it where to receive, tells it how much came,
and takes frames out. Small frames are parsed out of one scratch buffer, all that a `recv` brought; a body that has
not arrived whole is received straight into the fresh aligned buffer in which its tensors will live.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from net.errors import LocalProtocolError, RemoteProtocolError
from net.wire.codec import MAX_ENCODED_BYTES, decode_untrusted, encode
from net.wire.tensors import (
    Tensor,
    aligned_buffer,
    body_nbytes_untrusted,
    buffers_of,
    describe,
    view_untrusted,
)

MAGIC = b"DMX"
VERSION = 1
MAX_HEADER_BYTES = MAX_ENCODED_BYTES
MAX_BODY_BYTES = 256 * 2**20
"""Of one frame. The largest message is an expert's state (tens of MB); the rest travels in parts."""

_PREAMBLE = struct.Struct("!3sBIQ")
_SCRATCH_BYTES = 32 * 1024
"""Where small frames land. 150 small calls fit; with a thousand connections it is 32 MB in all. It grows once, to at
most a preamble and the largest header, if such a header comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message's content.

    Attributes:
      header: small CBOR map; the key "tensors" belongs to this module.
      tensors: arrays; on the receiving side read-only, 64-byte aligned, in a fresh buffer of the frame's own.
    """

    header: Mapping[str, Any]
    tensors: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedFrame:
    """A frame ready to leave.

    Attributes:
      frame: what a simulated link hands over without decoding.
      head: preamble and header.
      body: the tensors' bytes, aliasing the tensors: they must not be written to before the frame has left.
      nbytes: length on the wire.
    """

    frame: Frame
    head: bytes
    body: tuple[bytes | memoryview, ...]
    nbytes: int


def encode_frame(
    header: dict[str, Any], tensors: Sequence[Tensor] = (), *, max_body_bytes: int = MAX_BODY_BYTES
) -> EncodedFrame:
    """Lay out a frame; the tensors' bytes are not copied.

    Raises:
      LocalProtocolError: the header is not encodable or too large, a tensor cannot be sent, or the body
        exceeds `max_body_bytes`.
    """
    if "tensors" in header:
        raise LocalProtocolError("the header's key 'tensors' is reserved for the tensor table")
    table = describe(tensors)
    head = encode({**header, "tensors": table} if table else header)
    body = buffers_of(tensors)
    body_nbytes = sum(len(buffer) for buffer in body)
    if body_nbytes > max_body_bytes:
        raise LocalProtocolError(f"tensors take {body_nbytes} bytes, a message carries at most {max_body_bytes}")
    return EncodedFrame(
        frame=Frame(header=header, tensors=tuple(tensors)),
        head=_PREAMBLE.pack(MAGIC, VERSION, len(head), body_nbytes) + head,
        body=body,
        nbytes=_PREAMBLE.size + len(head) + body_nbytes,
    )


class FrameReader:
    """Incremental parser of one incoming byte stream.

    Use: receive into `buffer()`, report with `received(n)`, then call `next_frame_untrusted()` until it returns None.
    Nothing is allocated for a length that a peer merely claims: a header grows the scratch buffer by at most 64 KiB,
    and a body's buffer is allocated (pages untouched) once the header's tensor table agrees with the body length.
    """

    def __init__(self, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._start = 0  # first byte of scratch not parsed yet
        self._end = 0  # first byte of scratch not received yet
        self._header: dict[str, Any] | None = None  # parsed, while its body is under way
        self._table: list[Any] = []
        self._body = memoryview(b"")
        self._filled = 0  # bytes of the body received so far

    @property
    def at_boundary(self) -> bool:
        """Whether all that was received belongs to complete frames: where a stream may end."""
        return self._header is None and self._start == self._end

    def buffer(self) -> memoryview:
        """Where the next bytes of the stream belong; never empty once `next_frame_untrusted` has returned None.

        Valid until the next call of any other method.
        """
        if self._header is not None:
            return self._body[self._filled :]
        if self._start == self._end:
            self._start = self._end = 0
        return memoryview(self._scratch)[self._end :]

    def received(self, nbytes: int) -> None:
        """Record that `nbytes` bytes have been written to the front of `buffer()`."""
        if self._header is not None:
            self._filled += nbytes
        else:
            self._end += nbytes

    def next_frame_untrusted(self) -> Frame | None:
        """The next complete frame, or None when more bytes are needed.

        Raises:
          RemoteProtocolError: the stream is not made of frames. It cannot be resumed after that.
        """
        if self._header is None and not self._parse_head_untrusted():
            return None
        if self._filled < self._body.nbytes:
            return None
        assert self._header is not None
        frame = Frame(header=self._header, tensors=view_untrusted(self._table, self._body))
        self._header, self._body, self._filled = None, memoryview(b""), 0
        return frame

    def _parse_head_untrusted(self) -> bool:
        """Parse preamble and header if they are there, and start the body with what came along with them."""
        if self._end - self._start < _PREAMBLE.size:
            self._make_room(_PREAMBLE.size)
            return False
        magic, version, header_nbytes, body_nbytes = _PREAMBLE.unpack_from(self._scratch, self._start)
        if magic != MAGIC or version != VERSION:
            raise RemoteProtocolError(f"not a frame of version {VERSION}: it starts with {magic + bytes([version])!r}")
        if header_nbytes > MAX_HEADER_BYTES or body_nbytes > self._max_body_bytes:
            raise RemoteProtocolError(
                f"frame announces a header of {header_nbytes} and a body of {body_nbytes} bytes, "
                f"at most {MAX_HEADER_BYTES} and {self._max_body_bytes} are allowed"
            )
        head_end = self._start + _PREAMBLE.size + header_nbytes
        if self._end < head_end:
            self._make_room(_PREAMBLE.size + header_nbytes)
            return False
        header = decode_untrusted(bytes(memoryview(self._scratch)[self._start + _PREAMBLE.size : head_end]))
        if type(header) is not dict:
            raise RemoteProtocolError("a frame's header must be a map")
        self._table = header.pop("tensors", [])
        if body_nbytes_untrusted(self._table) != body_nbytes:
            raise RemoteProtocolError(f"tensor table and body length ({body_nbytes}) disagree")
        self._header = header
        self._start = head_end
        self._start_body(body_nbytes)
        return True

    def _start_body(self, nbytes: int) -> None:
        self._body = aligned_buffer(nbytes) if nbytes else memoryview(b"")
        self._filled = min(nbytes, self._end - self._start)
        if self._filled:
            self._body[: self._filled] = memoryview(self._scratch)[self._start : self._start + self._filled]
            self._start += self._filled

    def _make_room(self, nbytes: int) -> None:
        """Let scratch hold `nbytes` from the first unparsed byte on: move that to the front, or grow."""
        if self._start + nbytes <= len(self._scratch):
            return
        self._scratch[: self._end - self._start] = self._scratch[self._start : self._end]
        self._start, self._end = 0, self._end - self._start
        if nbytes > len(self._scratch):
            # Not `extend`: somebody may still hold a memoryview of the old one, which must not change its size.
            self._scratch = self._scratch + bytearray(nbytes - len(self._scratch))
