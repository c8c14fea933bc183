"""Routing without an auxiliary loss, as in DeepSeek-V3 (DeepSeek-AI 2024, section 2.1.2; Wang et al. 2024).

    s_i(x) = sigmoid(u(x)^T e_i)                      eq. 15, an affinity for each expert
    choose the top k of s_i + b_i                     eq. 16; the bias b_i is in nothing else
    weights = s_i / sum of s over the chosen          eq. 13, 14; here over those that answered

Affinities do not compete as the parts of a softmax do: one expert's may rise without another's falling, and the bias is
in the same units for all samples. `balanced` moves it. The papers move it by the sign of each expert's error, by 0.001
after a batch of millions of tokens; ours moves it in proportion to the excess and to the affinities' spread, because
the batches of asynchronous trainers have few samples, by whose sign nearly every expert would be called too rarely
(`balancing` has more).

Left out: shared experts, which are the model's affair; routing bounded to a few nodes; and the loss over single
sequences of weight 0.0001 (eq. 17 to 20), since our samples may be whole sequences. As in the paper no sample is ever
dropped, and an expert may take every one of a batch. The gate is the one of `product_key`, LayerNorm included.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from dmoe_jax.arrays import PyTree
from dmoe_jax.routing.balancing import DEFAULT_SPEED, balanced
from dmoe_jax.routing.base import Features, Ids, Router, Scores, router_factory, top_k_router
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.routing.weights import normalised_weights

INIT_SCALE = 0.5
"""Standard deviation of what goes into the sigmoid at initialisation: 0.006 sqrt(7168), by section 4.2."""


@router_factory
def deepseek_v3(grid_size: tuple[int, ...], *, speed: float = DEFAULT_SPEED) -> Router:
    """The DeepSeek-V3 router: one score for each expert, an affinity from 0 to 1.

    Args:
      grid_size: extent of each dimension of the expert grid.
      speed: of the biases, see `balanced`.

    Raises:
      ValueError: if grid_size is not one or more positive integers, or the speed is not positive.
    """
    gate = product_key((math.prod(grid_size),), init_scale=INIT_SCALE)

    def scores(params: PyTree, x: Features, *, key: PRNGKeyArray | None = None, ids: Ids | None = None) -> Scores:
        del key, ids
        (logits,) = gate.scores(params, x).logits
        return Scores((jax.nn.sigmoid(logits.astype(jnp.float32)),))

    affinities = top_k_router("deepseek_v3", grid_size, gate.init, scores, flat=True, combine=normalised_weights)
    return balanced(affinities, speed)._replace(name="deepseek_v3")
