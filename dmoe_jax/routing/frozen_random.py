"""A gate that stays as it was drawn: what the released code of Learning@home (Ryabinin, Gusev 2020) trains with.

In that code's MNIST experiment the gate's parameters are in no optimiser, so the router keeps its random
initialisation, and only the experts learn to live with it. A comparison with its curves needs the same router:

    scores = LayerNorm(x) @ K,   K ~ N(0, 1) [d_model, num_experts], each row divided by its norm

One flat score for each expert (no product keys), LayerNorm at its initial gain and bias, PyTorch's epsilon. A score
thus has a standard deviation near sqrt(d_model / num_experts), 5.7 for 512 features and 16 experts: the best expert
gets nearly all of the weight. No gradient reaches the parameters; it does reach x.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from dmoe_jax.arrays import PyTree
from dmoe_jax.routing.base import Features, Ids, Router, Scores, layer_norm, router_factory, top_k_router

TORCH_EPSILON = 1e-5


@router_factory
def frozen_random(grid_size: tuple[int, ...]) -> Router:
    """The frozen router. Raises ValueError if grid_size is not one or more positive integers."""

    def init(key: PRNGKeyArray, d_model: int) -> PyTree:
        keys = jax.random.normal(key, (d_model, math.prod(grid_size)))
        return {"keys": keys / jnp.linalg.norm(keys, axis=-1, keepdims=True)}

    def scores(params: PyTree, x: Features, *, key: PRNGKeyArray | None = None, ids: Ids | None = None) -> Scores:
        del key, ids
        return Scores((layer_norm(x, TORCH_EPSILON) @ jax.lax.stop_gradient(params["keys"]),))

    return top_k_router("frozen_random", grid_size, init, scores, flat=True)
