"""A swarm one of whose nodes becomes ten times slower for a while, on a simulated network.

The code is that of a real swarm: nodes that publish their load, trainers that time their calls, in virtual time. Only
the network and the devices are simulated. What counts is the share of the calls that goes to the slow node's experts.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import trio

from dmoe_jax import open_swarm
from dmoe_jax.directory.grid import all_uids
from dmoe_jax.experts.base import init_by_uid
from dmoe_jax.machine.device import CostModel, InlineDevice
from dmoe_jax.model import Model
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.routing.base import Router
from dmoe_jax.trainer import StepRecord, Trainer
from dmoe_jax.trunk import SharedTrunk
from dmoe_net.transport.sim import run, simulate
from dmoe_net.transport.sim.links import Constant
from experiments.emulation.problems import keys_of, mnist
from experiments.simulated_swarm import start_simulated_nodes

SLOW = "node1"
"""The host that becomes slow; of each layer it serves the experts 1, 1 + nodes, and so on."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One run.

    Attributes:
      num_updates: of the trunk. slow_from, slow_until: the updates between which one node is slow.
      slowdown: how many times as long its work takes then.
      num_nodes: expert nodes. num_trainers: trainers of batch 4, each a process of its own but for the trunk.
      grid_size: of each of the two layers' experts.
      call_s: what a batch costs a node's device, virtual seconds. delay_s: of every message.
      window: updates in each of which calls are counted.
    """

    num_updates: int = 600
    slow_from: int = 200
    slow_until: int = 400
    slowdown: float = 10.0
    num_nodes: int = 8
    num_trainers: int = 16
    grid_size: tuple[int, ...] = (4, 4)
    call_s: float = 0.02
    delay_s: float = 0.02
    window: int = 25


def slow_node_shares(router: Router, scene: Scene, *, seed: int) -> np.ndarray:
    """The slow node's rows of every window over the mean of the other nodes' rows, [windows]."""
    return run(_train, router, scene, seed, seed=seed)


async def _train(router: Router, scene: Scene, seed: int) -> np.ndarray:
    problem = mnist(d_model=16, grid_size=scene.grid_size, num_layers=2, router=router, num_evaluated=16)
    maker = _Layers()
    problem.make_model(maker)
    trunk_key, expert_key = keys_of(seed)
    uids = list(itertools.chain(*(all_uids(prefix, scene.grid_size) for prefix in maker.experts)))
    backends = {}
    for uid in uids:
        expert = maker.experts[uid.prefix]
        params = init_by_uid(expert_key, expert, uid.prefix, uid.coordinates)
        backends[str(uid)] = ExpertBackend(expert, problem.optimizers.expert, params)
    next(iter(backends.values())).warm_up(64)
    node_of = {uid: f"node{index % scene.num_nodes}" for index, uid in enumerate(backends)}
    trunk: SharedTrunk | None = None
    counts: list[dict[str, int]] = []
    rows = dict.fromkeys(sorted(set(node_of.values())), 0)

    def device(host: str) -> InlineDevice:
        ordinary, slow = (CostModel(call_s=scene.call_s, slowdown=factor) for factor in (1.0, scene.slowdown))

        def cost(name: str, batch: int) -> float:
            step = 0 if trunk is None else trunk.step
            is_slow = host == SLOW and scene.slow_from <= step < scene.slow_until
            return (slow if is_slow else ordinary)(name, batch)

        return InlineDevice(cost)

    def note(record: StepRecord) -> None:
        if record.step % scene.window == 0:
            totals = dict.fromkeys(rows, 0)
            for statistics in all_statistics:
                for uid, load in statistics.asked.items():
                    totals[node_of[uid]] += load
            counts.append(totals)

    async def live(index: int, join: Any) -> None:
        nonlocal trunk
        async with open_swarm(join, network=network, host=f"trainer{index}", listen=None, seed=seed) as swarm:
            all_statistics.append(swarm.statistics)
            model: Model = problem.make_model(swarm)
            if trunk is None:
                trunk = SharedTrunk(model.init(trunk_key), problem.optimizers.trunk, InlineDevice())
            own = problem.streams(scene.num_trainers, seed)[index]
            await Trainer(index, model, trunk, own, seed=seed).run(scene.num_updates, note)
            working.discard(index)
            if not working:
                all_done.set()
            await trio.sleep_forever()

    all_statistics: list[Any] = []
    working, all_done = set(range(scene.num_trainers)), trio.Event()
    async with simulate(seed=seed, latency=Constant(scene.delay_s)) as network:
        join = await start_simulated_nodes(network, backends, num_nodes=scene.num_nodes, seed=seed, device=device)
        for index in range(scene.num_trainers):
            network.start(f"trainer{index}", live, index, join)
        await all_done.wait()
    grown = np.diff([list(dict.fromkeys(rows, 0).values()), *(list(each.values()) for each in counts)], axis=0)
    slow = list(rows).index(SLOW)
    return grown[:, slow] / np.delete(grown, slow, axis=1).mean(axis=1)


class _Layers:
    """Learns which experts a model has."""

    def __init__(self) -> None:
        self.experts: dict[str, Any] = {}

    def mixture(self, prefix: str, expert: Any, router: Router, **_: Any) -> Callable[..., Any]:
        """As `Swarm.mixture`."""
        del router
        self.experts[prefix] = expert
        return lambda *args: None
