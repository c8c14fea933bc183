"""NoLoCo (Kolehmainen et al., arXiv 2506.10911): outer steps among pairs of peers, and no collective operation at all.

A peer's slow parameters follow the pair's mean pseudo-gradient with momentum, and are drawn towards the pair's mean; so
the swarm stays together although nobody ever computes its mean.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from dmoe_jax.optim.moshpit import Average
from dmoe_jax.optim.peer_axis import wide
from dmoe_jax.types import PyTree

MOMENTUM, RATE, PULL = 0.5, 0.7, 0.7
"""alpha and beta of the paper's experiments; gamma = beta, as in the authors' code."""


class NoLoCoState(NamedTuple):
    """State of `noloco`.

    Attributes:
      inner: of the optimiser inside.
      steps: updates so far.
      slow: phi, the parameters after the last outer step.
      momentum: delta, the last outer step, float32.
    """

    inner: PyTree
    steps: Int[Array, ""]
    slow: PyTree
    momentum: PyTree


def noloco(
    inner: optax.GradientTransformation,
    *,
    average: Average,
    every: int,
    momentum: float = MOMENTUM,
    rate: ArrayLike = RATE,
    pull: ArrayLike = PULL,
) -> optax.GradientTransformationExtraArgs:
    """An optimiser with the modified Nesterov momentum of NoLoCo as its outer step.

    Each `every` updates, with theta the parameters and means over a random group of n peers:

        delta <- alpha delta + beta mean(theta - phi) - gamma (phi - mean(phi))
        phi   <- phi + delta
        theta <- phi

    Without gradients the second moments (E phi^2, E phi delta, E delta^2) about the swarm's mean are multiplied by a
    matrix each time; its spectral radius says how fast peers draw together. In pairs that are drawn anew each time it
    is below 1 for 0 < gamma < 2 (1 - alpha^2), and 0.70 with the defaults. (The matrix is in the tests.)

    An outcome that is not finite leaves the parameters where the inner steps brought them.

    Args:
      inner: any optimiser.
      average: (tree, round_number) -> the mean over the peer's group, over an axis of `vmap` or `shard_map`. It gets
        two trees at once, theta - phi and phi. The paper's: pairs drawn anew each time; see `over_axis`.
      every: updates between two outer steps.
      momentum, rate, pull: alpha, beta and gamma; the last two may be traced.

    Raises:
      ValueError: `every` is below 1, or the momentum is not from 0 to 1.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be at least 0 and below 1, got {momentum}")
    inner = optax.with_extra_args_support(inner)
    one_step = partial(_outer_step, average=average, every=every, momentum=momentum, rate=rate, pull=pull)

    def init(params: PyTree) -> NoLoCoState:
        still = jax.tree.map(lambda leaf: jnp.zeros_like(wide(leaf)), params)
        return NoLoCoState(inner.init(params), jnp.zeros((), jnp.int32), jax.tree.map(jnp.array, params), still)

    def update(
        updates: PyTree, state: NoLoCoState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, NoLoCoState]:
        if params is None:
            raise ValueError("noloco wants the parameters: update(grads, state, params)")
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        state = state._replace(inner=inner_state, steps=state.steps + 1)
        moved = jax.tree.map(lambda own, change: wide(own) + change, params, updates)
        is_due = state.steps % every == 0
        moved, slow, delta = jax.lax.cond(
            is_due, one_step, lambda params, state: (params, state.slow, state.momentum), moved, state
        )
        change = jax.tree.map(lambda new, own: (new - own).astype(own.dtype), moved, params)
        return change, state._replace(slow=slow, momentum=delta)

    return optax.GradientTransformationExtraArgs(init, update)


def _outer_step(
    params: PyTree,
    state: NoLoCoState,
    *,
    average: Average,
    every: int,
    momentum: float,
    rate: ArrayLike,
    pull: ArrayLike,
) -> tuple[PyTree, PyTree, PyTree]:
    """(theta, phi, delta) after it."""
    ways = jax.tree.map(lambda own, slow: own - wide(slow), params, state.slow)
    mean_way, mean_slow = average((ways, jax.tree.map(wide, state.slow)), state.steps // every - 1)
    delta = jax.tree.map(
        lambda last, way, slow, middle: momentum * last + rate * way - pull * (wide(slow) - middle),
        state.momentum, mean_way, state.slow, mean_slow,
    )  # fmt: skip
    moved = jax.tree.map(lambda slow, step: wide(slow) + step, state.slow, delta)
    is_good = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(moved)]))
    slow = jax.tree.map(lambda new, old: jnp.where(is_good, new, wide(old)).astype(old.dtype), moved, state.slow)
    return optax.tree.where(is_good, moved, params), slow, optax.tree.where(is_good, delta, state.momentum)
