"""Any Flax NNX module as a router's scoring function.

An NNX module holds its own parameters, a router must not. The module is therefore split into a static graph and a
plain dictionary of arrays once, when parameters are made, and put together again inside the compiled function:
measured at 1.2 times a Linen call, where `nnx.jit` costs 5.
"""

from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from dmoe_jax.routing.base import Router, Scores, check_grid_size, split_scores, top_k_router
from dmoe_jax.types import PyTree


def from_nnx(
    make_module: Callable[[int, nnx.Rngs], nnx.Module], grid_size: tuple[int, ...], *, name: str = "nnx"
) -> Router:
    """A router whose scores come from an NNX module; everything else is top-k and softmax.

    Make the router once and keep it: each call returns new functions, and compiled code is cached by their identity.

    Args:
      make_module: (d_model, rngs) -> a module that maps [batch, d_model] to [batch, sum(grid_size)], or to a
        tuple of [batch, grid_i]. Every variable of it must be an `nnx.Param`.
      grid_size: extent of each dimension of the expert grid.
      name: what figures and logs call the router.

    Raises:
      ValueError: if grid_size is not one or more positive integers; from `init`, if the module keeps other
        state than parameters; from `scores`, if the module's output does not fit the grid.
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
    def scores(
        params: PyTree,
        x: Float[Array, "batch d_model"],
        *,
        key: PRNGKeyArray | None = None,
        ids: Int32[Array, " batch"] | None = None,
    ) -> Scores:
        del key, ids
        graph, state = nnx.split(nnx.eval_shape(lambda: make_module(x.shape[-1], nnx.Rngs(0))))
        nnx.replace_by_pure_dict(state, params)
        return Scores(split_scores(nnx.merge(graph, state)(x), grid))

    return top_k_router(name, grid, init, scores)
