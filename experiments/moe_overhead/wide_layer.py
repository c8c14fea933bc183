"""The dense layer that a mixture is measured against.

k experts of H heads and a feed-forward network of width F do, in each product, what k H heads and a width of k F do:
the heads have the same width and see the same d_model, so that q, k, v and the output of the attention, its scores and
weighted sums, and both matrices of the feed-forward network are k times as much work. Only what touches single numbers
(residual, LayerNorm) happens once instead of k times, and there is no router.
"""

import functools
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from dmoe_jax.arrays import PyTree
from dmoe_jax.data.batches import Batch
from dmoe_jax.experts.relative_attention import relative_attention, relative_positions, visible_keys
from dmoe_jax.experts.transformer_xl import INIT_STDDEV
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.trunk import embed, empty_memory, forget, init_embed_and_head, next_memory, token_nll
from dmoe_jax.optim.recipe import make_optimizer
from experiments.transformer_xl.setup import Setup

State = dict[str, PyTree]


class WideLayer(nn.Module):
    """A Transformer-XL layer whose heads may be wider together than the residual stream. Without dropout.

    Attributes:
      num_heads: attention heads. d_head: width of each.
      d_ff: width of the feed-forward network.
      compute_dtype: type of the matrix products.
    """

    num_heads: int
    d_head: int
    d_ff: int
    compute_dtype: str

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "batch seq_len d_model"],
        memory: Float[Array, "batch mem d_model"],
        memory_mask: Bool[Array, "batch mem"],
    ) -> Float[Array, "batch seq_len d_model"]:
        """The layer's output for each position. No gradient flows into the memory."""
        d_model, heads = hidden.shape[-1], (self.num_heads, self.d_head)
        normal = nn.initializers.normal(INIT_STDDEV)
        dense = functools.partial(
            nn.DenseGeneral, kernel_init=normal, use_bias=False, dtype=jnp.dtype(self.compute_dtype)
        )
        norm = functools.partial(nn.LayerNorm, epsilon=1e-5, dtype=jnp.float32)
        context = jnp.concatenate([jax.lax.stop_gradient(memory), hidden], axis=1)
        attended = relative_attention(
            dense(heads, name="query")(hidden),
            dense(heads, name="key")(context),
            dense(heads, name="value")(context),
            dense(heads, name="position")(jnp.asarray(relative_positions(context.shape[1], d_model))[None]),
            self.param("content_bias", normal, heads),
            self.param("position_bias", normal, heads),
            visible_keys(memory_mask, hidden.shape[1]),
        )
        output = dense(d_model, axis=(-2, -1), name="output")(attended)
        attention = norm(name="attention_norm")(hidden + output.astype(hidden.dtype))
        inner = nn.relu(dense(self.d_ff, use_bias=True, name="ff_in")(attention))
        outer = dense(d_model, use_bias=True, name="ff_out")(inner)
        return cast(Array, norm(name="ff_norm")(attention + outer.astype(hidden.dtype)))


def wide_layer(config: TransformerXLConfig) -> WideLayer:
    """The dense layer with the FLOPs of the `k_best` experts that a sequence goes to."""
    return WideLayer(
        num_heads=config.k_best * config.layer.num_heads,
        d_head=config.d_model // config.layer.num_heads,
        d_ff=config.k_best * config.layer.d_ff,
        compute_dtype=config.layer.compute_dtype,
    )


def wide_training(setup: Setup) -> tuple[State, Callable[[State, Batch], tuple[State, Array]]]:
    """The setup's model with a dense layer for each mixture: its initial state and its jitted training step.

    Each layer has an optimiser of its own, as every expert has.

    Returns: (state, step); step takes (state, batch) to (state, loss), the state donated.
    """
    config, layer = setup.config, wide_layer(setup.config)
    layers = dict.fromkeys((f"layer{index}" for index in range(config.num_layers)), make_optimizer(setup.expert_recipe))
    parts = {"trunk": make_optimizer(setup.recipe)} | layers
    optimizer = optax.partition(parts, {"trunk": "trunk", "layers": list(layers)})

    def step(state: State, batch: Batch) -> tuple[State, Array]:
        memory = forget(state["memory"], jnp.asarray(batch.is_first))
        tokens, targets = jnp.asarray(batch.tokens), jnp.asarray(batch.targets)

        def loss(params: PyTree) -> tuple[Array, PyTree]:
            trunk, memories = params["trunk"], []
            hidden = embed(trunk["embed"], tokens, config)
            for own, past in zip(params["layers"], memory, strict=True):
                memories.append(next_memory(past, hidden))
                hidden = cast(Array, layer.apply({"params": own}, hidden, past.states, past.mask))
            nll = token_nll(trunk["embed"], trunk["head"], hidden, targets, config)
            return jnp.mean(nll), tuple(memories)

        (nll, memories), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "memory": memories}, nll

    embed_key, head_key, layer_key = jax.random.split(jax.random.key(setup.seed), 3)
    embed_params, head_params = init_embed_and_head(embed_key, head_key, config)
    sample, filled = jnp.zeros((1, 1, config.d_model)), jnp.ones((1, 1), bool)
    init = jax.jit(lambda own: layer.init(own, sample, sample, filled)["params"])
    params = {
        "trunk": {"embed": embed_params, "head": head_params},
        "layers": [init(own) for own in jax.random.split(layer_key, config.num_layers)],
    }
    state = {"params": params, "opt_state": optimizer.init(params), "memory": empty_memory(config, setup.rows)}
    return state, jax.jit(step, donate_argnums=0)
