"""One whole Transformer-XL layer as an expert (Dai et al. 2019, section 3.3 and equation (6); post-LN).

Notation: T positions of the segment, M of the memory, K = M + T keys; H heads of width D. With x = [memory;
hidden], query position t (which stands at M + t among the keys) and key position j:

    A[t, j] = ((q_t + u) . k_j + (q_t + v) . W_r R[M + t - j]) / sqrt(D)      (`relative_attention`)
    a = LayerNorm(hidden + W_o (softmax over the visible j of A, times v_j))
    output = LayerNorm(a + Dense_d(relu(Dense_ff(a))))

R[distance] is a sinusoid (`relative_positions`). u (`content_bias`) is the paper's r_w_bias, v (`position_bias`) its
r_r_bias. Here each expert has its own u and v: experts live on different machines and share nothing. A dense model
hands its shared ones in.

Dropout follows the authors' WikiText-2 recipe. Locked, one mask a sample at all positions: on q, k and v, on the output
projection of the attention, after the ReLU, and after the second matrix of the feed-forward network; on the features of
R. Ordinary: on the attention weights. The masks come from a key that is an input of the layer, since an expert's
backward pass, at another time and in another batch, has to drop the same.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from dmoe_jax.experts.base import Expert, TensorSpec
from dmoe_jax.experts.dropout import RowKeys, dropout, dropout_factors, scale
from dmoe_jax.experts.relative_attention import relative_attention, relative_positions, visible_keys
from dmoe_jax.layer_config import LayerConfig
from dmoe_jax.types import PyTree

INIT_STDDEV = 0.02
"""Every weight starts as N(0, 0.02), LayerNorm gains as N(1, 0.02), biases at 0: the authors' WikiText recipe."""

# Sites, see `dmoe_jax.experts.dropout`.
_LOCKED, _ATTENTION = 0, 1


def _gain_init(key: PRNGKeyArray, shape: Sequence[int], dtype: Any = jnp.float32) -> Float[Array, "..."]:
    return 1 + INIT_STDDEV * jax.random.normal(key, shape, dtype)


class TransformerXLLayer(nn.Module):
    """Relative multi-head attention over memory and segment, then a ReLU feed-forward network; both post-LN.

    Attributes:
      config: its sizes and rates. Parameters, residual stream, LayerNorm and softmax are float32 whatever the type.
    """

    config: LayerConfig

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "batch seq_len d_model"],
        memory: Float[Array, "batch mem d_model"],
        memory_mask: Bool[Array, "batch mem"],
        dropout_key: RowKeys | None = None,
        *,
        content_bias: Float[Array, "heads d_head"] | None = None,
        position_bias: Float[Array, "heads d_head"] | None = None,
        positions: Float[Array, "keys d_model"] | None = None,
    ) -> Float[Array, "batch seq_len d_model"]:
        """The layer's output for each position. No gradient flows into the memory.

        Args:
          hidden: what enters the layer. memory: what entered it in earlier segments. memory_mask: which slots of
            memory are filled.
          dropout_key: key data of each sample, zeros where it is evaluated; None: all are.
          content_bias: u; None: a parameter of this layer. position_bias: v, likewise.
          positions: R by distance, keys-1 first, taken as it is; None: made here, and dropped for each sample.
        """
        config, d_model, dtype = self.config, hidden.shape[-1], jnp.dtype(self.config.compute_dtype)
        heads = (config.num_heads, d_model // config.num_heads)
        normal = nn.initializers.normal(INIT_STDDEV)

        # What the locked masks lie on: name -> (rate, shape). The leading 1 is time.
        per_head, per_feature = (config.dropout, (1, *heads)), (config.dropout, (1, d_model))
        locked = {
            "query": per_head,
            "key": per_head,
            "value": per_head,
            "output": per_feature,
            "ff_in": (config.dropout, (1, config.d_ff)),
            "ff_out": per_feature,
            "position": (config.position_dropout if positions is None else 0.0, (1, d_model)),
        }
        factors = dropout_factors(dropout_key, locked, site=_LOCKED)

        def drop(name: str, x: Array) -> Array:
            return scale(x, factors.get(name))

        def project(name: str, x: Array) -> Array:
            return cast(Array, nn.DenseGeneral(heads, use_bias=False, kernel_init=normal, dtype=dtype, name=name)(x))

        def norm(name: str, x: Array) -> Array:
            return cast(Array, nn.LayerNorm(scale_init=_gain_init, name=name, epsilon=1e-5, dtype=jnp.float32)(x))

        context = jnp.concatenate([jax.lax.stop_gradient(memory), hidden], axis=1)
        if positions is None:
            encodings = jnp.asarray(relative_positions(context.shape[1], d_model, config.clamp_len))[None]
        else:
            encodings = positions[None]
        attended = relative_attention(
            drop("query", project("query", hidden)),
            drop("key", project("key", context)),
            drop("value", project("value", context)),
            project("position", drop("position", encodings)),
            self.param("content_bias", normal, heads) if content_bias is None else content_bias,
            self.param("position_bias", normal, heads) if position_bias is None else position_bias,
            visible_keys(memory_mask, hidden.shape[1], config.same_length),
            lambda weights: dropout(weights, config.attention_dropout, dropout_key, site=_ATTENTION),
        )
        project_back = nn.DenseGeneral(
            d_model, axis=(-2, -1), use_bias=False, kernel_init=normal, dtype=dtype, name="output"
        )
        # The residual stream stays float32: what is added to it is cast by the addition.
        attention = norm("attention_norm", hidden + drop("output", project_back(attended)))
        inner = nn.relu(nn.Dense(config.d_ff, kernel_init=normal, dtype=dtype, name="ff_in")(attention))
        outer = nn.Dense(d_model, kernel_init=normal, dtype=dtype, name="ff_out")(drop("ff_in", inner))
        return norm("ff_norm", attention + drop("ff_out", outer))


def transformer_xl_layer(**sizes_and_rates: Any) -> Expert:
    """A Transformer-XL layer as an expert; equal configurations return the same object.

    Its inputs are hidden [batch, seq_len, d_model], memory [batch, mem_len, d_model] (the hidden states that entered
    this layer in earlier segments, newest last; not differentiated, as in the paper) and memory_mask [batch, mem_len]
    (False: a slot not yet filled, never attended to). If it drops anything there is a fourth, dropout_key uint32
    [batch, 2]: key data for each sample, or zeros for evaluation. Parameters do not depend on lengths, rates or types.

    Args:
      sizes_and_rates: fields of `LayerConfig`.

    Raises:
      ValueError: as of `LayerConfig`.
    """
    return layer_expert(LayerConfig(**sizes_and_rates))


@functools.cache
def layer_expert(config: LayerConfig) -> Expert:
    """`transformer_xl_layer` of this configuration."""
    layer, d_model, mem_len = TransformerXLLayer(config), config.d_model, config.mem_len

    def init(key: PRNGKeyArray) -> PyTree:
        # Parameters do not depend on the lengths, so one position and one slot suffice to make them.
        sample = jnp.zeros((1, 1, d_model))
        return layer.init(key, sample, sample, jnp.ones((1, 1), bool))["params"]

    def apply(
        params: PyTree,
        hidden: Float[Array, "batch seq_len d_model"],
        memory: Float[Array, "batch mem d_model"],
        memory_mask: Bool[Array, "batch mem"],
        dropout_key: RowKeys | None = None,
    ) -> Float[Array, "batch seq_len d_model"]:
        return cast(Array, layer.apply({"params": params}, hidden, memory, memory_mask, dropout_key))

    hidden = TensorSpec(name="hidden", shape=(config.seq_len, d_model), dtype="float32", differentiable=True)
    inputs = [
        hidden,
        TensorSpec(name="memory", shape=(mem_len, d_model), dtype="float32", differentiable=False),
        TensorSpec(name="memory_mask", shape=(mem_len,), dtype="bool", differentiable=False),
    ]
    if config.drops:
        inputs.append(TensorSpec(name="dropout_key", shape=(2,), dtype="uint32", differentiable=False))
    output = dataclasses.replace(hidden, name="output")
    return Expert("transformer_xl", jax.jit(init), apply, tuple(inputs), output)
