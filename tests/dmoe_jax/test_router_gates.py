"""Learnt and frozen gates: flat top-k, noisy top-k, Switch, PEER and the frozen gate against their equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax.routing import (
    flat_top_k,
    frozen_random,
    gather_logits,
    masked_softmax,
    noisy_top_k,
    peer,
    product_key,
    score,
    switch,
)
from dmoe_jax.routing.losses import importance_loss, load_balancing_loss, load_loss, router_z_loss

GRID = (2, 3)
X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)


def normalised(x: np.ndarray, epsilon: float) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def noisy_params(seed: int = 0):
    """Parameters of noisy top-k away from its zeros."""
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=(6, 6)) * 0.3, jnp.float32) for name in ("gate", "noise")}


def test_flat_top_k_is_the_product_key_gate_of_a_line():
    """LayerNorm(x) @ keys + bias, one score for each cell, row-major; parameters as those of product_key."""
    router = flat_top_k(GRID)
    params = router.init(jax.random.key(0), 6)
    jax.tree.map(np.testing.assert_array_equal, params, product_key((6,)).init(jax.random.key(0), 6))
    (logits,) = score(router, params, jnp.asarray(X)).logits
    np.testing.assert_allclose(logits, normalised(X, 1e-6) @ np.asarray(params["keys"]["kernel"]), atol=1e-5)
    indices, mask = router.select(score(router, params, jnp.asarray(X)), 6)
    assert mask.all()
    np.testing.assert_array_equal(indices[..., 0] * 3 + indices[..., 1], np.argsort(-np.asarray(logits), axis=1))


@pytest.mark.parametrize("factory", [flat_top_k, product_key])
def test_an_initial_scale_of_nothing_is_refused(factory):
    """It would make all scores equal for ever."""
    with pytest.raises(ValueError, match="init_scale must be positive, got 0"):
        factory(GRID, init_scale=0.0)


def test_noisy_top_k_starts_with_no_signal_and_some_noise():
    """Clean logits 0, noise of deviation softplus(0) = log 2, none in evaluation."""
    router = noisy_top_k(GRID)
    params, x = router.init(jax.random.key(0), 6), jnp.ones((2000, 6)) * X[0]
    np.testing.assert_array_equal(score(router, params, x).logits[0], np.zeros((2000, 6)))
    noisy = score(router, params, x, key=jax.random.key(1)).logits[0]
    # 12,000 draws: the deviation's standard error is 0.0045, the mean's 0.0063.
    assert abs(float(jnp.std(noisy)) - np.log(2)) < 0.02
    assert abs(float(jnp.mean(noisy))) < 0.03


def test_noisy_top_k_matches_equation_4():
    """H = x W_g + normal * (softplus(x W_noise) + 0.01), the normal numbers those of the key."""
    router, params = noisy_top_k(GRID), noisy_params()
    x = normalised(X, 1e-6)
    clean, stddev = x @ np.asarray(params["gate"]), np.log1p(np.exp(x @ np.asarray(params["noise"]))) + 0.01
    noise = np.asarray(jax.random.normal(jax.random.key(2), (4, 6)))
    scores = score(router, params, jnp.asarray(X), key=jax.random.key(2))
    np.testing.assert_allclose(scores.logits[0], clean + noise * stddev, atol=1e-5)
    np.testing.assert_allclose(scores.extras, (clean, stddev), atol=1e-5)
    np.testing.assert_allclose(score(router, params, jnp.asarray(X)).logits[0], clean, atol=1e-5)


def test_noisy_top_k_weighs_its_two_losses():
    """0.1 of each by default; the gates are the softmax over the experts that answered."""
    params = noisy_params()
    router = noisy_top_k(GRID)
    scores = score(router, params, jnp.asarray(X), key=jax.random.key(2))
    indices, mask = router.select(scores, 2)
    mask = mask.at[0, 1].set(False)
    gates = masked_softmax(gather_logits(scores, indices, GRID), mask)
    importance = float(importance_loss(gates, indices[..., 0] * 3 + indices[..., 1], 6))
    clean, stddev = scores.extras
    load = float(load_loss(clean, scores.logits[0], stddev, k=2))
    np.testing.assert_allclose(router.aux_loss(scores, indices, mask), 0.1 * importance + 0.1 * load, rtol=1e-5)
    other = noisy_top_k(GRID, importance_weight=2.0, load_weight=0.0)
    np.testing.assert_allclose(other.aux_loss(scores, indices, mask), 2 * importance, rtol=1e-5)


def test_the_load_loss_trains_the_noise():
    """W_noise gets its gradient through the load loss and the noise itself, W_g through everything."""
    router = noisy_top_k(GRID)

    def loss(params):
        scores = score(router, params, jnp.asarray(X), key=jax.random.key(2))
        return router.aux_loss(scores, *router.select(scores, 2))

    gradient = jax.jit(jax.grad(loss))(noisy_params())
    assert np.abs(gradient["noise"]).max() > 1e-4
    assert np.abs(gradient["gate"]).max() > 1e-4


def test_switch_weights_are_probabilities_over_the_whole_grid():
    """p_i = softmax(h)_i over all experts, not over the chosen; the rest is left over."""
    router = switch(GRID)
    params = router.init(jax.random.key(0), 6)
    scores = score(router, params, jnp.asarray(X))
    probs = softmax(np.asarray(scores.extras))
    np.testing.assert_allclose(np.exp(scores.logits[0]), probs, rtol=1e-5)
    indices, mask = router.select(scores, 2)
    mask = mask.at[0].set(jnp.array([False, True]))
    weights = router.combine(gather_logits(scores, indices, GRID), mask)
    expected = -np.sort(-probs, axis=1)[:, :2]
    expected[0, 0] = 0
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_switch_learns_from_one_expert():
    """With k = 1 the weight depends on the router: d p / d h_i = p (1 - p) for the chosen one."""
    logits = jnp.array([[0.3, -0.2]])

    def weight(logits):
        return switch((2,)).combine(jax.nn.log_softmax(logits)[:, :1], jnp.array([[True]]))[0, 0]

    p = softmax(np.asarray(logits))[0, 0]
    np.testing.assert_allclose(jax.grad(weight)(logits), [[p * (1 - p), -p * (1 - p)]], rtol=1e-5)


def test_switch_weighs_its_two_losses():
    """0.01 of the balancing loss, 0.001 of the z-loss of the raw logits."""
    router = switch(GRID)
    params = router.init(jax.random.key(0), 6)
    scores = score(router, params, jnp.asarray(X))
    indices, mask = router.select(scores, 1)
    balance = load_balancing_loss(jnp.exp(scores.logits[0]), indices[..., 0] * 3 + indices[..., 1], mask)
    z = router_z_loss(scores.extras)
    assert float(z) > 1.0  # of raw logits: that of log-probabilities would be 0
    np.testing.assert_allclose(router.aux_loss(scores, indices, mask), 0.01 * balance + 0.001 * z, rtol=1e-5)
    only_z = switch(GRID, balance_weight=0.0, z_weight=1.0)
    np.testing.assert_allclose(only_z.aux_loss(scores, indices, mask), z, rtol=1e-5)


def test_peer_matches_its_definition():
    """Each dimension scores its own part of the query, normalised by itself."""
    router = peer(GRID, part_dim=4)
    params = router.init(jax.random.key(0), 6)
    query = X @ np.asarray(params["query"])
    first, second = score(router, params, jnp.asarray(X)).logits
    rows, columns = (np.asarray(keys) for keys in params["sub_keys"])
    np.testing.assert_allclose(first, normalised(query[:, :4], 1e-6) @ rows.T, atol=1e-5)
    np.testing.assert_allclose(second, normalised(query[:, 4:], 1e-6) @ columns.T, atol=1e-5)


def test_peer_scores_do_not_grow_with_the_input():
    """Normalised queries: a hundred times the input gives the same scores, and no batch is needed for that."""
    router = peer(GRID, part_dim=16)
    params = router.init(jax.random.key(0), 6)
    alone = score(router, params, 100 * jnp.asarray(X[:1])).logits
    for part, whole in zip(alone, score(router, params, jnp.asarray(X)).logits, strict=True):
        np.testing.assert_allclose(part[0], whole[0], atol=1e-4)


def test_frozen_random_is_the_emulators_gate():
    """LayerNorm(x) @ keys, every feature's row of keys of length 1 over the experts."""
    router = frozen_random(GRID)
    params = router.init(jax.random.key(0), 6)
    drawn = np.asarray(jax.random.normal(jax.random.key(0), (6, 6)))
    keys = drawn / np.sqrt((drawn**2).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(params["keys"], keys, rtol=1e-5)
    np.testing.assert_allclose(score(router, params, jnp.asarray(X)).logits[0], normalised(X, 1e-5) @ keys, atol=1e-5)


@pytest.mark.parametrize("factory", [flat_top_k, switch, peer, product_key, frozen_random])
def test_where_gradients_flow(factory):
    """Through the weights into parameters and x; into no parameter of the frozen gate."""
    router = factory(GRID)
    params = router.init(jax.random.key(0), 6)

    def first_weight(params, x):
        scores = score(router, params, x)
        indices, mask = router.select(scores, 2)
        return jnp.sum(router.combine(gather_logits(scores, indices, GRID), mask)[:, 0])

    of_params, of_x = jax.jit(jax.grad(first_weight, argnums=(0, 1)))(params, jnp.asarray(X))
    assert np.abs(of_x).max() > 1e-5
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(of_params))
    assert largest == 0 if factory is frozen_random else largest > 1e-5


def test_settings_out_of_range_are_refused():
    """With the value in the message."""
    with pytest.raises(ValueError, match=r"at least 0, got -1\.0 and 0\.1"):
        noisy_top_k(GRID, importance_weight=-1.0)
    with pytest.raises(ValueError, match=r"at least 0, got 0\.01 and -2\.0"):
        switch(GRID, z_weight=-2.0)
    with pytest.raises(ValueError, match="part_dim must be at least 2, got 1"):
        peer(GRID, part_dim=1)
