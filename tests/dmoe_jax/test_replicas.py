"""Replicas of experts on a simulated network: they share the load, average, and one of them may die unnoticed."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax
import trio

from dmoe_jax.device import CostModel, InlineDevice
from dmoe_jax.experts import expert_from_functions
from dmoe_jax.node.server import NodeConfig
from dmoe_jax.replicas import ReplicaConfig
from dmoe_jax.routing.base import Scores
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.serving import Served
from dmoe_jax.swarm import Swarm, open_swarm
from net.transport.sim import Constant, HostDown, HostUp, SimNetwork, run, simulate

NUM_EXPERTS = 8
EXPERT = expert_from_functions(
    lambda key: jax.random.normal(key, (4, 4)) / 2,
    lambda params, x: x + x @ params,
    np.zeros((1, 4), np.float32),
    name="linear",
)
ADAM = optax.adam(1e-3)
"""One object, so that what one test compiles serves the others."""
PERIOD_S = 10.0
REPLICAS = ReplicaConfig(average_period_s=PERIOD_S, average_timeout_s=6.0, meet_timeout_s=2.0)
SERVING = NodeConfig(announce_period_s=5.0, record_lifetime_s=15.0)


@dataclass
class Node:
    """A node of the simulated network that serves all experts, and does so again whenever its host comes up."""

    host: str
    network: SimNetwork
    entrance: str
    replicas: ReplicaConfig | None = REPLICAS
    optimizer: Any = ADAM
    lives: list[Served] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    async def main(self) -> None:
        device = InlineDevice(CostModel(call_s=0.01))
        async with open_swarm(self.entrance, network=self.network, host=self.host, seed=0, device=device) as swarm:
            self.lives.append(
                await swarm.serve(
                    {f"ffn.[0:{NUM_EXPERTS}]": EXPERT},
                    optimizer=self.optimizer,
                    config=SERVING,
                    replicas=self.replicas,
                    on_progress=self.said.append,
                )
            )
            await trio.sleep_forever()

    @property
    def served(self) -> Served:
        return self.lives[-1]

    @property
    def replica_status(self) -> dict[str, Any]:
        return dict(self.served.node.status()["replicas"])

    def numbers(self) -> list[np.ndarray]:
        """Copies of all that is averaged: parameters and Adam's moments of all experts."""
        state = {uid: backend.state for uid, backend in self.served.backends.items()}
        return [np.array(leaf) for leaf in jax.tree.leaves(state) if leaf.dtype == np.float32]

    def updates(self) -> int:
        return sum(backend.update_count for backend in self.served.backends.values())


class Load:
    """A trainer that sends gradients of random batches, step after step, and keeps count of what it gets."""

    def __init__(self, swarm: Swarm, seed: int) -> None:
        self.swarm = swarm
        self.steps = 0
        self.dead: list[tuple[float, int]] = []  # when how few experts were alive
        self._rng = np.random.default_rng(seed)
        self.mixture = swarm.mixture("ffn", EXPERT, product_key((NUM_EXPERTS,)), k_best=2, k_min=2)

    async def step(self) -> None:
        batch = [self._rng.normal(size=(2, 4)).astype(np.float32)]
        logits = self._rng.normal(size=(2, NUM_EXPERTS)).astype(np.float32)
        living = len(await self.mixture.living())
        if living < NUM_EXPERTS:
            self.dead.append((trio.current_time(), living))
        choice = await self.mixture.choose(Scores((logits,)))
        outputs, _, residual = await self.mixture.forward(choice, batch)
        await self.mixture.backward(residual, outputs / outputs.size)
        self.steps += 1

    async def run(self, until: float) -> None:
        while trio.current_time() < until:
            await self.step()
            await trio.sleep(1.0)

    @property
    def lost(self) -> int:
        """Calls that brought nothing, late ones too."""
        return self.swarm.statistics.failed + self.swarm.statistics.late


@dataclass
class Scene:
    """Two nodes that serve the same experts, and three trainers."""

    network: SimNetwork
    nodes: dict[str, Node]
    loads: list[Load]

    async def train(self, seconds: float) -> None:
        until = trio.current_time() + seconds
        async with trio.open_nursery() as nursery:
            for load in self.loads:
                nursery.start_soon(load.run, until)

    async def until_served(self, host: str, lives: int = 1) -> None:
        while len(self.nodes[host].lives) < lives:
            await trio.sleep(0.1)

    async def after_round(self) -> None:
        """Wait until the next round of averages is over."""
        now = trio.current_time()
        await trio.sleep_until((now // PERIOD_S + 1) * PERIOD_S + 9.0)


@asynccontextmanager
async def scene(*hosts: str, trainers: int = 3, **options: Any) -> AsyncIterator[Scene]:
    """The nodes start at once; the block begins when all serve."""
    async with (
        simulate(latency=Constant(0.02)) as network,
        open_swarm(network=network, host="root", seed=0) as root,
    ):
        nodes = {host: Node(host, network, root.contact, **options) for host in hosts}
        for host, node in nodes.items():
            network.start(host, node.main)
        loads = []
        async with trio.open_nursery() as nursery:
            clients = [
                open_swarm(root.contact, listen=None, network=network, host=f"trainer{number}", seed=number)
                for number in range(trainers)
            ]
            async with AsyncExitStack() as stack:
                for number, client in enumerate(clients):
                    loads.append(Load(await stack.enter_async_context(client), number))
                built = Scene(network, nodes, loads)
                for host in hosts:
                    await built.until_served(host)
                yield built
            nursery.cancel_scope.cancel()


def check_agree(one: Node, other: Node) -> None:
    for mine, theirs in zip(one.numbers(), other.numbers(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6, rtol=0)


def rows_of(node: Node) -> int:
    return int(node.served.node.status()["rows"])


def test_two_nodes_share_the_load_average_and_one_dies_unnoticed() -> None:
    """The whole life of a replica: claimed, averaged, killed under load without a word, and back with what was learnt."""

    async def main() -> None:
        async with scene("a", "b") as it:
            a, b = it.nodes["a"], it.nodes["b"]
            slots = [node.replica_status["slots"] for node in (a, b)]
            print("SLOTS", trio.current_time(), slots)
            assert all({first, second} == {0, 1} for first, second in zip(slots[0].values(), slots[1].values(), strict=True))
            await it.train(30.0)
            share = rows_of(a) / (rows_of(a) + rows_of(b))
            print("SHARE", share, rows_of(a), rows_of(b), [load.lost for load in it.loads])
            assert 0.35 <= share <= 0.65
            await it.after_round()
            print(a.replica_status, b.replica_status)
            check_agree(a, b)

            before = [(load.lost, load.steps) for load in it.loads]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(it.train, 30.0)
                await trio.sleep(5.0)
                it.network.apply(HostDown("a", silent=True))
                for _ in range(5):
                    await trio.sleep(5.0)
                    print(trio.current_time(), [(load.lost, load.steps, load.swarm.statistics.failures, load.swarm.statistics.moved) for load in it.loads], b.updates())
            print([load.dead for load in it.loads])
    run(main)
