"""Balance without a loss: the bias, how it moves, and what it does to the load."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax import routing
from dmoe_jax.layer_config import Recipe
from dmoe_jax.optim.recipe import make_optimizer
from dmoe_jax.routing import Scores, Traffic, add_noise, balanced, flat_top_k, product_key, router_loss, score
from dmoe_jax.routing.balancing import BIAS, excess_load, score_spread
from dmoe_jax.routing.base import as_scores, select_top_k
from dmoe_jax.routing.beam_search import search_beams

GRID = (4, 4)
D = 8


def _entropy(counts):
    shares = counts[counts > 0] / counts.sum()
    return -(shares * np.log(shares)).sum() / np.log(counts.size)


def test_bias_decides_who_is_chosen_and_not_how_they_are_weighed():
    scores = Scores((jnp.array([[3.0, 2.0, 1.0, 0.0]]),), bias=(jnp.array([-9.0, 0.0, 0.0, 0.5]),))
    indices, mask = select_top_k(scores, 2, grid_size=(4,))
    assert indices.tolist() == [[[1], [2]]]
    weights = routing.combine_weights(product_key((4,)), scores, indices, mask)
    np.testing.assert_allclose(weights, jax.nn.softmax(jnp.array([[2.0, 1.0]])), rtol=1e-6)


def test_excess_counts_calls_against_fair_shares():
    indices = jnp.array([[[0, 0], [0, 1]], [[0, 0], [1, 1]]])
    asked = jnp.array([[True, True], [True, False]])
    (excess,) = excess_load(indices, asked, None, (2, 2))
    np.testing.assert_allclose(excess, [2 - 0.75, 1 - 0.75, -0.75, -0.75])
    rows, columns = excess_load(indices, asked, None, (2, 2), by_coordinate=True)
    np.testing.assert_allclose(rows, [(3 - 1.5) / 1.5, -1.0])
    np.testing.assert_allclose(columns, [(2 - 1.5) / 1.5, (1 - 1.5) / 1.5])
    # Fair shares are in proportion to capacity, and the dead have no excess.
    indices, asked = jnp.array([[[0], [1]]]), jnp.ones((1, 2), bool)
    (excess,) = excess_load(indices, asked, jnp.array([1.0, 0.5, 0.0, 0.5]), (4,))
    np.testing.assert_allclose(excess, [0.0, 0.5, 0.0, -0.5])


def test_spread_is_that_of_the_sum_over_the_dimensions():
    rows, columns = jax.random.normal(jax.random.key(0), (2, 5, 4))
    total = (rows[:, :, None] + columns[:, None, :]).reshape(5, -1)
    np.testing.assert_allclose(score_spread((rows, columns)), jnp.sqrt(jnp.var(total, axis=1).mean()), rtol=1e-5)
    holes = rows.at[0, 0].set(-jnp.inf)
    assert np.isfinite(score_spread((holes,)))
    assert score_spread((jnp.full((2, 3), -jnp.inf),)) == 0


def test_loss_is_that_of_the_router_and_its_gradient_moves_the_bias_against_the_excess():
    inner = routing.switch(GRID)
    router = balanced(inner, speed=0.5)
    params, x = router.init(jax.random.key(0), D), jax.random.normal(jax.random.key(1), (6, D))
    indices, mask = router.select(score(router, params, x), 2)

    def loss(params):
        return router_loss(router, score(router, params, x), indices, mask)

    value, grads = jax.value_and_grad(loss)(params)
    own = score(inner, params["router"], x)
    np.testing.assert_allclose(value, inner.aux_loss(own, indices, mask), rtol=1e-6)
    (excess,) = excess_load(indices, mask, None, GRID)
    np.testing.assert_allclose(grads[BIAS][0], 0.5 * score_spread(own.logits) * excess, rtol=1e-5, atol=1e-7)
    plain = jax.grad(lambda params: inner.aux_loss(score(inner, params, x), indices, mask))(params["router"])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), grads["router"], plain)


def test_calls_count_when_they_are_made():
    router = balanced(product_key(GRID))
    params, x = router.init(jax.random.key(0), D), jax.random.normal(jax.random.key(1), (3, D))
    scores = score(router, params, x)
    indices, mask = router.select(scores, 2)

    def grads(answered):
        def loss(params):
            return router_loss(router, score(router, params, x), indices, answered, Traffic(mask))

        return jax.grad(loss)(params)[BIAS][0]

    np.testing.assert_array_equal(grads(mask), grads(jnp.zeros_like(mask)))
    assert np.abs(grads(mask)).max() > 0


def _train_biases(router, steps, *, capacity=lambda step: None, batch=4, k=4, skew=2.0):
    """Counts of calls [steps, experts] while nothing but the biases moves; samples that are much alike."""
    params = router.init(jax.random.key(0), D)
    basis = jax.random.normal(jax.random.key(2), (2, D))

    @jax.jit
    def step(params, key, room):
        x = jax.random.normal(key, (batch, 2)) @ basis + skew * basis[0]

        def loss(params):
            scores = score(router, params, x)
            indices, mask = router.select(scores, k)
            return router_loss(router, scores, indices, mask, Traffic(mask, room)), indices

        grads, indices = jax.grad(loss, has_aux=True)(params)
        updates, _ = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), indices

    optimizer = routing.steer_biases(optax.sgd(0.0))
    state = optimizer.init(params)
    counts = []
    for number, key in enumerate(jax.random.split(jax.random.key(1), steps)):
        params, indices = step(params, key, capacity(number))
        count = np.zeros(router.grid_size)
        np.add.at(count, tuple(np.asarray(indices).reshape(-1, len(router.grid_size)).T), 1)
        counts.append(count.reshape(-1))
    return np.array(counts)


@pytest.mark.parametrize("make", [product_key, flat_top_k, partial(product_key, init_scale=3.0)])
def test_load_becomes_even_though_samples_are_much_alike(make):
    plain = _train_biases(balanced(make(GRID), speed=1e-9), 100)
    counts = _train_biases(balanced(make(GRID)), 300)
    assert _entropy(plain.sum(axis=0)) < 0.85
    assert _entropy(counts[150:].sum(axis=0)) > 0.97
    assert counts[200:].sum(axis=0).min() > 0


def test_slow_expert_loses_calls_and_gets_them_back():
    room = jnp.ones(GRID)
    slow = lambda step: room.at[1, 2].set(0.1) if 100 <= step < 300 else room  # noqa: E731
    counts = _train_biases(balanced(product_key(GRID)), 500, capacity=slow)
    while_slow, after = counts[200:300].sum(axis=0), counts[400:].sum(axis=0)
    number = 1 * 4 + 2
    assert while_slow[number] < 0.5 * np.delete(while_slow, number).mean()
    assert after[number] > 0.7 * np.delete(after, number).mean()


def test_newcomer_is_neither_flooded_nor_left_alone():
    room = jnp.ones(GRID)
    comes = lambda step: room.at[0, 0].set(0) if step < 200 else room  # noqa: E731
    counts = _train_biases(balanced(product_key(GRID)), 400, capacity=comes)
    # While it was dead its bias stood still, so it begins where it was.
    joined = counts[200:300].sum(axis=0)
    assert 0.2 * joined.mean() < joined[0] < 3 * joined.mean()


def test_beam_search_with_a_bias_finds_what_exhaustive_search_finds():
    grid, rng = (3, 4, 2), np.random.default_rng(0)
    children = {path: range(size) for depth, size in enumerate(grid) for path in np.ndindex(*grid[:depth])}
    for _ in range(20):
        logits = tuple(rng.normal(size=(5, size)).astype(np.float32) for size in grid)
        bias = 3 * rng.normal(size=24).astype(np.float32)
        scores = Scores(tuple(map(jnp.asarray, logits)), bias=(jnp.asarray(bias),))
        expected, _ = select_top_k(scores, 4, grid_size=grid)
        found, missing = search_beams(logits, children, k=4, bias=bias)
        assert not missing
        np.testing.assert_array_equal(found, expected)


def test_beam_search_looks_up_only_the_prefixes_it_needs_and_fills_up_from_others_where_experts_are_gone():
    logits, bias = [np.zeros((1, 3)), np.zeros((1, 2))], np.array([0.0, 9.0, 0.0, 0.0, 5.0, 0.0])
    _, missing = search_beams(logits, {(): [0, 1, 2]}, k=1, bias=bias)
    assert missing == ((0,),)  # where the best cell would be
    found, missing = search_beams(logits, {(): [0, 1, 2], (0,): []}, k=1, bias=bias)
    assert missing == ((2,),)
    found, missing = search_beams(logits, {(): [0, 1, 2], (0,): [], (2,): [0, 1]}, k=1, bias=bias)
    assert found.tolist() == [[[2, 0]]]
    assert not missing
    with pytest.raises(ValueError, match="bias for each of the 6 cells"):
        search_beams(logits, {}, k=1, bias=bias[:3])


def test_combinators_around_it_keep_the_bias():
    x = jax.random.normal(jax.random.key(1), (3, D))
    for router in (
        routing.chain_routers(product_key(GRID), balanced, partial(add_noise, stddev=1.0)),
        routing.chain_routers(product_key(GRID), balanced, partial(routing.drop_experts, rate=0.2)),
        routing.chain_routers(product_key(GRID), partial(add_noise, stddev=1.0), balanced),
    ):
        routing.check_router(router, GRID, D)
        params = router.init(jax.random.key(0), D)
        scores = score(router, params | {BIAS: (jnp.arange(16.0),)}, x, key=jax.random.key(3))
        np.testing.assert_array_equal(scores.bias[0], jnp.arange(16.0))
        assert routing.gather_logits(scores, *(router.select(scores, 2)[:1]), GRID).shape == (3, 2)


def test_bias_has_the_shape_of_coordinates_or_of_experts():
    logits = (jnp.zeros((2, 4)), jnp.zeros((2, 3)))
    for bias in ((), (jnp.zeros(4), jnp.zeros(3)), (jnp.zeros(12),)):
        as_scores(Scores(logits, bias=bias), (4, 3), 2)
    with pytest.raises(ValueError, match=r"the bias of scores on grid \(4, 3\) has the shapes"):
        as_scores(Scores(logits, bias=(jnp.zeros(4),)), (4, 3), 2)
    # A large grid has one for each coordinate.
    for make, shapes in ((product_key, [(100,), (50,)]), (flat_top_k, [(5000,)])):
        router = balanced(make((100, 50)))
        assert [part.shape for part in router.init(jax.random.key(0), D)[BIAS]] == shapes
    assert not balanced(product_key((100, 50))).whole_grid


def test_what_it_refuses():
    with pytest.raises(ValueError, match=r"speed must be positive and finite, got 0\.0"):
        balanced(product_key(GRID), speed=0.0)
    with pytest.raises(ValueError, match="balances its load already"):
        balanced(balanced(product_key(GRID)))
    assert balanced(product_key(GRID)) is balanced(product_key(GRID))


def test_optimiser_steers_the_biases_apart_from_the_rest():
    params = {"w": jnp.ones(3), "gate": {"router": {"b": jnp.ones(2)}, BIAS: (jnp.zeros(4),)}}
    grads = jax.tree.map(lambda leaf: jnp.arange(leaf.size, dtype=jnp.float32).reshape(leaf.shape), params)
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1))
    updates, _ = routing.steer_biases(inner).update(grads, routing.steer_biases(inner).init(params), params)
    np.testing.assert_array_equal(updates["gate"][BIAS][0], -jnp.arange(4.0))
    rest = {"w": params["w"], "b": params["gate"]["router"]["b"]}
    expected, _ = inner.update({"w": grads["w"], "b": grads["gate"]["router"]["b"]}, inner.init(rest), rest)
    np.testing.assert_allclose(updates["w"], expected["w"])
    np.testing.assert_allclose(updates["gate"]["router"]["b"], expected["b"])


def test_recipe_has_it_built_in_and_nothing_changes_without_biases():
    optimizer = make_optimizer(Recipe(warmup_steps=0, total_steps=None))
    params = {"w": jnp.ones(3), BIAS: (jnp.zeros(4),)}
    grads = {"w": jnp.ones(3), BIAS: (jnp.full(4, 7.0),)}
    stale = {"staleness": 3.0, "read_params": params}
    updates, _ = optax.with_extra_args_support(optimizer).update(grads, optimizer.init(params), params, **stale)
    np.testing.assert_array_equal(updates[BIAS][0], np.full(4, -7.0))
    plain, wrapped = optax.adam(0.1), routing.steer_biases(optax.adam(0.1))
    assert jax.tree.structure(plain.init(params["w"])) == jax.tree.structure(wrapped.init(params["w"]))
