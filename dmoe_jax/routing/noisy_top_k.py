"""Noisy top-k gating (Shazeer, Mirhoseini, Maziarz, Davis, Le, Hinton, Dean 2017), the first sparse gate.

    H(x)_i = (x W_g)_i + normal() * (softplus((x W_noise)_i) + 0.01)        eq. 4
    G(x) = softmax(keep_top_k(H(x), k))                              eq. 3, 5
    loss += w_importance CV(Importance)^2 + w_load CV(Load)^2        eq. 6, 7; appendix A, eq. 8 to 11

Both matrices start at zero, "no signal and some noise" (appendix A): at first experts are chosen at random, and all
scores are equal in evaluation. Noise is drawn in training only. Unlike in the paper x is normalised first, as every
gate of this package does it: our models hand over features of any scale. Gates of the paper have no bias, this one
neither.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from dmoe_jax.routing.base import (
    PyTree,
    Router,
    Scores,
    cell_numbers,
    check_grid_size,
    gather_logits,
    masked_softmax,
    top_k_router,
)
from dmoe_jax.routing.losses import importance_loss, load_loss
from dmoe_jax.routing.normalisation import layer_norm

DEFAULT_LOSS_WEIGHT = 0.1
"""Of either loss; the setting of the paper's table 6 that has both the best perplexity and almost the best balance."""


LEAST_STDDEV = 1e-2
"""Added to the noise, as in the authors' released code: training drives the noise down, and the load loss divides by
it."""


class NoiseExtras(NamedTuple):
    """What the load loss looks at.

    Attributes:
      clean_logits: x W_g, [batch, num_experts].
      noise_stddev: softplus(x W_noise) + 0.01, [batch, num_experts].
    """

    clean_logits: Float[Array, "batch num_experts"]
    noise_stddev: Float[Array, "batch num_experts"]


def noisy_top_k(
    grid_size: tuple[int, ...],
    *,
    importance_weight: float = DEFAULT_LOSS_WEIGHT,
    load_weight: float = DEFAULT_LOSS_WEIGHT,
) -> Router:
    """The noisy top-k router; equal arguments return the same object, and so share compiled code.

    Args:
      grid_size: extent of each dimension of the expert grid.
      importance_weight, load_weight: of the two balancing losses, at least 0.

    Raises:
      ValueError: if grid_size is not one or more positive integers, or a weight is negative.
    """
    if not (importance_weight >= 0 and load_weight >= 0):
        raise ValueError(f"weights of losses must be at least 0, got {importance_weight!r} and {load_weight!r}")
    return _noisy_top_k(check_grid_size(grid_size), float(importance_weight), float(load_weight))


@functools.cache
def _noisy_top_k(grid_size: tuple[int, ...], importance_weight: float, load_weight: float) -> Router:
    num_experts = math.prod(grid_size)

    def init(key: PRNGKeyArray, d_model: int) -> PyTree:
        del key
        return {name: jnp.zeros((d_model, num_experts)) for name in ("gate", "noise")}

    def scores(
        params: PyTree,
        x: Float[Array, "batch d_model"],
        *,
        key: PRNGKeyArray | None = None,
        ids: Int32[Array, " batch"] | None = None,
    ) -> Scores:
        del ids
        x = layer_norm(x)
        clean, stddev = x @ params["gate"], jax.nn.softplus(x @ params["noise"]) + LEAST_STDDEV
        noisy = clean if key is None else clean + stddev * jax.random.normal(key, clean.shape)
        return Scores((noisy,), NoiseExtras(clean, stddev))

    def aux_loss(
        scores: Scores, indices: Int32[Array, "batch slots dims"], mask: Bool[Array, "batch slots"]
    ) -> Float[Array, ""]:
        clean, stddev = scores.extras
        gates = masked_softmax(gather_logits(scores, indices, grid_size), mask)
        importance = importance_loss(gates, cell_numbers(indices, grid_size), num_experts)
        load = load_loss(clean, scores.logits[0], stddev, k=indices.shape[1])
        return importance_weight * importance + load_weight * load

    return top_k_router("noisy_top_k", grid_size, init, scores, flat=True, aux_loss=aux_loss)
