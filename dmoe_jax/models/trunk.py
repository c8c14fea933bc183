"""The parts of Transformer-XL models around their layers: embedding, memory, head, and the keys of a step.

A step's chance is drawn on the host (`step_keys`) and handed in as raw key data: the same function then serves training
and evaluation (None: nothing is dropped).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num, PRNGKeyArray, UInt32

from dmoe_jax.arrays import PyTree
from dmoe_jax.experts.dropout import KeyData, dropout, locked_dropout, row_keys, wrap_key
from dmoe_jax.experts.transformer_xl import INIT_STDDEV
from dmoe_jax.models.adaptive_softmax import adaptive_softmax_log_probs, adaptive_softmax_loss, unigram_biases
from dmoe_jax.models.config import TransformerXLConfig

# Sites of dropout, see `dmoe_jax.experts.dropout`. Embedding and head have keys of their own.
_WORDS, _INPUT, POSITIONS_SITE = 0, 1, 2
_FINAL, _OUTPUT = 0, 1


class LayerMemory(NamedTuple):
    """A layer's memory of earlier segments.

    Attributes:
      states: [batch, mem, d_model], hidden states that entered the layer, newest last.
      mask: bool [batch, mem], False for slots not yet filled.
    """

    states: Float[Array, "batch mem d_model"]
    mask: Bool[Array, "batch mem"]


Memory = tuple[LayerMemory, ...]
"""One `LayerMemory` for each layer."""


class StepKeys(NamedTuple):
    """All chance of one training step: raw threefry key data, uint32.

    Attributes:
      embed, head: [2], for the dropouts before the first layer and behind the last.
      gates: [layers, 2], for the routers.
      experts: [layers, batch, 2], a `dropout_key` for each sample in each layer.
    """

    embed: UInt32[np.ndarray, "2"]
    gates: UInt32[np.ndarray, "layers 2"]
    experts: UInt32[np.ndarray, "layers batch 2"]
    head: UInt32[np.ndarray, "2"]


def step_keys(*, num_layers: int, batch: int, seed: int, trainer: int, step: int) -> StepKeys:
    """The keys of one step of one trainer, the same on every machine. None is zero: that would mean evaluation.

    Args:
      num_layers: layers of the model. batch: samples.
      seed, trainer, step: the run's, the trainer's number and its step's; none is negative.
    """
    count = 2 + num_layers + num_layers * batch
    # The spawn key keeps (seed, trainer, step) apart whatever their size; a list of the three would not.
    words = np.random.SeedSequence(seed, spawn_key=(trainer, step)).generate_state(2 * count, np.uint32)
    keys = words.reshape(count, 2)
    keys[~keys.any(axis=1), 1] = 1
    return StepKeys(
        embed=keys[0],
        head=keys[1],
        gates=keys[2 : 2 + num_layers],
        experts=keys[2 + num_layers :].reshape(num_layers, batch, 2),
    )


def init_embed_and_head(
    embed_key: PRNGKeyArray,
    head_key: PRNGKeyArray,
    config: TransformerXLConfig,
    *,
    word_counts: Num[np.ndarray, " vocab"] | None = None,
) -> tuple[PyTree, PyTree]:
    """Parameters of the tied embedding, {"table"}, and of the head, {"bias", "cluster_w", "cluster_b"}.

    Weights are N(0, 0.02), the authors' recipe. Output biases are 0 as theirs, or with `word_counts` of the training
    text those of a unigram model: see `unigram_biases`.

    Raises:
      ValueError: if word_counts has not one number for each word.
    """
    vocab_size, n_tail = config.vocab_size, len(config.cutoffs)
    if word_counts is None:
        bias, cluster_b = jnp.zeros(vocab_size), jnp.zeros(n_tail)
    elif word_counts.shape != (vocab_size,):
        raise ValueError(f"word_counts must have shape ({vocab_size},), got {word_counts.shape}")
    else:
        bias, cluster_b = unigram_biases(word_counts, config.cutoffs)
    head = {
        "bias": bias,
        "cluster_w": INIT_STDDEV * jax.random.normal(head_key, (n_tail, config.d_model)),
        "cluster_b": cluster_b,
    }
    return {"table": INIT_STDDEV * jax.random.normal(embed_key, (vocab_size, config.d_model))}, head


def empty_memory(config: TransformerXLConfig, batch: int) -> Memory:
    """The memory before the first segment: no slot filled."""
    shape = (batch, config.mem_len)
    # Arrays of its own for each layer: a caller may donate them.
    return tuple(
        LayerMemory(jnp.zeros((*shape, config.d_model)), jnp.zeros(shape, bool)) for _ in range(config.num_layers)
    )


def forget(memory: Memory, restarted: Bool[Array, " batch"]) -> Memory:
    """The memory with the streams that begin a new text emptied."""
    return tuple(LayerMemory(layer.states, layer.mask & ~restarted[:, None]) for layer in memory)


def next_memory(memory: LayerMemory, hidden: Float[Array, "... d_model"]) -> LayerMemory:
    """The last mem_len of the states that have entered the layer, by sequence or in rows of all positions. No gradient
    flows through memory."""
    batch, mem_len = memory.mask.shape
    hidden = hidden.reshape(batch, -1, hidden.shape[-1])
    states = jnp.concatenate([memory.states, hidden], axis=1)[:, -mem_len:]
    mask = jnp.concatenate([memory.mask, jnp.ones(hidden.shape[:2], bool)], axis=1)[:, -mem_len:]
    return LayerMemory(jax.lax.stop_gradient(states), mask)


def embed(
    params: PyTree, tokens: Int[Array, "batch seq"], config: TransformerXLConfig, key: KeyData | None = None
) -> Float[Array, "batch seq d_model"]:
    """Word vectors times sqrt(d_model): the table is tied to the softmax, whose vectors must be small.

    Args:
      params: {"table"}.
      config: its rates of embedding and input dropout count here. The first word of a segment keeps its embedding.
      key: the step's; None: nothing is dropped.
    """
    table: Array = params["table"]
    vectors = table[tokens] * math.sqrt(table.shape[1])
    if key is None:
        return vectors
    if config.embedding_dropout:
        own = jax.random.fold_in(wrap_key(key), _WORDS)
        kept = jax.random.bernoulli(own, 1 - config.embedding_dropout, table.shape[:1])
        factors = kept[tokens] / (1 - config.embedding_dropout)
        # Not the first word: with an empty memory it sees itself alone, and as a vector of zeros it would enter every
        # LayerNorm as zeros, which multiply its gradient by 1 / sqrt(eps) twice a layer: beyond float32 in 16 layers.
        vectors = vectors * factors.at[:, 0].set(1.0)[..., None]
    return locked_dropout(vectors, config.input_dropout, row_keys(key, tokens.shape[0]), site=_INPUT)


def token_nll(
    embed_params: PyTree,
    head_params: PyTree,
    hidden: Float[Array, "batch seq d_model"],
    targets: Int[Array, "batch seq"],
    config: TransformerXLConfig,
    key: KeyData | None = None,
) -> Float[Array, "batch seq"]:
    """Negative log-probability of each target, nats.

    Args:
      embed_params, head_params: of `init_embed_and_head`.
      hidden: the last layer's output.
      targets: the words to predict.
      config: its cutoffs, output dropout and the layers' dropout count here.
      key: the step's; None: nothing is dropped.
    """
    rows = None if key is None else row_keys(key, hidden.shape[0])
    hidden = dropout(hidden, config.layer.dropout, rows, site=_FINAL)
    hidden = locked_dropout(hidden, config.output_dropout, rows, site=_OUTPUT)
    nll = adaptive_softmax_loss(
        embed_params["table"],
        **head_params,
        hidden=hidden.reshape(-1, hidden.shape[-1]),
        targets=targets.reshape(-1),
        cutoffs=config.cutoffs,
    )
    return nll.reshape(targets.shape)


def word_log_probs(
    embed_params: PyTree, head_params: PyTree, hidden: Float[Array, "... d_model"], config: TransformerXLConfig
) -> Float[Array, "... vocab"]:
    """Log-probability of every word after each position, nats; arguments as of `token_nll`, nothing dropped."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    every = adaptive_softmax_log_probs(embed_params["table"], **head_params, hidden=rows, cutoffs=config.cutoffs)
    return every.reshape(*hidden.shape[:-1], -1)
