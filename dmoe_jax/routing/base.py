"""What a router is, and the arithmetic that every router shares.

A `Router` is a NamedTuple of pure functions, made by a factory, in the way an Optax transformation is: its
parameters travel outside it, so a router can be swapped in one line and compared. It never knows whether its
experts are local or remote. Scores are additive over the dimensions of the expert grid, g(x, f) = sum_i
g_i(x)[u_i] (Learning@home, section 3.2), because beam search over a DHT can then extend prefixes by their
partial sums alone.

Two paths lead from scores to a mixture, and both end in `combine`:

    select (dense grid, inside jit)     indices, mask ─┐
    beam search (through the DHT)       indices, mask ─┴─> gather_logits -> combine -> weights

Gradients reach the router through the weights of the experts that answered, and through nothing else.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

PyTree = Any
Scores = tuple[Float[Array, "batch _"], ...]
"""One array [batch, grid_i] for each dimension of the expert grid."""


class Router(NamedTuple):
    """A routing function: pure functions and two static facts.

    Attributes:
      name: what figures and logs call it.
      grid_size: extent of each dimension of the expert grid.
      init: (key, d_model) -> params.
      scores: (params, x [batch, d_model], *, key=None) -> tuple of [batch, grid_i]; `key` is for routers that
        add noise.
      select: (scores, k, alive=None) -> (indices int32 [batch, k, dims], mask bool [batch, k]); see
        `select_top_k`.
      combine: (logits [batch, k], mask [batch, k]) -> weights [batch, k]; zero where the mask is False.
      aux_loss: (scores, indices, mask) -> scalar, added to the loss (load balancing and the like).
    """

    name: str
    grid_size: tuple[int, ...]
    init: Callable[..., PyTree]
    scores: Callable[..., Scores]
    select: Callable[..., tuple[Int32[Array, "batch k dims"], Bool[Array, "batch k"]]]
    combine: Callable[..., Float[Array, "batch k"]]
    aux_loss: Callable[..., Float[Array, ""]]


def check_grid_size(grid_size: tuple[int, ...] | list[int]) -> tuple[int, ...]:
    """The grid size as a tuple of Python integers.

    Raises:
      ValueError: if it is empty or an extent is not a positive integer.
    """
    sizes = tuple(grid_size)
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"grid_size must be one or more positive integers, got {grid_size!r}")
    return sizes


def split_scores(raw: Any, grid_size: tuple[int, ...]) -> Scores:
    """Scores in the router's form, from what a scoring network returned.

    Args:
      raw: [batch, sum(grid_size)], or already a sequence of [batch, grid_i].
      grid_size: extent of each dimension of the expert grid.

    Raises:
      ValueError: if the widths do not fit the grid.
    """
    if isinstance(raw, tuple | list):
        widths = tuple(part.shape[-1] for part in raw)
        if widths != grid_size:
            raise ValueError(f"a scoring network for grid {grid_size} must return these widths, got {widths}")
        return tuple(raw)
    if raw.shape[-1] != sum(grid_size):
        raise ValueError(
            f"a scoring network for grid {grid_size} must return {sum(grid_size)} scores a sample, got {raw.shape[-1]}"
        )
    edges = [sum(grid_size[:i]) for i in range(1, len(grid_size))]
    return tuple(jnp.split(raw, edges, axis=-1))


def dense_logits(scores: Scores) -> Float[Array, "batch num_experts"]:
    """g(x, f) for every cell f of the grid, flattened row-major."""
    batch = scores[0].shape[0]
    total = scores[0]
    for part in scores[1:]:
        total = (total[:, :, None] + part[:, None, :]).reshape(batch, -1)
    return total


def select_top_k(
    scores: Scores, k: int, alive: Bool[Array, "..."] | None = None
) -> tuple[Int32[Array, "batch {k} dims"], Bool[Array, "batch {k}"]]:
    """The k live experts of highest g(x, f), by exhaustive search over the dense grid.

    Ties go to the lower coordinates. The result is a choice, not a function to differentiate: no gradient flows.

    Args:
      scores: one [batch, grid_i] for each dimension.
      k: experts for each sample.
      alive: bool of shape grid_size, or None if every cell holds a live expert.

    Returns:
      indices [batch, k, dims], best first, and mask [batch, k]: False where fewer than k experts are alive. The
      coordinates under a False are valid but mean nothing.

    Raises:
      ValueError: if k is not between 1 and the number of cells, or alive has another shape than the grid.
    """
    grid_size = tuple(part.shape[-1] for part in scores)
    num_experts = math.prod(grid_size)
    if not 1 <= k <= num_experts:
        raise ValueError(f"k must be between 1 and the {num_experts} cells of grid {grid_size}, got {k}")
    if alive is not None and alive.shape != grid_size:
        raise ValueError(f"alive must have the grid's shape {grid_size}, got {alive.shape}")
    logits = jax.lax.stop_gradient(dense_logits(scores))
    if alive is not None:
        logits = jnp.where(alive.reshape(1, -1), logits, -jnp.inf)
    _, flat = jax.lax.top_k(logits, k)
    mask = jnp.ones(flat.shape, bool) if alive is None else alive.reshape(-1)[flat]
    indices = jnp.stack(jnp.unravel_index(flat, grid_size), axis=-1).astype(jnp.int32)
    return indices, mask


def gather_logits(scores: Scores, indices: Int32[Array, "batch k dims"]) -> Float[Array, "batch k"]:
    """g(x, f) = sum_i g_i(x)[u_i] of the chosen experts (Learning@home, section 3.2). Differentiable in the
    scores."""
    if indices.shape[-1] != len(scores):
        raise ValueError(f"indices name {indices.shape[-1]} coordinates, the scores have {len(scores)} dimensions")
    parts = [jnp.take_along_axis(part, indices[..., i], axis=-1) for i, part in enumerate(scores)]
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


def no_aux_loss(
    scores: Scores, indices: Int32[Array, "batch k dims"], mask: Bool[Array, "batch k"]
) -> Float[Array, ""]:
    """Zero: the auxiliary loss of a router without one."""
    del indices, mask
    return jnp.zeros((), scores[0].dtype)


def top_k_router(
    name: str, grid_size: tuple[int, ...], init: Callable[..., PyTree], scores: Callable[..., Scores]
) -> Router:
    """The usual router around a scoring function: top-k selection, softmax over the chosen, no auxiliary loss."""
    return Router(
        name=name,
        grid_size=grid_size,
        init=init,
        scores=scores,
        select=select_top_k,
        combine=masked_softmax,
        aux_loss=no_aux_loss,
    )
