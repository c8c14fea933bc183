"""What a peer knows of its line from what has passed it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmoe_net.averaging.line.meter import Answer, BestOfRecent, LineMeter, rate_of
from dmoe_net.averaging.speeds import Speeds


def test_a_rate_by_hand() -> None:
    """Three answers of 100 bytes to peers 0.5 s away, after 1.5, 2.5 and 10.5 s: 200 bytes in 2 s, less later."""
    answers = [Answer(after_s, 100, 0.5) for after_s in (10.5, 1.5, 2.5)]
    assert rate_of(answers, num_placed=3) == 100.0
    # The first one alone is no half of three, nor are two of five.
    assert rate_of(answers[1:2], num_placed=3) is None
    assert rate_of(answers[1:], num_placed=5) is None
    assert rate_of([], num_placed=1) is None


def test_one_that_answers_before_it_has_anything_does_not_decide() -> None:
    """Its answer after no time counts with the next one's: 200 bytes in a second."""
    assert rate_of([Answer(1e-9, 100, 0.0), Answer(1.0, 100, 0.0)], num_placed=4) == 200.0


def test_a_round_trip_that_was_too_long_leaves_an_eighth() -> None:
    """It was measured while the line was busy, perhaps."""
    assert rate_of([Answer(0.8, 100, 5.0)], num_placed=1) == pytest.approx(1000.0)


@given(st.lists(st.tuples(st.floats(0.01, 10.0), st.integers(1, 10**6)), min_size=1, max_size=10))
def test_a_rate_is_what_passed_in_some_time(parts: list[tuple[float, int]]) -> None:
    """Never less than all of it in the whole time, never more than all of it by the moment half had come."""
    answers = [Answer(after_s, nbytes, 0.0) for after_s, nbytes in parts]
    total, times = sum(nbytes for _, nbytes in parts), sorted(after_s for after_s, _ in parts)
    rate = rate_of(answers, num_placed=len(parts))
    assert rate is not None
    assert total / times[-1] * 0.999 <= rate <= total / times[(len(times) - 1) // 2] * 1.001


def test_the_best_of_late_stands_and_is_forgotten() -> None:
    """A line that was slow since, for whatever reason, is not slow for that; after 80 s (and an eighth) it is."""
    kept = BestOfRecent(memory_s=80.0)
    assert kept.best(0.0) is None
    kept.add(5.0, 0.0)
    for now in range(1, 80):
        kept.add(1.0, float(now))
        assert kept.best(float(now)) == 5.0
    assert kept.best(89.9) == 5.0
    assert kept.best(90.0) == 1.0
    assert kept.best(1000.0) is None


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(1, 1e6)), max_size=60))
def test_the_best_is_one_of_the_values_of_its_time(added: list[tuple[float, float]]) -> None:
    """Against all values in a list: what is 80 s old still counts, what is 90 s old does not."""
    kept, values, now = BestOfRecent(memory_s=80.0), list[tuple[float, float]](), 0.0
    for step, value in added:
        now += step
        kept.add(value, now)
        values.append((now, value))
    best = kept.best(now)
    for time, value in values:
        assert time <= now - 80.0 or best is not None
        if time > now - 80.0:
            assert best is not None
            assert value <= best
    assert best is None or best in [value for time, value in values if time > now - 90.0]


def test_what_is_known_is_within_what_may_be_claimed() -> None:
    """A direction of which nothing is known stays unknown; no rate is too large or small to be announced."""
    meter = LineMeter()
    assert meter.speeds(0.0) == Speeds()
    meter.carried(up=1e15, now=1.0)
    assert meter.speeds(1.0) == Speeds(up=1e11)
    meter.carried(up=0.0, down=3.0, now=2.0)
    assert meter.speeds(2.0) == Speeds(up=1e11, down=1e3)
