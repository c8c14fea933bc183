"""Gates and their losses against their equations, expert choice, and routers without a gate."""

import math
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax import routing
from dmoe_jax.routing import Scores, combine_weights, gather_logits, hash_router, masked_softmax, score, uniform_random
from dmoe_jax.routing.balancing import BIAS
from dmoe_jax.routing.hash_router import sim_hash
from dmoe_jax.routing.losses import cv_squared, importance_loss, load_balancing_loss, load_loss, router_z_loss
from dmoe_jax.routing.weights import normalised_weights

GRID = (2, 3)
X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)


def normalised(x: np.ndarray, epsilon: float) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def flat(indices, grid=GRID) -> jax.Array:
    """Row-major numbers of cells."""
    return indices[..., 0] * grid[1] + indices[..., 1]


def noisy_params():
    """Parameters of noisy top-k away from its zeros."""
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=(6, 6)) * 0.3, jnp.float32) for name in ("gate", "noise")}


def test_flat_top_k_is_the_product_key_gate_of_a_line():
    """LayerNorm(x) @ keys + bias, one score for each cell, row-major; parameters as those of product_key."""
    router = routing.flat_top_k(GRID)
    params = router.init(jax.random.key(0), 6)
    jax.tree.map(np.testing.assert_array_equal, params, routing.product_key((6,)).init(jax.random.key(0), 6))
    scores = score(router, params, jnp.asarray(X))
    (logits,) = scores.logits
    np.testing.assert_allclose(logits, normalised(X, 1e-6) @ np.asarray(params["keys"]["kernel"]), atol=1e-5)
    indices, mask = router.select(scores, 6)
    assert mask.all()
    np.testing.assert_array_equal(flat(indices), np.argsort(-np.asarray(logits), axis=1))


def test_noisy_top_k_matches_equation_4():
    """H = x W_g + normal * (softplus(x W_noise) + 0.01), the normal numbers those of the key; both begin at 0."""
    router = routing.noisy_top_k(GRID)
    zeros = router.init(jax.random.key(0), 6)
    assert not any(leaf.any() for leaf in jax.tree.leaves(zeros))
    for params in (zeros, noisy_params()):
        x = normalised(X, 1e-6)
        clean, stddev = x @ np.asarray(params["gate"]), np.log1p(np.exp(x @ np.asarray(params["noise"]))) + 0.01
        noise = np.asarray(jax.random.normal(jax.random.key(2), (4, 6)))
        scores = score(router, params, jnp.asarray(X), key=jax.random.key(2))
        np.testing.assert_allclose(scores.logits[0], clean + noise * stddev, atol=1e-5)
        np.testing.assert_allclose(scores.extras, (clean, stddev), atol=1e-5)
        np.testing.assert_allclose(score(router, params, jnp.asarray(X)).logits[0], clean, atol=1e-5)


def test_noisy_top_k_weighs_its_two_losses():
    """0.1 of each by default; the gates are the softmax over the experts that answered."""
    router, other = routing.noisy_top_k(GRID), routing.noisy_top_k(GRID, importance_weight=2.0, load_weight=0.0)
    scores = score(router, noisy_params(), jnp.asarray(X), key=jax.random.key(2))
    indices, mask = router.select(scores, 2)
    mask = mask.at[0, 1].set(False)
    gates = masked_softmax(gather_logits(scores, indices, GRID), mask)
    importance = float(importance_loss(gates, flat(indices), 6))
    clean, stddev = scores.extras
    load = float(load_loss(clean, scores.logits[0], stddev, k=2))
    np.testing.assert_allclose(router.aux_loss(scores, indices, mask), 0.1 * importance + 0.1 * load, rtol=1e-5)
    np.testing.assert_allclose(other.aux_loss(scores, indices, mask), 2 * importance, rtol=1e-5)


def test_the_load_loss_trains_the_noise():
    """W_noise gets its gradient through the load loss and the noise itself, W_g through everything."""
    router = routing.noisy_top_k(GRID)

    def loss(params):
        scores = score(router, params, jnp.asarray(X), key=jax.random.key(2))
        return router.aux_loss(scores, *router.select(scores, 2))

    gradient = jax.jit(jax.grad(loss))(noisy_params())
    assert min(np.abs(gradient[name]).max() for name in ("noise", "gate")) > 1e-4


def test_switch_weights_are_probabilities_over_the_whole_grid():
    """p_i = softmax(h)_i over all experts, not over the chosen; the rest is left over. So the weight of a single expert
    depends on the router, too: d p / d h_i = p (1 - p)."""
    router = routing.switch(GRID)
    scores = score(router, router.init(jax.random.key(0), 6), jnp.asarray(X))
    probs = softmax(np.asarray(scores.extras))
    np.testing.assert_allclose(np.exp(scores.logits[0]), probs, rtol=1e-5)
    indices, mask = router.select(scores, 2)
    mask = mask.at[0].set(jnp.array([False, True]))
    expected = -np.sort(-probs, axis=1)[:, :2]
    expected[0, 0] = 0
    np.testing.assert_allclose(router.combine(gather_logits(scores, indices, GRID), mask), expected, rtol=1e-5)

    def weight(logits):
        return routing.switch((2,)).combine(jax.nn.log_softmax(logits)[:, :1], jnp.array([[True]]))[0, 0]

    p = softmax(np.array([[0.3, -0.2]]))[0, 0]
    np.testing.assert_allclose(jax.grad(weight)(jnp.array([[0.3, -0.2]])), [[p * (1 - p), -p * (1 - p)]], rtol=1e-5)


def test_switch_weighs_its_two_losses():
    """0.01 of the balancing loss, 0.001 of the z-loss of the raw logits."""
    router, only_z = routing.switch(GRID), routing.switch(GRID, balance_weight=0.0, z_weight=1.0)
    scores = score(router, router.init(jax.random.key(0), 6), jnp.asarray(X))
    indices, mask = router.select(scores, 1)
    balance = load_balancing_loss(jnp.exp(scores.logits[0]), flat(indices), mask)
    z = router_z_loss(scores.extras)
    assert float(z) > 1.0  # of raw logits: that of log-probabilities would be 0
    np.testing.assert_allclose(router.aux_loss(scores, indices, mask), 0.01 * balance + 0.001 * z, rtol=1e-5)
    np.testing.assert_allclose(only_z.aux_loss(scores, indices, mask), z, rtol=1e-5)


def test_frozen_random_is_the_emulators_gate():
    """LayerNorm(x) @ keys, every feature's row of keys of length 1 over the experts."""
    router = routing.frozen_random(GRID)
    params = router.init(jax.random.key(0), 6)
    drawn = np.asarray(jax.random.normal(jax.random.key(0), (6, 6)))
    keys = drawn / np.sqrt((drawn**2).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(params["keys"], keys, rtol=1e-5)
    np.testing.assert_allclose(score(router, params, jnp.asarray(X)).logits[0], normalised(X, 1e-5) @ keys, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (routing.noisy_top_k, {"importance_weight": -1.0}, r"at least 0, got -1\.0 and 0\.1"),
        (routing.switch, {"z_weight": -2.0}, r"at least 0, got 0\.01 and -2\.0"),
        (routing.peer, {"part_dim": 1}, "part_dim must be at least 2, got 1"),
        # All scores would be equal for ever.
        (routing.flat_top_k, {"init_scale": 0.0}, "init_scale must be positive, got 0"),
        (routing.product_key, {"init_scale": 0.0}, "init_scale must be positive, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(make, settings, message):
    """The message has the value."""
    with pytest.raises(ValueError, match=message):
        make(GRID, **settings)


def test_deepseek_matches_the_paper() -> None:
    """Sigmoid affinities; the top k of affinity plus bias; weights are shares of the affinities (eq. 12 to 16)."""
    router = routing.deepseek_v3(GRID)
    params = router.init(jax.random.key(0), 6)
    bias = np.array([0.0, 0.9, 0.0, -0.9, 0.0, 0.0], np.float32)
    scores = score(router, {**params, BIAS: (jnp.asarray(bias),)}, jnp.asarray(X))
    keys = params["router"]["keys"]
    affinities = 1 / (1 + np.exp(-(normalised(X, 1e-6) @ np.asarray(keys["kernel"]) + np.asarray(keys["bias"]))))
    np.testing.assert_allclose(scores.logits[0], affinities, atol=1e-5)
    indices, mask = router.select(scores, 2)
    weights, chosen = combine_weights(router, scores, indices, mask), np.asarray(flat(indices))
    # Its bias lifts expert 1 above every other one.
    assert (chosen == 1).any(axis=1).all()
    assert 3 not in chosen
    for row in range(4):
        best = np.argsort(-(affinities[row] + bias), kind="stable")[:2]
        assert chosen[row].tolist() == best.tolist()
        np.testing.assert_allclose(weights[row], affinities[row, best] / affinities[row, best].sum(), atol=1e-5)


def test_the_silent_leave_their_weight_to_the_others() -> None:
    """0.6 and 0.2 of three answer: 3/4 and 1/4. Nobody answers: zeros, with a gradient of zeros."""
    affinities = jnp.array([[0.6, 0.9, 0.2]])
    weights = normalised_weights(affinities, jnp.array([[True, False, True]]))
    np.testing.assert_allclose(weights, [[0.75, 0, 0.25]], rtol=1e-6)
    gradient = jax.grad(lambda logits: normalised_weights(logits, jnp.zeros((1, 3), bool)).sum())(affinities)
    np.testing.assert_array_equal(gradient, np.zeros((1, 3)))
    # Noise may bring an affinity below 0; NaN of a silent expert is nobody's.
    noisy = normalised_weights(jnp.array([[-0.1, 0.5, jnp.nan]]), jnp.array([[True, True, False]]))
    np.testing.assert_array_equal(noisy, [[0.0, 1.0, 0.0]])


def by_loops(logits: np.ndarray, k: int, alive: np.ndarray) -> list[set[int]]:
    """The experts of each sample by expert choice, expert by expert."""
    batch, experts = len(logits), np.flatnonzero(alive)
    whole, left_over = divmod(batch * k, max(len(experts), 1))
    taken: list[set[int]] = [set() for _ in range(batch)]
    candidates = []
    for expert in experts:
        order = sorted(range(batch), key=lambda b: (-logits[b, expert], b))
        for sample in order[:whole]:
            taken[sample].add(int(expert))
        if whole < batch:
            candidates.append((-logits[order[whole], expert], int(expert), order[whole]))
    for _, expert, sample in sorted(candidates)[:left_over]:
        taken[sample].add(expert)
    most = min(logits.shape[1], 2 * k)
    return [set(sorted(own, key=lambda e: (-logits[b, e], e))[:most]) for b, own in enumerate(taken)]


def chosen(logits, k, alive=None, grid=(2, 2)) -> list[set[int]]:
    """The experts of each sample, flat, by expert choice."""
    router = routing.expert_choice(grid)
    alive = None if alive is None else jnp.asarray(alive, bool).reshape(grid)
    indices, mask = router.select(Scores((jnp.asarray(logits, jnp.float32),)), k, alive)
    rows = zip(np.asarray(flat(indices, grid)), np.asarray(mask), strict=True)
    return [set(cells[taken].tolist()) for cells, taken in rows]


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("alive", [(1, 1, 1, 1), (1, 0, 1, 1), (0, 0, 1, 0), (0, 0, 0, 0)])
def test_expert_choice_equals_brute_force(k, alive):
    """Exactly the pairs that a loop over experts finds; with two equal scores in, too."""
    rng = np.random.default_rng(k)
    for _ in range(5):
        logits = rng.permutation(20).reshape(5, 4) / 8.0
        logits[1] = logits[0]
        assert chosen(logits, k, alive) == by_loops(logits, k, np.array(alive, bool))


def test_choices_by_hand():
    """One sample gets its k best living experts. Of several a sample keeps the best 2k: all four experts like sample 0
    best, with k = 1 it keeps two of them, and nobody takes another instead. The last sample decides on the first's."""
    logits = np.array([[0.1, 0.4, 0.3, 0.2]])
    assert (chosen(logits, 2), chosen(logits, 2, (1, 0, 1, 1))) == ([{1, 2}], [{2, 3}])
    assert chosen([[4.0, 3.0, 2.0, 1.0], [0.0] * 4, [0.0] * 4, [0.0] * 4], 1) == [{0, 1}, set(), set(), set()]
    first, second = [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]
    assert chosen([first, second], 2)[0] != chosen([first, [2.0] * 4], 2)[0]


def test_weights_of_expert_choice_are_the_affinities():
    """softmax over all experts of the layer, not renormalised over those that took the sample."""
    router = routing.expert_choice((2, 2))
    scores = score(router, router.init(jax.random.key(0), 6), jnp.asarray(X))
    affinities = np.exp(np.asarray(scores.logits[0]))
    np.testing.assert_allclose(affinities.sum(axis=1), np.ones(4), rtol=1e-5)
    indices, mask = router.select(scores, 2)
    weights = router.combine(gather_logits(scores, indices, (2, 2)), mask)
    expected = np.where(mask, np.take_along_axis(affinities, np.asarray(flat(indices, (2, 2))), axis=1), 0)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


def phi(z: float) -> float:
    """The standard normal distribution function."""
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


def index(*rows):
    return jnp.array(rows, jnp.int32)


def test_load_balancing_loss_of_a_hand_made_batch():
    """E sum f P: with f = (3/4, 1/4) and P = (0.6, 0.4) it is 2 (0.45 + 0.1) = 1.1. Slots without an answer count
    nowhere: with f = (1, 0) and P = (0.7, 0.3) it is 2 * 0.7."""
    probs = jnp.array([[0.9, 0.1], [0.8, 0.2], [0.5, 0.5], [0.2, 0.8]])
    loss = load_balancing_loss(probs, index([0], [0], [0], [1]), jnp.ones((4, 1), bool))
    np.testing.assert_allclose(loss, 1.1, rtol=1e-6)
    probs, mask = jnp.array([[0.7, 0.3]] * 2), jnp.array([[True, False]] * 2)
    np.testing.assert_allclose(load_balancing_loss(probs, index([0, 1], [0, 1]), mask), 1.4, rtol=1e-6)
    assert float(load_balancing_loss(probs, index([0, 1], [0, 1]), ~mask & mask)) == 0.0


@pytest.mark.parametrize("k", [1, 2, 4])
def test_load_balancing_loss_is_one_when_all_is_even(k):
    """Uniform f and uniform P give 1, whatever the number of slots."""
    probs = jnp.full((4, 4), 0.25)
    chosen = jnp.array([[(row + slot) % 4 for slot in range(k)] for row in range(4)], jnp.int32)
    np.testing.assert_allclose(load_balancing_loss(probs, chosen, jnp.ones((4, k), bool)), 1.0, rtol=1e-6)


def test_load_balancing_gradient_flows_through_the_probabilities():
    """d loss / d P[b, i] = E f_i / batch."""
    probs, mask = jnp.full((2, 2), 0.5), jnp.ones((2, 2), bool)
    gradient = jax.grad(load_balancing_loss)(probs, index([0, 0], [0, 1]), mask)  # f = (3/4, 1/4)
    np.testing.assert_allclose(gradient, [[0.75, 0.25]] * 2, rtol=1e-6)


def test_router_z_loss_of_hand_made_logits():
    """Two zeros: (log 2)^2; experts that may not be chosen take no part; the mean is over samples."""
    np.testing.assert_allclose(router_z_loss(jnp.zeros((3, 2))), math.log(2) ** 2, rtol=1e-6)
    np.testing.assert_allclose(router_z_loss(jnp.array([[2.0, -jnp.inf], [0.0, -jnp.inf]])), 2.0, rtol=1e-6)


ONE = jnp.ones((1, 3))


@pytest.mark.parametrize(
    ("loss", "at"),
    [
        (router_z_loss, jnp.full((2, 3), -jnp.inf)),
        (cv_squared, jnp.zeros(4)),
        (lambda z: load_loss(z, z, ONE, k=3), jnp.array([[1.0, 2.0, 3.0]])),
    ],
    ids=["z-loss of samples without experts", "no load", "all experts chosen"],
)
def test_where_there_is_nothing_to_balance_losses_are_zero(loss: Any, at: Any) -> None:
    """They are zero in value and in gradient, and not NaN."""
    value, gradient = jax.value_and_grad(loss)(at)
    assert float(value) == 0.0
    np.testing.assert_array_equal(gradient, jnp.zeros_like(at))


def test_cv_squared_by_hand():
    """(1, 3): variance 1, mean 2, so 1/4; even values give 0. Importance (1.5, 0.5, 0): mean 2/3, variance
    (25 + 1 + 16) / 108 = 7/18, so 7/8."""
    np.testing.assert_allclose(cv_squared(jnp.array([1.0, 3.0])), 0.25, rtol=1e-6)
    assert float(cv_squared(jnp.full(5, 7.0))) == 0.0
    loss = importance_loss(jnp.array([[0.75, 0.25]] * 2), index([0, 1], [0, 1]), num_experts=3)
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


def test_load_loss_pulls_an_overloaded_expert_down():
    """The gradient on the clean logit of the expert with the highest load is positive, on the others' it is not."""
    clean = jnp.array([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    gradient = jax.grad(lambda z: load_loss(z, clean, jnp.ones((2, 3)), k=1))(clean)
    assert (gradient[:, 0] > 0).all()
    assert (gradient[:, 1:] < 0).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_few_bits_count_as_many(dtype: Any) -> None:
    """f = (3/4, 1/4, 0, 0) of 8192 samples; bfloat16 cannot count beyond 256, float16 beyond 2048, and has no 1e-10."""
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


def mix(h: int) -> int:
    """MurmurHash3's 32-bit finaliser in Python integers."""
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)


def number(*words: int) -> float:
    """The number from 0 to 1 of these words."""
    state = 0
    for word in words:
        state = mix(((state + 0x9E3779B9) & 0xFFFFFFFF) ^ (word & 0xFFFFFFFF))
    return (state >> 8) / 2**24


def selected(router, scores, k=1, alive=None) -> np.ndarray:
    """Flat indices [batch, k] of the experts of these scores."""
    indices, mask = router.select(scores, k, alive)
    assert mask.all()
    return np.ravel_multi_index(tuple(np.moveaxis(np.asarray(indices), -1, 0)), router.grid_size)


def choices(router, count, k=1, alive=None) -> np.ndarray:
    """Flat indices [count, k] of the experts of the ids 0, 1, ..."""
    ids = jnp.arange(count, dtype=jnp.int32)
    return selected(router, score(router, {}, jnp.zeros((count, 1)), ids=ids), k, alive)


def test_hash_scores_against_integers():
    """One number for each (seed, dimension, coordinate, id), negative ids and large seeds included."""
    router, ids = hash_router((2, 3), seed=4_000_000_000), [0, 1, 33277, -5]
    for dim, part in enumerate(score(router, {}, jnp.zeros((4, 1)), ids=jnp.array(ids, jnp.int32)).logits):
        expected = [[number(4_000_000_000, dim, u, i) for u in range(part.shape[1])] for i in ids]
        np.testing.assert_array_equal(part, np.float32(expected))


@pytest.mark.parametrize("grid", [(16,), (4, 4)])
def test_hash_spreads_ids_evenly(grid):
    """4096 ids over 16 experts: 256 each, standard deviation 15.5; another seed, another assignment."""
    chosen, other = (choices(hash_router(grid, seed=seed), 4096)[:, 0] for seed in (0, 1))
    assert np.abs(np.bincount(chosen, minlength=16) - 256).max() < 5 * 15.5
    assert 0.02 < np.mean(chosen == other) < 0.12  # one in 16 by chance


def test_only_a_dead_experts_samples_move():
    """Rendezvous hashing: each goes to its second best, everybody else stays."""
    router, alive = hash_router((3, 4)), np.ones((3, 4), bool)
    alive[1, 2] = False
    ranked, after = choices(router, 300, k=2), choices(router, 300, alive=jnp.asarray(alive))[:, 0]
    moved = ranked[:, 0] == 6  # (1, 2)
    assert moved.any()
    np.testing.assert_array_equal(after, np.where(moved, ranked[:, 1], ranked[:, 0]))


def test_hash_ignores_features_when_it_has_ids_and_is_blind_to_scale_when_not():
    """Ids decide; without them the direction of x does."""
    router, x, ids = hash_router((2, 3)), jax.random.normal(jax.random.key(0), (5, 8)), jnp.arange(5, dtype=jnp.int32)
    jax.tree.map(np.testing.assert_array_equal, *(score(router, {}, each, ids=ids) for each in (x, -x)))
    jax.tree.map(np.testing.assert_array_equal, *(score(router, {}, each) for each in (x, 3 * x)))
    assert not np.array_equal(score(router, {}, x).logits[1], score(router, {}, -x).logits[1])


def test_sim_hash_bits_are_signs_of_projections():
    """The opposite direction flips every bit; the share of differing bits is the angle over pi (Charikar 2002)."""
    x = jax.random.normal(jax.random.key(1), (200, 8))
    there, back = np.asarray(sim_hash(x, 3)), np.asarray(sim_hash(-x, 3))
    np.testing.assert_array_equal(there ^ back, np.full(200, 0xFFFF))
    pairs = jnp.array([[1.0, 0.0], [1.0, 1.0]])  # 45 degrees: a quarter of the bits, over many seeds
    bits = [int(np.bitwise_xor(*np.asarray(sim_hash(pairs, seed)))).bit_count() for seed in range(60)]
    assert abs(np.mean(bits) / 16 - 0.25) < 0.06  # 960 bits: standard error 0.014


@pytest.mark.parametrize("factory", [hash_router, uniform_random])
def test_weights_without_a_gate_are_uniform(factory):
    """They are the same for each expert that answered."""
    mask = jnp.array([[True, True, False], [True, False, False], [False, False, False]])
    weights = factory((3,)).combine(jnp.full((3, 3), -7.0), mask)
    np.testing.assert_array_equal(weights, [[0.5, 0.5, 0], [1, 0, 0], [0, 0, 0]])


def test_uniform_random_is_uniform_in_training():
    """2000 draws of 2 out of 6 give each expert 667, standard deviation 21; samples differ although x does not."""
    router = uniform_random((2, 3))
    drawn = selected(router, score(router, {}, jnp.ones((2000, 4)), key=jax.random.key(0)), 2)
    assert np.abs(np.bincount(drawn.ravel(), minlength=6) - 2000 / 3).max() < 5 * 21


def test_uniform_random_follows_the_sample_in_evaluation():
    """Equal rows, of 0 or -0, get equal experts wherever they stand; others, also of the same numbers, are spread."""
    router, x = uniform_random((6,)), jax.random.normal(jax.random.key(0), (1200, 4)).at[:, 0].set(0.0)
    chosen, mirrored = (selected(router, score(router, {}, rows))[:, 0] for rows in (x, x[::-1].at[:, 0].set(-0.0)))
    np.testing.assert_array_equal(chosen, mirrored[::-1])
    assert np.mean(chosen == selected(router, score(router, {}, x[:, ::-1]))[:, 0]) < 0.25  # one in 6 by chance
    assert np.abs(np.bincount(chosen, minlength=6) - 200).max() < 5 * 13  # standard deviation 12.9


@pytest.mark.slow
def test_hashes_are_the_same_in_another_process():
    """Nothing depends on Python's own hash seed, or on what was traced before."""
    program = (
        "import jax.numpy as jnp; from dmoe_jax.routing import hash_router, score;"
        "x = jnp.arange(12.0).reshape(3, 4) - 5.5;"
        "print([part.tolist() for part in score(hash_router((2, 3), seed=9), {}, x).logits])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    x = jnp.arange(12.0).reshape(3, 4) - 5.5
    assert other.stdout.strip() == str([part.tolist() for part in score(hash_router((2, 3), seed=9), {}, x).logits])


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_out_of_range_are_refused(seed):
    """A seed is one word of 32 bits."""
    with pytest.raises(ValueError, match=f"between 0 and .* got {seed}"):
        hash_router((2,), seed=seed)
