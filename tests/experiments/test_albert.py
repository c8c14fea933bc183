"""ALBERT: equal to its equations, as large as the paper says, its layer shared, its small batches a large one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.collaborative.albert import (
    AlbertConfig,
    AlbertMetrics,
    albert_logits,
    albert_loss,
    init_albert,
)
from experiments.collaborative.masked_text import MaskedBatch
from tests.experiments import numpy_albert

CONFIG = AlbertConfig(vocab_size=23, embedding_dim=6, d_model=8, num_layers=3, num_heads=2, d_ff=12, max_len=16)


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


def lively(params: Any, stddev: float = 0.4) -> Any:
    """Parameters of a size at which every one of them matters, biases and gains too."""
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(5)
    drawn = [jnp.asarray(leaf + stddev * rng.normal(size=leaf.shape), jnp.float32) for leaf in leaves]
    return jax.tree.unflatten(treedef, drawn)


def count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


jitted_loss = jax.jit(albert_loss, static_argnums=1)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_equals_its_equations(num_layers: int) -> None:
    """Logits, losses and accuracies equal those of a hand-written forward pass, one layer and several."""
    config = dataclasses.replace(CONFIG, num_layers=num_layers)
    params, batch = lively(init_albert(jax.random.key(0), config)), make_batch(4)
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    words, order = jax.jit(albert_logits, static_argnums=1)(params, config, batch)
    loss, metrics = jitted_loss(params, config, batch)
    word_losses, order_losses, word_hits, order_hits = [], [], [], []
    for row in range(4):
        tokens, segments, positions, targets, swapped = (each[row] for each in batch)
        own_words, own_order = numpy_albert.forward(exact, tokens, segments, positions, num_layers=num_layers)
        np.testing.assert_allclose(words[row], own_words, rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(order[row], own_order, rtol=2e-4, atol=2e-4)
        word_losses += [
            -numpy_albert.log_likelihood(each, target) for each, target in zip(own_words, targets, strict=True)
        ]
        order_losses.append(-numpy_albert.log_likelihood(own_order, int(swapped)))
        word_hits += list(own_words.argmax(axis=1) == targets)
        order_hits.append(own_order.argmax() == swapped)
    assert AlbertMetrics._fields == ("mlm_loss", "mlm_accuracy", "sop_loss", "sop_accuracy")
    expected = [np.mean(each) for each in (word_losses, word_hits, order_losses, order_hits)]
    np.testing.assert_allclose(np.array(metrics), expected, rtol=1e-4)
    np.testing.assert_allclose(loss, expected[0] + expected[2], rtol=1e-4)


def test_number_of_parameters() -> None:
    """By hand, for the small size and for ALBERT-large, which Lan et al. (table 1) round to 18 million."""
    small = init_albert(jax.random.key(0), CONFIG)
    # Words, positions and segments of 6, a LayerNorm, and the matrix to 8 with its bias.
    assert count(small["embed"]) == (23 + 16 + 2) * 6 + 2 * 6 + 6 * 8 + 8 == 314
    # Query, key, value and output of 8 x 8 with biases, two LayerNorms, 8 x 12 and back with biases.
    assert count(small["layer"]) == 4 * (64 + 8) + 2 * 16 + (96 + 12) + (96 + 8) == 532
    # 8 x 6 with bias, a LayerNorm, a bias for each word: the words' vectors are the embedding's.
    assert count(small["masked_head"]) == 48 + 6 + 12 + 23 == 89
    assert count(small["order_head"]) == 64 + 8 + 16 + 2 == 90
    sizes = {"num_layers": 24, "num_heads": 16, "d_ff": 4096, "max_len": 512}
    config = AlbertConfig(vocab_size=30_000, embedding_dim=128, d_model=1024, **sizes)
    large = jax.eval_shape(lambda key: init_albert(key, config), jax.random.key(0))
    # 3,905,792 + 256 + 132,096 in the embedding; 4,198,400 + 4,096 + 8,393,728 in the layer; 1,049,600 in the pooler.
    encoder = count(large["embed"]) + count(large["layer"]) + count(large["order_head"]["pool"])
    assert encoder == 4_038_144 + 12_596_224 + 1_049_600 == 17_683_968
    assert count(large["masked_head"]) == 1024 * 128 + 128 + 256 + 30_000
    assert count(large["order_head"]["classify"]) == 2050
