"""The state of `optim.moshpit`: what is counted, what is offered to others, and what becomes of their answer."""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from dmoe_jax.arrays import all_finite, typed_like, wide
from dmoe_jax.optim.compression import ErrorFeedback, compress
from dmoe_jax.optim.host_state import HostState, Sent, masked_like
from dmoe_jax.optim.taking_over import Taken
from dmoe_jax.types import PyTree

_compress = jax.jit(compress, static_argnums=2)
"""On the host it is one program then, and not a hundred small ones with all of their results in memory."""

_TINY = float(jnp.finfo(jnp.float32).tiny)


@HostState.register
class MoshpitState(NamedTuple):
    """State of `moshpit_average`; see `state_type`. Fields that a setting does not need are None.

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

    @property
    def kind(self) -> str:
        if self.accumulated is not None:
            return "gradients"
        return "parameters" if self.anchor is None else "pseudo_gradients"

    @property
    def feedback(self) -> ErrorFeedback | None:
        return None

    def offer(self, params: PyTree, fragment: int = 0) -> Sent:
        del fragment
        # Under `optax.masked` or `optax.multi_transform` not all of the model's parameters are averaged.
        like = [tree for tree in (self.accumulated, self.anchor, self.incoming) if tree is not None]
        params = masked_like(params, like[0]) if like else params
        if self.accumulated is not None:
            count = jnp.maximum(wide(self.steps) if self.samples is None else self.samples, _TINY)
            tree = typed_like(jax.tree.map(lambda total: total / count, self.accumulated), params)
        elif self.anchor is not None:
            tree = typed_like(jax.tree.map(lambda anchor, own: wide(anchor) - own, self.anchor, params), params)
        else:
            tree = jax.tree.map(jnp.array, params)
        samples = None if self.samples is None else jnp.array(self.samples)
        steps = jnp.array(self.steps)
        if self.feedback is None:
            return Sent(tree, steps, samples)
        sent = _compress(tree, self.residual, self.feedback)
        return Sent(sent.tree, steps, samples, tree, sent.parts, sent.residual)

    def receive(self, sent: Sent, averaged: PyTree | None, fragment: int = 0) -> "MoshpitState":
        del fragment
        incoming, is_there, state = self.outcome(sent, averaged)
        # Copies: later steps may donate the state, and the arrays that were given are the caller's.
        return state._replace(incoming=jax.tree.map(jnp.array, incoming), arrived=is_there)

    def emptied(self) -> "MoshpitState":
        gathered = (self.steps, self.samples, self.due, self.accumulated, self.residual)
        steps, samples, due, accumulated, residual = jax.tree.map(jnp.zeros_like, gathered)
        return self._replace(steps=steps, samples=samples, due=due, accumulated=accumulated, residual=residual)

    def counted(self, grads: PyTree, samples: ArrayLike | None, every: int) -> "MoshpitState":
        """The state after one more gradient."""
        steps = self.steps + 1
        state = self._replace(steps=steps, due=steps >= every)
        if samples is not None:
            assert self.samples is not None
            state = state._replace(samples=self.samples + jnp.asarray(samples, jnp.float32))
        if self.accumulated is not None:
            amount = jnp.ones(()) if samples is None else jnp.asarray(samples, jnp.float32)
            added = jax.tree.map(lambda total, new: total + wide(new) * amount, self.accumulated, grads)
            state = state._replace(accumulated=added)
        return state

    def outcome(self, sent: Sent, averaged: PyTree | None) -> tuple[PyTree, Bool[Array, ""], "MoshpitState"]:
        """(what the next update is to apply, True if there is anything, the state without what was sent)."""
        own = jax.tree.map(wide, sent.uncompressed)
        new = own if averaged is None else jax.tree.map(wide, averaged)
        is_good = jnp.asarray(averaged is not None) & all_finite(new)
        if self.accumulated is not None:
            # Without an average, the step with the peer's own gradients; none if these are no numbers either.
            incoming = optax.tree.where(is_good, new, own)
            is_there = all_finite(incoming)
        elif self.anchor is not None:
            is_good &= all_finite(own)
            incoming, is_there = (new, own), is_good
        else:
            incoming = jax.tree.map(jnp.subtract, new, own)
            is_good &= all_finite(incoming)
            is_there = is_good
        state = self._without(sent, is_good)
        if sent.residual is not None:
            # A lost averaging leaves the residual: what it offered is offered again, or was the peer's own step.
            is_good &= all_finite(sent.residual)
            state = state._replace(residual=optax.tree.where(is_good, sent.residual, self.residual))
        state = state._replace(due=jnp.zeros((), bool), rounds=self.rounds + 1, lost=self.lost + ~is_good)
        return incoming, is_there, state

    def _without(self, sent: Sent, is_good: Bool[Array, ""]) -> "MoshpitState":
        """The state without what was sent: what came after it is for the next averaging."""
        steps = self.steps - sent.steps
        samples = None if self.samples is None or sent.samples is None else self.samples - sent.samples
        if self.accumulated is None:
            if samples is not None and self.samples is not None:
                samples = jnp.where(is_good, samples, self.samples)
            return self._replace(steps=steps, samples=samples)
        count = wide(sent.steps) if sent.samples is None else sent.samples
        rest = jax.tree.map(lambda total, mean: total - wide(mean) * count, self.accumulated, sent.uncompressed)
        # Nothing came: exactly zero, without rounding. A gradient that is no number ends with the averaging it was in.
        is_kept = (steps > 0) & all_finite(rest)
        return self._replace(
            steps=jnp.where(is_kept, steps, 0),
            samples=None if samples is None else jnp.where(is_kept, samples, 0),
            accumulated=optax.tree.where(is_kept, rest, optax.tree.zeros_like(rest)),
        )


@cache
def state_type(feedback: ErrorFeedback | None) -> type[MoshpitState]:
    """The states of optimisers that compress so. The settings belong to the type: a state says by itself how it is
    compressed, and a checkpoint has its arrays alone."""
    if feedback is None:
        return MoshpitState

    class CompressedMoshpitState(MoshpitState):
        __slots__ = ()

        feedback = property(lambda self: feedback)

        def __reduce__(self) -> tuple[Any, ...]:  # pickle would look for the type by its name
            return _remade, (feedback, *self)

    return CompressedMoshpitState


def _remade(feedback: ErrorFeedback, *fields: Any) -> MoshpitState:
    return state_type(feedback)(*fields)
