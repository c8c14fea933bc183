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
from dmoe_jax.data import Batch
from dmoe_jax.experts.dropout import RowKeys, locked_dropout
from dmoe_jax.experts.relative_attention import relative_positions
from dmoe_jax.experts.transformer_xl import INIT_STDDEV, TransformerXLLayer
from dmoe_jax.models import TransformerXLConfig, trunk
from dmoe_jax.models.trunk import LayerMemory, Memory, StepKeys

_LEAST_LOOPED = 4
"""Layers from which on the program is a loop over them: XLA compiles one, and not each. Fewer compile soon, and run a
little faster one after another."""


def init(
    key: PRNGKeyArray, config: TransformerXLConfig, *, word_counts: Num[np.ndarray, " vocab"] | None = None
) -> dict[str, PyTree]:
    """Parameters: {"embed", "biases": {"content", "position"}, "layers", "head"}.

    Those of the layers lie stacked, [num_layers, ...]: a step of 16 layers is a loop over one, and an optimiser has 15
    arrays of them instead of 240, so that both are compiled many times sooner. Weights are N(0, 0.02), LayerNorm gains
    N(1, 0.02), biases 0; for `word_counts` see `init_embed_and_head`, whose ValueError is raised.
    """
    embed_key, head_key, bias_key, layer_key = jax.random.split(key, 4)
    embed_params, head_params = trunk.init_embed_and_head(embed_key, head_key, config, word_counts=word_counts)
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


def forward(
    params: PyTree, config: TransformerXLConfig, batch: Batch, memory: Memory, *, keys: StepKeys | None = None
) -> tuple[Float[Array, "batch seq"], Memory]:
    """Negative log-likelihood of each target in nats, and the memory for the next segment. Pure, for the caller to jit.

    Args:
      params: of `init`.
      config: static under jit. Its lengths need not be those that the parameters were trained with.
      memory: of `empty_memory` or the segment before.
      keys: chance of this step, see `step_keys`; None: evaluation.
    """
    # A batch comes from the host as NumPy.
    tokens, targets = jnp.asarray(batch.tokens), jnp.asarray(batch.targets)
    embed_key, head_key = (None, None) if keys is None else (keys.embed, keys.head)
    layer_keys = None if keys is None else jnp.asarray(keys.experts)
    # One mask of the positions for all samples and layers.
    rows = None if keys is None else jnp.asarray(keys.embed)[None]
    layer, biases = TransformerXLLayer(config.layer), params["biases"]
    num_keys = memory[0].states.shape[1] + tokens.shape[1]
    encodings = jnp.asarray(relative_positions(num_keys, config.d_model, config.layer.clamp_len))
    positions = locked_dropout(encodings[None], config.layer.position_dropout, rows, site=trunk.POSITIONS_SITE)[0]

    def run(hidden: Array, own: tuple[PyTree, LayerMemory, RowKeys | None]) -> tuple[Array, LayerMemory]:
        own_params, past, own_keys = own
        shared = {"content_bias": biases["content"], "position_bias": biases["position"], "positions": positions}
        output = layer.apply({"params": own_params}, hidden, past.states, past.mask, own_keys, **shared)
        return cast(Array, output), trunk.next_memory(past, hidden)

    hidden = trunk.embed(params["embed"], tokens, config, embed_key)
    past = jax.tree.map(lambda *leaves: jnp.stack(leaves), *memory)
    is_unrolled = config.num_layers < _LEAST_LOOPED
    hidden, entered = jax.lax.scan(run, hidden, (params["layers"], past, layer_keys), unroll=is_unrolled)
    nll = trunk.token_nll(params["embed"], params["head"], hidden, targets, config, head_key)
    return nll, tuple(jax.tree.map(operator.itemgetter(i), entered) for i in range(config.num_layers))


def loss(
    params: PyTree, config: TransformerXLConfig, batch: Batch, memory: Memory, keys: StepKeys
) -> tuple[Float[Array, ""], Memory]:
    """The mean loss of a training step, nats, and the memory after it; texts that begin anew have none before."""
    nll, memory = forward(params, config, batch, trunk.forget(memory, jnp.asarray(batch.is_first)), keys=keys)
    return jnp.mean(nll), memory
