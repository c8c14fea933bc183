"""Expert choice (Zhou, Lei, Liu, Du, Huang, Zhao, Dai, Chen, Le, Laudon 2022, section 3): experts choose samples.

    S = softmax(x W_g) over the experts; each expert takes its n k / e best of the n samples (eq. 1, 2)

All experts serve equally many samples, with no balancing loss; a sample is served by k experts on average, perhaps by
none. Weights are the probabilities S, not renormalised. Only the living experts choose; n k / e counts them.

Where n k / e is no whole number (it always is in the paper), every expert takes the whole part of it, and the places
left over go to the experts whose next sample scores highest, one each: always n k choices in all. So a batch of one
sample is plain top-k, where rounding up would have every expert of the grid take it. A sample keeps the 2k best of the
experts that took it: shapes must be static, and its number of calls bounded. (Section 3.3 caps it by a linear
programme.)

In a language model that routes tokens, whether an expert takes a token depends on the tokens after it: training looks
at the future, and generation, which cannot, differs from it. Routed by sequence, as in this project, it stays causal.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from dmoe_jax.routing.base import (
    PyTree,
    Router,
    Scores,
    cell_coordinates,
    check_grid_size,
    dense_logits,
    no_aux_loss,
)
from dmoe_jax.routing.product_key import DEFAULT_INIT_SCALE, product_key
from dmoe_jax.routing.weights import log_probabilities, probability_weights

MOST_EXPERTS = 2
"""A sample is served by at most this times k experts."""


def expert_choice(grid_size: tuple[int, ...], *, init_scale: float = DEFAULT_INIT_SCALE) -> Router:
    """The expert-choice router; equal arguments return the same object, and so share compiled code.

    Args:
      grid_size: extent of each dimension of the expert grid.
      init_scale: standard deviation of one logit at initialisation, above 0.

    Raises:
      ValueError: if grid_size is not one or more positive integers, or init_scale is not positive.
    """
    if not init_scale > 0:
        raise ValueError(f"init_scale must be positive, got {init_scale!r}")
    return _expert_choice(check_grid_size(grid_size), float(init_scale))


@functools.cache
def _expert_choice(grid_size: tuple[int, ...], init_scale: float) -> Router:
    gate = product_key((math.prod(grid_size),), init_scale=init_scale)

    def scores(
        params: PyTree,
        x: Float[Array, "batch d_model"],
        *,
        key: PRNGKeyArray | None = None,
        ids: Int32[Array, " batch"] | None = None,
    ) -> Scores:
        del key, ids
        (logits,) = gate.scores(params, x).logits
        return Scores((log_probabilities(logits),))

    return Router(
        name="expert_choice",
        grid_size=grid_size,
        init=gate.init,
        scores=scores,
        select=functools.partial(select_samples, grid_size=grid_size),
        combine=probability_weights,
        aux_loss=no_aux_loss,
        whole_grid=True,
    )


def select_samples(
    scores: Scores, k: int, alive: Bool[Array, "..."] | None = None, *, grid_size: tuple[int, ...]
) -> tuple[Int32[Array, "batch slots dims"], Bool[Array, "batch slots"]]:
    """The samples that each living expert takes, turned round: the experts of each sample, best first.

    Equal scores go to the sample that stands first. No gradient flows.

    Args:
      scores: of the samples, log-probabilities.
      k: experts for each sample on average.
      alive: bool of shape grid_size, or None if every cell holds a live expert.
      grid_size: extents of the grid.

    Returns: indices and mask, with min(num_experts, 2k) slots.

    Raises:
      ValueError: if k is not between 1 and the number of cells, or alive has another shape than the grid.
    """
    num_experts = math.prod(grid_size)
    if not 1 <= k <= num_experts:
        raise ValueError(f"k must be between 1 and the {num_experts} cells of grid {grid_size}, got {k}")
    if alive is not None and alive.shape != grid_size:
        raise ValueError(f"alive must have the grid's shape {grid_size}, got {alive.shape}")
    living = jnp.ones(num_experts, bool) if alive is None else alive.reshape(-1)
    logits = jnp.where(living, jax.lax.stop_gradient(dense_logits(scores)), -jnp.inf)
    num_living = jnp.maximum(jnp.sum(living), 1)
    whole, left_over = jnp.divmod(logits.shape[0] * k, num_living)
    rank = _ranks(logits, axis=0)  # of each sample for each expert
    next_best = jnp.max(jnp.where(rank == whole, logits, -jnp.inf), axis=0)
    takes_one_more = _ranks(next_best, axis=0) < left_over
    taken = (rank < whole) | ((rank == whole) & takes_one_more)
    best, cells = jax.lax.top_k(jnp.where(taken, logits, -jnp.inf), min(num_experts, MOST_EXPERTS * k))
    return cell_coordinates(cells, grid_size), ~jnp.isneginf(best)


def _ranks(values: Float[Array, "..."], axis: int) -> Int32[Array, "..."]:
    """The place of each value among those along the axis, the highest 0, the earlier of equal ones first."""
    return jnp.argsort(jnp.argsort(-values, axis=axis, stable=True), axis=axis)
