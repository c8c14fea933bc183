"""Nodes that claim experts, in a simulated swarm: who serves what, who takes over, who gives way, and who lies."""

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import trio
import trio.testing

from dmoe_jax.checkpoints import Checkpoints
from dmoe_jax.directory.directory import Announcer, find_replicas
from dmoe_jax.directory.grid import expand_grid_pattern
from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.peers.peer import SIM_PORT
from dmoe_jax.placement.claimer import KEEP
from dmoe_jax.placement.config import PlacementConfig
from dmoe_jax.placement.survey import Claims
from dmoe_jax.placement.watch import Watch
from dmoe_jax.swarm.opening import open_swarm
from dmoe_net.dht.routing_table import node_id
from dmoe_net.errors import CallRefused
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.rpc.base import Reply, Request
from dmoe_net.rpc.service import PING
from dmoe_net.transport.sim import Heal, HostDown, HostOptions, HostUp, Partition
from dmoe_net.transport.sim.events import SetHost
from tests.dmoe_jax.placement_swarm import ENTRANCE, EXPERT, PATTERN, SGD, UIDS, World, X, in_world
from tests.dmoe_jax.test_placement_copies import as_test
from tests.net.direct_network import DirectNetwork

HOURS = float(os.environ.get("DMOE_PLACEMENT_HOURS", "0.5"))
"""Hours of virtual time in which hosts die and return; half an hour takes two minutes."""

world_test = as_test(in_world)
"""Makes a test of an async one whose first argument is a `World`."""
AVERAGING = {"replicas": 2, "average_period_s": 10.0, "average_timeout_s": 6.0}


async def start(world: World, count: int, **options: Any) -> list[str]:
    """Start node0, node1, ..., with room for all experts unless told otherwise; each expert has its holders then."""
    names = [f"node{index}" for index in range(count)]
    for name in names:
        world.start(name, **{"max_experts": 20} | options)
    await world.settled(count, times=options.get("replicas", 1))
    return names


async def listed(world: World) -> dict[str, str]:
    """The host that callers find for each expert."""
    found = await world.entrance.directory.living("ffn", (4, 5))
    return {".".join(("ffn", *map(str, place))): contact.address.host for place, contact in found.items()}


def adopted(world: World) -> Counter[str]:
    """Sources of the experts of all nodes, counted."""
    return sum((Counter(world.claims(name)["adopted"]) for name in world.served), Counter())


@pytest.mark.parametrize(("count", "most"), [(2, 12), (5, 5)])
@world_test
async def test_claimers_that_start_together_share_the_experts(world: World, count: int, most: int) -> None:
    """Each expert is served exactly once, all have equal shares, and the DHT says who serves it."""
    names = await start(world, count, max_experts=most)
    holders = world.holders()
    # 20 experts in rounds of at most ceil(20 / count) each: as nobody took a claim of another's, equal shares.
    share = 20 // count
    assert Counter(name for several in holders.values() for name in several) == dict.fromkeys(names, share)
    for name in names:
        claims = world.claims(name)
        assert (claims["room"], claims["won"], claims["held"]) == (most - share, share, 0)
        assert claims["adopted"] == {"seed": share}
    assert {uid: [host] for uid, host in (await listed(world)).items()} == holders
    (member, *_) = [each for each in await world.entrance.members() if each.contact.address.host == "node0"]
    assert (member.info["room"], member.grids) == (most - share, ("ffn",))


@world_test
async def test_a_dead_nodes_experts_are_served_again_within_30_s(world: World) -> None:
    """Nobody is told of its death, and its announcements would live 30 s; then callers find it no more."""
    await start(world, 3, max_experts=10)
    world.network.apply(HostDown("node2", silent=True))
    await world.settled(2, within_s=30)
    assert max(Counter(name for (name,) in world.holders().values()).values()) <= 10
    await trio.sleep(35.0)
    hosts = await listed(world)
    assert (hosts.keys(), set(hosts.values())) == (UIDS, {"node0", "node1"})


@world_test
async def test_an_expert_that_lost_one_of_two_holders_gets_another(world: World) -> None:
    """Within half a minute a node has its state, not its seed, and the two are averaged as before."""
    await start(world, 3, **AVERAGING)
    assert adopted(world) == {"seed": 20, "replica": 20}, "the second holder begins with the state of the first"
    assert max(len(served.uids) for served in world.served.values()) < 20, "they share the load"
    seeds = world.numbers("node0") | world.numbers("node1")
    learn(world)
    lost = set(world.served["node2"].uids)
    left = adopted(world) - Counter(world.claims("node2")["adopted"])
    world.network.apply(HostDown("node2", silent=True))
    await world.settled(2, times=2, within_s=30)
    world.check_agree("node0", "node1")
    for uid, numbers in world.numbers("node0").items():
        assert any((now != then).any() for now, then in zip(numbers, seeds[uid], strict=True)), uid
        assert [served.backends[uid].update_count for served in world.served.values()] == [1, 1]
    assert adopted(world)["replica"] - left["replica"] == len(lost)

    world.served["node0"].backends["ffn.0.0"].backward([X], X)
    averages = {name: world.copies(name)["averages"] for name in world.served}
    await trio.sleep(25.0)
    world.check_agree("node0", "node1")
    assert all(world.copies(name)["averages"] >= averages[name] + 20 for name in averages)
    assert (await listed(world)).keys() == UIDS


def learn(world: World) -> None:
    """All experts of all nodes take an update."""
    for served in world.served.values():
        for backend in served.backends.values():
            backend.backward([X], X)


@world_test
async def test_experts_of_which_no_holder_is_left_go_on_from_their_checkpoints(world: World, tmp_path: Path) -> None:
    """A third node takes all up within half a minute, and finds out once that the dead do not answer."""
    saving = {"checkpoint_dir": tmp_path, "checkpoint_period_s": 5.0}
    names = await start(world, 2, **AVERAGING, **saving)
    world.start("node2", max_experts=20, **AVERAGING, **saving)
    await world.settled(3, times=2)
    learn(world)
    await trio.sleep(10.0)
    assert world.served["node2"].uids == (), "there were enough"
    for name in names:
        world.network.apply(HostDown(name, silent=True))
    await world.settled(1, within_s=30)
    assert world.claims("node2")["adopted"] == {"checkpoint": 20}
    assert {backend.update_count for backend in world.served["node2"].backends.values()} == {1}
    assert world.copies("node2")["not_taken"] == {"no answer": 20}


@pytest.mark.parametrize("is_silent", [True, False], ids=["silent", "refuses"])
@pytest.mark.parametrize("delay_s", [0.3, 0.4])
@world_test
async def test_a_donor_that_dies_while_it_gives_states_holds_nothing_up(
    world: World, is_silent: bool, delay_s: float
) -> None:
    """Whatever step the fetching of a state is at, the newcomer serves all experts within half a minute."""
    world.start("node0", max_experts=20, **AVERAGING)
    await world.settled(1)
    world.start("node1", max_experts=20, **AVERAGING)
    await world.until(lambda: bool(world.said.get("node1")), within_s=60)  # it has taken some
    await trio.sleep(delay_s)
    world.network.apply(HostDown("node0", silent=is_silent))
    await world.until(lambda: world.served.keys() == {"node1"} and world.all_served(), within_s=30)
    assert world.claims("node1")["failed"] == 0
    assert world.copies("node1")["not_taken"].keys() == {"no answer"}


class Slow(InlineDevice):
    """Takes two seconds to make an expert."""

    async def aside(self, function: Callable[..., Any], *args: Any) -> Any:
        await trio.sleep(2.0)
        return await super().aside(function, *args)


@world_test
async def test_experts_that_nobody_serves_are_taken_up_first(world: World) -> None:
    """A slow node is on its way to be the second holder of twenty experts when the first holder of ten of them dies."""
    patterns = {"node0": "ffn.[0:2].[0:5]", "node1": "ffn.[2:4].[0:5]"}
    for name, pattern in patterns.items():
        world.start(name, {pattern: EXPERT}, **AVERAGING)
    await world.until(lambda: len(world.holders()) == 20, within_s=60)
    world.start("slow", device=Slow, max_experts=20, **AVERAGING)
    await world.until(lambda: bool(world.said.get("slow")), within_s=60)

    async def taken() -> Counter[str]:
        """Experts that the slow node serves, by the node that served them first."""
        reply = await world.entrance.rpc.call(Address("slow", SIM_PORT), "node.status", {}, timeout_s=5)
        return Counter("node0" if uid < "ffn.2" else "node1" for uid in reply.body["updates"])

    world.network.apply(HostDown("node1", silent=True))
    await trio.sleep(10.0)  # a probe has found out
    before = await taken()
    assert before["node1"] < 8
    while (now := await taken())["node1"] < 10:  # noqa: ASYNC110 (nobody could set an event)
        await trio.sleep(1.0)
    assert now["node0"] <= before["node0"] + 1
    assert now["node0"] < 10


@world_test
async def test_a_node_that_leaves_makes_its_experts_vacant_at_once(world: World, compilations: Any) -> None:
    """Long before a probe would tell. Of a kind that is warm nothing is compiled for them."""
    await start(world, 2)
    leaves, stays = world.served["node0"], world.served["node1"]
    for served in (leaves, stays):
        backend = next(iter(served.backends.values()))
        backend.forward([X])
        backend.backward([X], X)
    compiled = compilations.count
    await leaves.close()
    del world.served["node0"]
    # A scan within 5 s, a claim that settles for 2 s, and the DHT's round trips.
    await world.settled(1, within_s=10)
    for backend in stays.backends.values():
        backend.forward([X])
        backend.backward([X], X)
    assert (compilations.count, len(stays.backends)) == (compiled, 20)


@world_test
async def test_claimers_of_other_experts_are_not_counted(world: World) -> None:
    """Each takes all of its own at once: halves, and halves of the rest, would take three seconds a round."""
    world.start("node0", max_experts=20)
    world.start("node1", {"other.[0:4]": EXPERT}, max_experts=20)
    # Listed for 3 s, settled for 2 s, and some ten round trips of 0.1 s each.
    await world.until(lambda: len(world.holders()) == 24, within_s=8)
    assert [len(world.served[name].uids) for name in ("node0", "node1")] == [20, 4]


@world_test
async def test_a_node_promises_to_keep_what_it_serves_and_no_more(world: World) -> None:
    """Another node gives an expert up on the strength of it. What is no list of uids is refused with a word."""
    world.start("node0", max_experts=3)
    await world.until(lambda: "node0" in world.served, within_s=30)
    node, own = Address("node0", SIM_PORT), list(world.served["node0"].uids)
    assert len(own) == 3
    reply = await world.entrance.rpc.call(node, KEEP, {"uids": [*own, min(UIDS - {*own}), "what"]}, timeout_s=5)
    assert reply.body == {"kept": own}
    for garbage in ({}, {"uids": "ffn.0.0"}, {"uids": [1]}, {"uids": ["ffn.0.0"] * 65}):
        with pytest.raises(CallRefused, match="uids must be a list of at most 64"):
            await world.entrance.rpc.call(node, KEEP, garbage, timeout_s=5)


class SlowToTakeUp(InlineDevice):
    """Takes a minute to make an expert."""

    async def aside(self, function: Callable[..., Any], *args: Any) -> Any:
        await trio.sleep(60.0)
        return await super().aside(function, *args)


@world_test
async def test_a_claimer_that_dies_before_it_serves_is_followed_by_another(world: World) -> None:
    """While it lives its claims stand, renewed; when it is dead they do not keep the experts from being served."""
    world.start("slow", device=SlowToTakeUp, max_experts=20)
    await trio.sleep(10.0)  # it has claimed all: it is alone
    world.start("node0", max_experts=20)
    await trio.sleep(25.0)
    # Twice the life of a claim has passed, and still the other takes nothing.
    assert world.holders() == {}
    world.network.apply(HostDown("slow", silent=True))
    await world.settled(1, within_s=30)
    assert set(world.served) == {"node0"}


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
@world_test
async def test_after_a_partition_the_weakest_give_up(world: World, replicas: int) -> None:
    """When two halves that serve everything meet, each expert stays where it has learnt more, and is listed there."""
    both = await start(world, 2 * replicas, **AVERAGING | {"replicas": replicas})
    one, other = both[::2], both[1::2]
    world.network.apply(Partition((frozenset(one), frozenset({*other, "entrance"}))))
    await world.until(lambda: all(len(served.uids) == 20 for served in world.served.values()), within_s=90)
    await world.settled(len(both), times=2 * replicas)
    learnt = {name: [uid for uid in sorted(UIDS) if (uid < "ffn.2") == (name in one)] for name in both}
    for name, uids in learnt.items():
        for uid in uids:
            world.served[name].backends[uid].backward([X], X)
    given_up = {name: world.claims(name)["given_up"] for name in both}
    world.network.apply(Heal())
    # Two halves may ignore each other for two minutes (DhtConfig.pause).
    await world.settled(len(both), times=replicas, within_s=180)
    await world.until(lambda: {name: sorted(world.served[name].backends) for name in both} == learnt, within_s=10)
    for name in both:
        assert world.claims(name)["given_up"] == given_up[name] + 10
        assert sum("gives up expert" in text for text in world.said[name]) == given_up[name] + 10
    await trio.sleep(30.0)
    assert world.all_served(replicas)
    hosts = await listed(world)
    assert hosts.keys() == UIDS
    assert all(uid in learnt[host] for uid, host in hosts.items())


@pytest.mark.slow
@pytest.mark.timeout(600 + 2400 * HOURS)
@pytest.mark.parametrize("replicas", [1, 2])
@world_test
async def test_hosts_die_and_return_for_hours(world: World, replicas: int) -> None:
    """While two of five hosts at most are down, no expert is unserved or crowded for longer than finding out takes."""
    draws, names = random.Random(1), [f"node{number}" for number in range(5)]
    longest_s = {"unserved": 0.0, "crowded": 0.0}

    async def die_and_return() -> None:
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

    world.network.apply(SetHost("node4", HostOptions(extra_latency_s=0.3)))
    for name in names:
        world.start(name, max_experts=20, replicas=replicas)
    await world.settled(5, times=replicas, within_s=120)
    ends_at, since = trio.current_time() + 3600.0 * HOURS, dict[tuple[str, str], float]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(die_and_return)
        while (now := trio.current_time()) < ends_at:
            holders = world.holders()
            for uid in UIDS:
                count = len(holders.get(uid, ()))
                for what, is_so in (("unserved", count == 0), ("crowded", count > replicas)):
                    if is_so:
                        since.setdefault((what, uid), now)
                    elif (what, uid) in since:
                        longest_s[what] = max(longest_s[what], now - since.pop((what, uid)))
            await trio.sleep(1.0)
        nursery.cancel_scope.cancel()
    assert max(longest_s.values()) <= 30.0


@world_test
async def test_some_are_served_by_name_and_others_are_claimed(world: World) -> None:
    """A node that was told to serve an expert keeps it, whatever a claimer of the same expert has learnt."""
    await start(world, 1)
    world.served["node0"].backends["ffn.0.0"].backward([X], X)
    row, rest = "ffn.0.[0:5]", "ffn.[1:4].[0:5]"
    world.start("node1", {row: EXPERT, rest: EXPERT}, max_experts=20, of=(rest,))
    await world.settled(2)
    assert sorted(world.served["node1"].uids) == [f"ffn.0.{column}" for column in range(5)]
    assert sorted(world.claims("node1")["fixed"]) == sorted(world.served["node1"].uids)
    assert (world.claims("node0")["given_up"], world.claims("node0")["room"]) == (5, 5)


@world_test
async def test_an_expert_that_cannot_be_restored_is_left_to_others(world: World, tmp_path: Path) -> None:
    """It is not begun again from its seed, which would lose what it has learnt. A node that can serve it does."""
    wide = feedforward(d_model=8)
    wide_one = ExpertBackend(wide, SGD, wide.init(jax.random.key(0)))
    wide_one.backward([np.ones((2, 8), np.float32)], np.ones((2, 8), np.float32))
    Checkpoints(tmp_path / "ffn.1.1").save(1, wide_one.state, {"updates": 1})
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


@world_test
async def test_what_cannot_be_claimed_is_refused(world: World) -> None:
    """The message names what is wrong."""
    for experts, of, message in [
        ({PATTERN: EXPERT}, "a.0", "placement.of names 'a.0', which is not among"),
        ({PATTERN: EXPERT, "ffn.0.0": EXPERT}, PATTERN, "ffn.0.0 is named twice"),
    ]:
        with pytest.raises(ValueError, match=message):
            await world.entrance.serve(experts, optimizer=SGD, placement=PlacementConfig(max_experts=1, of=(of,)))


PEERS = [PeerId.draw(random.Random(number)) for number in range(5)]
LIFE_S = PlacementConfig().claim_life_s
NAMES = {str(uid): uid for uid in expand_grid_pattern(PATTERN)}


@world_test
async def test_claims_without_a_node_stand_for_two_lives(world: World) -> None:
    """Confirmed claims for everything, renewed for ever by a peer that is no node, keep nothing from being served."""
    claims = Claims(world.entrance.dht, NAMES, life_s=LIFE_S)

    async def squat() -> None:
        while True:
            await claims.write(confirmed=NAMES)
            await trio.sleep(LIFE_S / 3)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(squat)
        await trio.sleep(1.0)
        world.start("node0", max_experts=20)
        await trio.sleep(2 * LIFE_S - 2)
        assert world.holders() == {}
        await world.settled(1, within_s=30)
        nursery.cancel_scope.cancel()


async def test_who_claims_for_long_has_to_answer(autojump_clock: trio.testing.MockClock) -> None:
    """A silent node, too far to be watched otherwise, and one that is no node are found dead; a new claimer is not."""
    network, (own, *others) = DirectNetwork(), PEERS
    near, *_, silent = sorted(others, key=lambda peer: node_id(peer) ^ node_id(own))
    unlisted, late = (peer for peer in others if peer not in (near, silent))
    contacts = {peer: Contact(peer, Address(f"host{number}", 1)) for number, peer in enumerate(PEERS)}

    async def answer(_: Request) -> Reply:
        return Reply(body={})

    network.caller(contacts[near].address, near).add_handler(PING, answer)
    claimers, changes = [silent, unlisted], list[frozenset[PeerId]]()
    watch = Watch(
        network.caller(contacts[own].address, own),
        PlacementConfig(max_watched=1),
        nodes=lambda: {peer: contacts[peer] for peer in (near, silent)},
        claimers=lambda: claimers,
        on_change=lambda: changes.append(watch.dead),
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        await trio.sleep(2 * LIFE_S - 1)
        assert watch.dead == set()
        claimers.append(late)
        await trio.sleep(10.0)
        assert watch.dead == {silent, unlisted}
        assert len(changes) == 1
        nursery.cancel_scope.cancel()


@world_test
async def test_nobody_gives_up_to_one_that_computes_nothing(world: World) -> None:
    """It says that it serves all, learnt most and was told to, and promises to keep them; no call is answered."""

    async def status(_: Request) -> Reply:
        return Reply(body={"updates": dict.fromkeys(UIDS, 2**62), "claims": {"fixed": sorted(UIDS)}})

    async def keep(request: Request) -> Reply:
        return Reply(body={"kept": request.body["uids"]})

    await start(world, 1)
    async with open_swarm(ENTRANCE, network=world.network, host="liar", seed=0) as liar:
        liar.rpc.add_handler("node.status", status)
        liar.rpc.add_handler(KEEP, keep)
        announcer = Announcer(liar.dht, Contact.parse(liar.contact), life_s=30.0)
        for _ in range(6):
            assert await announcer.announce(NAMES.values()) == []
            await trio.sleep(10.0)
        assert set(world.served["node0"].uids) == UIDS
        assert world.claims("node0")["given_up"] == 0
        found = await find_replicas(world.entrance.dht, NAMES.values())
        for several in found.values():
            assert {each.contact.address.host for each in several} == {"node0", "liar"}
