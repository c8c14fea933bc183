"""Any Flax module, Linen or NNX, as a router's scoring function; everything else is top-k and softmax.

Make such a router once and keep it: each call returns new functions, and compiled code is cached by their identity.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jaxtyping import PRNGKeyArray

from dmoe_jax.arrays import PyTree
from dmoe_jax.routing.base import Features, Ids, Logits, Router, Scores, check_grid_size, top_k_router


def router_from_linen(
    make_module: Callable[[], nn.Module], grid_size: tuple[int, ...], *, name: str = "linen"
) -> Router:
    """A router whose scores come from a Linen module.

    Args:
      make_module: () -> a module that maps [batch, d_model] to [batch, sum(grid_size)], or to a tuple of
        [batch, grid_i]. It may hold parameters only. Noise, if it wants any, comes from the rng stream "router".
      grid_size: extent of each dimension of the expert grid.
      name: name of the router in figures and logs.

    Raises:
      ValueError: if grid_size is not one or more positive integers; from `init`, if the module keeps other
        state than parameters; from `score`, if its output does not fit the grid.
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
    def scores(params: PyTree, x: Features, *, key: PRNGKeyArray | None = None, ids: Ids | None = None) -> Scores:
        del ids
        rngs = None if key is None else {"router": key}
        return Scores(_split(module.apply({"params": params}, x, rngs=rngs), grid))

    return top_k_router(name, grid, init, scores)


def router_from_nnx(
    make_module: Callable[[int, nnx.Rngs], nnx.Module], grid_size: tuple[int, ...], *, name: str = "nnx"
) -> Router:
    """A router whose scores come from an NNX module.

    An NNX module holds its own parameters, a router must not. The module is therefore split into a static graph and a
    plain dictionary of arrays when parameters are made, and put together again inside the compiled function: measured
    at 1.2 times a Linen call, where `nnx.jit` costs 5.

    Args:
      make_module: (d_model, rngs) -> a module that maps [batch, d_model] to [batch, sum(grid_size)], or to a
        tuple of [batch, grid_i]. Every variable of it must be an `nnx.Param`.
      grid_size, name: as of `router_from_linen`.

    Raises:
      ValueError: as `router_from_linen`.
    """
    grid = check_grid_size(grid_size)

    def init(key: PRNGKeyArray, d_model: int) -> PyTree:
        _, state = nnx.split(make_module(d_model, nnx.Rngs(key)))
        variables = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        if extra := {type(leaf).__name__ for leaf in variables if not isinstance(leaf, nnx.Param)}:
            raise ValueError(f"a scoring module may hold nnx.Param only, this one also has {sorted(extra)}")
        return nnx.to_pure_dict(state)

    # The graph is made again, abstractly, in each trace: it depends on the width alone, and a router keeps no state.
    @jax.jit
    def scores(params: PyTree, x: Features, *, key: PRNGKeyArray | None = None, ids: Ids | None = None) -> Scores:
        del key, ids
        graph, state = nnx.split(nnx.eval_shape(lambda: make_module(x.shape[-1], nnx.Rngs(0))))
        nnx.replace_by_pure_dict(state, params)
        return Scores(_split(nnx.merge(graph, state)(x), grid))

    return top_k_router(name, grid, init, scores)


def _split(raw: Any, grid_size: tuple[int, ...]) -> Logits:
    if isinstance(raw, tuple | list):
        if (widths := tuple(scores.shape[-1] for scores in raw)) != grid_size:
            raise ValueError(f"a scoring network for grid {grid_size} must return these widths, got {widths}")
        return tuple(raw)
    if raw.shape[-1] != sum(grid_size):
        raise ValueError(
            f"a scoring network for grid {grid_size} must return {sum(grid_size)} scores a sample, got {raw.shape[-1]}"
        )
    return tuple(jnp.split(raw, list(itertools.accumulate(grid_size[:-1])), axis=-1))
