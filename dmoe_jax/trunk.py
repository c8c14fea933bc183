"""Parameters and optimiser state that the trainers of one process share.

A trainer reads the parameters, computes for a while, and applies its gradient to what they have become: updates happen
one after another, and none waits for a trainer.

With a `moshpit_average` as its optimiser, parameters, gradients or pseudo-gradients of a trunk are averaged with those
of other processes (`dmoe_jax.trunk_averaging`). `SharedTrunk.step` counts the gradients that were applied, whatever
the optimiser makes of them: where gradients are averaged, an update is zero until their average has arrived, and the
one after that takes the whole step.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import trio

from dmoe_jax.averaging import TreeAverager
from dmoe_jax.checkpoints import host_copy
from dmoe_jax.device import Device
from dmoe_jax.optim.moshpit import averaging_due
from dmoe_jax.types import PyTree


class SharedTrunk:
    """Trunk parameters and optimiser state that the trainers of one process share.

    Args:
      params: initial trunk parameters.
      optimizer: an Optax optimiser; its schedule counts trunk updates, not steps of one trainer, and inside a
        `moshpit_average` of gradients the averagings.
      device: runs the update.
    """

    def __init__(self, params: PyTree, optimizer: optax.GradientTransformation, device: Device) -> None:
        self.params = params
        self.optimizer = optimizer
        self.opt_state = optimizer.init(params)
        self.step = 0
        """Gradients applied."""
        self._averager: TreeAverager | None = None
        self._claimed = 0
        self.device = device
        """Runs the updates, and what trainers wait for."""
        self._turn = trio.Lock()
        self._update = _trunk_update(optimizer)

    @property
    def state(self) -> dict[str, PyTree]:
        """Parameters and optimiser state. The latter is donated to the next update: copy it before that."""
        return {"params": self.params, "opt_state": self.opt_state}

    async def snapshot(self) -> tuple[int, dict[str, PyTree]]:
        """The number of updates and a copy of the state after them, on the host."""
        async with self._turn:
            return self.step, await self.device.run(host_copy, self.state)

    def restore(self, step: int, state: dict[str, PyTree]) -> None:
        """Continue from a saved state. Only while no trainer runs."""
        self.step = step
        self.params, self.opt_state = jax.tree.map(jnp.asarray, (state["params"], state["opt_state"]))

    def claim(self, num_steps: int) -> bool:
        """Set one of the first `num_steps` updates aside for a trainer; False when all are applied or being made."""
        if self.step + self._claimed >= num_steps:
            return False
        self._claimed += 1
        return True

    def release(self) -> None:
        """Give a claimed update back, made or not."""
        self._claimed -= 1

    def average_with(self, averager: TreeAverager | None) -> None:
        """Average what the optimiser offers from now on, or with None no more."""
        self._averager = averager

    async def apply(self, grads: PyTree, *, samples: int | None = None) -> int:
        """Step with these gradients; returns the number of the update. Updates happen one after another.

        If cancelled, the update was made or it was not.

        Args:
          samples: how many the gradients are a mean of, for averages that are weighted by it.
        """
        counted = None if samples is None else np.float32(samples)
        async with self._turn:
            # Shielded: a cancelled update would leave donated, dead optimiser state behind.
            with trio.CancelScope(shield=True):
                self.params, self.opt_state = await self.device.run(
                    self._update, self.params, self.opt_state, grads, counted
                )
            self.step = number = self.step + 1
            averager = self._averager
            if averager is not None and (averager.is_under_way or averaging_due(self.opt_state)):
                self.opt_state = await averager.step(self.opt_state, self.params)
            return number

    async def replace(self, step: int, state: dict[str, PyTree], *, min_lead: int = 1) -> bool:
        """Take up another process's state between two updates, if it is still `min_lead` updates ahead; whether it was.

        Steps under way are applied to it, as stale ones. A round of averaging that is under way is dropped.
        """
        async with self._turn:
            if step < self.step + min_lead:
                return False
            self.restore(step, state)
            if self._averager is not None:
                self._averager.state_was_taken()
            return True


@functools.cache
def _trunk_update(optimizer: optax.GradientTransformation) -> Callable[..., tuple[PyTree, PyTree]]:
    """The compiled (params, opt_state, grads, samples) -> (params, opt_state) of this optimiser."""
    optimizer = optax.with_extra_args_support(optimizer)

    # Parameters are not donated: trainers in the middle of a step still hold the version that they started with.
    def update(params: PyTree, opt_state: PyTree, grads: PyTree, samples: Any) -> tuple[PyTree, PyTree]:
        counted = {} if samples is None else {"samples": samples}
        updates, opt_state = optimizer.update(grads, opt_state, params, **counted)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(update, donate_argnums=1)
