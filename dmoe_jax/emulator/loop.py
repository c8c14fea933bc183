"""The loop over events."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dmoe_jax.emulator.state import Events, SwarmState

Handler = tuple[Callable[[Events, SwarmState], Any], Callable[[SwarmState, Events], SwarmState]]
"""(whether an event is of this kind, what it does)."""


def run_events(handlers: Sequence[Handler], events: Events, count: Any, state: SwarmState) -> SwarmState:
    """The state after the first `count` events, each handled by the one handler that it is for.

    XLA copies what passes through a conditional, but a loop changes in place what it carries. So each handler is a loop
    that runs while the next event is of its kind, and around them a loop goes on until no event is left.
    """

    def event_at(place: Any) -> Events:
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False), events)

    def round_of_all(carry: tuple[Any, SwarmState]) -> tuple[Any, SwarmState]:
        for matches, handle in handlers:

            def more(carry: tuple[Any, SwarmState], matches: Any = matches) -> Any:
                place, state = carry
                return (place < count) & matches(event_at(place), state)

            def one(carry: tuple[Any, SwarmState], handle: Any = handle) -> tuple[Any, SwarmState]:
                place, state = carry
                return place + 1, handle(state, event_at(place))

            carry = jax.lax.while_loop(more, one, carry)
        return carry

    _, state = jax.lax.while_loop(lambda carry: carry[0] < count, round_of_all, (jnp.int32(0), state))
    return state
