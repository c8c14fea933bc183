"""ALBERT: equal to its equations, as large as the paper says; and what its optimiser decays."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.collaborative.albert import AlbertConfig, albert_logits, albert_loss, init_albert
from experiments.collaborative.albert_task import decays
from experiments.collaborative.masked_text import MaskedBatch
from tests.experiments import numpy_albert

CONFIG = AlbertConfig(vocab_size=23, embedding_dim=6, d_model=8, num_layers=3, num_heads=2, max_len=16)


def make_batch(rows: int, seq_len: int = 10, num_masked: int = 3, seed: int = 0) -> MaskedBatch:
    """Samples of words drawn by chance."""
    rng = np.random.default_rng(seed)
    positions = np.sort(rng.permuted(np.tile(np.arange(1, seq_len - 1), (rows, 1)), axis=1)[:, :num_masked])
    return MaskedBatch(
        tokens=rng.integers(0, 23, (rows, seq_len), dtype=np.int32),
        segments=(np.arange(seq_len) >= rng.integers(3, seq_len - 2, (rows, 1))).astype(np.int32),
        positions=positions.astype(np.int32),
        targets=rng.integers(0, 20, (rows, num_masked), dtype=np.int32),
        swapped=rng.integers(0, 2, rows, dtype=np.int32),
    )


def lively(params: Any) -> Any:
    """Parameters of a size at which every one of them matters, biases and gains too."""
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(5)
    return jax.tree.unflatten(
        treedef, [jnp.asarray(leaf + 0.4 * rng.normal(size=leaf.shape), jnp.float32) for leaf in leaves]
    )


@pytest.mark.parametrize("num_layers", [1, 3])
def test_equals_its_equations(num_layers: int) -> None:
    """Logits and loss equal those of a hand-written forward pass, one layer and several."""
    config = dataclasses.replace(CONFIG, num_layers=num_layers)
    params, batch = lively(init_albert(jax.random.key(0), config)), make_batch(4)
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    words, order = jax.jit(albert_logits, static_argnums=1)(params, config, batch)
    losses = []
    for row in range(4):
        tokens, segments, positions, targets, swapped = (each[row] for each in batch)
        own_words, own_order = numpy_albert.forward(
            exact, tokens, segments, positions, num_layers=num_layers, num_heads=2
        )
        np.testing.assert_allclose(words[row], own_words, rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(order[row], own_order, rtol=2e-4, atol=2e-4)
        of_words = [numpy_albert.log_likelihood(each, target) for each, target in zip(own_words, targets, strict=True)]
        losses.append(-np.mean(of_words) - numpy_albert.log_likelihood(own_order, int(swapped)))
    np.testing.assert_allclose(albert_loss(params, config, batch), np.mean(losses), rtol=1e-4)


def test_number_of_parameters() -> None:
    """ALBERT-large, which Lan et al. (table 1) round to 18 million, by hand."""
    sizes = {"num_layers": 24, "num_heads": 16, "max_len": 512}
    config = AlbertConfig(vocab_size=30_000, embedding_dim=128, d_model=1024, **sizes)
    params = jax.eval_shape(lambda key: init_albert(key, config), jax.random.key(0))
    # 3,905,792 + 256 + 132,096 in the embedding; 4,198,400 + 4,096 + 8,393,728 in the layer; 1,049,600 in the pooler.
    encoder = 4_038_144 + 12_596_224 + 1_049_600
    # The head of words has a matrix with bias, a LayerNorm, and a bias for each word: their vectors are those above.
    heads = (1024 * 128 + 128 + 256 + 30_000) + 2050
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == encoder + heads


def test_matrices_and_embeddings_decay() -> None:
    """No bias does, and no gain."""
    kept = decays(jax.eval_shape(lambda key: init_albert(key, CONFIG), jax.random.key(0)))
    assert kept["words"] is kept["positions"] is kept["segments"] is True
    assert kept["query"] == {"kernel": True, "bias": False}
    assert kept["attention_norm"] == {"scale": False, "bias": False}
    assert kept["vocabulary"] == {"bias": False}
