"""Selection against brute force, masked softmax, the product-key gate, and scoring modules in its place."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from dmoe_jax.routing import Scores, gather_logits, masked_softmax, product_key, router_from_linen, router_from_nnx
from dmoe_jax.routing.base import select_top_k


def random_scores(rng: np.random.Generator, grid: tuple[int, ...], batch: int) -> tuple[np.ndarray, ...]:
    """Multiples of 1/1024, which float32 sums exactly: equal sums are ties here and there."""
    return tuple(rng.permutation(batch * m * 97)[: batch * m].reshape(batch, m).astype(np.float32) / 1024 for m in grid)


def brute_force(scores, k, alive):
    """The k best live cells of each sample by sorting all of them; ties to the lower coordinates."""
    best = []
    for b in range(scores[0].shape[0]):
        cells = [c for c in itertools.product(*map(range, alive.shape)) if alive[c]]
        total = {c: sum(s[b, u] for s, u in zip(scores, c, strict=True)) for c in cells}
        best.append(sorted(cells, key=lambda c: (-total[c], c))[:k])
    return best


@pytest.mark.parametrize(("grid", "k"), [((5,), 4), ((3, 4), 3), ((2, 3, 2), 1)])
def test_selection_equals_brute_force(grid, k):
    """select returns exactly the k best live cells, in order, and masks what is missing, however few are alive."""
    rng = np.random.default_rng(0)
    select = jax.jit(partial(select_top_k, k=k, grid_size=grid))
    for share_alive in np.linspace(0, 1, 20):
        alive = rng.random(grid) < share_alive
        scores = random_scores(rng, grid, 3)
        indices, mask = map(np.asarray, select(Scores(tuple(map(jnp.asarray, scores))), alive=alive))
        for b, expected in enumerate(brute_force(scores, k, alive)):
            assert [tuple(cell) for cell in indices[b][mask[b]].tolist()] == expected
        np.testing.assert_array_equal(mask.sum(axis=1), min(k, alive.sum()))


def test_everything_is_alive_by_default_and_ties_go_to_lower_coordinates():
    """Equal scores select the cells in row-major order."""
    indices, mask = select_top_k(Scores((jnp.zeros((1, 2)), jnp.zeros((1, 3)))), 4, grid_size=(2, 3))
    assert indices[0].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0]]
    assert (indices.dtype, mask.all()) == (jnp.int32, True)


def test_logits_are_sums_over_dimensions():
    """gather_logits adds the scores of an expert's coordinates: 1 + 30 and 2 + 10."""
    scores = Scores((jnp.array([[1.0, 2.0]]), jnp.array([[10.0, 20.0, 30.0]])))
    logits = gather_logits(scores, jnp.array([[[0, 2], [1, 0]]], jnp.int32), (2, 3))
    np.testing.assert_array_equal(logits, [[31.0, 12.0]])


def test_masked_softmax_ignores_masked_cells():
    """softmax(0, log 3) = 1/4, 3/4, whatever stands in the masked cell, and far above the range of exp, too."""
    mask = jnp.array([[True, False, True]])
    of_logits = jax.jit(jax.grad(lambda logits: masked_softmax(logits, mask)[0, 0]))
    for junk in (0.0, np.inf, np.nan, 1e30):
        logits = jnp.array([[0.0, junk, math.log(3.0)]])
        np.testing.assert_allclose(masked_softmax(logits, mask), [[0.25, 0.0, 0.75]], rtol=1e-6)
        # d w0 / d z0 = w0 (1 - w0), d w0 / d z2 = -w0 w2
        np.testing.assert_allclose(of_logits(logits), [[0.1875, 0.0, -0.1875]], rtol=1e-5)
    sigmoid = 1 / (1 + math.exp(-1.0))
    weights = masked_softmax(jnp.array([[1e4, 5.0, 1e4 - 1.0]]), mask)
    np.testing.assert_allclose(weights, [[sigmoid, 0.0, 1 - sigmoid]], rtol=1e-6)


@pytest.mark.parametrize("logit", [0.0, -np.inf, np.inf, np.nan, 88.0, -1e30])
def test_row_without_experts_is_zero_and_has_zero_gradient(logit):
    """A sample whose experts are all dead gives zeros, never NaN, in value and in gradient."""
    logits, mask = jnp.full((2, 3), logit), jnp.zeros((2, 3), bool)
    value, pull_back = jax.vjp(lambda z: masked_softmax(z, mask), logits)
    np.testing.assert_array_equal(value, np.zeros((2, 3)))
    np.testing.assert_array_equal(pull_back(jnp.ones((2, 3)))[0], np.zeros((2, 3)))


def test_gradient_flows_through_selected_live_experts_only():
    """Scores of coordinates that no selected live expert has get exactly zero gradient; the others do not."""
    scores = Scores((jnp.array([[3.0, 2.0, 1.0]]), jnp.array([[5.0, 4.0, 0.0]])))
    alive = jnp.ones((3, 3), bool).at[0, 0].set(False)

    def first_weight(scores):
        indices, mask = select_top_k(scores, 2, alive, grid_size=(3, 3))
        return masked_softmax(gather_logits(scores, indices, (3, 3)), mask)[0, 0]

    # (0, 0) = 8 is dead; (0, 1) = 7 and (1, 0) = 7 remain, tied, and (1, 1) = 6, (2, 0) = 6 are not selected.
    rows, columns = jax.jit(jax.grad(first_weight))(scores).logits
    np.testing.assert_allclose(rows, [[0.25, -0.25, 0.0]], atol=1e-7)
    np.testing.assert_allclose(columns, [[-0.25, 0.25, 0.0]], atol=1e-7)


def test_product_key_starts_near_uniform_but_differs_by_sample():
    """At initialisation scores are small, yet samples disagree about the best expert."""
    router = product_key((4, 8))
    scores = router.scores(router.init(jax.random.key(0), 64), jax.random.normal(jax.random.key(1), (256, 64)))
    assert [part.shape for part in scores.logits] == [(256, 4), (256, 8)]
    # 0.1 is the declared deviation; 256 * 12 samples estimate it, correlated through the 12 key vectors.
    assert 0.07 < float(jnp.std(jnp.concatenate(scores.logits, axis=1))) < 0.13
    indices, _ = router.select(scores, 1)
    assert len(np.unique(indices[:, 0], axis=0)) >= 24  # of 32


def test_product_key_matches_its_definition():
    """Scores are LayerNorm(x) @ keys + bias, split by dimension."""
    router = product_key((2, 3), init_scale=1.0)
    params = router.init(jax.random.key(0), 6)
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    normalised = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6)
    expected = normalised @ np.asarray(params["keys"]["kernel"]) + np.asarray(params["keys"]["bias"])
    for part, wanted in zip(router.scores(params, jnp.asarray(x)).logits, np.split(expected, [2], axis=1), strict=True):
        np.testing.assert_allclose(part, wanted, atol=1e-5)


class NnxGate(nnx.Module):
    """The product-key gate again, as an NNX module."""

    def __init__(self, d_model: int, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(d_model, rngs=rngs)
        self.keys = nnx.Linear(d_model, 5, rngs=rngs)

    def __call__(self, x):
        return self.keys(self.norm(x))


def test_an_nnx_module_swaps_in():
    """With the same weights an NNX gate gives the scores and gradients of the Linen gate."""
    adapted = router_from_nnx(NnxGate, (2, 3))
    params, x = adapted.init(jax.random.key(0), 6), jax.random.normal(jax.random.key(1), (4, 6))
    assert set(params) == {"norm", "keys"}  # a plain dictionary with the same names as the Linen gate's

    def total(params, router):
        scores = router.scores(params, x).logits
        return sum(jnp.sum(part**2) for part in scores), scores

    grad = jax.jit(jax.grad(total, has_aux=True), static_argnums=1)
    (own, scores), (other, expected) = (grad(params, router) for router in (adapted, product_key((2, 3))))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), scores, expected)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), own, other)


@pytest.mark.parametrize(
    ("router", "state"),
    [
        (router_from_nnx(lambda d_model, rngs: nnx.BatchNorm(d_model, rngs=rngs), (6,)), "BatchStat"),
        (router_from_linen(lambda: nn.BatchNorm(use_running_average=False), (6,)), "batch_stats"),
    ],
    ids=["nnx", "linen"],
)
def test_a_module_with_other_state_is_refused(router, state):
    """Batch statistics are not parameters: nobody would carry them from step to step."""
    with pytest.raises(ValueError, match=state):
        router.init(jax.random.key(0), 6)


def test_a_scoring_module_of_the_wrong_width_is_refused():
    """A module that does not fit the grid is named with both widths."""
    router = router_from_linen(lambda: nn.Dense(6), (2, 3))
    with pytest.raises(ValueError, match="must return 5 scores a sample, got 6"):
        router.scores(router.init(jax.random.key(0), 4), jnp.ones((1, 4)))


class NoisyPair(nn.Module):
    """Returns a tuple, and adds noise when it is given a key."""

    @nn.compact
    def __call__(self, x):
        scores = nn.Dense(4)(x)
        if self.has_rng("router"):
            scores = scores + jax.random.normal(self.make_rng("router"), scores.shape)
        return scores[:, :2], scores[:, 2:]


def test_a_linen_module_may_return_a_tuple_and_use_noise():
    """The key reaches the module: same key, same scores; another key, others; no key, no noise."""
    router = router_from_linen(NoisyPair, (2, 2))
    params = router.init(jax.random.key(0), 3)
    keys = [jax.random.key(5), jax.random.key(5), jax.random.key(6), None]
    once, again, other, without = (router.scores(params, jnp.ones((1, 3)), key=key).logits[0] for key in keys)
    np.testing.assert_array_equal(once, again)
    assert not np.allclose(once, other)
    assert not np.allclose(once, without)
