"""Means of a few values and their intervals."""

import pytest
from scipy import stats

from experiments.intervals import Interval, paired_difference, t_interval, t_point


@pytest.mark.parametrize("degrees", [*range(1, 32), 40, 60, 100, 1000])
def test_points_of_students_t(degrees: int) -> None:
    """Those of SciPy, to a thousandth."""
    assert t_point(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), abs=1e-3)


def test_an_interval_by_hand() -> None:
    """1, 2 and 6: mean 3, deviation sqrt(7), so 3 +- 4.303 * sqrt(7 / 3). One value has none, no value is a mistake."""
    found = t_interval([1.0, 2.0, 6.0])
    assert found.ends == pytest.approx((3 - 6.573, 3 + 6.573), abs=1e-3)
    assert (found.mean, found.num_values) == (3.0, 3)
    assert t_interval([5.0]) == Interval(5.0, None, None, 1)
    with pytest.raises(ValueError, match="one value at least"):
        t_interval([])


def test_differences_are_of_the_same_seed() -> None:
    """Effects of a shared seed cancel: 10 - 11 and 20 - 21. Sides of zero are told; equal differences have no width."""
    found = paired_difference({0: 10.0, 1: 20.0, 5: 7.0}, {0: 11.0, 1: 21.0, 6: 0.0})
    assert found == Interval(-1.0, -1.0, -1.0, 2)
    assert (found.is_below_zero, found.is_above_zero) == (True, False)
    assert paired_difference({0: 1.0}, {1: 1.0}) is None
    assert not t_interval([-5.0]).is_below_zero
