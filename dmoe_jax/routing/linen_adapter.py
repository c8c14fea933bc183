"""Any Flax Linen module as a router's scoring function."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from dmoe_jax.routing.base import Router, Scores, check_grid_size, split_scores, top_k_router
from dmoe_jax.types import PyTree


def from_linen(make_module: Callable[[], nn.Module], grid_size: tuple[int, ...], *, name: str = "linen") -> Router:
    """A router whose scores come from a Linen module; everything else is top-k and softmax.

    Make the router once and keep it: each call returns new functions, and compiled code is cached by their identity.

    Args:
      make_module: () -> a module that maps [batch, d_model] to [batch, sum(grid_size)], or to a tuple of
        [batch, grid_i]. It may hold parameters only. Noise, if it wants any, comes from the rng stream "router".
      grid_size: extent of each dimension of the expert grid.
      name: what figures and logs call the router.

    Raises:
      ValueError: if grid_size is not one or more positive integers; from `init`, if the module keeps other
        state than parameters; from `scores`, if the module's output does not fit the grid.
    """
    grid = check_grid_size(grid_size)
    module = make_module()
    init_module = jax.jit(module.init)

    def init(key: PRNGKeyArray, d_model: int) -> PyTree:
        variables = init_module(key, jnp.zeros((1, d_model)))
        if extra := set(variables) - {"params"}:
            raise ValueError(f"a scoring module may hold parameters only, this one also has {sorted(extra)}")
        return variables.get("params", {})

    # Jitted here because an eager Linen call costs forty compiled ones; inside a jitted segment this is free.
    @jax.jit
    def scores(
        params: PyTree,
        x: Float[Array, "batch d_model"],
        *,
        key: PRNGKeyArray | None = None,
        ids: Int32[Array, " batch"] | None = None,
    ) -> Scores:
        del ids
        rngs = None if key is None else {"router": key}
        return Scores(split_scores(module.apply({"params": params}, x, rngs=rngs), grid))

    return top_k_router(name, grid, init, scores)
