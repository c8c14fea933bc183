"""Several batches in one turn of the device.

The way to the device's thread and back costs about as much as a small batch. So a turn takes as many batches, of
different experts, as are worth it: XLA begins them all, and only then the thread waits for the first. How long a batch
takes is known from those of its size before it; one of an unknown size ends its turn.

On a CPU, XLA runs what one thread has begun one after the other, and no program fills all cores all the time; what
several threads have begun runs at the same time. So several of them begin the programs of a turn.
"""

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

Begin = Callable[[], Callable[[], Sequence[Any]]]
"""Has XLA begin a program, which carries out one batch or several; what it returns waits for it, and returns what
became of each batch."""

_NEWEST = 0.2
"""Weight of the newest time in the mean: of the last five, about."""


@dataclass(frozen=True, slots=True)
class Program:
    """One of a turn."""

    begin: Begin
    """Begins it."""
    may_overlap: bool = False
    """Whether it may run at the same time as others that may."""
    expected_s: float = 0.0
    """About how long it will take, seconds; infinite if nobody knows."""


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


def run_turn(programs: Sequence[Program], clock: Callable[[], float], threads: int = 1) -> list[Outcome]:
    """Begin all programs, then wait for one after the other. What one of them raises concerns that one alone.

    The seconds of a program, by `clock`, are those from the end of the one before it: their sum is that of the turn.

    Args:
      programs: of different experts.
      clock: seconds.
      threads: so many begin those that may overlap, this one included; each begins about as much.
    """
    return begin_turn(programs, clock, threads)()


def begin_turn(
    programs: Sequence[Program], clock: Callable[[], float], threads: int = 1
) -> Callable[[], list[Outcome]]:
    """The first half of `run_turn`, with its arguments; it returns the second one, which waits."""
    since = clock()
    begun = _begun(programs, threads)

    def finish() -> list[Outcome]:
        outcomes, before = [], since
        for each in begun:
            results = each if isinstance(each, Exception) else _tried(each)
            now = clock()
            if isinstance(results, Exception):
                outcomes.append(Outcome(error=results, seconds=now - before))
            else:
                outcomes.append(Outcome(results=results, seconds=now - before))
            before = now
        return outcomes

    return finish


def raise_failed(outcomes: Sequence[Outcome]) -> None:
    """Raise the first error of a program or of one of its batches, if there is one: for turns that nobody asked for."""
    for outcome in outcomes:
        for error in (outcome.error, *outcome.results):
            if isinstance(error, Exception):
                raise error


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


def _begun(programs: Sequence[Program], threads: int) -> list[Callable[[], Sequence[Any]] | Exception]:
    """What waits for each program, or why it did not begin."""
    _, *shares = _shares(programs, threads)
    elsewhere = {index for share in shares for index in share}
    begun: dict[int, Callable[[], Sequence[Any]] | Exception] = {}

    def begin(share: Sequence[int]) -> None:
        for index in share:
            begun[index] = _tried(programs[index].begin)

    waiting = [_helpers(threads - 1).submit(begin, share) for share in shares]
    begin([index for index in range(len(programs)) if index not in elsewhere])
    for each in waiting:
        each.result()
    return [begun[index] for index in range(len(programs))]


def _shares(programs: Sequence[Program], threads: int) -> list[list[int]]:
    """Which of those that may overlap each thread begins: the longest first, by who has least to do."""
    overlapping = [index for index, program in enumerate(programs) if program.may_overlap]
    shares: list[list[int]] = [[] for _ in range(max(1, min(threads, len(overlapping))))]
    seconds = [0.0] * len(shares)
    for index in sorted(overlapping, key=lambda index: -programs[index].expected_s):
        # Of those with as little the one that begins fewest: nobody may know how long anything takes.
        number = min(range(len(shares)), key=lambda number: (seconds[number], len(shares[number])))
        shares[number].append(index)
        seconds[number] += programs[index].expected_s
    return shares


@functools.cache
def _helpers(count: int) -> ThreadPoolExecutor:
    """Threads that begin programs, for all devices of this process."""
    return ThreadPoolExecutor(count, thread_name_prefix="begins programs")


def _tried(function: Callable[[], T]) -> T | Exception:
    """What a function returns, or the exception that it raised."""
    try:
        return function()
    except Exception as error:
        return error
