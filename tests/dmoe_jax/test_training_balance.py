"""Balance of the load of experts: numbers derived by hand, and properties of any load."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmoe_jax.training.balance import Balance, balance, mean_balance
from dmoe_jax.training.engine import Totals

UIDS = ("a.0", "a.1", "a.2", "a.3")


def balance_of(samples: list[int] | tuple[int, ...]) -> Balance:
    """Balance of the experts a.0, a.1 ... from the beginning of a run."""
    load = {f"a.{index}": count for index, count in enumerate(samples)}
    return balance(list(load), Totals(load=load), Totals())


@pytest.mark.parametrize(
    ("load", "cv", "entropy", "dead"),
    [
        ((5, 5, 5, 5), 0.0, 1.0, 0),
        # Mean 1, deviations 3, -1, -1, -1: sqrt((9 + 1 + 1 + 1) / 4) = sqrt(3).
        ((4, 0, 0, 0), math.sqrt(3), 0.0, 3),
        # Two of four share everything: log 2 / log 4; deviations are all 1 around the mean 1.
        ((2, 2, 0, 0), 1.0, 0.5, 2),
        # Mean 2, deviations 4, -1, -1, -2: sqrt(22 / 4) / 2; -(3/4 ln 3/4 + 2/8 ln 1/8) / ln 4.
        ((6, 1, 1, 0), math.sqrt(5.5) / 2, -(0.75 * math.log(0.75) + 0.25 * math.log(0.125)) / math.log(4), 1),
    ],
)
def test_balance_by_hand(load: tuple[int, ...], cv: float, entropy: float, dead: int) -> None:
    """Coefficient of variation, normalised entropy and dead experts of small loads."""
    found = balance_of(load)
    assert found.histogram == load
    assert found.cv == pytest.approx(cv)
    assert found.entropy == pytest.approx(entropy)
    assert math.copysign(1.0, found.entropy or 0.0) == 1.0
    assert found.dead == dead


def test_balance_of_a_window() -> None:
    """Only growth counts; experts that were never called count 0, those of other layers not at all."""
    before = Totals(load={"a.0": 10, "a.1": 3}, calls_ok=5, failures={"late": 1})
    totals = Totals(load={"a.0": 10, "a.1": 7, "a.2": 4, "b.0": 99}, calls_ok=11, failures={"late": 2, "timeout": 1})
    found = balance(UIDS, totals, before)
    assert found == Balance(histogram=(0, 4, 4, 0), cv=1.0, entropy=0.5, dead=2, share_lost=0.25)


def test_nothing_happened() -> None:
    """Without a sample or a call there is no figure, and every expert is dead; one alone is always even."""
    totals = Totals(load={"a.0": 5})
    assert balance(UIDS, totals, totals) == Balance(
        histogram=(0, 0, 0, 0), cv=None, entropy=None, dead=4, share_lost=None
    )
    assert balance_of([5]) == Balance(histogram=(5,), cv=0.0, entropy=1.0, dead=0, share_lost=None)


def test_mean_by_hand() -> None:
    """The mean of layers leaves out what is not known; dead experts are counted together."""
    even, unknown = balance_of([3, 1]), balance_of([0, 0])
    expected = {"load_cv": 0.5, "load_entropy": even.entropy, "dead_experts": 2, "share_lost": None}
    assert mean_balance([even, unknown]) == pytest.approx(expected)
    assert mean_balance([]) == {"load_cv": None, "load_entropy": None, "dead_experts": 0, "share_lost": None}


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=64).filter(any), st.integers(2, 1000), st.randoms())
def test_balance_of_any_load(samples: list[int], factor: int, rng: random.Random) -> None:
    """Figures stay in their ranges; neither the order of experts nor the number of samples matters, only shares."""
    found = balance_of(samples)
    assert found.cv is not None
    assert found.entropy is not None
    assert 0 <= found.cv <= math.sqrt(len(samples) - 1) * (1 + 1e-12)
    assert 0 <= found.entropy <= 1
    assert found.dead == samples.count(0)
    shuffled = [factor * count for count in samples]
    rng.shuffle(shuffled)
    other = balance_of(shuffled)
    assert other.cv == pytest.approx(found.cv, abs=1e-9)
    assert other.entropy == pytest.approx(found.entropy, abs=1e-9)
