"""Masks that belong to a sample's key: their statistics, and that nothing but the key decides them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax.checks import check_rates
from dmoe_jax.experts.dropout import dropout, locked_dropout, row_keys, row_keys_of_seed

BOTH = pytest.mark.parametrize("drop", [dropout, locked_dropout])
RATE = 0.3


def make_keys(rows, seed=0):
    return np.random.default_rng(seed).integers(1, 2**32, (rows, 2), dtype=np.uint32)


def make_x(rows, seed=1):
    """[rows, 5, 2, 4] without a zero."""
    return jnp.asarray(np.random.default_rng(seed).uniform(1, 2, (rows, 5, 2, 4)), jnp.float32)


@BOTH
def test_nothing_is_dropped_without_a_rate_or_a_key(drop):
    """Then no mask is computed; zero key data leaves its row as it is, to the bit, beside rows that are dropped."""
    x, keys = make_x(3), make_keys(3)
    assert drop(x, 0.0, keys) is x
    assert drop(x, RATE, None) is x
    assert drop(x.astype(jnp.bfloat16), RATE, keys).dtype == jnp.bfloat16
    keys[1] = 0
    dropped = np.asarray(drop(x, RATE, keys))
    np.testing.assert_array_equal(dropped[1], x[1])
    assert (dropped[0] == 0).any()
    assert (dropped[2] == 0).any()


@BOTH
def test_the_mean_over_keys_is_the_input(drop):
    """Elements are 0 or x / (1 - rate), and average to x within 5 standard errors over 4,000 keys."""
    rows = 4000
    x = jnp.broadcast_to(make_x(1), (rows, 5, 2, 4))
    dropped = np.asarray(drop(x, RATE, make_keys(rows)))
    kept = dropped != 0
    np.testing.assert_allclose(dropped[kept], (np.asarray(x) / (1 - RATE))[kept], rtol=1e-6)
    error = np.sqrt(RATE / (1 - RATE) / rows)  # standard error of the mean of x * Bernoulli / (1 - rate), over x
    assert np.abs(dropped.mean(axis=0) / np.asarray(x[0]) - 1).max() < 5 * error


def test_a_locked_mask_is_constant_over_time():
    """A sample lacks the same features at all positions, another one others; else each element has its chance."""
    free, dropped = (np.asarray(drop(make_x(20), 0.5, make_keys(20))) == 0 for drop in (dropout, locked_dropout))
    assert (free != free[:, :1]).any()
    np.testing.assert_array_equal(dropped, np.broadcast_to(dropped[:, :1], dropped.shape))
    assert len(np.unique(dropped[:, 0].reshape(20, -1), axis=0)) > 10


@BOTH
def test_a_mask_does_not_depend_on_the_batch(drop):
    """Alone, permuted, padded with zeros or vmapped: a sample's own key decides."""
    x, keys = make_x(4), make_keys(4)
    whole = np.asarray(drop(x, RATE, keys))
    order = np.array([2, 0, 3, 1])
    np.testing.assert_array_equal(drop(x[order], RATE, keys[order]), whole[order])
    np.testing.assert_array_equal(drop(x[2:3], RATE, keys[2:3]), whole[2:3])
    padded = drop(jnp.pad(x, ((0, 3), (0, 0), (0, 0), (0, 0))), RATE, np.pad(keys, ((0, 3), (0, 0))))
    np.testing.assert_array_equal(padded[:4], whole)
    mapped = jax.vmap(lambda row, key: drop(row[None], RATE, key[None])[0])(x, jnp.asarray(keys))
    np.testing.assert_array_equal(mapped, whole)


@BOTH
def test_sites_drop_independently(drop):
    """With one key, what two sites drop overlaps by chance alone: 0.25 of all at rate 0.5."""
    x, keys = jnp.ones((500, 5, 8)), make_keys(500)
    first, second = (np.asarray(drop(x, 0.5, keys, site=site)) == 0 for site in (0, 1))
    assert abs((first & second).mean() - 0.25) < 0.03


def test_rows_get_keys_of_their_own():
    """Distinct for each row, other ones for another key, and never the zeros of evaluation."""
    first, second = (np.asarray(row_keys(key, 50)) for key in make_keys(2))
    assert first.shape == (50, 2)
    assert len(np.unique(np.concatenate([first, second]), axis=0)) == 100
    assert first.any(axis=1).all()


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan"), True, "0.1"])
def test_rates_that_are_no_probability_are_refused(rate):
    with pytest.raises(ValueError, match=f"dropout must be a probability of at least 0 and below 1, got {rate!r}"):
        check_rates(dropout=rate)


def split_mix(value):
    """SplitMix64's output function in plain integers (Steele et al. 2014, figure 17 with java.util's constants)."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def test_keys_of_a_seed_are_what_every_node_derives():
    """By their definition in plain integers; a prefix of more rows; other rows and other seeds have other keys."""
    for seed in (0, 1, 2**63 - 1):
        keys = row_keys_of_seed(seed, 5)
        assert (keys.dtype, keys.shape) == (np.uint32, (5, 2))
        for row in range(5):
            word = split_mix((split_mix(seed) + row) % 2**64)
            assert tuple(keys[row].tolist()) == (word >> 32, word % 2**32)
        np.testing.assert_array_equal(row_keys_of_seed(seed, 2), keys[:2])
    many = np.concatenate([row_keys_of_seed(seed, 100) for seed in range(100)])
    assert len({tuple(key) for key in many.tolist()}) == 10_000
    assert many.any(axis=1).all()  # zeros would mean evaluation
    for seed in (-1, 2**63):
        with pytest.raises(ValueError, match=r"from 0 to 2\*\*63 - 1, got"):
            row_keys_of_seed(seed, 1)
