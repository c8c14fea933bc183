"""Nodes that claim experts, in a simulated swarm: who serves what, who takes over from whom, and who gives way."""

import itertools
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.checkpoints import Checkpoints
from dmoe_jax.claims.claimer import KEEP
from dmoe_jax.claims.claiming import ClaimConfig
from dmoe_jax.directory.grid import expand_grid_pattern
from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.machine.device import CostModel, Device, InlineDevice
from dmoe_jax.models import mlp
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.routing import product_key
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.swarm.serving import Served
from dmoe_jax.swarm.swarm import Swarm
from dmoe_net.errors import CallRefused
from dmoe_net.transport.sim import run, simulate
from dmoe_net.transport.sim.events import Heal, HostDown, Partition
from dmoe_net.transport.sim.network import SimNetwork

EXPERT = feedforward(d_model=4)
SGD = optax.sgd(0.01)
PATTERN = "ffn.[0:4].[0:5]"
UIDS = {str(uid) for uid in expand_grid_pattern(PATTERN)}
ENTRANCE = "entrance:1"


class World:
    """A simulated swarm; its nodes are programs that end when their host goes down."""

    def __init__(self, network: SimNetwork) -> None:
        self.network = network
        self.served: dict[str, Served] = {}
        self.said: dict[str, list[str]] = {}

    def start(self, name: str, *, experts: Any = None, device: Device | None = None, **options: Any) -> None:
        """A node; options as of `Swarm.serve`."""
        self.network.start(name, self._live, name, experts or {PATTERN: EXPERT}, device, options)

    async def _live(self, name: str, experts: Any, device: Device | None, options: dict[str, Any]) -> None:
        said = self.said.setdefault(name, [])
        try:
            async with open_swarm(ENTRANCE, network=self.network, host=name, seed=0, device=device) as swarm:
                served = await swarm.serve(experts, optimizer=SGD, on_progress=said.append, **options)
                self.served[name] = served
                await trio.sleep_forever()
        finally:
            self.served.pop(name, None)

    async def until(self, holds: Callable[[], bool], *, within_s: float) -> float:
        """Wait until something is so; returns how long it took, seconds."""
        started = trio.current_time()
        with trio.fail_after(within_s):
            while not holds():  # noqa: ASYNC110 (nobody could set an event)
                await trio.sleep(0.25)
        return trio.current_time() - started

    def holders(self) -> dict[str, list[str]]:
        """The nodes that serve each expert."""
        found: dict[str, list[str]] = {}
        for name, served in self.served.items():
            for uid in served.node.status()["updates"]:
                found.setdefault(uid, []).append(name)
        return found

    def all_served_once(self, uids: set[str] = UIDS) -> bool:
        """Whether each expert is served by one node, and announced: no claim is held any more."""
        holders = self.holders()
        is_once = holders.keys() == uids and all(len(names) == 1 for names in holders.values())
        return is_once and not any(self.claims(name)["held"] for name in self.served)

    def claims(self, name: str) -> dict[str, Any]:
        claims: dict[str, Any] = self.served[name].node.status()["claims"]
        return claims


def in_world(body: Callable[[World, Swarm], Awaitable[None]], seed: int = 0) -> None:
    """Run a test in virtual time: with the entrance, a peer that serves nothing."""

    async def main() -> None:
        async with simulate(seed=seed) as network, open_swarm(network=network, host="entrance", seed=0) as entrance:
            await body(World(network), entrance)

    run(main, seed=seed)


@pytest.mark.parametrize(("count", "most"), [(2, 12), (5, 5)])
def test_claimers_that_start_together_share_the_experts(count: int, most: int) -> None:
    """Each expert is served exactly once, all have equal shares, and the DHT says who serves it."""

    async def body(world: World, entrance: Swarm) -> None:
        names = [f"node{index}" for index in range(count)]
        for name in names:
            world.start(name, claim=ClaimConfig(max_experts=most))
        await world.until(lambda: len(world.served) == count and world.all_served_once(), within_s=60)
        counts = Counter(names[0] for names in world.holders().values())
        # 20 experts in rounds of at most ceil(20 / count) each: as nobody took a claim of another's, equal shares.
        assert set(counts.values()) == {20 // count}
        for name in names:
            claims = world.claims(name)
            assert claims["room"] == most - counts[name]
            assert claims["adopted"] == {"seed": counts[name]}
            assert (claims["won"], claims["held"]) == (counts[name], 0)
        listed = await entrance.directory.living("ffn", (4, 5))
        own = {name: world.served[name].node for name in names}
        assert len(listed) == 20
        for coordinates, contact in listed.items():
            assert ".".join(("ffn", *map(str, coordinates))) in own[contact.address.host].status()["updates"]
        (member, *_) = [member for member in await entrance.members() if member.contact.address.host == "node0"]
        assert member.info["room"] == most - counts["node0"]
        assert member.grids == ("ffn",)

    in_world(body)


MODEL = mlp.MLPConfig(input_dim=6, num_classes=3, d_model=4, num_layers=1, grid_size=(2, 3), k_best=3, expansion=2)
ROUTER = product_key(MODEL.grid_size, init_scale=1.0)
SMALL = {str(uid) for uid in expand_grid_pattern("ffn.[0:2].[0:3]")}
SAVE_PERIOD_S = 5.0


@pytest.mark.slow
def test_experts_outlive_their_node(tmp_path: Path) -> None:
    """A node is killed while trainers train: within 30 s all its experts are served again, none older than the interval
    between checkpoints, and meanwhile steps go on."""

    async def body(world: World, entrance: Swarm) -> None:
        for index in range(3):
            world.start(
                f"node{index}",
                experts={"ffn.[0:2].[0:3]": MODEL.expert()},
                claim=ClaimConfig(max_experts=3),
                checkpoint_dir=tmp_path,
                checkpoint_period_s=SAVE_PERIOD_S,
            )
        await world.until(lambda: len(world.served) == 3 and world.all_served_once(SMALL), within_s=60)
        losses: list[tuple[float, float]] = []
        history: list[tuple[float, dict[str, int]]] = []

        async with trio.open_nursery() as nursery:
            nursery.start_soon(train, world, losses)
            nursery.start_soon(watch, world, "node1", history)
            await trio.sleep(3 * SAVE_PERIOD_S)
            killed = world.served["node1"].node
            updates, saved = killed.status()["updates"], saved_updates(tmp_path)
            killed_at = trio.current_time()
            world.network.apply(HostDown("node1", silent=True))
            await world.until(lambda: "node1" not in world.served, within_s=5)
            await trio.sleep(1.0)
            # The cancelled program has saved once more, as a killed process cannot.
            for uid in updates:
                for late in saved_updates(tmp_path)[uid] - saved[uid]:
                    shutil.rmtree(tmp_path / uid / str(late))
            await world.until(lambda: world.all_served_once(SMALL), within_s=30 - (trio.current_time() - killed_at))
            restored_at = trio.current_time()
            new = {
                uid: updates for each in world.served.values() for uid, updates in each.node.status()["updates"].items()
            }
            # What is lost is what was learnt in the last period at most.
            (*_, before_it) = (counts for when, counts in history if when <= killed_at - SAVE_PERIOD_S)
            assert any(before_it[uid] for uid in updates)
            for uid in updates:
                assert new[uid] >= max(before_it[uid], max(saved[uid], default=0))
            adopted = Counter()
            for name in ("node0", "node2"):
                adopted.update(world.claims(name)["adopted"])
            # Three nodes share six experts. Those that nobody had taught begin with their seeds, as all did at first.
            from_disk = sum(1 for uid in updates if saved[uid])
            assert (len(updates), adopted) == (2, {"seed": 6 - from_disk, "checkpoint": from_disk})
            assert from_disk > 0
            await trio.sleep(15.0)
            nursery.cancel_scope.cancel()
        during = [loss for when, loss in losses if killed_at < when < restored_at]
        after = [loss for when, loss in losses if when > restored_at + 10]
        assert len(during) > 10
        assert np.isfinite([*during, *after]).all()
        # At the end trainers are as quick as they were before.
        before = [when for when, _ in losses if killed_at - SAVE_PERIOD_S < when < killed_at]
        assert len(after) > 0.7 * len(before)

    in_world(body)


async def watch(world: World, name: str, history: list[tuple[float, dict[str, int]]]) -> None:
    """Note every tenth of a second how many updates the experts of a node have taken, as long as it is there."""
    while name in world.served:
        history.append((trio.current_time(), dict(world.served[name].node.status()["updates"])))
        await trio.sleep(0.1)


async def train(world: World, losses: list[tuple[float, float]]) -> None:
    """Two trainers, until they are cancelled; notes when each step ended, and its loss."""
    device = InlineDevice(CostModel(call_s=0.1))
    async with open_swarm(ENTRANCE, network=world.network, host="trainer", listen=None, seed=1, device=device) as swarm:
        mixture = swarm.mixture("ffn", MODEL.expert(), ROUTER, k_best=3, grace_s=0.5, timeout_s=2.0)
        xs = np.random.default_rng(0).normal(size=(16, 32, 6)).astype(np.float32)
        batches = [itertools.cycle(mlp.Batch(x, np.argmax(x[:, :3], axis=1).astype(np.int32)) for x in xs)] * 2
        trainers = swarm.trainer(mlp.MLP(MODEL, ROUTER, [mixture]), optax.sgd(0.05), batches)
        await trainers.run(10**6, lambda step: losses.append((trio.current_time(), step.loss)))


def saved_updates(folder: Path) -> dict[str, set[int]]:
    """The checkpoints of each expert, by their updates."""
    return {uid: {int(path.name) for path in folder.glob(f"{uid}/*") if path.name.isdigit()} for uid in SMALL}


X = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)


def start_all(world: World, count: int, most: int, **options: Any) -> None:
    for index in range(count):
        world.start(f"node{index}", claim=ClaimConfig(max_experts=most), **options)


async def all_settled(world: World, count: int) -> None:
    await world.until(lambda: len(world.served) == count and world.all_served_once(), within_s=60)


def test_a_dead_nodes_experts_are_served_again_within_30_s() -> None:
    """Nobody is told of its death, and its announcements would live 30 s."""

    async def body(world: World, entrance: Swarm) -> None:
        start_all(world, 3, 10)
        await all_settled(world, 3)
        world.network.apply(HostDown("node2", silent=True))
        await world.until(lambda: "node2" not in world.served and world.all_served_once(), within_s=30)
        assert {name for names in world.holders().values() for name in names} == {"node0", "node1"}
        assert max(Counter(names[0] for names in world.holders().values()).values()) <= 10
        # Nor do callers look at the dead node's announcements for long.
        await trio.sleep(10.0)
        listed = await entrance.directory.living("ffn", (4, 5))
        assert len(listed) == 20
        assert {contact.address.host for contact in listed.values()} == {"node0", "node1"}

    in_world(body)


def test_a_node_that_leaves_makes_its_experts_vacant_at_once(compilations: Any) -> None:
    """Long before a probe would tell. Of a kind that is warm nothing is compiled for them."""

    async def body(world: World, entrance: Swarm) -> None:
        del entrance
        start_all(world, 2, 20)
        await all_settled(world, 2)
        for served in world.served.values():
            backend = next(iter(served.backends.values()))
            backend.forward([X])
            backend.backward([X], X)
        compiled = compilations.count
        leaves, stays = world.served["node0"], world.served["node1"]
        await leaves.close()
        del world.served["node0"]
        # A scan within 5 s, a claim that settles for 2 s, and the DHT's round trips.
        await world.until(world.all_served_once, within_s=10)
        for backend in stays.backends.values():
            backend.forward([X])
            backend.backward([X], X)
        assert (compilations.count, len(stays.backends)) == (compiled, 20)

    in_world(body)


def test_claimers_of_other_experts_are_not_counted() -> None:
    """Each takes all of its own at once. A half in the first round, and half of the rest in each further one, would
    take three seconds a round."""

    async def body(world: World, entrance: Swarm) -> None:
        del entrance
        others = {"other.[0:4]": EXPERT}
        world.start("node0", claim=ClaimConfig(max_experts=20))
        world.start("node1", experts=others, claim=ClaimConfig(max_experts=20))
        # Listed for 3 s, settled for 2 s, and some ten round trips of 0.1 s each.
        await world.until(lambda: len(world.holders()) == 24, within_s=8)
        assert [len(world.served[name].uids) for name in ("node0", "node1")] == [20, 4]

    in_world(body)


def test_a_node_promises_to_keep_what_it_serves_and_no_more() -> None:
    """Another node gives an expert up on the strength of it. What is no list of uids is refused with a word."""

    async def body(world: World, entrance: Swarm) -> None:
        world.start("node0", claim=ClaimConfig(max_experts=3))
        await world.until(lambda: "node0" in world.served, within_s=30)
        node = next(each.contact for each in await entrance.members() if each.role == "node")
        assert node is not None
        own = list(world.served["node0"].uids)
        assert len(own) == 3
        other = next(uid for uid in sorted(UIDS) if uid not in own)
        reply = await entrance.rpc.call(node, KEEP, {"uids": [*own, other, "what"]}, timeout_s=5)
        assert reply.body == {"kept": own}
        for garbage in ({}, {"uids": "ffn.0.0"}, {"uids": [1]}, {"uids": ["ffn.0.0"] * 65}):
            with pytest.raises(CallRefused, match="uids must be a list of at most 64"):
                await entrance.rpc.call(node, KEEP, garbage, timeout_s=5)

    in_world(body)


class SlowToTakeUp(InlineDevice):
    """Takes a minute to make an expert."""

    async def aside(self, function: Callable[..., Any], *args: Any) -> Any:
        await trio.sleep(60.0)
        return await super().aside(function, *args)


def test_a_claimer_that_dies_before_it_serves_is_followed_by_another() -> None:
    """While it lives its claims stand, renewed; when it is dead they do not keep the experts from being served."""

    async def body(world: World, entrance: Swarm) -> None:
        del entrance
        world.start("slow", device=SlowToTakeUp(), claim=ClaimConfig(max_experts=20))
        await trio.sleep(10.0)  # it has claimed all: it is alone
        world.start("node0", claim=ClaimConfig(max_experts=20))
        await trio.sleep(25.0)
        # Three times the life of a claim have passed, and still the other takes nothing.
        assert world.holders() == {}
        world.network.apply(HostDown("slow", silent=True))
        await world.until(world.all_served_once, within_s=30)
        assert set(world.served) == {"node0"}

    in_world(body)


def test_after_a_partition_one_of_two_gives_up() -> None:
    """Each half serves everything; when they meet, each expert stays where it has learnt more, and is listed there."""

    async def body(world: World, entrance: Swarm) -> None:
        start_all(world, 2, 20)
        await all_settled(world, 2)
        ends = [frozenset({"node0"}), frozenset({"node1", "entrance"})]
        world.network.apply(Partition(tuple(ends)))
        both = ["node0", "node1"]
        await world.until(lambda: set(map(len, world.holders().values())) == {2}, within_s=30)
        learnt = {name: [uid for uid in sorted(UIDS) if (uid < "ffn.2") == (name == "node0")] for name in both}
        for name, uids in learnt.items():
            for uid in uids:
                world.served[name].backends[uid].backward([X], X)
        world.network.apply(Heal())
        # Two halves may ignore each other for two minutes (DhtConfig.pause).
        await world.until(world.all_served_once, within_s=180)
        assert {name: sorted(world.served[name].backends) for name in both} == learnt
        for name in both:
            assert world.claims(name)["given_up"] == 10
            assert sum("gives up expert" in text for text in world.said[name]) == 10
        await trio.sleep(30.0)
        assert world.all_served_once()
        listed = await entrance.directory.living("ffn", (4, 5))
        assert {contact.address.host: 0 for contact in listed.values()} == {"node0": 0, "node1": 0}
        for coordinates, contact in listed.items():
            assert ".".join(("ffn", *map(str, coordinates))) in learnt[contact.address.host]

    in_world(body)


def test_some_are_served_by_name_and_others_are_claimed() -> None:
    """A node that was told to serve an expert keeps it, whatever a claimer of the same expert has learnt."""

    async def body(world: World, entrance: Swarm) -> None:
        del entrance
        world.start("node0", claim=ClaimConfig(max_experts=20))
        await all_settled(world, 1)
        world.served["node0"].backends["ffn.0.0"].backward([X], X)
        row, rest = "ffn.0.[0:5]", "ffn.[1:4].[0:5]"
        world.start("node1", experts={row: EXPERT, rest: EXPERT}, claim=ClaimConfig(max_experts=20, of=(rest,)))
        await world.until(lambda: len(world.served) == 2 and world.all_served_once(), within_s=60)
        assert sorted(world.served["node1"].uids) == [f"ffn.0.{column}" for column in range(5)]
        assert sorted(world.claims("node1")["fixed"]) == sorted(world.served["node1"].uids)
        assert (world.claims("node0")["given_up"], world.claims("node0")["room"]) == (5, 5)

    in_world(body)


def test_an_expert_that_cannot_be_restored_is_left_to_others(tmp_path: Path) -> None:
    """Not begun again from its seed: what it has learnt would be lost. A node that can serve it does."""
    wide = feedforward(d_model=8)
    wide_one = ExpertBackend(wide, SGD, wide.init(jax.random.key(0)))
    wide_one.backward([np.ones((2, 8), np.float32)], np.ones((2, 8), np.float32))
    Checkpoints(tmp_path / "ffn.1.1").save(1, wide_one.state, {"updates": 1})

    async def body(world: World, entrance: Swarm) -> None:
        del entrance
        start_all(world, 1, 20, checkpoint_dir=tmp_path)
        await world.until(lambda: "node0" in world.served, within_s=60)
        assert sorted(world.served["node0"].uids) == sorted(UIDS - {"ffn.1.1"})
        assert world.claims("node0")["failed"] == 1
        (said,) = [text for text in world.said["node0"] if "cannot take up" in text]
        assert "ffn.1.1" in said
        assert "another model" in said
        experts = {"ffn.1.[0:5]": wide}
        world.start("node1", experts=experts, claim=ClaimConfig(max_experts=1), checkpoint_dir=tmp_path)
        await world.until(lambda: len(world.served) == 2 and world.all_served_once(), within_s=60)
        assert world.served["node1"].uids == ("ffn.1.1",)
        assert world.claims("node1")["adopted"] == {"checkpoint": 1}

    in_world(body)


async def test_what_cannot_be_claimed_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    """With the name of what is wrong."""
    async with simulate() as network, open_swarm(network=network, host="node", seed=0) as swarm:
        for experts, claim, message in [
            ({PATTERN: EXPERT}, ClaimConfig(max_experts=1, of=("a.0",)), "claim.of names 'a.0', which is not among"),
            ({PATTERN: EXPERT, "ffn.0.0": EXPERT}, ClaimConfig(max_experts=1, of=(PATTERN,)), "ffn.0.0 is named twice"),
        ]:
            with pytest.raises(ValueError, match=message):
                await swarm.serve(experts, optimizer=SGD, claim=claim)
