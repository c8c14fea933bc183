"""One large batch by many peers, as pure functions (DeDLOC: Diskin et al., NeurIPS 2021, section 3.1).

Peers *gather*: each adds up the gradients of its own micro-batches, every sample with the same weight. When all of them
together have gathered the target, their sums are added up, and every peer makes the same optimiser step with the mean,
that of one machine with the whole batch. Schedules inside the optimiser count these steps. `dmoe_jax.collaboration`
carries the sums over the network; under `jit` nothing waits.

    together = collaborative(optax.lamb(1e-3))
    state = together.init(params)
    state = together.gather(state, grads, samples)                  # jitted; the state may be donated
    own = together.contribution(state)                              # a mean, and its samples
    state = together.step(state, weighted_mean_of_all_peers(own))   # the same everywhere

With a `LossScale`, a peer multiplies its loss by `state.scale` before it differentiates; gradients are divided by it
again when they are gathered. A micro-batch whose gradients are not finite is left out, and counted in what travels: so
all peers know of it and halve the scale in the same step.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from dmoe_jax.arrays import PyTree, all_finite, as_params, copied, typed_like, wide
from dmoe_jax.mesh.layout import init_like
from dmoe_jax.optim.moshpit import outer_for

Shared = Literal["gradients", "parameters", "pseudo_gradients"]
"""Things that peers add up: see `collaborative`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Scaling of the loss for gradients of few bits (Micikevicius et al., ICLR 2018, section 3.2)."""

    initial: float = 2.0**15
    """Scale at first."""
    grow_every: int = 2000
    """Global steps without an overflow anywhere after which it doubles."""
    largest: float = 2.0**24
    """Largest scale."""

    def __post_init__(self) -> None:
        if not 1 <= self.initial <= self.largest:
            raise ValueError(f"expected 1 <= initial <= largest, got {self.initial} and {self.largest}")
        if self.grow_every < 1:
            raise ValueError(f"grow_every must be at least 1, got {self.grow_every}")


class CollaborativeState(NamedTuple):
    """Everything that a peer trains on. Fields that a setting does not need are None.

    Attributes:
      params: parameters of the model.
      inner, outer: states of the optimiser and of the outer one.
      steps: global steps so far.
      samples: samples gathered for the next one.
      overflows: micro-batches since the last step whose gradients were not finite.
      total: sum over samples of their gradients, float32 at least; for "gradients" only.
      anchor: parameters after the last step; for "pseudo_gradients" only.
      scale: factor of the loss; None without a `LossScale`.
      good_steps: steps without an overflow since the scale changed.
    """

    params: PyTree
    inner: PyTree
    steps: Int[Array, ""]
    samples: Float[Array, ""]
    overflows: Float[Array, ""]
    total: PyTree
    anchor: PyTree
    outer: PyTree
    scale: Float[Array, ""] | None
    good_steps: Int[Array, ""] | None


class Contribution(NamedTuple):
    """A peer's part in a step, or that of all peers together.

    Attributes:
      mean: mean over the samples of gradients, or the parameters, or the way from the anchor to them. Of all peers: the
        mean of theirs, weighted by samples.
      samples: number of samples behind it; of all peers, their sum. With 0 the mean is of no meaning.
      overflows: micro-batches that were left out; of all peers, their sum.
    """

    mean: PyTree
    samples: ArrayLike
    overflows: ArrayLike


@dataclass(frozen=True, slots=True, eq=False)
class Collaborative:
    """Made by `collaborative`."""

    inner: optax.GradientTransformationExtraArgs
    shared: Shared
    outer: optax.GradientTransformation | None
    loss_scale: LossScale | None

    def init(self, params: PyTree) -> CollaborativeState:
        """The state before the first gradient."""
        params, scale = as_params(params), self.loss_scale
        # Copies: a donated state cannot hold an array twice, and optimisers may keep the parameters in theirs.
        return CollaborativeState(
            params=params,
            inner=init_like(self.inner.init, params),
            steps=jnp.zeros((), jnp.int32),
            samples=jnp.zeros(()),
            overflows=jnp.zeros(()),
            total=jax.tree.map(lambda leaf: jnp.zeros_like(wide(leaf)), params) if self.shared == "gradients" else None,
            anchor=None if self.outer is None else copied(params),
            outer=None if self.outer is None else init_like(self.outer.init, params),
            scale=None if scale is None else jnp.asarray(scale.initial),
            good_steps=None if scale is None else jnp.zeros((), jnp.int32),
        )

    def gather(self, state: CollaborativeState, grads: PyTree, samples: ArrayLike, **extra: Any) -> CollaborativeState:
        """Take in a micro-batch; one whose gradients, times its samples, are not finite in float32 is left out.

        `grads` are the mean over its samples of the gradient of the loss, times `state.scale` if there is one; `extra`
        further arguments of an optimiser that steps at each micro-batch.
        """
        amount = jnp.asarray(samples, jnp.float32)
        factor = 1.0 if state.scale is None else 1 / state.scale
        weight = factor if state.total is None else amount * factor
        is_good = all_finite(jax.tree.map(lambda new: wide(new) * weight, grads))
        if state.total is not None:
            # A leaf at a time, into the sum itself where the state is donated: no second copy of it.
            total = jax.tree.map(lambda sum_, new: sum_ + jnp.where(is_good, wide(new), 0) * weight, state.total, grads)
            state = state._replace(total=total)
        else:
            scaled = jax.tree.map(lambda new: jnp.where(is_good, wide(new) * factor, 0), grads)
            updates, inner = self.inner.update(typed_like(scaled, state.params), state.inner, state.params, **extra)
            stepped = (optax.apply_updates(state.params, updates), inner)
            params, inner = optax.tree.where(is_good, stepped, (state.params, state.inner))
            state = state._replace(params=params, inner=inner)
        return state._replace(
            samples=state.samples + jnp.where(is_good, amount, 0.0),
            overflows=state.overflows + jnp.where(is_good, 0.0, 1.0),
        )

    def contribution(self, state: CollaborativeState) -> Contribution:
        """This peer's part, in arrays of its own: the state may be donated."""
        if state.total is not None:
            mean = jax.tree.map(lambda total: total / jnp.maximum(state.samples, 1.0), state.total)
        elif state.anchor is not None:
            mean = jax.tree.map(lambda old, new: wide(old) - wide(new), state.anchor, state.params)
        else:
            mean = jax.tree.map(jnp.array, state.params)
        return Contribution(mean, jnp.array(state.samples), jnp.array(state.overflows))

    def step(self, state: CollaborativeState, whole: Contribution, **extra: Any) -> CollaborativeState:
        """The global step with the contribution of all peers. Whoever has the same state before has it after.

        A step in which nobody brought a sample, or whose mean is not finite, changes no parameter; it counts.
        """
        is_good = (jnp.asarray(whole.samples) > 0) & all_finite(whole.mean)
        safe = jax.tree.map(lambda leaf: jnp.where(is_good, leaf, 0), whole.mean)
        before = (state.params, state.inner, state.anchor, state.outer)
        params, inner, anchor, outer = optax.tree.where(is_good, self._changed(state, safe, extra), before)
        state = state._replace(params=params, inner=inner, anchor=anchor, outer=outer, steps=state.steps + 1)
        return emptied(self._rescaled(state, jnp.asarray(whole.overflows)))

    def _changed(self, state: CollaborativeState, mean: PyTree, extra: dict[str, Any]) -> tuple[PyTree, ...]:
        """(params, inner, anchor, outer) after the step with this mean."""
        typed = typed_like(mean, state.params)
        if state.total is not None:
            updates, inner = self.inner.update(typed, state.inner, state.params, **extra)
            return optax.apply_updates(state.params, updates), inner, state.anchor, state.outer
        if self.outer is None:
            return typed, state.inner, state.anchor, state.outer
        updates, outer = self.outer.update(typed, state.outer, state.anchor)
        anchor = optax.apply_updates(state.anchor, updates)
        return jax.tree.map(jnp.array, anchor), state.inner, anchor, outer

    def _rescaled(self, state: CollaborativeState, overflows: Float[Array, ""]) -> CollaborativeState:
        if self.loss_scale is None or state.scale is None or state.good_steps is None:
            return state
        good = jnp.where(overflows > 0, 0, state.good_steps + 1)
        grows = good >= self.loss_scale.grow_every
        larger = jnp.where(grows, jnp.minimum(2 * state.scale, self.loss_scale.largest), state.scale)
        scale = jnp.where(overflows > 0, jnp.maximum(state.scale / 2, 1.0), larger)
        return state._replace(scale=scale, good_steps=jnp.where(grows, 0, good))


def collaborative(
    optimizer: optax.GradientTransformation,
    *,
    shared: Shared = "gradients",
    outer: optax.GradientTransformation | None = None,
    loss_scale: LossScale | None = None,
) -> Collaborative:
    """An optimiser whose steps are made by many peers together.

    Args:
      shared: the thing that is added up. "gradients": those of all micro-batches. With the other two a peer steps by
        itself at each micro-batch, and the state of `optimizer` stays with it. "parameters" are averaged by samples.
        "pseudo_gradients" (DiLoCo: Douillard et al. 2023, algorithm 1): the way that parameters came since the last
        step is averaged, and taken by an outer optimiser as a gradient.
      outer: for "pseudo_gradients" only; default: SGD with Nesterov momentum, DiLoCo's.
      loss_scale: for gradients of few bits; None: losses are as they are.
    """
    if shared not in get_args(Shared):
        raise ValueError(f"what is shared is one of {', '.join(get_args(Shared))}, got {shared!r}")
    inner = optax.with_extra_args_support(optimizer)
    return Collaborative(inner, shared, outer_for(shared, outer), loss_scale)


def emptied(state: CollaborativeState) -> CollaborativeState:
    """The state with nothing gathered, as after a step."""
    total = None if state.total is None else jax.tree.map(jnp.zeros_like, state.total)
    return state._replace(samples=jnp.zeros(()), overflows=jnp.zeros(()), total=total)
