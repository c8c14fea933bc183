"""The parser of one incoming byte stream, without the stream.

The shell asks `FrameReader` where to receive, tells it how much came, and takes frames out. Small frames are parsed
out of one scratch buffer, all that a `recv` brought; a body that has not arrived whole is received straight into the
fresh aligned buffer in which its tensors will live, or into memory that whoever waits for it has offered
(`dmoe_net.wire.sinks`).

Memory. Nothing is allocated for a length that a peer merely claims: a header grows the scratch buffer by at most
64 KiB, and a body's buffer is allocated, its pages untouched, once the header's tensor table agrees with the body
length. Frames under way together may take `window_bytes`, where a frame counts for at most half of it (the rule of
`dmoe_net.rpc.outbox`): two frames of the largest size, or many small ones. The session allows as much again for
complete frames that are being worked on: half a gigabyte from the most hostile peer, 128 MiB from all others.
"""

from dataclasses import dataclass
from typing import Any

from dmoe_net.errors import RemoteProtocolError
from dmoe_net.wire.codec import decode_untrusted
from dmoe_net.wire.frames import (
    CHUNK_BYTES,
    HELLO_VERSION,
    MAGIC,
    MAX_BODY_BYTES,
    MAX_CHUNK_BYTES,
    MAX_HEADER_BYTES,
    NUM_STREAMS,
    PREAMBLE,
    VERSION,
    Frame,
    PartKind,
)
from dmoe_net.wire.sinks import Sink, Sinks
from dmoe_net.wire.tensors import Layout, aligned_buffer, layout_untrusted, views_untrusted

WINDOW_BYTES = 64 * 2**20
"""Bodies under way on one connection in one direction. At 100 ms between the peers it allows 640 MB/s."""

FREE_BYTES = 4096
"""Bodies that do not count. As many as a peer may have in work at once come to 1 MiB."""

_SCRATCH_BYTES = 32 * 1024
"""Bytes of the buffer in which small frames land. 150 small calls fit; with a thousand connections it is 32 MB in all.
It grows once, to at most a preamble and the largest header, if such a header comes."""


_NEXT_HEAD_BYTES = 4096
"""Received beyond the end of a chunk: the next preamble, and perhaps some small frames. What belongs to the next chunk
has to be copied, so not more."""


def window_cost(body_nbytes: int, window_bytes: int) -> int:
    """Bytes for which a frame counts in a window: its body, but at most half of the window, so that every frame can
    pass; and 0 if it is small, so that small frames always can."""
    return min(body_nbytes, window_bytes // 2) if body_nbytes > FREE_BYTES else 0


@dataclass(slots=True, kw_only=True)
class _Assembly:
    """A frame whose body is coming in."""

    header: dict[str, Any]
    layout: Layout
    """Layout of the body."""
    memory: memoryview
    sink: Sink | None
    """Whose memory that is, if it is not the frame's own."""
    filled: int = 0
    stream: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the body."""
        return self.layout.nbytes

    @property
    def body(self) -> memoryview:
        """Memory for the body, valid until another task runs."""
        if self.sink is not None and self.sink.is_withdrawn:
            # What has come is lost, and nobody waits for the frame: it is only parsed to its end.
            self.memory, self.sink = aligned_buffer(self.nbytes), None
        return self.memory

    def finish_untrusted(self) -> Frame:
        tensors = views_untrusted(self.layout, self.body)
        return Frame(header=self.header, tensors=tensors, body_nbytes=self.nbytes)


class FrameReader:
    """Incremental parser of one incoming byte stream.

    Use: receive into `buffer()`, report with `received(n)`, then call `next_frame_untrusted()` until it returns None.

    Args:
      max_body_bytes: frames with larger bodies are refused.
      window_bytes: see the head of this file.
      sinks: memory that is offered for bodies; None: there never is any.
    """

    def __init__(
        self,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        window_bytes: int = WINDOW_BYTES,
        sinks: Sinks | None = None,
    ) -> None:
        self._sinks = sinks
        self._max_body_bytes = max_body_bytes
        self._window_bytes = window_bytes
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._start = 0  # first byte of scratch not parsed yet
        self._end = 0  # first byte of scratch not received yet
        self._streams: dict[int, _Assembly] = {}
        self._num_opened = 0
        self._is_first = True  # the next part is the stream's first, which may be a hello
        self._under_way = 0  # window cost of all streams
        self._target: _Assembly | None = None  # the frame to which the bytes that come next belong,
        self._target_end = 0  # and up to where in its body

    @property
    def at_boundary(self) -> bool:
        """True if all that was received belongs to complete frames: a stream may end here."""
        return self._target is None and not self._streams and self._start == self._end

    def buffer(self) -> memoryview:
        """Memory for the next bytes of the stream; never empty once `next_frame_untrusted` has returned None.

        Valid until the next call of any other method, and until another task runs: memory that was offered may be
        withdrawn.
        """
        if self._target is not None:
            return self._target.body[self._target.filled : self._target_end]
        if self._start == self._end:
            self._start = self._end = 0
        return memoryview(self._scratch)[self._end :]

    def buffers(self) -> tuple[memoryview, ...]:
        """`buffer()`, and where what follows it belongs: the head of the next part, for one system call less."""
        first = self.buffer()
        if self._target is None or self._end > len(self._scratch) - _NEXT_HEAD_BYTES:
            return (first,)
        if self._start == self._end:
            self._start = self._end = 0
        return (first, memoryview(self._scratch)[self._end : self._end + _NEXT_HEAD_BYTES])

    def received(self, nbytes: int) -> None:
        """Record that `nbytes` bytes have been written to the front of `buffer()`, or of `buffers()` together."""
        if self._target is not None:
            here = min(nbytes, self._target_end - self._target.filled)
            self._target.filled += here
            nbytes -= here
        self._end += nbytes

    def next_frame_untrusted(self) -> Frame | None:
        """The next complete frame, or None when more bytes are needed.

        Raises:
          RemoteProtocolError: the stream is not made of frames. It cannot be resumed after that.
        """
        while True:
            target = self._target
            if target is None:
                if not self._parse_part_untrusted():
                    return None
                continue
            if target.filled < self._target_end:
                return None
            self._target = None
            if target.filled == target.nbytes:
                self._forget(target)
                return target.finish_untrusted()

    def _parse_part_untrusted(self) -> bool:
        """Parse a part's preamble and header if they are there; False if more bytes are needed."""
        if self._end - self._start < PREAMBLE.size:
            self._make_room(PREAMBLE.size)
            return False
        magic, version, kind, number, nbytes = PREAMBLE.unpack_from(self._scratch, self._start)
        if magic != MAGIC or (version != VERSION and not (self._is_first and version == HELLO_VERSION)):
            start = bytes(self._scratch[self._start : self._start + 4])
            raise RemoteProtocolError(f"not a part of a frame of version {VERSION}: it starts with {start!r}")
        if kind == PartKind.WHOLE or kind == PartKind.OPEN:
            return self._parse_head_untrusted(kind, number, nbytes)
        if kind != PartKind.CHUNK and kind != PartKind.RESET:
            raise RemoteProtocolError(f"unknown kind of part {kind}")
        assembly = self._streams.get(number)
        if assembly is None:
            raise RemoteProtocolError(f"a part of stream {number}, which is not open")
        left = assembly.nbytes - assembly.filled
        if kind == PartKind.RESET:
            if nbytes:
                raise RemoteProtocolError(f"the end of stream {number} announces {nbytes} bytes, expected none")
            self._start += PREAMBLE.size
            self._forget(assembly)
            return True
        if not 1 <= nbytes <= min(left, MAX_CHUNK_BYTES):
            raise RemoteProtocolError(
                f"a chunk of {nbytes} bytes, expected 1 to {MAX_CHUNK_BYTES} and no more than the {left} that are left"
            )
        self._start += PREAMBLE.size
        self._fill(assembly, nbytes)
        return True

    def _parse_head_untrusted(self, kind: int, header_nbytes: int, body_nbytes: int) -> bool:
        if header_nbytes > MAX_HEADER_BYTES or body_nbytes > self._max_body_bytes:
            raise RemoteProtocolError(
                f"frame announces a header of {header_nbytes} and a body of {body_nbytes} bytes, "
                f"at most {MAX_HEADER_BYTES} and {self._max_body_bytes} are allowed"
            )
        if (kind == PartKind.OPEN) != (body_nbytes > CHUNK_BYTES):
            raise RemoteProtocolError(f"a body of {body_nbytes} bytes comes in chunks if it exceeds {CHUNK_BYTES}")
        stream = self._num_opened % NUM_STREAMS
        if kind == PartKind.OPEN and stream in self._streams:
            raise RemoteProtocolError(f"stream {stream} is opened and is still open since {NUM_STREAMS} streams ago")
        cost = window_cost(body_nbytes, self._window_bytes)
        if kind == PartKind.OPEN and self._under_way + cost > self._window_bytes:
            raise RemoteProtocolError(f"frames of more than {self._window_bytes} bytes are under way together")
        head_end = self._start + PREAMBLE.size + header_nbytes
        if self._end < head_end:
            self._make_room(PREAMBLE.size + header_nbytes)
            return False
        header = decode_untrusted(bytes(memoryview(self._scratch)[self._start + PREAMBLE.size : head_end]))
        if type(header) is not dict:
            raise RemoteProtocolError("a frame's header must be a map")
        if header.get("tensors") == []:
            raise RemoteProtocolError("a header's key 'tensors' must be absent when there are none")
        table = header.pop("tensors", [])
        layout = layout_untrusted(table)
        if layout.nbytes != body_nbytes:
            raise RemoteProtocolError(f"tensor table and body length ({body_nbytes}) disagree")
        self._start, self._is_first = head_end, False
        assembly = self._assembly_untrusted(header, table, layout)
        if kind == PartKind.WHOLE:
            self._fill(assembly, body_nbytes)
        else:
            assembly.stream = stream
            self._num_opened += 1
            self._streams[stream] = assembly
            self._under_way += cost
        return True

    def _assembly_untrusted(self, header: dict[str, Any], table: list[Any], layout: Layout) -> _Assembly:
        """The frame that this header begins, with room for its body."""
        if not layout.nbytes:
            return _Assembly(header=header, layout=layout, memory=memoryview(b""), sink=None)
        sink = None if self._sinks is None else self._sinks.take_untrusted(header, table)
        memory = aligned_buffer(layout.nbytes) if sink is None else sink.memory
        return _Assembly(header=header, layout=layout, memory=memory, sink=sink)

    def _fill(self, assembly: _Assembly, nbytes: int) -> None:
        """The next `nbytes` bytes belong to `assembly`; those that came along already are moved there."""
        self._target = assembly
        self._target_end = assembly.filled + nbytes
        here = min(nbytes, self._end - self._start)
        if here:
            assembly.body[assembly.filled : assembly.filled + here] = memoryview(self._scratch)[
                self._start : self._start + here
            ]
            assembly.filled += here
            self._start += here

    def _forget(self, assembly: _Assembly) -> None:
        if assembly.stream is not None:
            del self._streams[assembly.stream]
            self._under_way -= window_cost(assembly.nbytes, self._window_bytes)

    def _make_room(self, nbytes: int) -> None:
        """Let scratch hold `nbytes` from the first unparsed byte on: move that to the front, or grow."""
        if self._start + nbytes <= len(self._scratch):
            return
        self._scratch[: self._end - self._start] = self._scratch[self._start : self._end]
        self._start, self._end = 0, self._end - self._start
        if nbytes > len(self._scratch):
            # Not `extend`: somebody may still hold a memoryview of the old one, which must not change its size.
            self._scratch = self._scratch + bytearray(nbytes - len(self._scratch))
