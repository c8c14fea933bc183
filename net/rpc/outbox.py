"""What waits to be sent on one connection, and in which order it leaves.

Theory of operation. Frames without tensors leave at once; then those with small tensors; the rest of each write is
chunks of large frames, `MAX_STREAMS` of which take turns. So a small call waits for at most one chunk, whatever else
is under way, and large ones share what is left fairly.

The window. The receiver's `Hello` says how many bytes of tensors may be under way or in work at its end. A frame
counts for its body, but at most for half of the window (`window_cost`); it starts when as much is free, and the
receiver gives that back (`Credit`) once it is done with the frame: a reply when its caller has it, a request when it is
answered. An eighth of the window is kept for small frames, so that large ones never lock them out; and the receiver
may hold back up to an eighth before it says so. Since 1/2 + 1/8 + 1/8 < 1, whatever waits can start in the end.
"""

from collections import OrderedDict

from net.errors import RemoteProtocolError
from net.wire.frame_reader import window_cost
from net.wire.frames import NUM_STREAMS, EncodedFrame, OutgoingStream, Part, whole_part

MAX_STREAMS = 8
"""Large frames that take turns. More would all be late together; what waits behind them still holds its place."""

Key = tuple[str, int]
"""Kind of message and call id: names a frame while it waits."""


class Outbox:
    """The frames to be sent. Nothing here ever waits; the bounds are its user's (`net.rpc.session`)."""

    def __init__(self) -> None:
        self._plain: OrderedDict[Key, EncodedFrame] = OrderedDict()  # no body
        self._small: OrderedDict[Key, EncodedFrame] = OrderedDict()  # a body that fits one part
        self._large: OrderedDict[Key, EncodedFrame] = OrderedDict()  # waits to become a stream
        self._streams: OrderedDict[Key, tuple[OutgoingStream, EncodedFrame]] = OrderedDict()
        self._resets: list[Part] = []
        self._num_opened = 0
        self._window_bytes = 0
        self._free_bytes = 0
        self._body_bytes = 0

    def __len__(self) -> int:
        """Frames that wait or have left in part."""
        return len(self._plain) + len(self._small) + len(self._large) + len(self._streams) + len(self._resets)

    def __bool__(self) -> bool:
        return bool(self._plain or self._small or self._large or self._streams or self._resets)

    def __contains__(self, key: Key) -> bool:
        return any(key in queue for queue in (self._plain, self._small, self._large, self._streams))

    @property
    def body_bytes(self) -> int:
        """Tensors of the frames that wait or have left in part, bytes."""
        return self._body_bytes

    def open_window(self, window_bytes: int) -> None:
        """The receiver said how large its window is; before that, nothing with a body leaves."""
        self._window_bytes = self._free_bytes = window_bytes

    def grant_untrusted(self, nbytes: int) -> None:
        """The receiver gave room back.

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
        self._body_bytes += encoded.body_nbytes

    def discard(self, key: Key) -> bool:
        """Take a frame back; False if it has left completely, or never came. The rest of one that has left in part is
        not sent, and the receiver never sees it."""
        if self._plain.pop(key, None) is not None:
            return True
        encoded = self._small.pop(key, None) or self._large.pop(key, None)
        if encoded is None:
            if key not in self._streams:
                return False
            stream, encoded = self._streams.pop(key)
            self._resets.append(stream.reset_part())
            self._free_bytes += self._cost(encoded)
        self._body_bytes -= encoded.body_nbytes
        return True

    def take(self, max_nbytes: int) -> tuple[list[Part], list[Key]]:
        """The next parts to write, in order, and the keys of the frames that they complete.

        Stops after the part with which `max_nbytes` are reached, but takes a chunk of a large frame even if the small
        ones before it have filled that: a flood of small calls does not stop a large one.
        """
        parts, self._resets = self._resets, []
        done: list[Key] = []
        nbytes = 0
        while self._plain and nbytes < max_nbytes:
            key, encoded = self._plain.popitem(last=False)
            nbytes += self._append(parts, done, key, whole_part(encoded))
        while self._small and self._window_bytes and nbytes < max_nbytes:
            key, encoded = next(iter(self._small.items()))
            cost = self._cost(encoded)
            if cost > self._free_bytes:
                break
            del self._small[key]
            self._free_bytes -= cost
            self._body_bytes -= encoded.body_nbytes
            nbytes += self._append(parts, done, key, whole_part(encoded))
        nbytes += self._open_streams(parts)
        is_first = True
        while self._streams and (is_first or nbytes < max_nbytes):
            is_first = False
            nbytes += self._take_chunk(parts, done)
        return parts, done

    def _open_streams(self, parts: list[Part]) -> int:
        """Let large frames take part in the turns, as far as the window allows; each begins with its header."""
        nbytes = 0
        while self._large and self._window_bytes and len(self._streams) < MAX_STREAMS:
            key, encoded = next(iter(self._large.items()))
            cost = self._cost(encoded)
            if cost + self._window_bytes // 8 > self._free_bytes:
                break
            del self._large[key]
            self._free_bytes -= cost
            stream = OutgoingStream(encoded, self._num_opened % NUM_STREAMS)
            self._num_opened += 1
            self._streams[key] = (stream, encoded)
            parts.append(stream.next_part())
            nbytes += parts[-1].nbytes
        return nbytes

    def _take_chunk(self, parts: list[Part], done: list[Key]) -> int:
        """A chunk of the stream whose turn it is."""
        key, (stream, encoded) = self._streams.popitem(last=False)
        part = stream.next_part()
        if stream.is_done:
            self._body_bytes -= encoded.body_nbytes
        else:
            self._streams[key] = (stream, encoded)  # at the end of the queue
        return self._append(parts, done, key, part)

    def _append(self, parts: list[Part], done: list[Key], key: Key, part: Part) -> int:
        parts.append(part)
        if part.frame is not None:
            done.append(key)
        return part.nbytes

    def _cost(self, encoded: EncodedFrame) -> int:
        return window_cost(encoded.body_nbytes, self._window_bytes)
