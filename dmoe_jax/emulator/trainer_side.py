"""Work of an emulated swarm's trainers between their waits for experts."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Var

from dmoe_jax.arrays import PyTree
from dmoe_jax.emulator.events import Events
from dmoe_jax.emulator.order import num_stages
from dmoe_jax.emulator.stages import Finished, LayerInput, Mixed, ModelStages
from dmoe_jax.emulator.state import Calls, Data, SwarmState, Trainers, at, is_finite, put
from dmoe_jax.routing.base import Scores, cell_numbers
from dmoe_jax.trunk import trunk_update

_Read = tuple[PyTree, Sequence[Mixed]]
"""Arrays that a stage reads and gives gradients to: the trunk, and the results of the mixtures."""


class TrainerSide:
    """All trainers of a model, and their trunk."""

    def __init__(self, stages: ModelStages, optimizer: optax.GradientTransformation) -> None:
        self._stages, self._num_layers = stages, len(stages.layers)
        layer = stages.layers[0]
        self._router, self._k_best, self._num_cells = layer.router, layer.k_best, math.prod(layer.router.grid_size)
        self._update_trunk = trunk_update(optimizer)
        self._read: Sequence[Sequence[bool]] | None = None
        self._differentiable = [i for i, spec in enumerate(layer.expert.inputs) if spec.differentiable]

    def stage(self, stage: int, data: Data, state: SwarmState, event: Events, *, trusts: bool) -> SwarmState:
        """The swarm after a trainer has done what it does between two waits; see `num_stages` for their numbers.

        Args:
          trusts: an update that is not finite is made all the same, and only counted.
        """
        t, layers = event.trainer, self._num_layers
        if stage == 0:  # a new step reads the trunk
            trainers = state.trainers
            trainers = trainers._replace(
                params=put(trainers.params, t, state.params),
                read_at=trainers.read_at.at[t].set(state.step),
                row=trainers.row.at[t].add(1),
            )
            state = state._replace(trainers=trainers)
        # XLA reads of this only what the stage uses: mostly a small part of the trunk.
        before: Trainers = at(state.trainers, t)
        own = before
        batch, keys = jax.tree.map(lambda leaf: jnp.asarray(leaf)[t, own.row], data)

        if 0 < stage <= layers:  # mix what has come
            calls = own.calls[stage - 1]
            mixed = self._mix(stage - 1, calls, calls.outputs, own.scores[stage - 1], calls.inputs[0])
            own = _with(own, "mixed", stage - 1, mixed)
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
            state, own = self._apply(state, own, trusts)
            own = own._replace(grads=before.grads)  # they have been used
        changed = jax.tree.map(
            lambda leaf, old, new: leaf if new is old else put(leaf, t, new), state.trainers, before, own
        )
        return state._replace(trainers=changed)

    def _mix(self, layer: int, calls: Calls, outputs: Any, scores: Scores, first: Any) -> Mixed:
        """The mixture of these outputs; `first` is the experts' first input."""
        there = LayerInput(scores, (first,))
        return self._stages.mix(layer, calls.indices, calls.wanted, calls.answered, outputs, there)

    def _call_layer(self, own: Trainers, layer: int, batch: PyTree, keys: PyTree) -> Trainers:
        there = self._stages.reach(layer, own.params, batch, own.state, keys, own.mixed)
        indices, wanted = self._router.select(there.scores, self._k_best)
        calls = own.calls[layer]
        calls = calls._replace(
            inputs=there.inputs,
            chosen=cell_numbers(indices, self._router.grid_size).astype(jnp.int32),
            indices=indices,
            wanted=wanted,
            answered=jnp.zeros_like(calls.answered),
            outputs=jnp.zeros_like(calls.outputs),
            input_grads=jax.tree.map(jnp.zeros_like, calls.input_grads),
        )
        return _with(_with(own, "calls", layer, calls), "scores", layer, there.scores)

    def _turn(self, own: Trainers, batch: PyTree, keys: PyTree) -> Trainers:
        """The loss, and its gradients for the trunk and for what the mixtures returned."""
        reads = self._reads(own, batch, keys)
        loss = functools.partial(self._finish, own.state, batch, keys)
        total, pull, finished = vjp_of_used(loss, (own.params, own.mixed), reads[self._num_layers])
        own = _with_grads(own, reads, self._num_layers, pull(jnp.ones_like(total)))
        return own._replace(
            next_state=finished.state,
            loss=finished.reported.astype(jnp.float32),
            total=total.astype(jnp.float32),
        )

    def _call_back(self, own: Trainers, layer: int) -> Trainers:
        """Through the mixing of a layer: the gradients that its experts are sent."""
        calls = own.calls[layer]
        mix = functools.partial(self._mix, layer, calls)
        _, pull = jax.vjp(mix, calls.outputs, own.scores[layer], calls.inputs[0])
        output_grads, score_grads, first_grads = pull(own.mixed_grads[layer])
        own = _with(own, "calls", layer, calls._replace(output_grads=output_grads))
        return _with(own, "layer_grads", layer, LayerInput(score_grads, (first_grads,)))

    def _pull_back(self, own: Trainers, layer: int, batch: PyTree, keys: PyTree) -> Trainers:
        """Through the model up to a layer: from its experts' answers to the layers before it and to the trunk."""
        back = list(own.calls[layer].input_grads)
        scores, (first,) = own.layer_grads[layer]
        if 0 in self._differentiable:
            back[0] = back[0] + first
        reads = self._reads(own, batch, keys)
        reach = functools.partial(self._reach, layer, own.state, batch, keys)
        _, pull, _ = vjp_of_used(reach, (own.params, own.mixed), reads[layer])
        return _with_grads(own, reads, layer, pull((scores, tuple(back))))

    def _finish(self, state: PyTree, batch: PyTree, keys: PyTree, read: _Read) -> tuple[Any, Finished]:
        finished = self._stages.finish(read[0], batch, state, keys, read[1])
        return finished.loss, finished

    def _reach(self, layer: int, state: PyTree, batch: PyTree, keys: PyTree, read: _Read) -> tuple[Any, None]:
        there = self._stages.reach(layer, read[0], batch, state, keys, read[1])
        return (there.scores, tuple(there.inputs[i] for i in self._differentiable)), None

    def _reads(self, own: Trainers, batch: PyTree, keys: PyTree) -> Sequence[Sequence[bool]]:
        """For each layer, and for the loss at the end: which arrays of trunk and mixtures the way there reads."""
        if self._read is None:
            read = own.params, own.mixed
            rest = own.state, batch, keys
            self._read = [
                *(used_leaves(functools.partial(self._reach, layer), read, *rest) for layer in range(self._num_layers)),
                used_leaves(self._finish, read, *rest),
            ]
        return self._read

    def _apply(self, state: SwarmState, own: Trainers, trusts: bool) -> tuple[SwarmState, Trainers]:
        """The trunk's update, unless loss or gradient are no numbers: such a step is lost."""
        finite = jnp.isfinite(own.total) & is_finite(jax.tree.map(jnp.zeros_like, own.grads), own.grads)
        staleness = state.step - own.read_at
        opt_state, params = self._update_trunk(
            state.params, state.opt_state, own.grads, None, staleness.astype(jnp.float32), own.params
        )
        new = params, opt_state, own.next_state
        if not trusts:
            old = state.params, state.opt_state, own.state
            new = jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, old)
        totals = state.totals
        totals = totals._replace(
            losses=totals.losses.at[state.step].set(jnp.where(finite, own.loss, jnp.nan)),
            staleness=totals.staleness.at[state.step].set(staleness),
            rejected=totals.rejected + jnp.logical_not(finite),
        )
        state = state._replace(step=state.step + 1, params=new[0], opt_state=new[1], totals=totals)
        return state, own._replace(state=new[2])


def _with_grads(own: Trainers, reads: Sequence[Sequence[bool]], stage: int, found: Sequence[Any]) -> Trainers:
    """Note gradients of what a stage has read, from the loss, stage `num_layers`, back to the first layer.

    The first to read an array sets its gradient, which is still that of the trainer's last step, and others add to it.
    """
    held, treedef = jax.tree.flatten((own.grads, own.mixed_grads))
    ways = iter(found)
    for place, is_read in enumerate(reads[stage]):
        if is_read:
            noted = any(reads[later][place] for later in range(stage + 1, len(reads)))
            gradient = next(ways)
            held[place] = held[place] + gradient if noted else gradient
    grads, mixed_grads = jax.tree.unflatten(treedef, held)
    return own._replace(grads=grads, mixed_grads=mixed_grads)


def _with(own: Trainers, field: str, layer: int, value: Any) -> Trainers:
    values: Sequence[Any] = getattr(own, field)
    changed: dict[str, Any] = {field: (*values[:layer], value, *values[layer + 1 :])}
    return own._replace(**changed)


def used_leaves(function: Callable[..., PyTree], read: PyTree, *rest: PyTree) -> Sequence[bool]:
    """For each leaf of `read`: True if something that `function(*rest, read)` returns may depend on it.

    A stage of a model reads a few of the trunk's arrays. Gradients of the others are zeros, as long as these arrays,
    and adding them up would cost more than all the rest.
    """
    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (read, rest))
    jaxpr = jax.make_jaxpr(lambda read, rest: function(*rest, read))(*args).jaxpr
    needed = {var for var in jaxpr.outvars if isinstance(var, Var)}
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed.update(var for var in equation.invars if isinstance(var, Var))
    return [var in needed for var in jaxpr.invars[: len(jax.tree.leaves(read))]]


def vjp_of_used(
    function: Callable[[PyTree], tuple[PyTree, Any]], read: PyTree, used: Sequence[bool]
) -> tuple[PyTree, Callable[[PyTree], Sequence[Any]], Any]:
    """`jax.vjp` of a function with an auxiliary output, for the leaves of `read` that it uses.

    Returns: (output, from its gradient to those of the leaves that are used, in order; auxiliary output).
    """
    leaves, treedef = jax.tree.flatten(read)

    def of_used(chosen: Sequence[Any]) -> tuple[PyTree, Any]:
        ways = iter(chosen)
        merged = [next(ways) if is_used else leaf for leaf, is_used in zip(leaves, used, strict=True)]
        return function(jax.tree.unflatten(treedef, merged))

    chosen = [leaf for leaf, is_used in zip(leaves, used, strict=True) if is_used]
    output, pull, aux = jax.vjp(of_used, chosen, has_aux=True)
    return output, lambda gradient: pull(gradient)[0], aux
