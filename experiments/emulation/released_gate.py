"""The gate of the authors' MNIST emulator (Learning@home, section 4.2), which stays at its random beginning.

    scores = LayerNorm(x) @ normalize(keys, dim=-1),  keys [features, experts] ~ N(0, 1)

So it is flat, one score for each expert, and each feature's row of keys has length 1. In the authors' program neither
the optimiser of the trunk nor those of the experts hold the keys.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from dmoe_jax.arrays import PyTree
from dmoe_jax.routing.base import Features, Ids, Router, router_factory, top_k_router
from dmoe_jax.routing.combinators import freeze


@router_factory
def released_gate(grid_size: tuple[int, ...]) -> Router:
    """The frozen router, over the cells of a grid of any shape."""

    def init(key: PRNGKeyArray, d_model: int) -> Float[Array, "features experts"]:
        keys = jax.random.normal(key, (d_model, math.prod(grid_size)))
        return keys / jnp.linalg.norm(keys, axis=-1, keepdims=True)

    def scores(params: PyTree, x: Features, *, key: PRNGKeyArray | None = None, ids: Ids | None = None) -> Array:
        del key, ids
        centred = x - x.mean(axis=-1, keepdims=True)
        logits: Array = (centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)) @ params
        return logits

    return freeze(top_k_router("released", grid_size, init, scores, flat=True))
