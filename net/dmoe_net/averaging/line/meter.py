"""What a line has carried: rates from transfers, and the best of the recent ones.

Theory of operation. Whatever passed a line in some time is no more than what the line carries; it may be much less, for
the peer waited, or the other ends were slower, or shared theirs. So every rate is a lower bound, and the best one of
the recent past stands, as in BBR's filter of delivery rates (Cardwell et al., "BBR: congestion-based congestion
control", ACM Queue 2016). It is forgotten after a while, for lines do change.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from dmoe_net.averaging.speeds import BANDWIDTHS_BPS, Speeds

MEMORY_S = 1200.0
"""How long a rate counts, seconds, to an eighth."""

_NUM_SPANS = 8


class Answer(NamedTuple):
    """A transfer that began with all others of its kind, and was answered.

    Attributes:
      after_s: when, seconds after the beginning.
      nbytes: what it carried.
      round_trip_s: to that peer and back without any load, which it took, too.
    """

    after_s: float
    nbytes: int
    round_trip_s: float


def rate_of(answers: Sequence[Answer], *, num_placed: int) -> float | None:
    """Bytes a second that the line carried while transfers to several peers were under way together.

    Up to any answer the line carried all that was answered until then; the best of these rates is taken, so that one
    peer that is slow or silent does not spoil the others'. But no fewer than half of all count: one that answers before
    it can have got anything does not decide.

    Args:
      answers: that came.
      num_placed: transfers that were begun.

    Returns: None if less than half were answered.
    """
    rates, nbytes = [], 0
    for count, answer in enumerate(sorted(answers), 1):
        nbytes += answer.nbytes
        if 2 * count >= num_placed:
            # The round trip was measured at another moment: an eighth of the time stays, whatever it says.
            rates.append(nbytes / max(answer.after_s - answer.round_trip_s, answer.after_s / 8, 1e-6))
    return max(rates, default=None)


class BestOfRecent:
    """The largest of the values that were added of late. Bounded: it keeps one value for each eighth of its memory."""

    def __init__(self, memory_s: float = MEMORY_S) -> None:
        self._span_s = memory_s / _NUM_SPANS
        self._spans: deque[tuple[int, float]] = deque(maxlen=_NUM_SPANS + 1)

    def add(self, value: float, now: float) -> None:
        """Note a value; times do not go back."""
        span = math.floor(now / self._span_s)
        if self._spans and self._spans[-1][0] == span:
            value = max(value, self._spans.pop()[1])
        self._spans.append((span, value))

    def best(self, now: float) -> float | None:
        """The largest; None if there was none of late."""
        oldest = math.floor(now / self._span_s) - _NUM_SPANS
        return max((value for span, value in self._spans if span >= oldest), default=None)


class LineMeter:
    """What is known of this peer's line from all that has passed it."""

    def __init__(self, memory_s: float = MEMORY_S) -> None:
        self._up, self._down = BestOfRecent(memory_s), BestOfRecent(memory_s)

    def carried(self, *, up: float | None = None, down: float | None = None, now: float) -> None:
        """The line has carried so many bytes a second, one way or both."""
        least, most = BANDWIDTHS_BPS
        for kept, rate in ((self._up, up), (self._down, down)):
            if rate is not None and rate > 0:
                kept.add(min(max(rate, least), most), now)

    def speeds(self, now: float) -> Speeds:
        """The best that it carried of late."""
        return Speeds(up=self._up.best(now), down=self._down.best(now))
