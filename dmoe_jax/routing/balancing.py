"""Balance without a loss: a bias for each expert that selection adds to its score, and the weights never see.

    choose the top k of g(x, f) + b_f; weigh what they answer by g(x, f) alone
    b_f <- b_f - speed * (calls of f - its fair share of the calls) / max(1, its fair share)

This is the auxiliary-loss-free balancing of Wang, Gao, Zhao, Sun, Dai 2024 (section 3, algorithm 1; DeepSeek-V3,
section 2.1.2), made for a swarm:

- where scores are additive over the grid, so is the bias, one number for each coordinate: beam search finds the experts
  as before. Where they are flat, it is one number for each expert.
- the step is proportional to the excess, not its sign. A trainer's batch may have one sample, whose calls leave nearly
  all experts without any: by their sign all of these would be called too rarely, an expert of half the fair load as
  much as an idle one. Proportional steps are right on average whatever the batch, and several trainers' add up.
- the fair share of an expert is in proportion to its `Traffic.capacity`: none for the dead, less for those that are
  slow. Calls count when they are made, not when they are answered: else those that fail would be asked ever more often.

The biases are parameters of the router, in its tree under `BIAS`: they are saved, restored and averaged with the trunk.
Their steps come as gradients of a term of the auxiliary loss whose value is zero. `steer_biases` hands these on as
they are, since no other optimiser would; `dmoe_jax.recipe.make_optimizer` has it built in.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from dmoe_jax.routing.base import (
    Features,
    Ids,
    Indices,
    Loss,
    Mask,
    Router,
    Scores,
    Traffic,
    cell_numbers,
    router_factory,
    router_loss,
    score,
)
from dmoe_jax.routing.losses import sum_by_expert
from dmoe_jax.types import PyTree

BIAS = "balance_bias"
"""Key of the biases in a balanced router's parameters."""


@router_factory
def balanced(router: Router, speed: float = 0.02) -> Router:
    """The router with a bias for each coordinate, or each expert, that evens out the load; see `balancing`.

    Args:
      router: whose scores are kept, as weights.
      speed: what one call too many takes from a bias, in units of a score.

    Raises:
      ValueError: if the speed is not positive.
    """
    if not (speed > 0 and math.isfinite(speed)):
        raise ValueError(f"speed must be positive and finite, got {speed!r}")

    def init(key: PRNGKeyArray, d_model: int) -> PyTree:
        params = router.init(key, d_model)
        sample = jax.ShapeDtypeStruct((1, d_model), jnp.float32)
        ids = jax.ShapeDtypeStruct((1,), jnp.int32)
        shapes = jax.eval_shape(lambda params, x, ids: score(router, params, x, ids=ids), params, sample, ids)
        return {"router": params, BIAS: tuple(jnp.zeros(part.shape[1:]) for part in shapes.logits)}

    def scores(params: PyTree, x: Features, *, key: PRNGKeyArray | None = None, ids: Ids | None = None) -> Scores:
        before = score(router, params["router"], x, key=key, ids=ids)
        bias = params[BIAS]
        if before.bias:
            bias = tuple(own + inner for own, inner in zip(bias, before.bias, strict=True))
        return Scores(before.logits, extras=(before, params[BIAS]), bias=bias)

    def aux_loss(scores: Scores, indices: Indices, mask: Mask, traffic: Traffic | None = None) -> Loss:
        before, bias = scores.extras
        asked, capacity = (mask, None) if traffic is None else traffic
        excess = excess_load(indices, asked, capacity, router.grid_size, is_flat=len(bias) != len(router.grid_size))
        push = sum(jnp.sum(jax.lax.stop_gradient(over) * part) for over, part in zip(excess, bias, strict=True))
        # Zero, with a gradient.
        return router_loss(router, before, indices, mask, traffic) + speed * (push - jax.lax.stop_gradient(push))

    return router._replace(
        name=f"{router.name}+balanced", init=init, scores=scores, aux_loss=aux_loss, heeds_traffic=True
    )


def excess_load(
    indices: Indices,
    asked: Mask,
    capacity: Float[Array, "..."] | None,
    grid_size: tuple[int, ...],
    *,
    is_flat: bool,
) -> tuple[Float[Array, " _"], ...]:
    """How many calls too many each coordinate, or each expert, has had in this batch.

    (calls - fair) / max(1, fair): a number of calls where there are few, a share of the fair load where there are many.

    Args:
      indices: coordinates of the experts that were selected.
      asked: which slots count.
      capacity: of the grid's shape: fair shares are in proportion to it; where it is 0, there is no excess. None: even.
      grid_size: extents of the grid.
      is_flat: whether experts count, and not coordinates.

    Returns: an array for each dimension of the grid, or one over its cells, row-major.
    """
    room = jnp.ones(grid_size) if capacity is None else jnp.asarray(capacity, jnp.float32)
    counted = asked.astype(jnp.float32)
    if is_flat:
        numbers, rooms = [cell_numbers(indices, grid_size)], [room.reshape(-1)]
    else:
        dims = range(len(grid_size))
        numbers = [indices[..., dim] for dim in dims]
        rooms = [jnp.sum(room, axis=tuple(other for other in dims if other != dim)) for dim in dims]
    total_calls, total_room = jnp.sum(counted), jnp.maximum(jnp.sum(room), 1e-9)
    found = []
    for number, own_room in zip(numbers, rooms, strict=True):
        fair = total_calls * own_room / total_room
        excess = (sum_by_expert(counted, number, own_room.size) - fair) / jnp.maximum(1, fair)
        found.append(jnp.where(own_room > 0, excess, 0))
    return tuple(found)


def steer_biases(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The optimiser for everything but the biases of `balanced` routers, which move by their gradients as they are.

    Biases take no part in the optimiser's norms, moments, decay and step sizes. For parameters without them it is the
    optimiser itself, its state included. Under any other optimiser biases move too, but as fast as that one likes.
    """
    inner = optax.with_extra_args_support(optimizer)

    def is_like(value: PyTree, updates: PyTree) -> bool:
        return jax.tree.structure(value) == jax.tree.structure(updates)

    def init(params: PyTree) -> PyTree:
        return inner.init(_without_biases(params))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        rest = {name: _without_biases(value) if is_like(value, updates) else value for name, value in extra.items()}
        others, state = inner.update(
            _without_biases(updates), state, None if params is None else _without_biases(params), **rest
        )
        merged = jax.tree_util.tree_map_with_path(
            lambda path, gradient, other: -gradient if _is_bias(path) else other,
            updates,
            others,
        )
        return merged, state

    return optax.GradientTransformationExtraArgs(init, update)


def _without_biases(tree: PyTree) -> PyTree:
    """The tree with nothing in the places of the biases, as `optax.masked` has it."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: optax.MaskedNode() if _is_bias(path) else leaf, tree)


def _is_bias(path: Any) -> bool:
    return any(isinstance(key, jax.tree_util.DictKey) and key.key == BIAS for key in path)
