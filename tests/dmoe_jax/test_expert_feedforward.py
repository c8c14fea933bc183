"""The feed-forward expert, and the table of kinds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax.experts import EXPERTS, check_expert, feedforward, make_expert


def layer_norm(x, params):
    """LayerNorm by its definition."""
    centred = x - x.mean(-1, keepdims=True)
    normalised = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    return normalised * np.asarray(params["scale"]) + np.asarray(params["bias"])


def dense(x, params):
    """x W + b."""
    return x @ np.asarray(params["kernel"]) + np.asarray(params["bias"])


def test_equals_the_papers_formula():
    """x + W3 relu(norm(W2 relu(norm(W1 x)))), written out in NumPy."""
    expert = feedforward(d_model=8)
    params = expert.init(jax.random.key(0))
    # Random gains and biases: at their initial 1 and 0 a missing one would not show.
    params = jax.tree.map(lambda leaf: leaf + 0.1 * np.random.default_rng(0).normal(size=leaf.shape), params)
    x = np.random.default_rng(1).normal(size=(5, 8)).astype(np.float32)
    hidden = np.maximum(layer_norm(dense(x, params["Dense_0"]), params["LayerNorm_0"]), 0)
    hidden = np.maximum(layer_norm(dense(hidden, params["Dense_1"]), params["LayerNorm_1"]), 0)
    expected = x + dense(hidden, params["Dense_2"])
    np.testing.assert_allclose(expert.apply(params, jnp.asarray(x)), expected, atol=1e-5)


def test_number_of_parameters():
    """4d*d + 4d, 4d*4d + 4d, 4d*d + d and two norms of 2*4d: 24 d^2 + 25 d = 1736 at d = 8."""
    params = feedforward(d_model=8).init(jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 24 * 64 + 25 * 8


def test_equal_configurations_give_the_same_object():
    """Compiled code is cached by the identity of apply; defaults and argument order make no difference."""
    assert make_expert("feedforward", d_model=8) is feedforward(expansion=4, d_model=8)
    assert feedforward(d_model=8).apply is not feedforward(d_model=16).apply
    assert hash(feedforward(d_model=8)) == hash(feedforward(d_model=8))


SIZES = {"d_model": 8, "num_heads": 2, "d_ff": 8, "seq_len": 2, "mem_len": 2, "dropout": 0.1}


@pytest.mark.parametrize(("kind", "config"), [("feedforward", {"d_model": 8}), ("transformer_xl", SIZES)])
def test_every_kind_keeps_to_the_contract(kind, config):
    """Its output is what it declares, its rows are independent, and its name is its key in the table."""
    expert = make_expert(kind, **config)
    check_expert(expert)
    assert expert.name == kind
    assert EXPERTS[kind](**config) is expert


def test_mistakes_are_named():
    """Unknown kinds, unknown and missing fields and wrong values are ValueErrors that say which."""
    with pytest.raises(ValueError, match=r"'convolution'; there are feedforward, neuron, transformer_xl"):
        make_expert("convolution")
    with pytest.raises(ValueError, match="unexpected keyword argument 'width'; its fields are d_model, expansion"):
        make_expert("feedforward", d_model=8, width=3)
    with pytest.raises(ValueError, match=r"missing a required .*argument: 'd_model'"):
        make_expert("feedforward")
    for wrong in (0, -3, True):
        with pytest.raises(ValueError, match="d_model must be a positive integer, got"):
            make_expert("feedforward", d_model=wrong)
