"""Switch routing (Fedus, Zoph, Shazeer 2021): the best expert's output, times its probability among all experts.

    p_i(x) = softmax(h(x))_i                      eq. 1, h a linear map
    y = sum_{i in top k} p_i(x) E_i(x)            eq. 2, not renormalised over the chosen
    loss += 0.01 * num_experts sum_i f_i P_i      eq. 4-6
    loss += 0.001 * mean (log sum_i exp h_i)^2    the router z-loss of ST-MoE (Zoph et al. 2022, eq. 5)

The paper has k = 1, for which renormalised weights would all be 1 and the router would learn nothing; a larger k works
as well. What the probabilities leave over passes the sample through, as the residual connection around the paper's
layer does. There is no expert capacity (eq. 3): experts here are machines that gather their own batches, an expert
takes all samples of a batch that choose it, and none is dropped. The paper's input jitter is left to
`combinators.add_noise`. The gate is the one of `product_key`, LayerNorm included, started at the paper's smaller scale
(section 2.4).
"""

import math

from jax import numpy as jnp
from jaxtyping import PRNGKeyArray

from dmoe_jax.arrays import PyTree, wide
from dmoe_jax.routing.base import (
    Features,
    Ids,
    Indices,
    Loss,
    Mask,
    Router,
    Scores,
    cell_numbers,
    router_factory,
    top_k_router,
)
from dmoe_jax.routing.losses import load_balancing_loss, router_z_loss
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.routing.weights import log_probabilities, probability_weights

INIT_SCALE = math.sqrt(0.1)
"""Standard deviation of a logit at initialisation: a tenth of the usual variance (section 2.4)."""


@router_factory
def switch(grid_size: tuple[int, ...], *, balance_weight: float = 0.01, z_weight: float = 0.001) -> Router:
    """The Switch router. The extras of its scores are h(x).

    Args:
      grid_size: extent of each dimension of the expert grid.
      balance_weight, z_weight: of the load-balancing loss and the z-loss, at least 0; the defaults are the papers'.

    Raises:
      ValueError: if grid_size is not one or more positive integers, or a weight is negative.
    """
    if not (balance_weight >= 0 and z_weight >= 0):
        raise ValueError(f"weights of losses must be at least 0, got {balance_weight!r} and {z_weight!r}")
    gate = product_key((math.prod(grid_size),), init_scale=INIT_SCALE)

    def scores(params: PyTree, x: Features, *, key: PRNGKeyArray | None = None, ids: Ids | None = None) -> Scores:
        del key, ids
        (logits,) = gate.scores(params, x).logits
        return Scores((log_probabilities(logits),), extras=logits)

    def aux_loss(scores: Scores, indices: Indices, mask: Mask) -> Loss:
        balance = load_balancing_loss(jnp.exp(wide(scores.logits[0])), cell_numbers(indices, grid_size), mask)
        return balance_weight * balance + z_weight * router_z_loss(scores.extras)

    return top_k_router(
        "switch", grid_size, gate.init, scores, flat=True, combine=probability_weights, aux_loss=aux_loss
    )
