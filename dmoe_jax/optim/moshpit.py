"""Moshpit SGD (Ryabinin et al., NeurIPS 2021, algorithm 2) as an Optax transformation around any optimiser.

Theory of operation. An averaging has three parts: what a peer offers to its group (its parameters, its gradients, or
how far it came since the last time), what comes back, and what that changes here. Under `jit` nothing waits: the
outcome arrives as state, and the next update applies it.

    optimizer = moshpit_average(optax.adam(1e-3), every=32)
    updates, opt_state = optimizer.update(grads, opt_state, params)       # jitted, as ever
    opt_state = await averager.step(opt_state, params)                    # over the network, see `dmoe_jax.averaging`

Over anything else than our network, the last line is that of `dmoe_jax.optim.host_state`.

Parameters have moved by then. So what is applied is the difference between the average and what was sent, and progress
made meanwhile stays (Moshpit SGD's own implementation, which averages in the background, does the same). To wait for
the network and go on from the average itself, as in the paper's algorithm, call `apply_average` then.

With `average`, a function in JAX, the transformation averages by itself inside `update`, and nothing is left to the
host: over an axis of `vmap` or `shard_map`, with `jax.lax.pmean` or `peer_axis.moshpit_round`. The steps are the same.
(To `shard_map` pass `check_vma=False`: whether an average is due depends on the device for all that JAX can see.)

Groups of gradients and of pseudo-gradients do not draw parameters together that are apart already: with an average that
is not the same for everybody, average parameters too, or take several rounds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from dmoe_jax.arrays import typed_like, wide
from dmoe_jax.optim.compression import ErrorFeedback, zero_residual
from dmoe_jax.optim.host_state import check_like
from dmoe_jax.optim.moshpit_state import MoshpitState, state_type
from dmoe_jax.optim.taking_over import goes_over
from dmoe_jax.types import PyTree

What = Literal["parameters", "gradients", "pseudo_gradients"]
"""What peers average; see `moshpit_average`."""

Average = Callable[..., PyTree]
"""(tree, round_number) -> tree of the same shapes, traceable; with `weighted`, (tree, round_number, weight)."""


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

    A lost average leaves the other two where their own updates brought them. `update` wants the parameters.

    Args:
      inner: any optimiser; arguments of `update` that are not for this transformation go to it.
      every: updates between two averagings (tau in the paper).
      what: see above.
      outer: for pseudo-gradients only; default: SGD with Nesterov momentum, DiLoCo's.
      weighted: whether a peer counts by its samples: `update` then wants `samples=`, how many the gradient is a mean
        of. Gradients of a peer count likewise among each other. Parameters and pseudo-gradients count by all samples
        since the last averaging that was not lost.
      average: averages inside `update`; None: the host does, between updates. A round whose outcome is not finite is
        lost. Under `vmap` it runs at every update, and its outcome is taken when it is due.
      compress: sends the largest values only and keeps the rest back, of gradients and pseudo-gradients; see
        `dmoe_jax.optim.compression`. An outer optimiser beside it should have no momentum: `optax.sgd(1.0)`,
        SparseLoCo's.

    Raises:
      ValueError: every is below 1, an unknown `what`, an outer optimiser for something else, or compressed parameters.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}")
    if what not in get_args(What):
        raise ValueError(f"what is averaged is one of {', '.join(get_args(What))}, got {what!r}")
    if outer is not None and what != "pseudo_gradients":
        raise ValueError(f"an outer optimiser is for pseudo_gradients, not for {what}")
    if compress is not None and what == "parameters":
        raise ValueError("compress is for gradients and pseudo_gradients: the largest parameters alone are no model")
    if outer is None and what == "pseudo_gradients":
        outer = diloco_outer()
    moshpit = _Moshpit(optax.with_extra_args_support(inner), outer, every, what, weighted, average, compress)
    return optax.GradientTransformationExtraArgs(moshpit.init, goes_over(moshpit.update))


def diloco_outer() -> optax.GradientTransformation:
    """The outer optimiser that DiLoCo found best (Douillard et al. 2023, section 3)."""
    return optax.sgd(0.7, momentum=0.9, nesterov=True)


@dataclass(frozen=True, slots=True)
class _Moshpit:
    """Arguments of `moshpit_average`, the outer optimiser filled in, and what they make of an update."""

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
        return state_type(self.compress)(
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
        params: PyTree | None = None,
        *,
        samples: ArrayLike | None = None,
        without_gradient: bool = False,
        **extra: Any,
    ) -> tuple[PyTree, MoshpitState]:
        if params is None:
            raise ValueError("moshpit_average wants the parameters: update(grads, state, params)")
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
        """The update with what the host brought, if there is any.

        XLA copies whatever goes through a branch, at each update: only what an average changes does, and nothing where
        the average is merely added. Adam's state alone is twice the model.
        """
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
    """(what parameters change by, the state with the anchor moved) once the averaged pseudo-gradient is there."""
    averaged, sent = incoming
    updates, outer_state = outer.update(typed_like(averaged, state.anchor), state.outer, state.anchor)
    anchor = optax.apply_updates(state.anchor, updates)
    # From the parameters that were sent, anchor - sent, to the new anchor; what was learnt since stays.
    change = jax.tree.map(lambda new, old, way: wide(new) - wide(old) + way, anchor, state.anchor, sent)
    return change, state._replace(anchor=anchor, outer=outer_state)
