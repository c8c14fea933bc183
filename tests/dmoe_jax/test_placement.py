"""Nodes that claim experts, in a simulated swarm: who serves what, who takes over from whom, and who gives way."""

import itertools
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.checkpoints import Checkpoints
from dmoe_jax.directory.grid import expand_grid_pattern
from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.machine.device import CostModel, InlineDevice
from dmoe_jax.models import mlp
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.placement.claimer import KEEP
from dmoe_jax.placement.config import PlacementConfig
from dmoe_jax.routing import product_key
from dmoe_jax.swarm.opening import open_swarm
from dmoe_net.errors import CallRefused
from dmoe_net.transport.sim import Heal, HostDown, HostOptions, HostUp, Partition, simulate
from dmoe_net.transport.sim.events import SetHost
from tests.dmoe_jax.placement_swarm import ENTRANCE, EXPERT, PATTERN, SGD, UIDS, World, X, in_world

HOURS = float(os.environ.get("DMOE_PLACEMENT_HOURS", "0.5"))
"""Hours of virtual time in which hosts die and return; half an hour takes two minutes."""

AVERAGING = {"replicas": 2, "average_period_s": 10.0, "average_timeout_s": 6.0}


@pytest.mark.parametrize(("count", "most"), [(2, 12), (5, 5)])
def test_claimers_that_start_together_share_the_experts(count: int, most: int) -> None:
    """Each expert is served exactly once, all have equal shares, and the DHT says who serves it."""

    async def body(world: World) -> None:
        names = [f"node{index}" for index in range(count)]
        for name in names:
            world.start(name, max_experts=most)
        await world.settled(count)
        counts = Counter(names[0] for names in world.holders().values())
        # 20 experts in rounds of at most ceil(20 / count) each: as nobody took a claim of another's, equal shares.
        assert set(counts.values()) == {20 // count}
        for name in names:
            claims = world.claims(name)
            assert claims["room"] == most - counts[name]
            assert claims["adopted"] == {"seed": counts[name]}
            assert (claims["won"], claims["held"]) == (counts[name], 0)
        listed = await world.entrance.directory.living("ffn", (4, 5))
        assert len(listed) == 20
        for coordinates, contact in listed.items():
            assert world.holders()[".".join(("ffn", *map(str, coordinates)))] == [contact.address.host]
        (member, *_) = [each for each in await world.entrance.members() if each.contact.address.host == "node0"]
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

    async def body(world: World) -> None:
        experts = {"ffn.[0:2].[0:3]": MODEL.expert()}
        for index in range(3):
            saving = {"checkpoint_dir": tmp_path, "checkpoint_period_s": SAVE_PERIOD_S}
            world.start(f"node{index}", experts, max_experts=3, **saving)
        await world.until(lambda: len(world.served) == 3 and world.all_served(uids=SMALL), within_s=60)
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
            within_s = 30 - (trio.current_time() - killed_at)
            await world.until(lambda: world.all_served(uids=SMALL), within_s=within_s)
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


def test_a_dead_nodes_experts_are_served_again_within_30_s() -> None:
    """Nobody is told of its death, and its announcements would live 30 s."""

    async def body(world: World) -> None:
        for index in range(3):
            world.start(f"node{index}", max_experts=10)
        await world.settled(3)
        world.network.apply(HostDown("node2", silent=True))
        await world.settled(2, within_s=30)
        assert set(world.served) == {"node0", "node1"}
        assert max(Counter(names[0] for names in world.holders().values()).values()) <= 10
        # Nor do callers find the dead node any more, once its announcements have ended.
        await trio.sleep(35.0)
        listed = await world.entrance.directory.living("ffn", (4, 5))
        assert len(listed) == 20
        assert {contact.address.host for contact in listed.values()} == {"node0", "node1"}

    in_world(body)


def test_an_expert_that_lost_one_of_two_holders_gets_another() -> None:
    """Three nodes see to it that each expert has two holders. One of them is killed, and within half a minute each has
    two again: the new one begins with the state of the other, not with its seed, and they are averaged as before."""

    async def body(world: World) -> None:
        for index in range(3):
            world.start(f"node{index}", max_experts=20, **AVERAGING)
        await world.settled(3, times=2)
        adopted = Counter[str]()
        for name in world.served:
            adopted.update(world.claims(name)["adopted"])
        assert adopted == {"seed": 20, "replica": 20}, "the second holder begins with the state of the first"
        shares = [len(served.uids) for served in world.served.values()]
        assert max(shares) < 20, "they share the load"
        seeds = world.numbers("node0") | world.numbers("node1")
        for served in world.served.values():
            for backend in served.backends.values():
                backend.backward([X], X)
        lost = set(world.served["node2"].uids)
        taken = {name: world.claims(name)["adopted"].get("replica", 0) for name in ("node0", "node1")}
        world.network.apply(HostDown("node2", silent=True))
        await world.settled(2, times=2, within_s=30)
        world.check_agree("node0", "node1")
        for uid, numbers in world.numbers("node0").items():
            assert any((now != then).any() for now, then in zip(numbers, seeds[uid], strict=True)), uid
            assert [served.backends[uid].update_count for served in world.served.values()] == [1, 1]
        now = {name: world.claims(name)["adopted"].get("replica", 0) for name in taken}
        assert sum(now.values()) - sum(taken.values()) == len(lost)

        world.served["node0"].backends["ffn.0.0"].backward([X], X)
        averages = {name: world.copies(name)["averages"] for name in taken}
        await trio.sleep(25.0)
        world.check_agree("node0", "node1")
        assert all(world.copies(name)["averages"] >= averages[name] + 20 for name in taken)
        assert len(await world.entrance.directory.living("ffn", (4, 5))) == 20

    in_world(body)


def test_experts_of_which_no_holder_is_left_go_on_from_their_checkpoints(tmp_path: Path) -> None:
    """Both holders of all are killed, and a third node takes all up within half a minute: that the dead do not answer
    it finds out once, not for each expert anew."""

    async def body(world: World) -> None:
        saving = {"checkpoint_dir": tmp_path, "checkpoint_period_s": SAVE_PERIOD_S}
        for name in ("node0", "node1"):
            world.start(name, max_experts=20, **AVERAGING, **saving)
        await world.settled(2, times=2)
        world.start("node2", max_experts=20, **AVERAGING, **saving)
        await world.settled(3, times=2)
        for name in ("node0", "node1"):
            for backend in world.served[name].backends.values():
                backend.backward([X], X)
        await trio.sleep(2 * SAVE_PERIOD_S)
        assert world.served["node2"].uids == (), "there were enough"
        for name in ("node0", "node1"):
            world.network.apply(HostDown(name, silent=True))
        await world.settled(1, within_s=30)
        assert world.claims("node2")["adopted"] == {"checkpoint": 20}
        assert world.copies("node2")["not_taken"] == {"no answer": 20}

    in_world(body)


def test_a_node_that_leaves_makes_its_experts_vacant_at_once(compilations: Any) -> None:
    """Long before a probe would tell. Of a kind that is warm nothing is compiled for them."""

    async def body(world: World) -> None:
        for name in ("node0", "node1"):
            world.start(name, max_experts=20)
        await world.settled(2)
        for served in world.served.values():
            backend = next(iter(served.backends.values()))
            backend.forward([X])
            backend.backward([X], X)
        compiled = compilations.count
        leaves, stays = world.served["node0"], world.served["node1"]
        await leaves.close()
        del world.served["node0"]
        # A scan within 5 s, a claim that settles for 2 s, and the DHT's round trips.
        await world.settled(1, within_s=10)
        for backend in stays.backends.values():
            backend.forward([X])
            backend.backward([X], X)
        assert (compilations.count, len(stays.backends)) == (compiled, 20)

    in_world(body)


def test_claimers_of_other_experts_are_not_counted() -> None:
    """Each takes all of its own at once. A half in the first round, and half of the rest in each further one, would
    take three seconds a round."""

    async def body(world: World) -> None:
        world.start("node0", max_experts=20)
        world.start("node1", {"other.[0:4]": EXPERT}, max_experts=20)
        # Listed for 3 s, settled for 2 s, and some ten round trips of 0.1 s each.
        await world.until(lambda: len(world.holders()) == 24, within_s=8)
        assert [len(world.served[name].uids) for name in ("node0", "node1")] == [20, 4]

    in_world(body)


def test_a_node_promises_to_keep_what_it_serves_and_no_more() -> None:
    """Another node gives an expert up on the strength of it. What is no list of uids is refused with a word."""

    async def body(world: World) -> None:
        world.start("node0", max_experts=3)
        await world.until(lambda: "node0" in world.served, within_s=30)
        node = next(each.contact for each in await world.entrance.members() if each.role == "node")
        assert node is not None
        own = list(world.served["node0"].uids)
        assert len(own) == 3
        other = next(uid for uid in sorted(UIDS) if uid not in own)
        reply = await world.entrance.rpc.call(node, KEEP, {"uids": [*own, other, "what"]}, timeout_s=5)
        assert reply.body == {"kept": own}
        for garbage in ({}, {"uids": "ffn.0.0"}, {"uids": [1]}, {"uids": ["ffn.0.0"] * 65}):
            with pytest.raises(CallRefused, match="uids must be a list of at most 64"):
                await world.entrance.rpc.call(node, KEEP, garbage, timeout_s=5)

    in_world(body)


class SlowToTakeUp(InlineDevice):
    """Takes a minute to make an expert."""

    async def aside(self, function: Callable[..., Any], *args: Any) -> Any:
        await trio.sleep(60.0)
        return await super().aside(function, *args)


def test_a_claimer_that_dies_before_it_serves_is_followed_by_another() -> None:
    """While it lives its claims stand, renewed; when it is dead they do not keep the experts from being served."""

    async def body(world: World) -> None:
        world.start("slow", device=SlowToTakeUp, max_experts=20)
        await trio.sleep(10.0)  # it has claimed all: it is alone
        world.start("node0", max_experts=20)
        await trio.sleep(25.0)
        # Twice the life of a claim has passed, and still the other takes nothing.
        assert world.holders() == {}
        world.network.apply(HostDown("slow", silent=True))
        await world.settled(1, within_s=30)
        assert set(world.served) == {"node0"}

    in_world(body)


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_after_a_partition_the_weakest_give_up(replicas: int) -> None:
    """Each half serves everything as often as is wanted; when they meet, each expert stays where it has learnt more,
    and is listed there alone."""

    async def body(world: World) -> None:
        ends = [[f"node{2 * index + end}" for index in range(replicas)] for end in range(2)]
        both = [*ends[0], *ends[1]]
        for name in both:
            world.start(name, max_experts=20, **AVERAGING | {"replicas": replicas})
        await world.settled(len(both), times=replicas)
        world.network.apply(Partition((frozenset(ends[0]), frozenset({*ends[1], "entrance"}))))
        await world.until(lambda: all(len(served.uids) == 20 for served in world.served.values()), within_s=90)
        await world.settled(len(both), times=2 * replicas)
        learnt = {name: [uid for uid in sorted(UIDS) if (uid < "ffn.2") == (name in ends[0])] for name in both}
        for name, uids in learnt.items():
            for uid in uids:
                world.served[name].backends[uid].backward([X], X)
        given_up = {name: world.claims(name)["given_up"] for name in both}
        world.network.apply(Heal())
        # Two halves may ignore each other for two minutes (DhtConfig.pause).
        await world.settled(len(both), times=replicas, within_s=180)
        kept = lambda: {name: sorted(world.served[name].backends) for name in both}  # noqa: E731
        await world.until(lambda: kept() == learnt, within_s=10)
        for name in both:
            assert world.claims(name)["given_up"] == given_up[name] + 10
            assert sum("gives up expert" in text for text in world.said[name]) == given_up[name] + 10
        await trio.sleep(30.0)
        assert world.all_served(replicas)
        listed = await world.entrance.directory.living("ffn", (4, 5))
        assert len(listed) == 20
        for coordinates, contact in listed.items():
            assert ".".join(("ffn", *map(str, coordinates))) in learnt[contact.address.host]

    in_world(body)


@pytest.mark.slow
@pytest.mark.timeout(600 + 2400 * HOURS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_hosts_die_and_return_for_hours(replicas: int) -> None:
    """Up to two of five hosts, of which one is slow, are down at a time, with a word or without. No expert is unserved
    for longer than a takeover takes, and no more nodes than wanted serve one for longer than they need to find out."""
    draws, names = random.Random(1), [f"node{number}" for number in range(5)]
    unserved, crowded = list[float](), list[float]()

    async def die_and_return(world: World) -> None:
        down: dict[str, float] = {}
        while True:
            await trio.sleep(draws.expovariate(1 / 60))
            for name in [name for name, until in down.items() if until <= trio.current_time()]:
                world.network.apply(HostUp(name))
                del down[name]
            if len(down) < 2:
                name = draws.choice([name for name in names if name not in down])
                world.network.apply(HostDown(name, silent=draws.random() < 0.5))
                down[name] = trio.current_time() + draws.uniform(20, 120)

    async def body(world: World) -> None:
        world.network.apply(SetHost("node4", HostOptions(extra_latency_s=0.3)))
        for name in names:
            world.start(name, max_experts=20, replicas=replicas)
        await world.settled(5, times=replicas, within_s=120)
        ends_at, since = trio.current_time() + 3600.0 * HOURS, dict[tuple[str, bool], float]()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(die_and_return, world)
            while (now := trio.current_time()) < ends_at:
                holders = world.holders()
                for uid in UIDS:
                    count = len(holders.get(uid, ()))
                    for is_wrong, key, found in (
                        (count == 0, (uid, False), unserved),
                        (count > replicas, (uid, True), crowded),
                    ):
                        if is_wrong:
                            since.setdefault(key, now)
                        elif key in since:
                            found.append(now - since.pop(key))
                await trio.sleep(1.0)
            nursery.cancel_scope.cancel()

    in_world(body)
    assert max(unserved, default=0.0) <= 30.0
    assert max(crowded, default=0.0) <= 30.0


def test_some_are_served_by_name_and_others_are_claimed() -> None:
    """A node that was told to serve an expert keeps it, whatever a claimer of the same expert has learnt."""

    async def body(world: World) -> None:
        world.start("node0", max_experts=20)
        await world.settled(1)
        world.served["node0"].backends["ffn.0.0"].backward([X], X)
        row, rest = "ffn.0.[0:5]", "ffn.[1:4].[0:5]"
        world.start("node1", {row: EXPERT, rest: EXPERT}, max_experts=20, of=(rest,))
        await world.settled(2)
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

    async def body(world: World) -> None:
        world.start("node0", max_experts=20, checkpoint_dir=tmp_path)
        await world.until(lambda: "node0" in world.served, within_s=60)
        assert sorted(world.served["node0"].uids) == sorted(UIDS - {"ffn.1.1"})
        assert world.claims("node0")["failed"] == 1
        (said,) = [text for text in world.said["node0"] if "cannot take up" in text]
        assert "ffn.1.1" in said
        assert "another model" in said
        world.start("node1", {"ffn.1.[0:5]": wide}, max_experts=1, checkpoint_dir=tmp_path)
        await world.settled(2)
        assert world.served["node1"].uids == ("ffn.1.1",)
        assert world.claims("node1")["adopted"] == {"checkpoint": 1}

    in_world(body)


async def test_what_cannot_be_claimed_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    """With the name of what is wrong."""
    async with simulate() as network, open_swarm(network=network, host="node", seed=0) as swarm:
        for experts, of, message in [
            ({PATTERN: EXPERT}, "a.0", "placement.of names 'a.0', which is not among"),
            ({PATTERN: EXPERT, "ffn.0.0": EXPERT}, PATTERN, "ffn.0.0 is named twice"),
        ]:
            with pytest.raises(ValueError, match=message):
                await swarm.serve(experts, optimizer=SGD, placement=PlacementConfig(max_experts=1, of=(of,)))
