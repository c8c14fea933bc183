"""Keys of a step, dropout of words and before the softmax, and memory."""

import functools
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax.layer_config import LayerConfig
from dmoe_jax.models import trunk
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.trunk import LayerMemory, step_keys

VOCAB, D_MODEL = 200, 8
CONFIG = TransformerXLConfig(vocab_size=VOCAB, num_layers=1, layer=LayerConfig(d_model=D_MODEL, num_heads=1))
KEY = np.array([123, 456], np.uint32)


@functools.cache
def make_params():
    """Embedding and head of a plain softmax, not near zero."""
    rng = np.random.default_rng(0)
    embed, head = trunk.init_embed_and_head(jax.random.key(0), jax.random.key(1), CONFIG)
    return {"table": jnp.asarray(rng.uniform(1, 2, embed["table"].shape), jnp.float32)}, head


def words(shape):
    """Random words."""
    return jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, shape), jnp.int32)


def all_rows(keys):
    """Every key of a step, [keys, 2]."""
    return np.concatenate([keys.embed[None], keys.head[None], keys.gates, keys.experts.reshape(-1, 2)])


def test_keys_have_the_promised_shapes_and_are_all_different():
    """uint32 throughout; a step of 3 layers and 5 samples has 2 + 3 + 15 keys."""
    keys = step_keys(num_layers=3, batch=5, seed=1, trainer=2, step=3)
    assert [part.shape for part in (keys.embed, keys.head, keys.gates, keys.experts)] == [(2,), (2,), (3, 2), (3, 5, 2)]
    assert {part.dtype for part in keys} == {np.dtype(np.uint32)}
    assert len(np.unique(all_rows(keys), axis=0)) == 20


def test_keys_follow_from_seed_trainer_and_step():
    """Equal arguments give equal keys, and no two steps share one: also when a seed has more than 32 bits."""

    def drawn(seed, trainer, step):
        return all_rows(step_keys(num_layers=2, batch=2, seed=seed, trainer=trainer, step=step))

    np.testing.assert_array_equal(drawn(1, 2, 3), drawn(1, 2, 3))
    steps = [(1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3), (5, 7, 0), (5 + 7 * 2**32, 0, 0), (5, 0, 0), (5, 0, 7)]
    assert len(np.unique(np.concatenate([drawn(*step) for step in steps]), axis=0)) == 8 * len(steps)


def test_no_key_is_zero(monkeypatch):
    """A draw of zeros, which would turn dropout off, becomes another key."""
    zeros = Mock(**{"return_value.generate_state": np.zeros})
    monkeypatch.setattr(np.random, "SeedSequence", zeros)
    assert all_rows(step_keys(num_layers=2, batch=3, seed=0, trainer=0, step=0)).any(axis=1).all()


def test_a_dropped_word_is_gone_at_all_its_places():
    """A third have no vector anywhere but in first places, which keep theirs; others have 1 / (1 - p) of theirs."""
    params, _ = make_params()
    tokens = words((10, 60))
    dropping = CONFIG.replace(embedding_dropout=1 / 3)
    plain, dropped = np.asarray(trunk.embed(params, tokens, CONFIG)), trunk.embed(params, tokens, dropping, KEY)
    np.testing.assert_array_equal(dropped[:, 0], plain[:, 0])
    factors, tokens = (np.asarray(dropped) / plain)[:, 1:].round(4), np.asarray(tokens)
    by_word = [np.unique(factors[tokens[:, 1:] == word]).tolist() for word in np.unique(tokens[:, 1:])]
    assert all(own in ([0.0], [1.5]) for own in by_word)
    assert abs(by_word.count([0.0]) / len(by_word) - 1 / 3) < 0.15


def test_dropped_words_stay_in_the_softmax():
    """The rates before the first layer change no prediction made from the same hidden states."""
    (params, head), hidden = make_params(), jax.random.normal(jax.random.key(2), (2, 4, D_MODEL))
    config = CONFIG.replace(embedding_dropout=0.5, input_dropout=0.5)
    nll, plain = (trunk.token_nll(params, head, hidden, words((2, 4)), *each) for each in ((config, KEY), (CONFIG,)))
    np.testing.assert_allclose(nll, plain, rtol=1e-6)


def test_input_dropout_is_locked():
    """Each row loses the same features at all places, and other rows others."""
    params, _ = make_params()
    gone = np.asarray(trunk.embed(params, words((20, 5)), CONFIG.replace(input_dropout=0.5), KEY)) == 0
    np.testing.assert_array_equal(gone, np.broadcast_to(gone[:, :1], gone.shape))
    assert len(np.unique(gone[:, 0], axis=0)) > 10


def test_the_mean_over_keys_is_the_undropped_embedding():
    """Word and input dropout together: 3,000 steps average to the plain vectors within 5 standard errors."""
    (params, _), tokens = make_params(), words((1, 3))
    config = CONFIG.replace(embedding_dropout=0.2, input_dropout=0.6)
    keys = jnp.asarray(np.random.default_rng(0).integers(1, 2**32, (3000, 2), dtype=np.uint32))
    vectors = jax.jit(jax.vmap(lambda key: trunk.embed(params, tokens, config, key)))(keys)
    # The factor is 1 / (0.8 * 0.4) with probability 0.8 * 0.4: its variance is 1 / 0.32 - 1.
    error = np.sqrt((1 / 0.32 - 1) / 3000)
    assert np.abs(vectors.mean(axis=0) / trunk.embed(params, tokens, CONFIG) - 1).max() < 5 * error


@pytest.mark.parametrize(("rate", "constant"), [("output_dropout", True), ("dropout", False)])
def test_dropout_before_the_softmax(rate, constant):
    """Dropped features of the hidden states have no gradient: `output_dropout` is locked, that of layers is not."""
    (params, head), config = make_params(), CONFIG.replace(**{rate: 0.5})
    hidden, targets = jax.random.normal(jax.random.key(2), (4, 6, D_MODEL)), words((4, 6))
    gradient = jax.grad(lambda h: jnp.sum(trunk.token_nll(params, head, h, targets, config, KEY)))(hidden)
    gone = np.asarray(gradient) == 0
    assert 0.25 < gone.mean() < 0.75
    assert (gone == gone[:, :1]).all() == constant


def test_next_memory_keeps_the_newest_states():
    """Three slots, two new states: the last old one, then the new; the mask moves along; no gradient flows."""
    memory = LayerMemory(jnp.array([[[1.0], [2.0], [3.0]]]), jnp.array([[False, False, True]]))
    new = jnp.array([[[4.0], [5.0]]])
    states, mask = trunk.next_memory(memory, new)
    assert states[0, :, 0].tolist() == [3.0, 4.0, 5.0]
    assert mask.tolist() == [[True, True, True]]
    assert trunk.next_memory(memory, new[:, :1]).mask.tolist() == [[False, True, True]]
    np.testing.assert_array_equal(jax.grad(lambda h: trunk.next_memory(memory, h).states.sum())(new), 0)
    longer = jnp.arange(10.0).reshape(1, 5, 2)[..., :1]
    assert trunk.next_memory(memory, longer).states[0, :, 0].tolist() == [4.0, 6.0, 8.0]


def test_forget_empties_the_streams_that_restart():
    """A restarted stream attends to nothing old; the others keep their memory."""
    mask = jnp.array([[False, True, True]] * 2)
    memory = (LayerMemory(jnp.ones((2, 3, 1)), mask), LayerMemory(jnp.ones((2, 3, 1)), ~mask))
    first, second = trunk.forget(memory, jnp.array([True, False]))
    assert first.mask.tolist() == [[False, False, False], [False, True, True]]
    assert second.mask.tolist() == [[False, False, False], [True, False, False]]


def test_word_counts_of_another_vocabulary_are_refused():
    """Both sizes are named."""
    with pytest.raises(ValueError, match=r"word_counts must have shape \(200,\), got \(3,\)"):
        trunk.init_embed_and_head(jax.random.key(0), jax.random.key(1), CONFIG, word_counts=np.ones(3))
