"""DeepSeek-V3's router: affinities that are weighed without their bias, and a bias that follows the load."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dmoe_jax.routing import Scores, combine_weights, deepseek_v3, router_loss, score, steer_biases
from dmoe_jax.routing.balancing import BIAS
from dmoe_jax.routing.weights import normalised_weights

GRID = (2, 3)


def test_matches_the_paper() -> None:
    """Sigmoid affinities; the top k of affinity plus bias; weights are shares of the affinities (eq. 12 to 16)."""
    router = deepseek_v3(GRID)
    params = router.init(jax.random.key(0), 8)
    x = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    bias = np.array([0.0, 0.9, 0.0, -0.9, 0.0, 0.0], np.float32)
    scores = score(router, {**params, BIAS: (jnp.asarray(bias),)}, jnp.asarray(x))
    normalised = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6)
    keys = params["router"]["keys"]
    affinities = 1 / (1 + np.exp(-(normalised @ np.asarray(keys["kernel"]) + np.asarray(keys["bias"]))))
    np.testing.assert_allclose(scores.logits[0], affinities, atol=1e-5)
    indices, mask = router.select(scores, 2)
    weights = combine_weights(router, scores, indices, mask)
    for row in range(5):
        best = np.argsort(-(affinities[row] + bias), kind="stable")[:2]
        chosen = np.asarray(indices[row]) @ np.array([3, 1])
        assert chosen.tolist() == best.tolist()
        assert 1 in chosen  # its bias lifts it above every other expert
        assert 3 not in chosen
        np.testing.assert_allclose(weights[row], affinities[row, best] / affinities[row, best].sum(), atol=1e-5)


def test_the_silent_leave_their_weight_to_the_others() -> None:
    """0.6 and 0.2 of three answer: 3/4 and 1/4. Nobody answers: zeros, with a gradient of zeros."""
    affinities = jnp.array([[0.6, 0.9, 0.2]])
    np.testing.assert_allclose(
        normalised_weights(affinities, jnp.array([[True, False, True]])), [[0.75, 0, 0.25]], rtol=1e-6
    )
    gradient = jax.grad(lambda logits: normalised_weights(logits, jnp.zeros((1, 3), bool)).sum())(affinities)
    np.testing.assert_array_equal(gradient, np.zeros((1, 3)))
    # Noise may bring an affinity below 0; NaN of a silent expert is nobody's.
    noisy = normalised_weights(jnp.array([[-0.1, 0.5, jnp.nan]]), jnp.array([[True, True, False]]))
    np.testing.assert_array_equal(noisy, [[0.0, 1.0, 0.0]])


def test_the_bias_evens_out_a_load() -> None:
    """Samples that all prefer one expert are spread over all six within some hundred steps, by the bias alone."""
    router = deepseek_v3(GRID)
    params = router.init(jax.random.key(0), 4)
    # Only the bias moves: the affinities of six experts are 0.9, 0.5, 0.5, ... and a little of each sample's own.
    own = 0.05 * jax.random.uniform(jax.random.key(1), (60, 6))
    affinities = jnp.array([0.9, 0.5, 0.5, 0.5, 0.5, 0.5]) + own
    optimizer = steer_biases(optax.sgd(0.0))
    state = optimizer.init(params)

    def scores_of(params: dict) -> Scores:
        raw = Scores((affinities,))
        return Scores(raw.logits, extras=raw, bias=params[BIAS])

    @jax.jit
    def step(params: dict, state: object) -> tuple:
        indices, mask = router.select(scores_of(params), 1)
        grads = jax.grad(lambda params: router_loss(router, scores_of(params), indices, mask))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, indices @ jnp.array([3, 1])

    loads = []
    for _ in range(300):
        params, state, chosen = step(params, state)
        loads.append(np.bincount(np.asarray(chosen).ravel(), minlength=6))
    assert loads[0].tolist() == [60, 0, 0, 0, 0, 0]
    assert np.mean(loads[-100:], axis=0).min() > 5  # 10 each is even
