"""Several batches in one turn of the device.

The way to the device's thread and back costs about as much as a small batch. So a turn takes as many batches, of
different experts, as are worth it: XLA begins them all, and only then the thread waits for the first. How long a batch
takes is known from those of its size before it; one of an unknown size ends its turn.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

Begin = Callable[[], Callable[[], Sequence[Any]]]
"""Has XLA begin a program, which carries out one batch or several; what it returns waits for it, and returns what
became of each batch."""

_NEWEST = 0.2
"""Weight of the newest time in the mean: of the last five, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a program.

    Attributes:
      results: what its `Begin` says of each batch; none if it failed.
      error: why it failed; None: it did not.
      seconds: its share of the turn.
    """

    results: Sequence[Any] = ()
    error: Exception | None = None
    seconds: float


def run_turn(programs: Sequence[Begin], clock: Callable[[], float]) -> list[Outcome]:
    """Begin all programs, then wait for one after the other. What one of them raises concerns that one alone.

    The seconds of a program, by `clock`, are those from the end of the one before it: their sum is that of the turn.
    """
    since = clock()
    begun = [_tried(begin) for begin in programs]
    outcomes = []
    for finish in begun:
        results = finish if isinstance(finish, Exception) else _tried(finish)
        now = clock()
        if isinstance(results, Exception):
            outcomes.append(Outcome(error=results, seconds=now - since))
        else:
            outcomes.append(Outcome(results=results, seconds=now - since))
        since = now
    return outcomes


class BatchTimes:
    """How long batches take, by what decides it: a mean in which older ones fade."""

    def __init__(self) -> None:
        self._seconds: dict[Hashable, float] = {}

    def expected_s(self, kind: Hashable) -> float:
        """Seconds that a batch of this kind will take; infinite if there was none."""
        return self._seconds.get(kind, math.inf)

    def note(self, kind: Hashable, seconds: float) -> None:
        """A batch of this kind took so long."""
        before = self._seconds.get(kind, seconds)
        self._seconds[kind] = before + _NEWEST * (seconds - before)


def _tried(function: Callable[[], T]) -> T | Exception:
    """What a function returns, or the exception that it raised."""
    try:
        return function()
    except Exception as error:
        return error
