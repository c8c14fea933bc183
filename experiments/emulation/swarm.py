"""The code of a real swarm on a simulated network: the model, beginning and batches that an emulator would have."""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import trio

from dmoe_jax import CallStatistics, DirectoryConfig
from dmoe_jax.arrays import PyTree
from dmoe_jax.directory.grid import all_uids
from dmoe_jax.emulator import Emulator, EventOrder
from dmoe_jax.experts.base import init_by_uid
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.peers.peer import PeerConfig, open_peer
from dmoe_jax.swarm.opening import swarm_of
from dmoe_jax.trainer import StepRecord, Trainer
from dmoe_jax.trunk import SharedTrunk
from dmoe_net.rpc.faults import Fault, FaultPlan
from dmoe_net.transport.sim import run, simulate
from dmoe_net.transport.sim.links import Constant
from experiments.emulation.problems import Problem, keys_of
from experiments.emulation.recording import OrderRecorder
from experiments.simulated_swarm import DIRECTORY_CONFIG, NODE_CONFIG, start_simulated_nodes

_TIMEOUT_DELAYS = 30.0
"""A call is given up after so many mean delays: one in 10^13 is lost that does not fail."""

# Nobody is turned away: a call that is late is at its node all the while, and trainers are many.
_NODE_CONFIG = dataclasses.replace(NODE_CONFIG, max_concurrent_calls=65_536)


class Scenery(NamedTuple):
    """Network, nodes and calls of a simulated swarm.

    Attributes:
      delay_s: of every message, virtual seconds.
      nodes: arguments of `start_simulated_nodes`.
      directory: of each trainer.
      mixtures: settings of the model's mixtures.
      recorder: stands between all of them and the network.
    """

    delay_s: float
    nodes: Mapping[str, Any]
    directory: DirectoryConfig = DirectoryConfig()
    mixtures: Mapping[str, Any] = {}
    recorder: OrderRecorder | None = None


async def train_in_scenery(
    problem: Problem,
    emulator: Emulator,
    scenery: Scenery,
    *,
    num_updates: int,
    seed: int,
    note: Callable[[StepRecord, Sequence[CallStatistics]], None],
) -> tuple[SharedTrunk, Mapping[str, ExpertBackend]]:
    """Train a swarm under `dmoe_net.transport.sim.run`; each trainer is a host of its own but for the trunk.

    Args:
      emulator: has the optimisers and number of trainers.
      seed: of parameters, dropout and choices.
      note: hears of each update; and of what every trainer has counted, in the order in which they came.

    Returns: the trunk, and the experts by uid.
    """
    trunk_key, expert_key = keys_of(seed)
    recorder, streams = scenery.recorder, problem.streams(emulator.num_trainers, seed)
    trunk = SharedTrunk(emulator.stages.model.init(trunk_key), emulator.optimizer, InlineDevice())
    backends = {}
    for layer in emulator.stages.layers:
        for uid in all_uids(layer.prefix, layer.router.grid_size):
            params = init_by_uid(expert_key, emulator.expert, uid.prefix, uid.coordinates)
            backends[str(uid)] = ExpertBackend(emulator.expert, emulator.expert_optimizer, params)
    next(iter(backends.values())).warm_up(_NODE_CONFIG.max_batch_rows if recorder is None else problem.batch_size)
    counted: list[CallStatistics] = []
    working, all_done = set(range(emulator.num_trainers)), trio.Event()

    async def live(index: int, join: Any) -> None:
        config = PeerConfig(network=network, host=f"trainer{index}", listen=None, seed=seed)
        async with open_peer(join, config) as peer:
            if recorder is not None:
                peer = dataclasses.replace(peer, rpc=recorder.caller(peer.rpc, trainer=index))
            async with swarm_of(peer, seed=seed, device=InlineDevice(), directory=scenery.directory) as swarm:
                counted.append(swarm.statistics)
                model = problem.make_model(swarm, **scenery.mixtures)
                own = streams[index] if recorder is None else recorder.batches(streams[index], trainer=index)
                await Trainer(index, model, trunk, own, seed=seed).run(num_updates, lambda step: note(step, counted))
                working.discard(index)
                if not working:
                    all_done.set()
                await trio.sleep_forever()

    async with simulate(seed=seed, latency=Constant(scenery.delay_s)) as network:
        through = (lambda caller: caller) if recorder is None else recorder.caller
        join = await start_simulated_nodes(network, backends, seed=seed, through=through, **scenery.nodes)
        for index in range(emulator.num_trainers):
            network.start(f"trainer{index}", live, index, join)
        await all_done.wait()
    return trunk, backends


class SwarmRun(NamedTuple):
    """Losses, parameters and times of a swarm that trained on its data.

    Attributes:
      order: the events, if they were recorded.
      losses: float [updates], of the trunk's updates in order, nats.
      params: the trunk's. experts: those of each layer, stacked.
      updates_per_s: in real time, after the first tenth, which compiles.
    """

    order: EventOrder | None
    losses: np.ndarray
    params: PyTree
    experts: tuple[PyTree, ...]
    updates_per_s: float


def train_swarm(
    problem: Problem,
    emulator: Emulator,
    *,
    num_updates: int,
    delay_s: float = 0.125,
    failure_rate: float = 0.0,
    seed: int = 0,
    record: bool = False,
) -> SwarmRun:
    """Train a swarm in the setting of an emulator: each expert call is computed a while after it was placed, or never.

    Args:
      delay_s: mean of the exponential delay of each expert call, virtual seconds.
      failure_rate: share of calls that are never computed.
      seed: of parameters, dropout, delays and failures.
      record: note the order of events; a node then serves an expert one request after the other.
    """
    layers = emulator.stages.layers
    recorder = OrderRecorder([layer.prefix for layer in layers], emulator.router.grid_size) if record else None
    faults = FaultPlan(
        rates={Fault.LATE: 1 - failure_rate, Fault.HANG: failure_rate},
        late_mean_s=delay_s,
        methods=("expert.forward", "expert.backward"),
        seed=seed,
    )
    scenery = Scenery(
        delay_s=0.001,
        nodes={"num_nodes": 4, "faults": faults, "config": _NODE_CONFIG},
        directory=DIRECTORY_CONFIG,
        # Delays and failures strike experts one by one, as in the paper: each is asked by a request of its own.
        mixtures={"grace_s": math.inf, "timeout_s": _TIMEOUT_DELAYS * delay_s, "max_parts": 1},
        recorder=recorder,
    )
    losses: dict[int, float] = {}
    times: list[float] = []

    def note(step: StepRecord, counted: Sequence[CallStatistics]) -> None:
        losses[step.step] = step.loss
        times.append(time.perf_counter())
        if recorder is not None:
            recorder.on_step(step)

    train = functools.partial(train_in_scenery, num_updates=num_updates, seed=seed, note=note)
    trunk, backends = run(train, problem, emulator, scenery, seed=seed)
    first = max(1, num_updates // 10)
    num_pairs = problem.batch_size * emulator.k_best
    params = iter([backend.params for backend in backends.values()])
    stacked = [
        jax.tree.map(lambda *leaves: np.stack(leaves), *itertools.islice(params, emulator.num_cells)) for _ in layers
    ]
    return SwarmRun(
        order=None if recorder is None else recorder.order(num_trainers=emulator.num_trainers, num_pairs=num_pairs),
        losses=np.array([losses[step] for step in sorted(losses)]),
        params=trunk.params,
        experts=tuple(stacked),
        updates_per_s=(len(times) - first) / (times[-1] - times[first - 1]),
    )
