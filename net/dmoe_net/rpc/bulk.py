"""Bulk: round trips and rates of the paths to peers, and the memory that it may take.

A line is full when bandwidth times round trip of bytes are under way; more only wait in queues. Both factors are
measured as BBR does (Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14(5), 2016): the rate is
the best of recent *delivery rates*, each taken over the life of one call, the round trip is the shortest of recent
answers to small calls. A window of `GAIN` times their product grows by that factor in each round trip as long as it was
too small, and stops by itself when the line is full. One that is too large costs memory, which `MemoryBudget` bounds.
"""

import math
import re
from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from dmoe_net.identity import PeerId

GAIN = 2 / math.log(2)
"""The least factor by which a window doubles in each round trip while it is too small (2.89; BBR's startup gain)."""

DEFAULT_BUDGET_BYTES = 512 * 2**20
"""Carries 10 Gb/s over 100 ms, with `GAIN`, and leaves room for what others bring meanwhile."""

MIN_BUDGET_BYTES = 2**20

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{kind}": base**power
    for power, letter in enumerate("KMGT", 1)
    for kind, base in (("iB", 1024), ("B", 1000))
}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?([KMGT]i?B|B|)", re.ASCII)

_RATE_PERIOD_S = 10.0
"""A delivery rate counts for one to two of these periods: some ten round trips of a long line, as in BBR, or more."""

_ROUND_TRIP_PERIOD_S = 60.0
"""Likewise for round trips. A route seldom changes, and a queue that makes one look long is gone by then."""

_MAX_PATHS = 1024  # peers whose paths are remembered


def bytes_of(size: int | str) -> int:
    """Read a number of bytes, or a text such as "256MiB", "1.5 GiB", "500 MB" (of 1000 kB each) or "1048576".

    Raises:
      ValueError: it is anything else.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise ValueError(f"a size is a number of bytes or a text such as '256MiB', got {size!r:.80}")
    if isinstance(size, int):
        return size
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise ValueError(f"a size is written as 256MiB, 1.5GiB, 500MB or a number of bytes, got {size!r:.80}")
    return int(Fraction(match[1]) * _UNITS[match[2]])


class MemoryBudget:
    """Bytes that may be held for bulk, by all exchanges and downloads that share it.

    It bounds the growth of their windows, so that all go on when it is used up, only slower. Nobody waits here:
    bytes that were refused are asked for again when something has come back.

    Args:
      max_bytes: the bound, at least 1 MiB, as `bytes_of` reads it.

    Raises:
      ValueError: `max_bytes` is anything else.
    """

    def __init__(self, max_bytes: int | str = DEFAULT_BUDGET_BYTES) -> None:
        max_bytes = bytes_of(max_bytes)
        if max_bytes < MIN_BUDGET_BYTES:
            raise ValueError(f"a memory budget has at least {MIN_BUDGET_BYTES} bytes (1 MiB), got {max_bytes}")
        self.max_bytes = max_bytes
        self.used_bytes = 0
        """Bytes reserved now."""
        self.peak_bytes = 0
        """Most bytes that were ever reserved."""

    def reserve(self, nbytes: int) -> bool:
        """Take `nbytes` bytes, all or none; False if they are not to be had. `release` gives them back."""
        if self.used_bytes + nbytes > self.max_bytes:
            return False
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return True

    def release(self, nbytes: int) -> None:
        """Give bytes back."""
        assert 0 <= nbytes <= self.used_bytes, f"{nbytes} bytes come back, {self.used_bytes} are out"
        self.used_bytes -= nbytes


class _Recent:
    """The best of the samples of this period and the one before."""

    __slots__ = ("_before", "_best", "_better", "_period_s", "_since")

    def __init__(self, better: Callable[[float, float], float], period_s: float) -> None:
        self._better, self._period_s = better, period_s
        self._since = -math.inf
        self._best: float | None = None
        self._before: float | None = None

    @property
    def value(self) -> float | None:
        """None before the first sample. An idle path keeps what it has: periods end with samples."""
        if self._best is None or self._before is None:
            return self._best
        return self._better(self._best, self._before)

    def note(self, value: float, now: float) -> None:
        if now - self._since >= self._period_s:
            self._before, self._best, self._since = self._best, value, now
        else:
            self._best = value if self._best is None else self._better(self._best, value)


class Placed(NamedTuple):
    """A call under way, and the state of its path when it was placed."""

    at: float
    answered_bytes: int
    """Bytes of all calls answered by then."""
    answered_at: float
    """Time at which the last of them was answered."""
    answered_placed_at: float
    """Time at which that last one had been placed."""


class Path:
    """The way to one peer and back, as calls have found it. `now` is in seconds of any one clock."""

    def __init__(self) -> None:
        self._num_under_way = 0
        self._answered_bytes = 0
        self._answered_at = self._answered_placed_at = 0.0
        self._rates = _Recent(max, _RATE_PERIOD_S)
        self._round_trips = _Recent(min, _ROUND_TRIP_PERIOD_S)

    @property
    def round_trip_s(self) -> float | None:
        """The shortest of late, seconds; None before the first."""
        return self._round_trips.value

    @property
    def rate(self) -> float:
        """The best delivery rate of late, bytes a second; 0 before the first."""
        return self._rates.value or 0.0

    @property
    def under_way_bytes(self) -> float:
        """Rate times round trip: what fills the line."""
        return self.rate * (self.round_trip_s or 0.0)

    def placed(self, now: float) -> Placed:
        """Note that a bulk call leaves."""
        if not self._num_under_way:  # what was before an idle time says nothing about the line
            self._answered_at = self._answered_placed_at = now
        self._num_under_way += 1
        return Placed(now, self._answered_bytes, self._answered_at, self._answered_placed_at)

    def answered(self, call: Placed, nbytes: int, now: float) -> None:
        """Note that a call was answered; `nbytes` is the larger of what it and its answer carried.

        The delivery rate is the bytes answered since the call was placed, over the time in which they were answered or
        placed, whichever is longer: answers that somebody has held back come together and faster than the line
        carries (draft-cheng-iccrg-delivery-rate-estimation-02, section 3).
        """
        self._num_under_way -= 1
        self._answered_bytes += nbytes
        self._answered_at, self._answered_placed_at = now, call.at
        elapsed_s = max(now - call.answered_at, call.at - call.answered_placed_at)
        if elapsed_s > 0:
            self._rates.note((self._answered_bytes - call.answered_bytes) / elapsed_s, now)

    def failed(self) -> None:
        """Note that a call that was placed comes to nothing."""
        self._num_under_way -= 1

    def note_round_trip(self, seconds: float, now: float) -> None:
        """Note the seconds after which a small call was answered."""
        self._round_trips.note(seconds, now)


class BulkTraffic:
    """Paths by peer, and the budget; None for one of the default size."""

    def __init__(self, budget: MemoryBudget | None = None) -> None:
        self.budget = MemoryBudget() if budget is None else budget
        self.line = Path()
        """All paths together. Its rate is more certain than the sum of theirs; it has no round trip."""
        self._paths: OrderedDict[PeerId, Path] = OrderedDict()

    def path(self, peer_id: PeerId) -> Path:
        """The way to this peer."""
        path = self._paths.pop(peer_id, None) or Path()
        self._paths[peer_id] = path
        if len(self._paths) > _MAX_PATHS:
            self._paths.popitem(last=False)
        return path

    def note_round_trip(self, peer_id: PeerId, seconds: float, now: float) -> None:
        """Note the seconds after which a small call to this peer was answered, if there has been bulk."""
        if (path := self._paths.get(peer_id)) is not None:
            path.note_round_trip(seconds, now)
