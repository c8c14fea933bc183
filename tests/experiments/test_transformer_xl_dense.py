"""The dense Transformer-XL against its equations; what may influence what; its dropout, sizes and lengths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax.data import Batch, evaluation_segments
from dmoe_jax.models import LayerConfig, TransformerXLConfig, trunk
from experiments.transformer_xl import dense
from tests.dmoe_jax import numpy_transformer_xl as reference

CONFIG = TransformerXLConfig(
    vocab_size=20,
    num_layers=2,
    layer=LayerConfig(d_model=8, num_heads=2, d_ff=12, seq_len=4, mem_len=3),
)

forward = jax.jit(dense.forward, static_argnums=1)


@functools.cache
def make_params(cutoffs=(), num_layers=2):
    """Parameters moved far from their small initial values, so that every influence shows."""
    rng = np.random.default_rng(0)
    params = dense.init(jax.random.key(0), CONFIG.replace(cutoffs=cutoffs, num_layers=num_layers))
    return jax.tree.map(lambda leaf: leaf + jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32), params)


def make_text(length, seed=0):
    """Random words."""
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length)


def make_keys(step=0, batch=2):
    """Keys of a training step."""
    return trunk.step_keys(num_layers=CONFIG.num_layers, batch=batch, seed=0, trainer=0, step=step)


def make_batch(seed=0, batch=2):
    """One segment of random text."""
    text = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (batch, CONFIG.seq_len + 1)).astype(np.int32)
    return Batch(text[:, :-1], text[:, 1:], np.ones((batch, CONFIG.seq_len), bool), np.zeros(batch, bool))


def filled_memory(batch=2):
    """Memory of random states whose oldest slot is not filled."""
    states = jax.random.normal(jax.random.key(5), (CONFIG.num_layers, batch, CONFIG.mem_len, CONFIG.d_model))
    mask = jnp.ones((batch, CONFIG.mem_len), bool).at[:, 0].set(False)
    return tuple(trunk.LayerMemory(layer, mask) for layer in states)


@pytest.mark.parametrize(
    ("clamp_len", "same_length", "cutoffs", "num_layers"),
    [
        (None, False, (6, 12), 2),
        pytest.param(2, False, (), 2, marks=pytest.mark.slow),
        pytest.param(5, True, (), 2, marks=pytest.mark.slow),
        pytest.param(None, False, (), 5, marks=pytest.mark.slow),
    ],
)
def test_equals_the_papers_equations(clamp_len, same_length, cutoffs, num_layers):
    """Three segments with memory give the losses of explicit loops over the whole text; also where the program has a
    loop over the layers."""
    config = CONFIG.replace(clamp_len=clamp_len, same_length=same_length, cutoffs=cutoffs, num_layers=num_layers)
    text = make_text(3 * CONFIG.seq_len + 1)
    params = make_params(cutoffs, num_layers)
    memory, losses = trunk.empty_memory(config, 1), []
    for batch in evaluation_segments(text, batch_size=1, seq_len=config.seq_len):
        nll, memory = forward(params, config, batch, memory)
        losses += np.asarray(nll)[0].tolist()
    np.testing.assert_allclose(losses, reference.dense_nll(params, config, text), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [None, make_keys()], ids=["evaluation", "training"])
def test_later_words_do_not_reach_earlier_losses(keys):
    """Another word at s leaves the losses before s as they are to the bit, and changes the one at s."""
    batch, params = make_batch(), make_params()
    config = CONFIG if keys is None else CONFIG.replace(attention_dropout=0.2, position_dropout=0.3)
    run = jax.jit(
        lambda tokens: dense.forward(params, config, batch._replace(tokens=tokens), filled_memory(), keys=keys)
    )
    before, _ = run(batch.tokens)
    for s in range(CONFIG.seq_len):
        tokens = batch.tokens.copy()
        tokens[:, s] = (tokens[:, s] + 1) % CONFIG.vocab_size
        after, _ = run(tokens)
        np.testing.assert_array_equal(after[:, :s], before[:, :s])
        assert np.all(after[:, s] != before[:, s])


def test_no_gradient_flows_into_memory():
    """Memory is used but not differentiated, and what is remembered is a constant, too."""
    batch, params = make_batch(), make_params()

    def loss(memory):
        return jnp.mean(dense.forward(params, CONFIG, batch, memory)[0])

    grads = jax.jit(jax.grad(loss, allow_int=True))(filled_memory())
    for layer in grads:
        np.testing.assert_array_equal(layer.states, 0)
    moved = tuple(layer._replace(states=layer.states + 1) for layer in filled_memory())
    (before, _), (after, _) = (forward(params, CONFIG, batch, memory) for memory in (filled_memory(), moved))
    assert np.abs(before - after).max() > 1e-3


@pytest.mark.slow
def test_dropped_words_leave_the_gradient_of_a_deep_model_finite():
    """Six new layers, an empty memory, nearly every word dropped: a first word of zeros would multiply the gradient by
    1 / sqrt(1e-5) = 316 in each of twelve norms."""
    config = CONFIG.replace(num_layers=6, embedding_dropout=0.9)
    keys = trunk.step_keys(num_layers=6, batch=2, seed=0, trainer=0, step=0)

    def loss(params):
        return jnp.mean(dense.forward(params, config, make_batch(), trunk.empty_memory(config, 2), keys=keys)[0])

    assert optax.tree.norm(jax.jit(jax.grad(loss))(dense.init(jax.random.key(0), config))) < 1e4
