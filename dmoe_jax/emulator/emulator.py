"""An asynchronous swarm as one compiled program.

Theory of operation. Trainers, trunk and experts are arrays: the trunk's parameters and its optimiser's state, those of
all experts with a leading axis, and for each trainer what its present step holds, the parameters that it read at its
beginning included. The program goes through an `EventOrder`, one event after another, and does what the swarm would do:
an expert computes one call with the parameters that it has then, a trainer goes on with the answers that it has. No
network, no DHT and no time is left, so that a run takes hardly longer than its computing; every version that anybody
reads is the one that the order says, so that what comes out equals the swarm's to rounding.

Big arrays are changed in place. XLA copies what passes through a conditional, but not what a loop carries: so the
program has no conditionals, but loops that run while the next event is of their kind.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool, Float, Int, Int32, PRNGKeyArray

from dmoe_jax.emulator.order import BACKWARD, FORWARD, STAGE, EventOrder, num_stages
from dmoe_jax.emulator.stages import Finished, LayerInput, Mixed, ModelMaker, ModelStages
from dmoe_jax.mixture.local import init_experts, init_opt_states
from dmoe_jax.node.backend import buckets_up_to, check_optimizer
from dmoe_jax.routing.base import Scores, cell_numbers
from dmoe_jax.trunk import trunk_update
from dmoe_jax.types import PyTree


class Experts(NamedTuple):
    """All experts of all layers; every leaf has a leading axis of layer * cells + cell.

    Attributes:
      params: parameters.
      opt_state: states of their optimisers.
      updates: int32, updates of each.
    """

    params: PyTree
    opt_state: PyTree
    updates: Int32[jax.Array, " experts"]


class Calls(NamedTuple):
    """The calls of one step of a trainer, for each layer; further axes are samples and slots.

    Attributes:
      inputs: the experts' inputs.
      chosen: int32, the expert of each pair, counted over all layers.
      indices: int32 [..., dims], its coordinates.
      wanted: bool, whether there is an expert in the slot.
      answered: bool, whether it has answered the forward call.
      outputs: what it answered; zeros before.
      seen: int32, how many updates it had then.
      output_grads: gradients of the outputs.
      input_grads: gradients of the differentiable inputs that have come back, summed.
    """

    inputs: tuple[Any, ...]
    chosen: Int32[jax.Array, "layers batch slots"]
    indices: Int32[jax.Array, "layers batch slots dims"]
    wanted: Bool[jax.Array, "layers batch slots"]
    answered: Bool[jax.Array, "layers batch slots"]
    outputs: Float[jax.Array, "layers batch slots ..."]
    seen: Int32[jax.Array, "layers batch slots"]
    output_grads: Float[jax.Array, "layers batch slots ..."]
    input_grads: tuple[Any, ...]


class Trainers(NamedTuple):
    """What each trainer holds; every leaf has a leading axis of trainers.

    Attributes:
      params: the trunk as it was read at the beginning of the step. read_at: int32, its updates then.
      state: what the step began with. next_state: what the next one begins with, if this one succeeds.
      row: int32, which of its batches the step has.
      calls: of the step.
      scores: the routers', one of each layer.
      mixed: what the mixtures returned, one of each layer. mixed_grads: its gradient, as far as it is known.
      score_grads: gradients of the scores. residual_grads: of the experts' first inputs, through the mixture itself.
      grads: gradients of the trunk, as far as they are known.
      loss: what the step reports. total: what is differentiated.
    """

    params: PyTree
    read_at: Int32[jax.Array, " trainers"]
    state: PyTree
    next_state: PyTree
    row: Int32[jax.Array, " trainers"]
    calls: Calls
    scores: tuple[Scores, ...]
    mixed: tuple[Mixed, ...]
    mixed_grads: tuple[Mixed, ...]
    layer_grads: tuple[LayerInput, ...]
    grads: PyTree
    loss: Float[jax.Array, " trainers"]
    total: Float[jax.Array, " trainers"]


class Totals(NamedTuple):
    """What is counted, in all.

    Attributes:
      losses: [updates], the reported loss of each trunk update, nats; NaN before it.
      trunk_staleness: int32 [updates], trunk updates between a step's reading and its writing.
      expert_staleness: sum over backward calls of updates between a call's forward and its backward. calls: their number.
      load: int32 [experts], samples that each expert was trained on.
      rejected: updates, of trunk or experts, that were not finite and left everything as it was.
    """

    losses: Float[jax.Array, " updates"]
    trunk_staleness: Int32[jax.Array, " updates"]
    expert_staleness: Int32[jax.Array, ""]
    calls: Int32[jax.Array, ""]
    load: Int32[jax.Array, " experts"]
    rejected: Int32[jax.Array, ""]


class SwarmState(NamedTuple):
    """A swarm between two events.

    Attributes:
      step: int32, updates of the trunk.
      params, opt_state: the trunk.
      experts, trainers: all of them.
      totals: what was counted.
    """

    step: Int32[jax.Array, ""]
    params: PyTree
    opt_state: PyTree
    experts: Experts
    trainers: Trainers
    totals: Totals


class _Events(NamedTuple):
    kind: Any
    trainer: Any
    layer: Any
    pair: Any
    expert: Any
    answered: Any
    computed: Any


class Data(NamedTuple):
    """What trainers read: leaves [trainers, steps, ...].

    Attributes:
      batches: of the model. keys: chance of each step, from `Model.keys`; None for none.
    """

    batches: PyTree
    keys: PyTree = None


class Emulator:
    """The compiled swarm of one model, for any event order with as many trainers and pairs.

    Args:
      make_model: makes the model from something that makes mixtures, such as
        `lambda swarm: MLP.on(swarm, config, router)`.
      optimizer: the trunk's. expert_optimizer: of every expert, each with a state of its own; None: they never change.
      num_trainers: trainers of the swarm.
      rows: whether a call computes only the rows that it serves, padded to a power of two, as a node does; otherwise
        all rows of the batch, which is right for small experts and needed under `vmap`.

    An update that is not finite is not made, as in the swarm. The emulator looks at the sum of all magnitudes, where a
    node looks at each number: the two differ for finite numbers beyond 1e30 or so.

    Raises:
      ValueError: the layers differ in their experts, an expert takes keys from its node, or an optimiser needs a loss.
    """

    def __init__(
        self,
        make_model: ModelMaker,
        *,
        optimizer: optax.GradientTransformation,
        expert_optimizer: optax.GradientTransformation | None,
        num_trainers: int,
        rows: bool = False,
    ) -> None:
        self.stages = ModelStages(make_model)
        self.num_layers = len(self.stages.layers)
        first = self.stages.layers[0]
        if any(layer[1:] != first[1:] for layer in self.stages.layers):
            raise ValueError("the layers of an emulated model must have the same experts, router and k_best")
        if first.expert.takes_key:
            raise ValueError(f"expert {first.expert.name!r} takes keys from its node, which the emulator has not")
        self.expert, self.router, self.k_best = first.expert, first.router, first.k_best
        self.num_cells = math.prod(self.router.grid_size)
        self.num_trainers = num_trainers
        self._optimizer, self._expert_optimizer = optimizer, expert_optimizer
        if expert_optimizer is not None:
            check_optimizer(self.expert, expert_optimizer)
        self._update_trunk = trunk_update(optimizer)
        self._rows = rows
        self._differentiable = [i for i, spec in enumerate(self.expert.inputs) if spec.differentiable]
        self.run_events = jax.jit(self._run, donate_argnums=0)
        """(state, data, events, start, stop) -> state after events start to stop. The state is donated."""

    def init(self, trunk_key: PRNGKeyArray, expert_key: PRNGKeyArray, data: Data, *, num_updates: int) -> SwarmState:
        """A swarm before its first event. Experts are those that nodes make of the same key.

        Args:
          trunk_key: of the model's `init`. expert_key: a node's `jax.random.key(seed)`.
          data: of the run.
          num_updates: updates of the trunk in all runs of this state, for what is noted of each.
        """
        layers = [
            init_experts(expert_key, self.expert, layer.prefix, self.router.grid_size) for layer in self.stages.layers
        ]
        params = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *layers)
        opt_state = () if self._expert_optimizer is None else init_opt_states(self._expert_optimizer, params)
        experts = self.num_layers * self.num_cells
        trunk = jax.tree.map(jnp.array, self.stages.model.init(trunk_key))
        return SwarmState(
            step=jnp.int32(0),
            params=trunk,
            opt_state=self._optimizer.init(trunk),
            experts=Experts(params, opt_state, jnp.zeros(experts, jnp.int32)),
            trainers=self._init_trainers(trunk, data),
            totals=Totals(
                losses=jnp.full(num_updates, jnp.nan, jnp.float32),
                trunk_staleness=jnp.zeros(num_updates, jnp.int32),
                expert_staleness=jnp.int32(0),
                calls=jnp.int32(0),
                load=jnp.zeros(experts, jnp.int32),
                rejected=jnp.int32(0),
            ),
        )

    def run(self, state: SwarmState, order: EventOrder, data: Data, *, start: int = 0, stop: int | None = None) -> SwarmState:
        """The swarm after events `start` to `stop` of an order. `state` is donated: it cannot be used again.

        Raises:
          ValueError: the order is of another number of trainers, layers or pairs.
        """
        batch = jax.tree.leaves(state.trainers.calls.chosen)[0].shape[-2]
        expected = (self.num_trainers, self.num_layers, batch * state.trainers.calls.chosen.shape[-1])
        given = (order.num_trainers, order.num_layers, order.num_pairs)
        if given != expected:
            raise ValueError(f"expected an order of (trainers, layers, pairs) {expected}, got {given}")
        events = _Events(order.kind, order.trainer, order.layer, order.pair, order.expert, order.answered, order.computed)
        return cast(
            SwarmState, self.run_events(state, data, events, start, len(order.kind) if stop is None else stop)
        )

    def _init_trainers(self, trunk: PyTree, data: Data) -> Trainers:
        """Zeros of the shapes that one step has, for every trainer; only the states mean something."""
        one = jax.tree.map(lambda leaf: jnp.asarray(leaf[0, 0]), data)
        state = self.stages.model.initial_state(jax.tree.map(np.asarray, one.batches))

        def shapes() -> tuple[Any, ...]:
            mixed: list[Mixed] = []
            reached: list[LayerInput] = []
            calls: list[tuple[Any, ...]] = []
            for layer in range(self.num_layers):
                there = self.stages.reach(layer, trunk, one.batches, state, one.keys, mixed)
                indices, wanted = self.router.select(there.scores, self.k_best)
                outputs = jnp.zeros((*wanted.shape, *self.expert.output.shape), self.expert.output.dtype)
                mixed.append(self.stages.mix(layer, indices, wanted, outputs, there))
                reached.append(there)
                calls.append((there.inputs, indices, wanted, outputs))
            return mixed, reached, calls, self.stages.finish(trunk, one.batches, state, one.keys, mixed)

        mixed, reached, calls, finished = jax.eval_shape(shapes)
        inputs, indices, wanted, outputs = jax.tree.map(lambda *leaves: _stacked(leaves), *calls)
        zeros = functools.partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype))
        integers = jnp.zeros(wanted.shape, jnp.int32)
        one_trainer = Trainers(
            params=zeros(trunk),
            read_at=jnp.int32(0),
            state=jax.tree.map(jnp.asarray, state),
            next_state=zeros(finished.state),
            row=jnp.int32(-1),
            calls=Calls(
                inputs=zeros(inputs),
                chosen=integers,
                indices=zeros(indices),
                wanted=zeros(wanted),
                answered=zeros(wanted),
                outputs=zeros(outputs),
                seen=integers,
                output_grads=zeros(outputs),
                input_grads=tuple(zeros(inputs[i]) for i in self._differentiable),
            ),
            scores=tuple(zeros(there.scores) for there in reached),
            mixed=tuple(zeros(mixed)),
            mixed_grads=tuple(zeros(mixed)),
            layer_grads=tuple(LayerInput(zeros(there.scores), (zeros(there.inputs[0]),)) for there in reached),
            grads=zeros(trunk),
            loss=jnp.zeros((), jnp.float32),
            total=jnp.zeros((), jnp.float32),
        )
        return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], self.num_trainers, axis=0), one_trainer)

    def _run(self, state: SwarmState, data: Data, events: _Events, start: Any, stop: Any) -> SwarmState:
        events = jax.tree.map(jnp.asarray, events)
        batch = state.trainers.calls.chosen.shape[-2]
        buckets = buckets_up_to(batch) if self._rows else (batch,)
        handlers: list[tuple[Callable[..., Any], Callable[..., Any]]] = []

        def is_kind(kind: int) -> Callable[..., Any]:
            return lambda event, state: event.kind == kind

        def is_call(kind: int, bucket: int) -> Callable[..., Any]:
            def matches(event: _Events, state: SwarmState) -> Any:
                rows, _ = _pairs_of(state.trainers.calls, event, forward=kind == FORWARD)
                needed = rows.any(axis=-1).sum()
                smaller = 1 if bucket == buckets[0] else bucket // 2 + 1
                return (event.kind == kind) & (needed >= smaller) & (needed <= bucket)

            return matches

        if self._rows:

            def is_nobodys(event: _Events, state: SwarmState) -> Any:
                is_forward = event.kind == FORWARD
                pairs = [_pairs_of(state.trainers.calls, event, forward=forward)[0].any() for forward in (True, False)]
                return (event.kind < STAGE) & ~jnp.where(is_forward, *pairs)

            handlers.append((is_nobodys, lambda state, event: state))
        for bucket in buckets:
            whole = len(buckets) == 1
            for kind, compute in ((FORWARD, self._forward), (BACKWARD, self._backward)):
                handlers.append(
                    (is_kind(kind) if whole else is_call(kind, bucket), functools.partial(compute, rows=bucket))
                )
        for stage in range(num_stages(self.num_layers)):
            handlers.append((is_kind(STAGE + stage), functools.partial(self._stage, stage, data)))

        def at(place: Any) -> _Events:
            return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False), events)

        def round_of_all(carry: tuple[Any, SwarmState]) -> tuple[Any, SwarmState]:
            for matches, handle in handlers:

                def more(carry: tuple[Any, SwarmState], matches: Any = matches) -> Any:
                    place, state = carry
                    return (place < stop) & matches(at(place), state)

                def one(carry: tuple[Any, SwarmState], handle: Any = handle) -> tuple[Any, SwarmState]:
                    place, state = carry
                    return place + 1, handle(state, at(place))

                carry = jax.lax.while_loop(more, one, carry)
            return carry

        _, state = jax.lax.while_loop(lambda carry: carry[0] < stop, round_of_all, (jnp.asarray(start), state))
        return state

    # -- what experts do

    def _forward(self, state: SwarmState, event: _Events, *, rows: int) -> SwarmState:
        calls = state.trainers.calls
        pairs, chosen = _pairs_of(calls, event, forward=True)
        place = event.trainer, event.layer
        taken = _first_rows(pairs, rows)
        params = _at(state.experts.params, chosen)
        computed = self.expert.apply(params, *(array[place][taken] for array in calls.inputs))
        outputs = jnp.zeros((pairs.shape[0], *computed.shape[1:]), computed.dtype).at[taken].set(computed)
        answers = pairs & event.answered
        cell = (...,) + (None,) * (outputs.ndim - 1)
        calls = calls._replace(
            outputs=calls.outputs.at[place].set(jnp.where(answers[cell], outputs[:, None], calls.outputs[place])),
            answered=calls.answered.at[place].set(calls.answered[place] | answers),
            seen=calls.seen.at[place].set(jnp.where(pairs, state.experts.updates[chosen], calls.seen[place])),
        )
        return state._replace(trainers=state.trainers._replace(calls=calls))

    def _backward(self, state: SwarmState, event: _Events, *, rows: int) -> SwarmState:
        calls, experts, totals = state.trainers.calls, state.experts, state.totals
        pairs, chosen = _pairs_of(calls, event, forward=False)
        place = event.trainer, event.layer
        taken = _first_rows(pairs, rows)
        cell = (...,) + (None,) * (calls.outputs.ndim - 4)
        output_grads = jnp.sum(jnp.where(pairs[cell], calls.output_grads[place], 0), axis=1)[taken]
        params = _at(experts.params, chosen)
        inputs = tuple(array[place][taken] for array in calls.inputs)
        param_grads, input_grads = self._expert_grads(params, inputs, output_grads)
        seen = jnp.max(jnp.where(pairs, calls.seen[place], 0))
        staleness = experts.updates[chosen] - seen
        does = pairs.any() & event.computed
        learns = does & _is_finite(jax.tree.map(jnp.zeros_like, input_grads), input_grads)
        if self._expert_optimizer is not None:
            old = params, _at(experts.opt_state, chosen)
            updates, opt_state = self._expert_optimizer.update(param_grads, old[1], params)
            new = jax.tree.map(
                lambda after, before: after.astype(before.dtype), (optax.apply_updates(params, updates), opt_state), old
            )
            # Every write waits for this look at all that is new, and so for all reads. Where an array might be written
            # while it is still to be read for another one, XLA copies all experts.
            learns &= _is_finite(old, new)
            new = jax.tree.map(lambda after, before: jnp.where(learns, after, before), new, old)
            experts = Experts(
                params=_set(experts.params, chosen, new[0]),
                opt_state=_set(experts.opt_state, chosen, new[1]),
                updates=experts.updates.at[chosen].add(learns.astype(jnp.int32)),
            )
        own = pairs.any(axis=1)[taken] & event.answered & learns
        summed = tuple(
            total.at[(*place, taken)].add(jnp.where(own[(...,) + (None,) * (grad.ndim - 1)], grad, 0))
            for total, grad in zip(calls.input_grads, input_grads, strict=True)
        )
        totals = totals._replace(
            calls=totals.calls + learns,
            expert_staleness=totals.expert_staleness + jnp.where(learns, staleness, 0),
            load=totals.load.at[chosen].add(jnp.where(learns, pairs.sum(), 0)),
            rejected=totals.rejected + (does & ~learns),
        )
        trainers = state.trainers._replace(calls=calls._replace(input_grads=summed))
        return state._replace(experts=experts, trainers=trainers, totals=totals)

    def _expert_grads(self, params: PyTree, inputs: tuple[Any, ...], output_grads: Any) -> tuple[PyTree, list[Any]]:
        """Gradients of an expert's parameters and of its differentiable inputs, in order."""

        def output(params: PyTree, chosen: list[Any]) -> Any:
            merged = list(inputs)
            for place, value in zip(self._differentiable, chosen, strict=True):
                merged[place] = value
            return self.expert.apply(params, *merged)

        _, pull_back = jax.vjp(output, params, [inputs[i] for i in self._differentiable])
        return cast(tuple[PyTree, list[Any]], pull_back(output_grads))

    # -- what trainers do

    def _stage(self, stage: int, data: Data, state: SwarmState, event: _Events) -> SwarmState:
        t, layers = event.trainer, self.num_layers
        if stage == 0:  # a new step reads the trunk
            state = _start(state, t)
        # The parameters are sliced inside of what needs them: a trainer reads a small part of its copy in most stages.
        own: Trainers = _at(state.trainers, t)
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
        return self.stages.mix(layer, calls.indices[layer], calls.answered[layer], calls.outputs[layer], there)

    def _call_layer(self, own: Trainers, layer: int, batch: PyTree, keys: PyTree) -> Trainers:
        there = self.stages.reach(layer, own.params, batch, own.state, keys, own.mixed)
        indices, wanted = self.router.select(there.scores, self.k_best)
        calls = own.calls
        chosen = layer * self.num_cells + cell_numbers(indices, self.router.grid_size)
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
            finished = self.stages.finish(params, batch, own.state, keys, mixed)
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
            return self.stages.mix(layer, calls.indices[layer], calls.answered[layer], outputs, there)

        _, pull = jax.vjp(mix, calls.outputs[layer], own.scores[layer], calls.inputs[0][layer])
        output_grads, score_grads, first_grads = pull(own.mixed_grads[layer])
        own = own._replace(calls=calls._replace(output_grads=calls.output_grads.at[layer].set(output_grads)))
        return _with(own, "layer_grads", layer, LayerInput(score_grads, (first_grads,)))

    def _pull_back(self, own: Trainers, layer: int, batch: PyTree, keys: PyTree) -> Trainers:
        """Through the model up to a layer: with what has come back from its experts, to the layers before and the trunk."""

        def reach(params: PyTree, mixed: tuple[Mixed, ...]) -> tuple[Scores, tuple[Any, ...]]:
            there = self.stages.reach(layer, params, batch, own.state, keys, mixed)
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
        finite = jnp.isfinite(own.total) & _is_finite(jax.tree.map(jnp.zeros_like, own.grads), own.grads)
        params, opt_state = self._update_trunk(state.params, state.opt_state, own.grads, None)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (params, opt_state), (state.params, state.opt_state)
        )
        totals = state.totals
        totals = totals._replace(
            losses=totals.losses.at[state.step].set(jnp.where(finite, own.loss, jnp.nan)),
            trunk_staleness=totals.trunk_staleness.at[state.step].set(state.step - own.read_at),
            rejected=totals.rejected + ~finite,
        )
        own = own._replace(
            state=jax.tree.map(lambda new, old: jnp.where(finite, new, old), own.next_state, own.state)
        )
        return state._replace(step=state.step + 1, params=params, opt_state=opt_state, totals=totals), own


def _start(state: SwarmState, t: Any) -> SwarmState:
    trainers = state.trainers
    return state._replace(
        trainers=trainers._replace(
            params=_set(trainers.params, t, state.params),
            read_at=trainers.read_at.at[t].set(state.step),
            row=trainers.row.at[t].add(1),
        )
    )


def _set_changed(trainers: Trainers, t: Any, own: Trainers, stage: int, layers: int) -> Trainers:
    """Write back what a stage may have changed; its parameters never, and gradients of the trunk from the loss on."""
    fields = ["calls", "scores", "mixed"] if stage < layers else ["calls", "mixed", "mixed_grads", "layer_grads", "grads"]
    if stage == layers:
        fields += ["next_state", "loss", "total"]
    if stage == num_stages(layers) - 1:
        fields = ["state"]
    return trainers._replace(**{name: _set(getattr(trainers, name), t, getattr(own, name)) for name in fields})


def _pairs_of(calls: Calls, event: _Events, *, forward: bool) -> tuple[Any, Any]:
    """(the pairs that a call serves, bool [batch, slots], none if it is another call's; the expert)."""
    place = event.trainer, event.layer
    chosen = calls.chosen[place]
    expert = jnp.where(event.expert < 0, chosen.reshape(-1)[event.pair], event.expert)
    there = calls.wanted[place] if forward else calls.answered[place]
    pairs = (chosen == expert) & there
    flat = pairs.reshape(-1)
    is_first = (event.expert >= 0) | (flat[event.pair] & (jnp.argmax(flat) == event.pair))
    return pairs & is_first & event.computed, expert


def _first_rows(pairs: Any, rows: int) -> Any:
    """The numbers of `rows` samples, those that a call serves first."""
    if rows == pairs.shape[0]:
        return jnp.arange(rows)
    return jnp.argsort(~pairs.any(axis=1), stable=True)[:rows]


def _is_finite(before: PyTree, after: PyTree) -> Any:
    """Whether the sum of the magnitudes of what was finite before is a number: one pass, where a node makes two."""

    def magnitude(old: Any, new: Any) -> Any:
        return jnp.sum(jnp.where(jnp.isfinite(old), jnp.abs(new), 0), dtype=jnp.float32)

    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return jnp.isfinite(sum(magnitude(old, new) for old, new in pairs if jnp.issubdtype(new.dtype, jnp.inexact)))


def _at(tree: PyTree, place: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[place], tree)


def _set(tree: PyTree, place: Any, value: PyTree) -> Any:
    return jax.tree.map(lambda leaf, own: leaf.at[place].set(own), tree, value)


def _with(own: Trainers, field: str, layer: int, value: Any) -> Trainers:
    values: Sequence[Any] = getattr(own, field)
    return own._replace(**{field: (*values[:layer], value, *values[layer + 1 :])})


def _stacked(leaves: Sequence[Any]) -> Any:
    return jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), leaves[0].dtype)
