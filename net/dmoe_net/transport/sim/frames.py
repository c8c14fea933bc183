"""Frames at the other end of a simulated link: those that the bytes would have become, without the bytes."""

import functools
from typing import Any

from dmoe_net.wire.frame_reader import FrameReader
from dmoe_net.wire.frames import Frame, Part, PartKind
from dmoe_net.wire.tensors import as_received

_KIND_OFFSET = 3  # of a part's kind in its preamble


class FramePassage:
    """One direction of a link, as far as the frames' content is concerned.

    Nothing is parsed: it takes the frames that the parts say they complete, and copies what the sender could change
    afterwards.
    """

    __slots__ = ("_num_open",)

    def __init__(self) -> None:
        self._num_open = 0

    @property
    def at_boundary(self) -> bool:
        """No frame has been begun and not finished."""
        return self._num_open == 0

    def take(self, part: Part) -> Frame | None:
        """The frame that the receiver gets with this part, if any."""
        kind = part.pieces[0][_KIND_OFFSET]
        if kind == PartKind.OPEN:
            self._num_open += 1
        elif kind == PartKind.RESET or (kind == PartKind.CHUNK and part.frame is not None):
            self._num_open -= 1
        if part.frame is None:
            return None
        return Frame(
            header=_decoded(part.frame.header),
            tensors=tuple(map(as_received, part.frame.tensors)),
            body_nbytes=part.frame.body_nbytes,
        )


class CheckedPassage:
    """The same by way of the bytes: each part goes through the parser of real links. Slow, for tests of the wire."""

    __slots__ = ("_reader",)

    def __init__(self) -> None:
        self._reader = FrameReader()

    @property
    def at_boundary(self) -> bool:
        return self._reader.at_boundary

    def take(self, part: Part) -> Frame | None:
        """As `FramePassage.take`, by way of the bytes.

        Raises:
          RemoteProtocolError: the parts are not what a real receiver would accept.
        """
        arrived = None
        for piece in part.pieces:
            rest = memoryview(piece)
            while rest:
                buffer = self._reader.buffer()[: len(rest)]
                buffer[:] = rest[: len(buffer)]
                rest = rest[len(buffer) :]
                self._reader.received(len(buffer))
                arrived = self._reader.next_frame_untrusted() or arrived
        assert (arrived is None) == (part.frame is None), "a part's bytes and its frame disagree"
        return arrived


def _decoded(value: Any) -> Any:
    """`value` as it comes back from canonical CBOR: tuples as lists, keys in canonical order, nothing shared.

    The order matters: a receiver that walks through a map must do so alike on every network.
    """
    kind = type(value)
    if kind is dict:
        return {key: _decoded(value[key]) for key in _canonical_order(tuple(value))}
    if kind is list or kind is tuple:
        return [_decoded(item) for item in value]
    return value


@functools.lru_cache(maxsize=1024)
def _canonical_order(keys: tuple[str, ...]) -> tuple[str, ...]:
    """By length, then by bytes. Most maps are messages of a few kinds: the cache saves a third of their cost."""
    return tuple(sorted(keys, key=lambda key: (len(key.encode()), key.encode())))
