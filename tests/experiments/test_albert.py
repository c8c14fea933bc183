"""ALBERT: equal to its equations, as large as the paper says, its layer shared, its small batches a large one."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax.data.vocabulary import Vocabulary
from experiments.collaborative.albert import (
    AlbertConfig,
    AlbertLayer,
    AlbertMetrics,
    albert_logits,
    albert_loss,
    encode,
    init_albert,
)
from experiments.collaborative.masked_text import MaskedBatch, MaskedText
from tests.experiments import numpy_albert

CONFIG = AlbertConfig(vocab_size=23, embedding_dim=6, d_model=8, num_layers=3, num_heads=2, d_ff=12, max_len=16)

STORY = [word for k in range(4) for word in (f"s{k}w0", f"s{k}w1", f"s{k}w2", ".")]
"""Four sentences in order, each with three words of its own: both the words and the order can be learnt."""
VOCABULARY = Vocabulary(tuple(dict.fromkeys(STORY)))


def story_text(seed: int = 0) -> MaskedText:
    """The story told twenty times, in articles of their own: 40 samples of two sentences, one word of each masked."""
    starts = list(range(0, 20 * len(STORY), len(STORY)))
    return MaskedText(VOCABULARY.encode(STORY * 20), VOCABULARY, seq_len=11, article_starts=starts, seed=seed)


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
loss_and_gradient = jax.jit(jax.value_and_grad(albert_loss, has_aux=True), static_argnums=1)


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


def test_shapes() -> None:
    """Hidden states for each token, logits for each masked word, two for each order; shorter samples are taken too."""
    params = init_albert(jax.random.key(0), CONFIG)
    for seq_len in (10, 16):
        batch = make_batch(2, seq_len=seq_len)
        assert encode(params, CONFIG, batch.tokens, batch.segments).shape == (2, seq_len, 8)
        words, order = albert_logits(params, CONFIG, batch)
        assert (words.shape, order.shape) == ((2, 3, 23), (2, 2))
    with pytest.raises(ValueError, match=r"at most max_len \(16\) tokens, got 17"):
        albert_loss(params, CONFIG, make_batch(2, seq_len=17))


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


def test_layers_share_their_parameters() -> None:
    """Their number is the same for any depth; the gradient is the sum of those of untied copies."""
    params, batch = lively(init_albert(jax.random.key(0), CONFIG)), make_batch(3)
    deep = dataclasses.replace(CONFIG, num_layers=50)
    assert count(jax.eval_shape(lambda key: init_albert(key, deep), jax.random.key(0))) == count(params)

    def untied_loss(copies: list[Any]) -> Any:
        """The sum of the last hidden states, each layer with parameters of its own."""
        hidden = embedded
        for copy in copies:
            hidden = layer.apply({"params": copy}, hidden)
        return jnp.sum(jnp.sin(hidden))

    layer = AlbertLayer(CONFIG)
    tokens, segments = jnp.asarray(batch.tokens), jnp.asarray(batch.segments)
    embed = params["embed"]
    vectors = (
        embed["words"]["embedding"][tokens]
        + embed["positions"]["embedding"][: tokens.shape[1]]
        + embed["segments"]["embedding"][segments]
    )
    centred = vectors - vectors.mean(axis=-1, keepdims=True)
    normed = centred / jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-12)
    normed = normed * embed["norm"]["scale"] + embed["norm"]["bias"]
    embedded = normed @ embed["project"]["kernel"] + embed["project"]["bias"]
    of_copies = jax.jit(jax.grad(untied_loss))([params["layer"]] * 3)
    tied = jax.jit(jax.grad(lambda own: jnp.sum(jnp.sin(encode({**params, "layer": own}, CONFIG, tokens, segments)))))(
        params["layer"]
    )
    for shared, *separate in zip(*map(jax.tree.leaves, (tied, *of_copies)), strict=True):
        np.testing.assert_allclose(shared, sum(separate), rtol=1e-3, atol=1e-4)
    # The layers contribute differently, so that a sum is told from three times one of them.
    for name in ("query", "ff_out"):
        first, last = (np.asarray(of_copies[i][name]["kernel"]) for i in (0, 2))
        assert np.abs(first - last).max() > 0.1 * np.abs(last).max()


def test_small_batches_add_up_to_a_large_one() -> None:
    """Loss, metrics and gradient of 16 samples are the means of those of 3, 5 and 8, weighted by samples, to 1e-6."""
    text = story_text()
    config = AlbertConfig(vocab_size=text.vocab_size, embedding_dim=8, d_model=16, num_layers=2, d_ff=32, max_len=11)
    params = init_albert(jax.random.key(1), config)
    whole = loss_and_gradient(params, config, text.batch(range(16)))
    parts = [
        loss_and_gradient(params, config, text.batch(numbers)) for numbers in (range(3), range(3, 8), range(8, 16))
    ]
    mean = jax.tree.map(lambda *leaves: np.average(np.stack(leaves), axis=0, weights=[3, 5, 8]), *parts)
    for ours, theirs in zip(jax.tree.leaves(mean), jax.tree.leaves(whole), strict=True):
        scale = np.abs(np.asarray(theirs)).max()
        assert np.abs(ours - np.asarray(theirs)).max() <= 1e-6 * max(scale, 1.0)
    gradient = jax.tree.leaves(whole[1])
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in gradient))
    difference = np.sqrt(
        sum(
            np.sum(np.square(ours - np.asarray(theirs)))
            for ours, theirs in zip(jax.tree.leaves(mean[1]), gradient, strict=True)
        )
    )
    assert difference <= 1e-6 * norm
    # The means are of different batches, and unweighted they are not the whole.
    unweighted = np.mean([float(part[0][0]) for part in parts])
    assert abs(unweighted - float(whole[0][0])) > 1e-4


def test_every_parameter_learns() -> None:
    """All parameters have a gradient, but for positions that no sample has, and the keys' bias."""
    params, batch = lively(init_albert(jax.random.key(0), CONFIG)), make_batch(4)
    _, gradients = loss_and_gradient(params, CONFIG, batch)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        # A key's bias moves all scores of a query alike, which the softmax does not see.
        if [entry.key for entry in path][-2:] == ["key", "bias"]:
            np.testing.assert_allclose(leaf, 0, atol=1e-5)
        else:
            assert np.abs(leaf).max() > 1e-6, path
    # Positions behind the samples' end are not used.
    np.testing.assert_array_equal(gradients["embed"]["positions"]["embedding"][10:], 0)


def test_learns_words_and_order() -> None:
    """Nine of ten orders, and twice as many words as full stops alone would give, of samples with other masks.

    From parameters that are not small: for a small model whose parameters are near 0, the order is a plateau, since it
    takes products of words and segments to see it.
    """
    text, evaluated = story_text(), story_text(seed=1)
    config = AlbertConfig(
        vocab_size=text.vocab_size, embedding_dim=16, d_model=32, num_layers=2, num_heads=2, d_ff=64, max_len=11
    )
    optimizer = optax.adam(5e-3)

    @jax.jit
    def step(params: Any, state: Any, batch: MaskedBatch) -> Any:
        gradient = jax.grad(lambda own: albert_loss(own, config, batch)[0])(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state

    params = lively(init_albert(jax.random.key(0), config), stddev=0.1)
    state = optimizer.init(params)
    for begin in range(0, 16 * 200, 16):
        params, state = step(params, state, text.batch(range(begin, begin + 16)))
    _, metrics = jitted_loss(params, config, evaluated.batch(range(160)))
    assert metrics.sop_accuracy > 0.9
    assert metrics.mlm_accuracy > 0.5


def test_configurations_that_cannot_work_are_refused() -> None:
    """Mistakes surface when the configuration is made."""
    make = functools.partial(dataclasses.replace, CONFIG)
    with pytest.raises(ValueError, match="num_layers must be a positive integer, got 0"):
        make(num_layers=0)
    with pytest.raises(ValueError, match=r"d_model must be a multiple of num_heads \(3\), got 8"):
        make(num_heads=3)
