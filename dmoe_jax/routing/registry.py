"""Routers by name. To add one: write its file and add a line to `ROUTERS`."""

import difflib
from collections.abc import Callable
from pathlib import Path

from dmoe_jax.experts.user_file import UserFileError, call_user, load_from_file
from dmoe_jax.routing.balancing import balanced, balanced_product_key
from dmoe_jax.routing.base import Router, RouterError, router_factory
from dmoe_jax.routing.check import check_router
from dmoe_jax.routing.combinators import chain_routers, with_balancing_loss
from dmoe_jax.routing.deepseek_v3 import deepseek_v3
from dmoe_jax.routing.expert_choice import expert_choice
from dmoe_jax.routing.frozen_random import frozen_random
from dmoe_jax.routing.hash_router import hash_router
from dmoe_jax.routing.noisy_top_k import noisy_top_k
from dmoe_jax.routing.peer import peer
from dmoe_jax.routing.product_key import flat_top_k, product_key
from dmoe_jax.routing.switch import switch
from dmoe_jax.routing.uniform_random import uniform_random

ROUTERS: dict[str, Callable[[tuple[int, ...]], Router]] = {
    "product_key": product_key,
    "balanced": balanced_product_key,
    "flat_top_k": flat_top_k,
    "noisy_top_k": noisy_top_k,
    "switch": switch,
    "expert_choice": expert_choice,
    "hash": hash_router,
    "frozen_random": frozen_random,
    "peer": peer,
    "deepseek_v3": deepseek_v3,
    "uniform_random": uniform_random,
}
"""Name -> factory, called with the grid size alone."""

BALANCERS: dict[str, Callable[..., Router]] = {"balanced": balanced, "balance": with_balancing_loss}
"""Suffix -> combinator, called with the router and the number behind the suffix, or at its defaults:
"product_key+balanced" is `balanced(product_key(grid_size))`, "switch+balance=0.1" is
`with_balancing_loss(switch(grid_size), 0.1)`. The names are those that the combinators give the router,
with the number behind them."""

_UNNAMED = {"linen", "nnx"}
"""Names that the Flax adapters give to a router that its author did not name."""


def make_router(spec: str, grid_size: tuple[int, ...]) -> Router:
    """The router of this name, or out of this file; equal arguments return the same object.

    Args:
      spec: a name in `ROUTERS`, perhaps with suffixes of `BALANCERS` ("product_key+balanced", "peer+balance=0.1": the
        bias's speed, the loss's weight), which then are part of the router's name; or
        "path/to/file.py:attribute" (see `experts.user_file`), the attribute a Router, or a function from grid_size to
        a Router.
      grid_size: extent of each dimension of the expert grid.

    Raises:
      RouterError: naming the spec, if there is no such router.
      ValueError: if grid_size is not one or more positive integers.
    """
    name, *suffixes = spec.split("+")
    if name in ROUTERS and BALANCERS.keys() >= {suffix.partition("=")[0] for suffix in suffixes}:
        return chain_routers(ROUTERS[name](grid_size), *map(_balancer, suffixes))
    if spec == "soft_moe":
        raise RouterError(
            "soft_moe chooses no experts for a sample, it mixes samples into slots: no routing function, and none for "
            "language models, where words would see those after them; MLPConfig.slots_per_expert has it "
            "(dmoe_jax/mixture/soft.py)"
        )
    if ":" not in spec and not spec.endswith(".py"):
        near = difflib.get_close_matches(name, ROUTERS, n=1)
        guess = f" (did you mean {near[0]}?)" if near else ""
        raise RouterError(
            f"unknown router {spec!r}{guess}; expected one of {', '.join(ROUTERS)}, perhaps with "
            f"+{' or +'.join(BALANCERS)} and =NUMBER, or a file: 'path/to/file.py:attribute'"
        )
    try:
        found = load_from_file(spec, kind="router")
        if not isinstance(found, Router) and callable(found):
            found = call_user(spec, found, grid_size, kind="router")
        check_router(found, grid_size)
    except UserFileError as error:
        raise RouterError(str(error)) from error.__cause__
    except RouterError as error:
        raise RouterError(f"router {spec!r}: {error}") from error
    path, _, attribute = spec.rpartition(":")
    return found._replace(name=f"{Path(path).name}:{attribute}") if found.name in _UNNAMED else found


def _balancer(suffix: str) -> Callable[[Router], Router]:
    name, equals, number = suffix.partition("=")
    if not equals:
        return BALANCERS[name]
    try:
        value = float(number)
    except ValueError:
        raise RouterError(f"+{suffix}: expected a number behind the =, got {number!r}") from None
    return lambda router: _with_number(router, name, value)


@router_factory
def _with_number(router: Router, name: str, value: float) -> Router:
    try:
        made = BALANCERS[name](router, value)
    except ValueError as error:
        raise RouterError(f"+{name}={value:g}: {error}") from None
    return made._replace(name=f"{made.name}={value:g}")
