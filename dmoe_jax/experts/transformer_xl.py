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

import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from dmoe_jax.experts.base import Expert, TensorSpec, check_positive
from dmoe_jax.experts.dropout import RowKeys, check_rates, dropout, dropout_factors, scale
from dmoe_jax.experts.relative_attention import relative_attention, relative_positions, visible_keys
from dmoe_jax.types import PyTree

INIT_STDDEV = 0.02
"""Every weight starts as N(0, 0.02), LayerNorm gains as N(1, 0.02), biases at 0: the authors' WikiText recipe."""

COMPUTE_DTYPES = ("float32", "bfloat16")
"""What matrix products may be computed in."""


# Sites, see `dmoe_jax.experts.dropout`.
_LOCKED, _ATTENTION = 0, 1


def _gain_init(key: PRNGKeyArray, shape: Sequence[int], dtype: Any = jnp.float32) -> Float[Array, "..."]:
    return 1 + INIT_STDDEV * jax.random.normal(key, shape, dtype)


class TransformerXLLayer(nn.Module):
    """Relative multi-head attention over memory and segment, then a ReLU feed-forward network; both post-LN.

    Attributes:
      num_heads: attention heads; d_model is a multiple of it.
      d_ff: width of the feed-forward network.
      dropout: rate of the locked dropouts.
      attention_dropout: rate of the dropout on attention weights.
      position_dropout: rate of the locked dropout on the positional encodings, of each sample.
      clamp_len: see `relative_positions`.
      same_length: see `visible_keys`.
      compute_dtype: type of the matrix products. Parameters, residual stream, LayerNorm and softmax are float32.
    """

    num_heads: int
    d_ff: int
    dropout: float = 0.0
    attention_dropout: float = 0.0
    position_dropout: float = 0.0
    clamp_len: int | None = None
    same_length: bool = False
    compute_dtype: str = "float32"

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
        d_model, dtype = hidden.shape[-1], jnp.dtype(self.compute_dtype)
        heads = (self.num_heads, d_model // self.num_heads)
        normal = nn.initializers.normal(INIT_STDDEV)

        factors = dropout_factors(dropout_key, self._locked(d_model, positions is None), site=_LOCKED)

        def drop(name: str, x: Array) -> Array:
            return scale(x, factors.get(name))

        def project(name: str, x: Array) -> Array:
            return cast(Array, nn.DenseGeneral(heads, use_bias=False, kernel_init=normal, dtype=dtype, name=name)(x))

        def norm(name: str, x: Array) -> Array:
            return cast(Array, nn.LayerNorm(scale_init=_gain_init, name=name, epsilon=1e-5, dtype=jnp.float32)(x))

        context = jnp.concatenate([jax.lax.stop_gradient(memory), hidden], axis=1)
        if positions is None:
            encodings = jnp.asarray(relative_positions(context.shape[1], d_model, self.clamp_len))[None]
        else:
            encodings = positions[None]
        attended = relative_attention(
            drop("query", project("query", hidden)),
            drop("key", project("key", context)),
            drop("value", project("value", context)),
            project("position", drop("position", encodings)),
            self.param("content_bias", normal, heads) if content_bias is None else content_bias,
            self.param("position_bias", normal, heads) if position_bias is None else position_bias,
            visible_keys(memory_mask, hidden.shape[1], self.same_length),
            lambda weights: dropout(weights, self.attention_dropout, dropout_key, site=_ATTENTION),
        )
        project_back = nn.DenseGeneral(
            d_model, axis=(-2, -1), use_bias=False, kernel_init=normal, dtype=dtype, name="output"
        )
        # The residual stream stays float32: what is added to it is cast by the addition.
        attention = norm("attention_norm", hidden + drop("output", project_back(attended)))
        inner = nn.relu(nn.Dense(self.d_ff, kernel_init=normal, dtype=dtype, name="ff_in")(attention))
        outer = nn.Dense(d_model, kernel_init=normal, dtype=dtype, name="ff_out")(drop("ff_in", inner))
        return norm("ff_norm", attention + drop("ff_out", outer))

    def _locked(self, d_model: int, own_positions: bool) -> dict[str, tuple[float, tuple[int, ...]]]:
        """What the locked masks lie on: name -> (rate, shape). The leading 1 is time."""
        heads = (self.dropout, (1, self.num_heads, d_model // self.num_heads))
        model = (self.dropout, (1, d_model))
        return {
            "query": heads,
            "key": heads,
            "value": heads,
            "output": model,
            "ff_in": (self.dropout, (1, self.d_ff)),
            "ff_out": model,
            "position": (self.position_dropout if own_positions else 0.0, (1, d_model)),
        }


def transformer_xl_layer(
    *,
    d_model: int,
    num_heads: int,
    d_ff: int,
    seq_len: int,
    mem_len: int,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    position_dropout: float = 0.0,
    clamp_len: int | None = None,
    same_length: bool = False,
    compute_dtype: str = "float32",
) -> Expert:
    """A Transformer-XL layer as an expert; equal configurations return the same object.

    Its inputs are hidden [batch, seq_len, d_model], memory [batch, mem_len, d_model] (the hidden states that entered
    this layer in earlier segments, newest last; not differentiated, as in the paper) and memory_mask [batch, mem_len]
    (False: a slot not yet filled, never attended to). If it drops anything there is a fourth, dropout_key uint32
    [batch, 2]: key data for each sample, or zeros for evaluation. Parameters do not depend on lengths, rates or types.

    Args:
      d_model: width of the hidden states; even, and a multiple of num_heads.
      num_heads: attention heads.
      d_ff: width of the feed-forward network.
      seq_len: positions in a segment.
      mem_len: memory slots.
      dropout: rate of the locked dropout on projections and in the feed-forward network.
      attention_dropout: rate of the dropout on attention weights.
      position_dropout: rate of the locked dropout on positional encodings.
      clamp_len: distances above it count as clamp_len; None: as they are.
      same_length: whether every position sees exactly mem_len keys, itself included, and not all filled ones.
      compute_dtype: "float32", or "bfloat16" for the matrix products.

    Raises:
      ValueError: if a size is not a positive integer, d_model is odd or not a multiple of num_heads, a rate is not a
        probability below 1, or the type is another.
    """
    check_layer(
        d_model=d_model,
        num_heads=num_heads,
        d_ff=d_ff,
        seq_len=seq_len,
        mem_len=mem_len,
        clamp_len=clamp_len,
        compute_dtype=compute_dtype,
    )
    check_rates(dropout=dropout, attention_dropout=attention_dropout, position_dropout=position_dropout)
    layer = TransformerXLLayer(
        num_heads=num_heads,
        d_ff=d_ff,
        dropout=float(dropout),
        attention_dropout=float(attention_dropout),
        position_dropout=float(position_dropout),
        clamp_len=clamp_len,
        same_length=bool(same_length),
        compute_dtype=compute_dtype,
    )
    return _transformer_xl_layer(layer, d_model, seq_len, mem_len)


def check_layer(
    *,
    d_model: int,
    num_heads: int,
    d_ff: int,
    seq_len: int,
    mem_len: int,
    clamp_len: int | None,
    compute_dtype: str,
) -> None:
    """Raise ValueError, naming the field and the value, unless a layer of these sizes can be made."""
    check_positive(d_model=d_model, num_heads=num_heads, d_ff=d_ff, seq_len=seq_len, mem_len=mem_len)
    if d_model % num_heads or d_model % 2:
        raise ValueError(f"d_model must be even and a multiple of num_heads ({num_heads}), got {d_model}")
    if clamp_len is not None:
        check_positive(clamp_len=clamp_len)
    if compute_dtype not in COMPUTE_DTYPES:
        raise ValueError(f"compute_dtype must be one of {', '.join(COMPUTE_DTYPES)}, got {compute_dtype!r}")


@functools.cache
def _transformer_xl_layer(layer: TransformerXLLayer, d_model: int, seq_len: int, mem_len: int) -> Expert:
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

    hidden_shape, memory_shape = (seq_len, d_model), (mem_len, d_model)
    inputs: tuple[TensorSpec, ...] = (
        TensorSpec(name="hidden", shape=hidden_shape, dtype="float32", differentiable=True),
        TensorSpec(name="memory", shape=memory_shape, dtype="float32", differentiable=False),
        TensorSpec(name="memory_mask", shape=(mem_len,), dtype="bool", differentiable=False),
    )
    if layer.dropout or layer.attention_dropout or layer.position_dropout:
        inputs += (TensorSpec(name="dropout_key", shape=(2,), dtype="uint32", differentiable=False),)
    return Expert(
        name="transformer_xl",
        init=jax.jit(init),
        apply=apply,
        inputs=inputs,
        output=TensorSpec(name="output", shape=hidden_shape, dtype="float32", differentiable=True),
    )
