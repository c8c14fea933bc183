"""Estimates of how much each expert can do, from times of calls: ours and the nodes' own."""

import numpy as np
import pytest

from dmoe_jax.mixture.capacity import LEAST_CAPACITY, MAX_HOSTS, MEMORY_S, CallTimes, grid_capacity, relative_to_median
from dmoe_net.identity import Address, Contact, PeerId

HOSTS = [PeerId(bytes([number]) * 32) for number in range(5)]


def _contact(host):
    return Contact(host, Address("127.0.0.1", 1000))


def _note(times, seconds, *, count, methods=("forward", "backward")):
    for _ in range(count):
        for host, value in zip(HOSTS, seconds, strict=True):
            for factor, method in enumerate(methods, start=1):
                times.note(method, host, factor * value, now=0.0)


def test_a_host_is_as_slow_as_its_calls_beside_those_of_the_same_method():
    times = CallTimes()
    _note(times, [1.0, 1.0, 1.0, 1.0, 8.0], count=20)
    slowness = times.slowness(HOSTS, now=0.0)
    np.testing.assert_allclose([slowness[host] for host in HOSTS], [1, 1, 1, 1, 8], rtol=0.05)


def test_it_is_noticed_in_few_calls_that_a_host_is_slow_and_that_it_has_recovered():
    times = CallTimes()
    _note(times, [1.0] * 5, count=20)
    _note(times, [1.0] * 4 + [10.0], count=3)
    assert times.slowness(HOSTS, now=0.0)[HOSTS[4]] > 5
    _note(times, [1.0] * 5, count=3)
    assert times.slowness(HOSTS, now=0.0)[HOSTS[4]] < 1.6


def test_what_was_long_ago_says_nothing():
    times = CallTimes()
    _note(times, [1.0] * 4 + [10.0], count=5)
    now = MEMORY_S + 1
    assert times.slowness(HOSTS, now) == {}
    times.note("forward", HOSTS[4], 1.0, now)
    times.note("forward", HOSTS[0], 1.0, now)
    assert times.slowness(HOSTS, now)[HOSTS[4]] == pytest.approx(1.0, rel=0.2)


def test_calls_that_take_no_time_are_all_alike_and_memory_is_bounded():
    times = CallTimes()
    _note(times, [0.0] * 5, count=2)
    assert set(times.slowness(HOSTS, now=0.0).values()) == {1.0}
    for number in range(MAX_HOSTS + 10):
        times.note("forward", PeerId(number.to_bytes(32, "big")), 1.0, now=0.0)
    assert times.slowness([HOSTS[1]], now=0.0) == {}


def test_median_is_the_measure():
    found = relative_to_median(dict(zip(HOSTS[:3], [1.0, 2.0, 8.0], strict=True)))
    assert found == dict(zip(HOSTS[:3], [0.5, 1.0, 4.0], strict=True))
    assert relative_to_median({}) == relative_to_median({HOSTS[0]: 0.0}) == {}


def test_capacity_is_nought_for_the_dead_and_never_for_the_living():
    living = {(0, 0): _contact(HOSTS[0]), (0, 1): _contact(HOSTS[1]), (1, 2): _contact(HOSTS[2])}
    capacity = grid_capacity(living, (2, 3), {HOSTS[0]: 0.5, HOSTS[1]: 4.0, HOSTS[2]: 1e9})
    np.testing.assert_allclose(capacity, [[1, 0.25, 0], [0, 0, LEAST_CAPACITY]], rtol=1e-6)
