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
def small_operations() -> dict[str, Any] | None:
    """Compiler options under which XLA does not share out small operations among cores, if it has such options.

    Its newer library for products and sums on CPUs (YNNPACK) does so by default, which makes a run half as fast on two
    cores as on one.
    """
    options = {"xla_cpu_experimental_ynn_fusion_type": ""}
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(lambda value: value, compiler_options=options).lower(0).compile()
    except (jax.errors.JaxRuntimeError, ValueError):  # a version of XLA without it
        return None
    return options
