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

Where tokens are routed and not sequences, the layer is cut in two: the attention stays with the trainer, and an expert
is the feed-forward network of one token, residual connection and LayerNorm included. The two have the layer's
parameters between them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from dmoe_jax.arrays import PyTree
from dmoe_jax.experts.base import Expert, TensorSpec
from dmoe_jax.experts.dropout import RowKeys, dropout, dropout_factors, scale
from dmoe_jax.experts.relative_attention import relative_attention, relative_positions, visible_keys
from dmoe_jax.layer_config import LayerConfig, Route
from dmoe_jax.machine.remembered import remembered

INIT_STDDEV = 0.02
"""Every weight starts as N(0, 0.02), LayerNorm gains as N(1, 0.02), biases at 0: the authors' WikiText recipe."""

# Sites, see `dmoe_jax.experts.dropout`.
_LOCKED, _ATTENTION, _FEEDFORWARD = 0, 1, 2

_OF_FEEDFORWARD = ("ff_in", "ff_out")


def _gain_init(key: PRNGKeyArray, shape: Sequence[int], dtype: Any = jnp.float32) -> Float[Array, "..."]:
    return 1 + INIT_STDDEV * jax.random.normal(key, shape, dtype)


def _locked(config: LayerConfig, position_dropout: float) -> dict[str, tuple[float, tuple[int, ...]]]:
    """Dropout rate and mask shape of each tensor with a locked mask: name -> (rate, shape). The leading 1 is time."""
    heads = (config.num_heads, config.d_model // config.num_heads)
    per_head, per_feature = (config.dropout, (1, *heads)), (config.dropout, (1, config.d_model))
    return {
        "query": per_head,
        "key": per_head,
        "value": per_head,
        "output": per_feature,
        "ff_in": (config.dropout, (1, config.d_ff)),
        "ff_out": per_feature,
        "position": (position_dropout, (1, config.d_model)),
    }


class _LayerPart(nn.Module):
    """Base of a layer and of its two halves; each has the parameters of what it uses. Parameters, residual stream,
    LayerNorm and softmax are float32 whatever the type."""

    config: LayerConfig

    def _attend(
        self,
        hidden: Float[Array, "batch seq_len d_model"],
        memory: Float[Array, "batch mem d_model"],
        memory_mask: Bool[Array, "batch mem"],
        dropout_key: RowKeys | None,
        factors: Mapping[str, Array],
        *,
        content_bias: Float[Array, "heads d_head"] | None = None,
        position_bias: Float[Array, "heads d_head"] | None = None,
        positions: Float[Array, "keys d_model"] | None = None,
    ) -> Float[Array, "batch seq_len d_model"]:
        """Attention with its residual connection and LayerNorm: a in the equations above."""
        config, d_model, dtype = self.config, hidden.shape[-1], jnp.dtype(self.config.compute_dtype)
        heads = (config.num_heads, d_model // config.num_heads)
        normal = nn.initializers.normal(INIT_STDDEV)

        def drop(name: str, x: Array) -> Array:
            return scale(x, factors.get(name))

        def project(name: str, x: Array) -> Array:
            return cast(Array, nn.DenseGeneral(heads, use_bias=False, kernel_init=normal, dtype=dtype, name=name)(x))

        context = jnp.concatenate([jax.lax.stop_gradient(memory), hidden], axis=1)
        if positions is None:
            positions = jnp.asarray(relative_positions(context.shape[1], d_model, config.clamp_len))
        attended = relative_attention(
            drop("query", project("query", hidden)),
            drop("key", project("key", context)),
            drop("value", project("value", context)),
            project("position", drop("position", positions[None])),
            self.param("content_bias", normal, heads) if content_bias is None else content_bias,
            self.param("position_bias", normal, heads) if position_bias is None else position_bias,
            visible_keys(memory_mask, hidden.shape[1], config.same_length),
            lambda weights: dropout(weights, config.attention_dropout, dropout_key, site=_ATTENTION),
        )
        project_back = nn.DenseGeneral(
            d_model, axis=(-2, -1), use_bias=False, kernel_init=normal, dtype=dtype, name="output"
        )
        # The residual stream stays float32: what is added to it is cast by the addition.
        return self._norm("attention_norm", hidden + drop("output", project_back(attended)))

    def _feed(
        self, attention: Float[Array, "*rows d_model"], factors: Mapping[str, Array]
    ) -> Float[Array, "*rows d_model"]:
        normal, dtype = nn.initializers.normal(INIT_STDDEV), jnp.dtype(self.config.compute_dtype)
        inner = nn.relu(nn.Dense(self.config.d_ff, kernel_init=normal, dtype=dtype, name="ff_in")(attention))
        outer = nn.Dense(attention.shape[-1], kernel_init=normal, dtype=dtype, name="ff_out")(
            scale(inner, factors.get("ff_in"))
        )
        return self._norm("ff_norm", attention + scale(outer, factors.get("ff_out")))

    def _norm(self, name: str, x: Array) -> Array:
        return cast(Array, nn.LayerNorm(scale_init=_gain_init, name=name, epsilon=1e-5, dtype=jnp.float32)(x))


class TransformerXLLayer(_LayerPart):
    """Relative multi-head attention over memory and segment, then a ReLU feed-forward network; both post-LN."""

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
        rate = self.config.position_dropout if positions is None else 0.0
        factors = dropout_factors(dropout_key, _locked(self.config, rate), site=_LOCKED)
        attention = self._attend(
            *(hidden, memory, memory_mask, dropout_key, factors),
            content_bias=content_bias,
            position_bias=position_bias,
            positions=positions,
        )
        return self._feed(attention, factors)


class TransformerXLAttention(_LayerPart):
    """The first half of a layer: attention, residual connection and LayerNorm. Parameters are named as in the whole."""

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "batch seq_len d_model"],
        memory: Float[Array, "batch mem d_model"],
        memory_mask: Bool[Array, "batch mem"],
        dropout_key: RowKeys | None = None,
    ) -> Float[Array, "batch seq_len d_model"]:
        """The input of the feed-forward network. Arguments are those of the whole layer."""
        locked = _locked(self.config, self.config.position_dropout)
        own = {name: part for name, part in locked.items() if name not in _OF_FEEDFORWARD}
        factors = dropout_factors(dropout_key, own, site=_LOCKED)
        return self._attend(hidden, memory, memory_mask, dropout_key, factors)


class TransformerXLFeedforward(_LayerPart):
    """The second half of a layer, over tokens: feed-forward network, residual connection and LayerNorm."""

    @nn.compact
    def __call__(
        self, hidden: Float[Array, "rows d_model"], dropout_key: RowKeys | None = None
    ) -> Float[Array, "rows d_model"]:
        """The layer's output for each token.

        Args:
          hidden: what left the attention.
          dropout_key: key data of each token, zeros where it is evaluated. Tokens of one key have one mask.
        """
        locked = _locked(self.config, 0.0)
        own = {name: (rate, shape[1:]) for name, (rate, shape) in locked.items() if name in _OF_FEEDFORWARD}
        return self._feed(hidden, dropout_factors(dropout_key, own, site=_FEEDFORWARD))


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
    return layer_expert(LayerConfig(**sizes_and_rates), "sequence")


@remembered(16)
def layer_expert(config: LayerConfig, route: Route) -> Expert:
    """`transformer_xl_layer` of this configuration; where tokens are routed, its second half.

    The latter's inputs are hidden [rows, d_model], what left the attention, and, if the layer drops anything,
    dropout_key [rows, 2]. Lengths and heads do not matter to it.
    """
    d_model = config.d_model
    hidden = TensorSpec(name="hidden", shape=(d_model,), dtype="float32", differentiable=True)
    rest: list[TensorSpec] = []
    if route == "sequence":
        hidden = dataclasses.replace(hidden, shape=(config.seq_len, d_model))
        rest = [
            TensorSpec(name="memory", shape=(config.mem_len, d_model), dtype="float32", differentiable=False),
            TensorSpec(name="memory_mask", shape=(config.mem_len,), dtype="bool", differentiable=False),
        ]
    if config.drops:
        rest.append(TensorSpec(name="dropout_key", shape=(2,), dtype="uint32", differentiable=False))
    layer = TransformerXLLayer(config) if route == "sequence" else TransformerXLFeedforward(config)

    def init(key: PRNGKeyArray) -> PyTree:
        # Parameters do not depend on the lengths, so one position and one slot suffice to make them.
        sample = jnp.zeros((1, 1, d_model))
        inputs = (sample, sample, jnp.ones((1, 1), bool)) if route == "sequence" else (sample[0],)
        return layer.init(key, *inputs)["params"]

    def apply(params: PyTree, *inputs: Array) -> Float[Array, "batch ... d_model"]:
        return cast(Array, layer.apply({"params": params}, *inputs))

    name = "transformer_xl" if route == "sequence" else "transformer_xl_feedforward"
    output = dataclasses.replace(hidden, name="output")
    meaning = f"heads: {config.num_heads}" if route == "sequence" else ""
    return Expert(name, jax.jit(init), apply, (hidden, *rest), output, meaning=meaning)
