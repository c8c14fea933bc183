"""The paper's setting in virtual time (Learning@home, section 4.3): many slow trainers of batch 1, calls that fail.

The code is that of a real swarm on a simulated network: expert nodes, DHT, directory, RPC, trainers. Every expert call
is answered after an exponential delay, or never. See `simulated` for how a run pauses.
"""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import trio

from dmoe_jax import open_swarm
from dmoe_jax.arrays import PyTree
from dmoe_jax.directory.directory import DirectoryConfig
from dmoe_jax.directory.grid import parse_uid
from dmoe_jax.experts.base import init_by_uid
from dmoe_jax.mixture.statistics import CallStatistics
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.optim.recipe import make_optimizer
from dmoe_jax.peers.peer import Seams
from dmoe_jax.trainer import OnLost, OnStep, StepRecord, Trainer
from dmoe_jax.training.engine import Totals
from dmoe_jax.training.swarm_engine import call_totals, load_statistics, saved_statistics
from dmoe_net.transport.sim import simulate
from dmoe_net.transport.sim.links import Constant
from experiments.simulated_swarm import start_simulated_nodes
from experiments.transformer_xl.setup import Setup
from experiments.transformer_xl.simulated import SimulatedEngine

# Nodes that stay: announced and looked up every few virtual minutes, not every few seconds as on a volunteer's machine.
_NODE_CONFIG = NodeConfig(announce_period_s=100.0, record_lifetime_s=300.0)

_DIRECTORY_CONFIG = DirectoryConfig(
    ttl_s=300.0,  # announcements have two thirds of that left when they are read
    idle_s=3600.0,
    # A failed call says nothing of the next one in this setting: each fails by itself, with the same probability.
    backoff_base_s=0.0,
)


class _InTurn(Trainer):
    """A trainer that takes its steps when it has its turn.

    Args:
      turns: whose holders may be at work. Others: as of `Trainer`.
    """

    def __init__(self, turns: trio.CapacityLimiter, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._turns = turns

    async def step(self) -> StepRecord:
        async with self._turns:
            return await super().step()


class SimulatedDmoe(SimulatedEngine):
    """A DMoE Transformer-XL trained by a simulated swarm. An `Engine`.

    Each backward call updates its expert.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        assert setup.router is not None
        self._router = setup.router
        key, expert = jax.random.key(setup.seed), setup.config.expert()
        self._backends: dict[str, ExpertBackend] = {}
        for uid in map(parse_uid, itertools.chain(*setup.layers.values())):
            params = init_by_uid(key, expert, uid.prefix, uid.coordinates)
            self._backends[str(uid)] = ExpertBackend(expert, make_optimizer(setup.expert_recipe), params)
        next(iter(self._backends.values())).warm_up(
            min(2 * setup.config.samples(setup.rows), _NODE_CONFIG.max_batch_rows)
        )
        self._statistics = CallStatistics()

    async def stretch(self, last_step: int, on_step: OnStep, on_lost: OnLost) -> None:
        setting, seed = self.setting, self.stretch_seed
        working = setting.num_trainers
        all_done = trio.Event()

        async def live(index: int, join: Any) -> None:
            nonlocal working
            async with open_swarm(
                join,
                network=network,
                host=f"trainer{index}",
                listen=None,
                seed=seed,
                device=self.device,
                testing=Seams(statistics=self._statistics),
                directory=_DIRECTORY_CONFIG,
            ) as swarm:
                model = txl.TransformerXL.on(
                    swarm,
                    self.setup.config,
                    self._router,
                    grace_s=setting.grace_s,
                    timeout_s=setting.timeout_s,
                    max_parts=1,  # delays and failures strike experts one by one, as in the paper
                )
                trainer = _InTurn(self.turns, index, model, self.trunk, self.streams[index], seed=self.setup.seed)
                trainer.state = self.memories[index]
                await trainer.run(last_step, on_step, on_lost)
                self.memories[index] = trainer.state
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
                faults=functools.partial(setting.faults, seed),
                config=_NODE_CONFIG,
            )
            started = trio.current_time()
            for index in range(setting.num_trainers):
                network.start(f"trainer{index}", live, index, join)
            await all_done.wait()
            self.counters["virtual_s"] += trio.current_time() - started

    def params(self) -> tuple[PyTree, tuple[PyTree, ...]]:
        return self.trunk.params, tuple(stacked["params"] for stacked in self._stacked())

    def state(self) -> dict[str, PyTree]:
        return {**super().state(), "experts": self._stacked()}

    def facts(self) -> dict[str, Any]:
        updates = {uid: backend.update_count for uid, backend in self._backends.items()}
        return {**super().facts(), "statistics": saved_statistics(self._statistics), "updates": updates}

    def load(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        super().load(step, state, facts)
        for uids, stacked in zip(self.layers.values(), state["experts"], strict=True):
            for number, uid in enumerate(uids):
                own = jax.tree.map(lambda leaf, number=number: leaf[number], stacked)
                self._backends[uid].load(own, update_count=facts["updates"][uid])
        load_statistics(self._statistics, facts["statistics"])

    def totals(self) -> Totals:
        # Where an expert lives is told by its number, and a resumed run has not asked yet.
        return replace(call_totals(self._statistics, super().totals()), peers={})

    def _stacked(self) -> tuple[PyTree, ...]:
        """The experts' parameters and optimiser states of each layer, stacked as `mixture.local` keeps them."""
        return tuple(
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *(self._backends[uid].state for uid in uids))
            for uids in self.layers.values()
        )
