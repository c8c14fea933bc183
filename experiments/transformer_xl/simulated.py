"""The paper's setting in virtual time (Learning@home, section 4.3): many slow trainers of batch 1, calls that fail.

`SimulatedDmoe` is the code of a real swarm on a simulated network: expert nodes, DHT, directory, RPC, trainers. Every
expert call is answered after an exponential delay, or never. `SimulatedDense` is the baseline under the same
asynchrony: as many trainers share the whole model and apply each gradient an exponential delay after they have read the
parameters it is for; nothing of theirs fails, since a dense model places no calls.

A run is a chain of *stretches*, each a simulation of its own that begins and ends with nobody at work: between two the
swarm can be evaluated and saved. Every run pauses at the same steps, so one that was interrupted and resumed from such
a pause repeats the one that was not, bit for bit. Trainers keep their memory of the text across a pause; staleness
begins at zero again and grows to its mean within as many updates as there are trainers.
"""

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import trio

from dmoe_jax.data.batches import Batch, SegmentStream
from dmoe_jax.directory import DirectoryConfig
from dmoe_jax.experts.base import init_by_uid
from dmoe_jax.grid import ExpertUid, all_uids, layer_prefix
from dmoe_jax.mixture.fan_out import CallPolicy, CallStatistics
from dmoe_jax.mixture.remote import MixtureConfig, RemoteMixture
from dmoe_jax.models import dense_transformer_xl as dense
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.trunk import Memory, StepKeys, step_keys
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.device import InlineDevice
from dmoe_jax.node.server import NodeConfig
from dmoe_jax.routing.base import Router
from dmoe_jax.trainer import Evaluation, SharedTrunk, StepRecord, SwarmModel, Trainer
from experiments.simulated_swarm import SimulatedTrainer, open_simulated_trainer, start_simulated_nodes
from experiments.transformer_xl.engine import Totals
from experiments.transformer_xl.evaluation import EvaluationConfig, dense_evaluator, dmoe_evaluator
from net.errors import NoQuorum
from net.rpc.faults import Fault, FaultPlan
from net.transport.sim import run, simulate
from net.transport.sim_links import Constant

PyTree = Any

# Nodes that stay: announced and looked up every few virtual minutes, not every few seconds as on a volunteer's machine.
_NODE_CONFIG = NodeConfig(announce_period_s=300.0, record_lifetime_s=1800.0)

_DIRECTORY_CONFIG = DirectoryConfig(
    ttl_s=900.0,
    idle_s=3600.0,
    # A failed call says nothing of the next one in this setting: each fails by itself, with the same probability.
    backoff_base_s=0.0,
)

_MAX_LOST_IN_A_ROW = 200
"""Steps lost one after the other, all trainers together, after which a run cannot be helped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The paper's: 32 trainers of batch 1, 1000 ms of mean delay, 10 % of the calls failing."""

    num_trainers: int = 32
    """Asynchronous trainers."""
    batch_size: int = 1
    """Sequences of each."""
    delay_s: float = 1.0
    """Mean of the exponential delay: of each expert call, and of each step of a dense model. Virtual seconds."""
    failure_rate: float = 0.1
    """Share of expert calls that are never answered."""
    num_nodes: int = 8
    """Hosts that share the experts."""
    grace_s: float = 5.0
    """How long a trainer waits for the other experts after the first has answered, virtual seconds: so long that hardly
    a call is lost but those that fail (1 in 150)."""
    timeout_s: float = 30.0
    """After which a call is given up, virtual seconds."""

    def __post_init__(self) -> None:
        if min(self.num_trainers, self.batch_size, self.num_nodes) < 1:
            raise ValueError(f"expected at least one trainer, row and node, got {self}")
        if not (self.delay_s >= 0 and 0 <= self.failure_rate < 1):
            raise ValueError(f"expected delay_s >= 0 and 0 <= failure_rate < 1, got {self}")

    def faults(self, seed: int) -> FaultPlan:
        """What happens to the expert calls."""
        rates = {Fault.LATE: 1 - self.failure_rate, Fault.HANG: self.failure_rate}
        return FaultPlan(rates=rates, late_mean_s=self.delay_s, methods=("expert.",), seed=seed)


@dataclass(slots=True)
class _Counters:
    """Running totals of a simulated run."""

    tokens: int = 0
    staleness: int = 0
    steps_lost: int = 0
    virtual_s: float = 0.0


class _Stretches:
    """What both engines share: streams, trainers' memories, counters, and the count to a stretch's last update."""

    def __init__(self, *, name: str, ids: np.ndarray, seq_len: int, setting: Setting, seed: int) -> None:
        self.name = name
        self.setting = setting
        self.seed = seed
        self.counters = _Counters()
        self.streams = [
            SegmentStream(
                ids,
                batch_size=setting.batch_size,
                seq_len=seq_len,
                shard=index,
                num_shards=setting.num_trainers,
                seed=seed,
            )
            for index in range(setting.num_trainers)
        ]
        self._lost_in_a_row = 0

    def seed_of(self, step: int) -> int:
        """Seed of the stretch that begins at this step."""
        return int(np.random.SeedSequence([self.seed, step]).generate_state(1)[0])

    def took(self, record: StepRecord) -> None:
        """A trainer made a step."""
        self._lost_in_a_row = 0
        self.counters.tokens += record.tokens
        self.counters.staleness += record.staleness

    def lost(self, trainer: int, error: Exception) -> None:
        """A trainer lost a step.

        Raises:
          NoQuorum: so many were lost in a row that nothing will come of it.
        """
        self.counters.steps_lost += 1
        self._lost_in_a_row += 1
        if self._lost_in_a_row > _MAX_LOST_IN_A_ROW:
            raise NoQuorum(
                f"{self.name}: {self._lost_in_a_row} steps lost in a row, the last one by trainer {trainer}: {error}"
            ) from error

    def facts(self) -> dict[str, Any]:
        """For a checkpoint, as JSON."""
        return {"positions": [stream.position for stream in self.streams], "counters": asdict(self.counters)}

    def load(self, facts: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        for stream, position in zip(self.streams, facts["positions"], strict=True):
            stream.seek(position)
        self.counters = _Counters(**facts["counters"])


class SimulatedDmoe:
    """A DMoE Transformer-XL trained by a simulated swarm. An `Engine`.

    Args:
      name: what figures call it.
      config: sizes of the model. router: of every layer.
      ids: the training text.
      word_counts: of the training text, for the initial output biases; None: zeros.
      optimizer: of the trunk, its schedule counting trunk updates.
      expert_optimizer: of each expert, stepped at every backward call.
      setting: delays, failures and numbers. evaluation: how validation text is read.
      seed: of everything.
    """

    def __init__(
        self,
        *,
        name: str,
        config: txl.TransformerXLConfig,
        router: Router,
        ids: np.ndarray,
        word_counts: np.ndarray | None,
        optimizer: optax.GradientTransformation,
        expert_optimizer: optax.GradientTransformation,
        setting: Setting,
        evaluation: EvaluationConfig,
        seed: int,
    ) -> None:
        self.name = name
        self._config = config
        self._router = router
        self._device = InlineDevice()
        self._run = _Stretches(name=name, ids=ids, seq_len=config.seq_len, setting=setting, seed=seed)
        key = jax.random.key(seed)
        expert = config.expert()
        self._backends = {
            str(uid): ExpertBackend(expert, expert_optimizer, init_by_uid(key, expert, uid.prefix, uid.coordinates))
            for layer in range(config.num_layers)
            for uid in all_uids(layer_prefix(layer), config.grid_size)
        }
        next(iter(self._backends.values())).warm_up(2 * setting.batch_size)
        trunk = txl.init_trunk(key, config, router, word_counts=word_counts)
        self._trunk = SharedTrunk(trunk, optimizer, self._device)
        self._memories = [txl.empty_memory(config, setting.batch_size) for _ in range(setting.num_trainers)]
        self._statistics = CallStatistics()
        self._evaluate = dmoe_evaluator(config, router, evaluation)

    @property
    def step(self) -> int:
        """Trunk updates so far."""
        return self._trunk.step

    def advance(self, num_steps: int, on_step: Callable[[StepRecord], None]) -> None:
        """See `Engine.advance`."""
        run(self._stretch, self.step + num_steps, on_step, seed=self._run.seed_of(self.step))

    async def _stretch(self, last_step: int, on_step: Callable[[StepRecord], None]) -> None:
        setting, seed = self._run.setting, self._run.seed_of(self.step)
        working = setting.num_trainers
        all_done = trio.Event()

        def took(record: StepRecord) -> None:
            self._run.took(record)
            on_step(record)

        async def live(index: int, join: Any) -> None:
            nonlocal working
            async with open_simulated_trainer(
                network,
                f"trainer{index}",
                seed=seed,
                join=join,
                statistics=self._statistics,
                config=_DIRECTORY_CONFIG,
            ) as place:
                trainer = Trainer(index, self._model(place), self._trunk, self._run.streams[index], seed=self._run.seed)
                trainer.memory = self._memories[index]
                await trainer.run(last_step, took, self._run.lost)
                self._memories[index] = trainer.memory
                working -= 1
                if not working:
                    all_done.set()
                # A peer that leaves says goodbye to every node: work for nothing, the whole swarm ends in a moment.
                await trio.sleep_forever()

        async with simulate(seed=seed, latency=Constant(0.001)) as network:
            join = await start_simulated_nodes(
                network,
                self._backends,
                num_nodes=min(setting.num_nodes, len(self._backends)),
                seed=seed,
                faults=setting.faults(seed),
                config=_NODE_CONFIG,
            )
            started = trio.current_time()
            for index in range(setting.num_trainers):
                network.start(f"trainer{index}", live, index, join)
            await all_done.wait()
            self._run.counters.virtual_s += trio.current_time() - started

    def _model(self, place: SimulatedTrainer) -> SwarmModel:
        config, setting = self._config, self._run.setting
        policy = CallPolicy(k_min=1, grace_s=setting.grace_s, timeout_s=setting.timeout_s)
        mixtures = [
            RemoteMixture(
                expert=config.expert(),
                router=self._router,
                directory=place.directory,
                caller=place.caller,
                device=self._device,
                config=MixtureConfig(prefix=layer_prefix(layer), k_best=config.k_best, policy=policy),
            )
            for layer in range(config.num_layers)
        ]
        return SwarmModel(config, txl.segments(config, self._router), mixtures)

    def evaluate(
        self, ids: np.ndarray, *, max_tokens: int | None, on_batch: Callable[[], None] = lambda: None
    ) -> Evaluation:
        """See `Engine.evaluate`. On this machine, with every expert alive."""
        experts = tuple(stacked["params"] for stacked in self._stacked())
        return self._evaluate((self._trunk.params, experts), ids, max_tokens=max_tokens, on_batch=on_batch)

    def state(self) -> PyTree:
        """See `Engine.state`."""
        return {"trunk": self._trunk.state, "experts": self._stacked(), "memories": tuple(self._memories)}

    def facts(self) -> dict[str, Any]:
        """See `Engine.facts`."""
        statistics = {name: value for name, value in asdict(self._statistics).items() if name != "host"}
        updates = {uid: backend.update_count for uid, backend in self._backends.items()}
        return {**self._run.facts(), "step": self.step, "statistics": statistics, "updates": updates}

    def load(self, state: PyTree, facts: Mapping[str, Any]) -> None:
        """See `Engine.load`."""
        self._run.load(facts)
        self._trunk.restore(facts["step"], state["trunk"])
        for layer, stacked in enumerate(state["experts"]):
            for number, uid in enumerate(self._uids(layer)):
                own = jax.tree.map(lambda leaf, number=number: leaf[number], stacked)
                self._backends[str(uid)].load(own, update_count=facts["updates"][str(uid)])
        self._memories = [jax.tree.map(jnp.asarray, memory) for memory in state["memories"]]
        for name, value in facts["statistics"].items():
            setattr(self._statistics, name, value)

    def totals(self) -> Totals:
        """See `Engine.totals`."""
        statistics, counters = self._statistics, self._run.counters
        return Totals(
            tokens=counters.tokens,
            staleness=counters.staleness,
            calls_ok=statistics.ok,
            calls_failed=statistics.failed + statistics.late,
            steps_lost=counters.steps_lost,
            virtual_s=counters.virtual_s,
            load=dict(statistics.load),
        )

    def _uids(self, layer: int) -> Sequence[ExpertUid]:
        return all_uids(layer_prefix(layer), self._config.grid_size)

    def _stacked(self) -> tuple[PyTree, ...]:
        """The experts' parameters and optimiser states of each layer, stacked as `mixture.local` keeps them."""
        return tuple(
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *(self._backends[str(uid)].state for uid in self._uids(i)))
            for i in range(self._config.num_layers)
        )


class SimulatedDense:
    """A dense Transformer-XL trained by asynchronous trainers in virtual time. An `Engine`.

    Args: as of `SimulatedDmoe`; `config` is that of the dense model.
    """

    def __init__(
        self,
        *,
        name: str,
        config: dense.DenseConfig,
        ids: np.ndarray,
        word_counts: np.ndarray | None,
        optimizer: optax.GradientTransformation,
        setting: Setting,
        evaluation: EvaluationConfig,
        seed: int,
    ) -> None:
        self.name = name
        self._config = config
        self._run = _Stretches(name=name, ids=ids, seq_len=config.seq_len, setting=setting, seed=seed)
        params = dense.init(jax.random.key(seed), config, word_counts=word_counts)
        self._trunk = SharedTrunk(params, optimizer, InlineDevice())
        self._memories: list[Memory] = [
            txl.empty_memory(config, setting.batch_size) for _ in range(setting.num_trainers)
        ]
        self._loss_and_grads = _dense_gradient(config)
        self._evaluate = dense_evaluator(config, evaluation)

    @property
    def step(self) -> int:
        """Updates so far."""
        return self._trunk.step

    def advance(self, num_steps: int, on_step: Callable[[StepRecord], None]) -> None:
        """See `Engine.advance`."""
        run(self._stretch, self.step + num_steps, on_step, seed=self._run.seed_of(self.step))

    async def _stretch(self, last_step: int, on_step: Callable[[StepRecord], None]) -> None:
        async def live(index: int) -> None:
            while self._trunk.claim(last_step):
                try:
                    record = await self._step(index)
                except FloatingPointError as error:
                    self._run.lost(index, error)
                else:
                    self._run.took(record)
                    on_step(record)
                finally:
                    self._trunk.release()

        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for index in range(self._run.setting.num_trainers):
                nursery.start_soon(live, index)
        self._run.counters.virtual_s += trio.current_time() - started

    async def _step(self, index: int) -> StepRecord:
        """Read the parameters, wait, and apply the gradient to what they have become."""
        stream, delay_s = self._run.streams[index], self._run.setting.delay_s
        place = (self._run.seed, index, stream.position)
        keys = step_keys(
            num_layers=self._config.num_layers, batch=stream.batch_size, seed=place[0], trainer=index, step=place[2]
        )
        batch = next(stream)
        read_at = self._trunk.step
        (loss, memory), grads = self._loss_and_grads(self._trunk.params, batch, self._memories[index], keys)
        if not np.isfinite(loss):
            raise FloatingPointError(f"trainer {index}: loss {float(loss)} is not finite")
        await trio.sleep(random.Random(repr(place)).expovariate(1 / delay_s) if delay_s else 0.0)
        step = await self._trunk.apply(grads)
        self._memories[index] = memory
        return StepRecord(
            step=step,
            trainer=index,
            loss=float(loss),
            tokens=int(batch.targets.size),
            staleness=step - 1 - read_at,
        )

    def evaluate(
        self, ids: np.ndarray, *, max_tokens: int | None, on_batch: Callable[[], None] = lambda: None
    ) -> Evaluation:
        """See `Engine.evaluate`."""
        return self._evaluate(self._trunk.params, ids, max_tokens=max_tokens, on_batch=on_batch)

    def state(self) -> PyTree:
        """See `Engine.state`."""
        return {"trunk": self._trunk.state, "memories": tuple(self._memories)}

    def facts(self) -> dict[str, Any]:
        """See `Engine.facts`."""
        return {**self._run.facts(), "step": self.step}

    def load(self, state: PyTree, facts: Mapping[str, Any]) -> None:
        """See `Engine.load`."""
        self._run.load(facts)
        self._trunk.restore(facts["step"], state["trunk"])
        self._memories = [jax.tree.map(jnp.asarray, memory) for memory in state["memories"]]

    def totals(self) -> Totals:
        """See `Engine.totals`."""
        counters = self._run.counters
        return Totals(
            tokens=counters.tokens,
            staleness=counters.staleness,
            calls_ok=0,
            calls_failed=0,
            steps_lost=counters.steps_lost,
            virtual_s=counters.virtual_s,
            load={},
        )


@functools.cache
def _dense_gradient(config: dense.DenseConfig) -> Any:
    """The compiled (params, batch, memory, keys) -> ((loss, next memory), gradients)."""

    def loss(params: PyTree, batch: Batch, memory: Memory, keys: StepKeys) -> tuple[Any, Memory]:
        memory = txl.forget(memory, jnp.asarray(batch.is_first))
        nll, memory = dense.forward(params, config, batch, memory, keys=keys)
        return jnp.mean(nll), memory

    return jax.jit(jax.value_and_grad(loss, has_aux=True))
