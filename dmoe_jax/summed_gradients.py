"""Gradients added to a sum where it lies, as the last thing that the program does which computes them.

A table whose rows a step looks up gets the gradients of these rows alone: JAX scatters them into zeros, as many as the
table has numbers. If the table has a gradient already, of a softmax tied to it, say, that one is as large, and to add
the two is a third pass over so much memory. The rows may as well be scattered into what is there.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.extend.core.primitives import broadcast_in_dim_p, jit_p, scatter_add_p


def plus_sums(function: Callable[..., Sequence[Any]], sums: Sequence[Any], *arguments: Any) -> list[Any]:
    """`function(*arguments)`, each result added to its sum; to be traced.

    Args:
      function: of trees of arrays, to a flat sequence of arrays.
      sums: an array for each result, of its shape and type, or None: the result is wanted as it is.
      arguments: trees of arrays.
    """
    if all(own is None for own in sums):
        return list(function(*arguments))
    results, is_added = _evaluate(jax.make_jaxpr(function)(*arguments), jax.tree.leaves(arguments), sums)
    return [
        result if own is None or added else own + result
        for result, own, added in zip(results, sums, is_added, strict=True)
    ]


def _evaluate(closed: ClosedJaxpr, arguments: Iterable[Any], sums: Sequence[Any]) -> tuple[list[Any], list[bool]]:
    """The results of a traced function, and which of them were scattered into their sums and so have them in them."""
    jaxpr = closed.jaxpr
    values: dict[Var, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arguments), strict=True))

    def read(atom: Var | Literal) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    zeros = {equation.outvars[0] for equation in jaxpr.eqns if _is_zeros(equation)}
    uses, added = _uses(jaxpr), set[Var]()
    # Not what something else reads as well: that would read the sum.
    own_sums = {
        var: own
        for var, own in zip(jaxpr.outvars, sums, strict=True)
        if isinstance(var, Var) and own is not None and uses[var] == 1
    }
    for equation in jaxpr.eqns:
        given, into = [*map(read, equation.invars)], [own_sums.get(var) for var in equation.outvars]
        if all(own is None for own in into):
            results = _carried_out(jaxpr, equation, given)
        elif equation.primitive is jit_p:  # such as `jnp.take`
            results, is_added = _evaluate(equation.params["jaxpr"], given, into)
            added |= {var for var, done in zip(equation.outvars, is_added, strict=True) if done}
        elif equation.primitive is scatter_add_p and equation.invars[0] in zeros:
            results = _carried_out(jaxpr, equation, [*into, *given[1:]])
            added |= set(equation.outvars)
        else:
            results = _carried_out(jaxpr, equation, given)
        values |= zip(equation.outvars, results, strict=True)
    return [read(var) for var in jaxpr.outvars], [isinstance(var, Var) and var in added for var in jaxpr.outvars]


def _carried_out(jaxpr: Jaxpr, equation: JaxprEqn, given: Sequence[Any]) -> list[Any]:
    """The results of one equation of a function."""
    inputs = {var: value for var, value in zip(equation.invars, given, strict=True) if isinstance(var, Var)}
    alone = jaxpr.replace(
        constvars=[], invars=[*inputs], outvars=equation.outvars, eqns=[equation], effects=equation.effects
    )
    return list(jaxpr_as_fun(ClosedJaxpr(alone, []))(*inputs.values()))


def _is_zeros(equation: JaxprEqn) -> bool:
    if equation.primitive is not broadcast_in_dim_p:
        return False
    filled_with = equation.invars[0]
    return isinstance(filled_with, Literal) and bool(filled_with.val == 0)


def _uses(jaxpr: Jaxpr) -> Counter[Var]:
    """How often each variable is read, by equations or as a result."""
    read = [*jaxpr.outvars, *(atom for equation in jaxpr.eqns for atom in equation.invars)]
    return Counter(atom for atom in read if isinstance(atom, Var))
