"""Figures of a node's batches: what was run, and how long it takes."""

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field, fields

_NEWEST = 0.2
"""Weight of the newest time in the mean: of the last five, about."""


@dataclass(slots=True)
class BatchCounts:
    """What was run since the start; everything here only grows."""

    batches: int = 0
    """Batches that were computed."""
    failed: int = 0
    """Requests whose batch raised."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Requests whose update was not finite, by `UpdateRejected.reason`."""
    busy_s: float = 0.0
    """Seconds in which the device worked on batches, see `Device.busy_s`; rejected ones too."""
    answered: int = 0
    """Requests that were computed."""
    rows: int = 0
    """Their rows."""
    call_s: float = 0.0
    """Seconds that they spent here in all, waiting and computed."""

    def __add__(self, other: "BatchCounts") -> "BatchCounts":
        return BatchCounts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


class BatchTimes:
    """Seconds that batches take, by what decides it: a mean in which older ones fade."""

    def __init__(self) -> None:
        self._seconds: dict[Hashable, float] = {}

    def expected_s(self, kind: Hashable) -> float:
        """Seconds that a batch of this kind will take; infinite if there was none."""
        return self._seconds.get(kind, math.inf)

    def note(self, kind: Hashable, seconds: float) -> None:
        """A batch of this kind took so long."""
        before = self._seconds.get(kind, seconds)
        self._seconds[kind] = before + _NEWEST * (seconds - before)
