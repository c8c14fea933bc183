"""Simulated nodes and trainers: crashes survived, and one seed is one training."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.autodiff import Recording, Value, value_and_grad
from dmoe_jax.directory.grid import all_uids
from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.machine.device import Device, InlineDevice
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.swarm.swarm import Swarm
from dmoe_net.identity import Address
from dmoe_net.rpc.faults import Fault, FaultPlan
from dmoe_net.transport.sim import run, simulate
from dmoe_net.transport.sim.events import HostDown, HostUp
from dmoe_net.transport.sim.links import Constant, LogNormal
from dmoe_net.transport.sim.network import SimNetwork
from experiments.simulated_swarm import start_simulated_nodes

GRID = (2, 3)
NUM_NODES = 3
EXPERT = feedforward(d_model=4, expansion=1)
OPTIMIZER = optax.sgd(0.01)
ROUTER = product_key(GRID)
PARAMS = {"gate": ROUTER.init(jax.random.key(0), 4), "x": jnp.ones((1, 4))}
NODE_CONFIG = NodeConfig(announce_period_s=3.0, record_lifetime_s=9.0)

Step = Callable[[], Any]


def mean(mixed: Any) -> Any:
    return jnp.mean(mixed**2)


def make_backends() -> dict[str, ExpertBackend]:
    uids = [str(uid) for uid in all_uids("ffn", GRID)]
    return {uid: ExpertBackend(EXPERT, OPTIMIZER, EXPERT.init(jax.random.key(i))) for i, uid in enumerate(uids)}


def open_trainer(network: SimNetwork, *, seed: int, join: Address) -> AbstractAsyncContextManager[Swarm]:
    """A trainer's process: a client, as behind a router that lets nobody in."""
    return open_swarm(join, network=network, host="trainer0", listen=None, seed=seed)


def step_of(swarm: Swarm) -> Step:
    """A step that calls every living expert, forward and backward; its loss."""
    mixture = swarm.mixture("ffn", EXPERT, ROUTER, k_best=6, grace_s=1.0, timeout_s=2.0)

    async def forward(run: Recording, params: Any) -> Value:
        mixed, _ = await mixture(run, run(ROUTER.scores, params["gate"], params["x"]), params["x"])
        return run(mean, mixed)

    async def step() -> float:
        loss, _ = await value_and_grad(forward)(PARAMS)
        return float(loss)

    return step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "silent"),
    [
        pytest.param(("node0",), False, id="the one to join"),
        pytest.param(("node2",), True, id="an unplugged one"),
        pytest.param(("node0", "node1", "node2"), False, id="all of them"),
    ],
)
def test_nodes_come_back_and_the_trainer_goes_on(hosts: tuple[str, ...], silent: bool) -> None:
    """Down at 20 s, up at 40 s: the trainer steps all the time, and the experts go on learning from where they were."""
    backends = make_backends()
    uids = list(backends)
    downed = {uid for index, uid in enumerate(uids) if f"node{index % NUM_NODES}" in hosts}
    started: list[str] = []

    def device(host: str) -> Device:
        started.append(host)
        return InlineDevice()

    async def main() -> list[dict[str, int]]:
        counts = []
        schedule = [
            *((20.0, HostDown(host, silent=silent)) for host in hosts),
            *((40.0, HostUp(host)) for host in hosts),
        ]
        async with simulate(latency=Constant(0.05), schedule=schedule) as network:
            join = await start_simulated_nodes(
                network, backends, num_nodes=NUM_NODES, seed=0, device=device, config=NODE_CONFIG
            )
            async with open_trainer(network, seed=0, join=join) as swarm:
                step = step_of(swarm)
                for until_s in (19.9, 39.9, 80.0, 100.0):
                    num_steps = 0
                    while trio.current_time() < until_s:
                        assert np.isfinite(await step())
                        await trio.sleep(1.0)
                        num_steps += 1
                    assert num_steps >= 3
                    counts.append({uid: backend.update_count for uid, backend in backends.items()})
        return counts

    before, during, _, after = run(main)
    assert all(before[uid] > 0 for uid in uids)
    for uid in uids:
        assert (during[uid] - before[uid] <= 1) == (uid in downed)  # a call may just have been under way
    # The last 20 seconds, so that nobody is left out for good.
    assert all(after[uid] - during[uid] >= 15 for uid in uids)
    assert sorted(started) == sorted([f"node{index}" for index in range(NUM_NODES)] + list(hosts))


def test_the_same_seed_gives_the_same_training() -> None:
    """Times and losses to the last bit, with loss of parts, random latencies and faults; another seed differs."""

    async def main(seed: int) -> list[tuple[float, float]]:
        trace = []
        faults = FaultPlan(rates={Fault.REFUSE: 0.1, Fault.LATE: 0.2}, methods=("expert.",), seed=seed)
        async with simulate(seed=seed, latency=LogNormal(median_s=0.05, sigma=0.5), loss=0.02) as network:
            join = await start_simulated_nodes(network, make_backends(), num_nodes=2, seed=seed, faults=faults)
            async with open_trainer(network, seed=seed, join=join) as swarm:
                step = step_of(swarm)
                for _ in range(8):
                    trace.append((await step(), trio.current_time()))
            assert swarm.statistics.failed > 0
        return trace

    first = run(main, 1, seed=1)
    assert run(main, 1, seed=1) == first
    assert run(main, 2, seed=2) != first
