"""Models that the peers train: a small network on MNIST, and a tiny Transformer-XL on WikiText-2."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dmoe_jax.arrays import PyTree
from dmoe_jax.data import SegmentStream, evaluation_segments, load_corpus, load_mnist
from dmoe_jax.data.words import UNK
from dmoe_jax.models import LayerConfig, TransformerXLConfig
from dmoe_jax.models.trunk import Memory, empty_memory, forget
from experiments.moshpit_sgd.settings import ModelName
from experiments.transformer_xl import dense


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model, its data and its optimiser."""

    init: Callable[[jax.Array], PyTree]
    """key -> parameters."""
    carry: PyTree
    """State that a peer takes from batch to batch beside its parameters; a model's memory."""
    loss: Callable[[PyTree, PyTree, PyTree], tuple[jax.Array, PyTree]]
    """(params, batch, carry) -> (mean loss in nats, carry)."""
    batches: Callable[[int, int, int], Iterator[PyTree]]
    """(peer, peers, seed) -> batches of NumPy arrays, without end; every peer draws from the same data."""
    evaluate: Callable[[PyTree], jax.Array]
    """params -> validation loss in nats. To be jitted."""
    optimizer: optax.GradientTransformation
    """Optimiser of each peer."""
    target: float
    """Validation loss that is to be reached."""


def make_task(name: ModelName) -> Task:
    """Load the data.

    Raises:
      DataError: it is not there.
    """
    return _mnist_task() if name == "mnist" else _transformer_xl_task()


_PIXELS, _HIDDEN, _DIGITS = 784, 64, 10
_MNIST_BATCH = 32
_MNIST_VALID = 4000


def _mnist_task() -> Task:
    images = load_mnist().train
    count = len(images.labels) - _MNIST_VALID
    pixels, labels = (jnp.asarray(array) for array in images)

    def normal(pixels: jax.Array) -> jax.Array:
        return (pixels.astype(jnp.float32) / 255 - 0.13) / 0.31

    valid = (normal(pixels[count:]), labels[count:])

    def init(key: jax.Array) -> PyTree:
        first, second = jax.random.split(key)
        return {
            "hidden": jax.random.normal(first, (_PIXELS, _HIDDEN)) / np.sqrt(_PIXELS),
            "hidden_bias": jnp.zeros(_HIDDEN),
            "out": jax.random.normal(second, (_HIDDEN, _DIGITS)) / np.sqrt(_HIDDEN),
            "out_bias": jnp.zeros(_DIGITS),
        }

    def mean_loss(params: PyTree, x: jax.Array, labels: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(x @ params["hidden"] + params["hidden_bias"])
        logits = hidden @ params["out"] + params["out_bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def loss(params: PyTree, batch: PyTree, carry: PyTree) -> tuple[jax.Array, PyTree]:
        return mean_loss(params, normal(pixels[batch]), labels[batch]), carry

    def batches(peer: int, num_peers: int, seed: int) -> Iterator[PyTree]:
        del num_peers
        rng = np.random.default_rng([seed, peer])
        while True:
            yield rng.integers(0, count, _MNIST_BATCH, dtype=np.int32)

    return Task(
        init=init,
        carry=(),
        loss=loss,
        batches=batches,
        evaluate=lambda params: mean_loss(params, *valid),
        optimizer=optax.sgd(0.05, momentum=0.9),
        target=0.15,
    )


_WORDS = 1000
"""The most frequent words; others are <unk>. With all 33,278 a peer's embedding alone would have a million numbers."""
_TEXT_BATCH = 4
_VALID_ROWS, _VALID_BATCHES = 32, 4


def _transformer_xl_task() -> Task:
    corpus = load_corpus()
    unknown = corpus.vocabulary.words.index(UNK)
    train, valid = (np.where(ids < _WORDS, ids, unknown) for ids in (corpus.train, corpus.valid))
    config = TransformerXLConfig(
        vocab_size=_WORDS, num_layers=2, layer=LayerConfig(d_model=32, num_heads=2, d_ff=64, seq_len=16, mem_len=16)
    )
    counts = np.bincount(train, minlength=_WORDS)
    num_targets = _VALID_ROWS * _VALID_BATCHES * config.seq_len
    segments = evaluation_segments(valid[: num_targets + 1], batch_size=_VALID_ROWS, seq_len=config.seq_len)
    valid_batches = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *segments)

    def loss(params: PyTree, batch: PyTree, carry: Memory) -> tuple[jax.Array, Memory]:
        nll, carry = dense.forward(params, config, batch, forget(carry, batch.is_first))
        return nll.mean(), carry

    def batches(peer: int, num_peers: int, seed: int) -> Iterator[PyTree]:
        return SegmentStream(
            train, batch_size=_TEXT_BATCH, seq_len=config.seq_len, shard=peer, num_shards=num_peers, seed=seed
        )

    def evaluate(params: PyTree) -> jax.Array:
        def one(memory: Memory, batch: PyTree) -> tuple[Memory, jax.Array]:
            nll, memory = dense.forward(params, config, batch, memory)
            return memory, (nll * batch.mask).sum() / batch.mask.sum()

        _, losses = jax.lax.scan(one, empty_memory(config, _VALID_ROWS), valid_batches)
        return losses.mean()

    return Task(
        init=lambda key: dense.init(key, config, word_counts=counts),
        carry=empty_memory(config, _TEXT_BATCH),
        loss=loss,
        batches=batches,
        evaluate=evaluate,
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3)),
        target=3.7,
    )
