"""Which of its arguments a function reads at all, and gradients of those alone.

A stage of a model reads a few of the trunk's arrays. Gradients of the others are zeros, as long as these arrays, and
adding them up would cost more than all the rest.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Var

from dmoe_jax.types import PyTree


def used_leaves(function: Callable[..., PyTree], read: PyTree, *rest: PyTree) -> Sequence[bool]:
    """For each leaf of `read`, whether something that `function(*rest, read)` returns may depend on it."""

    def shape(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    args = jax.tree.map(shape, (read, rest))
    jaxpr = jax.make_jaxpr(lambda read, rest: function(*rest, read))(*args).jaxpr
    needed = {var for var in jaxpr.outvars if isinstance(var, Var)}
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed.update(var for var in equation.invars if isinstance(var, Var))
    return [var in needed for var in jaxpr.invars[: len(jax.tree.leaves(read))]]


def vjp_of_used(
    function: Callable[[PyTree], tuple[PyTree, Any]], read: PyTree, used: Sequence[bool]
) -> tuple[PyTree, Callable[[PyTree], Sequence[Any]], Any]:
    """`jax.vjp` of a function with an auxiliary output, for the leaves of `read` that it uses.

    Returns: (output, from its gradient to those of the leaves that are used, in order; auxiliary output).
    """
    leaves, treedef = jax.tree.flatten(read)

    def of_used(chosen: Sequence[Any]) -> tuple[PyTree, Any]:
        ways = iter(chosen)
        merged = [next(ways) if is_used else leaf for leaf, is_used in zip(leaves, used, strict=True)]
        return function(jax.tree.unflatten(treedef, merged))

    chosen = [leaf for leaf, is_used in zip(leaves, used, strict=True) if is_used]
    output, pull, aux = jax.vjp(of_used, chosen, has_aux=True)
    return output, lambda gradient: pull(gradient)[0], aux
