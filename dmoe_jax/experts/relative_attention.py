"""Multi-head attention with relative positions over memory and segment (Dai et al. 2019, section 3.3, appendix B).

Keys are the M slots of the memory and the T positions of the segment behind them, K = M + T in all; query t stands at
M + t among them. For the equation see `dmoe_jax.experts.transformer_xl`.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float


def relative_positions(
    num_distances: int, d_model: int, clamp_len: int | None = None
) -> Float[np.ndarray, "num_distances d_model"]:
    """Sinusoidal encoding of the distances num_distances-1, ..., 1, 0, in this order: that of the keys seen from the
    last query. Sines fill the first half of the features and cosines the second, as in the authors' code. Distances
    above `clamp_len` count as clamp_len."""
    distances = np.arange(num_distances - 1, -1, -1, dtype=np.float32)
    distances = np.minimum(distances, np.inf if clamp_len is None else clamp_len).astype(np.float32)
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


def visible_keys(
    memory_mask: Bool[Array, "batch mem"], seq_len: int, same_length: bool = False
) -> Bool[Array, "batch seq_len keys"]:
    """True for each key that a position may attend to: filled memory slots, and positions of the segment up to itself.

    With `same_length`, only the last mem_len of them, itself included: position t sees the keys t < j <= t + mem_len.
    So every position sees equally far, however the text is cut into segments.
    """
    batch, mem_len = memory_mask.shape
    filled = jnp.concatenate([memory_mask, jnp.ones((batch, seq_len), bool)], axis=1)
    places, keys = np.arange(seq_len)[:, None], np.arange(mem_len + seq_len)[None, :]
    seen = keys <= mem_len + places
    if same_length:
        seen &= keys > places
    return filled[:, None, :] & jnp.asarray(seen)[None]


def relative_attention(
    query: Float[Array, "batch seq_len heads d_head"],
    key: Float[Array, "batch keys heads d_head"],
    value: Float[Array, "batch keys heads d_head"],
    position_key: Float[Array, "#batch keys heads d_head"],
    content_bias: Float[Array, "heads d_head"],
    position_bias: Float[Array, "heads d_head"],
    visible: Bool[Array, "batch seq_len keys"],
    drop: Callable[[Array], Array] = lambda weights: weights,
) -> Float[Array, "batch seq_len heads d_head"]:
    """Attention with relative positions, the equation at the head of this file.

    Products are made in the type of the query, softmax in float32.

    Args:
      position_key: W_r R by distance, keys-1 first (see `relative_positions`); of each sample or of all.
      visible: which keys each query may attend to; at least one in each row.
      drop: applied to the attention weights [batch, heads, seq_len, keys].
    """
    dtype = query.dtype
    by_content = jnp.einsum(
        "bthd,bjhd->bhtj", query + content_bias.astype(dtype)[None, None], key, preferred_element_type=jnp.float32
    )
    # One encoding for all samples is one matrix product; "bthd,bjhd" with a broadcast batch would be many.
    shared = position_key.shape[0] == 1
    by_distance = jnp.einsum(
        "bthd,jhd->bhtj" if shared else "bthd,bjhd->bhtj",
        query + position_bias.astype(dtype)[None, None],
        position_key[0] if shared else position_key,
        preferred_element_type=jnp.float32,
    )
    logits = (by_content + relative_shift(by_distance)) / math.sqrt(query.shape[-1])
    # The lowest finite number, not -inf: a row of -inf would give NaN, also in the gradient of what is masked later.
    logits = jnp.where(visible[:, None], logits, np.finfo(logits.dtype).min)
    weights = drop(jax.nn.softmax(logits, axis=-1))
    return jnp.einsum("bhtj,bjhd->bthd", weights.astype(dtype), value)
