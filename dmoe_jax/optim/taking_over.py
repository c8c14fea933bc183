"""Going over to the whole state of another peer, in the place of an update.

A training loop hands its averager the state of its optimiser, and not its parameters to change. So what is taken from
another peer is that peer's state of the optimiser with its parameters in it; the next update brings them here.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from dmoe_jax.types import PyTree

Update = Callable[..., tuple[PyTree, Any]]
"""(updates, state, params, **extra) -> (updates, state)."""


class Taken(NamedTuple):
    """Parameters that were taken from another peer.

    Attributes:
      params: the other's.
      waits: True if they wait for the next update.
    """

    params: PyTree
    waits: Bool[Array, ""]


def goes_over(update: Update) -> Update:
    """An update that leads to the parameters in `state.taken`, if they wait there, and changes nothing else then.

    Its gradient is of the parameters before, and is dropped. Where there are no such parameters, `taken` is None
    and costs nothing.
    """

    @wraps(update)
    def updated(grads: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        if state.taken is None:
            return update(grads, state, params, **extra)
        taken, before = state.taken, state._replace(taken=None)
        updates, after = update(grads, before, params, **extra)
        over = jax.tree.map(_way, params, updates, taken.params, is_leaf=is_masked)
        updates = optax.tree.where(taken.waits, over, updates)
        after = optax.tree.where(taken.waits, before, after)
        return updates, after._replace(taken=taken._replace(waits=jnp.zeros_like(taken.waits)))

    return updated


def is_masked(leaf: Any) -> bool:
    """True for the placeholder of a leaf that `optax.masked` keeps from a transformation."""
    return isinstance(leaf, optax.MaskedNode)


def _way(own: Any, like: Any, new: Any) -> Any:
    """From a peer's own array to another's, as an update; what is masked out stays its own."""
    return own if is_masked(own) else (new - own).astype(like.dtype)
