"""Replicas of experts on a simulated network: they share the load, average, and one of them may die unnoticed."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.experts import expert_from_functions
from dmoe_jax.machine.device import CostModel, InlineDevice
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.replicas import ReplicaConfig, Replicas
from dmoe_jax.routing.base import Scores
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.swarm.serving import Served
from dmoe_jax.swarm.swarm import Swarm
from dmoe_net.transport.sim import Constant, HostDown, HostUp, SimNetwork, run, simulate

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
SERVING = NodeConfig()


@dataclass
class Node:
    """A node of the simulated network that serves all experts, and does so again whenever its host comes up."""

    host: str
    network: SimNetwork
    entrance: str
    replicas: ReplicaConfig | None = REPLICAS
    optimizer: Any = ADAM
    lives: list[Served] = field(default_factory=list)
    serves: trio.Event = field(default_factory=trio.Event)
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
            self.serves.set()
            self.serves = trio.Event()
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

    async def start(self, node: Node) -> None:
        """Start a node, and wait until it serves."""
        self.network.start(node.host, node.main)
        await node.serves.wait()

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
        built = Scene(network, nodes, [])
        async with trio.open_nursery() as nursery:
            for node in nodes.values():
                nursery.start_soon(built.start, node)
        async with AsyncExitStack() as stack:
            for number in range(trainers):
                client = open_swarm(root.contact, listen=None, network=network, host=f"trainer{number}", seed=number)
                built.loads.append(Load(await stack.enter_async_context(client), number))
                await built.loads[-1].mixture.check()
            yield built


def check_agree(one: Node, other: Node) -> None:
    for mine, theirs in zip(one.numbers(), other.numbers(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6, rtol=0)


def replicas_of(node: Node) -> Replicas:
    replicas = node.served.node._listing
    assert isinstance(replicas, Replicas)
    return replicas


@pytest.mark.slow
def test_two_nodes_share_the_load_average_and_one_dies_unnoticed() -> None:
    """A replica's life: it has its slots, averages, is killed under load without a word, and returns with what was
    learnt meanwhile. Trainers notice no more than the calls that were under way.

    An average of float32 that is added as a difference is exact to a rounding or two of numbers of order 1: 1e-6."""

    async def main() -> None:
        async with scene("a", "b") as it:
            a, b = it.nodes["a"], it.nodes["b"]
            slots = [node.replica_status["slots"].values() for node in (a, b)]
            assert all({one, other} == {0, 1} for one, other in zip(*slots, strict=True)), "none shares a slot"
            await it.train(30.0)
            rows = [node.served.node.status()["rows"] for node in (a, b)]
            assert 0.35 <= rows[0] / sum(rows) <= 0.65
            assert [load.lost for load in it.loads] == [0, 0, 0]
            await it.after_round()
            check_agree(a, b)
            assert b.replica_status["averages"] >= 4 * NUM_EXPERTS, "one in each of the four rounds"

            async with trio.open_nursery() as nursery:
                nursery.start_soon(it.train, 60.0)
                await trio.sleep(5.0)
                it.network.apply(HostDown("a", silent=True))
                await trio.sleep(15.0)  # the time-out of a call, and some
                lost, steps, updates = [load.lost for load in it.loads], [load.steps for load in it.loads], b.updates()
                assert all(1 <= each <= 4 for each in lost), "what a step asks of it at most, once"
                await trio.sleep(40.0)  # until after the announcements of the dead one have ended
                assert [load.lost for load in it.loads] == lost
                assert all(load.steps > before + 20 for load, before in zip(it.loads, steps, strict=True))
                assert b.updates() > updates + 100
            assert [load.dead for load in it.loads] == [[], [], []], "every expert was alive all the time"

            averages, updates = b.replica_status["averages"], b.updates()
            it.network.apply(HostUp("a"))
            await a.serves.wait()
            assert a.said == [f"{NUM_EXPERTS} of {NUM_EXPERTS} experts begin as copies of those that others serve"]
            assert a.updates() == updates, "nobody has sent a gradient meanwhile"
            check_agree(a, b)
            assert b.replica_status["given"] == NUM_EXPERTS
            async with trio.open_nursery() as nursery:
                nursery.start_soon(it.train, 30.0)
                await trio.sleep(30.0)
            assert a.served.node.status()["rows"] > 0, "it has its share again"
            await it.after_round()
            check_agree(a, b)
            assert b.replica_status["averages"] >= averages + 3 * NUM_EXPERTS

    run(main)


def test_an_average_in_which_one_dies_leaves_the_other_as_it_was() -> None:
    """The one that is left counts it with its reason, and averages no more until there is somebody again."""

    async def main() -> None:
        async with scene("a", "b") as it:
            b = it.nodes["b"]
            await it.train(3.0)
            before, averager = b.numbers(), replicas_of(b).averager
            while not averager._all_reduce.groups.at_work:  # noqa: ASYNC110 (nothing tells of it)
                await trio.sleep(0.001)
            it.network.apply(HostDown("a", silent=True))
            await it.after_round()
            for now, then in zip(b.numbers(), before, strict=True):
                np.testing.assert_array_equal(now, then)
            assert b.replica_status["averages"] == 0
            assert b.replica_status["failed"]["another copy was lost"] == NUM_EXPERTS
            assert b.served.node._listing.facts()["averages_failed"] >= NUM_EXPERTS

    run(main)


def test_a_backward_goes_where_its_forward_went_and_elsewhere_when_that_node_is_gone() -> None:
    """The other copy learns in its place, from the same inputs, and takes the gradient for one that is not stale,
    though it has taken more updates than the forward has seen."""

    async def main() -> None:
        async with scene("a", "b", trainers=1, replicas=ReplicaConfig(average_period_s=600.0)) as it:
            load, (a, b) = it.loads[0], (it.nodes["a"], it.nodes["b"])
            mixture, batch = load.mixture, np.ones((1, 4), np.float32)
            await it.train(20.0)
            host = {uid: contact for (uid,), contact in (await mixture.living()).items()}
            theirs = next(index for index, contact in host.items() if contact.address.host == "a")
            uid, logits = f"ffn.{theirs}", np.full((1, NUM_EXPERTS), -9.0, np.float32)
            logits[0, theirs] = 9.0
            alone = load.swarm.mixture("ffn", EXPERT, product_key((NUM_EXPERTS,)), k_best=1)

            async def forward() -> Any:
                outputs, _, residual = await alone.forward(await alone.choose(Scores((logits,))), [batch])
                return outputs, residual

            outputs, residual = await forward()
            counts = [node.served.backends[uid].update_count for node in (a, b)]
            await alone.backward(residual, np.ones_like(outputs))
            assert [node.served.backends[uid].update_count for node in (a, b)] == [counts[0] + 1, counts[1]]

            backend = b.served.backends[uid]
            for _ in range(3):  # b is three updates further than what a's forward will say
                backend.backward([batch], np.zeros((1, 4), np.float32))
            outputs, residual = await forward()
            weights, staleness, updates = np.array(backend.params), backend.staleness_total, backend.update_count
            it.network.apply(HostDown("a"))
            await trio.sleep(1.0)
            (gradient,) = await alone.backward(residual, np.ones_like(outputs))
            # d(x + x W)/dx applied to ones: 1 + the sums of the rows of W, at b's copy.
            np.testing.assert_allclose(gradient, (1 + weights.sum(axis=1))[None], atol=1e-5)
            assert backend.update_count == updates + 1
            assert backend.staleness_total == staleness
            assert load.swarm.statistics.moved == 1
            assert load.lost == 0

    run(main)


def test_one_that_serves_without_replicating_is_named_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A replica beside it finds no state, does not average, and says why; the one that does not replicate and comes
    later says whom it disturbs."""

    async def main() -> None:
        async with scene("a", "b", trainers=0) as it:
            lost = sum(node.replica_status["slots_lost"] for node in it.nodes.values())
            plain = Node("plain", it.network, it.nodes["a"].entrance, replicas=None)
            await it.start(plain)
            assert "replicas" not in plain.served.node.status()
            said = [each.getMessage() for each in caplog.records]
            (warning,) = [each for each in said if "by other nodes as well" in each]
            assert "8 experts" in warning
            assert "ffn.0 (" in warning
            assert "--replicate" in warning
            await trio.sleep(25.0)  # past their next announcements
            slots = [node.replica_status["slots"] for node in it.nodes.values()]
            assert all({one, other} == {1, 2} for one, other in zip(*(each.values() for each in slots), strict=True))
            assert sum(node.replica_status["slots_lost"] for node in it.nodes.values()) == lost + NUM_EXPERTS
            it.network.apply(HostDown("a"))
            it.network.apply(HostDown("b"))
            await trio.sleep(35.0)  # their announcements end
            late = Node("late", it.network, plain.entrance)
            await it.start(late)
            assert late.said == [f"0 of {NUM_EXPERTS} experts begin as copies of those that others serve"]
            assert late.replica_status["not_taken"] == {"it gives none": NUM_EXPERTS}
            await it.after_round()
            assert set(late.replica_status["failed"]) == {"no other copy takes part"}
            assert late.replica_status["averages"] == 0

    run(main)
