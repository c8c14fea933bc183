"""The optimiser of the WikiText-2 recipe: Adam under a clipped gradient, with L2, linear warm-up and cosine decay.

As PyTorch's `clip_grad_norm_` followed by `Adam(weight_decay=...)`, with which Transformer-XL was trained:

    g = clip(gradient, norm <= grad_clip) + weight_decay * parameters
    m, v = moving means of g and g^2 (0.9, 0.999), their bias corrected
    parameters -= learning_rate(n) * (1 + staleness) ** -staleness_power * m / (sqrt(v) + 1e-8)

The decay is L2, not the decoupled one of AdamW, under which the recipe's weight of 1.2e-6 would mean something else.
Stale gradients, of which the recipe knew nothing, go without m (`dmoe_jax.optim.staleness`). Biases that balance a
router's load move by themselves (`dmoe_jax.routing.balancing`).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dmoe_jax.arrays import PyTree, wide
from dmoe_jax.layer_config import Recipe
from dmoe_jax.machine.remembered import remembered
from dmoe_jax.optim.staleness import scale_by_stale_adam, scale_by_staleness
from dmoe_jax.routing.balancing import steer_biases


def learning_rate_schedule(recipe: Recipe) -> optax.Schedule:
    """Step size by the number of updates made before.

    The cosine begins where the warm-up ends. (The authors' begins at update 0 and is overruled by the warm-up: over
    their 125,000 updates that differs by 2.2 % of the peak at most, but a short run would step down by a seventh.)
    """
    peak = recipe.learning_rate
    if recipe.total_steps is None:
        if not recipe.warmup_steps:
            return optax.constant_schedule(peak)
        return optax.linear_schedule(0.0, peak, recipe.warmup_steps)
    # A short run keeps most of its steps for learning.
    warmup_steps = min(recipe.warmup_steps, recipe.total_steps // 4)
    return optax.warmup_cosine_decay_schedule(
        0.0 if warmup_steps else peak, peak, warmup_steps, recipe.total_steps, end_value=recipe.floor * peak
    )


def clip_and_decay(max_norm: float, rate: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm`, then L2, gradient + rate * parameter, for every array that has a gradient at all.

    An array whose gradient is zero throughout (or below 1e-19), such as the gate of a frozen router, stays as it is:
    Adam would turn any decay, however small, into whole steps. The squares of the norm say which arrays these are, so
    that each gradient is read once for both. Where they overflow they are summed again of much smaller numbers: a
    gradient of float16, or beyond 1e19, is clipped to its direction, where Optax would make zeros of it.

    Args:
      max_norm: bound on the norm of all gradients together; infinite: they are not clipped.
      rate: rate of the decay, at least 0; without it the parameters are not needed.
    """

    def update(updates: PyTree, state: optax.EmptyState, params: PyTree = None) -> tuple[PyTree, optax.EmptyState]:
        squares = jax.tree.map(lambda gradient: jnp.square(wide(gradient)).sum(), updates)
        if math.isfinite(max_norm):
            norm = _norm(updates, squares)

            def clipped(gradient: Any) -> Any:
                shorter = (wide(gradient) / norm * max_norm).astype(gradient.dtype)
                return jnp.where(norm < max_norm, gradient, shorter)

            updates = jax.tree.map(clipped, updates)
        if not rate:
            return updates, state
        # A NaN is no zero.
        shares = jax.tree.map(lambda square: jnp.where(square != 0, rate, 0.0), squares)
        return jax.tree.map(lambda gradient, share, own: gradient + share * own, updates, shares, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _norm(tree: PyTree, squares: PyTree) -> Any:
    """The norm of all numbers of a tree together; `squares` has the sum of each array's squares."""
    total = sum(jax.tree.leaves(squares), start=jnp.zeros(()))
    small = 2.0 ** -(jnp.finfo(total.dtype).maxexp // 2 + 16)  # a power of two: the digits stay

    def again() -> Any:
        squares = (jnp.square(wide(leaf) * small).sum() for leaf in jax.tree.leaves(tree))
        return jnp.sqrt(sum(squares, start=jnp.zeros((), total.dtype))) / small

    return jax.lax.cond(jnp.isfinite(total), lambda: jnp.sqrt(total), again)


@remembered(64)
def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """The recipe's optimiser; equal recipes return the same object, and so share compiled code."""
    adam = scale_by_stale_adam if recipe.staleness_power else optax.scale_by_adam
    parts: list[optax.GradientTransformation] = [adam(b1=0.9, b2=0.999, eps=1e-8)]
    if recipe.weight_decay or math.isfinite(recipe.grad_clip):
        parts.insert(0, clip_and_decay(recipe.grad_clip, recipe.weight_decay))
    if recipe.weight_decay and math.isfinite(recipe.grad_clip):
        parts.insert(0, optax.identity())  # checkpoints have a place for the clipping and one for the decay
    return steer_biases(optax.chain(*parts, _step_size(recipe)))


def _step_size(recipe: Recipe) -> optax.GradientTransformationExtraArgs:
    """The schedule's step size, smaller for stale updates."""
    # One transformation with the schedule's state: two would need another structure of every checkpoint.
    rate = optax.scale_by_learning_rate(learning_rate_schedule(recipe))
    by_staleness = scale_by_staleness(recipe.staleness_power)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        updates, state = rate.update(updates, state, params)
        updates, _ = by_staleness.update(updates, optax.EmptyState(), params, **extra)
        return updates, state

    return optax.GradientTransformationExtraArgs(rate.init, update)
