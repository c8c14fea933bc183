"""PEER at its own scale: the product search against the exhaustive one, neurons against any expert, and the layer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax.experts import make_expert, neuron
from dmoe_jax.experts.base import init_by_uid
from dmoe_jax.mixture.local import init_experts, local_mixture
from dmoe_jax.mixture.neurons import init_peer_layer, neuron_mixture, peer_layer
from dmoe_jax.routing import Scores, peer, product_key
from dmoe_jax.routing.base import best_cells, best_sums, dense_logits, select_top_k
from dmoe_jax.routing.peer import init_heads

D_MODEL = 8
LARGE = (320, 320)


@pytest.mark.parametrize(("grid", "k"), [((5, 7), 6), ((64, 64), 9), ((12, 3, 9), 4), ((2, 2, 2, 2), 11)], ids=str)
def test_the_product_search_is_exhaustive(grid: tuple[int, ...], k: int) -> None:
    """There are many ties, coordinates that must not be chosen, and more experts wanted than a side has."""
    rng = np.random.default_rng(0)
    # Of the second half all scores differ, and sums of float32 are exact.
    parts = [
        np.concatenate([rng.integers(0, 4, (40, size)), rng.permuted(np.arange(40 * size)).reshape(40, size)])
        for size in grid
    ]
    parts = [np.where(rng.random(part.shape) < 0.2, -np.inf, part).astype(np.float32) for part in parts]

    @jax.jit
    def both(logits: Any) -> Any:
        return best_sums(logits, k, grid), best_cells(dense_logits(Scores(logits)), k, grid)

    (indices, mask), (expected, expected_mask) = jax.tree.map(np.asarray, both(tuple(parts)))
    np.testing.assert_array_equal(mask, expected_mask)
    np.testing.assert_array_equal(indices[mask], expected[mask])


def test_the_bias_takes_part() -> None:
    """A coordinate that a balancer lifts is chosen by all."""
    scores = Scores((jnp.zeros((2, 64)), jnp.zeros((2, 64))), bias=(jnp.eye(64)[7], jnp.eye(64)[9]))
    indices, _ = select_top_k(scores, 1, grid_size=(64, 64))
    assert indices.tolist() == [[[7, 9]], [[7, 9]]]
    # A bias for each cell is not additive: here it lifts the cells (5, 3) and (5, 4).
    lifted = jnp.zeros((64, 64)).at[5, 3].set(1.0).at[5, 4].set(2.0).reshape(-1)
    indices, _ = select_top_k(scores._replace(bias=(lifted,)), 2, grid_size=(64, 64))
    assert indices[0].tolist() == [[5, 4], [5, 3]]


@pytest.fixture(scope="module")
def routed() -> tuple:
    """Stacked neurons, and seven samples with their three experts each; one has not answered."""
    grid = (4, 5)
    experts = init_experts(jax.random.key(0), neuron(d_model=D_MODEL), "ffn", grid)
    keys = jax.random.split(jax.random.key(1), 3)
    indices = jax.random.randint(keys[0], (7, 3, 2), 0, jnp.array(grid))
    mask = jnp.ones((7, 3), bool).at[2, 1].set(False)
    weights = jax.nn.softmax(jax.random.normal(keys[1], (7, 3))) * mask
    return experts, grid, indices, mask, weights, jax.random.normal(keys[2], (7, D_MODEL))


def test_neurons_are_experts_like_others(routed: tuple) -> None:
    """The products over looked-up vectors give the local mixture's values and gradients, whatever is left over."""
    experts, grid, indices, mask, weights, x = routed

    def loss(experts: dict, weights: jax.Array, x: jax.Array, *, is_direct: bool) -> jax.Array:
        mixture = neuron_mixture if is_direct else functools.partial(local_mixture, neuron(d_model=D_MODEL))
        mixed = mixture(experts, grid, indices, mask, weights, x)
        return jnp.sum(mixed * jnp.cos(jnp.arange(mixed.size)).reshape(mixed.shape))

    # A weight's gradient differs by what the residual rule takes back of x, equally for all of a sample.
    found, expected = (
        jax.jit(jax.value_and_grad(functools.partial(loss, is_direct=which), argnums=(0, 2)))(experts, weights, x)
        for which in (True, False)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), found, expected)


def test_the_silent_have_no_influence(routed: tuple) -> None:
    """Infinite parameters of an expert that is masked reach neither the output nor a gradient."""
    experts, grid, indices, mask, weights, x = routed
    mask = mask & (jnp.sum(indices * jnp.array([5, 1]), axis=-1) != 3)
    bad = jax.tree.map(lambda leaf: leaf.at[3].set(jnp.inf), experts)
    found = jax.value_and_grad(
        lambda x, weights: neuron_mixture(bad, grid, indices, mask, weights * mask, x).sum(), argnums=(0, 1)
    )(x, weights)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(found))


def test_a_node_starts_the_same_neurons() -> None:
    """They are drawn by kind and uid, as of every expert; the kind is remembered. Heads are of PEER alone."""
    router = peer((3, 4), part_dim=4)
    params = init_peer_layer(jax.random.key(0), router, D_MODEL, heads=2)
    _, expert_key = jax.random.split(jax.random.key(0))
    assert make_expert("neuron", d_model=D_MODEL) is neuron(d_model=D_MODEL)
    own = init_by_uid(expert_key, make_expert("neuron", d_model=D_MODEL), "peer", (2, 1))
    jax.tree.map(lambda left, right: np.testing.assert_allclose(left[9], right), params["experts"], own)
    with pytest.raises(ValueError, match="of a router of `peer`, got 'product_key'"):  # no keys that heads could share
        init_heads(product_key((2, 2)), jax.random.key(0), D_MODEL, heads=2)
    with pytest.raises(ValueError, match="heads must be a positive integer, got 0"):
        init_heads(peer((2, 2)), jax.random.key(0), D_MODEL, heads=0)


def test_the_layer_is_the_papers() -> None:
    """x plus, for each head, the softmax-weighed neurons of its best keys, against a loop over all of them in NumPy."""
    router, k, heads = peer((3, 4), part_dim=4), 2, 2
    params = init_peer_layer(jax.random.key(0), router, D_MODEL, heads=heads)
    x = np.asarray(jax.random.normal(jax.random.key(1), (5, D_MODEL)))
    expected = x.copy()
    there = jax.tree.map(np.asarray, params)
    for row in range(5):
        for head in range(heads):
            query = (x[row] @ there["router"]["query"][head]).reshape(2, 4)
            query = (query - query.mean(1, keepdims=True)) / np.sqrt(query.var(1, keepdims=True) + 1e-6)
            first, second = (keys @ part for keys, part in zip(there["router"]["sub_keys"], query, strict=True))
            logits = (first[:, None] + second[None, :]).ravel()
            best = np.argsort(-logits, kind="stable")[:k]
            weights = np.exp(logits[best]) / np.exp(logits[best]).sum()
            for weight, expert in zip(weights, best, strict=True):
                down, up = there["experts"]["down"][expert], there["experts"]["up"][expert]
                expected[row] += weight * float(jax.nn.gelu(down @ x[row])) * up
    np.testing.assert_allclose(jax.jit(peer_layer, static_argnums=(1, 3))(params, router, x, k), expected, atol=1e-5)


def test_a_hundred_thousand_experts_learn() -> None:
    """A step over 320 x 320 neurons moves those that were chosen, and its scratch memory is of their order."""
    router = peer(LARGE, part_dim=4)
    params = init_peer_layer(jax.random.key(0), router, D_MODEL, heads=4)
    x = jax.random.normal(jax.random.key(1), (32, D_MODEL))
    loss = jax.jit(jax.value_and_grad(lambda params: jnp.mean(peer_layer(params, router, x, 8) ** 2)))
    scratch = loss.lower(params).compile().memory_analysis().temp_size_in_bytes
    assert scratch < 4 * 320 * 320 * D_MODEL * 4  # gradients of all experts, some copies; scores would be 13 MB a head
    value, grads = loss(params)
    assert bool(jnp.isfinite(value))
    moved = int(jnp.sum(jnp.any(grads["experts"]["up"] != 0, axis=-1)))
    assert 8 <= moved <= 32 * 4 * 8
    assert all(bool(jnp.any(part != 0)) for part in jax.tree.leaves(grads["router"]))
