"""Every router of the registry, and some combinations, keep the contract of `routing.base` on any grid."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax.routing import (
    ROUTERS,
    add_noise,
    chain,
    check_router,
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
    "noise_and_losses": lambda grid: chain(
        product_key(grid), partial(add_noise, stddev=1.0), with_balancing_loss, with_z_loss
    ),
    "failing_noisy": lambda grid: chain(noisy_top_k(grid), partial(drop_experts, rate=0.4), freeze),
    "disturbed_switch": lambda grid: chain(
        switch(grid),
        partial(add_noise, stddev=2.0),
        partial(temperature, value=3.0),
        partial(drop_experts, rate=0.3),
    ),
    "failing_expert_choice": lambda grid: drop_experts(expert_choice(grid), 0.5),
    "hash_with_losses": lambda grid: chain(hash_router(grid), with_balancing_loss, with_z_loss),
}
CASES = {name: partial(make_router, name) for name in ROUTERS} | STACKS
GRIDS = [(5,), (2, 1, 3)]  # on the second, additive and flat scores have the same width
BATCH, D_MODEL = 4, 6

every_router = pytest.mark.parametrize("name", CASES)


def setup(name: str, grid: tuple[int, ...]):
    router = CASES[name](grid)
    params = router.init(jax.random.key(0), D_MODEL)
    # Away from special points such as the zeros of noisy top-k.
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves) + 1)
    leaves = [
        leaf + 0.3 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys[: len(leaves)], strict=True)
    ]
    return router, jax.tree.unflatten(tree, leaves), jax.random.normal(keys[-1], (BATCH, D_MODEL))


def masks_of(grid: tuple[int, ...]):
    """Everybody alive, some dead, one left, nobody."""
    some = np.random.default_rng(0).random(grid) < 0.5
    one = np.zeros(grid, bool)
    one.reshape(-1)[-1] = True
    return [np.ones(grid, bool), some, one, np.zeros(grid, bool)]


def route(router, scores, k, alive=None, answers=True):
    """Indices, mask, weights and auxiliary loss, when these samples' experts answer."""
    indices, mask = router.select(scores, k, alive)
    answered = mask & answers
    weights = router.combine(gather_logits(scores, indices, router.grid_size), answered)
    return indices, mask, weights, router.aux_loss(scores, indices, answered)


# Not compiled as a whole, here and below: operation by operation, all routers share what there is to compile.
@pytest.mark.parametrize(
    ("name", "grid"), [(name, grid) for name in CASES for grid in GRIDS if name in ROUTERS or len(grid) > 1], ids=str
)
def test_contract(name, grid):
    """Shapes, dtypes, living and distinct experts, weights from 0 to 1 in sum, a finite loss: for every k and grid."""
    router, params, x = setup(name, grid)
    for key in (jax.random.key(3), None):
        scores = score(router, params, x, key=key, ids=jnp.arange(BATCH, dtype=jnp.int32))
        for k, alive in itertools.product(sorted({1, 2, math.prod(grid)}), masks_of(grid)):
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
    """What users' routers are checked for holds for ours."""
    check_router(CASES[name]((2, 3)), (2, 3), D_MODEL)


@every_router
def test_gradients_are_finite(name):
    """Also when only some, or none, of the chosen experts answered."""
    router, params, x = setup(name, (2, 3))

    def loss(params, x, answers, key):
        scores = score(router, params, x, key=key)
        _, _, weights, aux_loss = route(router, scores, 2, answers=answers[:, None])
        return jnp.sum(weights * jnp.arange(1, weights.shape[1] + 1)) + aux_loss

    for answers, key in (
        (jnp.ones(BATCH, bool), jax.random.key(5)),
        (jnp.arange(BATCH) > 1, None),
        (jnp.zeros(BATCH, bool), jax.random.key(5)),
    ):
        for leaf in jax.tree.leaves(jax.value_and_grad(loss, argnums=(0, 1))(params, x, answers, key)):
            assert np.isfinite(leaf).all()


@every_router
def test_evaluation_is_deterministic_and_training_depends_on_nothing_but_the_key(name):
    """Equal keys give equal scores; without a key they are always the same."""
    router, params, x = setup(name, (2, 3))
    for key in (None, jax.random.key(7)):
        once, again = (score(router, params, x, key=key) for _ in range(2))
        jax.tree.map(np.testing.assert_array_equal, once, again)


@every_router
def test_chance_is_drawn_by_those_that_say_so(name):
    """Keys matter to the routers that draw random numbers, and to no others."""
    router, params, x = setup(name, (2, 3))
    first, second = (score(router, params, x, key=jax.random.key(seed)).logits for seed in (1, 2))
    equal = all(np.array_equal(left, right) for left, right in zip(first, second, strict=True))
    random = {
        "noisy_top_k",
        "uniform_random",
        "noise_and_losses",
        "failing_noisy",
        "disturbed_switch",
        "failing_expert_choice",
    }
    assert equal == (name not in random)


@every_router
def test_compiled_and_vmapped_is_the_same(name):
    """jit of vmap over batches, grids of the living included, gives what each batch gives by itself."""
    router, params, x = setup(name, (2, 3))
    batches = jnp.stack([x, 2 * x[::-1], x + 1])
    keys = jax.random.split(jax.random.key(4), 3)
    ids = jnp.arange(3 * BATCH, dtype=jnp.int32).reshape(3, BATCH)
    alive = jnp.asarray(np.random.default_rng(1).random((3, 2, 3)) < 0.7)

    def whole(x, key, ids, alive):
        return route(router, score(router, params, x, key=key, ids=ids), 2, alive)

    mapped = jax.jit(jax.vmap(whole))(batches, keys, ids, alive)
    for i in range(3):
        indices, mask, weights, loss = whole(batches[i], keys[i], ids[i], alive[i])
        np.testing.assert_array_equal(mapped[1][i], mask)
        np.testing.assert_array_equal(mapped[0][i][mask], indices[mask])
        np.testing.assert_allclose(mapped[2][i], weights, atol=1e-5)
        np.testing.assert_allclose(mapped[3][i], loss, rtol=1e-4, atol=1e-6)


@every_router
def test_only_additive_scores_do_without_the_whole_grid(name):
    """On several dimensions: flat scores, or a selection of another kind than top-k, need the whole grid."""
    router, params, x = setup(name, (2, 3))
    is_additive = len(score(router, params, x).logits) == 2
    assert router.whole_grid == (not is_additive or "expert_choice" in name)


@every_router
def test_equal_arguments_give_the_same_object(name):
    """Compiled code is cached by identity."""
    assert CASES[name]((2, 3)) is CASES[name]((2, 3))
    assert CASES[name]((2, 3)) is not CASES[name]((3, 2))


@pytest.mark.parametrize("name", ROUTERS)
def test_impossible_grids_and_k_are_refused(name):
    """By every router, with the value in the message."""
    with pytest.raises(ValueError, match="grid_size must be one or more positive integers"):
        make_router(name, (2, 0))
    router, params, x = setup(name, (2, 3))
    scores = score(router, params, x)
    for k in (0, 7):
        with pytest.raises(ValueError, match=f"between 1 and the 6 cells.*got {k}"):
            router.select(scores, k)
    with pytest.raises(ValueError, match=r"\(2, 3\), got \(3, 2\)"):
        router.select(scores, 1, jnp.ones((3, 2), bool))
