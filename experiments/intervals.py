"""Means over a few seeds with their 95 % intervals, after Student's t."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

# The 97.5 % points of Student's t with 1, 2, ... degrees of freedom, from any table.
_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


class Interval(NamedTuple):
    """The mean of so many values, and the ends of its 95 % interval; None for a single value, of unknown spread."""

    mean: float
    low: float | None
    high: float | None
    num_values: int

    @property
    def is_below_zero(self) -> bool:
        """True if the whole interval is below 0; False where there is none."""
        return self.high is not None and self.high < 0

    @property
    def is_above_zero(self) -> bool:
        """True if the whole interval is above 0; False where there is none."""
        return self.low is not None and self.low > 0

    @property
    def ends(self) -> tuple[float, float] | None:
        """The interval."""
        return None if self.low is None or self.high is None else (self.low, self.high)


def t_point(degrees: int) -> float:
    """The 97.5 % point of Student's t; beyond 30 degrees of freedom the first terms of its expansion (Fisher)."""
    return _T_975[degrees - 1] if degrees <= len(_T_975) else 1.95996 + 2.3723 / degrees + 2.8225 / degrees**2


def t_interval(values: Sequence[float]) -> Interval:
    """The mean of independent values, at least one, and its 95 % interval with n - 1 degrees of freedom."""
    if not values:
        raise ValueError("expected one value at least, got none")
    array, count = np.asarray(values, float), len(values)
    middle = float(array.mean())
    if count == 1:
        return Interval(middle, None, None, 1)
    reach = t_point(count - 1) * float(array.std(ddof=1)) / count**0.5
    return Interval(middle, middle - reach, middle + reach, count)


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Interval | None:
    """The mean of ours - theirs over the seeds that both have, with its interval; None if they share none."""
    seeds = sorted(ours.keys() & theirs.keys())
    return t_interval([ours[seed] - theirs[seed] for seed in seeds]) if seeds else None
