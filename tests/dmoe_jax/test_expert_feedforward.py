"""The feed-forward expert, and the table of kinds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax.experts import EXPERTS, feedforward, make_expert


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


def test_specification_matches_the_network():
    """Input and output have the shape and type that the specification promises."""
    expert = feedforward(d_model=8, expansion=2)
    (spec,) = expert.inputs
    assert (spec.shape, spec.dtype, spec.differentiable) == ((8,), "float32", True)
    output = expert.apply(expert.init(jax.random.key(0)), jnp.zeros((3, *spec.shape), spec.dtype))
    assert (output.shape, output.dtype) == ((3, *expert.output.shape), expert.output.dtype)


def test_rows_are_independent():
    """A row's output does not depend on the rows beside it: nodes join the rows of many trainers."""
    expert = feedforward(d_model=8)
    expert, params = expert._replace(apply=jax.jit(expert.apply)), expert.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (4, 8))
    np.testing.assert_allclose(expert.apply(params, x)[2:3], expert.apply(params, x[2:3]), atol=1e-6)


def test_equal_configurations_give_the_same_object():
    """Compiled code is cached by the identity of apply; defaults and argument order make no difference."""
    assert make_expert("feedforward", d_model=8) is feedforward(expansion=4, d_model=8)
    assert feedforward(d_model=8).apply is not feedforward(d_model=16).apply
    assert hash(feedforward(d_model=8)) == hash(feedforward(d_model=8))


def test_every_kind_is_named_as_in_the_table():
    """An expert's name is its key, so that a node's announcement can be turned back into the expert."""
    sizes = {"d_model": 8, "num_heads": 2, "d_ff": 8, "seq_len": 2, "mem_len": 2}
    assert make_expert("transformer_xl", **sizes).name == "transformer_xl"
    assert make_expert("feedforward", d_model=8).name == "feedforward"
    assert set(EXPERTS) == {"feedforward", "transformer_xl"}


def test_mistakes_are_named():
    """Unknown kinds, unknown and missing fields and wrong values are ValueErrors that say which."""
    with pytest.raises(ValueError, match=r"'convolution'; there are feedforward, transformer_xl"):
        make_expert("convolution")
    with pytest.raises(ValueError, match="unexpected keyword argument 'width'; its fields are d_model, expansion"):
        make_expert("feedforward", d_model=8, width=3)
    with pytest.raises(ValueError, match="missing a required argument: 'd_model'"):
        make_expert("feedforward")
    for wrong in (0, -3, True):
        with pytest.raises(ValueError, match="d_model must be a positive integer, got"):
            make_expert("feedforward", d_model=wrong)
