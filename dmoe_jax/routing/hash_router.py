"""Hash layers (Roller, Sukhbaatar, Szlam, Weston 2021): the token decides, nothing is learnt.

The paper found a fixed hash from token to expert as good as learnt routers: the control for any claim that a router
learns something. A table from token to expert cannot live with experts that come and go, so tokens are hashed by
rendezvous (highest random weight, Thaler and Ravishankar 1998): for every coordinate of every dimension a sample draws
a fixed pseudo-random number in [0, 1) from (seed, dimension, coordinate, id), and the highest win. When an expert dies
its samples move to their next best, and no other sample moves. The numbers are the scores, additive as product keys
are, so that beam search finds the experts.

A word goes to the same coordinates in every layer. Weights are uniform over the experts that answer; the paper has
k = 1. Without ids what is hashed are the signs of random projections of x (SimHash, Charikar 2002, section 3): samples
in similar directions go to the same experts. Those signs are stable across processes but for projections within
rounding of 0.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, UInt32

from dmoe_jax.arrays import PyTree
from dmoe_jax.routing.base import Features, Ids, Router, Scores, router_factory, top_k_router
from dmoe_jax.routing.hashing import hash_words, unit_interval
from dmoe_jax.routing.weights import uniform_weights

NUM_PROJECTIONS = 16
"""Bits of a SimHash: 65,536 cells of directions, more than there are experts, few enough for neighbours to share."""


@router_factory
def hash_router(grid_size: tuple[int, ...], *, seed: int = 0) -> Router:
    """The hash router.

    Args:
      grid_size: extent of each dimension of the expert grid.
      seed: from 0 to 2**32 - 1. All trainers of a swarm want the same one.

    Raises:
      ValueError: if grid_size is not one or more positive integers, or the seed is out of range.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be between 0 and 2**32 - 1, got {seed!r}")

    def scores(params: PyTree, x: Features, *, key: PRNGKeyArray | None = None, ids: Ids | None = None) -> Scores:
        del params, key
        hashed = (sim_hash(x, seed) if ids is None else ids.astype(jnp.uint32))[:, None]
        return Scores(
            tuple(
                unit_interval(hash_words(jnp.uint32(seed), jnp.uint32(dim), jnp.arange(size, dtype=jnp.uint32), hashed))
                for dim, size in enumerate(grid_size)
            )
        )

    return top_k_router("hash", grid_size, lambda key, d_model: {}, scores, combine=uniform_weights)


def sim_hash(x: Features, seed: int) -> UInt32[Array, " batch"]:
    """The signs of NUM_PROJECTIONS random projections of each row, as the bits of a number (Charikar 2002)."""
    x = jax.lax.stop_gradient(x).astype(jnp.float32)
    projections = jax.random.normal(jax.random.key(seed), (x.shape[-1], NUM_PROJECTIONS))
    # Full precision: lower ones, the default on some accelerators, would flip signs from one device to the next.
    signs = jnp.dot(x, projections, precision=jax.lax.Precision.HIGHEST) >= 0
    return jnp.sum(signs.astype(jnp.uint32) << jnp.arange(NUM_PROJECTIONS, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
