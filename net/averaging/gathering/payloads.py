"""The payloads of one group on their way to one member: which pieces have come, and who is not waited for any more.

All payloads of a group have one length, which each member knows beforehand: a piece is refused by its place and length
alone, and memory for a payload is taken when its first sound piece comes.

No I/O here. Members are named by their place in the group, `now` is in seconds of any one clock.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from net.errors import RemoteProtocolError
from net.types import Array
from net.wire.messages import MAX_TIMEOUT_S

SILENT = "silent"
UNREACHABLE = "unreachable"
BROKE_RULES = "broke the rules"
OUT_OF_TIME = "out of time"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherConfig:
    """Settings of a gathering. Members must agree on `chunk_bytes`."""

    chunk_bytes: int = 2**20
    """Bytes of a payload in one call."""
    window_bytes: int = 4 * 2**20
    """Bytes under way from one member to another, to begin with; one piece at least. On longer lines the window grows
    as far as these carry and the memory budget allows (`net.rpc.bulk`)."""
    sender_timeout_s: float = 30.0
    """Seconds without a piece after which a member is not waited for any more."""
    max_bytes: int = 2**32
    """Bytes that a full group's payloads may have together. More is refused at start. Twice as much is held at most:
    the last group's payloads stay for those who are slower."""

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "window_bytes", "max_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.sender_timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(
                f"sender_timeout_s must be above 0 and at most {MAX_TIMEOUT_S:g} s, got {self.sender_timeout_s}"
            )


class Payloads:
    """The payloads of a group, as far as one member has them.

    Args:
      senders: places of all members that have a payload, this one's too.
      own: this member's place, and its payload.
      chunk_bytes: of a piece; the last one of a payload may be shorter.
      silence_s: how long a member may be silent; infinite where nobody brings anything.
      now: when this begins.
    """

    def __init__(
        self, senders: Collection[int], own: tuple[int, Array], *, chunk_bytes: int, silence_s: float, now: float
    ) -> None:
        self.nbytes = own[1].size
        """Bytes of each payload."""
        self._chunk_bytes = chunk_bytes
        self._silence_s = silence_s
        self._heard_at = dict.fromkeys(senders, now)
        self._buffers: dict[int, Array] = {}
        self._missing: dict[int, set[int]] = {}  # where the pieces begin that have not come, of those that came in part
        self.whole: dict[int, Array] = {own[0]: own[1]}
        """The payloads that are here, uint8 [nbytes] each."""
        self.lost: dict[int, str] = {}
        """Why a member's payload is not waited for any more."""

    @property
    def starts(self) -> range:
        """Places where the pieces of a payload begin."""
        return range(0, self.nbytes, self._chunk_bytes)

    def piece(self, start: int) -> slice:
        """Place of the piece that begins at `start`."""
        return slice(start, min(start + self._chunk_bytes, self.nbytes))

    def is_awaited(self, place: int) -> bool:
        """True if the member's payload may still be brought."""
        return place in self._heard_at and place not in self.whole and place not in self.lost

    def check_untrusted(self, nbytes: int, start: int) -> None:
        """Refuse a call for a piece that payloads of this group do not have.

        Raises:
          RemoteProtocolError: it does not.
        """
        if nbytes != self.nbytes:
            raise RemoteProtocolError(f"payloads of this group have {self.nbytes} bytes, not {nbytes}")
        if start not in self.starts:
            raise RemoteProtocolError(f"no piece of {self._chunk_bytes} bytes begins at {start} of {nbytes}")

    def receive_untrusted(self, place: int, start: int, tensors: Sequence[object], now: float) -> None:
        """Take a piece that a member brings of its payload, of a place that `check_untrusted` has passed.

        Raises:
          RemoteProtocolError: it does not count. Whoever brings something of another form is out.
        """
        if not self.is_awaited(place):
            raise RemoteProtocolError("nothing is expected from you here, or you were too late")
        try:
            piece = bytes_untrusted(tensors, self.piece(start))
        except RemoteProtocolError:
            self.lose(place, BROKE_RULES)
            raise
        missing = self._missing.setdefault(place, set(self.starts))
        if start not in missing:
            raise RemoteProtocolError("this piece came before")
        if place not in self._buffers:
            self._buffers[place] = np.empty(self.nbytes, np.uint8)
        self._buffers[place][self.piece(start)] = piece
        missing.remove(start)
        self._heard_at[place] = now
        if not missing:
            self.take(place, self._buffers[place])

    def take(self, place: int, payload: Array) -> None:
        """Take a whole payload, whoever has brought it."""
        self.whole.setdefault(place, payload)
        self.lost.pop(place, None)
        self._forget(place)

    def lose(self, place: int, why: str) -> None:
        """Wait no longer for a member's payload, unless it is here."""
        if self.is_awaited(place):
            self.lost[place] = why
            self._forget(place)

    def deadline(self, place: int) -> float:
        """Time at which to call `tick` for this member."""
        return self._heard_at[place] + self._silence_s if self.is_awaited(place) else math.inf

    def tick(self, place: int, now: float) -> None:
        """Wait no longer for a member that has been silent long enough."""
        if now >= self.deadline(place):
            self.lose(place, SILENT)

    def _forget(self, place: int) -> None:
        self._missing.pop(place, None)
        self._buffers.pop(place, None)


def bytes_untrusted(tensors: Sequence[object], where: slice) -> Array:
    """Return the bytes that came for a piece.

    Raises:
      RemoteProtocolError: they are not one tensor of as many bytes.
    """
    nbytes = where.stop - where.start
    tensor = tensors[0] if len(tensors) == 1 else None
    if not isinstance(tensor, np.ndarray) or tensor.dtype != np.uint8 or tensor.shape != (nbytes,):
        raise RemoteProtocolError(f"expected one tensor of {nbytes} bytes")
    return tensor
