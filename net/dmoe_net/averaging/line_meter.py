"""The rates at which a peer's line has carried averages and states, and the best of the recent ones.

Theory of operation. A transfer is never faster than the line; it may be much slower, where the peer waited or the other
ends had slower lines. So every rate is a lower bound, and the best one of the recent past stands, as in BBR's filter of
delivery rates (Cardwell et al., "BBR: congestion-based congestion control", ACM Queue 2016). All members of one group
look as slow as its slowest; a fast peer shows itself in groups without slow ones, which moving groups bring. Rates are
forgotten after a while, for lines change.
"""

import math
from collections import deque

from dmoe_net.averaging.speeds import BANDWIDTHS_BPS, Speeds

MEMORY_S = 1200.0
"""Seconds for which a rate counts, to an eighth."""

_NUM_SPANS = 8


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
    """Bytes a second that this peer's line carries, as far as transfers have shown."""

    def __init__(self, memory_s: float = MEMORY_S) -> None:
        self._up, self._down = BestOfRecent(memory_s), BestOfRecent(memory_s)

    def carried(self, *, up: float | None = None, down: float | None = None, now: float) -> None:
        """Note bytes a second that the line has carried, one way or both."""
        least, most = BANDWIDTHS_BPS
        for kept, rate in ((self._up, up), (self._down, down)):
            if rate is not None and rate > 0:
                kept.add(min(max(rate, least), most), now)

    def speeds(self, now: float) -> Speeds:
        """Return the best rates of late."""
        return Speeds(up=self._up.best(now), down=self._down.best(now))
