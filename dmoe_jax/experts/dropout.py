"""Dropout whose masks are decided by key data that travels with each sample.

A sample's masks depend on its own key alone, not on the rows beside it: an expert node may then join the rows of many
trainers into one call, pad them, and compute the same masks again in the backward pass. *Key data* is the raw form of
a threefry key, uint32 [2], because that is what travels over a network. A row of zeros is not a key: it means
evaluation, and nothing is dropped. So a node that pads with zeros, or a caller without a key, needs no second program.

Every draw of a network has a number, its *site*, folded into the key, so that the masks of different sites are
independent though the sample has one key. Masks of one site that are small are best drawn together
(`dropout_factors`): a draw costs little to run and much to compile.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, UInt32, UInt64

KeyData = UInt32[Array, "2"] | UInt32[np.ndarray, "2"]
RowKeys = UInt32[Array, "batch 2"] | UInt32[np.ndarray, "batch 2"]

_SITE_STRIDE = 0x9E3779B9
"""Odd, with bits all over the word, so that sites of keys that follow each other are no keys that follow each other."""


def dropout(
    x: Float[Array, "batch *features"], rate: float, key_data: RowKeys | None, *, site: int = 0
) -> Float[Array, "batch *features"]:
    """Ordinary dropout: each element is zeroed with probability `rate`, the others are divided by 1 - rate.

    Args:
      x: what is dropped from.
      rate: in [0, 1); static.
      key_data: a key for each sample, zeros where it is evaluated; None: all are.
      site: number of the draw.
    """
    return scale(x, dropout_factors(key_data, {"x": (rate, x.shape[1:])}, site=site).get("x"))


def locked_dropout(
    x: Float[Array, "batch time *features"], rate: float, key_data: RowKeys | None, *, site: int = 0
) -> Float[Array, "batch time *features"]:
    """Variational dropout (Gal and Ghahramani 2016): `dropout` with one mask for each sample, the same at all times."""
    return scale(x, dropout_factors(key_data, {"x": (rate, (1, *x.shape[2:]))}, site=site).get("x"))


def dropout_factors(
    key_data: RowKeys | None, parts: Mapping[str, tuple[float, tuple[int, ...]]], *, site: int = 0
) -> dict[str, Float[Array, "batch *_"]]:
    """Factors by which to multiply several tensors, in one draw: 0 or 1 / (1 - rate), or 1 in evaluation.

    Args:
      key_data: a key for each sample, zeros where it is evaluated; None: all are.
      parts: name -> (rate, shape without the batch axis); its order decides the masks.
      site: number of the draw.

    Returns: name -> factors [batch, *shape]. Parts that nothing happens to are missing.
    """
    if key_data is None or not any(rate for rate, _ in parts.values()):
        return {}
    key_data = jnp.asarray(key_data)
    edges = np.cumsum([math.prod(shape) for _, shape in parts.values()])
    # Not `fold_in`, which is a second cipher to compile; threefry makes independent streams of related keys.
    own = key_data ^ np.uint32(site * _SITE_STRIDE % 2**32)
    chance = jax.vmap(lambda row: jax.random.uniform(wrap_key(row), (int(edges[-1]),)))(own)
    is_training = jnp.any(key_data != 0, axis=1)[:, None]
    factors = {}
    for (name, (rate, shape)), own_chance in zip(parts.items(), jnp.split(chance, edges[:-1], axis=1), strict=True):
        if rate:
            factor = jnp.where(is_training, (own_chance >= rate) / (1 - rate), 1)
            factors[name] = factor.reshape(-1, *shape)
    return factors


def scale(x: Float[Array, "*_"], factors: Float[Array, "*_"] | None) -> Float[Array, "*_"]:
    """The product, broadcast, in the input's type; None: the input.

    Computed in the factors' float32 and rounded once: a factor rounded to bfloat16 would bias every activation.
    """
    return x if factors is None else (x * factors).astype(x.dtype)


def row_keys(key_data: KeyData, batch: int) -> UInt32[Array, "batch 2"]:
    """A key for each row, from one key for all."""
    return jax.random.key_data(jax.random.split(wrap_key(key_data), batch))


def row_keys_of_seed(seed: int, rows: int) -> UInt32[np.ndarray, "rows 2"]:
    """Key data for each row of a request, from the one seed that the request carries; never zeros.

    A node derives them anew in the forward and in the backward pass of one layer call, so the definition is part of
    what nodes and trainers agree on: row r gets the SplitMix64 hash (Steele et al. 2014) of hash(seed) + r.

    Args:
      seed: 0 <= seed < 2**63.
      rows: how many rows the request has.

    Raises:
      ValueError: if the seed is out of range.
    """
    if not 0 <= seed < 2**63:
        raise ValueError(f"a dropout seed is an integer from 0 to 2**63 - 1, got {seed}")
    hashed = _split_mix(_split_mix(np.array([seed], np.uint64)) + np.arange(rows, dtype=np.uint64))
    hashed = np.maximum(hashed, np.uint64(1))
    return np.stack([hashed >> np.uint64(32), hashed & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32)


def _split_mix(values: UInt64[np.ndarray, " rows"]) -> UInt64[np.ndarray, " rows"]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def wrap_key(key_data: KeyData) -> PRNGKeyArray:
    """The key that this data is of."""
    return jax.random.wrap_key_data(jnp.asarray(key_data), impl="threefry2x32")
