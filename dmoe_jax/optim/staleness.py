"""Optimisers for stale gradients: smaller steps, no momentum, and delay compensation.

The staleness of a gradient is the number of updates that its parameters took between the reading that it is for and its
own update. The node counts it for its experts, and `SharedTrunk` for the trunk; both tell the optimiser:

    optimizer = optax.chain(scale_by_stale_adam(), optax.scale_by_learning_rate(1e-3), scale_by_staleness())
    optimizer.update(grads, opt_state, params, staleness=n)
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from dmoe_jax.arrays import PyTree, wide


def scale_by_staleness(power: float = 0.5) -> optax.GradientTransformationExtraArgs:
    """Multiply updates by (1 + staleness) ** -power, with a finite power of at least 0, which changes nothing.

    Belongs after the optimiser: Adam undoes any scaling of the gradients before it. The `staleness` that `update` takes
    is a number of at least 0, perhaps a mean; without it nothing is stale.
    """
    if not 0 <= power < math.inf:
        raise ValueError(f"the power of the staleness must be finite and at least 0, got {power}")

    def update(
        updates: PyTree, state: optax.EmptyState, params: PyTree = None, *, staleness: ArrayLike = 0, **extra: Any
    ) -> tuple[PyTree, optax.EmptyState]:
        scale = (1 + jnp.asarray(staleness, jnp.float32)) ** -power
        return jax.tree.map(lambda leaf: (wide(leaf) * scale).astype(leaf.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def scale_by_stale_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, *, amsgrad: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Adam without its first moment where the gradient is stale: (w m + (1 - w) g) / (sqrt(v) + eps).

    Here m and v are Adam's corrected moments, g is the gradient, and w = max(0, 1 - staleness). Asynchrony is a
    momentum by itself (Mitliagkas et al. 2016): a step is followed by others in its direction, from all those who have
    not seen it yet, and a first moment adds to that. Where nothing is stale, this is Adam to the bit; its state is
    Adam's too.

    Args:
      b1, b2, eps: as of `optax.scale_by_adam`.
      amsgrad: True for the largest v so far, as of `optax.scale_by_amsgrad`.
    """
    inner = (optax.scale_by_amsgrad if amsgrad else optax.scale_by_adam)(b1=b1, b2=b2, eps=eps)

    def update(
        updates: PyTree, state: Any, params: PyTree = None, *, staleness: ArrayLike = 0, **extra: Any
    ) -> tuple[PyTree, Any]:
        moved, state = inner.update(updates, state, params)
        weight = jnp.maximum(1 - jnp.asarray(staleness, jnp.float32), 0)
        correction = 1 - b2**state.count
        second = state.nu_max if amsgrad else jax.tree.map(lambda v: v / correction, state.nu)

        def mixed(own: Any, gradient: Any, v: Any) -> Any:
            alone = wide(gradient) / (jnp.sqrt(wide(v)) + eps)
            return (weight * wide(own) + (1 - weight) * alone).astype(own.dtype)

        return jax.tree.map(mixed, moved, updates, second), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def compensate_delay(strength: float) -> optax.GradientTransformationExtraArgs:
    """Delay compensation (DC-ASGD, Zheng et al. 2017): g + strength * g * g * (params - read_params).

    The second term estimates how the gradient has changed since the parameters were read, with g * g for the Hessian's
    diagonal. Belongs before the optimiser. `update` wants the parameters of now, and as `read_params` those that the
    gradients are for. The trainers of a trunk give them; a node, which keeps one version of its experts, does not.
    What a `moshpit_average` makes of gradients was read at several places: it cannot be compensated.

    Args:
      strength: lambda in the paper, finite and at least 0, which changes nothing.
    """
    if not 0 <= strength < math.inf:
        raise ValueError(f"the strength of a delay compensation must be finite and at least 0, got {strength}")

    def update(
        updates: PyTree, state: optax.EmptyState, params: PyTree = None, *, read_params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, optax.EmptyState]:
        if params is None or read_params is None:
            raise ValueError(
                "compensate_delay wants the parameters of now and those that the gradients are for: "
                "update(grads, state, params, read_params=...)"
            )

        def compensated(gradient: Array, now: Array, read: Array) -> Array:
            wide_gradient = wide(gradient)
            return (wide_gradient + strength * wide_gradient**2 * (wide(now) - wide(read))).astype(gradient.dtype)

        return jax.tree.map(compensated, updates, params, read_params), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
