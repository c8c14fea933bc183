"""Noisy top-k gating (Shazeer, Mirhoseini, Maziarz, Davis, Le, Hinton, Dean 2017), the first sparse gate.

    H(x)_i = (x W_g)_i + normal() * (softplus((x W_noise)_i) + 0.01)        eq. 4
    G(x) = softmax(keep_top_k(H(x), k))                              eq. 3, 5
    loss += w_importance CV(Importance)^2 + w_load CV(Load)^2        eq. 6, 7; appendix A, eq. 8 to 11

Both matrices start at zero, "no signal and some noise" (appendix A): at first experts are chosen at random, and all
scores are equal in evaluation. Noise is drawn in training only. Unlike in the paper x is normalised first, as every
gate of this package does it: our models hand over features of any scale.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from dmoe_jax.arrays import PyTree
from dmoe_jax.routing.base import (
    Features,
    Ids,
    Indices,
    Loss,
    Mask,
    Router,
    Scores,
    cell_numbers,
    layer_norm,
    router_factory,
    softmax_weights,
    top_k_router,
)
from dmoe_jax.routing.losses import importance_loss, load_loss

LEAST_STDDEV = 1e-2
"""Added to the noise, as in the authors' released code: training drives the noise down, and the load loss divides by
it."""


@router_factory
def noisy_top_k(grid_size: tuple[int, ...], *, importance_weight: float = 0.1, load_weight: float = 0.1) -> Router:
    """The noisy top-k router. The extras of its scores are (x W_g, softplus(x W_noise) + 0.01).

    Args:
      grid_size: extent of each dimension of the expert grid.
      importance_weight, load_weight: of the two balancing losses, at least 0. 0.1 of both is the setting of the paper's
        table 6 that has both the best perplexity and almost the best balance.

    Raises:
      ValueError: if grid_size is not one or more positive integers, or a weight is negative.
    """
    if not (importance_weight >= 0 and load_weight >= 0):
        raise ValueError(f"weights of losses must be at least 0, got {importance_weight!r} and {load_weight!r}")
    num_experts = math.prod(grid_size)

    def init(key: PRNGKeyArray, d_model: int) -> PyTree:
        del key
        return {name: jnp.zeros((d_model, num_experts)) for name in ("gate", "noise")}

    def scores(params: PyTree, x: Features, *, key: PRNGKeyArray | None = None, ids: Ids | None = None) -> Scores:
        del ids
        x = layer_norm(x)
        clean, stddev = x @ params["gate"], jax.nn.softplus(x @ params["noise"]) + LEAST_STDDEV
        noisy = clean if key is None else clean + stddev * jax.random.normal(key, clean.shape)
        return Scores((noisy,), extras=(clean, stddev))

    def aux_loss(scores: Scores, indices: Indices, mask: Mask) -> Loss:
        clean, stddev = scores.extras
        gates = softmax_weights(scores, indices, mask, grid_size)
        importance = importance_loss(gates, cell_numbers(indices, grid_size), num_experts)
        load = load_loss(clean, scores.logits[0], stddev, k=indices.shape[1])
        return importance_weight * importance + load_weight * load

    return top_k_router("noisy_top_k", grid_size, init, scores, flat=True, aux_loss=aux_loss)
