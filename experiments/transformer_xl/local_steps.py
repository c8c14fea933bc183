"""One training step of each model, all of it in one jitted call. The state is donated: an update happens in place."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from dmoe_jax.data.batches import Batch
from dmoe_jax.mixture.local import update_experts
from dmoe_jax.models import dense_transformer_xl as dense
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.layers import ForwardAux
from dmoe_jax.models.trunk import Memory, StepKeys, forget
from dmoe_jax.routing.base import Router
from dmoe_jax.types import PyTree

State = dict[str, PyTree]


class StepReport(NamedTuple):
    """What a step tells the host.

    Attributes:
      nll: mean negative log-likelihood of the batch, nats per token; without auxiliary losses.
      is_finite: whether the loss and all gradients are finite.
      hidden_sound: for each mixture, whether what entered it is finite. Empty for a dense model.
      scores_sound: for each mixture, whether the router's scores and auxiliary loss are numbers.
    """

    nll: Float[Array, ""]
    is_finite: Bool[Array, ""]
    hidden_sound: Bool[Array, " layers"]
    scores_sound: Bool[Array, " layers"]


TrainStep = Callable[[State, Batch, StepKeys], tuple[State, StepReport]]
"""(state, batch, keys) -> (state, report); the state that was given is gone."""


@functools.cache
def dense_step(config: TransformerXLConfig, optimizer: optax.GradientTransformation) -> TrainStep:
    """The jitted step of a dense model; equal arguments share it."""

    def step(state: State, batch: Batch, keys: StepKeys) -> tuple[State, StepReport]:
        memory = forget(state["memory"], jnp.asarray(batch.is_first))

        def loss(params: PyTree) -> tuple[Float[Array, ""], Memory]:
            nll, memory_after = dense.forward(params, config, batch, memory, keys=keys)
            return jnp.mean(nll), memory_after

        (nll, memory), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        params, opt_state = _apply(optimizer, grads, state["opt_state"], state["params"])
        none = jnp.zeros(0, bool)
        return {"params": params, "opt_state": opt_state, "memory": memory}, StepReport(
            nll, _all_finite(nll, grads), none, none
        )

    return jax.jit(step, donate_argnums=0)


@functools.cache
def dmoe_step(
    config: TransformerXLConfig,
    router: Router,
    optimizer: optax.GradientTransformation,
    expert_optimizer: optax.GradientTransformation,
) -> TrainStep:
    """The jitted step of a DMoE model; equal arguments share it."""
    watched = _watched(router)

    def step(state: State, batch: Batch, keys: StepKeys) -> tuple[State, StepReport]:
        memory = forget(state["memory"], jnp.asarray(batch.is_first))

        def loss(trunk: PyTree, experts: PyTree) -> tuple[Float[Array, ""], ForwardAux]:
            return txl.local_forward(trunk, experts, config, watched, batch, memory, keys=keys)

        gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (total, aux), (grads, expert_grads) = gradient(state["trunk"], state["experts"])
        trunk, trunk_opt_state = _apply(optimizer, grads, state["trunk_opt_state"], state["trunk"])
        load = jnp.stack([layer.load for layer in aux.layers])
        updated = [
            update_experts(
                expert_optimizer,
                state["experts"][i],
                state["expert_opt_states"][i],
                expert_grads[i],
                load[i] > 0,
            )
            for i in range(config.num_layers)
        ]
        experts, expert_opt_states = zip(*updated, strict=True)
        report = StepReport(
            nll=aux.nll,
            is_finite=_all_finite(total, (grads, expert_grads)),
            # The memory after the step holds what entered the layer.
            hidden_sound=jnp.stack([jnp.isfinite(layer.states).all() for layer in aux.memory]),
            scores_sound=jnp.stack([jnp.isfinite(layer.aux_loss) for layer in aux.layers]),
        )
        return {
            "trunk": trunk,
            "trunk_opt_state": trunk_opt_state,
            "experts": experts,
            "expert_opt_states": expert_opt_states,
            "memory": aux.memory,
            "load": state["load"] + load,
        }, report

    return jax.jit(step, donate_argnums=0)


@functools.cache
def _watched(router: Router) -> Router:
    """The router, with an auxiliary loss of NaN where its scores are none (-inf is one: never choose this expert).

    Selection can hide a NaN for a while, which is then harder to trace to the router.
    """

    def aux_loss(scores: Any, indices: Any, mask: Any) -> Array:
        unsound = [jnp.any(jnp.isnan(part) | jnp.isposinf(part)) for part in scores.logits]
        return jnp.where(jnp.any(jnp.stack(unsound)), jnp.nan, router.aux_loss(scores, indices, mask))

    return router._replace(aux_loss=aux_loss)


def _apply(
    optimizer: optax.GradientTransformation, grads: PyTree, opt_state: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def _all_finite(loss: Float[Array, ""], grads: PyTree) -> Bool[Array, ""]:
    return jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(grads, squared=True))
