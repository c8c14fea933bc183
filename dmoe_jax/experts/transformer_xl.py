"""One whole Transformer-XL layer as an expert (Dai et al. 2019, section 3.3 and equation (6); post-LN, no dropout).

Notation: T positions of the segment, M of the memory, K = M + T keys; H heads of width D. With x = [memory;
hidden], query position t (which stands at M + t among the keys) and key position j:

    A[t, j] = ((q_t + u) . k_j + (q_t + v) . W_r R[M + t - j]) / sqrt(D)
    attention = softmax over the visible j of A, times v_j; projected, added to hidden, normalised
    output = LayerNorm(a + Dense_d(relu(Dense_ff(a))))

R[distance] is a sinusoid (`relative_positions`). u (`content_bias`) is the paper's r_w_bias, v (`position_bias`) its
r_r_bias. Here each expert has its own u and v: experts live on different machines and share nothing.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from dmoe_jax.experts.base import Expert, PyTree, TensorSpec, check_positive

INIT_STDDEV = 0.02
"""Every weight starts as N(0, 0.02), LayerNorm gains as N(1, 0.02), biases at 0: the authors' WikiText recipe."""


def relative_positions(num_distances: int, d_model: int) -> Float[np.ndarray, "num_distances d_model"]:
    """Sinusoidal encoding of the distances num_distances-1, ..., 1, 0, in this order: that of the keys seen from the
    last query. Sines fill the first half of the features and cosines the second, as in the authors' code."""
    distances = np.arange(num_distances - 1, -1, -1, dtype=np.float32)
    frequencies = 1.0 / 10000 ** (np.arange(0, d_model, 2, dtype=np.float32) / d_model)
    angles = distances[:, None] * frequencies[None, :]
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


def relative_shift(scores: Float[Array, "*heads queries keys"]) -> Float[Array, "*heads queries keys"]:
    """Turn scores by distance into scores by key position, without a gather (Dai et al. 2019, appendix B).

    Row t comes in with column i holding the score of distance keys-1-i. It must move left by queries-1-t columns, so
    that column j holds the distance between query t and key j. With one column of padding on the left and the rows
    read in one go, a shape one column narrower makes each row start one place later than the row above it.

    Returns: scores whose cells with j <= keys - queries + t are right. The others (keys after the query) hold
      remnants of neighbouring rows, finite, and the caller masks them.
    """
    *heads, queries, keys = scores.shape
    padded = jnp.pad(scores, [(0, 0)] * len(heads) + [(0, 0), (1, 0)])
    return padded.reshape(*heads, keys + 1, queries)[..., 1:, :].reshape(*heads, queries, keys)


def visible_keys(memory_mask: Bool[Array, "batch mem"], seq_len: int) -> Bool[Array, "batch seq_len keys"]:
    """Which keys each position may attend to: filled memory slots, and positions of the segment up to itself."""
    batch, mem_len = memory_mask.shape
    causal = jnp.tril(jnp.ones((seq_len, seq_len), bool))
    return jnp.concatenate(
        [
            jnp.broadcast_to(memory_mask[:, None, :], (batch, seq_len, mem_len)),
            jnp.broadcast_to(causal[None], (batch, seq_len, seq_len)),
        ],
        axis=-1,
    )


def relative_attention(
    query: Float[Array, "batch seq_len heads d_head"],
    key: Float[Array, "batch keys heads d_head"],
    value: Float[Array, "batch keys heads d_head"],
    position_key: Float[Array, "keys heads d_head"],
    content_bias: Float[Array, "heads d_head"],
    position_bias: Float[Array, "heads d_head"],
    visible: Bool[Array, "batch seq_len keys"],
) -> Float[Array, "batch seq_len heads d_head"]:
    """Attention with relative positions, the equation at the head of this file.

    Args:
      position_key: W_r R by distance, keys-1 first (see `relative_positions`).
      visible: which keys each query may attend to; at least one in each row.
    """
    by_content = jnp.einsum("bthd,bjhd->bhtj", query + content_bias[None, None], key)
    by_distance = jnp.einsum("bthd,jhd->bhtj", query + position_bias[None, None], position_key)
    logits = (by_content + relative_shift(by_distance)) / math.sqrt(query.shape[-1])
    # The lowest finite number, not -inf: a row of -inf would give NaN, also in the gradient of what is masked later.
    logits = jnp.where(visible[:, None], logits, np.finfo(logits.dtype).min)
    return jnp.einsum("bhtj,bjhd->bthd", jax.nn.softmax(logits, axis=-1), value)


def _gain_init(key: PRNGKeyArray, shape: Sequence[int], dtype: Any = jnp.float32) -> Float[Array, "..."]:
    return 1 + INIT_STDDEV * jax.random.normal(key, shape, dtype)


class TransformerXLLayer(nn.Module):
    """Relative multi-head attention over memory and segment, then a ReLU feed-forward network; both post-LN.

    Attributes:
      num_heads: attention heads; d_model is a multiple of it.
      d_ff: width of the feed-forward network.
    """

    num_heads: int
    d_ff: int

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "batch seq_len d_model"],
        memory: Float[Array, "batch mem d_model"],
        memory_mask: Bool[Array, "batch mem"],
    ) -> Float[Array, "batch seq_len d_model"]:
        """The layer's output for each position. No gradient flows into the memory."""
        seq_len, d_model = hidden.shape[1:]
        heads = (self.num_heads, d_model // self.num_heads)
        normal = nn.initializers.normal(INIT_STDDEV)

        def project(name: str, x: Any) -> Any:
            return nn.DenseGeneral(heads, use_bias=False, kernel_init=normal, name=name)(x)

        context = jnp.concatenate([jax.lax.stop_gradient(memory), hidden], axis=1)
        attended = relative_attention(
            project("query", hidden),
            project("key", context),
            project("value", context),
            project("position", jnp.asarray(relative_positions(context.shape[1], d_model), hidden.dtype)),
            self.param("content_bias", normal, heads),
            self.param("position_bias", normal, heads),
            visible_keys(memory_mask, seq_len),
        )
        output = nn.DenseGeneral(d_model, axis=(-2, -1), use_bias=False, kernel_init=normal, name="output")
        attention = nn.LayerNorm(scale_init=_gain_init, name="attention_norm", epsilon=1e-5)(hidden + output(attended))
        inner = nn.relu(nn.Dense(self.d_ff, kernel_init=normal, name="ff_in")(attention))
        outer = nn.Dense(d_model, kernel_init=normal, name="ff_out")(inner)
        norm = nn.LayerNorm(scale_init=_gain_init, name="ff_norm", epsilon=1e-5)
        return cast(Array, norm(attention + outer))


def transformer_xl_layer(*, d_model: int, num_heads: int, d_ff: int, seq_len: int, mem_len: int) -> Expert:
    """A Transformer-XL layer as an expert; equal configurations return the same object.

    Its inputs are hidden [batch, seq_len, d_model], memory [batch, mem_len, d_model] (the hidden states that entered
    this layer in earlier segments, newest last; not differentiated, as in the paper) and memory_mask [batch, mem_len]
    (False: a slot not yet filled, never attended to).

    Args:
      d_model: width of the hidden states; even, and a multiple of num_heads.
      num_heads: attention heads.
      d_ff: width of the feed-forward network.
      seq_len: positions in a segment.
      mem_len: memory slots.

    Raises:
      ValueError: if a size is not a positive integer, or d_model is odd or not a multiple of num_heads.
    """
    check_positive(d_model=d_model, num_heads=num_heads, d_ff=d_ff, seq_len=seq_len, mem_len=mem_len)
    if d_model % num_heads or d_model % 2:
        raise ValueError(f"d_model must be even and a multiple of num_heads ({num_heads}), got {d_model}")
    return _transformer_xl_layer(d_model, num_heads, d_ff, seq_len, mem_len)


@functools.cache
def _transformer_xl_layer(d_model: int, num_heads: int, d_ff: int, seq_len: int, mem_len: int) -> Expert:
    layer = TransformerXLLayer(num_heads=num_heads, d_ff=d_ff)

    def init(key: PRNGKeyArray) -> PyTree:
        # Parameters do not depend on the lengths, so one position and one slot suffice to make them.
        sample = jnp.zeros((1, 1, d_model))
        return layer.init(key, sample, sample, jnp.ones((1, 1), bool))["params"]

    def apply(
        params: PyTree,
        hidden: Float[Array, "batch seq_len d_model"],
        memory: Float[Array, "batch mem d_model"],
        memory_mask: Bool[Array, "batch mem"],
    ) -> Float[Array, "batch seq_len d_model"]:
        return cast(Array, layer.apply({"params": params}, hidden, memory, memory_mask))

    hidden_shape, memory_shape = (seq_len, d_model), (mem_len, d_model)
    return Expert(
        name="transformer_xl",
        init=jax.jit(init),
        apply=apply,
        inputs=(
            TensorSpec(name="hidden", shape=hidden_shape, dtype="float32", differentiable=True),
            TensorSpec(name="memory", shape=memory_shape, dtype="float32", differentiable=False),
            TensorSpec(name="memory_mask", shape=(mem_len,), dtype="bool", differentiable=False),
        ),
        output=TensorSpec(name="output", shape=hidden_shape, dtype="float32", differentiable=True),
    )
