"""The real protocol on a simulated network, in the setting of an emulator: what the emulator is compared with.

Every expert call is computed an exponential delay after it was placed, or never.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import trio
from jaxtyping import PRNGKeyArray

from dmoe_jax.arrays import PyTree
from dmoe_jax.directory.directory import DirectoryConfig
from dmoe_jax.directory.grid import ExpertUid, all_uids
from dmoe_jax.emulator import Data, Emulator, EventOrder
from dmoe_jax.experts.base import init_by_uid
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.peers.peer import PeerConfig, open_peer
from dmoe_jax.swarm.opening import swarm_of
from dmoe_jax.trainer import StepRecord, Trainer
from dmoe_jax.trunk import SharedTrunk
from dmoe_net.rpc.faults import Fault, FaultPlan
from dmoe_net.transport.sim import run, simulate
from dmoe_net.transport.sim.links import Constant
from experiments.emulation.problems import Problem, keys_of
from experiments.emulation.recording import OrderRecorder
from experiments.simulated_swarm import start_simulated_nodes

_NODES = 4
_TIMEOUT_DELAYS = 30.0
"""A call is given up after so many mean delays: one in 10^13 is lost that does not fail."""

# Nobody is turned away: a call that is late is at its node all the while, and trainers are many.
_NODE_CONFIG = NodeConfig(announce_period_s=100.0, record_lifetime_s=300.0, max_concurrent_calls=65_536)
# A failed call says nothing of the next one: each fails by itself. So nobody is avoided, and routers choose among all.
_DIRECTORY_CONFIG = DirectoryConfig(ttl_s=300.0, idle_s=3600.0, backoff_base_s=0.0)


class SwarmRun(NamedTuple):
    """Losses, parameters and times of a swarm that trained on its data.

    Attributes:
      order: the events, if they were recorded.
      losses: float [updates], of the trunk's updates in order, nats.
      params: the trunk's. experts: those of each layer, stacked.
      wall_s: real seconds of the updates after the first tenth, which compiles. timed: how many these were.
    """

    order: EventOrder | None
    losses: np.ndarray
    params: PyTree
    experts: tuple[PyTree, ...]
    wall_s: float
    timed: int


def train_swarm(
    problem: Problem,
    emulator: Emulator,
    data: Data,
    *,
    num_updates: int,
    delay_s: float = 0.125,
    failure_rate: float = 0.0,
    seed: int = 0,
    record: bool = False,
) -> SwarmRun:
    """Train a simulated swarm on the data that an emulator would get, from the same beginning.

    Args:
      problem: the model. emulator: its optimisers and number of trainers. data: of the run.
      num_updates: of the trunk.
      delay_s: mean of the exponential delay of each expert call, virtual seconds.
      failure_rate: share of calls that are never computed.
      seed: of parameters, dropout, delays and failures.
      record: note the order of events; a node then serves an expert one request after the other.
    """
    setting = _Setting(num_updates, delay_s, failure_rate, seed, record)
    return run(_train, problem, emulator, data, setting, seed=seed)


class _Setting(NamedTuple):
    num_updates: int
    delay_s: float
    failure_rate: float
    seed: int
    record: bool


async def _train(problem: Problem, emulator: Emulator, data: Data, setting: _Setting) -> SwarmRun:
    num_updates, delay_s, _, seed, record = setting
    trunk_key, expert_key = keys_of(seed)
    layers = emulator.stages.layers
    prefixes, grid_size = [layer.prefix for layer in layers], layers[0].router.grid_size
    recorder = OrderRecorder(prefixes, grid_size) if record else None
    uids = [all_uids(prefix, grid_size) for prefix in prefixes]
    backends = {str(uid): _backend(emulator, expert_key, uid) for uid in itertools.chain(*uids)}
    next(iter(backends.values())).warm_up(_NODE_CONFIG.max_batch_rows if not record else problem.batch_size)
    trunk = SharedTrunk(emulator.stages.model.init(trunk_key), emulator.optimizer, InlineDevice())
    records: list[StepRecord] = []
    began, first_timed = 0.0, max(1, num_updates // 10)

    def note(step: StepRecord) -> None:
        nonlocal began
        records.append(step)
        if recorder is not None:
            recorder.on_step(step)
        if len(records) == first_timed:
            began = time.perf_counter()

    async def live(index: int, join: Any) -> None:
        host = f"trainer{index}"
        async with open_peer(join, PeerConfig(network=network, host=host, listen=None, seed=seed)) as peer:
            if recorder is not None:
                peer = dataclasses.replace(peer, rpc=recorder.caller(peer.rpc, trainer=index))
            async with swarm_of(peer, seed=seed, device=InlineDevice(), directory=_DIRECTORY_CONFIG) as swarm:
                # Delays and failures strike experts one by one, as in the paper: each is asked by a request of its own.
                options = {"grace_s": math.inf, "timeout_s": _TIMEOUT_DELAYS * delay_s, "max_parts": 1}
                model = problem.make_model(swarm, **options)
                steps = jax.tree.leaves(data.batches)[0].shape[1]
                own: Iterator[Any] = (
                    jax.tree.map(lambda leaf, step=step: leaf[index, step], data.batches) for step in range(steps)
                )
                if recorder is not None:
                    own = recorder.batches(own, trainer=index)
                await Trainer(index, model, trunk, own, seed=seed).run(num_updates, note)
                working.discard(index)
                if not working:
                    all_done.set()
                await trio.sleep_forever()

    working, all_done = set(range(emulator.num_trainers)), trio.Event()
    async with simulate(seed=seed, latency=Constant(0.001)) as network:
        join = await start_simulated_nodes(
            network,
            backends,
            num_nodes=_NODES,
            seed=seed,
            faults=_faults(setting),
            config=_NODE_CONFIG,
            through=(lambda caller: caller) if recorder is None else recorder.caller,
        )
        for index in range(emulator.num_trainers):
            network.start(f"trainer{index}", live, index, join)
        await all_done.wait()
        wall_s = time.perf_counter() - began
    num_pairs = problem.batch_size * emulator.k_best
    order = None if recorder is None else recorder.order(num_trainers=emulator.num_trainers, num_pairs=num_pairs)
    stacked = tuple(_stacked([backends[str(uid)].params for uid in layer]) for layer in uids)
    losses = np.array([step.loss for step in sorted(records, key=lambda step: step.step)])
    return SwarmRun(order, losses, trunk.params, stacked, wall_s, num_updates - first_timed)


def _stacked(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def _faults(setting: _Setting) -> FaultPlan:
    """Every call is late, or never answered."""
    return FaultPlan(
        rates={Fault.LATE: 1 - setting.failure_rate, Fault.HANG: setting.failure_rate},
        late_mean_s=setting.delay_s,
        methods=("expert.forward", "expert.backward"),
        seed=setting.seed,
    )


def _backend(emulator: Emulator, key: PRNGKeyArray, uid: ExpertUid) -> ExpertBackend:
    params = init_by_uid(key, emulator.expert, uid.prefix, uid.coordinates)
    return ExpertBackend(emulator.expert, emulator.expert_optimizer, params)
