"""The Transformer-XL layer against the paper's equations written with explicit loops, and what it may see."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmoe_jax.experts import transformer_xl_layer
from dmoe_jax.experts.transformer_xl import relative_positions, relative_shift

D_MODEL, HEADS, SEQ, MEM = 8, 2, 4, 3


def make_layer():
    """A small layer whose weights are large enough that every term of the equation shows."""
    expert = transformer_xl_layer(d_model=D_MODEL, num_heads=HEADS, d_ff=12, seq_len=SEQ, mem_len=MEM)
    params = expert.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    leaves, treedef = jax.tree.flatten(params)
    leaves = [leaf + jnp.asarray(0.4 * rng.normal(size=leaf.shape), jnp.float32) for leaf in leaves]
    return expert._replace(apply=jax.jit(expert.apply)), jax.tree.unflatten(treedef, leaves)


def make_inputs(batch=2, seed=1, mask=None):
    """Random hidden states and memory; the first memory slot of each sample is not filled, unless mask says."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(batch, SEQ, D_MODEL)).astype(np.float32)
    memory = rng.normal(size=(batch, MEM, D_MODEL)).astype(np.float32)
    mask = np.array([[False, True, True]] * batch) if mask is None else mask
    return jnp.asarray(hidden), jnp.asarray(memory), jnp.asarray(mask)


def sinusoid(distance: int) -> np.ndarray:
    """R[distance]: sines of distance / 10000^(2i/d), then cosines (Vaswani et al. 2017 with halves side by side)."""
    angles = np.array([distance / 10000 ** (2 * i / D_MODEL) for i in range(D_MODEL // 2)])
    return np.concatenate([np.sin(angles), np.cos(angles)])


def layer_norm(x, params):
    """LayerNorm by its definition, on one vector."""
    x = x - x.mean()
    return x / math.sqrt((x**2).mean() + 1e-5) * params["scale"] + params["bias"]


def reference_attention(params, x, position):
    """Dai et al. 2019, section 3.3, for one query: `x` are the visible (position, vector) pairs, the query the
    last."""
    query_vector = x[-1][1]
    result = np.zeros(D_MODEL)
    for h in range(HEADS):
        query = query_vector @ params["query"]["kernel"][:, h]
        logits, values = [], []
        for j, vector in x:
            key = vector @ params["key"]["kernel"][:, h]
            distance_key = sinusoid(position - j) @ params["position"]["kernel"][:, h]
            content = query @ key + params["content_bias"][h] @ key  # terms (a) and (c)
            distance = query @ distance_key + params["position_bias"][h] @ distance_key  # terms (b) and (d)
            logits.append((content + distance) / math.sqrt(D_MODEL // HEADS))
            values.append(vector @ params["value"]["kernel"][:, h])
        weights = np.exp(np.array(logits) - max(logits))
        weights /= weights.sum()
        head = sum(w * v for w, v in zip(weights, values, strict=True))
        result += head @ params["output"]["kernel"][h]
    return result


def reference_layer(params, hidden, memory, mask):
    """The layer in float64, one sample, one position at a time."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    outputs = []
    for t in range(SEQ):
        visible = [(m, memory[m]) for m in range(MEM) if mask[m]]
        visible += [(MEM + i, hidden[i]) for i in range(t + 1)]
        attended = hidden[t] + reference_attention(params, visible, MEM + t)
        attended = layer_norm(attended, params["attention_norm"])
        inner = np.maximum(attended @ params["ff_in"]["kernel"] + params["ff_in"]["bias"], 0)
        outer = inner @ params["ff_out"]["kernel"] + params["ff_out"]["bias"]
        outputs.append(layer_norm(attended + outer, params["ff_norm"]))
    return np.stack(outputs)


@pytest.mark.parametrize("slots", ["none", "some", "all"])
def test_equals_the_papers_equation(slots):
    """The layer equals explicit loops over heads, queries and keys, with an empty, partial and full memory."""
    expert, params = make_layer()
    mask = {
        "none": [[False] * MEM] * 2,
        "some": [[False, False, True], [False, True, True]],
        "all": [[True] * MEM] * 2,
    }
    inputs = make_inputs(mask=np.array(mask[slots]))
    output = expert.apply(params, *inputs)
    for b in range(2):
        expected = reference_layer(params, *(np.asarray(part[b]) for part in inputs))
        np.testing.assert_allclose(output[b], expected, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(queries=st.integers(1, 5), memory=st.integers(0, 5), seed=st.integers(0, 99))
def test_relative_shift_equals_the_gather(queries, memory, seed):
    """Column j of row t holds the score of the distance between them, for every key up to the query."""
    keys = memory + queries
    scores = np.random.default_rng(seed).normal(size=(2, queries, keys)).astype(np.float32)
    shifted = np.asarray(relative_shift(jnp.asarray(scores)))
    for t in range(queries):
        for j in range(memory + t + 1):
            distance = memory + t - j
            np.testing.assert_array_equal(shifted[:, t, j], scores[:, t, keys - 1 - distance])


def test_relative_positions_are_sinusoids_of_distances():
    """Row i encodes distance num_distances-1-i; distance 0 is sin 0 and cos 0."""
    encoded = relative_positions(6, D_MODEL)
    np.testing.assert_allclose(encoded, [sinusoid(distance) for distance in (5, 4, 3, 2, 1, 0)], atol=1e-6)
    np.testing.assert_array_equal(encoded[-1], [0.0] * (D_MODEL // 2) + [1.0] * (D_MODEL // 2))


@pytest.mark.parametrize("t", range(SEQ))
def test_a_position_does_not_depend_on_later_ones(t):
    """Causality: the gradient of position t with respect to later positions is exactly zero, and not to itself."""
    expert, params = make_layer()
    hidden, memory, mask = make_inputs()
    gradient = jax.grad(lambda h: expert.apply(params, h, memory, mask)[:, t].sum(axis=0) @ jnp.arange(8.0))(hidden)
    np.testing.assert_array_equal(gradient[:, t + 1 :], 0)
    assert bool(jnp.all(jnp.any(gradient[:, : t + 1] != 0, axis=-1)))


def test_unfilled_slots_have_no_influence():
    """What stands in a slot that is not filled changes nothing; a filled one does."""
    expert, params = make_layer()
    hidden, memory, mask = make_inputs()  # slot 0 not filled
    output = expert.apply(params, hidden, memory, mask)
    np.testing.assert_array_equal(expert.apply(params, hidden, memory.at[:, 0].set(1e6), mask), output)
    assert not np.allclose(expert.apply(params, hidden, memory.at[:, 1].add(1.0), mask), output, atol=1e-3)


def test_no_gradient_flows_into_memory():
    """Memory is used but not differentiated, as in the paper; the specification says so, too."""
    expert, params = make_layer()
    hidden, memory, mask = make_inputs()
    gradient = jax.grad(lambda m: jnp.sum(expert.apply(params, hidden, m, mask) ** 3))(memory)
    np.testing.assert_array_equal(gradient, 0)
    assert [spec.differentiable for spec in expert.inputs] == [True, False, False]


def test_memory_of_one_layer_equals_a_longer_segment():
    """Positions 3..6 with positions 0..2 in memory come out as in one segment of seven."""
    expert, params = make_layer()
    text = jax.random.normal(jax.random.key(3), (2, MEM + SEQ, D_MODEL))
    nothing = (jnp.zeros((2, MEM, D_MODEL)), jnp.zeros((2, MEM), bool))
    whole = expert.apply(params, text, *nothing)
    parts = expert.apply(params, text[:, MEM:], text[:, :MEM], jnp.ones((2, MEM), bool))
    np.testing.assert_allclose(parts, whole[:, MEM:], atol=1e-5)


def test_padded_rows_are_harmless():
    """A node pads with zero rows and an empty memory: finite output, zero gradient."""
    expert, params = make_layer()
    zeros = [jnp.zeros((1, *spec.shape), spec.dtype) for spec in expert.inputs]
    output, pull_back = jax.vjp(lambda p, h: expert.apply(p, h, *zeros[1:]), params, zeros[0])
    assert bool(jnp.isfinite(output).all())
    for leaf in jax.tree.leaves(pull_back(jnp.zeros_like(output))):
        np.testing.assert_array_equal(leaf, 0)


def test_specification_matches_the_network():
    """Inputs and output have the promised shapes and types."""
    expert = transformer_xl_layer(d_model=8, num_heads=2, d_ff=12, seq_len=4, mem_len=3)
    assert [spec.shape for spec in expert.inputs] == [(4, 8), (3, 8), (3,)]
    inputs = [jnp.zeros((5, *spec.shape), spec.dtype) for spec in expert.inputs]
    output = expert.apply(expert.init(jax.random.key(0)), *inputs)
    assert (output.shape, output.dtype) == ((5, *expert.output.shape), expert.output.dtype)


def test_initialisation_follows_the_recipe():
    """Weights are N(0, 0.02), biases 0, LayerNorm gains N(1, 0.02)."""
    expert = transformer_xl_layer(d_model=64, num_heads=4, d_ff=128, seq_len=2, mem_len=2)
    params = expert.init(jax.random.key(0))
    for name in ("query", "key", "value", "position", "output", "ff_in", "ff_out"):
        assert 0.018 < float(jnp.std(params[name]["kernel"])) < 0.022
    assert float(jnp.abs(params["ff_in"]["bias"]).max()) == 0
    assert 0.98 < float(params["ff_norm"]["scale"].mean()) < 1.02
    assert 0.01 < float(params["ff_norm"]["scale"].std()) < 0.03
    # 4 d^2 for q, k, v, output, d^2 for positions, u, v, the feed-forward network and two norms
    count = 5 * 64**2 + 2 * 64 + 2 * 64 * 128 + 128 + 64 + 4 * 64
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count


@pytest.mark.parametrize(("d_model", "num_heads"), [(10, 4), (9, 3)])
def test_widths_that_do_not_divide_are_refused(d_model, num_heads):
    """d_model is even (sines and cosines) and a multiple of num_heads."""
    with pytest.raises(ValueError, match=f"multiple of num_heads .{num_heads}., got {d_model}"):
        transformer_xl_layer(d_model=d_model, num_heads=num_heads, d_ff=8, seq_len=2, mem_len=2)
