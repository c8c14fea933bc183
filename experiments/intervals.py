"""Means over a few seeds with their 95 % intervals, after Student's t, and what remains of many comparisons."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit

from dmoe_jax.runs.report import format_value


class Interval(NamedTuple):
    """The mean of so many values, and the ends of its 95 % interval; None for a single value, of unknown spread."""

    mean: float
    low: float | None
    high: float | None
    num_values: int

    @property
    def ends(self) -> tuple[float, float] | None:
        """The interval."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def __str__(self) -> str:
        ends = "" if self.ends is None else " ({} to {})".format(*map(format_value, self.ends))
        return format_value(self.mean) + ends

    @property
    def p_value(self) -> float:
        """Probability of a mean at least so far from 0 where the true mean is 0; 1 for a single value."""
        if self.high is None:
            return 1.0
        error = (self.high - self.mean) / t_point(self.num_values - 1)
        return 2 * float(stdtr(self.num_values - 1, -abs(self.mean) / error)) if error else float(self.mean == 0)


def t_point(degrees: int) -> float:
    """The 97.5 % point of Student's t."""
    return float(stdtrit(degrees, 0.975))


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


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number: those at most 0.05 afterwards hold together at 95 % (Holm, 1979)."""
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = least
    return adjusted
