"""The state of `optim.moshpit`: what is counted, what is offered to others, and what becomes of their answer."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from dmoe_jax.arrays import all_finite, wide
from dmoe_jax.optim.compression import ErrorFeedback, compress
from dmoe_jax.optim.taking_over import Taken, is_masked
from dmoe_jax.types import PyTree
from net.wire.sparse import SparseBlocks

_compress = jax.jit(compress, static_argnums=2)
"""On the host it is one program then, and not a hundred small ones with all of their results in memory."""

_TINY = float(jnp.finfo(jnp.float32).tiny)


class MoshpitState(NamedTuple):
    """State of `moshpit_average`. Fields that a setting does not need are None.

    Attributes:
      inner: of the optimiser inside.
      steps: updates since those whose outcome was offered last.
      samples: behind what would be offered now; None unless weighted. For parameters and pseudo-gradients, all since
        the last averaging that was not lost: what a lost one offered is still in them.
      due: whether enough updates were made for the next averaging.
      rounds: averagings so far, with lost ones; the number of the next.
      lost: averagings that came to nothing: the network failed, or gave what is not finite.
      arrived: whether `incoming` waits for the next update; None where the host has no part.
      incoming: what arrived. Of parameters: the average less what was sent. Of gradients: their average. Of
        pseudo-gradients: a pair, their average and what was sent.
      accumulated: the sum of gradients, each times its samples if weighted; in float32 at least.
      anchor: the parameters that pseudo-gradients count from.
      outer: of the outer optimiser.
      residual: what compression has kept back, float32; None without compression.
      taken: parameters of another peer to go over to; None: there are none.
    """

    inner: PyTree
    steps: Int[Array, ""]
    samples: Float[Array, ""] | None
    due: Bool[Array, ""]
    rounds: Int[Array, ""]
    lost: Int[Array, ""]
    arrived: Bool[Array, ""] | None
    incoming: PyTree
    accumulated: PyTree
    anchor: PyTree
    outer: PyTree
    residual: PyTree = None
    taken: Taken | None = None

    def part(self, params: PyTree) -> PyTree:
        """The parameters that are averaged: under `optax.masked` or `optax.multi_transform` not all of the model's."""
        like = [tree for tree in (self.accumulated, self.anchor, self.incoming) if tree is not None]
        return masked_like(params, like[0]) if like else params


class Sent(NamedTuple):
    """What a peer offers to its group.

    Attributes:
      tree: of the shapes of the parameters, in arrays of its own. Compressed, it is what receivers decode, in float32.
      steps: updates behind it.
      samples: behind it; None unless weighted.
      whole: what was compressed, before the residual was added; None without compression, as the next two.
      parts: what travels of it, for `dmoe_jax.optim.compression.sparse_vector`.
      residual: what is kept back if the averaging comes to something.
    """

    tree: PyTree
    steps: Int[Array, ""]
    samples: Float[Array, ""] | None
    whole: PyTree = None
    parts: tuple[SparseBlocks, ...] | None = None
    residual: PyTree = None

    @property
    def weight(self) -> Float[Array, ""]:
        """What it counts in the mean: its samples if weighted, else 1."""
        return jnp.ones(()) if self.samples is None else self.samples


def _is_state(each: Any) -> TypeGuard[MoshpitState]:
    return isinstance(each, MoshpitState)


def map_state(function: Callable[[MoshpitState], MoshpitState], tree: PyTree) -> PyTree:
    """The tree with what the function makes of each `MoshpitState` in it; all else stays."""
    return jax.tree.map(lambda each: function(each) if _is_state(each) else each, tree, is_leaf=_is_state)


def find_state(opt_state: PyTree) -> MoshpitState:
    """The one in the state of what is composed around it. Raises `ValueError` unless there is exactly one."""
    leaves = jax.tree.leaves(opt_state, is_leaf=_is_state)
    found = [leaf for leaf in leaves if _is_state(leaf)]
    if len(found) != 1:
        raise ValueError(f"expected the state of an optimiser with one moshpit_average in it, found {len(found)}")
    return found[0]


def what_to_send(opt_state: PyTree, params: PyTree, *, feedback: ErrorFeedback | None = None) -> Sent:
    """What this peer offers now; copies, so that later steps may donate their arguments.

    Args:
      feedback: how it is compressed; what `moshpit_average` was given as `compress`.

    Raises:
      ValueError: an average that arrived was not applied yet: it would count twice. Or there is a residual and no
        `feedback`, or the other way round.
    """
    state = find_state(opt_state)
    params = state.part(params)
    if (state.residual is None) != (feedback is None):
        kind = "without" if state.residual is None else "with"
        raise ValueError(f"the optimiser was made {kind} `compress`, and feedback is {feedback}")
    if state.arrived is not None and not isinstance(state.arrived, jax.core.Tracer) and jnp.any(state.arrived):
        raise ValueError("an average has arrived and not been applied: call update or apply_average first")
    if state.accumulated is not None:
        count = jnp.maximum(wide(state.steps) if state.samples is None else state.samples, _TINY)
        tree = typed_like(jax.tree.map(lambda total: total / count, state.accumulated), params)
    elif state.anchor is not None:
        tree = typed_like(jax.tree.map(lambda anchor, own: wide(anchor) - own, state.anchor, params), params)
    else:
        tree = jax.tree.map(jnp.array, params)
    samples = None if state.samples is None else jnp.array(state.samples)
    steps = jnp.array(state.steps)
    if feedback is None:
        return Sent(tree, steps, samples)
    sent = _compress(tree, state.residual, feedback)
    return Sent(sent.tree, steps, samples, tree, sent.parts, sent.residual)


def counted(state: MoshpitState, grads: PyTree, samples: ArrayLike | None, every: int) -> MoshpitState:
    """The state after one more gradient."""
    steps = state.steps + 1
    state = state._replace(steps=steps, due=steps >= every)
    if samples is not None:
        assert state.samples is not None
        state = state._replace(samples=state.samples + jnp.asarray(samples, jnp.float32))
    if state.accumulated is not None:
        amount = jnp.ones(()) if samples is None else jnp.asarray(samples, jnp.float32)
        added = jax.tree.map(lambda total, new: total + wide(new) * amount, state.accumulated, grads)
        state = state._replace(accumulated=added)
    return state


def receive(state: MoshpitState, sent: Sent, averaged: PyTree | None) -> tuple[PyTree, Bool[Array, ""], MoshpitState]:
    """(what the next update is to apply, whether there is anything, the state without what was sent).

    Raises:
      ValueError: the average has another structure or other shapes than what was sent.
    """
    if averaged is not None:
        check_like(averaged, sent.tree)
    own = jax.tree.map(wide, sent.tree if sent.whole is None else sent.whole)
    new = own if averaged is None else jax.tree.map(wide, averaged)
    is_good = jnp.asarray(averaged is not None) & all_finite(new)
    if state.accumulated is not None:
        # Without an average, the step with the peer's own gradients; none if these are no numbers either.
        incoming = optax.tree.where(is_good, new, own)
        is_there = all_finite(incoming)
    elif state.anchor is not None:
        is_good &= all_finite(own)
        incoming, is_there = (new, own), is_good
    else:
        incoming = jax.tree.map(jnp.subtract, new, own)
        is_good &= all_finite(incoming)
        is_there = is_good
    state = _without(state, sent, is_good)
    if sent.residual is not None:
        # A lost averaging leaves the residual: what it offered is offered again, or was the peer's own step.
        is_good &= all_finite(sent.residual)
        state = state._replace(residual=optax.tree.where(is_good, sent.residual, state.residual))
    state = state._replace(due=jnp.zeros((), bool), rounds=state.rounds + 1, lost=state.lost + ~is_good)
    return incoming, is_there, state


def _without(state: MoshpitState, sent: Sent, is_good: Bool[Array, ""]) -> MoshpitState:
    """The state without what was sent: what came after it is for the next averaging."""
    steps = state.steps - sent.steps
    samples = None if state.samples is None or sent.samples is None else state.samples - sent.samples
    if state.accumulated is None:
        if samples is not None and state.samples is not None:
            samples = jnp.where(is_good, samples, state.samples)
        return state._replace(steps=steps, samples=samples)
    count = wide(sent.steps) if sent.samples is None else sent.samples
    whole = sent.tree if sent.whole is None else sent.whole
    rest = jax.tree.map(lambda total, mean: total - wide(mean) * count, state.accumulated, whole)
    # Nothing came: exactly zero, without rounding. A gradient that is no number ends with the averaging it was in.
    is_kept = (steps > 0) & all_finite(rest)
    return state._replace(
        steps=jnp.where(is_kept, steps, 0),
        samples=None if samples is None else jnp.where(is_kept, samples, 0),
        accumulated=optax.tree.where(is_kept, rest, optax.tree.zeros_like(rest)),
    )


def without_gathered(tree: PyTree) -> PyTree:
    """A tree in which no `MoshpitState` has anything to offer yet; all else stays.

    A peer that takes over another's state needs it: what the other has gathered, the other will send.
    """

    def emptied(state: MoshpitState) -> MoshpitState:
        gathered = (state.steps, state.samples, state.due, state.accumulated, state.residual)
        steps, samples, due, accumulated, residual = jax.tree.map(jnp.zeros_like, gathered)
        return state._replace(steps=steps, samples=samples, due=due, accumulated=accumulated, residual=residual)

    return map_state(emptied, tree)


def masked_like(tree: PyTree, like: PyTree) -> PyTree:
    """The tree without what `optax.masked` has kept from a transformation whose state has `like`."""
    return jax.tree.map(lambda own, leaf: own if is_masked(own) else leaf, like, tree, is_leaf=is_masked)


def check_like(averaged: PyTree, sent: PyTree) -> None:
    """Raises `ValueError` where an average has another structure or other shapes than what was sent."""
    structure: Any = jax.tree.structure(sent)
    if jax.tree.structure(averaged) != structure:
        raise ValueError(f"expected an average of the structure {structure}, got {averaged!r:.200}")
    named = jax.tree_util.tree_leaves_with_path(averaged)
    for (path, leaf), own in zip(named, jax.tree.leaves(sent), strict=True):
        if jnp.shape(leaf) != jnp.shape(own):
            name = jax.tree_util.keystr(path)
            raise ValueError(f"the average{name} has the shape {jnp.shape(leaf)}, what was sent {jnp.shape(own)}")


def typed_like(tree: PyTree, like: PyTree) -> PyTree:
    """The tree in the types of another of its structure."""
    return jax.tree.map(lambda leaf, own: leaf.astype(jnp.asarray(own).dtype), tree, like)
