"""ALBERT: equal to its equations; its samples by number; and what its optimiser decays."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.collaborative.albert import (
    AlbertConfig,
    MaskedBatch,
    MaskedText,
    albert_logits,
    albert_loss,
    decays,
    init_albert,
)

CONFIG = AlbertConfig(vocab_size=23, embedding_dim=6, d_model=8, num_layers=3, num_heads=2, max_len=16)

NUM_WORDS = 4000
TEXT = np.arange(NUM_WORDS, dtype=np.int32)
"""Word i stands at place i only, so that a sample shows where its words come from."""
CLS, SEP, MASK = range(NUM_WORDS, NUM_WORDS + 3)


def lively(params: Any) -> Any:
    """Parameters of a size at which every one of them matters, biases and gains too."""
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(5)
    return jax.tree.unflatten(
        treedef, [jnp.asarray(leaf + 0.4 * rng.normal(size=leaf.shape), jnp.float32) for leaf in leaves]
    )


def written_out(params: Any, batch: MaskedBatch) -> tuple[np.ndarray, np.ndarray]:
    """Logits of masked words [masked, vocab] and of the order [2] of one sample, in float64, head by head: Lan et al.
    2020, section 3.1; Devlin et al. 2019; GELU by tanh as of Hendrycks and Gimpel 2016."""

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        spread = np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12)
        return np.asarray(x / spread * params[name]["scale"] + params[name]["bias"])

    def dense(name: str, x: np.ndarray) -> np.ndarray:
        return np.asarray(x @ params[name]["kernel"] + params[name]["bias"])

    def gelu(x: np.ndarray) -> np.ndarray:
        return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))

    vectors = params["words"][batch.tokens] + params["positions"][: len(batch.tokens)]
    hidden = dense("project", norm("embedding_norm", vectors + params["segments"][batch.segments]))
    for _ in range(CONFIG.num_layers):
        heads = []
        for own in np.split(np.arange(CONFIG.d_model), CONFIG.num_heads):
            query, key, value = (dense(name, hidden)[:, own] for name in ("query", "key", "value"))
            weights = np.exp(query @ key.T / math.sqrt(own.size))
            heads.append(weights / weights.sum(axis=1, keepdims=True) @ value)
        attention = norm("attention_norm", hidden + dense("output", np.concatenate(heads, axis=1)))
        hidden = norm("ff_norm", attention + dense("ff_out", gelu(dense("ff_in", attention))))
    inner = norm("word_norm", gelu(dense("word_head", hidden[batch.positions])))
    order = dense("order_head", np.tanh(dense("pool", hidden[0])))
    return inner @ params["words"].T + params["vocabulary"]["bias"], order


@pytest.mark.slow
def test_equals_its_equations() -> None:
    """Logits and loss equal those of a forward pass written out."""
    text = MaskedText(np.arange(20, dtype=np.int32), vocab_size=23, seq_len=16)
    params, batch = lively(init_albert(jax.random.key(0), CONFIG)), text.batch(range(4))
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    words, order = jax.jit(albert_logits, static_argnums=1)(params, CONFIG, batch)
    losses = []
    for row in range(4):
        own = text.sample(row)
        for ours, logits, targets in zip((words, order), written_out(exact, own), own[3:], strict=True):
            np.testing.assert_allclose(ours[row], logits, rtol=2e-4, atol=2e-4)
            likelihoods = np.take_along_axis(logits, targets[..., None], -1)[..., 0] - np.log(np.exp(logits).sum(-1))
            losses.append(-likelihoods.mean())
    np.testing.assert_allclose(albert_loss(params, CONFIG, batch), 2 * np.mean(losses), rtol=1e-4)


def test_matrices_and_embeddings_decay() -> None:
    """No bias does, and no gain."""
    kept = decays(jax.eval_shape(lambda key: init_albert(key, CONFIG), jax.random.key(0)))
    assert kept["words"] is kept["positions"] is kept["segments"] is True
    assert kept["query"] == {"kernel": True, "bias": False}
    assert kept["attention_norm"] == {"scale": False, "bias": False}
    assert kept["vocabulary"] == {"bias": False}


def unmasked(sample: MaskedBatch) -> list[int]:
    """The tokens with the masked words put back."""
    tokens = sample.tokens.copy()
    tokens[sample.positions] = sample.targets
    return tokens.tolist()


def test_a_sample_by_hand() -> None:
    """Seven words fill a sample of ten tokens: only order and mask are left to chance, and segments tell neither."""
    text, seen = MaskedText(TEXT[:7], vocab_size=NUM_WORDS + 3, seq_len=10), set()
    for number in range(20):
        sample = text.sample(number)
        words = [4, 5, 6, 0, 1, 2, 3] if sample.swapped else list(range(7))
        assert unmasked(sample) == [CLS, *words[:3], SEP, *words[3:], SEP]
        assert sample.segments.tolist() == [0] * 5 + [1] * 5
        seen.add(int(sample.swapped))
    assert seen == {0, 1}
    with pytest.raises(ValueError, match="from 5 to the 7 words of the text and 3, got 11"):
        MaskedText(TEXT[:7], vocab_size=NUM_WORDS + 3, seq_len=11)


def test_masking_statistics() -> None:
    """80 % of 30,000 masked words show [MASK], 10 % any word, 10 % themselves; no other word changes."""
    text = MaskedText(TEXT, vocab_size=NUM_WORDS + 3, seq_len=103, seed=5)
    batch = text.batch(range(2000))
    assert (np.diff(batch.positions) > 0).all()
    assert (batch.targets < CLS).all()
    shown = np.take_along_axis(batch.tokens, batch.positions, 1)
    # Standard deviations 0.0023 and 0.0017; kept has 0.1 / 4000 by chance from the random words.
    assert np.mean(shown == MASK) == pytest.approx(0.8, abs=0.01)
    assert np.mean(shown == batch.targets) == pytest.approx(0.1, abs=0.008)
    others = shown[(shown != MASK) & (shown != batch.targets)]
    assert others.max() < CLS
    # Uniform over the vocabulary: mean 2000, standard deviation of the mean of 3000 about 21.
    assert others.mean() == pytest.approx(2000, abs=100)
    # Uniform over the words of a sample: places 1 to 101 (one of them is [SEP]), mean 51, deviation 0.17.
    assert batch.positions.mean() == pytest.approx(51, abs=1)
