"""Every router of the registry, and some combinations, keep the contract of `routing.base` on any grid."""

import functools
import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax.routing import (
    ROUTERS,
    RouterError,
    Scores,
    add_noise,
    chain_routers,
    check_router,
    combine_weights,
    drop_experts,
    expert_choice,
    freeze,
    gather_logits,
    hash_router,
    make_router,
    noisy_top_k,
    product_key,
    score,
    switch,
    temperature,
    with_balancing_loss,
    with_z_loss,
)

STACKS = {
    "noise_and_losses": lambda grid: chain_routers(
        product_key(grid), partial(add_noise, stddev=1.0), with_balancing_loss, with_z_loss
    ),
    "failing_noisy": lambda grid: chain_routers(noisy_top_k(grid), partial(drop_experts, rate=0.4), freeze),
    "disturbed_switch": lambda grid: chain_routers(
        switch(grid),
        partial(add_noise, stddev=2.0),
        partial(temperature, value=3.0),
        partial(drop_experts, rate=0.3),
    ),
    "failing_expert_choice": lambda grid: drop_experts(expert_choice(grid), 0.5),
    "hash_with_losses": lambda grid: chain_routers(hash_router(grid), with_balancing_loss, with_z_loss),
}
RANDOM = {
    "noisy_top_k",
    "uniform_random",
    "noise_and_losses",
    "failing_noisy",
    "disturbed_switch",
    "failing_expert_choice",
}
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


def masks_of(grid: tuple[int, ...]):
    """Everybody alive, some dead, nobody alive."""
    return [np.ones(grid, bool), np.random.default_rng(0).random(grid) < 0.5, np.zeros(grid, bool)]


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
    """Shapes, dtypes, living and distinct experts, weights from 0 to 1 in sum, a finite loss: for every k and grid."""
    router, params, x = setup(name, grid)
    for key in (jax.random.key(3), None):
        scores = score(router, params, x, key=key, ids=jnp.arange(BATCH, dtype=jnp.int32))
        for k, alive in itertools.product((2, math.prod(grid)), masks_of(grid)):
            indices, mask, weights, loss = map(np.asarray, route(router, scores, k, jnp.asarray(alive)))
            slots = indices.shape[1]
            assert indices.shape == (BATCH, slots, len(grid))
            assert mask.shape == weights.shape == (BATCH, slots)
            assert (indices.dtype, mask.dtype, weights.dtype) == (np.int32, np.bool_, np.float32)
            assert (indices >= 0).all()
            assert (indices < np.array(grid)).all()
            for row in range(BATCH):
                cells = [tuple(cell) for cell in indices[row][mask[row]]]
                assert len(set(cells)) == len(cells) <= alive.sum()
                assert all(alive[cell] for cell in cells)
            assert (weights >= 0).all()
            assert (weights[~mask] == 0).all()
            assert (weights.sum(axis=1) <= 1 + 1e-6).all()
            assert loss.shape == ()
            assert np.isfinite(loss)


@every_router
def test_the_library_passes_its_own_check(name):
    """Our routers pass the check for users' routers, which asks for finite gradients even when experts are silent."""
    check_router(CASES[name](GRID), GRID, D_MODEL)


@every_router
def test_scores_depend_on_nothing_but_the_key(name):
    """Equal keys give equal scores, no key always the same; another key others, for those that draw and only those.

    On several dimensions flat scores, or a selection of another kind than top-k, need the whole grid.
    """
    router, params, x = setup(name)
    same, again, other = (score(router, params, x, key=jax.random.key(seed)) for seed in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, same, again)
    jax.tree.map(np.testing.assert_array_equal, *(score(router, params, x) for _ in range(2)))
    equal = all(np.array_equal(left, right) for left, right in zip(same.logits, other.logits, strict=True))
    assert equal == (name not in RANDOM)
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
    assert CASES[name](GRID) is CASES[name](GRID)
    assert CASES[name](GRID) is not CASES[name]((3, 2))


@pytest.mark.parametrize("name", ROUTERS)
def test_impossible_grids_and_k_are_refused(name):
    """By every router, with the value in the message."""
    with pytest.raises(ValueError, match="grid_size must be one or more positive integers"):
        make_router(name, (2, 0))
    router, params, x = setup(name)
    scores = score(router, params, x)
    for k in (0, 7):
        with pytest.raises(ValueError, match=f"between 1 and the 6 cells.*got {k}"):
            router.select(scores, k)
    with pytest.raises(ValueError, match=r"\(2, 1, 3\), got \(3, 2\)"):
        router.select(scores, 1, jnp.ones((3, 2), bool))


@every_router
def test_one_expert_of_each_sample_teaches_the_gate(name):
    """The weight of one expert moves with the gate's parameters if the weights of two do, and is at most 1."""
    router, params, x = setup(name)
    ids = jnp.arange(len(x), dtype=jnp.int32)

    def moved(k: int) -> bool:
        def outcome(params):
            scores = score(router, params, x, ids=ids)
            indices, mask = router.select(scores, k)
            weights = combine_weights(router, scores, indices[:, :k], mask[:, :k])
            assert weights.shape == (len(x), k)
            return jnp.sum(weights * jnp.arange(1.0, k + 1)), weights

        grads, weights = jax.grad(outcome, has_aux=True, allow_int=True)(params)
        assert (weights <= 1 + 1e-6).all()
        leaves = [leaf for leaf in jax.tree.leaves(grads) if leaf.dtype != jax.dtypes.float0]
        return any(np.abs(leaf).max() > 1e-6 for leaf in leaves)

    assert moved(1) == moved(2)


def test_the_weight_of_one_expert_is_its_probability():
    """exp(1 + 3) over (e^1 + e^2) (e^3 + e^0), the sum over a grid of two by two; the sample passes by the rest."""
    router, scores = product_key((2, 2)), Scores((jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 0.0]])))
    weights = combine_weights(router, scores, jnp.array([[[0, 0]]], jnp.int32), jnp.array([[True]]))
    expected = math.exp(4) / ((math.e + math.e**2) * (math.exp(3) + 1))
    np.testing.assert_allclose(weights, [[expected]], rtol=1e-6)
    own = router._replace(name="mine", combine=lambda logits, mask: jax.nn.softmax(logits))
    with pytest.raises(RouterError, match="'mine': with one expert of each sample"):
        combine_weights(own, scores, jnp.array([[[0, 0]]], jnp.int32), jnp.array([[True]]))
    assert combine_weights(own, scores, jnp.zeros((1, 2, 2), jnp.int32), jnp.ones((1, 2), bool)).shape == (1, 2)
