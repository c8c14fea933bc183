"""The dense Transformer-XL language model (Dai et al. 2019): the baselines of Learning@home, section 4.3.

The same layers as the experts of `models.transformer_xl`, one after another and without a router. As in the authors'
WikiText recipe all layers share the biases u and v of the relative attention ("untie_r" off) and see the same
positional encodings, whose features are dropped once a step for all rows. Embedding and softmax are tied.
"""

from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num, PRNGKeyArray

from dmoe_jax.data.batches import Batch
from dmoe_jax.experts.base import check_positive
from dmoe_jax.experts.dropout import KeyData, check_rates, locked_dropout
from dmoe_jax.experts.relative_attention import relative_positions
from dmoe_jax.experts.transformer_xl import INIT_STDDEV, TransformerXLLayer, check_layer
from dmoe_jax.models.adaptive_softmax import check_cutoffs
from dmoe_jax.models.trunk import (
    POSITIONS_SITE,
    Memory,
    StepKeys,
    TrunkDropout,
    embed,
    init_embed_and_head,
    next_memory,
    token_nll,
)
from dmoe_jax.types import PyTree


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    """Sizes of the model, and its rates of dropout. Parameters depend on the sizes up to d_ff alone."""

    vocab_size: int
    """Words; id 0 the most frequent."""
    d_model: int
    """Width of the hidden states and of the embedding; even, and a multiple of num_heads."""
    num_layers: int
    """Transformer layers."""
    num_heads: int
    """Attention heads of a layer."""
    d_ff: int
    """Width of a layer's feed-forward network."""
    seq_len: int
    """Positions in a segment."""
    mem_len: int
    """Memory slots: hidden states of earlier segments that a layer attends to."""
    cutoffs: tuple[int, ...] = ()
    """First word of each tail cluster of the adaptive softmax; () for a plain softmax."""
    dropout: float = 0.0
    """Rate of the locked dropouts in a layer, and of the ordinary one behind the last layer."""
    attention_dropout: float = 0.0
    """Rate of the dropout on attention weights."""
    position_dropout: float = 0.0
    """Rate of the locked dropout on positional encodings, one mask for all samples and layers."""
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
    """Type of the layers' matrix products: "float32" or "bfloat16"."""

    def __post_init__(self) -> None:
        check_positive(vocab_size=self.vocab_size, num_layers=self.num_layers)
        check_layer(
            d_model=self.d_model,
            num_heads=self.num_heads,
            d_ff=self.d_ff,
            seq_len=self.seq_len,
            mem_len=self.mem_len,
            clamp_len=self.clamp_len,
            compute_dtype=self.compute_dtype,
        )
        check_rates(
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            position_dropout=self.position_dropout,
            embedding_dropout=self.embedding_dropout,
            input_dropout=self.input_dropout,
            output_dropout=self.output_dropout,
        )
        # A tuple, whatever sequence was given: a configuration is a key of caches.
        object.__setattr__(self, "cutoffs", check_cutoffs(tuple(self.cutoffs), self.vocab_size))

    @property
    def trunk_dropout(self) -> TrunkDropout:
        """Rates outside the layers."""
        return TrunkDropout(
            embedding=self.embedding_dropout,
            input=self.input_dropout,
            output=self.output_dropout,
            final=self.dropout,
        )


def init(
    key: PRNGKeyArray, config: DenseConfig, *, word_counts: Num[np.ndarray, " vocab"] | None = None
) -> dict[str, PyTree]:
    """Parameters: {"embed", "biases": {"content", "position"}, "layers": [one for each layer], "head"}.

    Weights are N(0, 0.02), LayerNorm gains N(1, 0.02), biases 0; for `word_counts` see `init_embed_and_head`.

    Raises:
      ValueError: if word_counts has not one number for each word.
    """
    embed_key, head_key, bias_key, layer_key = jax.random.split(key, 4)
    embed_params, head_params = init_embed_and_head(
        embed_key,
        head_key,
        vocab_size=config.vocab_size,
        d_model=config.d_model,
        cutoffs=config.cutoffs,
        word_counts=word_counts,
    )
    heads = (config.num_heads, config.d_model // config.num_heads)
    content, position = INIT_STDDEV * jax.random.normal(bias_key, (2, *heads))
    layer = _layer(config)
    # Parameters do not depend on the lengths, so one position and one slot suffice to make them.
    sample, filled = jnp.zeros((1, 1, config.d_model)), jnp.ones((1, 1), bool)

    @jax.jit
    def init_layer(own: PRNGKeyArray) -> PyTree:
        return layer.init(own, sample, sample, filled, content_bias=content, position_bias=position)["params"]

    return {
        "embed": embed_params,
        "biases": {"content": content, "position": position},
        "layers": [init_layer(own) for own in jax.random.split(layer_key, config.num_layers)],
        "head": head_params,
    }


def forward(
    params: PyTree, config: DenseConfig, batch: Batch, memory: Memory, *, keys: StepKeys | None = None
) -> tuple[Float[Array, "batch seq"], Memory]:
    """Negative log-likelihood of each target, and the memory for the next segment. Pure, to be jitted by the caller.

    Args:
      params: from `init`.
      config: static under jit. Its lengths need not be those that the parameters were trained with.
      batch: tokens and targets.
      memory: from `empty_memory` or the segment before.
      keys: chance of this step, see `step_keys`; None: evaluation.

    Returns: (nll [batch, seq] in nats, whose mean is the loss; memory).
    """
    # A batch comes from the host as NumPy.
    tokens, targets = jnp.asarray(batch.tokens), jnp.asarray(batch.targets)
    rates = config.trunk_dropout
    embed_key, head_key = (None, None) if keys is None else (keys.embed, keys.head)
    hidden = embed(params["embed"], tokens, embed_key, rates)
    hidden, memory = run_layers(params, config, hidden, memory, keys=keys)
    nll = token_nll(params["embed"], params["head"], hidden, targets, head_key, rates=rates, cutoffs=config.cutoffs)
    return nll, memory


def run_layers(
    params: PyTree,
    config: DenseConfig,
    hidden: Float[Array, "batch seq d_model"],
    memory: Memory,
    *,
    keys: StepKeys | None = None,
) -> tuple[Float[Array, "batch seq d_model"], Memory]:
    """What `forward` does between embedding and head; the arguments are of `forward`, hidden is what enters."""
    layer = _layer(config)
    positions = _positions(config, memory[0].states.shape[1] + hidden.shape[1], None if keys is None else keys.embed)
    memories = []
    for i in range(config.num_layers):
        memories.append(next_memory(memory[i], hidden))
        output = layer.apply(
            {"params": params["layers"][i]},
            hidden,
            memory[i].states,
            memory[i].mask,
            None if keys is None else keys.experts[i],
            content_bias=params["biases"]["content"],
            position_bias=params["biases"]["position"],
            positions=positions,
        )
        hidden = cast(Array, output)
    return hidden, tuple(memories)


def _layer(config: DenseConfig) -> TransformerXLLayer:
    return TransformerXLLayer(
        num_heads=config.num_heads,
        d_ff=config.d_ff,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        same_length=config.same_length,
        compute_dtype=config.compute_dtype,
    )


def _positions(config: DenseConfig, keys: int, key: KeyData | None) -> Float[Array, "keys d_model"]:
    """Positional encodings of all layers and samples, with the same features dropped at all distances."""
    encodings = jnp.asarray(relative_positions(keys, config.d_model, config.clamp_len))
    rows = None if key is None else jnp.asarray(key)[None]
    return locked_dropout(encodings[None], config.position_dropout, rows, site=POSITIONS_SITE)[0]
