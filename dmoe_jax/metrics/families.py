"""Figures as Prometheus knows them: families of samples with labels, and histograms counted in plain Python."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

SECONDS = tuple(round(mantissa * 10.0**power, 6) for power in range(-4, 2) for mantissa in (1, 2.5, 5))
"""Bounds for times, 0.1 ms to 50 s: a small call on a fast device, and a round of averaging on a slow line."""

POWERS_OF_TWO = tuple(float(1 << power) for power in range(13))
"""Bounds for rows of a batch, 1 to 4096: programs are compiled for powers of two."""

UPDATES = (0.0, *(float(1 << power) for power in range(11)))
"""Bounds for staleness: none, 1, 2, 4 and so on to 1024 updates."""

Number = int | float

Kind = Literal["counter", "gauge", "histogram", "summary"]


class Histogram:
    """How many values were at most so large.

    Args:
      bounds: inclusive upper bounds, ascending; a last bucket without a bound follows.

    Raises:
      ValueError: the bounds do not ascend, or there is none.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"expected ascending bounds, got {bounds!r}")
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Values in each bucket, not cumulative."""
        self.total = 0.0
        """Sum of all values."""

    def observe(self, value: Number) -> None:
        """Count a value. Not-a-number is left out: it would spoil the sum for ever."""
        if not math.isnan(value):
            self.counts[bisect_left(self.bounds, value)] += 1
            self.total += value

    @property
    def count(self) -> int:
        """Values so far."""
        return sum(self.counts)

    @property
    def cumulative(self) -> list[tuple[float, int]]:
        """(upper bound, values at most so large), the last one infinite."""
        return list(zip((*self.bounds, math.inf), accumulate(self.counts), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How many values there were, and their sum: a mean over any time."""

    count: Number
    total: Number


@dataclass(frozen=True, slots=True)
class Family:
    """All samples of one name.

    Attributes:
      name: as Prometheus shows it; a counter's ends in `_total`.
      kind: of the samples.
      text: what it means, a sentence with the unit.
      samples: (labels, value) in order; a `Histogram` or `Summary` where the kind says so.
    """

    name: str
    kind: Kind
    text: str
    samples: tuple[tuple[Mapping[str, str], Number | Histogram | Summary], ...] = field(default=())


def counter(name: str, text: str, value: Number) -> Family:
    """What only grows, in one sample without labels."""
    return Family(name, "counter", text, (({}, value),))


def gauge(name: str, text: str, value: Number | None) -> Family:
    """What goes up and down, in one sample without labels; None: it is not known now, and there is no sample."""
    return Family(name, "gauge", text, () if value is None else (({}, value),))


def histogram(name: str, text: str, value: Histogram) -> Family:
    """A histogram without labels."""
    return Family(name, "histogram", text, (({}, value),))


def by_label(
    kind: Kind, name: str, text: str, label: str, values: Mapping[str, Number] | Mapping[str, Histogram]
) -> Family:
    """A sample for each value of one label."""
    return labelled(kind, name, text, (({label: key}, value) for key, value in values.items()))


def labelled(
    kind: Kind, name: str, text: str, samples: Iterable[tuple[Mapping[str, str], Number | Histogram | Summary]]
) -> Family:
    """Samples with labels of their own."""
    return Family(name, kind, text, tuple(samples))
