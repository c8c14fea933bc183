"""Transformer-XL whose layers are mixtures of experts (Learning@home, section 4.3), cut where the network cuts it.

Each layer is a DMoE layer; each expert is a whole Transformer-XL layer, so that routing is per sequence. What stays
with the trainer is the *trunk*: the tied embedding, a gate for each layer, and the head. A step is a chain of pure
functions, the *segments*, joined by calls to experts that may live elsewhere:

    hidden = embed(trunk["embed"], tokens, key)
    for each layer:
        scores = gate(trunk["gates"][layer], hidden, memory[layer], ids, key)    routing features, then the router
        (select k_best live experts; call them on `expert_inputs`; mix their outputs)
        memory[layer] = next_memory(memory[layer], hidden)                       what *entered* this layer
        hidden = the mixture
    loss = loss_head(trunk["embed"], trunk["head"], hidden, targets, key)

`segments` makes them; `local_forward` is the same model in one jit. Shapes: tokens and targets [batch, seq], hidden
[batch, seq, d_model], memory [batch, mem, d_model]. Positions are relative and live in the experts: the trunk has
none. Each `key` is key data of the step (see `models.trunk`), or None in evaluation. `ids` are the words at the first
positions: what a sequence *is* to a router that hashes.
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

from dmoe_jax.data.batches import Batch
from dmoe_jax.experts.base import Expert, check_positive
from dmoe_jax.experts.dropout import KeyData, RowKeys, check_rates, wrap_key
from dmoe_jax.experts.transformer_xl import transformer_xl_layer
from dmoe_jax.models import trunk as trunk_parts
from dmoe_jax.models.adaptive_softmax import check_cutoffs
from dmoe_jax.models.layers import ForwardAux, LayerAux, check_router, dmoe_layer, init_layers, total_loss
from dmoe_jax.models.trunk import (
    LayerMemory,
    Memory,
    StepKeys,
    TrunkDropout,
    embed,
    empty_memory,
    forget,
    init_embed_and_head,
    next_memory,
    step_keys,
)
from dmoe_jax.routing.base import Router, Scores, check_grid_size, score
from dmoe_jax.types import PyTree

__all__ = [
    "LayerMemory",
    "Memory",
    "Segments",
    "StepKeys",
    "TransformerXLConfig",
    "TrunkDropout",
    "embed",
    "empty_memory",
    "expert_inputs",
    "forget",
    "init_experts",
    "init_trunk",
    "local_forward",
    "next_memory",
    "routing_features",
    "segments",
    "step_keys",
]


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
    dropout: float = 0.0
    """Rate of the locked dropouts in an expert, and of the ordinary one behind the last layer."""
    attention_dropout: float = 0.0
    """Rate of the dropout on an expert's attention weights."""
    position_dropout: float = 0.0
    """Rate of the locked dropout on positional encodings, for each sample and layer."""
    embedding_dropout: float = 0.0
    """Rate at which words lose their whole embedding; the softmax keeps it."""
    input_dropout: float = 0.0
    """Rate of the locked dropout on word vectors."""
    output_dropout: float = 0.0
    """Rate of the locked dropout before the softmax."""
    clamp_len: int | None = None
    """Attention distances above it count as clamp_len; None: as they are."""
    same_length: bool = False
    """Whether every position sees exactly mem_len keys, itself included, and not all that there are."""
    compute_dtype: str = "float32"
    """Type of an expert's matrix products: "float32" or "bfloat16"."""

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
        check_rates(
            embedding_dropout=self.embedding_dropout,
            input_dropout=self.input_dropout,
            output_dropout=self.output_dropout,
        )
        self.expert()

    @property
    def trunk_dropout(self) -> TrunkDropout:
        """Rates outside the experts."""
        return TrunkDropout(
            embedding=self.embedding_dropout,
            input=self.input_dropout,
            output=self.output_dropout,
            final=self.dropout,
        )

    def expert(self) -> Expert:
        """The network of every expert of this model."""
        return transformer_xl_layer(
            d_model=self.d_model,
            num_heads=self.num_heads,
            d_ff=self.d_ff,
            seq_len=self.seq_len,
            mem_len=self.mem_len,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            position_dropout=self.position_dropout,
            clamp_len=self.clamp_len,
            same_length=self.same_length,
            compute_dtype=self.compute_dtype,
        )


class Segments(NamedTuple):
    """The trunk's pure functions, stable objects: equal (config, router) share them and their compiled code.

    Attributes:
      embed: (embed_params, tokens, key=None) -> hidden.
      gate: (gate_params, hidden, memory: LayerMemory, ids=None, key=None) -> scores.
      next_memory: (memory: LayerMemory, hidden) -> LayerMemory.
      loss_head: (embed_params, head_params, hidden, targets, key=None) -> mean nll, nats.
      token_nll: (embed_params, head_params, hidden, targets, key=None) -> nll [batch, seq], nats; for evaluation.
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
    check_router(router, config.grid_size, config.d_model)
    embed_key, head_key, gate_key = jax.random.split(key, 3)
    embed_params, head_params = init_embed_and_head(
        embed_key,
        head_key,
        vocab_size=config.vocab_size,
        d_model=config.d_model,
        cutoffs=config.cutoffs,
        word_counts=word_counts,
    )
    gates = [router.init(k, config.d_model) for k in jax.random.split(gate_key, config.num_layers)]
    return {"embed": embed_params, "gates": gates, "head": head_params}


def init_experts(key: PRNGKeyArray, config: TransformerXLConfig) -> tuple[PyTree, ...]:
    """Stacked expert parameters of each layer."""
    return init_layers(key, config.expert(), config.grid_size, config.num_layers)


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


def segments(config: TransformerXLConfig, router: Router) -> Segments:
    """The trunk's functions for this configuration and router; equal arguments return the same objects.

    Raises:
      ValueError: if the router is for another grid.
    """
    check_router(router, config.grid_size)
    return _segments(config.cutoffs, config.trunk_dropout, router)


@functools.cache
def _segments(cutoffs: tuple[int, ...], rates: TrunkDropout, router: Router) -> Segments:
    def embed(
        params: PyTree, tokens: Int[Array, "batch seq"], key: KeyData | None = None
    ) -> Float[Array, "batch seq d_model"]:
        return trunk_parts.embed(params, tokens, key, rates)

    def gate(
        params: PyTree,
        hidden: Float[Array, "batch seq d_model"],
        memory: LayerMemory,
        ids: Int[Array, " batch"] | None = None,
        key: KeyData | None = None,
    ) -> Scores:
        features = routing_features(hidden, memory.states, memory.mask)
        return score(router, params, features, key=None if key is None else wrap_key(key), ids=ids)

    def token_nll(
        embed_params: PyTree,
        head_params: PyTree,
        hidden: Float[Array, "batch seq d_model"],
        targets: Int[Array, "batch seq"],
        key: KeyData | None = None,
    ) -> Float[Array, "batch seq"]:
        return trunk_parts.token_nll(embed_params, head_params, hidden, targets, key, rates=rates, cutoffs=cutoffs)

    def loss_head(
        embed_params: PyTree,
        head_params: PyTree,
        hidden: Float[Array, "batch seq d_model"],
        targets: Int[Array, "batch seq"],
        key: KeyData | None = None,
    ) -> Float[Array, ""]:
        return jnp.mean(token_nll(embed_params, head_params, hidden, targets, key))

    return Segments(embed, gate, next_memory, loss_head, token_nll)


def expert_inputs(
    config: TransformerXLConfig, hidden: Any, memory: LayerMemory, dropout_key: RowKeys | None = None
) -> tuple[Any, ...]:
    """The inputs of a layer's experts, as many as `config.expert().inputs`.

    Args:
      config: says whether its experts drop anything, and so have a key among their inputs.
      hidden: [batch, seq, d_model], an array or a value on the tape.
      memory: of this layer.
      dropout_key: key data of each sample; None in evaluation.
    """
    inputs = (hidden, memory.states, memory.mask)
    if len(config.expert().inputs) == len(inputs):
        return inputs
    return (*inputs, np.zeros((hidden.shape[0], 2), np.uint32) if dropout_key is None else dropout_key)


def local_forward(
    trunk: PyTree,
    experts: Sequence[PyTree],
    config: TransformerXLConfig,
    router: Router,
    batch: Batch,
    memory: Memory,
    *,
    alive: Bool[Array, "..."] | None = None,
    keys: StepKeys | None = None,
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
      keys: chance of this step, see `step_keys`; None: evaluation.

    Returns: (loss in nats, aux); aux.memory is the memory for the next segment.
    """
    token_nll, layers, memory = local_token_nll(trunk, experts, config, router, batch, memory, alive=alive, keys=keys)
    nll = jnp.mean(token_nll)
    return total_loss(nll, layers), ForwardAux(nll, layers, memory)


def local_token_nll(
    trunk: PyTree,
    experts: Sequence[PyTree],
    config: TransformerXLConfig,
    router: Router,
    batch: Batch,
    memory: Memory,
    *,
    alive: Bool[Array, "..."] | None = None,
    keys: StepKeys | None = None,
) -> tuple[Float[Array, "batch seq"], tuple[LayerAux, ...], Memory]:
    """Negative log-likelihood of each target, what each layer did, and the memory for the next segment.

    Args: as of `local_forward`. For evaluation the lengths of `config` and `memory` need not be those of training.
    """
    parts = segments(config, router)
    expert = config.expert()
    # A batch comes from the host as NumPy.
    tokens, targets = jnp.asarray(batch.tokens), jnp.asarray(batch.targets)
    hidden = parts.embed(trunk["embed"], tokens, None if keys is None else keys.embed)
    layers, memories = [], []
    for i in range(config.num_layers):
        gate_key, expert_keys = (None, None) if keys is None else (keys.gates[i], keys.experts[i])
        scores = parts.gate(trunk["gates"][i], hidden, memory[i], tokens[:, 0], gate_key)
        inputs = (jnp.asarray(part) for part in expert_inputs(config, hidden, memory[i], expert_keys))
        layer_alive = None if alive is None else alive[i]
        mixed, aux = dmoe_layer(expert, experts[i], router, config.k_best, scores, layer_alive, *inputs)
        memories.append(parts.next_memory(memory[i], hidden))
        layers.append(aux)
        hidden = mixed
    head_key = None if keys is None else keys.head
    nll = parts.token_nll(trunk["embed"], trunk["head"], hidden, targets, head_key)
    return nll, tuple(layers), tuple(memories)
