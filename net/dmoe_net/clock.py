"""The swarm's common time.

Times of issue in the DHT, and the moments at which averages begin, are absolute times that many machines must agree on.
`SwarmClock` starts at the wall clock of the machine and follows the median of the peers that answered of late, of at
least three; one that knows fewer follows the peers that it joined through, whom its user chose. A few strangers whose
clocks are wrong, or who lie, move no median. `skew_s` and `astray` tell how far clocks differ.

In virtual time it is trio's clock, which is one for all.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import trio

from dmoe_net.identity import PeerId

_log = logging.getLogger(__name__)

FOLLOWED_S = 0.5
"""Seconds that a clock may differ from those it follows before it is set, beyond the error of the measurement."""

STEPPED_S = 10.0
"""Seconds; a clock that differs by more, or has not followed any yet, is set at once. Else it is slewed, so that no
moment comes twice and none is left out."""

SLEW = 0.1
"""Seconds by which a clock that is slewed gains or loses each second."""

_SAID_AGAIN_S = 600.0
_FEWEST = 3  # peers whose median is followed whoever they are

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
        self._slew_s, self._slewed_from = 0.0, -math.inf  # still to be gained, as of then
        self._has_followed = False
        self._guides: dict[PeerId, None] = {}
        self._said: dict[str, float] = {}
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
        ticks = self.ticks()
        return ticks + (self._offset(ticks) if self._slew_s else self._offset_s)

    def advance(self, seconds: float) -> None:
        """Set the clock ahead, or back by a negative number of seconds."""
        self._offset_s, self._slew_s = self._offset(self.ticks()) + seconds, 0.0

    def _offset(self, ticks: float) -> float:
        """Swarm time less ticks, with what a slew has brought by now."""
        gained_s = SLEW * (ticks - self._slewed_from) if self._slew_s else 0.0
        return self._offset_s + math.copysign(min(abs(self._slew_s), gained_s), self._slew_s)

    def read(self, peer_id: PeerId, theirs: float, *, asked_at: float) -> None:
        """Note the swarm time of a peer's answer; `asked_at` is `ticks()` when it was asked."""
        now = self.ticks()
        self._readings.pop(peer_id, None)
        self._readings[peer_id] = _Reading(theirs - (asked_at + now) / 2, (now - asked_at) / 2, now)
        if len(self._readings) > _MAX_READINGS:
            del self._readings[next(iter(self._readings))]

    def follow(self, guides: Iterable[PeerId] = ()) -> None:
        """Follow the median time of the peers that answered of late, if it differs by too much.

        Args:
          guides: peers that this one joined through, beside those that were named before. They are followed while fewer
            than three others have answered, and without them nobody sets the clock by more than `STEPPED_S`.
        """
        self._guides = dict(list({**self._guides, **dict.fromkeys(guides)}.items())[-_MAX_READINGS:])
        oldest = self.ticks() - _READING_LIFE_S
        self._readings = {peer_id: read for peer_id, read in self._readings.items() if read.read_at >= oldest}
        recent = self._recent()
        known = {peer_id: recent[peer_id] for peer_id in self._guides if peer_id in recent}
        followed = known if len(recent) < _FEWEST or (known and not self._has_followed) else recent
        if not followed:
            return
        ahead_s, error_s = _middle(followed)
        is_first, self._has_followed = not self._has_followed, True
        if abs(ahead_s) - error_s <= FOLLOWED_S:
            return
        where = "behind" if ahead_s > 0 else "ahead of"
        whose = "the peer that this one joined through" if len(followed) == 1 else f"{len(followed)} peers of the swarm"
        if not is_first and abs(ahead_s) <= STEPPED_S:
            ticks = self.ticks()
            self._offset_s, self._slew_s, self._slewed_from = self._offset(ticks), ahead_s, ticks
            self._say("your clock is %.1f s %s that of %s, and is moved slowly", abs(ahead_s), where, whose)
        elif is_first or abs(_middle(known)[0] - ahead_s) <= STEPPED_S:
            self.advance(ahead_s)
            self._say("your clock is %.0f s %s that of %s, which is followed", abs(ahead_s), where, whose)
        else:
            self._say(
                "this clock is %.0f s %s those of %s, which are not followed: the peers that this one joined through "
                "do not agree",
                abs(ahead_s),
                where,
                whose,
            )

    def _say(self, text: str, *values: object) -> None:
        """Warn, of each thing once in ten minutes."""
        now = self.ticks()
        if now >= self._said.get(text, -math.inf) + _SAID_AGAIN_S:
            self._said[text] = now
            _log.warning(f"{text}; set the clocks of the machines by NTP", *values)

    def refused(self, ahead_s: float) -> None:
        """Warn that a peer does not take what this one issues: its times are `ahead_s` seconds ahead of the peer's."""
        where = "ahead of" if ahead_s > 0 else "behind"
        self._say("a peer takes no entries of this one: your clock is %.0f s %s its own", abs(ahead_s), where)

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
        offset_s = self._offset(self.ticks())
        return {peer_id: (read.offset_s - offset_s, read.error_s) for peer_id, read in recent}

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


def _middle(readings: Mapping[PeerId, tuple[float, float]]) -> tuple[float, float]:
    """The lower median of seconds ahead, with its error; infinity if there are none."""
    return sorted(readings.values())[(len(readings) - 1) // 2] if readings else (math.inf, 0.0)
