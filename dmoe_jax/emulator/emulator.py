"""An asynchronous swarm as one compiled program.

Theory of operation. Trainers, trunk and experts are arrays: the trunk's parameters and its optimiser's state, those of
all experts with a leading axis, and for each trainer what its present step holds, the parameters that it read at its
beginning included. The program goes through an `EventOrder`, one event after another, and does what the swarm would do:
an expert computes one call with the parameters that it has then, a trainer goes on with the answers that it has. No
network, no DHT and no time is left, so that a run takes hardly longer than its computing; every version that anybody
reads is the one that the order says, so that what comes out equals the swarm's to rounding.

Big arrays are changed in place, see `dmoe_jax.emulator.loop`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PRNGKeyArray

from dmoe_jax.emulator.expert_side import ExpertSide, pairs_of
from dmoe_jax.emulator.loop import Handler, run_events
from dmoe_jax.emulator.order import BACKWARD, FORWARD, STAGE, EventOrder, num_stages
from dmoe_jax.emulator.stages import LayerInput, Mixed, ModelMaker, ModelStages
from dmoe_jax.emulator.state import Calls, Data, Events, Experts, SwarmState, Totals, Trainers
from dmoe_jax.emulator.trainer_side import TrainerSide
from dmoe_jax.mixture.local import init_experts, init_opt_states
from dmoe_jax.node.backend import buckets_up_to
from dmoe_jax.types import PyTree


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
        self.expert, self.router, self.k_best = first.expert, first.router, first.k_best
        self.num_cells = math.prod(self.router.grid_size)
        self.num_trainers = num_trainers
        self._optimizer, self._expert_optimizer = optimizer, expert_optimizer
        self._experts = ExpertSide(self.expert, expert_optimizer)
        self._trainers = TrainerSide(self.stages, optimizer)
        self._rows = rows
        self._differentiable = [i for i, spec in enumerate(self.expert.inputs) if spec.differentiable]
        self._run_jitted = jax.jit(self._run, donate_argnums=0)

    def init(self, trunk_key: PRNGKeyArray, expert_key: PRNGKeyArray, data: Data, *, num_updates: int) -> SwarmState:
        """A swarm before its first event. Experts are those that nodes make of the same key.

        Args:
          trunk_key: of the model's `init`. expert_key: a node's `jax.random.key(seed)`.
          data: of the run.
          num_updates: updates of the trunk in all runs of this state, for what is noted of each.
        """
        params, opt_state = self._init_experts(expert_key)
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

    def run(
        self, state: SwarmState, order: EventOrder, data: Data, *, start: int = 0, stop: int | None = None
    ) -> SwarmState:
        """The swarm after events `start` to `stop` of an order. `state` is donated: it cannot be used again.

        Raises:
          ValueError: the order is of another number of trainers, layers or pairs, or has more steps of a trainer than
            there are batches.
        """
        batch = jax.tree.leaves(state.trainers.calls.chosen)[0].shape[-2]
        expected = (self.num_trainers, self.num_layers, batch * state.trainers.calls.chosen.shape[-1])
        given = (order.num_trainers, order.num_layers, order.num_pairs)
        if given != expected:
            raise ValueError(f"expected an order of (trainers, layers, pairs) {expected}, got {given}")
        begun = order.trainer[:stop][order.kind[:stop] == STAGE]
        steps = jax.tree.leaves(data)[0].shape[1]
        if (most := np.bincount(begun, minlength=1).max()) > steps:
            raise ValueError(f"expected at least {most} batches for each trainer, one a step, got {steps}")
        events = Events(
            order.kind, order.trainer, order.layer, order.pair, order.expert, order.answered, order.computed
        )
        return cast(SwarmState, self._run_jitted(state, data, events, start, len(order.kind) if stop is None else stop))

    @functools.partial(jax.jit, static_argnums=0)
    def _init_experts(self, key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
        grid_size = self.router.grid_size
        layers = [init_experts(key, self.expert, layer.prefix, grid_size) for layer in self.stages.layers]
        params = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *layers)
        return params, () if self._expert_optimizer is None else init_opt_states(self._expert_optimizer, params)

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
        zeros = functools.partial(jax.tree.map, lambda leaf: np.zeros(leaf.shape, leaf.dtype))
        integers: Any = np.zeros(wanted.shape, np.int32)
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
        return jax.tree.map(
            lambda leaf: jnp.asarray(np.tile(leaf, (self.num_trainers,) + (1,) * np.ndim(leaf))), one_trainer
        )

    def _run(self, state: SwarmState, data: Data, events: Events, start: Any, stop: Any) -> SwarmState:
        events = jax.tree.map(jnp.asarray, events)
        batch = state.trainers.calls.chosen.shape[-2]
        buckets = buckets_up_to(batch) if self._rows else (batch,)
        handlers: list[Handler] = []

        def is_kind(kind: int) -> Callable[..., Any]:
            return lambda event, state: event.kind == kind

        def is_call(kind: int, bucket: int) -> Callable[..., Any]:
            def matches(event: Events, state: SwarmState) -> Any:
                rows, _ = pairs_of(state.trainers.calls, event, forward=kind == FORWARD)
                needed = rows.any(axis=-1).sum()
                smaller = 1 if bucket == buckets[0] else bucket // 2 + 1
                return (event.kind == kind) & (needed >= smaller) & (needed <= bucket)

            return matches

        if self._rows:

            def is_nobodys(event: Events, state: SwarmState) -> Any:
                is_forward = event.kind == FORWARD
                pairs = [pairs_of(state.trainers.calls, event, forward=forward)[0].any() for forward in (True, False)]
                return (event.kind < STAGE) & jnp.logical_not(jnp.where(is_forward, pairs[0], pairs[1]))

            handlers.append((is_nobodys, lambda state, event: state))
        for bucket in buckets:
            whole = len(buckets) == 1
            for kind, compute in ((FORWARD, self._experts.forward), (BACKWARD, self._experts.backward)):
                handlers.append(
                    (is_kind(kind) if whole else is_call(kind, bucket), functools.partial(compute, rows=bucket))
                )
        for stage in range(num_stages(self.num_layers)):
            handlers.append((is_kind(STAGE + stage), functools.partial(self._trainers.stage, stage, data)))

        return run_events(handlers, events, start, stop, state)


def _stacked(leaves: Sequence[Any]) -> Any:
    return jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), leaves[0].dtype)
