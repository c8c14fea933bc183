"""Auxiliary losses against numbers worked out by hand, and where their gradients flow."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax.routing.losses import cv_squared, importance_loss, load_balancing_loss, load_loss, router_z_loss


def phi(z: float) -> float:
    """The standard normal distribution function."""
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


def index(*rows):
    return jnp.array(rows, jnp.int32)


def test_load_balancing_loss_of_a_hand_made_batch():
    """E sum f P: with f = (3/4, 1/4) and P = (0.6, 0.4) it is 2 (0.45 + 0.1) = 1.1."""
    probs = jnp.array([[0.9, 0.1], [0.8, 0.2], [0.5, 0.5], [0.2, 0.8]])
    loss = load_balancing_loss(probs, index([0], [0], [0], [1]), jnp.ones((4, 1), bool))
    np.testing.assert_allclose(loss, 1.1, rtol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_load_balancing_loss_is_one_when_all_is_even(k):
    """Uniform f and uniform P give 1, whatever the number of slots."""
    probs = jnp.full((4, 4), 0.25)
    chosen = jnp.array([[(row + slot) % 4 for slot in range(k)] for row in range(4)], jnp.int32)
    np.testing.assert_allclose(load_balancing_loss(probs, chosen, jnp.ones((4, k), bool)), 1.0, rtol=1e-6)


def test_load_balancing_loss_counts_answers_only():
    """Slots without an answer count nowhere; f is the share of those that answered."""
    probs = jnp.array([[0.7, 0.3], [0.7, 0.3]])
    mask = jnp.array([[True, False], [True, False]])
    # f = (1, 0), P = (0.7, 0.3): 2 * 0.7
    np.testing.assert_allclose(load_balancing_loss(probs, index([0, 1], [0, 1]), mask), 1.4, rtol=1e-6)
    assert float(load_balancing_loss(probs, index([0, 1], [0, 1]), ~mask & mask)) == 0.0


def test_load_balancing_gradient_flows_through_the_probabilities():
    """d loss / d P[b, i] = E f_i / batch."""
    probs, mask = jnp.full((2, 2), 0.5), jnp.ones((2, 2), bool)
    gradient = jax.grad(load_balancing_loss)(probs, index([0, 0], [0, 1]), mask)  # f = (3/4, 1/4)
    np.testing.assert_allclose(gradient, [[0.75, 0.25]] * 2, rtol=1e-6)


def test_router_z_loss_of_hand_made_logits():
    """Two zeros: (log 2)^2; experts that may not be chosen take no part; the mean is over samples."""
    np.testing.assert_allclose(router_z_loss(jnp.zeros((3, 2))), math.log(2) ** 2, rtol=1e-6)
    np.testing.assert_allclose(router_z_loss(jnp.array([[2.0, -jnp.inf], [0.0, -jnp.inf]])), 2.0, rtol=1e-6)


def test_router_z_loss_of_a_sample_without_experts_is_zero():
    """Nothing but -inf gives 0 and zero gradient, not NaN."""
    value, gradient = jax.value_and_grad(router_z_loss)(jnp.full((2, 3), -jnp.inf))
    assert float(value) == 0.0
    np.testing.assert_array_equal(gradient, np.zeros((2, 3)))


def test_cv_squared_by_hand():
    """(1, 3): variance 1, mean 2, so 1/4; even values and zeros give 0."""
    np.testing.assert_allclose(cv_squared(jnp.array([1.0, 3.0])), 0.25, rtol=1e-6)
    assert float(cv_squared(jnp.full(5, 7.0))) == 0.0
    value, gradient = jax.value_and_grad(cv_squared)(jnp.zeros(4))
    assert float(value) == 0.0
    np.testing.assert_array_equal(gradient, np.zeros(4))


def test_importance_loss_by_hand():
    """Importance (1.5, 0.5, 0): mean 2/3, variance (25 + 1 + 16) / 108 = 7/18, so 7/8."""
    weights = jnp.array([[0.75, 0.25], [0.75, 0.25]])
    loss = importance_loss(weights, index([0, 1], [0, 1]), num_experts=3)
    np.testing.assert_allclose(loss, 7 / 8, rtol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_load_loss_against_its_definition(k):
    """P(x, i) = Phi((clean_i - kth_excluding(noisy, k, i)) / stddev_i), in loops."""
    rng = np.random.default_rng(k)
    clean, noise = rng.normal(size=(5, 4)), rng.normal(size=(5, 4))
    stddev = rng.uniform(0.5, 1.5, size=(5, 4))
    noisy = clean + noise * stddev
    load = np.zeros(4)
    for row in range(5):
        for i in range(4):
            others = sorted((noisy[row, j] for j in range(4) if j != i), reverse=True)
            load[i] += phi((clean[row, i] - others[k - 1]) / stddev[row, i])
    arguments = [jnp.asarray(array, jnp.float32) for array in (clean, noisy, stddev)]
    np.testing.assert_allclose(load_loss(*arguments, k=k), load.var() / load.mean() ** 2, rtol=1e-4)


def test_load_loss_is_zero_when_all_experts_are_chosen():
    """With k = E there is nothing to balance, in value and in gradient."""
    clean, ones = jnp.array([[1.0, 2.0, 3.0]]), jnp.ones((1, 3))
    value, gradient = jax.value_and_grad(lambda z: load_loss(z, z, ones, k=3))(clean)
    assert float(value) == 0.0
    np.testing.assert_array_equal(gradient, np.zeros((1, 3)))


def test_load_loss_pulls_an_overloaded_expert_down():
    """The gradient on the clean logit of the expert with the highest load is positive, on the others' it is not."""
    clean = jnp.array([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    gradient = jax.grad(lambda z: load_loss(z, clean, jnp.ones((2, 3)), k=1))(clean)
    assert (gradient[:, 0] > 0).all()
    assert (gradient[:, 1:] < 0).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_few_bits_count_as_many(dtype: Any) -> None:
    """Three quarters of 8192 samples go to one of four experts, which has 0.997 of their probability, to rounding.

    f = (3/4, 1/4, 0, 0) by hand; bfloat16 cannot count beyond 256, nor float16 beyond 2048, and 1e-10 is 0 in it.
    """
    most = np.arange(8192) % 4 < 3
    logits = np.where(most[:, None], [6.0, 0, -6, -6], [0.0, 6, -6, -6]).astype(np.float32)
    index, mask = np.where(most, 0, 1)[:, None].astype(np.int32), np.ones((8192, 1), bool)
    probs = jax.nn.softmax(logits)
    expected = 4 * (0.75 * probs[:, 0].mean() + 0.25 * probs[:, 1].mean())
    found = load_balancing_loss(jnp.asarray(probs, dtype), jnp.asarray(index), jnp.asarray(mask))
    np.testing.assert_allclose(found, expected, rtol=0.01)
    # Importance 6144 and 2048 of four: mean 2048, variance (4096^2 + 2 * 2048^2) / 4, so CV^2 = 1.5.
    np.testing.assert_allclose(importance_loss(jnp.asarray(mask, dtype), jnp.asarray(index), 4), 1.5, rtol=1e-3)
    assert importance_loss(jnp.zeros((8, 2), dtype), jnp.zeros((8, 2), jnp.int32), 4) == 0
    np.testing.assert_allclose(router_z_loss(jnp.full((2, 1), 300.0, dtype)), 90_000, rtol=0.01)
