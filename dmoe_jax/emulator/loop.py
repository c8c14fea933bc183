"""The loop over events."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Int32

from dmoe_jax.emulator.state import Events

Handler = tuple[Callable[[Events, Any], Any], Callable[[Any, Events], Any]]
"""(whether an event is of this kind, what it does to a state)."""


def run_events(
    handlers: Sequence[Handler], events: Events, first: Any, last: Any, state: Any
) -> tuple[Int32[jax.Array, ""], Any]:
    """(`last`; the state after events `first` to `last`, each handled by the one handler that it is for).

    XLA copies what passes through a conditional, but a loop changes in place what it carries. So each handler is a loop
    that runs while the next event is of its kind, and around them a loop goes on until no event is left.
    """

    def event_at(place: Any) -> Events:
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False), events)

    def round_of_all(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        for matches, handle in handlers:

            def more(carry: tuple[Any, Any], matches: Any = matches) -> Any:
                place, state = carry
                return (place < last) & matches(event_at(place), state)

            def one(carry: tuple[Any, Any], handle: Any = handle) -> tuple[Any, Any]:
                place, state = carry
                return place + 1, handle(state, event_at(place))

            carry = jax.lax.while_loop(more, one, carry)
        return carry

    return jax.lax.while_loop(lambda carry: carry[0] < last, round_of_all, (first, state))


@functools.cache
def compiler_options(*, in_place: bool, same_kernels: bool) -> dict[str, Any] | None:
    """Compiler options for the loop, on CPUs only: other backends have none.

    XLA's newer library for products and sums on CPUs (YNNPACK) shares out small operations among cores, which makes a
    run half as fast on two cores as on one: it is switched off where it can be, and so is the sharing out of the older
    one's products, which costs a twentieth of the time even on a single core.

    Args:
      in_place: whether XLA must see that it may change a place of an array without a copy of the array, although
        nothing but the order in which the operations are written keeps the write behind the reads.
      same_kernels: leave that library on, as nodes and trainers have it: sums are rounded in the same order then.

    Returns: None: there are no such options.
    """
    if jax.default_backend() != "cpu":
        return None
    small: dict[str, Any] = {}
    if not same_kernels:
        small = _accepted({"xla_cpu_experimental_ynn_fusion_type": ""})
        small |= _accepted({"xla_cpu_multi_thread_eigen": False})
    if not in_place:
        return small or None
    regions = _accepted({"xla_cpu_copy_insertion_use_region_analysis": True})
    return {**small, **regions} if regions else None


def _accepted(options: dict[str, Any]) -> dict[str, Any]:
    try:
        jax.jit(lambda value: value, compiler_options=options).lower(0).compile()
    except (jax.errors.JaxRuntimeError, ValueError):  # a version of XLA without it
        return {}
    return options
