"""Training on this device: the whole step of a model in one jitted call, `dmoe` with all its experts.

The bound on what the swarm can reach: no delay, no failures, no staleness. The experts learn as they would on their
nodes, each with an optimiser and a count of updates of its own, from the gradient of the same backward pass; one update
takes in all sequences of the batch that went to the expert. Experts that no sequence went to cost nothing.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dmoe_jax.arrays import PyTree
from dmoe_jax.data import Batch
from dmoe_jax.mixture.local_update import chosen_value_and_grad, init_opt_states, update_chosen
from dmoe_jax.models import TransformerXLConfig
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.layers import ForwardAux
from dmoe_jax.models.trunk import StepKeys, empty_memory, forget
from dmoe_jax.optim import Recipe, make_optimizer
from dmoe_jax.routing import Router
from dmoe_jax.trainer import OnLost, OnStep, StepRecord
from dmoe_jax.training.engine import Totals
from experiments.transformer_xl import dense
from experiments.transformer_xl.setup import Setup, SetupEngine

State = dict[str, PyTree]
"""Parameters, optimiser states, memory and load. The experts' are one entry a layer, none for a dense model."""


class LocalEngine(SetupEngine):
    """A model in training on this device, none of whose experts ever fails. An `Engine`.

    Raises:
      RouterError: the router does not keep to its contract. ValueError: the text is too short.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        config = setup.config
        optimizer, expert_optimizer = make_optimizer(setup.recipe), make_optimizer(setup.expert_recipe)
        self._stream, self._step_items = setup.stream(), setup.rows * config.seq_len
        trunk = setup.init_trunk()
        experts = txl.init_experts(jax.random.key(setup.seed), config) if config.is_mixture else ()
        self._state = {
            "trunk": trunk,
            "trunk_opt_state": optimizer.init(trunk),
            "experts": experts,
            "expert_opt_states": tuple(init_opt_states(expert_optimizer, layer) for layer in experts),
            "memory": empty_memory(config, setup.rows),
            "load": [jnp.zeros(len(uids), jnp.int32) for uids in setup.layers.values()],
        }
        self._train_step = train_step(config, setup.router, setup.recipe, setup.expert_recipe)

    async def advance(self, num_steps: int, on_step: OnStep, on_lost: OnLost) -> None:
        """Make `num_steps` updates, none of which is ever lost. FloatingPointError: one is not finite."""
        for _ in range(num_steps):
            batch, keys = self._stream.at(self.step), self.setup.step_keys(trainer=0, step=self.step)
            self._state, (nll, is_finite) = self._train_step(self._state, batch, keys)
            self.step += 1
            if not is_finite:
                raise FloatingPointError(f"{self.name}: loss {nll} of step {self.step}, or its gradient, is not finite")
            on_step(StepRecord(step=self.step, trainer=0, loss=float(nll), items=self._step_items, staleness=0))

    def params(self) -> tuple[PyTree, tuple[PyTree, ...]]:
        return self._state["trunk"], self._state["experts"]

    def totals(self) -> Totals:
        counts = zip(self.layers.values(), self._state["load"], strict=True)
        load = {uid: int(count) for uids, layer in counts for uid, count in zip(uids, np.asarray(layer), strict=True)}
        return Totals(items=self.step * self._step_items, load=load)


@functools.cache
def train_step(
    config: TransformerXLConfig, router: Router | None, recipe: Recipe, expert_recipe: Recipe
) -> Callable[[State, Batch, StepKeys], tuple[State, tuple[Any, Any]]]:
    """The jitted (state, batch, keys) -> (state, (mean loss without auxiliary ones, True if all is finite)).

    The state is donated: an update happens in place, and what was given is gone. Equal arguments share the step.
    """
    optimizer, expert_optimizer = make_optimizer(recipe), make_optimizer(expert_recipe)

    def loss(trunk: PyTree, experts: PyTree, batch: Batch, memory: Any, keys: StepKeys) -> tuple[Any, ForwardAux]:
        if router is None:
            nll, memory = dense.loss(trunk, config, batch, memory, keys)
            return nll, ForwardAux(nll, (), memory)
        memory = forget(memory, jnp.asarray(batch.is_first))
        return txl.local_forward(trunk, experts, config, router, batch, memory, keys=keys)

    def step(state: State, batch: Batch, keys: StepKeys) -> tuple[State, tuple[Any, Any]]:
        gradient = chosen_value_and_grad(loss)
        trunk, experts = state["trunk"], state["experts"]
        (total, aux), (grads, expert_grads) = gradient(trunk, experts, batch, state["memory"], keys)
        updates, trunk_opt_state = optimizer.update(grads, state["trunk_opt_state"], trunk)
        updated = [
            update_chosen(expert_optimizer, params, opt_state, own, layer.load > 0)
            for params, opt_state, own, layer in zip(
                experts, state["expert_opt_states"], expert_grads, aux.layers, strict=True
            )
        ]
        is_finite = jnp.isfinite(total) & jnp.isfinite(optax.tree.norm((grads, expert_grads), squared=True))
        return {
            "trunk": optax.apply_updates(trunk, updates),
            "trunk_opt_state": trunk_opt_state,
            "experts": tuple(params for params, _ in updated),
            "expert_opt_states": tuple(opt_state for _, opt_state in updated),
            "memory": aux.memory,
            "load": [count + layer.load for count, layer in zip(state["load"], aux.layers, strict=True)],
        }, (aux.nll, is_finite)

    return jax.jit(step, donate_argnums=0)
