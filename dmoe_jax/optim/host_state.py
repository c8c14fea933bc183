"""Averaging by the host: what an optimiser's state offers to others between updates, and receives from them.

`moshpit_average`, `noloco` and `streaming_diloco` leave averaging to the host unless they are given an `average`:

    if averaging_due(opt_state):
        sent = what_to_send(opt_state, params)
        averaged = await ...                                              # training may go on meanwhile
        opt_state = with_average(opt_state, sent, averaged)               # None: the network failed

and the next update applies what came. A training loop hands its averager the state of its optimiser, and not its
parameters to change; so what is *taken* whole from another peer is that peer's state with its parameters in it, and the
next update goes over to them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from dmoe_jax.arrays import PyTree
from dmoe_jax.optim.compression import ErrorFeedback
from dmoe_net.wire.sparse import SparseBlocks


class Taken(NamedTuple):
    """Parameters of another peer to go over to; `waits` is True until an update has done so."""

    params: PyTree
    waits: Bool[Array, ""]


class Sent(NamedTuple):
    """A peer's offer to its group.

    Attributes:
      tree: arrays of its own, in the shapes of the parameters. Compressed, it is what receivers decode, in float32.
      steps, samples: updates and samples behind it; samples are None unless weighted.
      whole: the tree before the residual was added; None without compression, as the next two.
      parts: the part that travels, for `dmoe_jax.optim.compression.sparse_vector`.
      residual: the part that is kept back if the averaging comes to something.
    """

    tree: PyTree
    steps: Int[Array, ""]
    samples: Float[Array, ""] | None = None
    whole: PyTree = None
    parts: tuple[SparseBlocks, ...] | None = None
    residual: PyTree = None

    @property
    def weight(self) -> Float[Array, ""]:
        """Weight in the mean: its samples if weighted, else 1."""
        return jnp.ones(()) if self.samples is None else self.samples

    @property
    def uncompressed(self) -> PyTree:
        """The tree as the peer itself has it."""
        return self.tree if self.whole is None else self.whole


class HostState(ABC):
    """State of an optimiser that leaves averaging to the host. Named tuples, which cannot inherit, are registered.

    It offers *fragments* of the model, each averaged by itself; most have one, number 0.
    """

    kind: str
    """The thing that is averaged: "parameters", "gradients", "pseudo_gradients", "streaming" or "noloco"."""
    feedback: ErrorFeedback | None
    """Compression of what is offered; None: it travels whole."""
    due: Bool[Array, "..."]
    """True for each fragment after whose last averaging enough updates were made."""
    rounds: Int[Array, ""]
    """Averagings so far, with lost ones, or what grows with them: whoever has less is behind."""
    arrived: Bool[Array, "..."] | None
    """True where an average waits for the next update; None if the optimiser was made with `average`."""
    taken: Taken | None
    """None unless the optimiser is to go over to another peer's parameters."""

    @abstractmethod
    def offer(self, params: PyTree, fragment: int) -> Sent:
        """This peer's offer of a fragment now, in arrays of its own."""

    @abstractmethod
    def receive(self, sent: Sent, averaged: PyTree | None, fragment: int) -> "HostState":
        """The state in which the next update applies the outcome; see `with_average`."""

    @abstractmethod
    def emptied(self) -> "HostState":
        """The state without anything to offer yet, or under way; all else stays."""

    @abstractmethod
    def _replace(self, *, taken: Taken | None) -> "HostState": ...


def host_state(opt_state: PyTree) -> HostState:
    """The one state that averages in the state of what is composed around it."""
    found = [each for each in jax.tree.leaves(opt_state, is_leaf=_is_state) if _is_state(each)]
    if len(found) != 1:
        raise ValueError(
            "expected the state of an optimiser with one moshpit_average, noloco or streaming_diloco in it, "
            f"found {len(found)}"
        )
    state: HostState = found[0]
    return state


def awaiting_host(opt_state: PyTree) -> HostState:
    """`host_state`, if the host averages for its optimiser."""
    state = host_state(opt_state)
    if state.arrived is None:
        raise ValueError("this optimiser was made with `average` and averages by itself")
    return state


def averaging_due(opt_state: PyTree, fragment: int | None = None) -> bool:
    """True if enough updates were made since the last averaging of the fragment (None: of any) began.

    Waits for the update that says so. It stays true until `with_average`; the host knows if an averaging is under way.
    """
    state = host_state(opt_state)
    if state.arrived is None:
        return False
    ready = state.due & ~state.arrived  # what came late is used before its fragment leaves again
    return bool(ready.any() if fragment is None else ready.reshape(-1)[fragment])


def what_to_send(opt_state: PyTree, params: PyTree, *, fragment: int = 0) -> Sent:
    """This peer's offer now; copies, so that later steps may donate their arguments.

    Raises:
      ValueError: an average that arrived was not applied yet, and would count twice; or the optimiser averages itself.
    """
    state = awaiting_host(opt_state)
    assert state.arrived is not None
    if not isinstance(state.arrived, jax.core.Tracer) and state.arrived.reshape(-1)[fragment]:
        raise ValueError("an average has arrived and not been applied: call update or apply_average first")
    return state.offer(params, fragment)


def with_average(opt_state: PyTree, sent: Sent, averaged: PyTree | None, *, fragment: int = 0) -> PyTree:
    """The state in which the next update applies the outcome. May be jitted, with the fragment static.

    Args:
      opt_state: the state now, some updates after `what_to_send` perhaps.
      averaged: the average, arrays of any floating type; None: there is none. One that is not finite is lost, too.

    Raises:
      ValueError: it has another structure or other shapes than what was sent, or the optimiser averages itself.
    """
    awaiting_host(opt_state)
    if averaged is not None:
        check_like(averaged, sent.tree)
    return _map_states(lambda state: state.receive(sent, averaged, fragment), opt_state)


def apply_average(
    optimizer: optax.GradientTransformation, opt_state: PyTree, params: PyTree, **extra: Any
) -> tuple[PyTree, PyTree]:
    """Parameters and state after what arrived is applied, before the next gradient. Without it the next update does.

    Around the transformation only what is stateless may be composed, such as clipping: the rest would count a step.
    `extra` are further arguments of the optimiser's `update`.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, opt_state = optimizer.update(zeros, opt_state, params, without_gradient=True, **extra)
    return optax.apply_updates(params, updates), opt_state


def without_gathered(tree: PyTree) -> PyTree:
    """Another peer's state without its own offers: what the other has gathered, the other will send."""
    return _map_states(lambda state: state.emptied(), tree)


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


def gone_over(params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
    """Parameters and state of a loop that goes over to what was taken at once, and not by its next update."""
    taken = host_state(opt_state).taken
    return params if taken is None else taken.params, without_taken(opt_state)


def masked_like(tree: PyTree, like: PyTree) -> PyTree:
    """The tree without what `optax.masked` has kept from a transformation whose state has `like`."""
    return jax.tree.map(lambda own, leaf: own if _is_masked(own) else leaf, like, tree, is_leaf=_is_masked)


def check_like(averaged: PyTree, sent: PyTree) -> None:
    """Raise `ValueError` where an average has another structure or other shapes than what was sent."""
    structure: Any = jax.tree.structure(sent)
    if jax.tree.structure(averaged) != structure:
        raise ValueError(f"expected an average of the structure {structure}, got {averaged!r:.200}")
    named = jax.tree_util.tree_leaves_with_path(averaged)
    for (path, leaf), own in zip(named, jax.tree.leaves(sent), strict=True):
        if jnp.shape(leaf) != jnp.shape(own):
            name = jax.tree_util.keystr(path)
            raise ValueError(f"the average{name} has the shape {jnp.shape(leaf)}, what was sent {jnp.shape(own)}")


def _is_state(each: Any) -> bool:
    return isinstance(each, HostState)


def _map_states(function: Callable[[HostState], HostState], tree: PyTree) -> PyTree:
    return jax.tree.map(lambda each: function(each) if _is_state(each) else each, tree, is_leaf=_is_state)


def averaging_optimizer(
    name: str, init: Callable[[PyTree], Any], update: Callable[..., tuple[PyTree, Any]]
) -> optax.GradientTransformationExtraArgs:
    """The transformation of these functions. Where parameters wait in `state.taken`, its update goes over to them.

    The gradient, of the parameters before, is dropped then, and all else stays.
    """

    def updated(grads: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        if params is None:
            raise ValueError(f"{name} wants the parameters: update(grads, state, params)")
        if state.taken is None:
            return update(grads, state, params, **extra)
        taken, before = state.taken, state._replace(taken=None)
        updates, after = update(grads, before, params, **extra)
        over = jax.tree.map(_way, params, updates, taken.params, is_leaf=_is_masked)
        updates = optax.tree.where(taken.waits, over, updates)
        after = optax.tree.where(taken.waits, before, after)
        return updates, after._replace(taken=taken._replace(waits=jnp.zeros_like(taken.waits)))

    return optax.GradientTransformationExtraArgs(init, updated)


def _is_masked(leaf: Any) -> bool:
    """True for the placeholder of a leaf that `optax.masked` keeps from a transformation."""
    return isinstance(leaf, optax.MaskedNode)


def _way(own: Any, like: Any, new: Any) -> Any:
    """The update from a peer's own array to another's; what is masked out stays its own."""
    return own if _is_masked(own) else (new - own).astype(like.dtype)
