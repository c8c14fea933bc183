"""Shares of an all-reduce by bandwidth."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from net.averaging.reduction.load_balance import peer_fractions, split_by_shares


def slowest(bandwidths: list[float], shares: tuple[float, ...]) -> float:
    """When the last reducer is done, by the model of the module."""
    n = len(bandwidths)
    return max((1 + (n - 2) * f) / b for f, b in zip(shares, bandwidths, strict=True) if b)


def test_equal_peers_reduce_equal_shares() -> None:
    """Also where nobody knows its bandwidth."""
    assert peer_fractions([5e6] * 4) == pytest.approx([0.25] * 4)
    assert peer_fractions([None] * 5) == pytest.approx([0.2] * 5)


def test_a_client_reduces_nothing() -> None:
    """Its share is exactly zero and the others' add up to one; an unknown bandwidth counts as the mean."""
    assert peer_fractions([1e6, 0.0, 1e6]) == (0.5, 0.0, 0.5)
    assert peer_fractions([1e6, None, 3e6]) == pytest.approx(peer_fractions([1e6, 2e6, 3e6]))


def test_the_shares_of_three_peers_by_hand() -> None:
    """With three peers t = (1 + f) / b. Speeds 1, 1, 2: equal ends need 1 + f1 = (1 + f3) / 2, so f1 = 0, f3 = 1."""
    assert peer_fractions([1.0, 1.0, 2.0]) == pytest.approx([0.0, 0.0, 1.0], abs=1e-6)
    # 4, 4, 5: (1 + f1) / 4 = (1 + f3) / 5 and 2 f1 + f3 = 1 give f1 = 3/13, f3 = 7/13.
    assert peer_fractions([4.0, 4.0, 5.0]) == pytest.approx([3 / 13, 3 / 13, 7 / 13])


@given(st.lists(st.floats(1e3, 1e9), min_size=3, max_size=12), st.integers(0, 1000))
def test_no_other_shares_end_earlier(bandwidths: list[float], seed: int) -> None:
    """Neither equal shares, nor shares in proportion to bandwidth, nor random ones (but for shares too small)."""
    best = slowest(bandwidths, peer_fractions(bandwidths))
    others = np.random.default_rng(seed).dirichlet(np.ones(len(bandwidths)), 20)
    rates = np.array(bandwidths) / sum(bandwidths)
    for shares in [*others, rates, np.full(len(rates), 1 / len(rates))]:
        assert best <= slowest(bandwidths, tuple(shares)) * 1.02


def test_peers_that_are_slower_by_orders_reduce_nothing() -> None:
    """A bandwidth that somebody made up costs the others nothing but its own share."""
    assert peer_fractions([1e-300, 1e9, 1e9, 1e9]) == pytest.approx((0.0, 1 / 3, 1 / 3, 1 / 3))
    assert peer_fractions([1e300, 1e9, 1e9]) == (1.0, 0.0, 0.0)


def test_a_slow_sender_does_not_decide_the_others_shares() -> None:
    """Whoever is last whatever it reduces leaves the rest to end together: (1 + 2 f) / b is the same for both."""
    for slow in (1e6, 1e4, 1.0, 0.0):
        shares = peer_fractions([slow, 4e6, 1.7e6, 0.0])
        assert shares[0] == shares[3] == 0.0
        assert (1 + 2 * shares[1]) / 4e6 == pytest.approx((1 + 2 * shares[2]) / 1.7e6)


@given(st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=12))
def test_shares_add_up_whatever_the_bandwidths(bandwidths: list[float]) -> None:
    """No number that a peer may claim makes them anything but fractions, and a faster one never has less."""
    shares = peer_fractions(bandwidths)
    assert sum(shares) == pytest.approx(1)
    assert all(0 <= share <= 1 for share in shares)
    by_speed = [share for _, share in sorted(zip(bandwidths, shares, strict=True))]
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(by_speed))


@pytest.mark.parametrize("bandwidths", [[0.0, 0.0], []])
def test_a_group_in_which_nobody_reduces_is_refused(bandwidths: list[float]) -> None:
    """All are clients, or there is nobody."""
    with pytest.raises(ValueError, match="can reduce"):
        peer_fractions(bandwidths)


@given(st.integers(0, 10**9), st.lists(st.floats(0, 1), min_size=1, max_size=20).filter(lambda f: sum(f) > 0.01))
def test_whole_numbers_add_up(size: int, shares: list[float]) -> None:
    """Each is within one of its exact part, and those with no share get nothing."""
    counts = split_by_shares(size, shares)
    assert sum(counts) == size
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - size * share / sum(shares)) < 1 + 1e-6
        assert share > 0 or count == 0
