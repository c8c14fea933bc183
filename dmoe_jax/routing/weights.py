"""Weights of outputs, besides `base.masked_softmax`: by the router's probabilities, by affinities, or all alike."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Slots = Float[Array, "*batch slots"]
Answered = Bool[Array, "*batch slots"]


def probability_weights(logits: Slots, mask: Answered) -> Slots:
    """exp(logit) where the mask is True, else 0: for routers whose scores are log-probabilities over all experts.

    The probability of the experts that were not chosen, or did not answer, is not handed to the others: it lets the
    sample pass unchanged (`base.Router`). Combinators that change the scores look for this very function, and
    normalise them again.
    """
    return jnp.exp(jnp.where(mask, logits, -jnp.inf))


def normalised_weights(logits: Slots, mask: Answered) -> Slots:
    """Each score over the sum of the scores that the mask leaves: for routers whose scores are affinities, not logits.

    Scores below 0, which noise may make of affinities, count as 0. A row without any score above 0 gives zeros. With
    one slot the weight is the affinity itself, at most 1: over its own sum it would be 1 whatever the gate says.
    """
    affinities = jnp.where(mask, jnp.maximum(logits, 0), 0)
    if logits.shape[-1] == 1:
        return jnp.minimum(affinities, 1)
    total = jnp.sum(affinities, axis=-1, keepdims=True)
    return affinities / jnp.where(total > 0, total, 1)


def uniform_weights(logits: Slots, mask: Answered) -> Slots:
    """The same weight for every expert that answered; all zeros where none did. No gradient flows."""
    answered = mask.astype(logits.dtype)
    return answered / jnp.maximum(jnp.sum(answered, axis=-1, keepdims=True), 1)


def log_probabilities(logits: Float[Array, "*batch num_experts"]) -> Float[Array, "*batch num_experts"]:
    """log softmax(logits), which leaves a row of nothing but -inf as it is instead of making it NaN."""
    peak = jnp.max(logits, axis=-1, keepdims=True)
    peak = jax.lax.stop_gradient(jnp.where(jnp.isfinite(peak), peak, 0))
    total = jnp.sum(jnp.exp(logits - peak), axis=-1, keepdims=True)
    return logits - peak - jnp.log(jnp.where(total > 0, total, 1))
