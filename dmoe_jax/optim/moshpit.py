"""Moshpit SGD (Ryabinin et al., NeurIPS 2021, algorithm 2) as an Optax transformation around any optimiser.

Under `jit` nothing waits: the outcome of an averaging arrives as state, and the next update applies it.

    optimizer = moshpit_average(optax.adam(1e-3), every=32)
    updates, opt_state = optimizer.update(grads, opt_state, params)       # jitted, as ever
    opt_state = await averager.step(opt_state, params)                    # over the network, see `dmoe_jax.averaging`

Over anything else than our network, the last line becomes the loop of `dmoe_jax.optim.host_state`. Parameters have
moved by then. So the difference between the average and what was sent is applied, and progress made meanwhile stays (as
in Moshpit SGD's own implementation, which averages in the background). To wait for the network and go on from the
average itself, as in the paper's algorithm, call `apply_average` then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from dmoe_jax.arrays import PyTree, all_finite, typed_like, wide
from dmoe_jax.optim.compression import ErrorFeedback, compress, zero_residual
from dmoe_jax.optim.host_state import HostState, Sent, Taken, averaging_optimizer, check_like, masked_like

What = Literal["parameters", "gradients", "pseudo_gradients"]
"""Things that peers average: see `moshpit_average`."""

Average = Callable[..., PyTree]
"""(tree, round_number) -> tree of the same shapes, traceable; with `weighted`, (tree, round_number, weight)."""

_compress = jax.jit(compress, static_argnums=2)
"""One program on the host, and not a hundred small ones with all of their results in memory."""

_TINY = float(jnp.finfo(jnp.float32).tiny)


@HostState.register
class MoshpitState(NamedTuple):
    """State of `moshpit_average`; `due`, `arrived` and `taken` as of `HostState`. Unused fields are None.

    Attributes:
      inner, outer: states of the optimiser inside and of the outer one.
      steps: updates since those whose outcome was offered last.
      samples: samples behind the next offer; None unless weighted. For parameters and pseudo-gradients, all since the
        last averaging that was not lost: the offer of a lost one is still in them.
      rounds: averagings so far, with lost ones; the number of the next.
      lost: averagings that came to nothing: the network failed, or gave what is not finite.
      incoming: the outcome. For parameters: the average less the offer. For gradients: their average. For
        pseudo-gradients: a pair, their average and the offer.
      accumulated: the sum of gradients, each times its samples if weighted; in float32 at least.
      anchor: the parameters that pseudo-gradients count from.
      residual: the part that compression has kept back, float32.
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
        incoming, is_there, state = self.outcome(sent, averaged)
        # Copies: later steps may donate the state, and the arrays that were given are the caller's.
        return state._replace(incoming=jax.tree.map(jnp.array, incoming), arrived=is_there)

    def emptied(self) -> "MoshpitState":
        gathered = (self.steps, self.samples, self.due, self.accumulated, self.residual)
        steps, samples, due, accumulated, residual = jax.tree.map(jnp.zeros_like, gathered)
        return self._replace(steps=steps, samples=samples, due=due, accumulated=accumulated, residual=residual)

    def counted(self, grads: PyTree, samples: ArrayLike | None, every: int) -> "MoshpitState":
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
        """(`incoming` for the next update, True if there is any, the state without what was sent)."""
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
        """The state without what was sent; the rest is for the next averaging."""
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
def _state_type(feedback: ErrorFeedback | None) -> type[MoshpitState]:
    """The states of optimisers that compress so: checkpoints hold arrays alone, and so the type has the settings."""
    if feedback is None:
        return MoshpitState

    class CompressedMoshpitState(MoshpitState):
        __slots__ = ()

        feedback = property(lambda self: feedback)

        def __reduce__(self) -> tuple[Any, ...]:  # pickle would look for the type by its name
            return _remade, (feedback, *self)

    return CompressedMoshpitState


def _remade(feedback: ErrorFeedback, *fields: Any) -> MoshpitState:
    return _state_type(feedback)(*fields)


def moshpit_average(
    inner: optax.GradientTransformation,
    *,
    every: int = 1,
    what: What = "parameters",
    outer: optax.GradientTransformation | None = None,
    weighted: bool = False,
    average: Average | None = None,
    compress: ErrorFeedback | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An optimiser whose parameters, gradients or pseudo-gradients are averaged among peers every `every` updates.

    - "parameters": local SGD with period `every` (Moshpit SGD). Each update is one of `inner`.
    - "gradients": gradients are accumulated, and updates are zero until their average is there; then `inner` takes one
      step with it. It sees one step for each averaging, and so do schedules inside. With a lost average the step is
      made with the peer's own gradients.
    - "pseudo_gradients": DiLoCo (Douillard et al. 2023). Each update is one of `inner`; the way from the anchor, the
      parameters after the last averaging, is averaged and taken by `outer` as a gradient at the anchor.

    A lost average leaves the other two where their own updates brought them. `update` wants the parameters. Groups of
    gradients and of pseudo-gradients do not draw parameters together that are apart already: with an average that is
    not the same for everybody, average parameters too, or take several rounds.

    Args:
      inner: any optimiser; arguments of `update` that are not for this transformation go to it.
      every: updates between two averagings (tau in the paper).
      outer: for pseudo-gradients only; default: SGD with Nesterov momentum, DiLoCo's.
      weighted: True if a peer counts by its samples: `update` then wants `samples=`, the number that the gradient is a
        mean of. Gradients of a peer count likewise among each other. Parameters and pseudo-gradients count by all
        samples since the last averaging that was not lost.
      average: averages inside `update`, over an axis of `vmap` or `shard_map`, with `jax.lax.pmean` or
        `peer_axis.moshpit_round` (to `shard_map` pass `check_vma=False`: JAX cannot see that all devices average at
        once); None: the host does, between updates. The steps are the same. A round whose outcome is not finite is
        lost. Under `vmap` it runs at every update, and its outcome is taken when it is due.
      compress: sends the largest values only, of gradients and pseudo-gradients, and keeps the rest back; see
        `dmoe_jax.optim.compression`. An outer optimiser beside it should have no momentum: `optax.sgd(1.0)`,
        SparseLoCo's.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}")
    if what not in get_args(What):
        raise ValueError(f"what is averaged is one of {', '.join(get_args(What))}, got {what!r}")
    outer = outer_for(what, outer)
    if compress is not None and what == "parameters":
        raise ValueError("compress is for gradients and pseudo_gradients: the largest parameters alone are no model")
    moshpit = _Moshpit(optax.with_extra_args_support(inner), outer, every, what, weighted, average, compress)
    return averaging_optimizer("moshpit_average", moshpit.init, moshpit.update)


def outer_for(what: What, outer: optax.GradientTransformation | None) -> optax.GradientTransformation | None:
    """The outer optimiser for what is averaged: the one given, or that which DiLoCo found best (Douillard et al. 2023,
    section 3). Raises ValueError if there is none for it."""
    if outer is not None and what != "pseudo_gradients":
        raise ValueError(f"an outer optimiser is for pseudo_gradients, not for {what}")
    if outer is None and what == "pseudo_gradients":
        return optax.sgd(0.7, momentum=0.9, nesterov=True)
    return outer


@dataclass(frozen=True, slots=True)
class _Moshpit:
    """Arguments of `moshpit_average`, the outer optimiser filled in, and its `init` and `update`."""

    inner: optax.GradientTransformationExtraArgs
    outer: optax.GradientTransformation | None
    every: int
    what: What
    weighted: bool
    average: Average | None
    compress: ErrorFeedback | None

    def init(self, params: PyTree) -> MoshpitState:
        outer, by_host = self.outer, self.average is None
        zeros = jax.tree.map(lambda leaf: jnp.zeros_like(wide(leaf)), params)
        return _state_type(self.compress)(
            inner=self.inner.init(params),
            steps=jnp.zeros((), jnp.int32),
            samples=jnp.zeros(()) if self.weighted else None,
            due=jnp.zeros((), bool),
            rounds=jnp.zeros((), jnp.int32),
            lost=jnp.zeros((), jnp.int32),
            arrived=jnp.zeros((), bool) if by_host else None,
            # Copies: state and parameters may be donated, and no array can be donated twice.
            incoming=jax.tree.map(jnp.array, zeros if outer is None else (zeros, zeros)) if by_host else None,
            accumulated=zeros if self.what == "gradients" else None,
            anchor=None if outer is None else jax.tree.map(jnp.array, params),
            outer=None if outer is None else outer.init(params),
            residual=None if self.compress is None else zero_residual(params),
        )

    def update(
        self,
        updates: PyTree,
        state: MoshpitState,
        params: PyTree,
        *,
        samples: ArrayLike | None = None,
        without_gradient: bool = False,
        **extra: Any,
    ) -> tuple[PyTree, MoshpitState]:
        if self.weighted and samples is None and not without_gradient:
            raise ValueError("a weighted average wants the number of samples: update(grads, state, params, samples=n)")
        grads = updates

        def inner_step(gradient: PyTree, state: MoshpitState) -> tuple[PyTree, MoshpitState]:
            updates, inner_state = self.inner.update(typed_like(gradient, grads), state.inner, params, **extra)
            return updates, state._replace(inner=inner_state)

        def apply(incoming: PyTree, updates: PyTree, state: MoshpitState) -> tuple[PyTree, MoshpitState]:
            if self.what == "gradients":
                return inner_step(incoming, state)
            if self.outer is not None:
                incoming, state = _outer_step(self.outer, incoming, state)
            return jax.tree.map(lambda own, change: (own + change).astype(own.dtype), updates, incoming), state

        def average_now(updates: PyTree, state: MoshpitState) -> tuple[PyTree, MoshpitState]:
            assert self.average is not None
            sent = state.offer(optax.apply_updates(params, updates))
            averaged = self.average(sent.tree, state.rounds, *([sent.weight] if self.weighted else []))
            check_like(averaged, sent.tree)
            incoming, is_there, state = state.outcome(sent, averaged)
            return jax.lax.cond(is_there, apply, lambda _, *kept: kept, incoming, updates, state)

        if without_gradient or self.what == "gradients":
            like = jax.eval_shape(inner_step, grads, state)[0]
            updates = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        else:
            updates, state = inner_step(grads, state)
        if not without_gradient:
            state = state.counted(grads, samples if self.weighted else None, self.every)
        if self.average is None:
            return self._apply_if_arrived(apply, updates, state)
        if self.every == 1 and not without_gradient:
            return average_now(updates, state)  # no branch around what may be a collective operation
        return jax.lax.cond(state.due, average_now, lambda *kept: kept, updates, state)

    def _apply_if_arrived(
        self,
        apply: Callable[[PyTree, PyTree, MoshpitState], tuple[PyTree, MoshpitState]],
        updates: PyTree,
        state: MoshpitState,
    ) -> tuple[PyTree, MoshpitState]:
        """The update with what the host brought, if there is any."""
        # XLA copies whatever goes through a branch, at each update: only what an average changes does, and nothing
        # where the average is merely added. Adam's state alone is twice the model.
        assert state.arrived is not None
        if self.what == "parameters":
            added, _ = apply(state.incoming, updates, state)
            updates = optax.tree.where(state.arrived, added, updates)
            return updates, state._replace(arrived=jnp.zeros((), bool))
        changing = ("inner",) if self.what == "gradients" else ("anchor", "outer")

        def with_incoming(incoming: PyTree, updates: PyTree, changed: dict[str, PyTree]) -> tuple[PyTree, PyTree]:
            updates, after = apply(incoming, updates, state._replace(**changed))
            return updates, {name: getattr(after, name) for name in changing}

        changed = {name: getattr(state, name) for name in changing}
        updates, changed = jax.lax.cond(
            state.arrived, with_incoming, lambda _, *kept: kept, state.incoming, updates, changed
        )
        return updates, state._replace(arrived=jnp.zeros((), bool), **changed)


def _outer_step(
    outer: optax.GradientTransformation, incoming: tuple[PyTree, PyTree], state: MoshpitState
) -> tuple[PyTree, MoshpitState]:
    """The change of the parameters, and the state with the anchor moved, by an averaged pseudo-gradient."""
    averaged, sent = incoming
    updates, outer_state = outer.update(typed_like(averaged, state.anchor), state.outer, state.anchor)
    anchor = optax.apply_updates(state.anchor, updates)
    # From the parameters that were sent, anchor - sent, to the new anchor; what was learnt since stays.
    change = jax.tree.map(lambda new, old, way: wide(new) - wide(old) + way, anchor, state.anchor, sent)
    return change, state._replace(anchor=anchor, outer=outer_state)
