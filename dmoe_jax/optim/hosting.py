"""Averaging by the host: what an optimiser offers to others between updates, and what it makes of their answer.

`moshpit_average`, `noloco` and `streaming_diloco` leave averaging to the host unless they are given an `average`. They
offer *fragments*: one, or with Streaming DiLoCo several, each of which is averaged by itself. The host does

    if averaging_due(opt_state):
        sent = what_to_send(opt_state, params)
        averaged = await ...                                              # training may go on meanwhile
        opt_state = with_average(opt_state, sent, averaged)               # None: the network failed
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import optax

from dmoe_jax.optim import moshpit, moshpit_state
from dmoe_jax.optim.compression import ErrorFeedback
from dmoe_jax.optim.moshpit_state import MoshpitState, Sent
from dmoe_jax.optim.noloco import NoLoCoState
from dmoe_jax.optim.streaming_diloco import StreamingDiLoCoState
from dmoe_jax.optim.taking_over import Taken
from dmoe_jax.types import PyTree

HostState = MoshpitState | NoLoCoState | StreamingDiLoCoState
"""State of an optimiser that averages."""


def host_state(opt_state: PyTree) -> HostState:
    """The one in the state of what is composed around it.

    Raises:
      ValueError: there is none that averages, or more than one.
    """
    found = list(_states_of(opt_state))
    if len(found) != 1:
        raise ValueError(
            "expected the state of an optimiser with one moshpit_average, noloco or streaming_diloco in it, "
            f"found {len(found)}"
        )
    return found[0]


def averages_by_host(opt_state: PyTree) -> bool:
    """Whether the host has to average for this optimiser; else it was made with `average`."""
    return host_state(opt_state).arrived is not None


def averaged_kind(opt_state: PyTree) -> str:
    """What the optimiser averages: "parameters", "gradients", "pseudo_gradients", "streaming" or "noloco".

    Raises:
      ValueError: see `host_state`.
    """
    state = host_state(opt_state)
    match state:
        case NoLoCoState():
            return "noloco"
        case StreamingDiLoCoState():
            return "streaming"
        case _:
            return moshpit.averaged_kind(state)


def num_fragments(opt_state: PyTree) -> int:
    """How many parts of the model are averaged by themselves."""
    state = host_state(opt_state)
    return len(state.under_way) if isinstance(state, StreamingDiLoCoState) else 1


def averaging_due(opt_state: PyTree, fragment: int | None = None) -> bool:
    """Whether enough updates were made since the last averaging began. Waits for the update that says so.

    It stays true until `with_average`; whether an averaging is under way the host knows.

    Args:
      opt_state: of the optimiser, or of what is composed around it.
      fragment: of which one; None: of any.
    """
    state = host_state(opt_state)
    due = state.due
    if due is None:
        return False
    if isinstance(state, StreamingDiLoCoState) and state.arrived is not None:
        due = due & ~state.arrived  # what came late waits for its update, and is used before the fragment leaves again
    return bool(due.any() if fragment is None or due.ndim == 0 else due[fragment])


def what_to_send(
    opt_state: PyTree, params: PyTree, *, fragment: int = 0, feedback: ErrorFeedback | None = None
) -> Sent:
    """What this peer offers now; copies, so that later steps may donate their arguments.

    Args:
      fragment: of which one.
      feedback: how it is compressed; what `moshpit_average` was given as `compress`.

    Raises:
      ValueError: an average that arrived was not applied yet, or `feedback` is not the optimiser's.
    """
    state = host_state(opt_state)
    if isinstance(state, MoshpitState):
        return moshpit_state.what_to_send(state, params, feedback=feedback)
    if feedback is not None:
        raise ValueError(f"{averaged_kind(state)} is not compressed, and feedback is {feedback}")
    if state.arrived is None:
        raise ValueError("this optimiser was made with `average` and averages by itself")
    if not isinstance(state.arrived, jax.core.Tracer) and state.arrived.reshape(-1)[fragment]:
        raise ValueError("an average has arrived and not been applied: call update or apply_average first")
    return state.offer(params) if isinstance(state, NoLoCoState) else state.offer(params, fragment)


def with_average(opt_state: PyTree, sent: Sent, averaged: PyTree | None, *, fragment: int = 0) -> PyTree:
    """The state in which a next update applies the outcome. May be jitted, with the fragment static.

    Args:
      opt_state: as it is now, some updates after `what_to_send` perhaps.
      sent: what was offered.
      averaged: what came of it, arrays of any floating type; None: nothing. If any of it is not finite it is lost too.
      fragment: of which one.

    Raises:
      ValueError: it has another structure or other shapes than what was sent, or the transformation averages by itself.
    """
    if not averages_by_host(opt_state):
        raise ValueError("this optimiser was made with `average` and averages by itself")

    def received(state: HostState) -> HostState:
        match state:
            case NoLoCoState():
                return state.receive(sent, averaged)
            case StreamingDiLoCoState():
                return state.receive(sent, averaged, fragment)
            case _:
                changed: MoshpitState = moshpit.with_average(state, sent, averaged)
                return changed

    return _map_states(received, opt_state)


def without_gathered(tree: PyTree) -> PyTree:
    """A tree in which no averaging optimiser has anything to offer yet; all else stays.

    A peer that takes over another's state needs it: what the other has gathered, the other will send.
    """

    def emptied(state: HostState) -> HostState:
        if isinstance(state, MoshpitState):
            gathered: MoshpitState = moshpit_state.without_gathered(state)
            return gathered
        return state.emptied()

    return _map_states(emptied, tree)


def rounds_of(opt_state: PyTree) -> int:
    """Averagings so far of an optimiser that the host averages for, or for NoLoCo the updates before the last one.
    Waits until the number is computed."""
    state = host_state(opt_state)
    count = state.offered if isinstance(state, NoLoCoState) else state.rounds
    return 0 if count is None else int(count)


def taken_over(params: PyTree, opt_state: PyTree) -> PyTree:
    """Another peer's state of an optimiser, in which the next update goes over to that peer's parameters."""
    taken = Taken(params, jnp.ones((), bool))
    return _map_states(lambda state: state._replace(taken=taken), without_gathered(opt_state))


def is_going_over(opt_state: PyTree) -> bool:
    """True if another peer's parameters wait for the next update. Waits until the last update is computed."""
    taken = host_state(opt_state).taken
    return taken is not None and bool(taken.waits)


def without_taken(opt_state: PyTree) -> PyTree:
    """The state without parameters of another peer."""
    return _map_states(lambda state: state._replace(taken=None), opt_state)


def offered_trees(optimizer: optax.GradientTransformation, params: PyTree) -> list[PyTree]:
    """Names, shapes and types of what the optimiser offers of each fragment."""

    def trees(params: PyTree) -> list[PyTree]:
        state = host_state(optimizer.init(params))
        if isinstance(state, MoshpitState):
            return [state.part(params)]
        return [what_to_send(state, params, fragment=number).tree for number in range(num_fragments(state))]

    shapes: list[PyTree] = jax.eval_shape(trees, params)
    return shapes


def _is_state(each: Any) -> TypeGuard[HostState]:
    return isinstance(each, MoshpitState | NoLoCoState | StreamingDiLoCoState)


def _states_of(tree: PyTree) -> Iterator[HostState]:
    return filter(_is_state, jax.tree.leaves(tree, is_leaf=_is_state))


def _map_states(function: Callable[[HostState], HostState], tree: PyTree) -> PyTree:
    return jax.tree.map(lambda each: function(each) if _is_state(each) else each, tree, is_leaf=_is_state)
