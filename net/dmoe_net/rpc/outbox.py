"""Frames that wait to be sent on one connection, and the order in which they leave.

Frames without tensors leave at once; then those with small tensors; the rest of each write is chunks of large frames,
`MAX_STREAMS` of which take turns. So a small call waits for at most one chunk, and large ones share the rest fairly.

The window. The receiver's `Hello` says how many bytes of tensors in calls may be under way or in work at its end. A
call counts for its body, but at most for half of the window, and for nothing if that is small (`window_cost`); it
starts when as much is free, and the receiver gives that back (`Credit`) once it has answered. An eighth of the window
is kept for calls that fit one part, so that large ones never lock them out; and the receiver may hold back up to an
eighth before it says so. Since 1/2 + 1/8 + 1/8 < 1, every call can start in the end. Answers do not count: one that
waited for calls to be dealt with could be the one that they wait for. But all chunked frames together stay within the
window, so that the receiver's reader can tell a flood.
"""

from collections import OrderedDict
from collections.abc import Iterator

from dmoe_net.errors import RemoteProtocolError
from dmoe_net.wire.frame_reader import window_cost
from dmoe_net.wire.frames import NUM_STREAMS, EncodedFrame, OutgoingStream, Part, whole_part

MAX_STREAMS = 8
"""Large frames that take turns. More would all be late together."""

Key = tuple[str, int]
"""Kind of message and call id: names a frame while it waits."""

CALL, PARTIAL, ANSWER = "call", "partial", "answer"
"""Kinds of message that are treated apart: a partial is part of an answer."""


class Outbox:
    """The frames to be sent. Nothing here ever waits; the bounds are its user's (`dmoe_net.rpc.session`)."""

    def __init__(self) -> None:
        self._plain: OrderedDict[Key, EncodedFrame] = OrderedDict()  # no body
        self._small: OrderedDict[Key, EncodedFrame] = OrderedDict()  # a body that fits one part
        self._large: OrderedDict[Key, EncodedFrame] = OrderedDict()  # waits to become a stream
        self._streams: OrderedDict[Key, tuple[OutgoingStream, EncodedFrame]] = OrderedDict()
        self._resets: list[Part] = []
        self._num_opened = 0
        self._window_bytes = 0
        self._free_bytes = 0
        self._stream_bytes = 0  # window cost of the streams
        self.answer_bytes = 0
        """Tensors of the answers and partials that wait or have left in part, bytes."""

    def __len__(self) -> int:
        """Frames that wait or have left in part."""
        return len(self._plain) + len(self._small) + len(self._large) + len(self._streams) + len(self._resets)

    def __contains__(self, key: Key) -> bool:
        return any(key in queue for queue in (self._plain, self._small, self._large, self._streams))

    def open_window(self, window_bytes: int) -> None:
        """Note how large the receiver's window is; before that, nothing with a body leaves."""
        self._window_bytes = self._free_bytes = window_bytes

    def grant_untrusted(self, nbytes: int) -> None:
        """Note that the receiver gave room back.

        Raises:
          RemoteProtocolError: more than it was sent.
        """
        if self._free_bytes + nbytes > self._window_bytes:
            raise RemoteProtocolError(f"credit of {nbytes} bytes, more than was sent")
        self._free_bytes += nbytes

    def put(self, key: Key, encoded: EncodedFrame) -> None:
        """Queue a frame. No other frame of this key may wait."""
        if not encoded.body_nbytes:
            self._plain[key] = encoded
            return
        (self._large if encoded.is_large else self._small)[key] = encoded
        self._count(key, encoded.body_nbytes)

    def discard(self, key: Key) -> bool:
        """Take a frame back, also one that has left in part, which the receiver then never sees; False if it has left
        completely, or never came."""
        if self._plain.pop(key, None) is not None:
            return True
        encoded = self._small.pop(key, None) or self._large.pop(key, None)
        if encoded is None:
            if key not in self._streams:
                return False
            stream, encoded = self._streams.pop(key)
            self._resets.append(stream.reset_part())
            self._free_bytes += self._cost(key, encoded)
            self._stream_bytes -= window_cost(encoded.body_nbytes, self._window_bytes)
        self._count(key, -encoded.body_nbytes)
        return True

    def take(self, max_nbytes: int) -> tuple[list[Part], list[Key]]:
        """The next parts to write, in order, and the keys of the frames that they complete.

        Stops after the part with which `max_nbytes` are reached, but takes at least one chunk of a large frame: a flood
        of small calls does not stop a large one.
        """
        parts, self._resets = self._resets, []
        done: list[Key] = []
        nbytes = 0
        while self._plain and nbytes < max_nbytes:
            key, encoded = self._plain.popitem(last=False)
            nbytes += self._append(parts, done, key, whole_part(encoded))
        if self._small:
            for key, encoded in self._startable(self._small, reserve=0):
                if nbytes >= max_nbytes:
                    break
                del self._small[key]
                self._free_bytes -= self._cost(key, encoded)
                self._count(key, -encoded.body_nbytes)
                nbytes += self._append(parts, done, key, whole_part(encoded))
        if self._large:
            nbytes += self._open_streams(parts)
        is_first = True
        while self._streams and (is_first or nbytes < max_nbytes):
            is_first = False
            nbytes += self._take_chunk(parts, done)
        return parts, done

    def _open_streams(self, parts: list[Part]) -> int:
        """Let large frames take part in the turns, as far as the window allows."""
        nbytes = 0
        for key, encoded in self._startable(self._large, reserve=self._window_bytes // 8):
            stream_bytes = self._stream_bytes + window_cost(encoded.body_nbytes, self._window_bytes)
            if len(self._streams) >= MAX_STREAMS or stream_bytes > self._window_bytes:
                break
            del self._large[key]
            self._free_bytes -= self._cost(key, encoded)
            self._stream_bytes = stream_bytes
            stream = OutgoingStream(encoded, self._num_opened % NUM_STREAMS)
            self._num_opened += 1
            self._streams[key] = (stream, encoded)
            parts.append(stream.next_part())
            nbytes += parts[-1].nbytes
        return nbytes

    def _startable(self, queue: OrderedDict[Key, EncodedFrame], *, reserve: int) -> Iterator[tuple[Key, EncodedFrame]]:
        """The frames of a queue that the window lets start now. Calls keep their order."""
        if not self._window_bytes:
            return
        is_closed_to_calls = False
        for key, encoded in tuple(queue.items()):
            cost = self._cost(key, encoded)
            if cost and (is_closed_to_calls or cost + reserve > self._free_bytes):
                is_closed_to_calls = True
                continue
            yield key, encoded

    def _take_chunk(self, parts: list[Part], done: list[Key]) -> int:
        key, (stream, encoded) = self._streams.popitem(last=False)
        part = stream.next_part()
        if stream.is_done:
            self._count(key, -encoded.body_nbytes)
            self._stream_bytes -= window_cost(encoded.body_nbytes, self._window_bytes)
        else:
            self._streams[key] = (stream, encoded)  # at the end of the queue
        return self._append(parts, done, key, part)

    def _append(self, parts: list[Part], done: list[Key], key: Key, part: Part) -> int:
        parts.append(part)
        if part.frame is not None:
            done.append(key)
        return part.nbytes

    def _cost(self, key: Key, encoded: EncodedFrame) -> int:
        """Bytes that the frame takes of the receiver's window."""
        return window_cost(encoded.body_nbytes, self._window_bytes) if key[0] == CALL else 0

    def _count(self, key: Key, nbytes: int) -> None:
        if key[0] in (PARTIAL, ANSWER):
            self.answer_bytes += nbytes
