"""Definition of a router, and the arithmetic that every router shares.

A `Router` is a NamedTuple of pure functions, made by a factory, in the way an Optax transformation is: its
parameters travel outside it, so a router can be swapped in one line and compared. It never knows whether its
experts are local or remote. Its scores come in one of two forms:

- *additive* over the dimensions of the expert grid, g(x, f) = sum_i g_i(x)[u_i] (Learning@home, section 3.2): beam
  search over a DHT can then extend prefixes by their partial sums alone, and 32 x 32 experts need 64 scores;
- *flat*, one score for each cell of the grid: any function of expert and sample, for the price of knowing all cells.

Two paths lead from scores to a mixture, and both end in `combine`:

    select (the whole grid, inside jit)  indices, mask ─┐
    beam search (through the DHT)        indices, mask ─┴─> gather_logits -> combine -> weights
    mixed = x + sum_k weights_k (f_k(x) - x)

Gradients reach the router through the weights of the experts that answered and through its own `aux_loss`, and
through nothing else.

Unless its file says otherwise, an expert takes as many samples of a batch as choose it: no capacity, nobody is dropped.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from dmoe_jax.arrays import PyTree, wide
from dmoe_jax.routing.weights import log_probabilities, probability_weights

P = ParamSpec("P")

Features = Float[Array, "batch d_model"]
"""Input of a router: a row for each sample."""
Ids = Int32[Array, " batch"]
"""Token of each sample; of a sequence, the first one."""
Logits = tuple[Float[Array, "batch _"], ...]
"""See `Scores.logits`."""
Alive = Bool[Array, "..."]
"""True for each expert that is alive, in the grid's shape."""
Indices = Int32[Array, "batch slots dims"]
"""Coordinates of the experts of each sample."""
Mask = Bool[Array, "batch slots"]
"""True for each of a sample's slots that holds an expert, or an expert that answered."""
Loss = Float[Array, ""]
"""A scalar."""


_SUMS_ARE_WORTH = 16
"""Least number of cells per sum with which a product search is worth it: it makes more passes over what it has."""


class RouterError(ValueError):
    """A router that does not keep to its contract; the message names the router."""


class Scores(NamedTuple):
    """Scores that a router gives to the experts, for each sample of a batch.

    Attributes:
      logits: one [batch, grid_i] for each dimension of the grid (additive), or a single [batch, num_experts] over
        its cells, row-major (flat). On a grid of one dimension both are the same.
      extras: whatever the router's own `aux_loss` wants to see beside them, a pytree of arrays.
      bias: what selection adds to the logits and the weights do not see, the same for all samples: one [grid_i] for
        each dimension, a single [num_experts] over the cells, or () for none. See `balancing`.
    """

    logits: Logits
    extras: PyTree = ()
    bias: tuple[Float[Array, " _"], ...] = ()


class Traffic(NamedTuple):
    """Facts about a layer's calls beside the answers, for routers that balance their load.

    Attributes:
      asked: which slots held an expert that was called, whether it answered or not.
      capacity: how much each expert can do relative to the others, of the grid's shape; 0 for the dead. None: all can
        do the same.
    """

    asked: Mask
    capacity: Float[Array, "..."] | None = None


class Router(NamedTuple):
    """A routing function: pure functions and a few static facts.

    Attributes:
      name: name in figures, logs and error messages.
      grid_size: extent of each dimension of the expert grid.
      init: (key, d_model) -> params.
      scores: (params, x [batch, d_model], *, key=None, ids=None) -> `Scores`, or what `as_scores` makes them of. `key`
        is a PRNG key in training and None in evaluation, when nothing is random. `ids` are `Ids` or None, for routers
        that hash.
      select: (scores, k, alive=None) -> (indices int32 [batch, slots, dims], mask bool [batch, slots]); see
        `select_top_k`. There are k slots, unless the router gives samples different numbers of experts.
      combine: (logits [batch, slots], mask [batch, slots]) -> weights [batch, slots], not negative, zero where the mask
        is False, of sum at most 1. What they leave over lets the sample pass unchanged. Where there is one slot,
        `combine_weights` takes `softmax_weights` in place of `masked_softmax`.
      aux_loss: (scores, indices, mask) -> scalar, added to the loss (load balancing and the like). Here the mask says
        which of the selected experts answered.
      whole_grid: whether `select` must see all living experts of the grid at once. If not, it is top-k of additive
        scores, and beam search finds the same experts with far fewer look-ups.
      heeds_traffic: whether `aux_loss` takes a keyword `traffic`, see `Traffic`.
    """

    name: str
    grid_size: tuple[int, ...]
    init: Callable[..., PyTree]
    scores: Callable[..., Any]
    select: Callable[..., tuple[Indices, Mask]]
    combine: Callable[..., Float[Array, "batch slots"]]
    aux_loss: Callable[..., Loss]
    whole_grid: bool = False
    heeds_traffic: bool = False


def check_grid_size(grid_size: tuple[int, ...] | list[int]) -> tuple[int, ...]:
    """The grid size as a tuple. Raises ValueError if it is empty or an extent is not a positive integer."""
    sizes = tuple(grid_size)
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"grid_size must be one or more positive integers, got {grid_size!r}")
    return sizes


def router_factory(make: Callable[P, Router]) -> Callable[P, Router]:
    """Decorates what makes routers: equal arguments, however they are written, give the same object.

    JAX knows compiled code by the identity of functions, so equal routers share it. The memory is bounded, since a
    notebook that makes routers in a loop would otherwise keep them all; whoever holds a router that fell out keeps it,
    and only the next equal one is compiled again. An argument called `grid_size` is checked first.
    """
    signature = inspect.signature(make)
    remembered = functools.lru_cache(maxsize=256)(make)

    @functools.wraps(make)
    def factory(*args: P.args, **kwargs: P.kwargs) -> Router:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        if "grid_size" in given.arguments:
            given.arguments["grid_size"] = check_grid_size(given.arguments["grid_size"])
        return remembered(*given.args, **given.kwargs)

    return factory


def as_scores(raw: Any, grid_size: tuple[int, ...], batch: int) -> Scores:
    """`Scores` from what a router's function returned: Scores, a sequence of arrays, or one array. Raises ValueError if
    it is none of these, or of another shape; the message gives what was expected."""
    scores = raw if isinstance(raw, Scores) else Scores(tuple(raw) if isinstance(raw, tuple | list) else (raw,))
    shapes = tuple(getattr(part, "shape", None) for part in scores.logits)
    additive = tuple((batch, size) for size in grid_size)
    flat = ((batch, math.prod(grid_size)),)
    if shapes not in (additive, flat):
        raise ValueError(
            f"scores for {batch} samples on grid {grid_size} have the shapes {additive} (one for each dimension) or "
            f"{flat} (one for each expert), got {shapes if None not in shapes else type(raw).__name__}"
        )
    for part in scores.logits:
        if not jnp.issubdtype(part.dtype, jnp.floating):
            raise ValueError(f"scores must be floating numbers, got {part.dtype}")
    biases = tuple(part.shape for part in scores.bias)
    by_coordinate, by_expert = tuple((size,) for size in grid_size), ((math.prod(grid_size),),)
    if biases not in ((), by_coordinate, by_expert):
        raise ValueError(
            f"the bias of scores on grid {grid_size} has the shapes {by_coordinate} or {by_expert}, got {biases}"
        )
    return scores


def score(
    router: Router, params: PyTree, x: Features, *, key: PRNGKeyArray | None = None, ids: Ids | None = None
) -> Scores:
    """The router's scores in their one form; models call this, never `router.scores` itself. Raises RouterError, naming
    the router, if what it returned does not fit its grid."""
    raw = router.scores(params, x, key=key, ids=ids)
    try:
        return as_scores(raw, router.grid_size, x.shape[0])
    except ValueError as error:
        raise RouterError(f"router {router.name!r}: {error}") from error


def combine_weights(router: Router, scores: Scores, indices: Indices, mask: Mask) -> Float[Array, "batch slots"]:
    """The weights of the chosen experts' outputs, from the logits without the bias. Differentiable in them.

    Models call this, never `router.combine` itself: see `softmax_weights` for one expert of each sample. Raises
    RouterError as `check_weights`.
    """
    if router.combine is masked_softmax:
        return softmax_weights(scores, indices, mask, router.grid_size)
    check_weights(router, indices.shape[1])
    return router.combine(gather_logits(scores, indices, router.grid_size), mask)


def softmax_weights(
    scores: Scores, indices: Indices, mask: Mask, grid_size: tuple[int, ...]
) -> Float[Array, "batch slots"]:
    """Softmax over the chosen experts that answered; with one slot, the chosen expert's probability among all experts.

    Over a single expert a softmax is 1 whatever its score, and a gate would learn nothing. So one expert of each sample
    is weighed as in Switch Transformer (Fedus, Zoph, Shazeer 2021, eq. 1 and 2), and what its weight leaves over lets
    the sample pass unchanged.
    """
    if indices.shape[1] > 1:
        return masked_softmax(gather_logits(scores, indices, grid_size), mask)
    # Parts that are each normalised make a sum that is.
    normalised = Scores(tuple(log_probabilities(part) for part in scores.logits))
    return probability_weights(gather_logits(normalised, indices, grid_size), mask)


def check_weights(router: Router, slots: int) -> None:
    """Raise RouterError unless a router's gate can learn with so many experts of each sample: if with one slot the
    weight is the same whatever the score, where with two it is not."""
    if slots == 1 and router.combine is not masked_softmax and _ignores_one(router.combine):
        raise RouterError(
            f"router {router.name!r}: with one expert of each sample (k_best=1) its weight is the same whatever the "
            "scores, so its gate would never learn; ask for 2 experts at least, or weigh by probabilities among all "
            "experts (`dmoe_jax.routing.weights.probability_weights`)"
        )


@functools.lru_cache(maxsize=64)
def _ignores_one(combine: Callable[..., Any]) -> bool:
    def feels(slots: int) -> bool:
        logits, mask = jnp.linspace(-0.7, -0.2, slots)[None], jnp.ones((1, slots), bool)
        return bool(jnp.any(jax.grad(lambda logits: combine(logits, mask)[0, 0])(logits)))

    try:
        with jax.ensure_compile_time_eval():
            return feels(2) and not feels(1)
    except Exception:  # a stranger's function; `check_router` says what is wrong with it
        return False


def router_loss(router: Router, scores: Scores, indices: Indices, mask: Mask, traffic: Traffic | None = None) -> Loss:
    """The router's auxiliary loss; models call this, never `router.aux_loss` itself.

    Args:
      scores, indices, mask: see `Router.aux_loss`.
      traffic: for routers that heed it. None: all experts that were asked have answered, and all are alike.
    """
    if router.heeds_traffic:
        return router.aux_loss(scores, indices, mask, traffic=traffic)
    return router.aux_loss(scores, indices, mask)


def dense_logits(scores: Scores) -> Float[Array, "batch num_experts"]:
    """g(x, f) for every cell f of the grid, flattened row-major."""
    total = scores.logits[0]
    for part in scores.logits[1:]:
        total = (total[:, :, None] + part[:, None, :]).reshape(total.shape[0], -1)
    return total


def _check_choice(k: int, alive: Alive | None, grid_size: tuple[int, ...]) -> None:
    num_experts = math.prod(grid_size)
    if not 1 <= k <= num_experts:
        raise ValueError(f"k must be between 1 and the {num_experts} cells of grid {grid_size}, got {k}")
    if alive is not None and alive.shape != grid_size:
        raise ValueError(f"alive must have the grid's shape {grid_size}, got {alive.shape}")


def living_logits(scores: Scores, k: int, alive: Alive | None, grid_size: tuple[int, ...]) -> Float[Array, "batch _"]:
    """Logits among which `select` chooses: g(x, f) plus its bias for every cell, -inf for the dead, without a gradient.

    Nobody is dead where `alive` is None. Raises ValueError if k, the experts for each sample, is not between 1 and the
    number of cells, or alive has another shape than the grid.
    """
    _check_choice(k, alive, grid_size)
    logits = dense_logits(scores)
    if scores.bias:
        logits += dense_logits(Scores(tuple(part[None] for part in scores.bias)))
    logits = jax.lax.stop_gradient(logits)
    return logits if alive is None else jnp.where(alive.reshape(1, -1), logits, -jnp.inf)


def best_cells(logits: Float[Array, "batch _"], k: int, grid_size: tuple[int, ...]) -> tuple[Indices, Mask]:
    """The coordinates of the k highest logits of each sample, best first, and whether they are above -inf."""
    best, flat = jax.lax.top_k(logits, k)
    return jnp.stack(jnp.unravel_index(flat, grid_size), axis=-1).astype(jnp.int32), ~jnp.isneginf(best)


def best_sums(logits: Logits, k: int, grid_size: tuple[int, ...]) -> tuple[Indices, Mask]:
    """Result of `best_cells` for the sums of additive logits, without a sum for every cell of the grid.

    Whoever is among the k best has coordinates among the k best of their dimensions, and a prefix among the k best
    prefixes: so k^2 sums for each dimension but the first will do (product keys, Lample et al. 2019, section 3.1). For
    320 x 320 experts and k of 16 these are 256 sums a sample instead of 102,400. Equal sums are ordered by coordinates,
    the lower first, unless only rounding makes them equal.
    """
    totals, cells = jnp.zeros((logits[0].shape[0], 1), logits[0].dtype), jnp.zeros((logits[0].shape[0], 1), jnp.int32)
    for part, size in zip(logits, grid_size, strict=True):
        # Prefixes and coordinates in ascending order: of equal sums `top_k` takes the first.
        totals, cells = _by_number(totals, cells, k)
        values, own = _by_number(part, jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), part.shape), k)
        totals = (totals[:, :, None] + values[:, None, :]).reshape(part.shape[0], -1)
        cells = (size * cells[:, :, None] + own[:, None, :]).reshape(part.shape[0], -1)
    best, places = jax.lax.top_k(totals, k)
    chosen = jnp.take_along_axis(cells, places, axis=-1)
    return jnp.stack(jnp.unravel_index(chosen, grid_size), axis=-1).astype(jnp.int32), ~jnp.isneginf(best)


def _by_number(
    values: Float[Array, "batch _"], numbers: Int32[Array, "batch _"], k: int
) -> tuple[Float[Array, "batch kept"], Int32[Array, "batch kept"]]:
    """The k highest values of each row, or all if there are no more, and their numbers, as they stood."""
    if values.shape[1] <= k:
        return values, numbers
    places = jnp.sort(jax.lax.top_k(values, k)[1], axis=-1)
    return jnp.take_along_axis(values, places, axis=-1), jnp.take_along_axis(numbers, places, axis=-1)


def select_top_k(
    scores: Scores, k: int, alive: Alive | None = None, *, grid_size: tuple[int, ...]
) -> tuple[Indices, Mask]:
    """The k live experts of highest g(x, f), its bias included.

    By exhaustive search over the dense grid, or where scores and bias are additive and nobody is dead by `best_sums`,
    once that is less work. Ties go to the lower coordinates. The result is a choice, not a function to differentiate:
    no gradient flows.

    Args:
      scores, k, alive, grid_size: see `living_logits`.

    Returns:
      indices [batch, k, dims], best first, and mask [batch, k]: False where fewer than k experts are alive, and for
      experts of score -inf (never to be chosen). The coordinates under a False are valid but mean nothing.

    Raises:
      ValueError: see `living_logits`.
    """
    logits, bias = scores.logits, scores.bias
    sums = math.prod(min(k, size) for size in grid_size[:2])
    is_additive = len(logits) > 1 and len(bias) in (0, len(logits))
    if alive is None and is_additive and _SUMS_ARE_WORTH * sums <= math.prod(grid_size):
        _check_choice(k, alive, grid_size)
        parts = tuple(part + own for part, own in zip(logits, bias, strict=True)) if bias else logits
        return best_sums(jax.lax.stop_gradient(parts), k, grid_size)
    return best_cells(living_logits(scores, k, alive, grid_size), k, grid_size)


def cell_numbers(indices: Any, grid_size: tuple[int, ...]) -> Int32[Array, "*cells"]:
    """Row-major numbers of cells from their coordinates, [..., dims]. Raises ValueError if the number of coordinates is
    not that of the grid's dimensions."""
    if indices.shape[-1] != len(grid_size):
        raise ValueError(f"grid {grid_size} needs {len(grid_size)} coordinates, got {indices.shape[-1]}")
    strides = [math.prod(grid_size[i + 1 :]) for i in range(len(grid_size))]
    return jnp.sum(indices * jnp.asarray(strides, indices.dtype), axis=-1, dtype=indices.dtype)


def gather_logits(scores: Scores, indices: Indices, grid_size: tuple[int, ...]) -> Float[Array, "batch slots"]:
    """g(x, f) of the chosen experts: sum_i g_i(x)[u_i] (Learning@home, section 3.2), or their flat scores; with their
    gradient."""
    numbers = cell_numbers(indices, grid_size)
    if len(scores.logits) != len(grid_size):
        return jnp.take_along_axis(scores.logits[0], numbers, axis=-1)
    parts = [jnp.take_along_axis(part, indices[..., i], axis=-1) for i, part in enumerate(scores.logits)]
    return sum(parts[1:], start=parts[0])


def masked_softmax(logits: Float[Array, "*batch k"], mask: Bool[Array, "*batch k"]) -> Float[Array, "*batch k"]:
    """Softmax over the cells whose mask is True, zero elsewhere.

    A row without a True gives zeros, and zero gradients: a sample whose experts are all silent must not poison the
    step with NaN. What stands in the masked cells (infinities, NaN) has no influence.
    """
    peak = jnp.max(logits, axis=-1, keepdims=True, where=mask, initial=-jnp.inf)
    peak = jax.lax.stop_gradient(jnp.where(jnp.isfinite(peak), peak, 0))
    # exp(-inf) is 0 with derivative 0; masking after the exponential instead would meet inf * 0 in the gradient.
    exponentials = jnp.exp(jnp.where(mask, logits - peak, -jnp.inf))
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    return exponentials / jnp.where(total > 0, total, 1)


def layer_norm(x: Float[Array, "*batch features"], epsilon: float = 1e-6) -> Float[Array, "*batch features"]:
    """Each row with mean 0 and variance 1, without gain and bias: the linear map that follows learns both.

    In float32 at least, and with the variance of the centred row: scores are where rounding decides who is chosen.
    """
    x = wide(x)
    return jax.nn.standardize(x, variance=jnp.var(x, axis=-1, keepdims=True), epsilon=epsilon)


def no_aux_loss(scores: Scores, indices: Indices, mask: Mask) -> Loss:
    """Zero: the auxiliary loss of a router without one."""
    del indices, mask
    return jnp.zeros((), scores.logits[0].dtype)


def top_k_router(
    name: str,
    grid_size: tuple[int, ...],
    init: Callable[..., PyTree],
    scores: Callable[..., Any],
    *,
    flat: bool = False,
    combine: Callable[..., Float[Array, "batch slots"]] = masked_softmax,
    aux_loss: Callable[..., Loss] = no_aux_loss,
) -> Router:
    """The usual router around a scoring function: top-k selection, and softmax over the chosen unless told otherwise.

    Args:
      name: what figures and logs call it.
      grid_size: extent of each dimension of the expert grid.
      init, scores, combine, aux_loss: see `Router`.
      flat: whether `scores` gives one logit for each cell instead of one for each coordinate.
    """
    return Router(
        name=name,
        grid_size=grid_size,
        init=init,
        scores=scores,
        select=functools.partial(select_top_k, grid_size=grid_size),
        combine=combine,
        aux_loss=aux_loss,
        whole_grid=flat and len(grid_size) > 1,
    )
