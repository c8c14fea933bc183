"""The Transformer-XL layer against the paper's equations written with explicit loops, and what it may see."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmoe_jax.experts import transformer_xl_layer
from dmoe_jax.experts.relative_attention import relative_shift
from tests.dmoe_jax import numpy_transformer_xl as reference

D_MODEL, SEQ, MEM = 8, 4, 3
SIZES = {"d_model": D_MODEL, "num_heads": 2, "d_ff": 12, "seq_len": SEQ, "mem_len": MEM}
ALL_RATES = {"dropout": 0.3, "attention_dropout": 0.3, "position_dropout": 0.3}


@functools.cache
def make_layer(**options):
    """A small layer whose weights are large enough that every term of the equation shows."""
    expert = transformer_xl_layer(**SIZES | options)
    params = expert.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    leaves, treedef = jax.tree.flatten(params)
    leaves = [leaf + jnp.asarray(0.4 * rng.normal(size=leaf.shape), jnp.float32) for leaf in leaves]
    return expert._replace(apply=jax.jit(expert.apply)), jax.tree.unflatten(treedef, leaves)


def make_keys(rows, seed=0):
    return np.random.default_rng(seed).integers(1, 2**32, (rows, 2), dtype=np.uint32)


def make_inputs(batch=2, seed=1, mask=None, d_model=D_MODEL):
    """Random hidden states and memory; the first memory slot of each sample is not filled, unless mask says."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(batch, SEQ, d_model)).astype(np.float32)
    memory = rng.normal(size=(batch, MEM, d_model)).astype(np.float32)
    mask = np.array([[False, True, True]] * batch) if mask is None else mask
    return jnp.asarray(hidden), jnp.asarray(memory), jnp.asarray(mask)


@pytest.mark.parametrize("slots", ["none", "some", "all"])
@pytest.mark.parametrize(("clamp_len", "same_length"), [(None, False), (2, False), (None, True)])
def test_equals_the_papers_equation(slots, clamp_len, same_length):
    """The layer equals explicit loops over heads, queries and keys, with an empty, partial and full memory."""
    options = {"clamp_len": clamp_len, "same_length": same_length}
    expert, params = make_layer(**options)
    some = [[False, False, True], [False, True, True]]
    mask = {"none": [[False] * MEM] * 2, "some": some, "all": [[True] * MEM] * 2}
    inputs = make_inputs(mask=np.array(mask[slots]))
    output = expert.apply(params, *inputs)
    exact = reference.as_float64(params)
    for b in range(2):
        segment, memory, filled = (np.asarray(part[b]) for part in inputs)
        biases = (exact["content_bias"], exact["position_bias"])
        expected = reference.layer(exact, biases, list(segment), list(memory[filled]), mem_len=MEM, **options)
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


@pytest.mark.parametrize("same_length", [False, True])
def test_a_position_depends_on_itself_and_what_came_before(same_length):
    """All of it that memory has; with the same length for all, itself and the mem_len - 1 before it."""
    expert, params = make_layer(same_length=same_length)
    hidden, memory, mask = make_inputs(batch=1, mask=np.ones((1, MEM), bool))
    before = expert.apply(params, hidden, memory, mask)
    for j in range(MEM + SEQ):
        moved = jnp.concatenate([memory, hidden], axis=1).at[:, j].add(1.0)
        after = expert.apply(params, moved[:, MEM:], moved[:, :MEM], mask)
        changed = np.any(np.asarray(before != after)[0], axis=-1)
        assert changed.tolist() == [(t < j or not same_length) and j <= t + MEM for t in range(SEQ)]


def test_no_gradient_flows_into_memory():
    """Memory is used but not differentiated, as in the paper; the specification says so, too."""
    expert, params = make_layer()
    hidden, memory, mask = make_inputs()
    gradient = jax.grad(lambda m: jnp.sum(expert.apply(params, hidden, m, mask) ** 3))(memory)
    np.testing.assert_array_equal(gradient, 0)
    assert [spec.differentiable for spec in expert.inputs] == [True, False, False]


def test_padded_rows_are_harmless():
    """A node pads with zero rows and an empty memory: finite output, zero gradient."""
    expert, params = make_layer()
    zeros = [jnp.zeros((1, *spec.shape), spec.dtype) for spec in expert.inputs]
    output, pull_back = jax.vjp(lambda p, h: expert.apply(p, h, *zeros[1:]), params, zeros[0])
    assert bool(jnp.isfinite(output).all())
    for leaf in jax.tree.leaves(pull_back(jnp.zeros_like(output))):
        np.testing.assert_array_equal(leaf, 0)


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


def test_only_a_layer_that_drops_has_a_fourth_input():
    """Rates of zero leave three inputs, and the same layer where they are spelt out; any other adds a key."""
    assert transformer_xl_layer(**SIZES) is transformer_xl_layer(**SIZES, dropout=0.0, clamp_len=None)
    assert transformer_xl_layer(**SIZES, dropout=0.1) is not transformer_xl_layer(**SIZES, dropout=0.2)
    assert [spec.name for spec in transformer_xl_layer(**SIZES).inputs] == ["hidden", "memory", "memory_mask"]
    for field in ALL_RATES:
        key = transformer_xl_layer(**SIZES, **{field: 0.1}).inputs[3]
        assert (key.name, key.shape, key.dtype, key.differentiable) == ("dropout_key", (2,), "uint32", False)


def test_without_a_key_nothing_is_dropped():
    """Zero keys give the output of the layer without rates, up to fusion, and random keys another."""
    plain, params = make_layer()
    dropping, _ = make_layer(**ALL_RATES)
    inputs = make_inputs()
    expected = plain.apply(params, *inputs)
    np.testing.assert_allclose(dropping.apply(params, *inputs, np.zeros((2, 2), np.uint32)), expected, atol=1e-6)
    assert not np.allclose(dropping.apply(params, *inputs, make_keys(2)), expected, atol=0.1)


def test_dropping_is_decided_by_the_samples_key_alone():
    """A sample gives the same output and gradient alone, in another order, and beside padding."""
    expert, params = make_layer(**ALL_RATES)
    inputs = (*make_inputs(batch=4), make_keys(4))
    whole = expert.apply(params, *inputs)
    order = np.array([2, 0, 3, 1])
    np.testing.assert_allclose(expert.apply(params, *(part[order] for part in inputs)), whole[order], atol=1e-6)
    np.testing.assert_allclose(expert.apply(params, *(part[2:3] for part in inputs)), whole[2:3], atol=1e-6)
    padded = [np.pad(part, [(0, 4)] + [(0, 0)] * (part.ndim - 1)) for part in inputs]
    np.testing.assert_allclose(expert.apply(params, *(jnp.asarray(part) for part in padded))[:4], whole, atol=1e-6)


def kernel_gradients(expert, params, *keys):
    """Absolute gradients of a loss with respect to each kernel, for one sample under each of the keys."""
    inputs = make_inputs(batch=1, d_model=expert.output.shape[-1])

    @jax.jit
    @jax.grad
    def gradient(params, key):
        # A large bias keeps every ReLU open, so that only dropout can close a unit.
        params = params | {"ff_in": params["ff_in"] | {"bias": params["ff_in"]["bias"] + 20.0}}
        output = expert.apply(params, *inputs, key)
        return jnp.sum(output * (jnp.arange(output.size).reshape(output.shape) % 7))

    return [jax.tree.map(lambda leaf: np.abs(np.asarray(leaf)), gradient(params, key)) for key in keys]


def test_every_projection_drops_features_of_its_own():
    """A dropped output feature of q, k, v, output, ff_in or ff_out leaves its kernel column without gradient."""
    expert, params = make_layer(d_model=64, d_ff=64, dropout=0.5)
    grads, evaluated = kernel_gradients(expert, params, make_keys(1), np.zeros((1, 2), np.uint32))
    closed = {name: grads[name]["kernel"].reshape(64, 64).sum(axis=0) == 0 for name in ("query", "key", "value")}
    closed["output"] = grads["output"]["kernel"].reshape(64, 64).sum(axis=0) == 0
    closed |= {name: grads[name]["kernel"].sum(axis=0) == 0 for name in ("ff_in", "ff_out")}
    for dropped in closed.values():
        assert 16 <= dropped.sum() <= 48  # 32 expected of 64, 4 standard deviations
    masks = list(closed.values())
    assert all((one != other).any() for i, one in enumerate(masks) for other in masks[:i])
    assert (evaluated["query"]["kernel"] > 0).all()


def test_position_dropout_drops_features_of_the_encodings():
    """A dropped feature leaves its row of the position kernel without gradient; other samples drop others."""
    expert, params = make_layer(d_model=64, position_dropout=0.5)
    first, second = (
        grads["position"]["kernel"].sum(axis=(1, 2)) == 0
        for grads in kernel_gradients(expert, params, make_keys(1, 1), make_keys(1, 2))
    )
    assert 16 <= first.sum() <= 48
    assert (first != second).any()


@pytest.mark.parametrize(("field", "constant"), [("dropout", True), ("attention_dropout", False)])
def test_locked_masks_are_the_same_at_all_positions(field, constant):
    """Equal inputs have equal outputs under `dropout`, which is locked, but not under attention dropout."""
    expert, params = make_layer(**{field: 0.5})
    hidden = jnp.broadcast_to(make_inputs(batch=1)[0][:, :1], (1, SEQ, D_MODEL))
    memory = jnp.broadcast_to(hidden[:, :1], (1, MEM, D_MODEL))
    output = expert.apply(params, hidden, memory, jnp.ones((1, MEM), bool), make_keys(1))
    assert np.allclose(output, output[:, :1], atol=1e-5) == constant


def test_bfloat16_is_close_to_float32():
    """Products in bfloat16 change the output by rounding only; what comes out is float32, gradients, too."""
    exact, params = make_layer(**ALL_RATES)
    rounded, _ = make_layer(**ALL_RATES, compute_dtype="bfloat16")
    inputs = (*make_inputs(), make_keys(2))
    expected, output = exact.apply(params, *inputs), rounded.apply(params, *inputs)
    assert output.dtype == jnp.float32
    np.testing.assert_allclose(output, expected, atol=0.1)
    assert not np.array_equal(output, expected)
    grads = jax.eval_shape(jax.grad(lambda p: rounded.apply(p, *inputs)[0, 0, 0]), params)
    assert {leaf.dtype for leaf in jax.tree.leaves((params, grads))} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 1.0}, "dropout must be a probability of at least 0 and below 1, got 1.0"),
        ({"attention_dropout": -0.5}, "attention_dropout must be a probability"),
        ({"position_dropout": 2.0}, "position_dropout must be a probability"),
        ({"clamp_len": 0}, "clamp_len must be a positive integer, got 0"),
        ({"compute_dtype": "float16"}, "compute_dtype must be one of float32, bfloat16, got 'float16'"),
        # Even, for sines and cosines, and a multiple of num_heads.
        ({"d_model": 10, "num_heads": 4}, "multiple of num_heads .4., got 10"),
        ({"d_model": 9, "num_heads": 3}, "multiple of num_heads .3., got 9"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        transformer_xl_layer(**SIZES | options)
