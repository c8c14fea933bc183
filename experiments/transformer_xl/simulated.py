"""The paper's setting in virtual time (Learning@home, section 4.3): many slow trainers of batch 1, calls that fail.

The code is that of a real swarm on a simulated network: expert nodes, DHT, directory, RPC, trainers. Every expert call
is answered after an exponential delay, or never. See `stretches` for how a run pauses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import trio

from dmoe_jax.device import InlineDevice
from dmoe_jax.directory import DirectoryConfig
from dmoe_jax.experts.base import init_by_uid
from dmoe_jax.grid import ExpertUid, all_uids, layer_prefix
from dmoe_jax.mixture.statistics import CallStatistics
from dmoe_jax.model import Evaluation
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.trunk import empty_memory
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.server import NodeConfig
from dmoe_jax.routing.base import Router
from dmoe_jax.swarm import Swarm, open_swarm
from dmoe_jax.trainer import StepRecord, Trainer
from dmoe_jax.trunk import SharedTrunk
from dmoe_jax.types import PyTree
from experiments.simulated_swarm import start_simulated_nodes
from experiments.transformer_xl.engine import Totals
from experiments.transformer_xl.evaluation import EvaluationConfig, dmoe_evaluator
from experiments.transformer_xl.stretches import Setting, Stretches
from net.transport.sim import run, simulate
from net.transport.sim.links import Constant

# Nodes that stay: announced and looked up every few virtual minutes, not every few seconds as on a volunteer's machine.
_NODE_CONFIG = NodeConfig(announce_period_s=300.0, record_lifetime_s=1800.0)

_DIRECTORY_CONFIG = DirectoryConfig(
    ttl_s=900.0,
    idle_s=3600.0,
    # A failed call says nothing of the next one in this setting: each fails by itself, with the same probability.
    backoff_base_s=0.0,
)


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
        config: TransformerXLConfig,
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
        self._run = Stretches(name=name, ids=ids, seq_len=config.seq_len, setting=setting, seed=seed)
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
        self._memories = [empty_memory(config, setting.batch_size) for _ in range(setting.num_trainers)]
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
            async with open_swarm(
                join,
                network=network,
                host=f"trainer{index}",
                listen=None,
                seed=seed,
                device=self._device,
                statistics=self._statistics,
                directory=_DIRECTORY_CONFIG,
            ) as swarm:
                trainer = Trainer(index, self._model(swarm), self._trunk, self._run.streams[index], seed=self._run.seed)
                trainer.state = self._memories[index]
                await trainer.run(last_step, took, self._run.lost)
                self._memories[index] = trainer.state
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

    def _model(self, swarm: Swarm) -> txl.TransformerXL:
        config, setting = self._config, self._run.setting
        mixtures = [
            swarm.mixture(
                layer_prefix(layer),
                config.expert(),
                self._router,
                k_best=config.k_best,
                grace_s=setting.grace_s,
                timeout_s=setting.timeout_s,
            )
            for layer in range(config.num_layers)
        ]
        return txl.TransformerXL(config, self._router, mixtures)

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
