"""Auxiliary losses of routers: what keeps experts evenly used and logits small.

Pure functions of one batch, none of them weighted: a router, or `combinators`, multiplies. Axes: batch samples, slots
experts asked for each sample, num_experts cells of the grid, numbered row-major (`base.cell_numbers`).

With the small batches of asynchronous trainers these are noisy estimates: a batch of one sample cannot use its experts
evenly. They remain finite, and their mean over many steps still pulls the right way.

All are computed in float32 at least, and returned so: bfloat16 cannot count beyond 256, nor float16 beyond 2048.
"""

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jaxtyping import Array, Bool, Float, Int32

from dmoe_jax.arrays import wide


def load_balancing_loss(
    router_probs: Float[Array, "batch num_experts"],
    expert_index: Int32[Array, "batch slots"],
    mask: Bool[Array, "batch slots"],
) -> Float[Array, ""]:
    """Load-balancing loss of Switch Transformer, num_experts * sum_i f_i P_i (Fedus, Zoph, Shazeer 2021, eq. 4-6).

    f_i is the share of the slots that expert i serves, P_i the mean probability that the router gives it. The paper
    has one slot a sample; with k of them f_i counts slots / k. Slots without an answer count nowhere, so that failures
    do not make the loss smaller.

    Args:
      router_probs: each row sums to 1.
      expert_index: the expert in each slot.
      mask: which slots are served.

    Returns: a scalar, 1.0 when both f and P are uniform; 0.0 when no slot is served. Gradient flows through P only.
    """
    num_experts = router_probs.shape[-1]
    counts = sum_by_expert(mask, expert_index, num_experts)
    fractions = counts / jnp.maximum(jnp.sum(counts), 1)
    return num_experts * jnp.sum(fractions * jnp.mean(wide(router_probs), axis=0))


def router_z_loss(router_logits: Float[Array, "batch num_experts"]) -> Float[Array, ""]:
    """Mean over the batch of (log sum_i exp logit_i)^2, which keeps logits small (ST-MoE, Zoph et al. 2022, eq. 5).

    Logits of -inf (experts that are not to be chosen) take no part; a sample that has no others counts as 0.
    """
    router_logits = wide(router_logits)
    some = jnp.any(~jnp.isneginf(router_logits), axis=-1, keepdims=True)
    log_partition = jax.nn.logsumexp(jnp.where(some, router_logits, 0), axis=-1, keepdims=True)
    return jnp.mean(jnp.where(some, log_partition, 0) ** 2)


def importance_loss(
    combine_weights: Float[Array, "batch slots"], expert_index: Int32[Array, "batch slots"], num_experts: int
) -> Float[Array, ""]:
    """CV(sum_x G(x))^2, which makes experts equally important (Shazeer et al. 2017, eq. 6 and 7).

    Args:
      combine_weights: G(x), 0 in the slots that are not served.
      expert_index: the expert in each slot.
      num_experts: in the grid.
    """
    return cv_squared(sum_by_expert(combine_weights, expert_index, num_experts))


def load_loss(
    clean_logits: Float[Array, "batch num_experts"],
    noisy_logits: Float[Array, "batch num_experts"],
    noise_stddev: Float[Array, "batch num_experts"],
    k: int,
) -> Float[Array, ""]:
    """CV(Load)^2, a smooth estimate of how evenly samples are spread (Shazeer et al. 2017, appendix A, eq. 8 to 11).

    Load_i = sum_x P(x, i), where P(x, i) = Phi((clean_i - kth_excluding(noisy, k, i)) / noise_stddev_i) is the
    probability that expert i is among the k best when its noise alone is drawn anew; kth_excluding is the k-th highest
    of the other experts' noisy logits.

    Args:
      clean_logits: without noise.
      noisy_logits: with the noise of this step.
      noise_stddev: positive.
      k: experts for each sample, at least 1.
    """
    clean_logits, noisy_logits, noise_stddev = map(wide, (clean_logits, noisy_logits, noise_stddev))
    if k >= clean_logits.shape[-1]:
        return jnp.zeros((), clean_logits.dtype)  # every expert is always chosen: the load is even
    top, _ = jax.lax.top_k(noisy_logits, k + 1)
    # Without itself, the k-th highest is the (k+1)-th of all for the k best experts, and the k-th for the others.
    threshold = jnp.where(noisy_logits >= top[:, k - 1 : k], top[:, k : k + 1], top[:, k - 1 : k])
    return cv_squared(jnp.sum(norm.cdf((clean_logits - threshold) / noise_stddev), axis=0))


def cv_squared(values: Float[Array, " n"]) -> Float[Array, ""]:
    """Squared coefficient of variation, variance / mean^2 (of the population); 0 for zeros."""
    values = wide(values)
    # The constant is small beside the squared load of one sample in a grid of 10,000 experts, 1e-8.
    return jnp.var(values) / (jnp.mean(values) ** 2 + 1e-10)


def sum_by_expert(
    values: Float[Array, "batch slots"] | Bool[Array, "batch slots"],
    expert_index: Int32[Array, "batch slots"],
    num_experts: int,
) -> Float[Array, " num_experts"]:
    """The sum of each expert's values over the slots in which it stands; of a mask, their number."""
    values = wide(values)
    return jnp.zeros(num_experts, values.dtype).at[expert_index].add(values)
