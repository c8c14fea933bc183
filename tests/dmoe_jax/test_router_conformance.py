"""Every router, and some combinations, keep the contract of `routing.base`; combinators do their part."""

import functools
import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax import routing
from dmoe_jax.routing import ROUTERS, Scores, combine_weights, gather_logits, make_router, product_key, score
from dmoe_jax.routing.base import dense_logits
from dmoe_jax.routing.combinators import add_noise, chain_routers, drop_experts, freeze, with_balancing_loss
from dmoe_jax.routing.losses import load_balancing_loss, router_z_loss


def stack(make, *wraps):
    """A router of any grid, wrapped."""
    return lambda grid: chain_routers(make(grid), *wraps)


STACKS = {
    "noise_and_losses": stack(product_key, partial(add_noise, stddev=1.0), with_balancing_loss, routing.with_z_loss),
    "failing_noisy": stack(routing.noisy_top_k, partial(drop_experts, rate=0.4), freeze),
    "disturbed_switch": stack(
        routing.switch,
        partial(add_noise, stddev=2.0),
        partial(routing.temperature, value=3.0),
        partial(drop_experts, rate=0.3),
    ),
    "failing_expert_choice": stack(routing.expert_choice, partial(drop_experts, rate=0.5)),
    "hash_with_losses": stack(routing.hash_router, with_balancing_loss, routing.with_z_loss),
}
RANDOM = {"noisy_top_k", "uniform_random", *STACKS} - {"hash_with_losses"}
GATELESS = {"hash", "uniform_random", "hash_with_losses"}
FIXED = {"frozen_random", "failing_noisy", *GATELESS}
CASES = {name: partial(make_router, name) for name in ROUTERS} | STACKS
GRID = (2, 1, 3)  # additive and flat scores have the same width
LINES = ["product_key", "hash", "expert_choice"]  # of those with one dimension, where both forms of scores are one
BATCH, D_MODEL = 4, 6

every_router = pytest.mark.parametrize("name", CASES)


@functools.cache
def setup(name: str, grid: tuple[int, ...] = GRID):
    """The router, parameters and a batch, away from special points such as the zeros of noisy top-k."""
    router = CASES[name](grid)
    leaves, tree = jax.tree.flatten(router.init(jax.random.key(0), D_MODEL))
    *keys, x_key = jax.random.split(jax.random.key(1), len(leaves) + 1)
    moved = [leaf + 0.3 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return router, jax.tree.unflatten(tree, moved), jax.random.normal(x_key, (BATCH, D_MODEL))


def route(router, scores, k, alive):
    """Indices, mask, weights and auxiliary loss, when all experts answer."""
    indices, mask = router.select(scores, k, alive)
    weights = router.combine(gather_logits(scores, indices, router.grid_size), mask)
    return indices, mask, weights, router.aux_loss(scores, indices, mask)


# Not compiled as a whole, here and below: operation by operation, all routers share what there is to compile.
@pytest.mark.parametrize(
    ("name", "grid"), [*((name, GRID) for name in CASES), *((name, (6,)) for name in LINES)], ids=str
)
def test_contract(name, grid):
    """Distinct living experts are chosen for every k, with weights from 0 to 1 in sum (see `check_router`)."""
    router, params, x = setup(name, grid)
    living = np.ones(grid, bool), np.random.default_rng(0).random(grid) < 0.5, np.zeros(grid, bool)
    for key in (jax.random.key(3), None):
        scores = score(router, params, x, key=key, ids=jnp.arange(BATCH, dtype=jnp.int32))
        for k, alive in itertools.product((2, math.prod(grid)), living):
            indices, mask, weights, loss = map(np.asarray, route(router, scores, k, jnp.asarray(alive)))
            assert (indices.dtype, mask.dtype, weights.dtype) == (np.int32, np.bool_, np.float32)
            for cells in (list(map(tuple, row[taken])) for row, taken in zip(indices, mask, strict=True)):
                assert len(set(cells)) == len(cells) <= alive.sum()
                assert all(alive[cell] for cell in cells)
            assert (weights >= 0).all()
            assert (weights[~mask] == 0).all()
            assert (weights.sum(axis=1) <= 1 + 1e-6).all()
            assert np.isfinite(loss)


@every_router
def test_the_library_passes_its_own_check(name):
    """Our routers pass the check for users' routers, which asks for finite gradients even when experts are silent."""
    routing.check_router(CASES[name](GRID), GRID, D_MODEL)


@every_router
def test_scores_depend_on_nothing_but_the_key(name):
    """Equal keys give equal scores, no key always the same, and another key others for those that draw alone."""
    router, params, x = setup(name)
    same, again, other = (score(router, params, x, key=jax.random.key(seed)) for seed in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, same, again)
    jax.tree.map(np.testing.assert_array_equal, *(score(router, params, x) for _ in range(2)))
    assert jax.tree.all(jax.tree.map(np.array_equal, same.logits, other.logits)) == (name not in RANDOM)
    # On several dimensions flat scores, or a selection of another kind than top-k, need the whole grid.
    assert router.whole_grid == (len(same.logits) == 1 or "expert_choice" in name)


@every_router
def test_compiled_and_vmapped_is_the_same(name):
    """jit of vmap over batches, grids of the living included, gives what each batch gives by itself."""
    router, params, x = setup(name)
    batches = jnp.stack([x, 2 * x[::-1]])
    keys = jax.random.split(jax.random.key(4), 2)
    ids = jnp.arange(2 * BATCH, dtype=jnp.int32).reshape(2, BATCH)
    alive = jnp.asarray(np.random.default_rng(1).random((2, *GRID)) < 0.7)

    def whole(x, key, ids, alive):
        return route(router, score(router, params, x, key=key, ids=ids), 2, alive)

    mapped = jax.jit(jax.vmap(whole))(batches, keys, ids, alive)
    for i in range(2):
        indices, mask, weights, loss = whole(batches[i], keys[i], ids[i], alive[i])
        np.testing.assert_array_equal(mapped[1][i], mask)
        np.testing.assert_array_equal(mapped[0][i][mask], indices[mask])
        np.testing.assert_allclose(mapped[2][i], weights, atol=1e-5)
        np.testing.assert_allclose(mapped[3][i], loss, rtol=1e-4, atol=1e-6)


@every_router
def test_equal_arguments_give_the_same_object(name):
    """Compiled code is cached by identity."""
    assert CASES[name](GRID) is CASES[name](GRID) is not CASES[name]((3, 2))


@pytest.mark.parametrize("name", ROUTERS)
def test_impossible_grids_and_k_are_refused(name):
    """Every router refuses them, with the value in the message."""
    for grid in ((), (2, 0), (2, -1), (True,)):
        with pytest.raises(ValueError, match="grid_size must be one or more positive integers"):
            make_router(name, grid)
    router, params, x = setup(name)
    scores = score(router, params, x)
    for k in (0, 7):
        with pytest.raises(ValueError, match=f"between 1 and the 6 cells.*got {k}"):
            router.select(scores, k)
    with pytest.raises(ValueError, match=r"\(2, 1, 3\), got \(3, 2\)"):
        router.select(scores, 1, jnp.ones((3, 2), bool))


@every_router
def test_one_expert_of_each_sample_teaches_the_gate(name):
    """Its weight moves with parameters and features, as the weights of two do, but where these have no influence."""
    router, params, x = setup(name)
    ids = jnp.arange(len(x), dtype=jnp.int32)

    def moved(k: int) -> list[bool]:
        def outcome(params, x):
            scores = score(router, params, x, ids=ids)
            indices, mask = router.select(scores, k)
            weights = combine_weights(router, scores, indices[:, :k], mask[:, :k])
            assert weights.shape == (len(x), k)
            return jnp.sum(weights * jnp.arange(1.0, k + 1)), weights

        grads, weights = jax.grad(outcome, argnums=(0, 1), has_aux=True, allow_int=True)(params, x)
        assert (weights <= 1 + 1e-6).all()
        leaves = ([leaf for leaf in jax.tree.leaves(part) if leaf.dtype != jax.dtypes.float0] for part in grads)
        return [any(np.abs(leaf).max() > 1e-6 for leaf in part) for part in leaves]

    assert moved(1) == moved(2) == [name not in FIXED, name not in GATELESS]


def test_the_weight_of_one_expert_is_its_probability():
    """exp(1 + 3) over (e^1 + e^2) (e^3 + e^0), the sum over a grid of two by two; the sample passes by the rest."""
    router, scores = product_key((2, 2)), Scores((jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 0.0]])))
    weights = combine_weights(router, scores, jnp.array([[[0, 0]]], jnp.int32), jnp.array([[True]]))
    expected = math.exp(4) / ((math.e + math.e**2) * (math.exp(3) + 1))
    np.testing.assert_allclose(weights, [[expected]], rtol=1e-6)
    own = router._replace(name="mine", combine=lambda logits, mask: jax.nn.softmax(logits))
    with pytest.raises(routing.RouterError, match="'mine': with one expert of each sample"):
        combine_weights(own, scores, jnp.array([[[0, 0]]], jnp.int32), jnp.array([[True]]))
    assert combine_weights(own, scores, jnp.zeros((1, 2, 2), jnp.int32), jnp.ones((1, 2), bool)).shape == (1, 2)


PLANE = (2, 3)
X = jax.random.normal(jax.random.key(1), (4, 6))


def even_router(grid=PLANE):
    """All scores zero, additive, with one parameter that adds to all of them."""

    def scores(params, x, *, key=None, ids=None):
        return tuple(params + jnp.zeros((x.shape[0], size)) for size in grid)

    return routing.top_k_router("even", grid, lambda key, d_model: jnp.zeros(()), scores)


def test_noise_has_the_deviation_of_an_experts_score():
    """It has it over both dimensions together: each part has stddev / sqrt(2); there is none in evaluation."""
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


@pytest.mark.parametrize("inside", [add_noise(even_router((500,)), 1.0), routing.noisy_top_k((500,))])
def test_wrapped_routers_never_see_the_same_bits(inside):
    """Noise on noise, and noise on a router's own noise, are different draws from one key."""
    scores = score(add_noise(inside, 2.0), inside.init(jax.random.key(0), 6), X[:1], key=jax.random.key(0))
    inner = np.asarray(scores.extras.logits[0][0])
    assert abs(np.corrcoef(inner, np.asarray(scores.logits[0][0]) - inner)[0, 1]) < 0.2


def test_temperature_divides_scores():
    """The choice stays, and weights are softmax(logits / T)."""
    router = product_key(PLANE, init_scale=1.0)
    params = router.init(jax.random.key(0), 6)
    before, after = score(router, params, X), score(routing.temperature(router, 4.0), params, X)
    for left, right in zip(before.logits, after.logits, strict=True):
        np.testing.assert_allclose(right, left / 4, rtol=1e-6)
    np.testing.assert_array_equal(router.select(before, 3)[0], router.select(after, 3)[0])


@pytest.mark.parametrize(
    "wrap",
    [partial(add_noise, stddev=5.0), partial(routing.temperature, value=0.2), partial(drop_experts, rate=0.5)],
    ids=["noise", "temperature", "drop"],
)
def test_probabilities_stay_probabilities(wrap):
    """Switch weighs by exp(score): after any change of its scores they sum to 1 over the grid again."""
    router = wrap(routing.switch(PLANE))
    logits = dense_logits(score(router, router.init(jax.random.key(0), 6), X, key=jax.random.key(3)))
    alive = ~jnp.isneginf(logits).all(axis=1)
    np.testing.assert_allclose(jnp.exp(logits).sum(axis=1), np.where(alive, 1.0, 0.0), rtol=1e-5)


@pytest.mark.slow
def test_dropped_experts_are_never_chosen_and_the_next_best_is():
    """-inf with the given rate, only in training; the others keep their scores and the choice is top-k of them."""
    router = product_key(PLANE, init_scale=1.0)
    failing = drop_experts(router, 0.4)
    params, x = router.init(jax.random.key(0), 6), jax.random.normal(jax.random.key(2), (500, 6))
    dense = np.asarray(dense_logits(score(router, params, x)))
    scores = score(failing, params, x, key=jax.random.key(3))
    gone = np.isneginf(scores.logits[0])
    assert abs(gone.mean() - 0.4) < 0.045  # 3000 draws: standard error 0.009
    np.testing.assert_array_equal(scores.logits[0], np.where(gone, -np.inf, dense))
    indices, mask = map(np.asarray, failing.select(scores, 2))
    for row, cells in enumerate(indices[..., 0] * 3 + indices[..., 1]):
        assert cells[mask[row]].tolist() == [i for i in np.argsort(-dense[row]) if not gone[row, i]][:2]
    np.testing.assert_array_equal(score(failing, params, x).logits[0], dense)
    assert failing.whole_grid
    assert not drop_experts(product_key((5,)), 0.4).whole_grid


def test_frozen_parameters_get_no_gradient_but_x_does():
    """The scores are the same."""
    router = routing.flat_top_k(PLANE)
    frozen, params = freeze(router), router.init(jax.random.key(0), 6)
    jax.tree.map(np.testing.assert_array_equal, score(frozen, params, X), score(router, params, X))
    total = lambda params, x: jnp.sum(score(frozen, params, x).logits[0] ** 2)  # noqa: E731
    of_params, of_x = jax.grad(total, argnums=(0, 1))(params, X)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(of_params))
    assert jnp.abs(of_x).max() > 1e-3


@pytest.mark.slow
def test_losses_add_up():
    """The wrapped router's own loss, plus each of the others times its weight, on the scores over the whole grid."""
    router = routing.noisy_top_k(PLANE)
    stack = chain_routers(router, partial(with_balancing_loss, weight=0.5), partial(routing.with_z_loss, weight=0.25))
    away = 0.3 * jnp.sin(jnp.arange(36.0)).reshape(6, 6)
    params = jax.tree.map(lambda leaf: leaf + away, router.init(jax.random.key(0), 6))
    scores = score(stack, params, X, key=jax.random.key(4))
    indices, mask = stack.select(scores, 2)
    balance = balancing_loss(scores, indices, mask)
    expected = router.aux_loss(scores, indices, mask) + 0.5 * balance + 0.25 * router_z_loss(dense_logits(scores))
    np.testing.assert_allclose(stack.aux_loss(scores, indices, mask), expected, rtol=1e-5)


def balancing_loss(scores, indices, mask):
    """The balancing loss of scores over the whole grid."""
    cells = indices[..., 0] * 3 + indices[..., 1]
    return load_balancing_loss(jax.nn.softmax(dense_logits(scores)), cells, mask)


def test_a_balancing_loss_sees_the_changes_that_came_before_it():
    """Around the noise it sees noisy scores; inside it sees clean ones."""
    base, noise = product_key(PLANE, init_scale=1.0), partial(add_noise, stddev=3.0)
    params = base.init(jax.random.key(0), 6)
    outside, inside = chain_routers(base, noise, with_balancing_loss), chain_routers(base, with_balancing_loss, noise)
    for router in (outside, inside):
        scores = score(router, params, X, key=jax.random.key(5))
        indices, mask = router.select(scores, 2)
        expected = 0.01 * balancing_loss(scores if router is outside else score(base, params, X), indices, mask)
        np.testing.assert_allclose(router.aux_loss(scores, indices, mask), expected, rtol=1e-5)


def test_the_balancing_loss_evens_out_a_router():
    """Gradient descent on it alone: from every sample on one expert to at most one and a half of its share."""
    router = with_balancing_loss(routing.flat_top_k((4,)), 1.0)
    params, x = router.init(jax.random.key(0), 6), jax.random.normal(jax.random.key(7), (64, 6))
    params["keys"]["bias"] = jnp.array([1.0, 0.0, 0.0, 0.0])

    def loss(params):
        scores = score(router, params, x)
        indices, mask = router.select(scores, 1)
        return router.aux_loss(scores, indices, mask), jnp.bincount(indices[:, 0, 0], length=4)

    step, counts = jax.jit(jax.grad(loss, has_aux=True)), []
    for _ in range(100):
        gradient, count = step(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
        counts.append(int(count.max()))
    assert counts[0] == 64
    assert counts[-1] <= 24


def test_ids_reach_the_router_inside():
    """They do through every kind of wrapper."""
    seen = []

    def scores(params, x, *, key=None, ids=None):
        seen.append(ids)
        return jnp.zeros((x.shape[0], 3))

    ids = jnp.arange(4, dtype=jnp.int32)
    inside = routing.top_k_router("inside", (3,), lambda key, d_model: (), scores)
    for wrap in (partial(add_noise, stddev=1.0), freeze, routing.with_z_loss):
        score(wrap(inside), (), X, ids=ids)
    assert len(seen) == 3
    assert all(given is ids for given in seen)


def test_names_tell_what_was_done():
    """They say it in its order. A chain takes own functions, and names one that returns something else."""
    base = product_key(PLANE)
    router = chain_routers(base, partial(add_noise, stddev=1.0), with_balancing_loss, freeze)
    assert router.name == "product_key+noise+balance+frozen"
    assert chain_routers(router) is router
    assert chain_routers(base, lambda router: router._replace(name="mine")).name == "mine"
    with pytest.raises(routing.RouterError, match=r"must return a router, .*str.* made str of 'product_key'"):
        chain_routers(base, str)


def test_equal_combinations_are_one_object():
    """They are, however the arguments are written; other arguments make another."""
    base = product_key(PLANE)
    assert base is product_key(grid_size=[*PLANE], init_scale=0.1)
    assert add_noise(base, 1.0) is add_noise(base, stddev=1.0)
    assert add_noise(base, 1.0) is not add_noise(base, 2.0)
    assert with_balancing_loss(base) is with_balancing_loss(base, 0.01)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (partial(add_noise, stddev=0.0), "stddev must be positive and finite, got 0"),
        (partial(add_noise, stddev=float("nan")), "stddev must be positive and finite, got nan"),
        (partial(routing.temperature, value=float("inf")), "temperature must be positive and finite, got inf"),
        (partial(drop_experts, rate=1.0), "rate must be at least 0 and below 1, got 1"),
        (partial(with_balancing_loss, weight=-1.0), "weight must be at least 0 and finite, got -1"),
        (partial(routing.with_z_loss, weight=float("nan")), "weight must be at least 0 and finite, got nan"),
    ],
)
def test_settings_out_of_range_are_refused(wrap, message):
    """The message has the value."""
    with pytest.raises(ValueError, match=message):
        wrap(product_key(PLANE))


def test_a_wrong_router_inside_is_named():
    """The error speaks of the user's router, not of the wrapper."""
    wrong = routing.top_k_router("too_wide", (3,), lambda key, d_model: (), lambda params, x, **kw: jnp.zeros((4, 5)))
    with pytest.raises(routing.RouterError, match="router 'too_wide'"):
        score(add_noise(wrong, 1.0), (), X)
