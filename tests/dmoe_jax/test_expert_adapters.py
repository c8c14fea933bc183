"""Any Flax module and any pair of functions as an expert; what cannot be one is refused; and the kinds of our own."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from dmoe_jax import experts
from dmoe_jax.experts import as_expert, expert_from_functions, expert_from_linen, expert_from_nnx, feedforward
from dmoe_jax.experts.dropout import row_keys_of_seed, wrap_key

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
KEYS = row_keys_of_seed(7, 4)


class Scale(nn.Module):
    """Two inputs of different types, another output shape."""

    width: int = 2

    @nn.compact
    def __call__(self, x, gain, index):
        hidden = nn.Dense(self.width)(x) * gain.astype(jnp.float32) + nn.Embed(5, self.width)(index)
        return hidden.astype(jnp.bfloat16)


class Dropping(nn.Module):
    """Ordinary dropout behind a dense layer."""

    rate: float = 0.5

    @nn.compact
    def __call__(self, x, deterministic: bool):
        return nn.Dropout(self.rate, deterministic=deterministic)(nn.Dense(64)(x))


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = True):
        return nn.BatchNorm(use_running_average=not train)(x)


class NnxDropping(nnx.Module):
    """Two dropouts in a row, of one module."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(3, 64, rngs=rngs)
        self.first, self.second = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        hidden = self.dense(x) + 10
        return jnp.concatenate([self.first(hidden), self.second(hidden)], axis=-1)


def make_linear(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Linear(3, 3, rngs=rngs)


def affine_init(key):
    return {"w": jax.random.normal(key, (3, 3))}


def test_linen_specifications_come_from_the_call_and_the_examples():
    """Names, shapes and types; floating inputs have a gradient unless it is said otherwise; the output is found out."""
    examples = np.zeros((1, 3)), jnp.zeros((7, 1), jnp.bfloat16), np.zeros(2, np.int64)
    expert = expert_from_linen(Scale(), *examples)
    assert [(s.name, s.shape, s.dtype, s.differentiable) for s in expert.inputs] == [
        ("x", (3,), "float32", True),
        ("gain", (1,), "bfloat16", True),
        ("index", (), "int32", False),
    ]
    assert (expert.name, expert.output.shape, expert.output.dtype) == ("Scale", (2,), "bfloat16")
    assert not expert.takes_key
    assert not expert.is_residual
    chosen = expert_from_linen(Scale(), *examples, differentiable=["gain"], name="mine")
    assert [spec.differentiable for spec in chosen.inputs] == [False, True, False]
    assert chosen.name == "mine"
    params = expert.init(jax.random.key(3))
    direct: Any = Scale().init(jax.random.key(3), *(jnp.zeros((1, *s.shape), s.dtype) for s in expert.inputs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, direct["params"])
    inputs = X, jnp.ones((4, 1), jnp.bfloat16), np.arange(4, dtype=np.int32)
    np.testing.assert_array_equal(expert.apply(params, *inputs), Scale().apply({"params": params}, *inputs))


def test_equal_arguments_give_the_same_expert():
    """Compiled code is cached by identity; shapes count, values of the examples do not."""
    assert expert_from_linen(nn.Dense(2), X) is expert_from_linen(nn.Dense(2), X[:1] + 1)
    assert expert_from_linen(nn.Dense(2), X) is not expert_from_linen(nn.Dense(3), X)
    assert expert_from_nnx(make_linear, X) is expert_from_nnx(make_linear, X)
    # A default that is written out is the default.
    assert expert_from_linen(nn.Dense(2), X, name=None, train=None, check=True) is expert_from_linen(nn.Dense(2), X)
    functions = affine_init, lambda params, x: x @ params["w"]
    assert as_expert(functions, X) is expert_from_functions(*functions, X)


def test_linen_dropout_is_each_row_s_own():
    """With keys every row is what the module makes of it alone with its key; without keys nothing is dropped."""
    expert = expert_from_linen(Dropping(), X)
    assert expert.takes_key
    assert not expert_from_linen(Dropping(rate=0.0), X).takes_key  # it never draws, and needs no second program
    assert not expert_from_linen(Dropping(), X, train={"deterministic": True}).takes_key  # a mode that is set by hand
    params = expert.init(jax.random.key(0))
    dropped = np.asarray(expert.apply(params, X, keys=KEYS))
    for row in range(4):
        rngs = {"dropout": wrap_key(KEYS[row])}
        alone = Dropping().apply({"params": params}, X[row : row + 1], deterministic=False, rngs=rngs)
        np.testing.assert_allclose(dropped[row], alone[0], atol=1e-5)
    assert 0.3 < (dropped == 0).mean() < 0.7
    assert len({tuple(row) for row in dropped == 0}) == 4
    evaluated = expert.apply(params, X)
    np.testing.assert_allclose(evaluated, Dropping().apply({"params": params}, X, deterministic=True), atol=1e-6)
    padded = expert.apply(params, np.pad(X[1:3], ((0, 2), (0, 0))), keys=np.pad(KEYS[1:3], ((0, 2), (0, 0))))
    np.testing.assert_allclose(padded[:2], dropped[1:3], atol=1e-6)


def test_nnx_dropout_is_each_row_s_own_and_each_layer_s_own():
    """Masks depend on the row's key alone, and two dropouts of one module drop different elements."""
    expert = expert_from_nnx(NnxDropping, X)
    assert expert.takes_key
    params = expert.init(jax.random.key(0))
    assert set(params) == {"dense"}
    dropped = np.asarray(expert.apply(params, X, keys=KEYS))
    alone = expert.apply(params, X[2:3], keys=KEYS[2:3])
    np.testing.assert_allclose(dropped[2:3], alone, atol=1e-5)
    masks = dropped == 0
    assert (masks[:, :64] != masks[:, 64:]).any(axis=1).all()
    assert 0.4 < masks.mean() < 0.6
    evaluated = np.asarray(expert.apply(params, X))
    assert (evaluated != 0).all()
    np.testing.assert_allclose(dropped[~masks], 2 * evaluated[~masks], rtol=1e-5)


def test_nnx_starts_as_the_module_does():
    """The key decides the parameters as it decides the module's, and gradients flow to them."""
    expert = as_expert(make_linear, X)
    params = expert.init(jax.random.key(5))
    module = make_linear(nnx.Rngs(jax.random.key(5)))
    np.testing.assert_allclose(expert.apply(params, X), module(jnp.asarray(X)), atol=1e-6)
    grads = jax.grad(lambda p: expert.apply(p, X).sum())(params)
    np.testing.assert_allclose(grads["bias"], np.full(3, 4.0))
    assert expert.is_residual


def test_functions_may_take_keys_themselves():
    def noisy(params, x, keys=None):
        return x @ params["w"] if keys is None else x @ params["w"] + keys[:, :1].astype(jnp.float32)

    expert = expert_from_functions(affine_init, noisy, X, takes_key=True)
    params = expert.init(jax.random.key(0))
    difference = expert.apply(params, X, keys=KEYS) - expert.apply(params, X)
    np.testing.assert_allclose(difference[:, 0], KEYS[:, 0], rtol=1e-5)
    assert (expert.name, expert.inputs[0].name) == ("noisy", "x")


def test_as_expert_tells_them_apart():
    """An Expert passes through; what is nothing of the kind is answered with the choices."""
    expert = feedforward(d_model=4)
    assert as_expert(expert) is expert
    assert as_expert(nn.Dense(3), X) is expert_from_linen(nn.Dense(3), X)
    for wrong, message in (
        (3, "expected an Expert, a Linen module, .* got int: 3"),
        (nn.Dense, r"Dense is a class: give a module of it, Dense\(...\)"),
        (make_linear(nnx.Rngs(0)), "holds its parameters already; give what makes it"),
        (lambda rngs: 5, "expected an NNX module from nnx.Rngs, got int"),
    ):
        with pytest.raises(experts.ExpertError, match=message):
            as_expert(wrong, X)
    with pytest.raises(experts.ExpertError, match="is complete: it takes no examples"):
        as_expert(expert, X)


@pytest.mark.parametrize(
    ("what", "examples", "message"),
    [
        (Normalised(), [X], r"'Normalised' keeps state beside its parameters \(batch_stats\).*use LayerNorm"),
        (lambda rngs: nnx.BatchNorm(3, rngs=rngs), [X], r"'BatchNorm' keeps state .* \(BatchStat\)"),
        (nn.Dense(3), [], "expected an example array .* got none"),
        (nn.Dense(3), [np.float32(1)], r"expected an example array .* got \[\]"),
        (nn.Dense(3), [X, X], r"'Dense' takes 1 inputs \(inputs\), got 2 examples"),
        ((affine_init, lambda params, x: (x, x)), [X], "expected one array as output, got tuple"),
        ((affine_init, lambda params, x: x.sum()), [X], r"expected an output \[batch, ...\], got \[\]"),
        ((affine_init, lambda params, x: x > 0), [X], "expected an output of a floating type, got bool"),
        ((affine_init, lambda params, x: x @ params["v"]), [X], "apply raised KeyError: 'v'"),
        ((affine_init, lambda params, x: x - x.mean(axis=0)), [X], "a row changes by .* rows must be independent"),
        ((affine_init, lambda params, x: x / 0), [X], "its output is not finite"),
        ((lambda key: jnp.full(3, jnp.nan), lambda params, x: x), [X], "initial parameters are not finite"),
    ],
)
def test_what_cannot_be_an_expert_is_refused(what, examples, message):
    with pytest.raises(experts.ExpertError, match=message):
        as_expert(what, *examples)


def test_differentiable_names_must_be_inputs_with_a_gradient():
    with pytest.raises(experts.ExpertError, match="has no input y; its inputs are inputs"):
        expert_from_linen(nn.Dense(3), X, differentiable=["y"])
    with pytest.raises(experts.ExpertError, match="input 'inputs' is int32, which has no gradient"):
        expert_from_linen(nn.Embed(3, 3), np.zeros((1, 2), np.int32), differentiable=["inputs"])


def test_a_declared_output_is_held_against_the_real_one():
    """An expert written by hand is tried too."""
    expert = feedforward(d_model=4)
    lying = expert._replace(output=dataclasses.replace(expert.output, shape=(5,)))
    with pytest.raises(experts.ExpertError, match=r"its output must be float32\[2, 5\], got float32\[2, 4\]"):
        experts.check_expert(lying)


def layer_norm(x, params):
    centred = x - x.mean(-1, keepdims=True)
    normalised = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    return normalised * np.asarray(params["scale"]) + np.asarray(params["bias"])


def dense(x, params):
    return x @ np.asarray(params["kernel"]) + np.asarray(params["bias"])


def test_equals_the_papers_formula():
    """x + W3 relu(norm(W2 relu(norm(W1 x)))), written out in NumPy."""
    expert = feedforward(d_model=8)
    params = expert.init(jax.random.key(0))
    # 4d*d + 4d, 4d*4d + 4d, 4d*d + d and two norms of 2*4d.
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 24 * 8**2 + 25 * 8
    # Random gains and biases: at their initial 1 and 0 a missing one would not show.
    params = jax.tree.map(lambda leaf: leaf + 0.1 * np.random.default_rng(0).normal(size=leaf.shape), params)
    x = np.random.default_rng(1).normal(size=(5, 8)).astype(np.float32)
    hidden = np.maximum(layer_norm(dense(x, params["Dense_0"]), params["LayerNorm_0"]), 0)
    hidden = np.maximum(layer_norm(dense(hidden, params["Dense_1"]), params["LayerNorm_1"]), 0)
    expected = x + dense(hidden, params["Dense_2"])
    np.testing.assert_allclose(expert.apply(params, jnp.asarray(x)), expected, atol=1e-5)


def test_equal_configurations_give_the_same_object():
    """Compiled code is cached by the identity of apply; defaults and argument order make no difference."""
    assert experts.make_expert("feedforward", d_model=8) is feedforward(expansion=4, d_model=8)
    assert feedforward(d_model=8).apply is not feedforward(d_model=16).apply
    assert hash(feedforward(d_model=8)) == hash(feedforward(d_model=8))


SIZES = {"d_model": 8, "num_heads": 2, "d_ff": 8, "seq_len": 2, "mem_len": 2, "dropout": 0.1}


@pytest.mark.parametrize(("kind", "config"), [("feedforward", {"d_model": 8}), ("transformer_xl", SIZES)])
def test_every_kind_keeps_to_the_contract(kind, config):
    """Its output is what it declares, its rows are independent, and its name is its key in the table."""
    expert = experts.make_expert(kind, **config)
    experts.check_expert(expert)
    assert expert.name == kind
    assert experts.EXPERTS[kind](**config) is expert


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"'convolution'; there are feedforward, neuron, transformer_xl"):
        experts.make_expert("convolution")
    with pytest.raises(ValueError, match="unexpected keyword argument 'width'; its fields are d_model, expansion"):
        experts.make_expert("feedforward", d_model=8, width=3)
    with pytest.raises(ValueError, match=r"missing a required .*argument: 'd_model'"):
        experts.make_expert("feedforward")
    for wrong in (0, -3, True):
        with pytest.raises(ValueError, match="d_model must be a positive integer, got"):
            experts.make_expert("feedforward", d_model=wrong)
