"""Routers by name. To add one: write its file and add a line to `ROUTERS`."""

from collections.abc import Callable

from dmoe_jax.routing.base import Router, RouterError
from dmoe_jax.routing.expert_choice import expert_choice
from dmoe_jax.routing.flat_top_k import flat_top_k
from dmoe_jax.routing.frozen_random import frozen_random
from dmoe_jax.routing.hash_router import hash_router
from dmoe_jax.routing.noisy_top_k import noisy_top_k
from dmoe_jax.routing.peer import peer
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.routing.switch import switch
from dmoe_jax.routing.uniform_random import uniform_random
from dmoe_jax.routing.user_file import load_router

ROUTERS: dict[str, Callable[[tuple[int, ...]], Router]] = {
    "product_key": product_key,
    "flat_top_k": flat_top_k,
    "noisy_top_k": noisy_top_k,
    "switch": switch,
    "expert_choice": expert_choice,
    "hash": hash_router,
    "frozen_random": frozen_random,
    "peer": peer,
    "uniform_random": uniform_random,
}
"""Name -> factory, called with the grid size alone."""


def make_router(spec: str, grid_size: tuple[int, ...]) -> Router:
    """The router of this name, or out of this file; equal arguments return the same object.

    Args:
      spec: a name in `ROUTERS`, or "path/to/file.py:attribute" (see `user_file`).
      grid_size: extent of each dimension of the expert grid.

    Raises:
      RouterError: naming the spec, if there is no such router.
      ValueError: if grid_size is not one or more positive integers.
    """
    if spec in ROUTERS:
        return ROUTERS[spec](grid_size)
    if ":" in spec or spec.endswith(".py"):
        return load_router(spec, grid_size)
    raise RouterError(
        f"unknown router {spec!r}; expected one of {', '.join(ROUTERS)}, or a file: 'path/to/file.py:attribute'"
    )
