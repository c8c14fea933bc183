"""Expert choice (Zhou, Lei, Liu, Du, Huang, Zhao, Dai, Chen, Le, Laudon 2022, section 3): experts choose samples.

    S = softmax(x W_g) over the experts; each expert takes its n k / e best of the n samples (eq. 1, 2)

All experts serve equally many samples, with no balancing loss; a sample is served by k experts on average, perhaps by
none. Weights are the probabilities S, not renormalised. Only the living experts choose; n k / e counts them.

Where n k / e is no whole number (it always is in the paper), every expert takes the whole part of it, and the places
left over go to the experts whose next sample scores highest, one each: always n k choices in all. So a batch of one
sample is plain top-k, where rounding up would have every expert of the grid take it. A sample keeps the 2k best of the
experts that took it: shapes must be static, and its number of calls bounded. (Section 3.3 caps it by a linear
programme.) An expert's capacity in a batch is therefore n k / e, rounded up, and a sample that no expert has taken is
dropped by the layer: it passes unchanged.

In a language model that routes tokens, whether an expert takes a token depends on the tokens after it: training looks
at the future, and generation, which cannot, differs from it; perplexities would be better than the model is. So
Transformer-XL with `route="token"` refuses it (`check.check_router`). Routed by sequence it stays causal.
"""

import functools
import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from dmoe_jax.arrays import PyTree
from dmoe_jax.routing.base import (
    Alive,
    Features,
    Ids,
    Indices,
    Mask,
    Router,
    Scores,
    best_cells,
    living_logits,
    no_aux_loss,
    router_factory,
)
from dmoe_jax.routing.product_key import DEFAULT_INIT_SCALE, product_key
from dmoe_jax.routing.weights import log_probabilities, probability_weights

MOST_EXPERTS = 2
"""A sample is served by at most this times k experts."""


@router_factory
def expert_choice(grid_size: tuple[int, ...], *, init_scale: float = DEFAULT_INIT_SCALE) -> Router:
    """The expert-choice router. Arguments and errors are those of `product_key`."""
    gate = product_key((math.prod(grid_size),), init_scale=init_scale)

    def scores(params: PyTree, x: Features, *, key: PRNGKeyArray | None = None, ids: Ids | None = None) -> Scores:
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
    scores: Scores, k: int, alive: Alive | None = None, *, grid_size: tuple[int, ...]
) -> tuple[Indices, Mask]:
    """The samples that each living expert takes, turned round: the experts of each sample, best first.

    Equal scores go to the sample that stands first. No gradient flows.

    Args:
      scores: of the samples, log-probabilities.
      k: experts for each sample on average.

    Returns: indices and mask, with min(num_experts, 2k) slots. Raises ValueError as `living_logits`.
    """
    num_experts = math.prod(grid_size)
    logits = living_logits(scores, k, alive, grid_size)
    num_living = num_experts if alive is None else jnp.maximum(jnp.sum(alive), 1)
    whole, left_over = jnp.divmod(logits.shape[0] * k, num_living)
    rank = _ranks(logits)  # of each sample for each expert
    next_best = jnp.max(jnp.where(rank == whole, logits, -jnp.inf), axis=0)
    takes_one_more = _ranks(next_best) < left_over
    taken = (rank < whole) | ((rank == whole) & takes_one_more)
    return best_cells(jnp.where(taken, logits, -jnp.inf), min(num_experts, MOST_EXPERTS * k), grid_size)


def _ranks(values: Float[Array, "..."]) -> Int32[Array, "..."]:
    """The place of each value along the first axis, the highest 0, the earlier of equal ones first."""
    return jnp.argsort(jnp.argsort(-values, axis=0, stable=True), axis=0).astype(jnp.int32)
