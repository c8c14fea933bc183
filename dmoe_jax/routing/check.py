"""Does a router keep to its contract? Asked before a run begins, so that a mistake gets a sentence and not a crash.

A router may be anybody's three lines of Python. Its functions are tried once on a few samples, in training and in
evaluation, with all experts alive and with some of them dead.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax.routing.base import Router, RouterError, as_scores, cell_numbers, combine_weights, gather_logits, score

_BATCH, _FIRST = 3, 16


def check_router(
    router: Any, grid_size: tuple[int, ...], d_model: int | None = None, *, in_order: bool = False
) -> None:
    """Make sure that a router routes on this grid.

    Args:
      router: what is to be checked.
      grid_size: extents of the experts' grid.
      d_model: width of the samples; with it the router's functions are tried on a few random samples. None: only its
        type and grid are looked at.
      in_order: whether the samples of a batch are the tokens of a text, each of which predicts the next. Then what
        becomes of a sample may not depend on the samples behind it; needs d_model.

    Raises:
      RouterError: naming the router and what is wrong: another grid, a wrong shape or dtype, NaN, an expert selected
        twice for a sample, weights that are negative or exceed 1, a look at later samples, or what one of its functions
        raised.
    """
    if not isinstance(router, Router):
        raise RouterError(f"expected a Router, got {type(router).__name__}: {router!r}")
    if router.grid_size != grid_size:
        raise RouterError(f"router {router.name!r} is for grid {router.grid_size}, the model's grid is {grid_size}")
    try:
        hash(router)  # caches of compiled code know a router by its functions
    except TypeError as error:
        raise RouterError(f"router {router.name!r}: its functions must be hashable: {error}") from error
    if d_model is not None:
        try:
            _try(router, d_model)
            if in_order:
                _try_order(router, d_model)
        except RouterError:
            raise
        except ValueError as error:
            trial = f"in a trial of {_BATCH} samples on grid {router.grid_size}"
            raise RouterError(f"router {router.name!r}: {trial}: {error}") from error


def check_finite(router: Router, logits: tuple[np.ndarray, ...], where: str) -> None:
    """Raise RouterError unless the scores that a router gave `where`, such as in "layer0", are numbers. -inf is one:
    never choose this expert. They are on the host."""
    for part in logits:
        bad = np.isnan(part) | np.isposinf(part)
        if bad.any():
            what = "NaN" if np.isnan(part).any() else "+inf"
            raise RouterError(
                f"router {router.name!r}: {int(bad.sum())} of {part.size} scores in {where} are {what}, expected "
                "finite numbers or -inf"
            )


@functools.lru_cache(maxsize=64)
def _try(router: Router, d_model: int) -> None:
    num_experts = math.prod(router.grid_size)
    params = _call("init", router.init, jax.random.key(0), d_model)
    x = jax.random.normal(jax.random.key(1), (_BATCH, d_model))
    ids = jnp.arange(_BATCH, dtype=jnp.int32)
    # One dead expert at most: somebody must be left.
    alive = jnp.ones(num_experts, bool).at[0].set(num_experts == 1).reshape(router.grid_size)
    # Compiled, as in a model: what only works on concrete numbers fails here too.
    trial = jax.jit(functools.partial(_trial, router, min(2, num_experts)))
    for key, living in ((jax.random.key(2), None), (None, alive)):
        logits, indices, mask, answers = jax.tree.map(np.asarray, trial(params, x, ids, key, living))
        check_finite(router, logits, "a trial batch")
        if (indices < 0).any() or (indices >= np.array(router.grid_size)).any():
            raise ValueError(f"select returned indices outside grid {router.grid_size}")
        if living is not None and not np.asarray(living)[tuple(indices[mask].T)].all():
            raise ValueError("select chose an expert that is not alive")
        for sample, (chosen, is_used) in enumerate(zip(indices, mask, strict=True)):
            experts, counts = np.unique(chosen[is_used], axis=0, return_counts=True)
            if (counts > 1).any():
                twice = tuple(experts[np.argmax(counts)].tolist())
                raise ValueError(f"select chose expert {twice} more than once for sample {sample}")
        for case in range(len(answers[0])):
            _check_answer(mask, *jax.tree.map(operator.itemgetter(case), answers))


@functools.lru_cache(maxsize=64)
def _try_order(router: Router, d_model: int) -> None:
    """Raise ValueError if scores, experts or weights of a few samples change with those behind them."""

    def routed(params: Any, x: Any, ids: Any, key: Any) -> list[Any]:
        scores = score(router, params, x, key=key, ids=ids)
        indices, mask = router.select(scores, 1)
        weights = combine_weights(router, scores, indices, mask)
        cells = jnp.where(mask, cell_numbers(indices, router.grid_size), -1)
        return [part[:_FIRST] for part in (cells, weights, *scores.logits)]

    rng = np.random.default_rng(0)

    def moved(leaf: Any) -> Any:  # far from initial values such as 0, which hide what matters
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return np.asarray(leaf) + rng.normal(size=leaf.shape).astype(leaf.dtype)

    params = jax.tree.map(moved, router.init(jax.random.key(0), d_model))
    x = rng.normal(size=(8, 2 * _FIRST, d_model)).astype(np.float32)
    ids = rng.integers(0, 99, (8, 2 * _FIRST)).astype(np.int32)
    x[:, :_FIRST], ids[:, :_FIRST] = x[0, :_FIRST], ids[0, :_FIRST]
    trial = jax.jit(routed)
    for key in (jax.random.key(2), None):
        expected, *others = (trial(params, *case, key) for case in zip(x, ids, strict=True))
        found = [parts for other in others for parts in zip(expected, other, strict=True)]
        if not all(np.allclose(*parts, atol=1e-5, equal_nan=True) for parts in found):
            raise ValueError(
                "who serves a sample depends on the samples behind it in the batch. Where tokens are routed, these are "
                "the words that it is to predict: route sequences, or take a router that looks at each sample alone"
            )


def _trial(router: Router, k: int, params: Any, x: Any, ids: Any, key: Any, alive: Any) -> Any:
    """All of a router's functions in a row; what their results' shapes and dtypes say is checked while tracing."""
    raw = _call("scores", router.scores, params, x, key=key, ids=ids)
    scores = as_scores(raw, router.grid_size, _BATCH)
    indices, mask = _check_selection(_call("select", router.select, scores, k, alive), len(router.grid_size))

    def outcome(params: Any, x: Any, answered: Any) -> tuple[Any, tuple[Any, Any]]:
        scores = score(router, params, x, key=key, ids=ids)
        weights = _call("combine", router.combine, gather_logits(scores, indices, router.grid_size), answered)
        if getattr(weights, "shape", None) != answered.shape:
            got = getattr(weights, "shape", type(weights).__name__)
            raise ValueError(f"combine must return weights {answered.shape}, one for each expert, got {got}")
        loss = _call("aux_loss", router.aux_loss, scores, indices, answered)
        if jnp.shape(loss) != ():
            raise ValueError(f"aux_loss must return a scalar, got shape {jnp.shape(loss)}")
        # Not the plain sum of the weights, which is 1 whatever the scores: each weight counts differently.
        return jnp.sum(weights * jnp.arange(1.0, weights.size + 1).reshape(weights.shape)) + loss, (weights, loss)

    # All answer, the best one does not, nobody does. As a loop of XLA it is compiled once.
    answered = jnp.stack([mask, mask.at[:, 0].set(False), jnp.zeros_like(mask)])
    gradient = functools.partial(jax.grad(outcome, argnums=(0, 1), has_aux=True), params, x)
    grads, (weights, losses) = jax.lax.map(gradient, answered)
    return scores.logits, indices, mask, (answered, weights, losses, grads)


def _call(name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return the result of one of the router's functions; an exception becomes a ValueError that names the function."""
    try:
        return function(*args, **options)
    except Exception as error:  # a stranger's code may raise anything
        reason = str(error).strip().splitlines()
        raise ValueError(f"{name} raised {type(error).__name__}: {reason[0] if reason else 'no message'}") from error


def _check_selection(chosen: Any, dims: int) -> tuple[Any, Any]:
    try:
        indices, mask = chosen
        fits = indices.shape[0] == _BATCH and indices.shape[2:] == (dims,) and mask.shape == indices.shape[:2]
    except (TypeError, ValueError, AttributeError, IndexError):
        fits, indices, mask = False, None, None
    if not fits:
        parts = chosen if isinstance(chosen, tuple) else (chosen,)
        got = ", ".join(str(getattr(part, "shape", type(part).__name__)) for part in parts)
        raise ValueError(
            f"select must return indices [{_BATCH}, slots, {dims}] and mask [{_BATCH}, slots] for {_BATCH} samples, "
            f"got {got}"
        )
    if indices.dtype != jnp.int32 or mask.dtype != jnp.bool_:
        raise ValueError(f"select must return int32 indices and a bool mask, got {indices.dtype} and {mask.dtype}")
    return indices, mask


def _check_answer(mask: np.ndarray, answered: np.ndarray, weights: np.ndarray, loss: np.generic, grads: Any) -> None:
    sound = np.isfinite(weights).all() and (weights >= 0).all() and (weights.sum(axis=1) <= 1 + 1e-4).all()
    if not sound or (weights[~answered] != 0).any():
        raise ValueError(
            "combine must return weights of at least 0 that sum to at most 1, and 0 where the mask is False, got "
            f"{weights.tolist()}"
        )
    if not np.isfinite(loss):
        raise ValueError(f"aux_loss must be finite, got {loss}")
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads)):
        raise ValueError(
            "the gradient of its weights and aux_loss is NaN or infinite when "
            f"{np.count_nonzero(mask & ~answered)} of {np.count_nonzero(mask)} selected experts are silent"
        )
