"""Adaptive softmax against the two-level distribution written out over the whole vocabulary."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmoe_jax.models.adaptive_softmax import adaptive_softmax_loss

VOCAB, D_MODEL = 50, 4
CUTOFFS = [(), (10, 25), (1, 2, 49)]


def make_weights(cutoffs, seed=0):
    """table, bias, cluster_w, cluster_b; large enough that no probability is near uniform."""
    rng = np.random.default_rng(seed)
    shapes = [(VOCAB, D_MODEL), (VOCAB,), (len(cutoffs), D_MODEL), (len(cutoffs),)]
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


def make_hidden(n, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(n, D_MODEL)), jnp.float32)


def naive_log_probs(table, bias, cluster_w, cluster_b, hidden, cutoffs):
    """Log-probability of every word, [n, vocab], computing every cluster for every token."""
    if not cutoffs:
        return jax.nn.log_softmax(hidden @ table.T + bias)
    head = jnp.concatenate([table[: cutoffs[0]], cluster_w]), jnp.concatenate([bias[: cutoffs[0]], cluster_b])
    head_log_probs = jax.nn.log_softmax(hidden @ head[0].T + head[1])
    parts = [head_log_probs[:, : cutoffs[0]]]
    for i, low in enumerate(cutoffs):
        high = (*cutoffs, VOCAB)[i + 1]
        inside = jax.nn.log_softmax(hidden @ table[low:high].T + bias[low:high])
        parts.append(head_log_probs[:, cutoffs[0] + i, None] + inside)
    return jnp.concatenate(parts, axis=1)


def naive_loss(*args, cutoffs):
    *weights, hidden, targets = args
    return -jnp.take_along_axis(naive_log_probs(*weights, hidden, cutoffs), targets[:, None], axis=1)[:, 0]


@functools.cache
def value_and_gradients(function, cutoffs):
    """Compiled loss [n] and gradients of its weighted sum with respect to all weights and the hidden states."""

    def weighted(weights, hidden, targets, token_weights):
        loss = function(*weights, hidden, targets, cutoffs=cutoffs)
        return jnp.sum(loss * token_weights), loss

    return jax.jit(jax.value_and_grad(weighted, argnums=(0, 1), has_aux=True))


def assert_equals_naive(cutoffs, targets):
    """Loss and all gradients equal those of the naive computation, under unequal token weights."""
    n = len(targets)
    token_weights = jnp.asarray(np.random.default_rng(2).uniform(0.5, 2.0, n), jnp.float32)
    args = (make_weights(cutoffs), make_hidden(n), jnp.asarray(targets, jnp.int32), token_weights)
    (_, loss), grads = value_and_gradients(adaptive_softmax_loss, cutoffs)(*args)
    (_, expected_loss), expected_grads = value_and_gradients(naive_loss, cutoffs)(*args)
    np.testing.assert_allclose(loss, expected_loss, atol=2e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=5e-5), grads, expected_grads)


@settings(max_examples=50, deadline=None)
@given(cutoffs=st.sampled_from(CUTOFFS), seed=st.integers(0, 9999), spread=st.floats(0.2, 3.0))
def test_loss_and_gradients_equal_the_naive_ones(cutoffs, seed, spread):
    """For any mixture of frequent and rare words (40 tokens: the buckets are 0, 16, 32 and 40 rows)."""
    uniform = np.random.default_rng(seed).random(40)
    assert_equals_naive(cutoffs, (VOCAB * uniform**spread).astype(int))


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 32, 33, 39, 40])
def test_every_bucket_boundary(count):
    """No token is dropped or counted twice at a bucket's edge, whichever cluster's rows lie behind it."""
    for low, rest in ((10, 0), (25, 0), (10, 25), (25, 10)):  # `count` in one tail cluster; the head or the other one
        targets = [low + i % 10 for i in range(count)] + [rest + i % 10 for i in range(40 - count)]
        assert_equals_naive((10, 25), targets)
        assert_equals_naive((10, 25), targets[::-1])


@pytest.mark.parametrize("n", [1, 17])
def test_any_number_of_tokens(n):
    """Fewer tokens than the smallest bucket, and one more; all of them rare."""
    assert_equals_naive((20,), [49 - i for i in range(n)])


def test_extreme_logits_stay_finite():
    """Hidden states a thousand times too large give large but finite losses and gradients."""
    weights, hidden = make_weights((10, 25)), 1e3 * make_hidden(40)
    targets = jnp.arange(40, dtype=jnp.int32)
    (_, loss), grads = value_and_gradients(adaptive_softmax_loss, (10, 25))(weights, hidden, targets, jnp.ones(40))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((loss, grads)))


@pytest.mark.parametrize(
    ("cutoffs", "tokens", "message"),
    [
        *((cutoffs, cutoffs, "must ascend strictly between 0 and 50") for cutoffs in [(0,), (50,), (20, 20), (25, 10)]),
        ((10, 25), (10,), "need 2 cluster tokens, got 1"),
    ],
)
def test_cutoffs_that_do_not_fit_are_refused(cutoffs, tokens, message):
    """Cutoffs ascend strictly between 0 and the vocabulary, and each has one cluster token."""
    with pytest.raises(ValueError, match=message):
        adaptive_softmax_loss(*make_weights(tokens), make_hidden(2), jnp.zeros(2, jnp.int32), cutoffs=cutoffs)


def test_a_tail_is_computed_for_its_own_tokens_only():
    """The compiled program's tail products are those of the buckets; none has all 64 tokens outside a branch."""
    cutoffs = (10,)
    weights, hidden = make_weights(cutoffs), make_hidden(64)
    loss = functools.partial(adaptive_softmax_loss, cutoffs=cutoffs)
    traced = jax.make_jaxpr(loss)(*weights, hidden, jnp.zeros(64, jnp.int32))
    outside_branches = [each.outvars[0].aval.shape for each in traced.eqns if each.primitive.name == "dot_general"]
    assert outside_branches == [(64, 10), (64, 1)]  # the head's words and its cluster token
