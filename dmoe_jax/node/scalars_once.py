"""A function that is computed a second time inside a branch, without computing its single numbers a second time.

XLA shares nothing between a branch and what is around it. So a function whose outcome decides whether a branch computes
it once more goes through its reductions twice: an optimiser through the norm of all gradients, and through every other
number that it takes from a whole array. These numbers are few; the branch can be given them.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

T = TypeVar("T")

Again = Callable[..., Any]
"""(scalars, *arguments) -> the result, with these scalars in place of those that it would compute."""


def scalars_once(function: Callable[..., T], *arguments: Any) -> tuple[T, list[Any], Again]:
    """Compute a function of arrays; to be traced.

    Args:
      function: of `arguments`, to a tree of arrays; traced once.
      arguments: trees of arrays.

    Returns: its result; the scalars on the way to it; and what computes the result again from the scalars and
      arguments of the same shapes.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    jaxpr, structure = closed.jaxpr, jax.tree.structure(shapes)
    is_scalar = [all(getattr(var.aval, "shape", None) == () for var in equation.outvars) for equation in jaxpr.eqns]
    others = [equation for equation, small in zip(jaxpr.eqns, is_scalar, strict=True) if not small]
    needed = {id(var) for equation in others for var in equation.invars} | {id(var) for var in jaxpr.outvars}
    found = [equation.outvars for equation, small in zip(jaxpr.eqns, is_scalar, strict=True) if small]
    scalars = [var for outvars in found for var in outvars if id(var) in needed]
    first = jaxpr.replace(outvars=[*jaxpr.outvars, *scalars])
    second = jaxpr.replace(invars=[*jaxpr.invars, *scalars], eqns=others)

    def again(scalars: list[Any], *arguments: Any) -> Any:
        results = jaxpr_as_fun(ClosedJaxpr(second, closed.consts))(*jax.tree.leaves(arguments), *scalars)
        return jax.tree.unflatten(structure, results)

    results = jaxpr_as_fun(ClosedJaxpr(first, closed.consts))(*jax.tree.leaves(arguments))
    count = len(jaxpr.outvars)
    return jax.tree.unflatten(structure, results[:count]), results[count:], again
