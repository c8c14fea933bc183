"""Routers made from routers: noise, temperature, losses, frozen parameters, failures.

Each function takes a router and returns a router, as a wrapper of Optax takes and returns a transformation;
`chain_routers` applies several, the first one closest to the router:

    router = chain_routers(
        product_key((16, 16)),
        partial(add_noise, stddev=1.0),
        partial(with_balancing_loss, weight=0.01),   # sees the noise; before add_noise it would not
    )

Any function from router to router fits in, `lambda router: router._replace(...)` as well. What is wrapped keeps its
contract: a router's `aux_loss` is given the very scores that its own `scores` returned, whatever a combinator around it
made of them. A router whose weights are probabilities (`weights.probability_weights`, such as Switch) has its scores
normalised again after each change. Each combinator that draws random numbers splits the key: the router inside never
sees the same bits.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from dmoe_jax.arrays import PyTree, wide
from dmoe_jax.routing.base import (
    Features,
    Ids,
    Indices,
    Logits,
    Loss,
    Mask,
    Router,
    RouterError,
    Scores,
    Traffic,
    cell_numbers,
    dense_logits,
    router_factory,
    router_loss,
    score,
)
from dmoe_jax.routing.losses import load_balancing_loss, router_z_loss
from dmoe_jax.routing.weights import log_probabilities, probability_weights

Transformation = Callable[[Router], Router]


def chain_routers(router: Router, *transformations: Transformation) -> Router:
    """The router after all transformations, applied from left to right. Raises RouterError, naming the transformation
    that did not return a router."""
    for transformation in transformations:
        name = router.name
        router = transformation(router)
        if not isinstance(router, Router):
            raise RouterError(
                f"a transformation must return a router, {transformation!r} made {type(router).__name__} of {name!r}"
            )
    return router


@router_factory
def add_noise(router: Router, stddev: float) -> Router:
    """Gaussian noise on the scores in training, so that experts which are not yet the best are tried as well.

    Additive scores stay additive: each coordinate draws its own noise, scaled so that an expert's score has deviation
    `stddev`. Experts that share a coordinate share that part of the noise. Raises ValueError if stddev is not positive.
    """
    _check_range("stddev", stddev, stddev > 0, "positive and finite")

    def change(logits: Logits, key: PRNGKeyArray | None) -> Logits:
        if key is None:
            return logits
        keys, deviation = jax.random.split(key, len(logits)), stddev / math.sqrt(len(logits))
        return tuple(
            part + deviation * jax.random.normal(keys[i], part.shape, part.dtype) for i, part in enumerate(logits)
        )

    return _change_scores(router, "noise", change)


@router_factory
def temperature(router: Router, value: float) -> Router:
    """Scores divided by a temperature: the same experts, with more even weights above 1, sharper ones below. Raises
    ValueError if the value is not positive."""
    _check_range("temperature", value, value > 0, "positive and finite")
    return _change_scores(router, "temperature", lambda logits, key: tuple(part / value for part in logits))


@router_factory
def drop_experts(router: Router, rate: float) -> Router:
    """In training each expert is gone for each sample with this probability: its score is -inf, the next best is used.

    How the released code of Learning@home emulates failures of machines (at a rate of 0.1). An expert is gone, not a
    coordinate, so the scores become flat; on a grid of several dimensions `select` then needs the whole grid. Raises
    ValueError if the rate is not at least 0 and below 1.
    """
    _check_range("rate", rate, 0 <= rate < 1, "at least 0 and below 1")

    def change(logits: Logits, key: PRNGKeyArray | None) -> Logits:
        flat = dense_logits(Scores(logits))
        return (flat if key is None else jnp.where(jax.random.bernoulli(key, rate, flat.shape), -jnp.inf, flat),)

    whole_grid = router.whole_grid or len(router.grid_size) > 1
    return _change_scores(router, "drop", change)._replace(whole_grid=whole_grid)


@router_factory
def freeze(router: Router) -> Router:
    """The router with its parameters as they were drawn: no gradient reaches them. It does reach x.

    Without a gradient an optimiser leaves parameters alone, unless it decays weights.
    """

    def scores(params: PyTree, x: Features, *, key: PRNGKeyArray | None = None, ids: Ids | None = None) -> Scores:
        return score(router, jax.lax.stop_gradient(params), x, key=key, ids=ids)

    return router._replace(name=f"{router.name}+frozen", scores=scores)


@router_factory
def with_balancing_loss(router: Router, weight: float = 0.01) -> Router:
    """The router with the load-balancing loss of Switch Transformer added to its own, the paper's weight by default.

    The probabilities are the softmax of its scores over the whole grid; see `losses`. Raises ValueError if the weight
    is negative.
    """

    def loss(scores: Scores, indices: Indices, mask: Mask) -> Loss:
        probs = jnp.exp(log_probabilities(wide(dense_logits(scores))))
        return load_balancing_loss(probs, cell_numbers(indices, router.grid_size), mask)

    return _add_loss(router, "balance", weight, loss)


@router_factory
def with_z_loss(router: Router, weight: float = 0.001) -> Router:
    """The router with the z-loss of ST-MoE added to its own, the paper's weight by default; see `losses`.

    It penalises the scores as this router hands them over; those that are log-probabilities already have none to pay
    (`switch` has its own z-loss, on what goes into its softmax). Raises ValueError if the weight is negative.
    """
    return _add_loss(router, "z_loss", weight, lambda scores, indices, mask: router_z_loss(dense_logits(scores)))


def _check_range(name: str, value: float, fits: bool, expected: str) -> None:
    if not (fits and math.isfinite(value)):
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def _change_scores(router: Router, suffix: str, change: Callable[[Logits, PRNGKeyArray | None], Logits]) -> Router:
    """The router with other logits; what it said itself becomes the extras, for its own aux_loss to see."""

    def scores(params: PyTree, x: Features, *, key: PRNGKeyArray | None = None, ids: Ids | None = None) -> Scores:
        own_key, inner_key = (None, None) if key is None else tuple(jax.random.split(key))
        before = score(router, params, x, key=inner_key, ids=ids)
        logits = change(before.logits, own_key)
        if router.combine is probability_weights:
            # Parts that are each normalised make a sum that is.
            logits = tuple(log_probabilities(part) for part in logits)
        return Scores(logits, extras=before, bias=before.bias)

    def aux_loss(scores: Scores, indices: Indices, mask: Mask, traffic: Traffic | None = None) -> Loss:
        return router_loss(router, scores.extras, indices, mask, traffic)

    return router._replace(name=f"{router.name}+{suffix}", scores=scores, aux_loss=aux_loss)


def _add_loss(router: Router, suffix: str, weight: float, loss: Callable[[Scores, Indices, Mask], Loss]) -> Router:
    """The router with a second auxiliary loss, and its scores in their one form, which the loss relies on."""
    _check_range("weight", weight, weight >= 0, "at least 0 and finite")

    def aux_loss(scores: Scores, indices: Indices, mask: Mask, traffic: Traffic | None = None) -> Loss:
        return router_loss(router, scores, indices, mask, traffic) + weight * loss(scores, indices, mask)

    scores = functools.partial(score, router)
    return router._replace(name=f"{router.name}+{suffix}", scores=scores, aux_loss=aux_loss)
