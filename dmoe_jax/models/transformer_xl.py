"""Transformer-XL whose layers are mixtures of experts (Learning@home, section 4.3), cut where the network cuts it.

Each layer is a DMoE layer; each expert is a whole Transformer-XL layer, so that routing is per sequence. What stays
with the trainer is the *trunk*: the tied embedding, a gate for each layer, and the head. A step is a chain of pure
functions, the *segments*, joined by calls to experts that may live elsewhere:

    hidden = embed(trunk["embed"], tokens)
    for each layer:
        scores = gate(trunk["gates"][layer], hidden, memory[layer])      routing features, then the router
        (select k_best live experts; call them on hidden, memory, memory_mask; mix their outputs)
        memory[layer] = next_memory(memory[layer], hidden)               what *entered* this layer
        hidden = the mixture
    loss = loss_head(trunk["embed"], trunk["head"], hidden, targets)

`segments` makes them; `local_forward` is the same model in one jit. Shapes: tokens and targets [batch, seq], hidden
[batch, seq, d_model], memory [batch, mem, d_model]. Positions are relative and live in the experts: the trunk has
none.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num, PRNGKeyArray

from dmoe_jax.experts.base import Expert, check_positive
from dmoe_jax.experts.transformer_xl import INIT_STDDEV, transformer_xl_layer
from dmoe_jax.models.adaptive_softmax import adaptive_softmax_loss, check_cutoffs, unigram_biases
from dmoe_jax.models.layers import ForwardAux, check_router, dmoe_layer, init_layers, total_loss
from dmoe_jax.routing.base import Router, Scores, check_grid_size

PyTree = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerXLConfig:
    """Sizes of the model. The router is given beside it: swapping it is one line."""

    vocab_size: int
    """Words; id 0 the most frequent."""
    d_model: int
    """Width of the hidden states and of the embedding; even, and a multiple of num_heads."""
    num_layers: int
    """DMoE layers."""
    num_heads: int
    """Attention heads of an expert."""
    d_ff: int
    """Width of an expert's feed-forward network."""
    seq_len: int
    """Positions in a segment."""
    mem_len: int
    """Memory slots: hidden states of earlier segments that a layer attends to."""
    grid_size: tuple[int, ...]
    """Extents of each layer's grid of experts."""
    k_best: int
    """Experts that each sequence goes to; 4 in the paper."""
    cutoffs: tuple[int, ...] = ()
    """First word of each tail cluster of the adaptive softmax; () for a plain softmax."""

    def __post_init__(self) -> None:
        check_positive(
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            seq_len=self.seq_len,
            mem_len=self.mem_len,
            k_best=self.k_best,
        )
        # Tuples, whatever sequence was given: a configuration is a key of caches.
        object.__setattr__(self, "grid_size", check_grid_size(self.grid_size))
        object.__setattr__(self, "cutoffs", check_cutoffs(tuple(self.cutoffs), self.vocab_size))
        if self.k_best > math.prod(self.grid_size):
            raise ValueError(f"k_best is at most the number of cells of grid {self.grid_size}, got {self.k_best}")
        self.expert()

    def expert(self) -> Expert:
        """The network of every expert of this model."""
        return transformer_xl_layer(
            d_model=self.d_model,
            num_heads=self.num_heads,
            d_ff=self.d_ff,
            seq_len=self.seq_len,
            mem_len=self.mem_len,
        )


class Batch(NamedTuple):
    """One segment of `batch` parallel streams of text.

    Attributes:
      tokens: [batch, seq], the words read.
      targets: [batch, seq], the words that follow them.
    """

    tokens: Int[Array, "batch seq"]
    targets: Int[Array, "batch seq"]


class LayerMemory(NamedTuple):
    """What one layer remembers of earlier segments.

    Attributes:
      states: [batch, mem, d_model], hidden states that entered the layer, newest last.
      mask: bool [batch, mem], False for slots not yet filled.
    """

    states: Float[Array, "batch mem d_model"]
    mask: Bool[Array, "batch mem"]


Memory = tuple[LayerMemory, ...]
"""One `LayerMemory` for each layer."""


class Segments(NamedTuple):
    """The trunk's pure functions, stable objects: equal (config, router) share them and their compiled code.

    Attributes:
      embed: (embed_params, tokens) -> hidden.
      gate: (gate_params, hidden, memory: LayerMemory) -> scores.
      next_memory: (memory: LayerMemory, hidden) -> LayerMemory.
      loss_head: (embed_params, head_params, hidden, targets) -> mean nll, nats.
      token_nll: (embed_params, head_params, hidden, targets) -> nll [batch, seq], nats; for evaluation.
    """

    embed: Callable[..., Float[Array, "batch seq d_model"]]
    gate: Callable[..., Scores]
    next_memory: Callable[..., LayerMemory]
    loss_head: Callable[..., Float[Array, ""]]
    token_nll: Callable[..., Float[Array, "batch seq"]]


def init_trunk(
    key: PRNGKeyArray,
    config: TransformerXLConfig,
    router: Router,
    *,
    word_counts: Num[np.ndarray, " vocab"] | None = None,
) -> dict[str, PyTree]:
    """Parameters of everything but the experts: {"embed": ..., "gates": [one for each layer], "head": ...}.

    Weights are N(0, 0.02), the authors' recipe; gates are the router's business. Output biases are 0 as theirs, or,
    given `word_counts` (of the training text), those of a unigram model: see `unigram_biases`.

    Raises:
      ValueError: if the router is for another grid, or word_counts has not one number for each word.
    """
    check_router(router, config.grid_size)
    embed_key, head_key, gate_key = jax.random.split(key, 3)
    shape = (config.vocab_size, config.d_model)
    n_tail = len(config.cutoffs)
    if word_counts is None:
        bias, cluster_b = jnp.zeros(config.vocab_size), jnp.zeros(n_tail)
    elif word_counts.shape != (config.vocab_size,):
        raise ValueError(f"word_counts must have shape ({config.vocab_size},), got {word_counts.shape}")
    else:
        bias, cluster_b = unigram_biases(word_counts, config.cutoffs)
    return {
        "embed": {"table": INIT_STDDEV * jax.random.normal(embed_key, shape)},
        "gates": [router.init(k, config.d_model) for k in jax.random.split(gate_key, config.num_layers)],
        "head": {
            "bias": bias,
            "cluster_w": INIT_STDDEV * jax.random.normal(head_key, (n_tail, config.d_model)),
            "cluster_b": cluster_b,
        },
    }


def init_experts(key: PRNGKeyArray, config: TransformerXLConfig) -> tuple[PyTree, ...]:
    """Stacked expert parameters of each layer."""
    return init_layers(key, config.expert(), config.grid_size, config.num_layers)


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


def embed(params: PyTree, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq d_model"]:
    """Word vectors times sqrt(d_model): the table is tied to the softmax, whose vectors must be small."""
    table: Array = params["table"]
    return table[tokens] * math.sqrt(table.shape[1])


def routing_features(
    hidden: Float[Array, "batch seq d_model"],
    memory: Float[Array, "batch mem d_model"],
    memory_mask: Bool[Array, "batch mem"],
) -> Float[Array, "batch d_model"]:
    """What a sequence is routed by: the mean of its filled memory slots and its FIRST position. Causal.

    A sequence has one set of mixture weights for all its positions. A mean over the whole segment would therefore let
    the words to be predicted reach their own prediction through the weights, and perplexity would look better than
    the model is. The first position and the past are all that every position may know. No gradient flows into the
    memory.
    """
    past = jnp.where(memory_mask[..., None], jax.lax.stop_gradient(memory), 0)
    total = jnp.sum(past, axis=1) + hidden[:, 0]
    count = 1 + jnp.sum(memory_mask, axis=1, keepdims=True)
    return total / count.astype(total.dtype)


def next_memory(memory: LayerMemory, hidden: Float[Array, "batch seq d_model"]) -> LayerMemory:
    """The last mem_len of the states that have entered the layer. No gradient flows through memory."""
    mem_len = memory.states.shape[1]
    states = jnp.concatenate([memory.states, hidden], axis=1)[:, -mem_len:]
    mask = jnp.concatenate([memory.mask, jnp.ones(hidden.shape[:2], bool)], axis=1)[:, -mem_len:]
    return LayerMemory(jax.lax.stop_gradient(states), mask)


def segments(config: TransformerXLConfig, router: Router) -> Segments:
    """The trunk's functions for this configuration and router; equal arguments return the same objects.

    Raises:
      ValueError: if the router is for another grid.
    """
    check_router(router, config.grid_size)
    return _segments(config.cutoffs, router)


@functools.cache
def _segments(cutoffs: tuple[int, ...], router: Router) -> Segments:
    def gate(params: PyTree, hidden: Float[Array, "batch seq d_model"], memory: LayerMemory) -> Scores:
        return router.scores(params, routing_features(hidden, memory.states, memory.mask))

    def token_nll(
        embed_params: PyTree,
        head_params: PyTree,
        hidden: Float[Array, "batch seq d_model"],
        targets: Int[Array, "batch seq"],
    ) -> Float[Array, "batch seq"]:
        nll = adaptive_softmax_loss(
            embed_params["table"],
            head_params["bias"],
            head_params["cluster_w"],
            head_params["cluster_b"],
            hidden.reshape(-1, hidden.shape[-1]),
            targets.reshape(-1),
            cutoffs=cutoffs,
        )
        return nll.reshape(targets.shape)

    def loss_head(
        embed_params: PyTree,
        head_params: PyTree,
        hidden: Float[Array, "batch seq d_model"],
        targets: Int[Array, "batch seq"],
    ) -> Float[Array, ""]:
        return jnp.mean(token_nll(embed_params, head_params, hidden, targets))

    return Segments(embed, gate, next_memory, loss_head, token_nll)


def local_forward(
    trunk: PyTree,
    experts: Sequence[PyTree],
    config: TransformerXLConfig,
    router: Router,
    batch: Batch,
    memory: Memory,
    *,
    alive: Bool[Array, "..."] | None = None,
) -> tuple[Float[Array, ""], ForwardAux]:
    """The whole model on one machine: pure, to be jitted and differentiated by the caller.

    Args:
      trunk: from `init_trunk`.
      experts: stacked parameters of each layer, from `init_experts`.
      config: sizes; static under jit, as is the router.
      router: the router of every layer.
      batch: tokens and targets.
      memory: from `empty_memory` or the previous step's aux.
      alive: bool [num_layers, *grid_size], which experts may be chosen; None for all.

    Returns: (loss in nats, aux); aux.memory is the memory for the next segment.
    """
    parts = segments(config, router)
    expert = config.expert()
    hidden = parts.embed(trunk["embed"], batch.tokens)
    layers, memories = [], []
    for i in range(config.num_layers):
        scores = parts.gate(trunk["gates"][i], hidden, memory[i])
        mixed, aux = dmoe_layer(
            expert,
            experts[i],
            router,
            config.k_best,
            scores,
            None if alive is None else alive[i],
            hidden,
            memory[i].states,
            memory[i].mask,
        )
        memories.append(parts.next_memory(memory[i], hidden))
        layers.append(aux)
        hidden = mixed
    nll = parts.loss_head(trunk["embed"], trunk["head"], hidden, batch.targets)
    return total_loss(nll, tuple(layers)), ForwardAux(nll, tuple(layers), tuple(memories))
