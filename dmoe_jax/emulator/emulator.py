"""An asynchronous swarm as one compiled program.

Theory of operation. Trainers, trunk and experts are arrays: the trunk's parameters and its optimiser's state, those of
all experts with a leading axis, and for each trainer what its present step holds, the parameters that it read at its
beginning included. The program goes through an `EventOrder` and does what the swarm would do: an expert computes one
call with the parameters that it has then, a trainer goes on with the answers that it has. Every version that anybody
reads is the one that the order says, so that the result equals the swarm's to rounding.

Big arrays are changed in place, see `run_events`.

Trust. A swarm does not make an update that is not finite. To know that of an update, all that is new must be computed,
and looked at, before any of it is written, which takes as long as everything else that an expert does. So a piece of an
order is first run trusting that all is finite. A number that has become infinite, or none, stays so, and one look at
the end of the piece finds it; then the piece is run again from its beginning, carefully.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Key, PRNGKeyArray

from dmoe_jax.arrays import PyTree, copied
from dmoe_jax.emulator.events import Events, Handler, Waves, compiler_options, cut_into_waves, run_events
from dmoe_jax.emulator.expert_side import ExpertSide, LayerState, pairs_of
from dmoe_jax.emulator.order import BACKWARD, FORWARD, STAGE, EventOrder, num_stages
from dmoe_jax.emulator.stages import LayerInput, Mixed, ModelMaker, ModelStages
from dmoe_jax.emulator.state import Calls, Data, Experts, SwarmState, Totals, Trainers, at
from dmoe_jax.emulator.trainer_side import TrainerSide
from dmoe_jax.experts.base import Expert
from dmoe_jax.mixture.local import init_experts
from dmoe_jax.mixture.local_update import init_opt_states
from dmoe_jax.model import Evaluation
from dmoe_jax.node.programs import buckets_up_to

_CHUNK = 16_384
"""Events that are given to the compiled program at once. Between two chunks a run can be interrupted."""
_TRUSTED_CALLS = 16
"""Least backward calls for each expert with which trust pays: it copies all experts and looks at them, where care looks
twice at the one that learns."""


class Emulator:
    """The compiled swarm of one model, for any event order with as many trainers and pairs.

    Args:
      make_model: see `ModelMaker`.
      optimizer: the trunk's. expert_optimizer: of every expert, each with a state of its own; None: they never change.
      num_trainers: trainers of the swarm.
      rows: a call computes only the rows that it serves, padded to a power of two, as a node does; otherwise all rows
        of the batch, which is right for small experts and needed under `vmap`.
      same_kernels: products and sums are computed by the library that nodes and trainers compile with. On CPUs another
        one is faster in a process of several cores, but it rounds otherwise: in float32 that can make 7e-5 where the
        same one leaves 2e-6 (`experiments/emulation/README.md`).

    Several seeds of one order run side by side where `init` is given several keys: everything but the order then has a
    leading axis of seeds, the data too.

    An update that is not finite is not made, as in the swarm.

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
        same_kernels: bool = False,
    ) -> None:
        self.stages = ModelStages(make_model)
        self.num_layers = len(self.stages.layers)
        first = self.stages.layers[0]
        if any(layer[1:] != first[1:] for layer in self.stages.layers):
            raise ValueError("the layers of an emulated model must have the same experts, router and k_best")
        self.expert, self.router, self.k_best = first.expert, first.router, first.k_best
        self.num_cells = math.prod(self.router.grid_size)
        self.num_trainers = num_trainers
        self.optimizer, self.expert_optimizer = optimizer, expert_optimizer
        self._experts = ExpertSide(self.expert, expert_optimizer)
        self._trainers = TrainerSide(self.stages, optimizer)
        self._rows = rows
        self._compiler_options = functools.partial(compiler_options, same_kernels=same_kernels)
        of_seeds = jax.vmap(functools.partial(self._run, skips=False), (0, 0, None, None))
        options = self._compiler_options(in_place=False)
        self._runs = (
            jax.jit(functools.partial(self._run, skips=True), donate_argnums=0, compiler_options=options),
            jax.jit(of_seeds, donate_argnums=0, compiler_options=options),
        )
        self._copy = jax.jit(functools.partial(jax.tree.map, jnp.copy))
        self._copy_into = jax.jit(lambda _, state: self._copy(state), donate_argnums=0, keep_unused=True)
        self._spare: SwarmState | None = None  # of which a further copy takes the memory
        self._inits = [
            jax.jit(lambda _, *args, init=init: init(*args), static_argnums=4, donate_argnums=0, keep_unused=True)
            for init in (self._init_swarm, self._init_seeds)
        ]
        self._expert_inits = jax.jit(self._params_of_experts), jax.jit(jax.vmap(self._params_of_experts))
        self._evaluations = jax.jit(self._evaluate), jax.jit(jax.vmap(self._evaluate, (0, None, 0)))

    def init_experts(self, expert_key: Key[jax.Array, "*seeds"]) -> tuple[PyTree, ...]:
        """Parameters of each layer's experts, stacked: those that nodes make of the same key."""
        return cast(tuple[PyTree, ...], self._expert_inits[expert_key.ndim == 1](expert_key))

    def init(
        self,
        trunk_key: Key[jax.Array, "*seeds"],
        experts: Key[jax.Array, "*seeds"] | tuple[PyTree, ...],
        data: Data,
        *,
        num_updates: int,
        spare: SwarmState | None = None,
    ) -> SwarmState:
        """A swarm before its first event.

        Args:
          trunk_key: of the model's `init`, [seeds] for several.
          experts: a node's `jax.random.key(seed)`, [seeds] for several; or what `init_experts` has made of it.
          data: of the run.
          num_updates: updates of the trunk in all runs of this state, for what is noted of each.
          spare: a state of this emulator that nobody needs any more. The new one takes its memory, which saves most of
            the time where there are gigabytes of experts: a system clears fresh memory page by page.
        """
        several = trunk_key.ndim == 1
        if several and self._rows:
            raise ValueError("several seeds need rows=False: who serves which rows differs from seed to seed")
        batch = jax.tree.map(lambda leaf: np.asarray(leaf[(0,) * (2 + several)]), data)
        # Not under `jit`: a model's `init` may look at arrays, such as those of a router that it tries.
        trunks = [self.stages.model.init(key) for key in (trunk_key if several else [trunk_key])]
        trunk = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trunks) if several else trunks[0]
        params = experts if isinstance(experts, tuple) else self.init_experts(experts)
        return cast(SwarmState, self._inits[several](spare, trunk, params, batch, num_updates))

    def num_pairs(self, trunk: PyTree, batch: Any) -> int:
        """Places for calls in a layer of a step: samples times the most experts that the router may choose for each. An
        `EventOrder` has an event for each place; one that is not used calls nobody.

        Args:
          trunk: the model's own parameters. batch: one batch of one trainer.
        """
        one = jax.tree.map(jnp.asarray, Data(batch, self.stages.model.keys(batch, seed=0, trainer=0, step=0)))
        return math.prod(self._trainer_shapes(trunk, one).calls[0].chosen.shape)

    def run(
        self, state: SwarmState, order: EventOrder, data: Data, *, start: int = 0, stop: int | None = None
    ) -> SwarmState:
        """The swarm after events `start` to `stop` of an order. `state` is donated: it cannot be used again.

        On CPUs a run of one seed holds the whole state twice, to trust, and keeps the memory of the second one for the
        next run; not so where there are many experts for the calls of a run.

        Raises:
          ValueError: the order is of another number of trainers, layers or pairs, or has more steps of a trainer than
            there are batches.
        """
        several = state.step.ndim == 1
        pairs = math.prod(state.trainers.calls[0].chosen.shape[-2:])
        expected = (self.num_trainers, self.num_layers, pairs)
        given = (order.num_trainers, order.num_layers, order.num_pairs)
        if given != expected:
            raise ValueError(f"expected an order of (trainers, layers, pairs) {expected}, got {given}")
        begun = order.trainer[:stop][order.kind[:stop] == STAGE]
        steps = jax.tree.leaves(data)[0].shape[1 + several]
        if (most := np.bincount(begun, minlength=1).max()) > steps:
            raise ValueError(f"expected at least {most} batches for each trainer, one a step, got {steps}")
        data = jax.tree.map(jnp.asarray, data)
        end = len(order.kind) if stop is None else stop
        pays = self._trust_pays(order.kind[start:end])
        trusting = self._trusting if pays and not several else None
        for first in range(start, end, _CHUNK):
            last = min(first + _CHUNK, end)
            waves, count = cut_into_waves(order, first, last, num_cells=self.num_cells, length=_CHUNK)
            if trusting is not None:
                before = self._copied(state)
                state, is_sound = trusting(state, data, waves, count)
                if is_sound:
                    self._spare = before
                    continue
                state, trusting = before, None  # what was not finite once will be so again
            state = jax.block_until_ready(self._runs[several](state, data, waves, count))
        return state

    def _trust_pays(self, kinds: np.ndarray) -> bool:
        """True if to run these events trusting that all is finite takes less time than to look at each update.

        An emulator that has trusted once goes on with it: to compile the other program takes longer than most runs.
        """
        if "_trusting" in vars(self):
            return True
        pieces = max(1, math.ceil(len(kinds) / _CHUNK))
        experts = self.num_layers * self.num_cells
        return bool((kinds == BACKWARD).sum() >= _TRUSTED_CALLS * experts * pieces)

    def _copied(self, state: SwarmState) -> SwarmState:
        """A copy of a state, where the last one was if it fits: to touch fresh memory takes several times as long."""
        spare, self._spare = self._spare, None
        shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), each) for each in (spare, state)]
        return self._copy(state) if shapes[0] != shapes[1] else self._copy_into(spare, state)

    @functools.cached_property
    def _trusting(self) -> Callable[..., tuple[SwarmState, Any]] | None:
        """The compiled `_run_trusting`; None where only a careful run is right, or fast."""
        options = self._compiler_options(in_place=True)
        if options is None or not keeps_what_is_infinite(self.expert, self.expert_optimizer):
            return None
        return jax.jit(self._run_trusting, donate_argnums=0, compiler_options=options)

    def evaluate(self, state: SwarmState, batches: Iterable[Any]) -> list[Evaluation]:
        """The model and all experts of now on some batches, nothing random; one for each seed.

        Raises:
          ValueError: there is no batch.
        """
        several = state.step.ndim == 1
        totals: dict[str, Any] = {}
        items, carried = 0, None
        for batch in batches:
            if carried is None:
                carried = self.stages.model.initial_state(batch)
                if several:
                    carried = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(state.step)), carried)
            figures, count, carried = self._evaluations[several]((state.params, state.expert_params), batch, carried)
            counted = int(np.ravel(count)[0])
            items += counted
            for name, value in figures.items():
                totals[name] = totals.get(name, 0.0) + counted * np.atleast_1d(np.asarray(value, np.float64))
        if not items:
            raise ValueError("there is nothing to evaluate: no batch")
        losses = totals.pop("loss")
        return [
            Evaluation(
                loss=float(loss) / items,
                items=items,
                metrics={name: float(value[seed]) / items for name, value in totals.items()},
            )
            for seed, loss in enumerate(losses)
        ]

    def _evaluate(
        self, params: tuple[PyTree, Sequence[PyTree]], batch: Any, carried: PyTree
    ) -> tuple[dict[str, Any], Any, Any]:
        outcome, _ = self.stages.routed(*params, jax.tree.map(jnp.asarray, batch), carried)
        figures = {"loss": outcome.loss if outcome.reported is None else outcome.reported, **(outcome.metrics or {})}
        return figures, outcome.items, outcome.state

    def _params_of_experts(self, key: PRNGKeyArray) -> tuple[PyTree, ...]:
        return tuple(init_experts(key, self.expert, own.prefix, self.router.grid_size) for own in self.stages.layers)

    def _init_seeds(self, trunk: PyTree, experts: tuple[PyTree, ...], one: Data, num_updates: int) -> SwarmState:
        return jax.vmap(lambda own, params: self._init_swarm(own, params, one, num_updates))(trunk, experts)

    def _init_swarm(self, trunk: PyTree, experts: tuple[PyTree, ...], one: Data, num_updates: int) -> SwarmState:
        return SwarmState(
            step=jnp.int32(0),
            params=trunk,
            opt_state=copied(self.optimizer.init(trunk)),  # a run is donated both
            experts=tuple(map(self._fresh, experts)),
            trainers=self._init_trainers(trunk, one),
            totals=Totals(
                losses=jnp.full(num_updates, jnp.nan, jnp.float32),
                staleness=jnp.zeros(num_updates, jnp.int32),
                rejected=jnp.int32(0),
            ),
        )

    def _fresh(self, params: PyTree) -> Experts:
        """A layer's experts that have learned nothing yet."""
        zeros, zero = jnp.zeros(self.num_cells, jnp.int32), jnp.int32(0)
        return Experts(
            params=jax.tree.map(jnp.copy, params),  # a run takes the state's memory, and these may be used again
            opt_state=() if self.expert_optimizer is None else init_opt_states(self.expert_optimizer, params),
            updates=zeros,
            load=zeros,
            staleness=zero,
            calls=zero,
            rejected=zero,
        )

    def _trainer_shapes(self, trunk: PyTree, one: Data) -> Trainers:
        """The arrays that one trainer holds, as shapes."""
        state = self.stages.model.initial_state(one.batches)

        def step() -> Trainers:
            reached: list[LayerInput] = []
            calls: list[Calls] = []
            mixed: list[Mixed] = []
            for layer in range(self.num_layers):
                there = self.stages.reach(layer, trunk, one.batches, state, one.keys, mixed)
                indices, wanted = self.router.select(there.scores, self.k_best)
                outputs = jnp.zeros((*wanted.shape, *self.expert.output.shape), self.expert.output.dtype)
                integers = jnp.zeros(wanted.shape, jnp.int32)
                specs = zip(there.inputs, self.expert.inputs, strict=True)
                reached.append(there)
                calls.append(
                    Calls(
                        inputs=there.inputs,
                        chosen=integers,
                        indices=indices,
                        wanted=wanted,
                        answered=wanted,
                        outputs=outputs,
                        seen=integers,
                        output_grads=outputs,
                        input_grads=tuple(part for part, spec in specs if spec.differentiable),
                    )
                )
                mixed.append(self.stages.mix(layer, indices, wanted, wanted, outputs, there))
            end = self.stages.finish(trunk, one.batches, state, one.keys, mixed)
            return Trainers(
                params=trunk,
                read_at=jnp.int32(0),
                state=state,
                next_state=end.state,
                row=jnp.int32(0),
                calls=tuple(calls),
                scores=tuple(there.scores for there in reached),
                mixed=tuple(mixed),
                mixed_grads=tuple(mixed),
                layer_grads=tuple(LayerInput(there.scores, there.inputs[:1]) for there in reached),
                grads=trunk,
                loss=jnp.float32(0),
                total=jnp.float32(0),
            )

        return jax.eval_shape(step)

    def _init_trainers(self, trunk: PyTree, one: Data) -> Trainers:
        """All trainers before their first step: only their states mean something."""
        number = self.num_trainers
        zeros: Trainers = jax.tree.map(
            lambda leaf: jnp.zeros((number, *leaf.shape), leaf.dtype), self._trainer_shapes(trunk, one)
        )
        state = self.stages.model.initial_state(one.batches)
        return zeros._replace(
            state=jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (number, *jnp.shape(leaf))), state),
            row=jnp.full(number, -1, jnp.int32),
        )

    def _run_trusting(self, state: SwarmState, data: Data, waves: Waves, count: Any) -> tuple[SwarmState, Any]:
        """(the swarm after so many waves; True if it is what `_run` would have made of it)."""
        before = _doubts(state)
        state = self._run(state, data, waves, count, skips=True, trusts=True)
        return state, _doubts(state) == before

    def _run(
        self, state: SwarmState, data: Data, waves: Waves, count: Any, *, skips: bool, trusts: bool = False
    ) -> SwarmState:
        """So many waves: in each one first the calls, those of each layer together, then the stages.

        Args:
          skips: calls that are part of another one cost nothing. Which they are differs from seed to seed.
          trusts: updates are made that are not finite; needs `skips`.
        """
        call_handlers = self._call_handlers(state.trainers.calls[0].chosen.shape[1], skips, trusts)
        stage_handlers: list[Handler] = [
            (_is_kind(STAGE + stage), functools.partial(self._trainers.stage, stage, data, trusts=trusts))
            for stage in range(num_stages(self.num_layers))
        ]

        def wave(number: Any, state: SwarmState) -> SwarmState:
            last = waves.ends[number]
            first = jnp.where(number > 0, waves.ends[number - 1], 0)
            layers: list[LayerState] = []
            place = jnp.int32(0)
            for layer, events in enumerate(waves.calls):
                own = state.experts[layer], state.trainers.calls[layer]
                # A layer waits for the one before it. XLA would go through both at once, which is slower: it hands each
                # small operation to another core and back.
                begin = jnp.where(place < 0, 0, first[layer])
                place, own = run_events(call_handlers, events, begin, last[layer], own)
                layers.append(own)
            experts, calls = zip(*layers, strict=True)
            state = state._replace(experts=experts, trainers=state.trainers._replace(calls=calls))
            return run_events(stage_handlers, waves.stages, first[-1], last[-1], state)[1]

        return jax.lax.fori_loop(0, count, wave, state)

    def _call_handlers(self, batch: int, skips: bool, trusts: bool) -> list[Handler]:
        """For calls of a layer, by the number of rows that they compute."""
        buckets = buckets_up_to(batch) if self._rows else (batch,)
        handlers: list[Handler] = [(_is_nobodys, lambda layer, event: layer)] if skips else []

        def is_call(kind: int, bucket: int) -> Callable[..., Any]:
            def matches(event: Events, layer: LayerState) -> Any:
                rows, _ = pairs_of(at(layer[1], event.trainer), event, forward=kind == FORWARD)
                needed = rows.any(axis=-1).sum()
                smaller = 1 if bucket == buckets[0] else bucket // 2 + 1
                return (event.kind == kind) & (needed >= smaller) & (needed <= bucket)

            return matches

        def is_somebodys(event: Events, layer: LayerState) -> Any:
            return (event.kind == BACKWARD) & ~_is_nobodys(event, layer)

        backward = functools.partial(self._experts.backward, trusts=trusts)
        for bucket in buckets:
            for kind, compute in ((FORWARD, self._experts.forward), (BACKWARD, backward)):
                matches = _is_kind(kind)
                if len(buckets) > 1:
                    matches = is_call(kind, bucket)
                elif kind == BACKWARD and skips:  # costs more than finding out whose it is
                    matches = is_somebodys
                handlers.append((matches, functools.partial(compute, rows=bucket)))
        return handlers


def _is_kind(kind: int) -> Callable[..., Any]:
    return lambda event, state: event.kind == kind


def _is_nobodys(event: Events, layer: LayerState) -> Any:
    """True if a call is part of another one, or is not computed."""
    own = at(layer[1], event.trainer)
    pairs = [pairs_of(own, event, forward=forward)[0].any() for forward in (True, False)]
    return ~jnp.where(event.kind == FORWARD, pairs[0], pairs[1])


def keeps_what_is_infinite(expert: Expert, optimizer: optax.GradientTransformation | None) -> bool:
    """True if an update leaves no finite number where its optimiser's state had none. Parameters do: steps are added.

    Tried with infinities and with NaN, in one array of the state at a time.
    """
    if optimizer is None:
        return True
    update = optax.with_extra_args_support(optimizer).update
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), jax.eval_shape(expert.init, jax.random.key(0)))
    leaves, treedef = jax.tree.flatten(optimizer.init(params))

    @jax.jit
    def stay(leaves: list[Any]) -> list[Any]:
        _, state = update(params, jax.tree.unflatten(treedef, leaves), params, staleness=jnp.float32(1))
        return [~jnp.isfinite(leaf).any() for leaf in jax.tree.leaves(state)]

    for place, leaf in enumerate(leaves):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            for value in (jnp.inf, jnp.nan):
                if not stay([*leaves[:place], jnp.full_like(leaf, value), *leaves[place + 1 :]])[place]:
                    return False
    return True


def _doubts(state: SwarmState) -> Any:
    """int32, the count of the experts' numbers, and of updates, that are not finite. A piece of a trusting run is sound
    if this is the same after it as before."""
    kept: PyTree = [(layer.params, layer.opt_state) for layer in state.experts]
    numbers = [leaf for leaf in jax.tree.leaves(kept) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return sum((jnp.sum(~jnp.isfinite(leaf), dtype=jnp.int32) for leaf in numbers), state.rejected)
