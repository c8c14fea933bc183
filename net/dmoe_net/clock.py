"""The swarm's common time.

Expirations in the DHT, and the moments at which averages begin, are absolute times that many machines must agree on.
`SwarmClock` starts at the wall clock of the machine, and follows the peers that this one joined through, whom its user
chose. Strangers move no clock; `skew_s` and `astray` tell how far theirs differ.

In virtual time it is trio's clock, which is one for all and is never moved.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import trio

from dmoe_net.identity import PeerId

_log = logging.getLogger(__name__)

FOLLOWED_S = 1.0
"""Seconds that a clock may differ from those it follows before it is set, beyond the error of the measurement."""

TOLERABLE_S = 3.0
"""Seconds; clocks that differ by more are told of: announcements end too early or too late by as much."""

_MAX_READINGS = 64  # most clocks of others that are remembered
_READING_LIFE_S = 120.0  # a clock that was off may have been set since

# Goes on while the machine is suspended, which trio's clock does not on Linux and macOS.
_UPTIME = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


class _Reading(NamedTuple):
    """Another clock: its distance from our ticks, the error of that, and when it was read."""

    offset_s: float
    error_s: float
    read_at: float


class SwarmClock:
    """Absolute swarm time in seconds. Only usable inside `trio.run`.

    Args:
      start_s: swarm time now.
      ticks: returns seconds since some moment.
    """

    def __init__(self, *, start_s: float, ticks: Callable[[], float] = trio.current_time) -> None:
        self.ticks = ticks
        self._offset_s = start_s - ticks()
        self._readings: dict[PeerId, _Reading] = {}  # from longest to most recently read

    @classmethod
    def wall(cls) -> "SwarmClock":
        """Swarm time for a real node: Unix time now, and steady from here on."""
        clock_id = _UPTIME
        return cls(
            start_s=time.time(), ticks=trio.current_time if clock_id is None else lambda: time.clock_gettime(clock_id)
        )

    @classmethod
    def virtual(cls) -> "SwarmClock":
        """Swarm time for a simulation: trio's clock itself."""
        return cls(start_s=trio.current_time())

    def now(self) -> float:
        """Seconds of swarm time."""
        return self.ticks() + self._offset_s

    def advance(self, seconds: float) -> None:
        """Set the clock ahead, or back by a negative number of seconds."""
        self._offset_s += seconds

    def read(self, peer_id: PeerId, theirs: float, *, asked_at: float) -> None:
        """Note the swarm time of a peer's answer; `asked_at` is `ticks()` when it was asked."""
        now = self.ticks()
        self._readings.pop(peer_id, None)
        self._readings[peer_id] = _Reading(theirs - (asked_at + now) / 2, (now - asked_at) / 2, now)
        if len(self._readings) > _MAX_READINGS:
            del self._readings[next(iter(self._readings))]

    def follow(self, guides: Iterable[PeerId]) -> None:
        """Take over the median time of peers whose clocks were read, if it differs by too much."""
        read = [self._readings[peer_id] for peer_id in guides if peer_id in self._readings]
        if not read:
            return
        middle = sorted(read)[(len(read) - 1) // 2]
        difference = middle.offset_s - self._offset_s
        if abs(difference) - middle.error_s > FOLLOWED_S:
            _log.warning(
                "the clock of the peers that this peer joined through is %.0f s %s this machine's clock, and is "
                "followed; set the clocks of the machines by NTP",
                abs(difference),
                "ahead of" if difference > 0 else "behind",
            )
            self.advance(difference)

    @property
    def skew_s(self) -> float | None:
        """Median of the seconds by which clocks of peers that answered of late are ahead of this one, to within half a
        round trip; None: nobody answered."""
        ahead = [ahead_s for ahead_s, _ in self._recent().values()]
        return statistics.median(ahead) if ahead else None

    def astray(self) -> dict[PeerId, float]:
        """Peers whose clocks differ from this one by more than `TOLERABLE_S` -> seconds by which they are ahead."""
        recent = self._recent().items()
        return {peer_id: ahead_s for peer_id, (ahead_s, error_s) in recent if abs(ahead_s) - error_s > TOLERABLE_S}

    def _recent(self) -> dict[PeerId, tuple[float, float]]:
        """Peers that answered of late -> seconds by which their clocks are ahead, and the error of that."""
        oldest = self.ticks() - _READING_LIFE_S
        recent = ((peer_id, read) for peer_id, read in self._readings.items() if read.read_at >= oldest)
        return {peer_id: (read.offset_s - self._offset_s, read.error_s) for peer_id, read in recent}

    def doubts(self) -> str:
        """A clause that names the peer whose clock differs most, for a message; "" if all clocks agree."""
        if not (astray := self.astray()):
            return ""
        peer_id, ahead_s = max(astray.items(), key=lambda each: abs(each[1]))
        return (
            f"the clock of peer {peer_id.short} is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this "
            f"one ({len(astray)} of {len(self._readings)} peers are off), so that announcements end too early or too "
            "late; set the clocks of the machines by NTP"
        )
