"""Means of a few values and their intervals."""

import pytest
from scipy import stats

from experiments.intervals import Interval, holm, paired_difference, t_interval


def test_p_values_and_their_correction() -> None:
    """SciPy's of a paired test; Holm by hand: 3 x 0.01, then 2 x 0.02 = 0.04, then 0.03, which may not be less."""
    differences = [1.0, 2.0, 6.0]
    assert t_interval(differences).p_value == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)
    assert [t_interval([5.0]).p_value, t_interval([-1.0, -1.0]).p_value, t_interval([0.0, 0.0]).p_value] == [1, 0, 1]
    assert holm([0.02, 0.01, 0.03]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([]) == []


def test_an_interval_by_hand() -> None:
    """1, 2 and 6: mean 3, deviation sqrt(7), so 3 +- 4.303 * sqrt(7 / 3). One value has none, no value is a mistake."""
    found = t_interval([1.0, 2.0, 6.0])
    assert found.ends == pytest.approx((3 - 6.573, 3 + 6.573), abs=1e-3)
    assert (found.mean, found.num_values) == (3.0, 3)
    assert t_interval([5.0]) == Interval(5.0, None, None, 1)
    with pytest.raises(ValueError, match="one value at least"):
        t_interval([])


def test_differences_are_of_the_same_seed() -> None:
    """Effects of a shared seed cancel: 10 - 11 and 20 - 21. Equal differences have no width."""
    found = paired_difference({0: 10.0, 1: 20.0, 5: 7.0}, {0: 11.0, 1: 21.0, 6: 0.0})
    assert found == Interval(-1.0, -1.0, -1.0, 2)
    assert paired_difference({0: 1.0}, {1: 1.0}) is None
