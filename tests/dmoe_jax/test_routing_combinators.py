"""Combinators: what each of them changes, what it leaves, and how they go together."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax.routing import (
    RouterError,
    Scores,
    add_noise,
    chain_routers,
    drop_experts,
    flat_top_k,
    freeze,
    gather_logits,
    noisy_top_k,
    product_key,
    score,
    switch,
    temperature,
    top_k_router,
    with_balancing_loss,
    with_z_loss,
)
from dmoe_jax.routing.base import dense_logits
from dmoe_jax.routing.losses import load_balancing_loss, router_z_loss

GRID = (2, 3)
X = jax.random.normal(jax.random.key(1), (4, 6))


def even_router(grid=GRID):
    """All scores zero, additive, with one parameter that adds to all of them."""

    def scores(params, x, *, key=None, ids=None):
        return tuple(params + jnp.zeros((x.shape[0], size)) for size in grid)

    return top_k_router("even", grid, lambda key, d_model: jnp.zeros(()), scores)


def test_noise_has_the_deviation_of_an_experts_score():
    """Over both dimensions together: each coordinate's part has stddev / sqrt(2); there is none in evaluation."""
    router, x = add_noise(even_router(), 3.0), jnp.zeros((5000, 1))
    scores = score(router, jnp.zeros(()), x, key=jax.random.key(0))
    assert [part.shape[1] for part in scores.logits] == [2, 3]  # beam search still works
    assert not router.whole_grid
    # 5000 independent rows: standard error of the deviation 0.03 for each expert.
    np.testing.assert_allclose(np.std(dense_logits(scores), axis=0), np.full(6, 3.0), atol=0.15)
    correlation = np.corrcoef(np.asarray(scores.logits[0][:, 0]), np.asarray(scores.logits[1][:, 0]))[0, 1]
    assert abs(correlation) < 0.07  # 5 standard errors: the dimensions do not share their bits
    for part in score(router, jnp.zeros(()), x).logits:
        np.testing.assert_array_equal(part, np.zeros(part.shape))


def test_wrapped_routers_never_see_the_same_bits():
    """Noise on noise, and noise on a router's own noise: three different draws from one key."""
    twice = add_noise(add_noise(even_router((500,)), 1.0), 2.0)
    scores = score(twice, jnp.zeros(()), jnp.zeros((1, 1)), key=jax.random.key(0))
    inner = np.asarray(scores.extras.logits[0][0])
    outer = np.asarray(scores.logits[0][0]) - inner
    assert abs(np.corrcoef(inner, outer)[0, 1]) < 0.2
    noisy = noisy_top_k((500,))
    scores = score(add_noise(noisy, 1.0), noisy.init(jax.random.key(0), 6), X[:1], key=jax.random.key(0))
    inner = np.asarray(scores.extras.logits[0][0])
    assert abs(np.corrcoef(inner, np.asarray(scores.logits[0][0]) - inner)[0, 1]) < 0.2


def test_temperature_divides_scores():
    """Same choice, weights softmax(logits / T)."""
    router = product_key(GRID, init_scale=1.0)
    params = router.init(jax.random.key(0), 6)
    before, after = score(router, params, X), score(temperature(router, 4.0), params, X)
    for left, right in zip(before.logits, after.logits, strict=True):
        np.testing.assert_allclose(right, left / 4, rtol=1e-6)
    np.testing.assert_array_equal(router.select(before, 3)[0], router.select(after, 3)[0])


@pytest.mark.parametrize(
    "wrap",
    [partial(add_noise, stddev=5.0), partial(temperature, value=0.2), partial(drop_experts, rate=0.5)],
    ids=["noise", "temperature", "drop"],
)
def test_probabilities_stay_probabilities(wrap):
    """Switch weighs by exp(score): after any change of its scores they sum to 1 over the grid again."""
    router = wrap(switch(GRID))
    params = router.init(jax.random.key(0), 6)
    scores = score(router, params, X, key=jax.random.key(3))
    total = jnp.exp(dense_logits(scores)).sum(axis=1)
    alive = ~jnp.isneginf(dense_logits(scores)).all(axis=1)
    np.testing.assert_allclose(total, np.where(alive, 1.0, 0.0), rtol=1e-5)


def test_dropped_experts_are_never_chosen_and_the_next_best_is():
    """-inf with the given rate, only in training; the others keep their scores and the choice is top-k of them."""
    router = product_key(GRID, init_scale=1.0)
    failing = drop_experts(router, 0.4)
    params, x = router.init(jax.random.key(0), 6), jax.random.normal(jax.random.key(2), (500, 6))
    dense = np.asarray(dense_logits(score(router, params, x)))
    scores = score(failing, params, x, key=jax.random.key(3))
    (dropped,) = (np.asarray(part) for part in scores.logits)
    gone = np.isneginf(dropped)
    assert abs(gone.mean() - 0.4) < 0.045  # 3000 draws: standard error 0.009
    np.testing.assert_array_equal(dropped[~gone], dense[~gone])
    indices, mask = failing.select(scores, 2)
    flat = np.asarray(indices[..., 0] * 3 + indices[..., 1])
    for row in range(500):
        expected = [i for i in np.argsort(-dense[row]) if not gone[row, i]][:2]
        assert flat[row][np.asarray(mask[row])].tolist() == expected
    np.testing.assert_array_equal(score(failing, params, x).logits[0], dense)
    assert failing.whole_grid
    assert not drop_experts(product_key((5,)), 0.4).whole_grid


def test_frozen_parameters_get_no_gradient_but_x_does():
    """The scores are the same."""
    router = flat_top_k(GRID)
    frozen = freeze(router)
    params = frozen.init(jax.random.key(0), 6)
    jax.tree.map(np.testing.assert_array_equal, score(frozen, params, X), score(router, params, X))
    of_params, of_x = jax.grad(lambda params, x: jnp.sum(score(frozen, params, x).logits[0] ** 2), argnums=(0, 1))(
        params, X
    )
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(of_params))
    assert jnp.abs(of_x).max() > 1e-3


def test_losses_add_up():
    """The wrapped router's own loss, plus each of the others times its weight, on the scores over the whole grid."""
    router = noisy_top_k(GRID)
    stack = chain_routers(router, partial(with_balancing_loss, weight=0.5), partial(with_z_loss, weight=0.25))
    params = jax.tree.map(
        lambda leaf: leaf + 0.3 * jnp.sin(jnp.arange(36.0)).reshape(6, 6), router.init(jax.random.key(0), 6)
    )
    scores = score(stack, params, X, key=jax.random.key(4))
    indices, mask = stack.select(scores, 2)
    logits = dense_logits(scores)
    cells = indices[..., 0] * 3 + indices[..., 1]
    expected = (
        router.aux_loss(scores, indices, mask)
        + 0.5 * load_balancing_loss(jax.nn.softmax(logits), cells, mask)
        + 0.25 * router_z_loss(logits)
    )
    np.testing.assert_allclose(stack.aux_loss(scores, indices, mask), expected, rtol=1e-5)


def test_a_balancing_loss_sees_the_changes_that_came_before_it():
    """Around the noise it sees noisy scores; inside it sees clean ones."""
    base = product_key(GRID, init_scale=1.0)
    params = base.init(jax.random.key(0), 6)
    noise = partial(add_noise, stddev=3.0)
    outside, inside = chain_routers(base, noise, with_balancing_loss), chain_routers(base, with_balancing_loss, noise)
    clean = score(base, params, X)
    for router in (outside, inside):
        scores = score(router, params, X, key=jax.random.key(5))
        indices, mask = router.select(scores, 2)
        seen = scores if router is outside else clean
        cells = indices[..., 0] * 3 + indices[..., 1]
        expected = 0.01 * load_balancing_loss(jax.nn.softmax(dense_logits(seen)), cells, mask)
        np.testing.assert_allclose(router.aux_loss(scores, indices, mask), expected, rtol=1e-5)


def test_the_balancing_loss_evens_out_a_router():
    """Gradient descent on it alone: from every sample on one expert to at most one and a half of its share."""
    router = with_balancing_loss(flat_top_k((4,)), 1.0)
    params = router.init(jax.random.key(0), 6)
    params["keys"]["bias"] = jnp.array([1.0, 0.0, 0.0, 0.0])
    x = jax.random.normal(jax.random.key(7), (64, 6))

    def loss(params):
        scores = score(router, params, x)
        indices, mask = router.select(scores, 1)
        return router.aux_loss(scores, indices, mask), jnp.bincount(indices[:, 0, 0], length=4)

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (first, counts), _ = step(params)
    assert int(counts[0]) == 64
    for _ in range(100):
        (last, counts), gradient = step(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
    assert float(last) < float(first)
    assert int(counts.max()) <= 24


def test_ids_reach_the_router_inside():
    """Through every kind of wrapper."""
    seen = []

    def scores(params, x, *, key=None, ids=None):
        seen.append(ids)
        return jnp.zeros((x.shape[0], 3))

    ids = jnp.arange(4, dtype=jnp.int32)
    inside = top_k_router("inside", (3,), lambda key, d_model: (), scores)
    for wrap in (partial(add_noise, stddev=1.0), freeze, with_z_loss):
        score(wrap(inside), (), X, ids=ids)
    assert len(seen) == 3
    assert all(given is ids for given in seen)


def test_names_tell_what_was_done():
    """In the order in which it was done."""
    router = chain_routers(product_key(GRID), partial(add_noise, stddev=1.0), with_balancing_loss, freeze)
    assert router.name == "product_key+noise+balance+frozen"
    assert chain_routers(router) is router


def test_equal_combinations_are_one_object():
    """However the arguments are written; other arguments make another."""
    base = product_key(GRID)
    assert add_noise(base, 1.0) is add_noise(base, stddev=1.0)
    assert add_noise(base, 1.0) is not add_noise(base, 2.0)
    assert with_balancing_loss(base) is with_balancing_loss(base, 0.01)
    assert freeze(base) is freeze(base)


def test_a_chain_takes_any_function_from_router_to_router():
    """A user's own, and it says which one returned something else."""
    renamed = chain_routers(product_key(GRID), lambda router: router._replace(name="mine"))
    assert renamed.name == "mine"
    with pytest.raises(RouterError, match=r"must return a router, .*str.* made str of 'product_key'"):
        chain_routers(product_key(GRID), str)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (partial(add_noise, stddev=0.0), "stddev must be positive and finite, got 0"),
        (partial(add_noise, stddev=float("nan")), "stddev must be positive and finite, got nan"),
        (partial(temperature, value=float("inf")), "temperature must be positive and finite, got inf"),
        (partial(drop_experts, rate=1.0), "rate must be at least 0 and below 1, got 1"),
        (partial(with_balancing_loss, weight=-1.0), "weight must be at least 0 and finite, got -1"),
        (partial(with_z_loss, weight=float("nan")), "weight must be at least 0 and finite, got nan"),
    ],
)
def test_settings_out_of_range_are_refused(wrap, message):
    """With the value in the message."""
    with pytest.raises(ValueError, match=message):
        wrap(product_key(GRID))


def test_a_wrong_router_inside_is_named():
    """The error speaks of the user's router, not of the wrapper."""
    wrong = top_k_router("too_wide", (3,), lambda key, d_model: (), lambda params, x, **kw: jnp.zeros((4, 5)))
    with pytest.raises(RouterError, match="router 'too_wide'"):
        score(add_noise(wrong, 1.0), (), X)


def test_weights_without_any_expert_left_are_zero():
    """All dropped: nothing selected, nothing weighed, no NaN."""
    router = drop_experts(switch((2,)), 0.9)
    scores = Scores((jnp.full((1, 2), -jnp.inf),), extras=())
    indices, mask = router.select(scores, 1)
    assert not mask.any()
    np.testing.assert_array_equal(router.combine(gather_logits(scores, indices, (2,)), mask), [[0.0]])
