"""Asynchronous trainers of a model that is all trunk: what a dense model loses by staleness alone.

Each trainer reads the parameters, takes some time over its gradient, and applies it to what they have become. Nothing
is remote, so an order is only who applies when.
"""

import heapq
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int, Int32

from dmoe_jax.arrays import PyTree, as_params, copied
from dmoe_jax.checks import check_positive
from dmoe_jax.emulator.order import DelayOf
from dmoe_jax.emulator.state import Data, at, is_finite, put
from dmoe_jax.trunk import trunk_update


class DenseState(NamedTuple):
    """Trainers of a dense model between two updates.

    Attributes:
      step: int32, updates so far. params, opt_state: after them.
      read: what each trainer has read, [trainers, ...]. read_at, row: int32, after which update, and its batch.
      losses: [updates], of each update, nats; NaN before it, and where it was not finite and not made.
    """

    step: Int32[jax.Array, ""]
    params: PyTree
    opt_state: PyTree
    read: PyTree
    read_at: Int32[jax.Array, " trainers"]
    row: Int32[jax.Array, " trainers"]
    losses: Float[jax.Array, " updates"]


def draw_turns(*, num_updates: int, num_trainers: int, delay: DelayOf, seed: int = 0) -> Int[np.ndarray, " updates"]:
    """Return the trainer that makes each update, if trainers start together and each step takes a delay of its own.

    Raises:
      ValueError: a number is not positive.
    """
    check_positive(num_updates=num_updates, num_trainers=num_trainers)
    rng = np.random.default_rng(seed)
    waiting = list(zip(delay(rng, num_trainers).tolist(), range(num_trainers), strict=True))
    heapq.heapify(waiting)
    turns = []
    for _ in range(num_updates):
        now, trainer = waiting[0]
        turns.append(trainer)
        heapq.heapreplace(waiting, (now + float(delay(rng, 1)[0]), trainer))
    return np.array(turns, np.int32)


class DenseEmulator:
    """The compiled trainers of one dense model.

    Args:
      loss: (params, batch, keys) -> a scalar, nats; pure.
      optimizer: is told each update's `staleness`, as in a `SharedTrunk`.
      num_trainers: of one set of parameters.
    """

    def __init__(self, loss: Callable[..., Any], *, optimizer: optax.GradientTransformation, num_trainers: int) -> None:
        self.num_trainers = num_trainers
        self.optimizer = optimizer
        self._value_and_grad = jax.value_and_grad(loss)
        self._update = trunk_update(optimizer)
        self._run_jitted = jax.jit(self._run, donate_argnums=0)

    def init(self, params: PyTree, *, num_updates: int) -> DenseState:
        """All trainers have read these parameters; `num_updates` are those of all runs of this state."""
        return DenseState(
            step=jnp.int32(0),
            params=as_params(params),
            opt_state=copied(self.optimizer.init(params)),
            read=jax.tree.map(lambda leaf: jnp.stack([leaf] * self.num_trainers), params),
            read_at=jnp.zeros(self.num_trainers, jnp.int32),
            row=jnp.zeros(self.num_trainers, jnp.int32),
            losses=jnp.full(num_updates, jnp.nan, jnp.float32),
        )

    def run(self, state: DenseState, turns: Int[np.ndarray, " updates"], data: Data) -> DenseState:
        """After the updates of these trainers, one after another. `state` is donated: it cannot be used again.

        Raises:
          ValueError: a trainer has more turns than batches are left.
        """
        steps = jax.tree.leaves(data)[0].shape[1]
        wanted = np.asarray(state.row) + np.bincount(turns, minlength=self.num_trainers)
        if (most := wanted.max()) > steps:
            raise ValueError(f"expected at least {most} batches for each trainer, one a step, got {steps}")
        return self._run_jitted(state, jnp.asarray(turns), jax.tree.map(jnp.asarray, data))

    def _run(self, state: DenseState, turns: Any, data: Data) -> DenseState:
        def one(state: DenseState, trainer: Any) -> tuple[DenseState, None]:
            batch, keys = jax.tree.map(lambda leaf: leaf[trainer, state.row[trainer]], tuple(data))
            read = at(state.read, trainer)
            loss, grads = self._value_and_grad(read, batch, keys)
            finite = jnp.isfinite(loss) & is_finite(jax.tree.map(jnp.zeros_like, grads), grads)
            staleness = (state.step - state.read_at[trainer]).astype(jnp.float32)
            new = self._update(state.params, state.opt_state, grads, None, staleness, read)
            params, opt_state = jax.tree.map(
                lambda after, before: jnp.where(finite, after, before), new, (state.params, state.opt_state)
            )
            after = state._replace(
                step=state.step + 1,
                params=params,
                opt_state=opt_state,
                read=put(state.read, trainer, params),
                read_at=state.read_at.at[trainer].set(state.step + 1),
                row=state.row.at[trainer].add(1),
                losses=state.losses.at[state.step].set(jnp.where(finite, loss, jnp.nan)),
            )
            return after, None

        return jax.lax.scan(one, state, turns)[0]
