"""NoLoCo (Kolehmainen et al., arXiv 2506.10911): outer steps among pairs of peers, and no collective operation at all.

A peer's slow parameters follow the pair's mean pseudo-gradient with momentum, and are drawn towards the pair's mean; so
the swarm stays together although nobody ever computes its mean.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from dmoe_jax.arrays import PyTree, all_finite, typed_like, wide
from dmoe_jax.optim.host_state import HostState, Sent, Taken, averaging_optimizer, masked_like
from dmoe_jax.optim.moshpit import Average

MOMENTUM, RATE, PULL = 0.5, 0.7, 0.7
"""alpha and beta of the paper's experiments; gamma = beta, as in the authors' code."""


@HostState.register
class NoLoCoState(NamedTuple):
    """State of `noloco`; `due`, `arrived` and `taken` as of `HostState`.

    Attributes:
      inner: state of the optimiser inside.
      steps: updates so far.
      slow: phi, the parameters after the last outer step.
      momentum: delta, the last outer step, float32.
      offered: updates behind the last offer; None where the host has no part, as `due`, `arrived` and `incoming`.
      incoming: the group's means of theta - phi and of phi, and the peer's own theta - phi that was among them.
    """

    inner: PyTree
    steps: Int[Array, ""]
    slow: PyTree
    momentum: PyTree
    offered: Int[Array, ""] | None = None
    due: Bool[Array, ""] | None = None
    arrived: Bool[Array, ""] | None = None
    incoming: tuple[PyTree, PyTree, PyTree] | None = None
    taken: Taken | None = None

    @property
    def kind(self) -> str:
        return "noloco"

    @property
    def feedback(self) -> None:
        return None

    @property
    def rounds(self) -> Int[Array, ""] | None:
        return self.offered

    def offer(self, params: PyTree, fragment: int = 0) -> Sent:
        """The pair (theta - phi, phi) in float32."""
        ways = jax.tree.map(lambda own, slow: wide(own) - wide(slow), masked_like(params, self.slow), self.slow)
        return Sent((ways, jax.tree.map(lambda leaf: jnp.array(wide(leaf)), self.slow)), jnp.array(self.steps))

    def receive(self, sent: Sent, averaged: PyTree | None, fragment: int = 0) -> "NoLoCoState":
        assert self.due is not None
        state = self._replace(offered=sent.steps, due=jnp.zeros_like(self.due))
        if averaged is None:
            return state
        mean_way, mean_slow = jax.tree.map(lambda leaf: jnp.array(wide(jnp.asarray(leaf))), averaged)
        is_good = all_finite((mean_way, mean_slow, sent.tree[0]))
        # Copies: later steps may donate the state, and what was sent is the host's.
        return state._replace(incoming=(mean_way, mean_slow, jax.tree.map(jnp.array, sent.tree[0])), arrived=is_good)

    def emptied(self) -> "NoLoCoState":
        if self.offered is None:
            return self
        due, arrived = jax.tree.map(jnp.zeros_like, (self.due, self.arrived))
        return self._replace(offered=jnp.array(self.steps), due=due, arrived=arrived)


def noloco(
    inner: optax.GradientTransformation,
    *,
    every: int,
    average: Average | None = None,
    momentum: float = MOMENTUM,
    rate: ArrayLike = RATE,
    pull: ArrayLike = PULL,
) -> optax.GradientTransformationExtraArgs:
    """An optimiser with the modified Nesterov momentum of NoLoCo as its outer step.

    Each `every` updates, with theta the parameters and means over a random group of n peers:

        delta <- alpha delta + beta mean(theta - phi) - gamma (phi - mean(phi))
        phi   <- phi + delta
        theta <- phi

    Without gradients, in pairs that are drawn anew each time, peers draw together for 0 < gamma < 2 (1 - alpha^2): with
    the defaults their second moments about the swarm's mean shrink to 0.70 each time. (The matrix is in the tests.)

    An outcome that is not finite, or never comes, leaves the parameters where the inner steps brought them. If the host
    averages, training goes on meanwhile: theta then keeps what it has learnt since.

    Args:
      inner: any optimiser.
      every: updates between two outer steps.
      average: (tree, round_number) -> the mean over the peer's group, over an axis of `vmap` or `shard_map`, of two
        trees at once, theta - phi and phi. The paper's: pairs drawn anew each time. None: the host averages between
        updates, as of `moshpit_average`; in groups of two with `TreeAveragerConfig(side=2, dims=...)`.
      momentum, rate, pull: alpha, beta and gamma; the last two may be traced.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be at least 0 and below 1, got {momentum}")
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> NoLoCoState:
        def still() -> PyTree:
            return jax.tree.map(lambda leaf: jnp.zeros_like(wide(leaf)), params)

        state = NoLoCoState(inner.init(params), jnp.zeros((), jnp.int32), jax.tree.map(jnp.array, params), still())
        if average is not None:
            return state
        no, incoming = jnp.zeros((), bool), (still(), still(), still())
        return state._replace(offered=jnp.zeros((), jnp.int32), due=no, arrived=jnp.array(no), incoming=incoming)

    def outer_step(
        moved: PyTree, state: NoLoCoState, incoming: tuple[PyTree, PyTree, PyTree]
    ) -> tuple[PyTree, NoLoCoState]:
        """theta and the state after it. What theta learnt since the peer sent it stays."""
        mean_way, mean_slow, own_way = incoming
        delta = jax.tree.map(
            lambda last, way, slow, middle: momentum * last + rate * way - pull * (wide(slow) - middle),
            state.momentum, mean_way, state.slow, mean_slow,
        )  # fmt: skip
        stepped = jax.tree.map(lambda own, step, way: own + step - way, moved, delta, own_way)
        slow = jax.tree.map(lambda slow, step: wide(slow) + step, state.slow, delta)
        is_good = all_finite(slow)
        kept = optax.tree.where(is_good, typed_like(slow, state.slow), state.slow)
        delta = optax.tree.where(is_good, delta, state.momentum)
        return optax.tree.where(is_good, stepped, moved), state._replace(slow=kept, momentum=delta)

    def average_now(moved: PyTree, state: NoLoCoState) -> tuple[PyTree, NoLoCoState]:
        assert average is not None
        sent = state.offer(moved)
        mean_way, mean_slow = average(sent.tree, state.steps // every - 1)
        return outer_step(moved, state, (mean_way, mean_slow, sent.tree[0]))

    def arrive(moved: PyTree, state: NoLoCoState) -> tuple[PyTree, NoLoCoState]:
        assert state.incoming is not None
        return outer_step(moved, state, state.incoming)

    def update(
        updates: PyTree,
        state: NoLoCoState,
        params: PyTree,
        *,
        without_gradient: bool = False,
        **extra: Any,
    ) -> tuple[PyTree, NoLoCoState]:
        if not without_gradient:
            updates, inner_state = inner.update(updates, state.inner, params, **extra)
            state = state._replace(inner=inner_state, steps=state.steps + 1)
        moved = jax.tree.map(lambda own, change: wide(own) + change, params, updates)
        if average is not None:
            is_due, one_step = state.steps % every == 0, average_now
        else:
            assert state.arrived is not None
            assert state.offered is not None
            is_due, one_step = state.arrived, arrive
            state = state._replace(arrived=jnp.zeros_like(is_due), due=state.steps - state.offered >= every)
        moved, state = jax.lax.cond(is_due, one_step, lambda *kept: kept, moved, state)
        change = jax.tree.map(lambda new, own: (new - own).astype(own.dtype), moved, params)
        return change, state

    return averaging_optimizer("noloco", init, update)
