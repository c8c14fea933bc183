"""Experts drawn uniformly at random: the floor that a router has to beat (Zuo et al. 2022 train with nothing else).

In training the k experts of a sample are drawn anew in each step. In evaluation nothing may be random: there they
follow from a hash of the sample's own features, so that the same sample always meets the same experts. Scores are flat,
since sums over dimensions would make experts that share a coordinate come together. Weights are uniform.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from dmoe_jax.arrays import PyTree
from dmoe_jax.routing.base import Features, Ids, Router, Scores, router_factory, top_k_router
from dmoe_jax.routing.hashing import hash_rows, hash_words, unit_interval
from dmoe_jax.routing.weights import uniform_weights


@router_factory
def uniform_random(grid_size: tuple[int, ...]) -> Router:
    """The random router. Raises ValueError if grid_size is not one or more positive integers."""
    num_experts = math.prod(grid_size)

    def scores(params: PyTree, x: Features, *, key: PRNGKeyArray | None = None, ids: Ids | None = None) -> Scores:
        del params, ids
        if key is not None:
            return Scores((jax.random.uniform(key, (x.shape[0], num_experts)),))
        cells = jnp.arange(num_experts, dtype=jnp.uint32)
        return Scores((unit_interval(hash_words(cells, hash_rows(jax.lax.stop_gradient(x))[:, None])),))

    return top_k_router(
        "uniform_random", grid_size, lambda key, d_model: {}, scores, flat=True, combine=uniform_weights
    )
