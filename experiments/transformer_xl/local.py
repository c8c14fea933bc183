"""Training on this device: the whole step of a model in one jitted call, `dmoe` with all its experts.

The fast mode for research on one machine, and the bound on what the swarm can reach: no delay, no failures, no
staleness. The experts learn as they would on their nodes, each with an optimiser and a count of updates of its own,
from the gradient of the same backward pass; one update takes in all sequences of the batch that went to the expert.
Experts that no sequence went to cost nothing.

The device is never idle: the figures of a step are fetched when the next one is under way.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from dmoe_jax.arrays import PyTree
from dmoe_jax.data.batches import Batch
from dmoe_jax.mixture.local_update import chosen_value_and_grad, init_opt_states, update_chosen
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.layers import ForwardAux
from dmoe_jax.models.trunk import StepKeys, empty_memory, forget
from dmoe_jax.optim.recipe import make_optimizer
from dmoe_jax.routing.base import Router, RouterError, Traffic, router_loss
from dmoe_jax.trainer import OnLost, OnStep, StepRecord
from dmoe_jax.training.engine import Totals
from experiments.transformer_xl.setup import Setup, SetupEngine, dense_loss

State = dict[str, PyTree]
"""Parameters, optimiser states, memory and load. The experts' are one entry a layer, none for a dense model."""


class StepReport(NamedTuple):
    """Report of a step to the host.

    Attributes:
      nll: mean negative log-likelihood of the batch, nats per token; without auxiliary losses.
      is_finite: whether the loss and all gradients are finite.
      hidden_sound: for each mixture, whether what entered it is finite. Empty for a dense model.
      scores_sound: for each mixture, whether the router's scores and auxiliary loss are numbers.
    """

    nll: Float[Array, ""]
    is_finite: Bool[Array, ""]
    hidden_sound: list[Bool[Array, ""]]
    scores_sound: list[Bool[Array, ""]]


class LocalEngine(SetupEngine):
    """A model in training on this device, none of whose experts ever fails. An `Engine`.

    Args:
      setup: the model, its text and its optimisers.

    Raises:
      RouterError: the router does not keep to its contract. ValueError: the text is too short.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        config = setup.config
        optimizer, expert_optimizer = make_optimizer(setup.recipe), make_optimizer(setup.expert_recipe)
        self._stream = setup.stream()
        trunk = setup.init_trunk()
        experts = txl.init_experts(jax.random.key(setup.seed), config) if config.is_mixture else ()
        self._state: State = {
            "trunk": trunk,
            "trunk_opt_state": optimizer.init(trunk),
            "experts": experts,
            "expert_opt_states": tuple(init_opt_states(expert_optimizer, layer) for layer in experts),
            "memory": empty_memory(config, setup.rows),
            "load": [jnp.zeros(len(uids), jnp.int32) for uids in setup.layers.values()],
        }
        self._train_step = train_step(config, setup.router, optimizer, expert_optimizer)
        self._step = self._items = 0

    @property
    def step(self) -> int:
        return self._step

    async def advance(self, num_steps: int, on_step: OnStep, on_lost: OnLost) -> None:
        """Make `num_steps` updates, none of which is ever lost; `on_step` is one update behind the device."""
        waiting: tuple[int, StepReport, int] | None = None
        for _ in range(num_steps):
            batch = next(self._stream)
            keys = self.setup.step_keys(trainer=0, step=self._step)
            self._state, report = self._train_step(self._state, batch, keys)
            self._step += 1
            self._items += int(batch.targets.size)
            if waiting is not None:
                on_step(self._record(*waiting))
            waiting = (self._step, report, int(batch.targets.size))
        if waiting is not None:
            on_step(self._record(*waiting))

    def _record(self, step: int, report: StepReport, items: int) -> StepRecord:
        """Wait for a step's figures and look at them."""
        report = jax.device_get(report)
        for layer, hidden_sound, scores_sound in zip(
            self.layers, report.hidden_sound, report.scores_sound, strict=True
        ):
            if not hidden_sound:
                break  # what follows is a consequence
            if not scores_sound and self.setup.router is not None:
                raise RouterError(
                    f"router {self.setup.router.name!r}: its scores or its auxiliary loss in {layer} are not finite "
                    f"numbers in step {step} of {self.name}"
                )
        if not report.is_finite:
            raise FloatingPointError(f"{self.name}: loss {report.nll} of step {step}, or its gradient, is not finite")
        return StepRecord(step=step, trainer=0, loss=float(report.nll), items=items, staleness=0)

    def params(self) -> tuple[PyTree, tuple[PyTree, ...]]:
        return self._state["trunk"], self._state["experts"]

    def state(self) -> State:
        return self._state

    def facts(self) -> dict[str, Any]:
        return {"items": self._items, "position": self._stream.position}

    def load(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        # Copies: the first step donates them, and an array of the caller's may lie under a borrowed one.
        self._state = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)
        self._step, self._items = step, facts["items"]
        self._stream.seek(facts["position"])

    def totals(self) -> Totals:
        counts = zip(self.layers.values(), self._state["load"], strict=True)
        load = {uid: int(count) for uids, layer in counts for uid, count in zip(uids, np.asarray(layer), strict=True)}
        return Totals(items=self._items, load=load)


@functools.cache
def train_step(
    config: TransformerXLConfig,
    router: Router | None,
    optimizer: optax.GradientTransformation,
    expert_optimizer: optax.GradientTransformation,
) -> Callable[[State, Batch, StepKeys], tuple[State, StepReport]]:
    """The jitted (state, batch, keys) -> (state, report); equal arguments share it.

    The state is donated: an update happens in place, and what was given is gone.
    """
    watched = None if router is None else _watched(router)

    def loss(trunk: PyTree, experts: PyTree, batch: Batch, memory: Any, keys: StepKeys) -> tuple[Any, ForwardAux]:
        if watched is None:
            nll, memory = dense_loss(trunk, config, batch, memory, keys)
            return nll, ForwardAux(nll, (), memory)
        memory = forget(memory, jnp.asarray(batch.is_first))
        return txl.local_forward(trunk, experts, config, watched, batch, memory, keys=keys)

    def step(state: State, batch: Batch, keys: StepKeys) -> tuple[State, StepReport]:
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
        norm = optax.tree.norm((grads, expert_grads), squared=True)
        report = StepReport(
            nll=aux.nll,
            is_finite=jnp.isfinite(total) & jnp.isfinite(norm),
            # The memory after the step holds what entered the layer.
            hidden_sound=[jnp.isfinite(past.states).all() for past, _ in zip(aux.memory, aux.layers, strict=False)],
            scores_sound=[jnp.isfinite(layer.aux_loss) for layer in aux.layers],
        )
        return {
            "trunk": optax.apply_updates(trunk, updates),
            "trunk_opt_state": trunk_opt_state,
            "experts": tuple(params for params, _ in updated),
            "expert_opt_states": tuple(opt_state for _, opt_state in updated),
            "memory": aux.memory,
            "load": [count + layer.load for count, layer in zip(state["load"], aux.layers, strict=True)],
        }, report

    return jax.jit(step, donate_argnums=0)


@functools.cache
def _watched(router: Router) -> Router:
    """The router, with an auxiliary loss of NaN where its scores are none (-inf is one: never choose this expert).

    Selection can hide a NaN for a while, which is then harder to trace to the router.
    """

    def aux_loss(scores: Any, indices: Any, mask: Any, traffic: Traffic | None = None) -> Array:
        unsound = [jnp.any(jnp.isnan(part) | jnp.isposinf(part)) for part in scores.logits]
        return jnp.where(jnp.any(jnp.stack(unsound)), jnp.nan, router_loss(router, scores, indices, mask, traffic))

    return router._replace(aux_loss=aux_loss)
