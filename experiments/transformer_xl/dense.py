"""The dense Transformer-XL language model (Dai et al. 2019): the baselines of Learning@home, section 4.3.

The same layers as the experts of `models.transformer_xl`, one after another and without a router. As in the authors'
WikiText recipe all layers share the biases u and v of the relative attention ("untie_r" off) and see the same
positional encodings, whose features are dropped once a step for all rows. Embedding and softmax are tied.
"""

import operator
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num, PRNGKeyArray

from dmoe_jax.arrays import PyTree
from dmoe_jax.data.batches import Batch
from dmoe_jax.experts.dropout import RowKeys, locked_dropout
from dmoe_jax.experts.relative_attention import relative_positions
from dmoe_jax.experts.transformer_xl import INIT_STDDEV, TransformerXLLayer
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.trunk import (
    POSITIONS_SITE,
    LayerMemory,
    Memory,
    StepKeys,
    embed,
    init_embed_and_head,
    next_memory,
    token_nll,
)

_LEAST_LOOPED = 4
"""Layers from which on the program is a loop over them: XLA compiles one, and not each. Fewer compile soon, and run a
little faster one after another."""


def init(
    key: PRNGKeyArray, config: TransformerXLConfig, *, word_counts: Num[np.ndarray, " vocab"] | None = None
) -> dict[str, PyTree]:
    """Parameters: {"embed", "biases": {"content", "position"}, "layers", "head"}.

    Those of the layers lie stacked: each array has a leading axis, [num_layers, ...]. So a step of 16 layers is a loop
    over one, and an optimiser has 15 arrays of them to step instead of 240; both are compiled many times sooner.

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
        "layers": jax.vmap(init_layer)(jax.random.split(layer_key, config.num_layers)),
        "head": head_params,
    }


def layers_of(params: PyTree) -> list[PyTree]:
    """The parameters of each layer, first to last, from what `init` made."""
    stacked = params["layers"]
    return [jax.tree.map(operator.itemgetter(i), stacked) for i in range(len(jax.tree.leaves(stacked)[0]))]


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
    """Run the layers between embedding and head of `forward`; the arguments are of `forward`, hidden is what enters."""
    layer = TransformerXLLayer(config.layer)
    num_keys = memory[0].states.shape[1] + hidden.shape[1]
    encodings = jnp.asarray(relative_positions(num_keys, config.d_model, config.layer.clamp_len))
    # One mask for all samples and layers.
    rows = None if keys is None else jnp.asarray(keys.embed)[None]
    positions = locked_dropout(encodings[None], config.layer.position_dropout, rows, site=POSITIONS_SITE)[0]

    def run(hidden: Array, own: tuple[PyTree, LayerMemory, RowKeys | None]) -> tuple[Array, LayerMemory]:
        own_params, past, own_keys = own
        output = layer.apply(
            {"params": own_params},
            hidden,
            past.states,
            past.mask,
            own_keys,
            content_bias=params["biases"]["content"],
            position_bias=params["biases"]["position"],
            positions=positions,
        )
        return cast(Array, output), next_memory(past, hidden)

    past = jax.tree.map(lambda *leaves: jnp.stack(leaves), *memory)
    layer_keys = None if keys is None else jnp.asarray(keys.experts)
    is_unrolled = config.num_layers < _LEAST_LOOPED
    hidden, entered = jax.lax.scan(run, hidden, (params["layers"], past, layer_keys), unroll=is_unrolled)
    return hidden, tuple(jax.tree.map(operator.itemgetter(i), entered) for i in range(config.num_layers))
