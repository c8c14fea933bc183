"""The paper's setting (Learning@home, section 4.3): many slow trainers of batch 1 at once, and calls that fail.

Every expert call is answered after an exponential delay, or never. *Simulated*, the code is that of a real swarm on a
network in virtual time: expert nodes, DHT, directory, RPC, trainers. *Emulated*, a mixture is one compiled program
without a network or waiting. The trainers of a dense model share all of it: each applies its gradient an exponential
delay after it has read the parameters that it is for, and nothing of theirs fails.

A simulated run is a chain of *stretches*, each a simulation of its own, which begins and ends with nobody at work:
between two the model can be evaluated and saved. Every run pauses at the same steps, so one that was interrupted and
resumed from such a pause repeats the one that was not, bit for bit. Trainers keep their memory of the text across a
pause; staleness begins at zero again and grows to its mean within as many updates as there are trainers. An emulated
run follows an order of events that is drawn for the whole of it. Nothing stops at a pause: steps and calls are under
way while the model is evaluated and saved, and a run that is resumed goes on in the middle of them.
"""

import functools
import itertools
import random
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import trio

from dmoe_jax import CallStatistics, Model, Outcome, open_swarm
from dmoe_jax.arrays import PyTree
from dmoe_jax.autodiff import Recording
from dmoe_jax.data import Batch
from dmoe_jax.directory.grid import parse_uid
from dmoe_jax.emulator import Emulator, SwarmState, draw_order, exponential_delays, take_batches
from dmoe_jax.emulator.order import STAGE
from dmoe_jax.experts.base import init_by_uid
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.model import AnyModel
from dmoe_jax.models import TransformerXL, TransformerXLConfig
from dmoe_jax.models.trunk import Memory, StepKeys, empty_memory
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.optim import Recipe, make_optimizer
from dmoe_jax.peers.peer import Seams
from dmoe_jax.routing import Router
from dmoe_jax.trainer import OnLost, OnStep, StepRecord, Trainer
from dmoe_jax.training.engine import Totals
from dmoe_jax.training.swarm_engine import call_totals, load_statistics, saved_statistics
from dmoe_jax.trunk import SharedTrunk
from dmoe_net.rpc.faults import Fault, FaultPlan
from dmoe_net.transport.sim import run, simulate
from dmoe_net.transport.sim.links import Constant
from experiments.simulated_swarm import DIRECTORY_CONFIG, NODE_CONFIG, start_simulated_nodes
from experiments.transformer_xl import dense
from experiments.transformer_xl.setup import Setup, SetupEngine

Work = Callable[[int, AnyModel], Awaitable[None]]
"""Lets a trainer, by its index, take the steps of a stretch."""

_NUM_NODES = 8
"""Hosts that share the experts."""

_GRACE_S, _TIMEOUT_S = 5.0, 30.0
"""Virtual seconds that a trainer waits for the other experts after the first has answered, so long that hardly a call
is lost but those that fail (1 in 150); and after which a call is given up."""

_PIECE = 16
"""Updates between two looks at the emulator, where progress is shown and Ctrl-C is heard: a second or so."""


class _SlowDense(Model[Batch, Memory]):
    """The dense model, a step of which takes an exponential delay after its parameters have been read."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def init(self, key: Any) -> PyTree:
        return dense.init(key, self._setup.config)

    def keys(self, batch: Batch, *, seed: int, trainer: int, step: int) -> tuple[StepKeys, float]:
        mean_s, rng = self._setup.settings.delay_s, random.Random(repr((seed, trainer, step)))
        return self._setup.step_keys(trainer=trainer, step=step), rng.expovariate(1 / mean_s) if mean_s else 0.0

    async def forward(
        self, run: Recording, params: PyTree, batch: Batch, state: Memory, keys: tuple[StepKeys, float]
    ) -> Outcome:
        own_keys, delay_s = keys
        await trio.sleep(delay_s)
        loss, memory = run(_dense_loss(self._setup.config), params, batch, state, own_keys)
        return Outcome(loss, memory, items=batch.targets.size)


@functools.cache
def _dense_loss(config: TransformerXLConfig) -> Callable[..., Any]:
    """The segment (params, batch, memory, keys) -> (loss, next memory), the same object for equal configurations."""
    return lambda params, batch, memory, keys: dense.loss(params, config, batch, memory, keys)


class SimulatedEngine(SetupEngine):
    """A model trained in virtual time, a mixture by a simulated swarm. Each backward call updates its expert."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        num, config = setup.settings.trainers, setup.config
        self._device = InlineDevice()
        self.trunk = SharedTrunk(setup.init_trunk(), make_optimizer(setup.recipe), self._device)
        self.streams = setup.streams()
        self._memories: list[Memory] = [empty_memory(config, setup.rows) for _ in range(num)]
        self._counters: dict[str, Any] = {"items": 0, "staleness": 0, "steps_lost": 0, "virtual_s": 0.0}
        self._statistics = CallStatistics()
        key, expert = jax.random.key(setup.seed), config.expert()
        self._backends: dict[str, ExpertBackend] = {}
        for uid in map(parse_uid, itertools.chain(*setup.layers.values())):
            params = init_by_uid(key, expert, uid.prefix, uid.coordinates)
            self._backends[str(uid)] = ExpertBackend(expert, make_optimizer(setup.expert_recipe), params)
        for backend in itertools.islice(self._backends.values(), 1):  # all share what it compiles
            backend.warm_up(min(2 * config.samples(setup.rows), NODE_CONFIG.max_batch_rows))

    async def advance(self, num_steps: int, on_step: OnStep, on_lost: OnLost) -> None:
        """Simulate a stretch of so many updates."""
        last_step = self.step + num_steps

        def count_step(record: StepRecord) -> None:
            self.step = self.trunk.step
            self._counters["items"] += record.items
            self._counters["staleness"] += record.staleness
            on_step(record)

        def count_lost(trainer: int, error: Exception) -> None:
            self._counters["steps_lost"] += 1
            on_lost(trainer, error)

        async def work(index: int, model: AnyModel) -> None:
            trainer = Trainer(index, model, self.trunk, self.streams[index], seed=self.setup.seed)
            trainer.state = self._memories[index]
            await trainer.run(last_step, count_step, count_lost)
            self._memories[index] = trainer.state

        seed = int(np.random.SeedSequence([self.setup.seed, self.step]).generate_state(1)[0])
        run(self._in_swarm if self._backends else self._alone, work, seed, seed=seed)

    async def _alone(self, work: Work, seed: int) -> None:
        """Let all trainers of a dense model work."""
        started, model = trio.current_time(), _SlowDense(self.setup)
        async with trio.open_nursery() as nursery:
            for index in range(len(self.streams)):
                nursery.start_soon(work, index, model)
        self._counters["virtual_s"] += trio.current_time() - started

    async def _in_swarm(self, work: Work, seed: int) -> None:
        """Let all trainers of a mixture work, each on a host of its own, beside the nodes."""
        settings, config, router = self.setup.settings, self.setup.config, self.setup.router
        assert router is not None
        working, all_done = len(self.streams), trio.Event()

        async def live(index: int, join: Any) -> None:
            nonlocal working
            async with open_swarm(
                join,
                network=network,
                host=f"trainer{index}",
                listen=None,
                seed=seed,
                device=self._device,
                testing=Seams(statistics=self._statistics),
                directory=DIRECTORY_CONFIG,
            ) as swarm:
                # One part: delays and failures strike experts one by one, as in the paper.
                model = TransformerXL.on(swarm, config, router, max_parts=1, grace_s=_GRACE_S, timeout_s=_TIMEOUT_S)
                await work(index, model)
                working -= 1
                if not working:
                    all_done.set()
                # A peer that leaves says goodbye to every node: work for nothing, the whole swarm ends in a moment.
                await trio.sleep_forever()

        def faults(host: str) -> FaultPlan:
            rates = {Fault.LATE: 1 - settings.failure_rate, Fault.HANG: settings.failure_rate}
            mean_s = settings.delay_s * (settings.slow_node if host == "node0" else 1.0)
            return FaultPlan(rates=rates, late_mean_s=mean_s, methods=("expert.",), seed=seed)

        async with simulate(seed=seed, latency=Constant(0.001)) as network:
            num_nodes = min(_NUM_NODES, len(self._backends))
            join = await start_simulated_nodes(
                network, self._backends, num_nodes=num_nodes, seed=seed, faults=faults, config=NODE_CONFIG
            )
            started = trio.current_time()
            for index in range(len(self.streams)):
                network.start(f"trainer{index}", live, index, join)
            await all_done.wait()
            self._counters["virtual_s"] += trio.current_time() - started

    def params(self) -> tuple[PyTree, tuple[PyTree, ...]]:
        return self.trunk.params, tuple(stacked["params"] for stacked in self._stacked())

    def state(self) -> dict[str, PyTree]:
        return {"trunk": self.trunk.state, "memories": tuple(self._memories), "experts": self._stacked()}

    def facts(self) -> dict[str, Any]:
        return {
            "positions": [stream.position for stream in self.streams],
            "counters": dict(self._counters),
            "statistics": saved_statistics(self._statistics),
            "updates": {uid: backend.update_count for uid, backend in self._backends.items()},
        }

    def load(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        self.step = step
        self.trunk.restore(step, state["trunk"])
        self._memories = [jax.tree.map(jnp.asarray, memory) for memory in state["memories"]]
        for stream, position in zip(self.streams, facts["positions"], strict=True):
            stream.seek(position)
        self._counters = dict(facts["counters"])
        load_statistics(self._statistics, facts["statistics"])
        for uids, stacked in zip(self.layers.values(), state["experts"], strict=True):
            for number, uid in enumerate(uids):
                own = jax.tree.map(lambda leaf, number=number: leaf[number], stacked)
                self._backends[uid].load(own, update_count=facts["updates"][uid])

    def totals(self) -> Totals:
        totals = Totals(**self._counters)
        # Where an expert lives is told by its number, and a resumed run has not asked yet.
        return replace(call_totals(self._statistics, totals), peers={}) if self._backends else totals

    def _stacked(self) -> tuple[PyTree, ...]:
        """The experts' parameters and optimiser states of each layer, stacked as `mixture.local` keeps them."""
        return tuple(
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *(self._backends[uid].state for uid in uids))
            for uids in self.layers.values()
        )


class EmulatedDmoe(SetupEngine):
    """A mixture trained by an emulated swarm; the setup's seed decides who answers when, and who never does."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        assert setup.router is not None
        settings, config = setup.settings, setup.config
        self._emulator = _emulator(config, setup.router, setup.recipe, setup.expert_recipe, settings.trainers)
        trunk, streams = setup.init_trunk(), setup.streams()
        self._order = draw_order(
            num_updates=setup.steps,
            num_trainers=settings.trainers,
            num_layers=config.num_layers,
            num_pairs=self._emulator.num_pairs(trunk, streams[0].at(0)),
            delay=exponential_delays(settings.delay_s),
            failure_rate=settings.failure_rate,
            concurrency=settings.concurrency,
            seed=setup.seed,
        )
        self._updates = self._order.updates
        data = take_batches(self._emulator.stages.model, streams, steps=self._order.steps, seed=setup.seed)
        self._data = jax.tree.map(jnp.asarray, data)
        self._step_items = setup.rows * config.seq_len
        key = jax.random.key(setup.seed)
        state = self._emulator.init(key, key, data, num_updates=setup.steps)
        self._take(0, state._replace(params=trunk, opt_state=self._emulator.optimizer.init(trunk)))
        self._is_compiled = False

    async def advance(self, num_steps: int, on_step: OnStep, on_lost: OnLost) -> None:
        """Make so many updates, a piece at a time. The first piece, which compiles, is one update.

        Raises:
          FloatingPointError: a loss or a gradient is not finite.
        """
        last = self.step + num_steps
        while self.step < last:
            before, after = self.step, min(self.step + (_PIECE if self._is_compiled else 1), last)
            start, stop = (int(self._updates[step - 1]) + 1 if step else 0 for step in (before, after))
            # In a thread that is waited for, whatever happens: JAX would hear Ctrl-C at once and leave the program
            # running, which crashes the interpreter when it ends before.
            with ThreadPoolExecutor(1) as pool:
                piece = pool.submit(self._emulator.run, self._state, self._order, self._data, start=start, stop=stop)
                state = piece.result()
            self._take(after, state)
            self._is_compiled, totals = True, self._counted.totals
            for step in range(before + 1, after + 1):
                trainer, loss = int(self._order.trainer[self._updates[step - 1]]), float(totals.losses[step - 1])
                if not np.isfinite(loss):
                    raise FloatingPointError(
                        f"{self.name}: the loss of step {step}, by trainer {trainer}, or its gradient is not finite"
                    )
                staleness = int(totals.staleness[step - 1])
                on_step(StepRecord(step=step, trainer=trainer, loss=loss, items=self._step_items, staleness=staleness))

    def _take(self, step: int, state: SwarmState) -> None:
        # What is counted is kept on the host: the state is donated to the next piece, and gone if that is interrupted.
        super()._take(step, state)
        bare = state._replace(experts=tuple(layer._replace(params=(), opt_state=()) for layer in state.experts))
        self._counted = jax.device_get(bare._replace(params=(), opt_state=(), trainers=cast(Any, ())))

    def params(self) -> tuple[PyTree, tuple[PyTree, ...]]:
        return self._state.params, self._state.expert_params

    def totals(self) -> Totals:
        """Running totals. Calls, forward and backward, are estimated from the backward calls that were computed.

        An order has events for pairs of a sequence and an expert. Which of them are calls is the router's decision, so
        that the order only knows which share of the calls fails.
        """
        counted, order = self._counted, self._order
        stop = int(self._updates[self.step - 1]) + 1 if self.step else 0
        is_call = order.kind[:stop] < STAGE
        failed = float(1 - order.answered[:stop][is_call].mean()) if is_call.any() else 0.0
        backward = int(counted.calls)
        answered = backward + round(backward / (1 - failed))
        failures = {"timeout": round(answered * failed / (1 - failed)), "not finite": int(counted.rejected)}
        uids = [uid for layer in self.layers.values() for uid in layer]
        return Totals(
            items=self.step * self._step_items,
            staleness=int(counted.totals.staleness[: self.step].sum()),
            calls_ok=answered,
            failures={reason: count for reason, count in failures.items() if count},
            load=dict(zip(uids, np.concatenate([layer.load for layer in counted.experts]).tolist(), strict=True)),
            figures={"mean_expert_staleness": float(counted.expert_staleness)},
        )


@functools.cache
def _emulator(
    config: TransformerXLConfig, router: Router, recipe: Recipe, expert_recipe: Recipe, num_trainers: int
) -> Emulator:
    """The emulator; equal arguments share it, and so what it has compiled."""
    return Emulator(
        lambda swarm: TransformerXL.on(swarm, config, router),
        optimizer=make_optimizer(recipe),
        expert_optimizer=make_optimizer(expert_recipe),
        num_trainers=num_trainers,
        rows=True,
    )
