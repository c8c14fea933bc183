"""Copies of experts on a simulated network: they share the load, average, and one of them may die unnoticed."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import jax
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.experts import expert_from_functions
from dmoe_jax.machine.device import CostModel, InlineDevice
from dmoe_jax.routing.base import Scores
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.swarm.swarm import Swarm
from dmoe_net.transport.sim import HostDown, HostUp
from tests.dmoe_jax.placement_swarm import ENTRANCE, World, in_world

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
TIMEOUT_S = 6.0


def device() -> InlineDevice:
    """A device that takes a hundredth of a second for each batch."""
    return InlineDevice(CostModel(call_s=0.01))


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


class Scene:
    """Nodes that serve the same experts, and some trainers."""

    def __init__(self, world: World, options: dict[str, Any]) -> None:
        self.world, self.options = world, options
        self.loads: list[Load] = []

    async def start(self, *hosts: str, **options: Any) -> None:
        """Start nodes, and wait until they serve."""
        experts = {f"ffn.[0:{NUM_EXPERTS}]": EXPERT}
        for host in hosts:
            self.world.start(host, experts, device=device, **self.options | options)
        await self.world.until(lambda: set(hosts) <= self.world.served.keys(), within_s=60)

    async def train(self, seconds: float) -> None:
        until = trio.current_time() + seconds
        async with trio.open_nursery() as nursery:
            for load in self.loads:
                nursery.start_soon(load.run, until)

    async def after_round(self) -> None:
        """Wait until the next round of averages is over."""
        now = trio.current_time()
        await trio.sleep_until((now // PERIOD_S + 1) * PERIOD_S + 9.0)

    def updates(self, host: str) -> int:
        return sum(backend.update_count for backend in self.world.served[host].backends.values())

    def rows(self, host: str) -> int:
        rows: int = self.world.served[host].node.status()["rows"]
        return rows


@asynccontextmanager
async def scene(world: World, *hosts: str, trainers: int = 3, **options: Any) -> AsyncIterator[Scene]:
    """The nodes start at once; the block begins when all serve. Options are those of `World.start`."""
    period = {"replicas": 2, "average_period_s": PERIOD_S, "average_timeout_s": TIMEOUT_S}
    it = Scene(world, {"optimizer": ADAM, **period, **options})
    await it.start(*hosts)
    async with AsyncExitStack() as stack:
        for number in range(trainers):
            client = open_swarm(ENTRANCE, listen=None, network=world.network, host=f"trainer{number}", seed=number)
            it.loads.append(Load(await stack.enter_async_context(client), number))
            await it.loads[-1].mixture.check()
        yield it


def on_stage(body: Callable[[Scene], Awaitable[None]], *hosts: str, **options: Any) -> None:
    """Run a test in virtual time, with these nodes; options as of `scene`."""

    async def main(world: World) -> None:
        async with scene(world, *hosts, **options) as it:
            await body(it)

    in_world(main, latency_s=0.02)


@pytest.mark.slow
def test_two_nodes_share_the_load_average_and_one_dies_unnoticed() -> None:
    """A copy's life: it averages, is killed under load without a word, and returns with what was learnt meanwhile.
    Trainers notice no more than the calls that were under way.

    An average of float32 that is added as a difference is exact to a rounding or two of numbers of order 1: 1e-6."""

    async def body(it: Scene) -> None:
        world = it.world
        await it.train(30.0)
        # Three trainers prefer one of two nodes for each of eight experts: a share of 0.5, with a deviation of 0.1.
        assert 0.2 <= it.rows("a") / (it.rows("a") + it.rows("b")) <= 0.8
        assert [load.lost for load in it.loads] == [0, 0, 0]
        await it.after_round()
        world.check_agree("a", "b")
        assert world.copies("b")["averages"] >= 4 * NUM_EXPERTS, "one in each of the four rounds"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(it.train, 60.0)
            await trio.sleep(5.0)
            world.network.apply(HostDown("a", silent=True))
            await trio.sleep(15.0)  # the time-out of a call, and some
            lost, steps, updates = [load.lost for load in it.loads], [load.steps for load in it.loads], it.updates("b")
            assert all(1 <= each <= 4 for each in lost), "what a step asks of it at most, once"
            await trio.sleep(40.0)  # until after the announcements of the dead one have ended
            assert [load.lost for load in it.loads] == lost
            assert all(load.steps > before + 20 for load, before in zip(it.loads, steps, strict=True))
            assert it.updates("b") > updates + 100
        assert [load.dead for load in it.loads] == [[], [], []], "every expert was alive all the time"

        averages, updates = world.copies("b")["averages"], it.updates("b")
        world.network.apply(HostUp("a"))
        await world.until(lambda: "a" in world.served, within_s=30)
        assert world.said["a"] == [f"{NUM_EXPERTS} of {NUM_EXPERTS} experts begin as copies of those that others serve"]
        assert it.updates("a") == updates, "nobody has sent a gradient meanwhile"
        world.check_agree("a", "b")
        assert world.copies("b")["given"] == NUM_EXPERTS
        await it.train(30.0)
        assert it.rows("a") > 0, "it has its share again"
        await it.after_round()
        world.check_agree("a", "b")
        assert world.copies("b")["averages"] >= averages + 3 * NUM_EXPERTS

    on_stage(body, "a", "b")


def test_an_average_in_which_one_dies_leaves_the_other_as_it_was() -> None:
    """The one that is left counts it with its reason, and averages no more until there is somebody again."""

    async def body(it: Scene) -> None:
        await it.train(3.0)
        before, averager = it.world.numbers("b"), it.world.replicas("b").averager
        while not averager._all_reduce.groups.at_work:  # noqa: ASYNC110 (nothing tells of it)
            await trio.sleep(0.001)
        it.world.network.apply(HostDown("a", silent=True))
        await it.after_round()
        jax.tree.map(np.testing.assert_array_equal, it.world.numbers("b"), before)
        copies = it.world.copies("b")
        assert copies["averages"] == 0
        assert copies["failed"]["another copy was lost"] == NUM_EXPERTS
        assert it.world.replicas("b").facts()["averages_failed"] >= NUM_EXPERTS

    on_stage(body, "a", "b")


def test_a_backward_goes_where_its_forward_went_and_elsewhere_when_that_node_is_gone() -> None:
    """The other copy learns in its place, from the same inputs, and takes the gradient for one that is not stale,
    though it has taken more updates than the forward has seen."""

    async def body(it: Scene) -> None:
        load, served = it.loads[0], it.world.served
        await it.train(20.0)
        host = {uid: contact for (uid,), contact in (await load.mixture.living()).items()}
        theirs = next(index for index, contact in host.items() if contact.address.host == "a")
        uid, logits = f"ffn.{theirs}", np.full((1, NUM_EXPERTS), -9.0, np.float32)
        logits[0, theirs] = 9.0
        batch = np.ones((1, 4), np.float32)
        alone = load.swarm.mixture("ffn", EXPERT, product_key((NUM_EXPERTS,)), k_best=1)

        async def forward() -> Any:
            outputs, _, residual = await alone.forward(await alone.choose(Scores((logits,))), [batch])
            return outputs, residual

        outputs, residual = await forward()
        counts = [served[name].backends[uid].update_count for name in ("a", "b")]
        await alone.backward(residual, np.ones_like(outputs))
        assert [served[name].backends[uid].update_count for name in ("a", "b")] == [counts[0] + 1, counts[1]]

        backend = served["b"].backends[uid]
        for _ in range(3):  # b is three updates further than what a's forward will say
            backend.backward([batch], np.zeros((1, 4), np.float32))
        outputs, residual = await forward()
        weights, staleness, updates = np.array(backend.params), backend.staleness_total, backend.update_count
        it.world.network.apply(HostDown("a"))
        await trio.sleep(1.0)
        (gradient,) = await alone.backward(residual, np.ones_like(outputs))
        # d(x + x W)/dx applied to ones: 1 + the sums of the rows of W, at b's copy.
        np.testing.assert_allclose(gradient, (1 + weights.sum(axis=1))[None], atol=1e-5)
        assert backend.update_count == updates + 1
        assert backend.staleness_total == staleness
        assert load.swarm.statistics.moved == 1
        assert load.lost == 0

    on_stage(body, "a", "b", trainers=1, average_period_s=600.0)


def test_one_that_serves_without_replicating_is_named_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A copy beside it finds no state, does not average with it, and says why; the one that does not replicate and
    comes later says whom it disturbs."""

    async def body(it: Scene) -> None:
        world = it.world
        await it.start("plain", replicas=1)
        assert "replicas" not in world.served["plain"].node.status()
        said = [each.getMessage() for each in caplog.records]
        (warning,) = [each for each in said if "by other nodes as well" in each]
        assert "8 experts" in warning
        assert "ffn.0 (" in warning
        assert "--replicas 2" in warning
        await it.after_round()
        assert world.copies("a")["averages"] >= NUM_EXPERTS, "those that replicate average without it"
        world.network.apply(HostDown("a"))
        world.network.apply(HostDown("b"))
        await trio.sleep(35.0)  # their announcements end
        await it.start("late")
        assert world.said["late"] == [f"0 of {NUM_EXPERTS} experts begin as copies of those that others serve"]
        assert world.copies("late")["not_taken"] == {"it gives none": NUM_EXPERTS}
        await it.after_round()
        assert set(world.copies("late")["failed"]) == {"no other copy takes part"}
        assert world.copies("late")["averages"] == 0

    on_stage(body, "a", "b", trainers=0)
