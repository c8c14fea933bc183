"""All-Reduce, gossip, PushSum and random groups over a peer axis: by hand, with peers that are absent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.moshpit_averaging.methods import (
    all_reduce_round,
    gossip_round,
    mixing_factor,
    push_sum_round,
    random_groups_round,
)

KEY = jax.random.key(0)


def test_all_reduce_is_all_or_nothing() -> None:
    """The weighted mean for everybody, and nothing for anybody once one is absent."""
    values, weights = jnp.array([1.0, 2.0, 6.0]), jnp.array([1.0, 1.0, 2.0])
    np.testing.assert_allclose(all_reduce_round(values, weights=weights), [3.75] * 3)
    np.testing.assert_array_equal(all_reduce_round(values, alive=jnp.array([True, True, False])), values)


def test_gossip_by_hand() -> None:
    """On a ring of five, of whom the second is absent: means of two, three or whoever is left."""
    values, alive = jnp.array([3.0, jnp.nan, 5.0, 7.0, 9.0]), jnp.array([True, False, True, True, True])
    np.testing.assert_allclose(gossip_round(values, alive=alive), [6.0, jnp.nan, 6.0, 7.0, 19 / 3], rtol=1e-6)


def test_push_sum_by_hand() -> None:
    """Each of five peers sends thirds to the next two in round 0; with the third absent its senders keep more."""
    values, ones = jnp.array([1.0, 2.0, 4.0, 8.0, 16.0]), jnp.ones(5)
    found, weights = push_sum_round(values, ones, round_number=0)
    np.testing.assert_allclose(found, np.array([25, 19, 7, 14, 28]) / 3, rtol=1e-6)
    np.testing.assert_allclose(weights, ones, rtol=1e-6)
    alive = jnp.array([True, True, False, True, True])
    found, weights = push_sum_round(values, ones, round_number=0, alive=alive)
    # Shares: 1/2 to self and to the next (0, 1 and its second next, 3), thirds from 3 and 4.
    np.testing.assert_allclose(
        weights, [1 / 2 + 1 / 3 + 1 / 3, 1 / 2 + 1 / 2 + 1 / 3, 1, 1 / 2 + 1 / 3, 2 / 3], rtol=1e-6
    )
    sums = np.array([1 / 2 + 8 / 3 + 16 / 3, 1 / 2 + 1 + 16 / 3, 4, 1 + 8 / 3, 8 / 3 + 16 / 3])
    np.testing.assert_allclose(found, sums / weights, rtol=1e-6)


def test_push_sum_finds_the_mean_however_peers_fail() -> None:
    """Sums of values and weights never change, and what is left is the mean of all, not of those who were lucky."""
    values = jax.random.normal(KEY, (20, 2))
    tree, weights = {"a": values}, jnp.ones(20)
    alive = jax.random.uniform(jax.random.key(1), (60, 20)) > 0.2
    step = jax.jit(
        lambda tree, weights, number: push_sum_round(tree, weights, round_number=number, alive=alive[number])
    )
    for number in range(60):
        tree, weights = step(tree, weights, number)
        held = np.asarray(tree["a"]) * np.asarray(weights)[:, None]
        np.testing.assert_allclose(held.sum(axis=0), np.asarray(values).sum(axis=0), atol=1e-4)
        assert float(np.asarray(weights).sum()) == pytest.approx(20, rel=1e-5)
    np.testing.assert_allclose(tree["a"], np.broadcast_to(values.mean(axis=0), (20, 2)), atol=1e-3)


def test_random_groups_split_those_who_are_there() -> None:
    """22 present peers in groups of 5: four groups, the two left over join two of them; absent peers keep theirs."""
    values, alive = jnp.arange(25.0), jnp.arange(25) >= 3
    found = random_groups_round(values, key=KEY, group_size=5, alive=alive)
    np.testing.assert_array_equal(found[:3], values[:3])
    _, sizes = np.unique(np.asarray(found[3:]).round(4), return_counts=True)
    assert sorted(sizes) == [5, 5, 6, 6]
    assert float(found.sum()) == pytest.approx(float(values.sum()), rel=1e-6)
    other = random_groups_round(values, key=jax.random.key(1), group_size=5, alive=alive)
    assert not np.allclose(other, found)


def test_random_groups_that_skip() -> None:
    """One of five groups of five keeps its values if one peer is absent; fewer peers than a group are one."""
    values, alive = jnp.arange(25.0), jnp.arange(25) != 7
    found = random_groups_round(values, key=KEY, group_size=5, alive=alive, failure_rule="group_skips")
    assert int((found == values).sum()) == 5
    assert found[7] == 7
    np.testing.assert_allclose(random_groups_round(values[:3], key=KEY, group_size=5), [1.0] * 3)
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        random_groups_round(values, key=KEY, group_size=0)


def test_mixing_factor_by_hand() -> None:
    """(32 - 1)/1024 + 32/1024^2, which is 31/1023 of the exact split to 1 in a million."""
    assert mixing_factor(1024, 32) == pytest.approx(0.030304, abs=1e-6)
    assert mixing_factor(1024, 32) == pytest.approx(31 / 1023, rel=1e-4)
