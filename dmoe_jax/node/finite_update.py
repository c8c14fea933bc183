"""An update that leaves parameters and optimiser state as they were where its outcome would not be finite.

What an optimiser makes of finite gradients may be anything, so its outcome is looked at, every number of it, before any
of the old state is given up. On a CPU the outcome is computed twice: once inside the reduction that looks at it, which
stores nothing, and once more in place, inside a branch. Selecting between old and new instead, number by number,
stores the outcome before it is known to be good: with Adam two and a half times the memory of the parameters, and up to
twice the time of the whole step. A GPU would wait for the host to take the branch, so there numbers are selected.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.experimental.layout import Layout as ArrayLayout
from jax.experimental.layout import with_layout_constraint

from dmoe_jax.arrays import in_type_of
from dmoe_jax.types import PyTree

State = tuple[PyTree, PyTree]
"""Parameters and optimiser state."""
Step = Callable[[State, PyTree], State]
"""(state, gradients) -> the state after the optimiser's step."""


def update_unless_not_finite(
    optimizer: optax.GradientTransformationExtraArgs,
    state: State,
    grads: PyTree,
    input_grads: tuple[Any, ...],
    staleness: Any,
    *,
    is_whole: bool,
) -> tuple[Any, State]:
    """Take an optimiser step, if it and the gradients that go back to the trainer are finite.

    Args:
      optimizer: is given `staleness`.
      state: to be donated to the program that this is traced into.
      grads: of the parameters; on one device, `laid_out`.
      input_grads: of the expert's inputs; nothing is done with them.
      staleness: float32.
      is_whole: the state lies on one device, not spread over several.

    Returns: (bool [2]: the update, and the input gradients, are finite; the new state, or the old one).
    """

    def step(state: State, grads: PyTree) -> State:
        params, opt_state = state
        # In the types that they had: a state that changed its type would be compiled for again.
        updates, new_state = optimizer.update(grads, opt_state, params, staleness=staleness)
        return jax.tree.map(in_type_of, (optax.apply_updates(params, updates), new_state), state)

    zeros = jax.tree.map(jnp.zeros_like, input_grads)
    outcome = step(state, grads)
    finite = jnp.stack(
        [stays_finite(old, new, is_whole=is_whole) for old, new in ((state, outcome), (zeros, input_grads))]
    )
    branched, selected = functools.partial(_branched, step), functools.partial(_selected, step)
    new = jax.lax.platform_dependent(state, grads, finite.all(), cpu=branched, default=selected)
    return finite, cast(State, new)


def laid_out(grads: PyTree) -> PyTree:
    """Gradients as parameters lie in memory, computed once; for a state on one device.

    XLA would take a product's transpose as it comes, and the branch would then read it across; and it would compute the
    gradients of a single row anew wherever they are used. Either takes half as long again.
    """
    return jax.lax.optimization_barrier(jax.tree.map(_in_rows, grads))


def stays_finite(old: PyTree, new: PyTree, *, is_whole: bool) -> Any:
    """Whether no number became NaN or infinite. What was so before may stay: some optimisers start from infinity.

    Args:
      is_whole: as of `update_unless_not_finite`.
    """
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    sound = [
        jnp.isfinite(after) | ~jnp.isfinite(before)
        for before, after in pairs
        if jnp.issubdtype(before.dtype, jnp.inexact)
    ]
    if is_whole:
        # Arrays of one shape, such as a parameter and its moments, at once: what they are computed from is read once.
        by_shape: dict[tuple[int, ...], list[Any]] = {}
        for each in sound:
            by_shape.setdefault(each.shape, []).append(each)
        sound = [functools.reduce(jnp.logical_and, alike) for alike in by_shape.values()]
    return jnp.stack([each.all() for each in sound] or [jnp.array(True)]).all()


def _branched(step: Step, state: State, grads: PyTree, is_good: Any) -> State:
    return cast(State, jax.lax.cond(is_good, step, lambda state, grads: state, state, grads))


def _selected(step: Step, state: State, grads: PyTree, is_good: Any) -> State:
    return cast(State, jax.tree.map(functools.partial(jnp.where, is_good), step(state, grads), state))


def _in_rows(grad: Any) -> Any:
    if grad.ndim < 2:
        return grad
    return with_layout_constraint(grad, ArrayLayout(tuple(range(grad.ndim))))
