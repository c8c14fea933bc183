"""Families of samples as `prometheus_client` writes them, and histograms counted in plain Python."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

SECONDS = tuple(round(mantissa * 10.0**power, 6) for power in range(-4, 2) for mantissa in (1, 2.5, 5))
"""Bounds for times, 0.1 ms to 50 s: a small call on a fast device, and a round of averaging on a slow line."""

POWERS_OF_TWO = tuple(float(1 << power) for power in range(13))
"""Bounds for rows of a batch, 1 to 4096: programs are compiled for powers of two."""

UPDATES = (0.0, *(float(1 << power) for power in range(11)))
"""Bounds for staleness: none, 1, 2, 4 and so on to 1024 updates."""

Number = int | float

Family = Metric
"""All samples of one name."""

Kind = Literal["counter", "gauge", "histogram", "summary"]


class Histogram:
    """Number of values that were at most so large, for ascending inclusive bounds and one bucket without a bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Number of values in each bucket, not cumulative."""
        self.total = 0.0
        """Sum of all values."""

    def observe(self, value: Number) -> None:
        """Count a value. Not-a-number is left out: it would spoil the sum for ever."""
        if not math.isnan(value):
            self.counts[bisect_left(self.bounds, value)] += 1
            self.total += value

    @property
    def count(self) -> int:
        """Number of values so far."""
        return sum(self.counts)

    @property
    def cumulative(self) -> list[tuple[float, int]]:
        """Pairs of an upper bound, the last one infinite, and the number of values at most so large."""
        return list(zip((*self.bounds, math.inf), accumulate(self.counts), strict=True))


@dataclass(frozen=True, slots=True)
class Summary:
    """Number and sum of values: a mean over any time."""

    count: Number
    total: Number


def labelled(
    kind: Kind, name: str, text: str, samples: Iterable[tuple[Mapping[str, str], Number | Histogram | Summary]]
) -> Family:
    """A family of samples with labels of their own.

    Args:
      name: as Prometheus shows it; a counter's ends in `_total`.
      text: the meaning, a sentence with the unit.
      samples: pairs of labels and a value, a `Histogram` or `Summary` where the kind says so.
    """
    family = Metric(name.removesuffix("_total") if kind == "counter" else name, text, kind)
    for labels, value in samples:
        own = dict(labels)
        if isinstance(value, Histogram):
            for bound, count in value.cumulative:
                family.add_sample(f"{name}_bucket", {**own, "le": floatToGoString(bound)}, count)
        if isinstance(value, Histogram | Summary):
            family.add_sample(f"{name}_sum", own, value.total)
            family.add_sample(f"{name}_count", own, value.count)
        else:
            family.add_sample(name, own, value)
    return family


def by_label(
    kind: Kind, name: str, text: str, label: str, values: Mapping[str, Number] | Mapping[str, Histogram]
) -> Family:
    """A sample for each value of one label."""
    return labelled(kind, name, text, (({label: key}, value) for key, value in values.items()))


def counter(name: str, text: str, value: Number) -> Family:
    """One sample without labels of what only grows."""
    return labelled("counter", name, text, [({}, value)])


def gauge(name: str, text: str, value: Number | None) -> Family:
    """One sample without labels of what goes up and down; none where the value is not known now."""
    return labelled("gauge", name, text, [] if value is None else [({}, value)])


def histogram(name: str, text: str, value: Histogram) -> Family:
    """A histogram without labels."""
    return labelled("histogram", name, text, [({}, value)])
