"""A small ALBERT (Lan et al. 2020) on WikiText-2: its samples, the model, and how peers train it.

**Samples** for masked words and segment order (sections 3.1 and 4.1), each with a number. Each has words in a row from
a place of the text that is drawn by chance, in two parts, which change places in half of the samples. As in BERT's
(Devlin et al. 2019, appendix A.2) preparation of its data, 15 % of the words are to be predicted: 80 % of them become
[MASK], 10 % any word, 10 % stay what they are.

    tokens:    [CLS] first segment [SEP] second segment [SEP]      exactly seq_len, so there is no padding
    segments:    0         0         0         1          1

The first segment is as long in all samples, so that nothing but the words tells which part was first. All have as many
masked words, so that gradients of small batches, weighted by their samples, are that of one large batch. Unlike
ALBERT's, words are whole and are masked one by one, and parts do not end with a sentence. The vocabulary is cut to the
most frequent words, so that the model is small beside its layers; all others are `<unk>`.

**The model** is a small BERT. Two things make it small (section 3.1). The embedding is *factorised*: words have vectors
of width E, which one matrix takes to the layers' width H. And all layers *share* their parameters: there is one layer,
applied num_layers times. With post-LN, as in BERT (Devlin et al. 2019):

    e = LayerNorm(word + position + segment)                         [batch, seq, E]
    h_0 = W e + b                                                    [batch, seq, H]
    a_n = LayerNorm(h_n + Attention(h_n));  h_n+1 = LayerNorm(a_n + W_2 gelu(W_1 a_n))
    masked words:    logits = words LayerNorm(gelu(W_m h_N)) + bias     of the masked positions; words as those of e
    segment order:   logits = W_o tanh(W_p h_N[CLS])                    index 1: swapped

The matrices of attention, feed-forward network and heads have biases, too; gelu is its approximation by tanh. Nothing
is dropped, as in the second version of the authors' models.

**The optimiser** is that of ALBERT, DeDLOC and Moshpit SGD: LAMB (You et al. 2020, algorithm 2) under a clipped
gradient, with linear warm-up and linear decay.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Int32, PRNGKeyArray

from dmoe_jax.arrays import PyTree
from dmoe_jax.data import Corpus, load_corpus
from dmoe_jax.data.words import UNK
from dmoe_jax.optim import collaborative
from experiments.collaborative.world import Problem

NUM_SPECIAL = 3
"""Tokens beside the words, whose ids follow the last word's: [CLS], [SEP] and [MASK]."""

_MASKED_SHARE = 0.15
_TO_MASK, _TO_ANY = 0.8, 0.1
"""Shares of the words to be predicted that become [MASK], and that become any word."""


class MaskedBatch(NamedTuple):
    """Samples to read and what is to be told of them; of one sample, without the first axis.

    Attributes:
      tokens: what is read, masked.
      segments: 0 for the first segment with its [CLS] and [SEP], 1 for the second with its [SEP].
      positions: the places of the masked words, ascending.
      targets: the words that stood there.
      swapped: 1 where the second segment came before the first one in the text, else 0.
    """

    tokens: Int32[np.ndarray, "*batch seq"]
    segments: Int32[np.ndarray, "*batch seq"]
    positions: Int32[np.ndarray, "*batch masked"]
    targets: Int32[np.ndarray, "*batch masked"]
    swapped: Int32[np.ndarray, "*batch"]


class MaskedText:
    """The samples of a text, by number. The same arguments give the same samples.

    Args:
      ids: the text; it is kept, and must not change.
      vocab_size: of words and special tokens.
      seq_len: tokens of a sample, [CLS] and two [SEP] included; at least 5.
      seed: decides the places, the swaps and the masks.

    Raises:
      ValueError: seq_len is too small, or the text has fewer than seq_len - 3 words.
    """

    def __init__(self, ids: Int[np.ndarray, " words"], *, vocab_size: int, seq_len: int, seed: int = 0) -> None:
        if not 5 <= seq_len <= ids.size + 3:
            raise ValueError(f"seq_len must be from 5 to the {ids.size} words of the text and 3, got {seq_len}")
        self.cls, self.sep, self.mask = range(vocab_size - NUM_SPECIAL, vocab_size)
        self._ids, self._seed, self._num_words = ids, seed, seq_len - 3
        self._num_masked = max(1, round(_MASKED_SHARE * self._num_words))

    def sample(self, number: int) -> MaskedBatch:
        """Return the sample of this number, from 0 without end: its arrays have no axis for a batch."""
        rng = np.random.default_rng([self._seed, number])
        begin, swapped = rng.integers(self._ids.size - self._num_words + 1), rng.integers(2)
        words, length = self._ids[begin : begin + self._num_words], self._num_words // 2
        if swapped:
            words = np.roll(words, length)
        tokens = np.array([self.cls, *words[:length], self.sep, *words[length:], self.sep], np.int32)
        places = np.flatnonzero(tokens < self.cls)
        positions = np.sort(rng.choice(places, self._num_masked, replace=False))
        targets = tokens[positions]
        chance, others = rng.random(targets.size), rng.integers(self.cls, size=targets.size)
        shown = np.where(chance < _TO_MASK + _TO_ANY, others, targets)
        tokens[positions] = np.where(chance < _TO_MASK, self.mask, shown)
        return MaskedBatch(
            tokens=tokens,
            segments=(np.arange(tokens.size) >= length + 2).astype(np.int32),
            positions=positions.astype(np.int32),
            targets=targets,
            swapped=np.array(swapped, np.int32),
        )

    def batch(self, numbers: Iterable[int]) -> MaskedBatch:
        """Return the samples of these numbers, one or more, in this order."""
        return MaskedBatch(*map(np.stack, zip(*(self.sample(number) for number in numbers), strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AlbertConfig:
    """Sizes of the model. The defaults are tiny."""

    vocab_size: int = 1003
    """Words and special tokens."""
    max_len: int = 32
    """Tokens of a sample."""
    embedding_dim: int = 32
    """E, width of the word vectors; 128 in the paper."""
    d_model: int = 32
    """H, width of the hidden states; a multiple of num_heads. The feed-forward part is four times as wide."""
    num_layers: int = 2
    """Number of times that the layer is applied."""
    num_heads: int = 4
    """Attention heads."""


def init_albert(key: PRNGKeyArray, config: AlbertConfig) -> dict[str, PyTree]:
    """Make the parameters, as BERT's: embeddings and matrices small by chance, biases 0, gains of LayerNorms 1."""
    narrow, width = config.embedding_dim, config.d_model
    embeddings = {"words": config.vocab_size, "positions": config.max_len, "segments": 2}
    matrices = {
        "project": (narrow, width),
        **dict.fromkeys(("query", "key", "value", "output", "pool"), (width, width)),
        "ff_in": (width, 4 * width),
        "ff_out": (4 * width, width),
        "word_head": (width, narrow),
        "order_head": (width, 2),
    }
    norms = {"embedding_norm": narrow, "attention_norm": width, "ff_norm": width, "word_norm": narrow}
    keys = iter(jax.random.split(key, len(embeddings) + len(matrices)))

    def drawn(*shape: int) -> Array:
        return 0.02 * jax.random.truncated_normal(next(keys), -2, 2, shape)

    return {
        **{name: drawn(rows, narrow) for name, rows in embeddings.items()},
        **{name: {"kernel": drawn(*shape), "bias": jnp.zeros(shape[1])} for name, shape in matrices.items()},
        **{name: {"scale": jnp.ones(size), "bias": jnp.zeros(size)} for name, size in norms.items()},
        "vocabulary": {"bias": jnp.zeros(config.vocab_size)},
    }


def albert_logits(
    params: PyTree, config: AlbertConfig, batch: MaskedBatch
) -> tuple[Float[Array, "batch masked vocab"], Float[Array, "batch 2"]]:
    """Return the logits of each masked word, and of the order. Pure; `config` is static under jit."""
    tokens, segments, positions = map(jnp.asarray, batch[:3])  # a batch comes from the host as NumPy
    vectors = params["words"][tokens] + params["positions"][: tokens.shape[1]] + params["segments"][segments]

    def layer(hidden: Array, _: None) -> tuple[Array, None]:
        heads = (*hidden.shape[:2], config.num_heads, -1)
        query, key, value = (_dense(params[name], hidden).reshape(heads) for name in ("query", "key", "value"))
        attended = jax.nn.dot_product_attention(query, key, value).reshape(hidden.shape)
        attention = _norm(params["attention_norm"], hidden + _dense(params["output"], attended))
        inner = jax.nn.gelu(_dense(params["ff_in"], attention))
        return _norm(params["ff_norm"], attention + _dense(params["ff_out"], inner)), None

    hidden = _dense(params["project"], _norm(params["embedding_norm"], vectors))
    hidden, _ = jax.lax.scan(layer, hidden, None, length=config.num_layers)
    masked = jnp.take_along_axis(hidden, positions[:, :, None], axis=1)
    inner = _norm(params["word_norm"], jax.nn.gelu(_dense(params["word_head"], masked)))
    words = inner @ params["words"].T + params["vocabulary"]["bias"]
    return words, _dense(params["order_head"], jnp.tanh(_dense(params["pool"], hidden[:, 0])))


def _dense(params: PyTree, x: Array) -> Array:
    return x @ params["kernel"] + params["bias"]


def _norm(params: PyTree, x: Array) -> Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-12) * params["scale"] + params["bias"]


def albert_loss(params: PyTree, config: AlbertConfig, batch: MaskedBatch) -> Float[Array, ""]:
    """Return the loss, nats: masked words plus segment order, each a mean over the samples. Pure, as the logits."""
    words, order = albert_logits(params, config, batch)
    targets, swapped = jnp.asarray(batch.targets), jnp.asarray(batch.swapped)
    mlm_loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(words, targets))
    return mlm_loss + jnp.mean(optax.softmax_cross_entropy_with_integer_labels(order, swapped))


_PEAK, _WARMUP_STEPS, _TOTAL_STEPS = 0.1, 2, 32
"""Step size of LAMB after the warm-up, and global steps until then and until it would be 0."""


def decays(params: PyTree) -> PyTree:
    """Return a tree of bool, True for the arrays that decay: not `bias`, nor `scale`, a LayerNorm's gain."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: getattr(path[-1], "key", None) not in ("bias", "scale"), params
    )


def _step_size(step: Any) -> Any:
    return _PEAK * jnp.minimum(step / _WARMUP_STEPS, (_TOTAL_STEPS - step) / (_TOTAL_STEPS - _WARMUP_STEPS))


OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.lamb(_step_size, b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.01, mask=decays)
)
"""The same object for all: they share compiled code."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AlbertTask:
    """Model, text and batch of a training. Made by `albert_task`."""

    config: AlbertConfig
    text: MaskedText
    held_out: MaskedBatch
    params: PyTree
    """To begin with: {"model", "zeros"}, see `albert_task`."""
    target: int
    """Samples of a global step."""

    @property
    def num_params(self) -> int:
        """Numbers in the parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def loss(self, params: PyTree) -> float:
        """Return the loss on the held-out samples: masked words plus segment order, nats."""
        return float(_loss(params["model"], self.config, self.held_out))

    def gradient(self, params: PyTree, numbers: Sequence[int]) -> PyTree:
        """Return the mean gradient of the samples of these numbers; it is compiled for each number of samples."""
        grads = _gradient(params["model"], self.config, self.text.batch(numbers))
        return {"model": grads, "zeros": self.params["zeros"]}

    def problem(self, num_machines: int) -> Problem:
        """Return the same for a world of so many machines, whose names are "peer0", "peer1" and so on.

        Machine k of n reads the samples k, k + n, k + 2 n, ... A process that comes back goes on where the one before
        it on the same machine had stopped. A micro-batch keeps its numbers, so that a run can be repeated.
        """
        begins: dict[tuple[str, int], int] = {}
        read = list(range(num_machines))

        def numbers_of(peer: str, number: int, count: int) -> range:
            machine = int(peer.removeprefix("peer").partition(".")[0])
            if (peer, number) not in begins:
                begins[peer, number] = read[machine]
                read[machine] += count * num_machines
            begin = begins[peer, number]
            return range(begin, begin + count * num_machines, num_machines)

        def batch_gradient(params: PyTree, micro_batches: Sequence[tuple[str, int, int]]) -> PyTree:
            return self.gradient(params, [each for one in micro_batches for each in numbers_of(*one)])

        return Problem(
            params=self.params,
            gradient=lambda params, *micro_batch: self.gradient(params, numbers_of(*micro_batch)),
            batch_gradient=batch_gradient,
            together=collaborative(OPTIMIZER),
        )

    def one_machine(self) -> Iterator[PyTree]:
        """Yield the parameters after each step of one machine that reads all samples in order; endless."""
        params, state = self.params, OPTIMIZER.init(self.params)
        batch = range(self.target)
        while True:
            params, state = _step(params, state, self.gradient(params, batch))
            yield params
            batch = range(batch.stop, batch.stop + self.target)


def albert_task(
    *,
    config: AlbertConfig = AlbertConfig(),
    target: int = 512,
    held_out: int = 256,
    sent: int = 2**20,
    seed: int = 0,
    corpus: Corpus | None = None,
) -> AlbertTask:
    """Make the task.

    Args:
      config: the model.
      target: samples of a global step.
      held_out: samples of the validation text on which the loss is measured.
      sent: numbers that peers average; those that the model has not are zeros. On lines that are made as much thinner
        as the vector is shorter than the paper's, the messages by which many peers find each other would else outweigh
        it.
      seed: of the parameters, and of the order and the masks of the training text; the held-out samples are the same
        for all seeds.
      corpus: None: WikiText-2, or the embedded text where that cannot be had.

    Raises:
      ValueError: the text is too short. DataError: it cannot be had.
    """
    corpus = load_corpus() if corpus is None else corpus
    words = corpus.vocabulary.words[: config.vocab_size - NUM_SPECIAL]

    def samples(ids: Int[np.ndarray, " words"], seed: int) -> MaskedText:
        frequent = np.where(ids < len(words), ids, words.index(UNK)).astype(np.int32)  # ids go by falling frequency
        return MaskedText(frequent, vocab_size=config.vocab_size, seq_len=config.max_len, seed=seed)

    model = init_albert(jax.random.key(seed), config)
    num_zeros = max(0, sent - sum(leaf.size for leaf in jax.tree.leaves(model)))
    return AlbertTask(
        config=config,
        text=samples(corpus.train, seed),
        held_out=samples(corpus.valid, 0).batch(range(held_out)),
        params={"model": model, "zeros": jnp.zeros(num_zeros)},
        target=target,
    )


# Once for all peers and seeds of a process.
_loss = jax.jit(albert_loss, static_argnums=1)
_gradient = jax.jit(jax.grad(albert_loss), static_argnums=1)


@jax.jit
def _step(params: PyTree, state: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state
