"""Balance without a loss: a bias for each expert that selection adds to its score, and the weights never see.

    choose the top k of g(x, f) + b_f; weigh what they answer by g(x, f) alone
    b_f <- b_f - speed * spread * (calls of f - its fair share of the calls) / max(1, its fair share)

This is the auxiliary-loss-free balancing of Wang, Gao, Zhao, Sun, Dai 2024 (section 3, algorithm 1; DeepSeek-V3,
section 2.1.2), made for a swarm:

- beam search still finds the experts of additive scores: prefixes are ranked by the best of the cells behind them, for
  which the biases suffice that the trainer has anyway (`search_beams`). On grids of more than `MAX_BIASED_CELLS` there
  is a bias for each coordinate instead. That evens out rows and columns, and not the cells: where samples are alike,
  the diagonal of a grid can have all the load.
- the step is proportional to the excess, not its sign. A trainer's batch may have one sample, whose calls leave nearly
  all experts without any: by their sign all of these would be called too rarely, an expert of half the fair load as
  much as an idle one. Proportional steps are right on average whatever the batch, and several trainers' add up.
- it is measured in the spread of the scores, their standard deviation over the experts: scores of a linear map grow in
  training by orders of magnitude, where the paper's sigmoids stay between 0 and 1.
- the fair share of an expert is in proportion to its `Traffic.capacity`: none for the dead, less for those that are
  slow. Calls count when they are made, not when they are answered: else those that fail would be asked ever more often.

The biases are parameters of the router, in its tree under `BIAS`: they are saved, restored and averaged with the trunk.
Their steps come as gradients of a term of the auxiliary loss whose value is zero. `steer_biases` hands these on as
they are, since no other optimiser would; `dmoe_jax.optim.recipe.make_optimizer` has it built in.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from dmoe_jax.arrays import PyTree, wide
from dmoe_jax.routing.base import (
    Features,
    Ids,
    Indices,
    Logits,
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
from dmoe_jax.routing.product_key import product_key

BIAS = "balance_bias"
"""Key of the biases in a balanced router's parameters."""

DEFAULT_SPEED = 0.1
"""See `balanced`."""

MAX_BIASED_CELLS = 4096
"""The most cells of a grid whose experts have a bias each."""


@router_factory
def balanced(router: Router, speed: float = DEFAULT_SPEED) -> Router:
    """The router with a bias for each expert that evens out the load; see `balancing`.

    Args:
      router: whose scores are kept, for the weights.
      speed: what one call too many takes from a bias, in standard deviations of a sample's scores. A slow one lets the
        load run away while scores grow; a fast one makes the choice of experts noisier.

    Raises:
      ValueError: if the speed is not positive, or the router has biases already.
    """
    if not (speed > 0 and math.isfinite(speed)):
        raise ValueError(f"speed must be positive and finite, got {speed!r}")
    if router.heeds_traffic:
        raise ValueError(f"router {router.name!r} balances its load already")
    num_experts = math.prod(router.grid_size)
    by_coordinate = num_experts > MAX_BIASED_CELLS and not router.whole_grid
    sizes = router.grid_size if by_coordinate else (num_experts,)

    def init(key: PRNGKeyArray, d_model: int) -> PyTree:
        return {"router": router.init(key, d_model), BIAS: tuple(jnp.zeros(size) for size in sizes)}

    def scores(params: PyTree, x: Features, *, key: PRNGKeyArray | None = None, ids: Ids | None = None) -> Scores:
        before = score(router, params["router"], x, key=key, ids=ids)
        return Scores(before.logits, extras=before, bias=params[BIAS])

    def aux_loss(scores: Scores, indices: Indices, mask: Mask, traffic: Traffic | None = None) -> Loss:
        asked, capacity = (mask, None) if traffic is None else traffic
        excess = excess_load(indices, asked, capacity, router.grid_size, by_coordinate=by_coordinate)
        step = speed * score_spread(scores.logits)
        push = sum(
            jnp.sum(jax.lax.stop_gradient(step * over) * part) for over, part in zip(excess, scores.bias, strict=True)
        )
        # Zero, with a gradient.
        return router_loss(router, scores.extras, indices, mask, traffic) + push - jax.lax.stop_gradient(push)

    return router._replace(
        name=f"{router.name}+balanced", init=init, scores=scores, aux_loss=aux_loss, heeds_traffic=True
    )


@router_factory
def balanced_product_key(grid_size: tuple[int, ...], *, speed: float = DEFAULT_SPEED) -> Router:
    """Product keys with an even load. Errors are those of `product_key` and `balanced`."""
    return balanced(product_key(grid_size), speed)._replace(name="balanced")


def score_spread(logits: Logits) -> Float[Array, ""]:
    """Standard deviation of g(x, f) over the experts f, its square averaged over the samples; -inf takes no part."""
    squares = [jnp.nanvar(jnp.where(jnp.isinf(part), jnp.nan, wide(part)), axis=1) for part in logits]
    return jnp.sqrt(jnp.mean(jnp.nan_to_num(sum(squares[1:], start=squares[0]))))


def excess_load(
    indices: Indices,
    asked: Mask,
    capacity: Float[Array, "..."] | None,
    grid_size: tuple[int, ...],
    *,
    by_coordinate: bool = False,
) -> tuple[Float[Array, " _"], ...]:
    """Excess of calls to each expert, or to each coordinate, in this batch.

    (calls - fair) / max(1, fair): a number of calls where there are few, a share of the fair load where there are many.

    Args:
      indices: coordinates of the experts that were selected.
      asked: which slots count.
      capacity: of the grid's shape: fair shares are in proportion to it; where it is 0, there is no excess. None: even.
      grid_size: extents of the grid.
      by_coordinate: whether coordinates count, and not experts.

    Returns: an array over the cells, row-major, or one for each dimension of the grid.
    """
    room = jnp.ones(grid_size) if capacity is None else jnp.asarray(capacity, jnp.float32)
    numbers, rooms = [cell_numbers(indices, grid_size)], [room.reshape(-1)]
    if by_coordinate:
        dims = range(len(grid_size))
        numbers = [indices[..., dim] for dim in dims]
        rooms = [jnp.sum(room, axis=tuple(other for other in dims if other != dim)) for dim in dims]
    total_calls, total_room = jnp.sum(asked, dtype=jnp.float32), jnp.maximum(jnp.sum(room), 1e-9)
    found = []
    for number, own_room in zip(numbers, rooms, strict=True):
        fair = total_calls * own_room / total_room
        excess = (sum_by_expert(asked, number, own_room.size) - fair) / jnp.maximum(1, fair)
        found.append(jnp.where(own_room > 0, excess, 0))
    return tuple(found)


def steer_biases(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The optimiser for everything but the biases of `balanced` routers, which move by their gradients as they are.

    Biases take no part in the optimiser's norms, moments, decay and step sizes. For parameters without them it is the
    optimiser itself, its state included. Under any other optimiser biases move too, but as fast as that one likes.
    """
    inner = optax.with_extra_args_support(optimizer)

    def is_like(value: PyTree, updates: PyTree) -> bool:
        return bool(jax.tree.structure(value) == jax.tree.structure(updates))  # type: ignore[operator]

    def init(params: PyTree) -> PyTree:
        return inner.init(_without_biases(params))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        rest = {name: _without_biases(value) if is_like(value, updates) else value for name, value in extra.items()}
        others, state = inner.update(
            _without_biases(updates), state, None if params is None else _without_biases(params), **rest
        )

        def merged(path: Any, gradient: Any, other: Any) -> Any:
            return -gradient if _is_bias(path) else other

        return jax.tree_util.tree_map_with_path(merged, updates, others), state

    return optax.GradientTransformationExtraArgs(init, update)


def bias_range(params: PyTree) -> float | None:
    """The largest difference between two biases of one layer, in units of a score, in a trunk's parameters or any tree
    with those of routers in it; None where this process has none."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    biases = [leaf for path, leaf in leaves if _is_bias(path)]
    here = [x for x in biases if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated]
    found = [np.ptp(np.asarray(leaf)) for leaf in here]
    return float(max(found)) if found else None


def _without_biases(tree: PyTree) -> PyTree:
    """The tree with nothing in the places of the biases, as `optax.masked` has it."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: optax.MaskedNode() if _is_bias(path) else leaf, tree)


def _is_bias(path: Any) -> bool:
    return any(isinstance(key, jax.tree_util.DictKey) and key.key == BIAS for key in path)
