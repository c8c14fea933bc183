"""SPARTA (Beton et al., "Improving the Efficiency of Distributed Training using Sparse Parameter Averaging", 2025):
after every step a random few of the parameters are averaged, the same at all peers.

Which ones follows from a seed that all share, so no indices travel: a share of 0.005 is 0.5 % of the bytes of averaging
the parameters each step. After n steps a parameter has been averaged with probability 1 - (1 - share)^n.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from dmoe_jax.arrays import PyTree, wide
from dmoe_jax.optim.moshpit import Average


class SpartaState(NamedTuple):
    """State of `sparta`.

    Attributes:
      inner: of the optimiser inside.
      steps: updates so far.
    """

    inner: PyTree
    steps: Int[Array, ""]


def sparta(
    inner: optax.GradientTransformation, *, average: Average, share: float, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """An optimiser that averages a random share of the parameters after each of its updates.

    With m_t drawn from Bernoulli(share) for each parameter, alike at all peers:

        theta <- m_t * mean over peers of theta + (1 - m_t) * theta

    Here all parameters are averaged and the few are taken; a network carries the few. A mean that is not finite is not
    taken.

    Args:
      inner: any optimiser.
      average: (tree, round_number) -> its mean, over an axis of `vmap` or `shard_map`; as of `moshpit_average`.
      share: above 0, up to 1. The paper uses 0.0005 to 0.005.
      seed: of the choice. It is a setting that all peers of a run share, and therefore no key.

    Raises:
      ValueError: the share is out of its range.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> SpartaState:
        return SpartaState(inner.init(params), jnp.zeros((), jnp.int32))

    def update(
        updates: PyTree, state: SpartaState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, SpartaState]:
        if params is None:
            raise ValueError("sparta wants the parameters: update(grads, state, params)")
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        moved = jax.tree.map(lambda own, change: wide(own) + change, params, updates)
        means = average(moved, state.steps)
        masks = sparta_masks(params, state.steps, share=share, seed=seed)
        change = jax.tree.map(
            lambda mask, mean, new, own: (jnp.where(mask & jnp.isfinite(mean), mean, new) - own).astype(own.dtype),
            masks, means, moved, params,
        )  # fmt: skip
        return change, SpartaState(inner_state, state.steps + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def sparta_masks(params: PyTree, step: Int[Array, ""] | int, *, share: float, seed: int) -> PyTree:
    """Return a mask of the parameters that are averaged after this step (from 0): a tree of bool of their shapes."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), step), len(leaves))
    masks = [jax.random.bernoulli(key, share, jnp.shape(leaf)) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, masks)
