"""The paper's setting as one compiled program: slow trainers and calls that fail, without a network or waiting.

`dmoe_jax.emulator` follows an order of events that is drawn for the whole run. So nothing stops at a pause: steps and
calls are under way while the model is evaluated and saved, and a run that is resumed goes on in the middle of them.
"""

import functools
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dmoe_jax.arrays import PyTree
from dmoe_jax.emulator import Emulator, SwarmState, draw_order, exponential_delays, take_batches
from dmoe_jax.emulator.order import STAGE, EventOrder
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.optim.recipe import make_optimizer
from dmoe_jax.routing.base import Router, RouterError
from dmoe_jax.trainer import OnLost, OnStep, StepRecord
from dmoe_jax.training.engine import Totals
from experiments.transformer_xl.setup import Setting, Setup, SetupEngine

_PIECE = 16
"""Updates between two looks at the program, where progress is shown and Ctrl-C is heard: a second or so."""


class EmulatedDmoe(SetupEngine):
    """A DMoE Transformer-XL trained by an emulated swarm. An `Engine`.

    Each backward call updates its expert. Who answers when, and who never does, is drawn from the setup's seed.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        assert setup.router is not None
        setting, config = setup.setting or Setting(place="emulated"), setup.config
        num_trainers, optimizer = setting.num_trainers, make_optimizer(setup.recipe)
        self._emulator = _emulator(config, setup.router, optimizer, make_optimizer(setup.expert_recipe), num_trainers)
        model, trunk = self._emulator.stages.model, setup.init_trunk()
        num_pairs = self._emulator.num_pairs(trunk, next(iter(setup.stream(shard=0, num_shards=num_trainers))))
        num_cells = math.prod(config.grid_size)
        # Of many tokens most go to an expert that others go to as well: drawn are calls of experts, not of pairs.
        self._order = draw_order(
            num_updates=setup.steps,
            num_trainers=num_trainers,
            num_layers=config.num_layers,
            num_pairs=num_cells if config.routes_tokens else num_pairs,
            delay=exponential_delays(setting.delay_s),
            failure_rate=setting.failure_rate,
            concurrency=setting.concurrency,
            seed=setup.seed,
        )
        if config.routes_tokens:
            self._order = _by_expert(self._order, num_pairs)
        self._updates = self._order.updates
        data = take_batches(
            model,
            [setup.stream(shard=index, num_shards=num_trainers) for index in range(num_trainers)],
            steps=int(np.bincount(self._order.trainer[self._order.kind == STAGE]).max()),
            seed=setup.seed,
        )
        self._data = jax.tree.map(jnp.asarray, data)
        key = jax.random.key(setup.seed)
        state = self._emulator.init(key, key, data, num_updates=setup.steps)
        self._take(state._replace(params=trunk, opt_state=optimizer.init(trunk)))
        self._pieces = 0

    @property
    def step(self) -> int:
        return self._step

    async def advance(self, num_steps: int, on_step: OnStep, on_lost: OnLost) -> None:
        """Make so many updates, a piece at a time. The first piece, which compiles, is one update.

        Raises:
          FloatingPointError: a loss or a gradient is not finite. RouterError: the router's scores are the cause.
        """
        last = self._step + num_steps
        while self._step < last:
            before = self._step
            self._run_to(min(before + (_PIECE if self._pieces else 1), last))
            self._pieces += 1
            for update in range(before, self._step):
                on_step(self._record(update))

    def _run_to(self, step: int) -> None:
        """Follow the order up to this update, and not one event further."""
        start, stop = (int(self._updates[at - 1]) + 1 if at else 0 for at in (self._step, step))
        # In a thread that is waited for, whatever happens: JAX would hear Ctrl-C at once and leave the program running,
        # which crashes the interpreter when it ends before.
        with ThreadPoolExecutor(1) as pool:
            piece = pool.submit(self._emulator.run, self._state, self._order, self._data, start=start, stop=stop)
            state = piece.result()
        self._take(state)

    def _take(self, state: SwarmState) -> None:
        # What is counted is kept on the host: the state is donated to the next piece, and gone if that is interrupted.
        self._state, self._step = state, int(state.step)
        bare = state._replace(experts=tuple(layer._replace(params=(), opt_state=()) for layer in state.experts))
        self._counted = jax.device_get(bare._replace(params=(), opt_state=(), trainers=cast(Any, ())))

    def _record(self, update: int) -> StepRecord:
        trainer, loss = int(self._order.trainer[self._updates[update]]), float(self._counted.totals.losses[update])
        if not np.isfinite(loss):
            self._check_router(trainer, update + 1)
            raise FloatingPointError(
                f"{self.name}: the loss of step {update + 1}, by trainer {trainer}, or its gradient is not finite"
            )
        staleness = int(self._counted.totals.staleness[update])
        return StepRecord(step=update + 1, trainer=trainer, loss=loss, items=self._step_items, staleness=staleness)

    def _check_router(self, trainer: int, step: int) -> None:
        """Raise a RouterError if a trainer's last scores are NaN although the inputs of the layer are finite."""
        own, router = self._state.trainers, self.setup.router
        for number, (layer, scores) in enumerate(zip(self.layers, own.scores, strict=True)):
            if not np.isfinite(own.calls[number].inputs[0][trainer]).all():
                return  # what follows is a consequence
            if router is not None and any(np.isnan(part[trainer]).any() for part in scores.logits):
                raise RouterError(
                    f"router {router.name!r}: its scores in {layer} are NaN in step {step} of {self.name}, by trainer "
                    f"{trainer}"
                )

    @property
    def _step_items(self) -> int:
        return self.setup.rows * self.setup.config.seq_len

    def params(self) -> tuple[PyTree, tuple[PyTree, ...]]:
        return self._state.params, self._state.expert_params

    def state(self) -> SwarmState:
        return self._state

    def facts(self) -> dict[str, Any]:
        return {}

    def load(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        # Copies: the next piece donates them, and an array of the caller's may lie under a borrowed one.
        self._take(cast(SwarmState, jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)))

    def totals(self) -> Totals:
        """Running totals. Calls, forward and backward, are estimated from the backward calls that were computed.

        An order has events for pairs of a sequence and an expert, or for all experts where tokens are routed. Which of
        them are calls is the router's decision, so that the order only knows which share of the calls fails.
        """
        counted, order = self._counted, self._order
        stop = int(self._updates[self._step - 1]) + 1 if self._step else 0
        is_call = order.kind[:stop] < STAGE
        failed = float(1 - order.answered[:stop][is_call].mean()) if is_call.any() else 0.0
        backward = int(counted.calls)
        answered = backward + round(backward / (1 - failed))
        failures = {"timeout": round(answered * failed / (1 - failed)), "not finite": int(counted.rejected)}
        uids = [uid for layer in self.layers.values() for uid in layer]
        return Totals(
            items=self._step * self._step_items,
            staleness=int(counted.totals.staleness[: self._step].sum()),
            calls_ok=answered,
            failures={reason: count for reason, count in failures.items() if count},
            load=dict(zip(uids, np.concatenate([layer.load for layer in counted.experts]).tolist(), strict=True)),
            figures={"mean_expert_staleness": float(counted.expert_staleness)},
        )


def _by_expert(order: EventOrder, num_pairs: int) -> EventOrder:
    """An order that was drawn with a pair for each expert of a layer, of that expert's calls."""
    own = np.where(order.kind < STAGE, order.layer * order.num_pairs + order.pair, -1)
    return replace(order, expert=own.astype(np.int32), pair=np.zeros_like(order.pair), num_pairs=num_pairs)


@functools.cache
def _emulator(
    config: TransformerXLConfig,
    router: Router,
    optimizer: optax.GradientTransformation,
    expert_optimizer: optax.GradientTransformation,
    num_trainers: int,
) -> Emulator:
    """The emulator; equal arguments share it, and so what it has compiled."""
    return Emulator(
        lambda swarm: txl.TransformerXL.on(swarm, config, router),
        optimizer=optimizer,
        expert_optimizer=expert_optimizer,
        num_trainers=num_trainers,
        rows=True,
    )
