"""What the trainers of an emulated swarm do between their waits for experts."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dmoe_jax.emulator.data import Data
from dmoe_jax.emulator.order import num_stages
from dmoe_jax.emulator.stages import Finished, LayerInput, Mixed, ModelStages
from dmoe_jax.emulator.state import Events, SwarmState, Trainers, at, is_finite, put
from dmoe_jax.routing.base import Scores, cell_numbers
from dmoe_jax.trunk import trunk_update
from dmoe_jax.types import PyTree


class TrainerSide:
    """All trainers, and their trunk.

    Args:
      stages: the model. optimizer: of the trunk.
    """

    def __init__(self, stages: ModelStages, optimizer: optax.GradientTransformation) -> None:
        self._stages, self._num_layers = stages, len(stages.layers)
        layer = stages.layers[0]
        self._router, self._k_best, self._num_cells = layer.router, layer.k_best, math.prod(layer.router.grid_size)
        self._update_trunk = trunk_update(optimizer)
        self._differentiable = [i for i, spec in enumerate(layer.expert.inputs) if spec.differentiable]

    def stage(self, stage: int, data: Data, state: SwarmState, event: Events) -> SwarmState:
        """A trainer does what it does between two waits; see `num_stages` for their numbers."""
        t, layers = event.trainer, self._num_layers
        if stage == 0:  # a new step reads the trunk
            state = _start(state, t)
        # XLA reads of this only what the stage uses: mostly a small part of the trunk.
        own: Trainers = at(state.trainers, t)
        batch, keys = jax.tree.map(lambda leaf: jnp.asarray(leaf)[t, own.row], data)

        if 0 < stage <= layers:  # mix what has come
            own = _with(own, "mixed", stage - 1, self._mix(own, stage - 1))
        if stage < layers:
            own = self._call_layer(own, stage, batch, keys)
        elif stage == layers:
            own = self._turn(own, batch, keys)
            own = self._call_back(own, layers - 1)
        elif stage < num_stages(layers) - 1:
            layer = num_stages(layers) - 1 - stage
            own = self._pull_back(own, layer, batch, keys)
            own = self._call_back(own, layer - 1)
        else:
            own = self._pull_back(own, 0, batch, keys)
            state, own = self._apply(state, own)
        return state._replace(trainers=_set_changed(state.trainers, t, own, stage, layers))

    def _layer_input(self, own: Trainers, layer: int) -> LayerInput:
        return LayerInput(own.scores[layer], tuple(array[layer] for array in own.calls.inputs))

    def _mix(self, own: Trainers, layer: int) -> Mixed:
        calls = own.calls
        there = self._layer_input(own, layer)
        return self._stages.mix(layer, calls.indices[layer], calls.answered[layer], calls.outputs[layer], there)

    def _call_layer(self, own: Trainers, layer: int, batch: PyTree, keys: PyTree) -> Trainers:
        there = self._stages.reach(layer, own.params, batch, own.state, keys, own.mixed)
        indices, wanted = self._router.select(there.scores, self._k_best)
        calls = own.calls
        chosen = layer * self._num_cells + cell_numbers(indices, self._router.grid_size)
        calls = calls._replace(
            inputs=tuple(all_.at[layer].set(new) for all_, new in zip(calls.inputs, there.inputs, strict=True)),
            chosen=calls.chosen.at[layer].set(chosen.astype(jnp.int32)),
            indices=calls.indices.at[layer].set(indices),
            wanted=calls.wanted.at[layer].set(wanted),
            answered=calls.answered.at[layer].set(False),
            outputs=calls.outputs.at[layer].set(0),
            input_grads=tuple(array.at[layer].set(0) for array in calls.input_grads),
        )
        return _with(own._replace(calls=calls), "scores", layer, there.scores)

    def _turn(self, own: Trainers, batch: PyTree, keys: PyTree) -> Trainers:
        """The loss, and its gradients for the trunk and for what the mixtures returned."""

        def loss(params: PyTree, mixed: tuple[Mixed, ...]) -> tuple[Any, Finished]:
            finished = self._stages.finish(params, batch, own.state, keys, mixed)
            return finished.loss, finished

        (total, finished), (grads, mixed_grads) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
            own.params, own.mixed
        )
        return own._replace(
            grads=grads,
            mixed_grads=mixed_grads,
            next_state=finished.state,
            loss=finished.reported.astype(jnp.float32),
            total=total.astype(jnp.float32),
        )

    def _call_back(self, own: Trainers, layer: int) -> Trainers:
        """Through the mixing of a layer: the gradients that its experts are sent."""
        calls = own.calls

        def mix(outputs: Any, scores: Scores, first: Any) -> Mixed:
            there = LayerInput(scores, (first,))
            return self._stages.mix(layer, calls.indices[layer], calls.answered[layer], outputs, there)

        _, pull = jax.vjp(mix, calls.outputs[layer], own.scores[layer], calls.inputs[0][layer])
        output_grads, score_grads, first_grads = pull(own.mixed_grads[layer])
        own = own._replace(calls=calls._replace(output_grads=calls.output_grads.at[layer].set(output_grads)))
        return _with(own, "layer_grads", layer, LayerInput(score_grads, (first_grads,)))

    def _pull_back(self, own: Trainers, layer: int, batch: PyTree, keys: PyTree) -> Trainers:
        """Through the model up to a layer: from its experts' answers to the layers before it and to the trunk."""

        def reach(params: PyTree, mixed: tuple[Mixed, ...]) -> tuple[Scores, tuple[Any, ...]]:
            there = self._stages.reach(layer, params, batch, own.state, keys, mixed)
            return there.scores, tuple(there.inputs[i] for i in self._differentiable)

        back = [array[layer] for array in own.calls.input_grads]
        scores, (first,) = own.layer_grads[layer]
        if 0 in self._differentiable:
            back[0] = back[0] + first
        _, pull = jax.vjp(reach, own.params, own.mixed)
        grads, mixed_grads = pull((scores, tuple(back)))
        return own._replace(
            grads=jax.tree.map(jnp.add, own.grads, grads),
            mixed_grads=jax.tree.map(jnp.add, own.mixed_grads, mixed_grads),
        )

    def _apply(self, state: SwarmState, own: Trainers) -> tuple[SwarmState, Trainers]:
        """The trunk's update, unless loss or gradient are no numbers: such a step is lost."""
        finite = jnp.isfinite(own.total) & is_finite(jax.tree.map(jnp.zeros_like, own.grads), own.grads)
        staleness = state.step - own.read_at
        params, opt_state = self._update_trunk(
            state.params, state.opt_state, own.grads, None, staleness.astype(jnp.float32), own.params
        )
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (params, opt_state), (state.params, state.opt_state)
        )
        totals = state.totals
        totals = totals._replace(
            losses=totals.losses.at[state.step].set(jnp.where(finite, own.loss, jnp.nan)),
            trunk_staleness=totals.trunk_staleness.at[state.step].set(staleness),
            rejected=totals.rejected + jnp.logical_not(finite),
        )
        own = own._replace(state=jax.tree.map(lambda new, old: jnp.where(finite, new, old), own.next_state, own.state))
        return state._replace(step=state.step + 1, params=params, opt_state=opt_state, totals=totals), own


def _start(state: SwarmState, t: Any) -> SwarmState:
    trainers = state.trainers
    return state._replace(
        trainers=trainers._replace(
            params=put(trainers.params, t, state.params),
            read_at=trainers.read_at.at[t].set(state.step),
            row=trainers.row.at[t].add(1),
        )
    )


def _set_changed(trainers: Trainers, t: Any, own: Trainers, stage: int, layers: int) -> Trainers:
    """Write back what a stage may have changed; its parameters never, and gradients of the trunk from the loss on."""
    fields = (
        ["calls", "scores", "mixed"] if stage < layers else ["calls", "mixed", "mixed_grads", "layer_grads", "grads"]
    )
    if stage == layers:
        fields += ["next_state", "loss", "total"]
    if stage == num_stages(layers) - 1:
        fields = ["state"]
    return trainers._replace(**{name: put(getattr(trainers, name), t, getattr(own, name)) for name in fields})


def _with(own: Trainers, field: str, layer: int, value: Any) -> Trainers:
    values: Sequence[Any] = getattr(own, field)
    changed: dict[str, Any] = {field: (*values[:layer], value, *values[layer + 1 :])}
    return own._replace(**changed)
