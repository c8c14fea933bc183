"""The dense Transformer-XL language model (Dai et al. 2019): the baselines of Learning@home, section 4.3.

The same layers as the experts of `models.transformer_xl`, one after another and without a router. As in the authors'
WikiText recipe all layers share the biases u and v of the relative attention ("untie_r" off) and see the same
positional encodings, whose features are dropped once a step for all rows. Embedding and softmax are tied.
"""

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num, PRNGKeyArray

from dmoe_jax.data.batches import Batch
from dmoe_jax.experts.dropout import locked_dropout
from dmoe_jax.experts.relative_attention import relative_positions
from dmoe_jax.experts.transformer_xl import INIT_STDDEV, TransformerXLLayer
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.trunk import (
    POSITIONS_SITE,
    Memory,
    StepKeys,
    embed,
    init_embed_and_head,
    next_memory,
    token_nll,
)
from dmoe_jax.types import PyTree


def init(
    key: PRNGKeyArray, config: TransformerXLConfig, *, word_counts: Num[np.ndarray, " vocab"] | None = None
) -> dict[str, PyTree]:
    """Parameters: {"embed", "biases": {"content", "position"}, "layers": [one for each layer], "head"}.

    Weights are N(0, 0.02), LayerNorm gains N(1, 0.02), biases 0; for `word_counts` see `init_embed_and_head`.

    Raises:
      ValueError: if word_counts has not one number for each word.
    """
    embed_key, head_key, bias_key, layer_key = jax.random.split(key, 4)
    embed_params, head_params = init_embed_and_head(embed_key, head_key, config, word_counts=word_counts)
    heads = (config.layer.num_heads, config.d_model // config.layer.num_heads)
    content, position = INIT_STDDEV * jax.random.normal(bias_key, (2, *heads))
    layer = TransformerXLLayer(config.layer)
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
    params: PyTree, config: TransformerXLConfig, batch: Batch, memory: Memory, *, keys: StepKeys | None = None
) -> tuple[Float[Array, "batch seq"], Memory]:
    """Negative log-likelihood of each target, and the memory for the next segment. Pure, to be jitted by the caller.

    Args:
      params: what `init` made.
      config: static under jit. Its lengths need not be those that the parameters were trained with.
      batch: tokens and targets.
      memory: what `empty_memory` or the segment before gave.
      keys: chance of this step, see `step_keys`; None: evaluation.

    Returns: (nll [batch, seq] in nats, whose mean is the loss; memory).
    """
    # A batch comes from the host as NumPy.
    tokens, targets = jnp.asarray(batch.tokens), jnp.asarray(batch.targets)
    embed_key, head_key = (None, None) if keys is None else (keys.embed, keys.head)
    hidden = embed(params["embed"], tokens, config, embed_key)
    hidden, memory = run_layers(params, config, hidden, memory, keys=keys)
    return token_nll(params["embed"], params["head"], hidden, targets, config, head_key), memory


def run_layers(
    params: PyTree,
    config: TransformerXLConfig,
    hidden: Float[Array, "batch seq d_model"],
    memory: Memory,
    *,
    keys: StepKeys | None = None,
) -> tuple[Float[Array, "batch seq d_model"], Memory]:
    """What `forward` does between embedding and head; the arguments are of `forward`, hidden is what enters."""
    layer = TransformerXLLayer(config.layer)
    num_keys = memory[0].states.shape[1] + hidden.shape[1]
    encodings = jnp.asarray(relative_positions(num_keys, config.d_model, config.layer.clamp_len))
    # One mask for all samples and layers.
    rows = None if keys is None else jnp.asarray(keys.embed)[None]
    positions = locked_dropout(encodings[None], config.layer.position_dropout, rows, site=POSITIONS_SITE)[0]
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
