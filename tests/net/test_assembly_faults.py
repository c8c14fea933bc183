"""Groups assemble though peers die, lie, stall and change their mind, in virtual time."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from dmoe_net.averaging.grouping.group import Group
from dmoe_net.averaging.grouping.group_key import MoshpitGrid, group_key
from dmoe_net.averaging.grouping.join_messages import candidates_in_untrusted, request_body
from dmoe_net.averaging.grouping.matchmaking import AssemblyConfig, Matchmaking
from dmoe_net.errors import CallRefused
from dmoe_net.rpc.base import Reply, Request
from dmoe_net.transport.sim import run
from dmoe_net.transport.sim.events import HostDown
from dmoe_net.transport.sim.links import Constant, LogNormal
from tests.net.assembly_swarm import (
    CONFIG,
    LINE,
    SCHEMA,
    Peer,
    check_disjoint,
    declare,
    find_later,
    gather,
    ids,
    simulated,
    swarm,
    willing_until,
)


@pytest.mark.parametrize("seed", range(3))
def test_uneven_latencies_cost_nobody_its_group(seed: int) -> None:
    """Seconds between arrivals, latencies with a heavy tail: nobody is in two groups, and one peer at most in none."""

    async def test() -> None:
        rng = random.Random(seed)
        async with swarm(11, latency=LogNormal(0.08, 0.8), seed=seed) as peers:
            found = await gather(*(partial(find_later, peer, rng.uniform(0.0, 3.0)) for peer in peers.peers))
            check_disjoint(peers.peers, found)
            assert found.count(None) <= 1

    run(test, seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_peers_that_know_of_each_other_meet_in_five_round_trips(seed: int) -> None:
    """With a round trip of 400 ms, two seconds before they begin, and each with its own idea of when that is."""

    async def test() -> None:
        rng = random.Random(seed)
        config = AssemblyConfig(window_s=2.0, request_timeout_s=1.0, poll_s=0.25, silence_s=2.0)  # of a collaboration
        grid = MoshpitGrid(side=16, dims=1)
        async with swarm(12, latency=Constant(0.2), seed=seed, grid=grid, config=config) as peers:
            contacts = [peer.member().contact for peer in peers.peers]
            latest = peers.peers[0].dht.clock.now() + 2.0
            begins_at = [latest - rng.choice((0.0, 1e-6, 0.03)) for _ in contacts]

            async def find(index: int) -> Group | None:
                async def hear_of_the_latest() -> None:
                    await trio.sleep(0.2)
                    peers.peers[index].matchmaker.postpone(max(begins_at))

                others = [each for each in contacts if each != contacts[index]]
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(hear_of_the_latest)
                    return await peers.peers[index].find_with(others, begins_at[index])

            found = await gather(*(partial(find, index) for index in range(len(contacts))))
            assert {None if group is None else len(group.members) for group in found} == {12}
            assert len({group.group_id for group in found if group is not None}) == 1

    run(test, seed=seed)


@simulated
async def test_a_late_postponement_loses_no_follower() -> None:
    """Three have met when a fourth says that they begin three seconds later. All four are the group, and know it."""
    config = AssemblyConfig(window_s=2.0, request_timeout_s=1.0, poll_s=0.25, silence_s=2.0)
    async with swarm(4, latency=Constant(0.2), config=config) as peers:
        contacts = [peer.member().contact for peer in peers.peers]
        begins_at = peers.peers[0].dht.clock.now() + 2.0

        async def find(index: int) -> Group | None:
            async def hear() -> None:
                await trio.sleep(1.6)
                peers.peers[index].matchmaker.postpone(begins_at + 3.0)

            others = [each for each in contacts if each != contacts[index]]
            if index == 3:
                await trio.sleep(1.4)
                return await peers.peers[index].find_with(others, begins_at + 3.0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hear)
                return await peers.peers[index].find_with(others, begins_at)

        found = await gather(*(partial(find, index) for index in range(4)))
        assert [None if group is None else len(group.members) for group in found] == [4] * 4
        assert peers.peers[0].dht.clock.now() >= begins_at + 3.0


@simulated
async def test_dead_leaders_cost_one_timeout() -> None:
    """Three dead peers that would lead, asked at once: the living are a group after their window."""
    async with swarm(6) as peers:
        *living, _, _, _ = peers.peers
        for dead in peers.peers[3:]:
            assert await declare(dead, lives_s=4.0)
            peers.take_down(dead)
        start = trio.current_time()
        found = await gather(*(peer.find for peer in living))
        assert all(ids(group) == {peer.rpc.peer_id for peer in living} for group in found)
        assert trio.current_time() - start < CONFIG.window_s + 1.0


@simulated
async def test_a_leader_that_never_answers() -> None:
    """Neither one that is silent when asked, nor one that has us wait for ever, keeps others from their group."""

    async def sleep(request: Request) -> Reply:
        await trio.sleep_forever()
        raise AssertionError(request)

    for ask in (sleep, willing_until(4.0)):
        async with swarm(2) as peers:
            stuck = await peers.add(fakes={"ask": ask, "join": sleep})
            assert await declare(stuck, lives_s=4.0)
            found = await gather(*(peer.find for peer in peers.peers[:2]))
            assert all(ids(group) == {peer.rpc.peer_id for peer in peers.peers[:2]} for group in found)


@pytest.mark.parametrize(
    "lie",
    [
        {},
        {"group_id": bytes(16), "members": []},
        {"group_id": bytes(15), "members": []},
        {"refusal": "none of the reasons"},
        {"refusal": "following", "leader": [b"short", "host", 1, 0.0]},
    ],
)
def test_a_leader_that_sends_nonsense(lie: dict[str, Any]) -> None:
    """It is not asked again, and the others find their group."""
    num_asked = 0

    async def join(request: Request) -> Reply:
        nonlocal num_asked
        num_asked += 1
        return Reply(body=lie)

    async def test() -> None:
        async with swarm(2) as peers:
            liar = await peers.add(fakes={"ask": willing_until(4.0), "join": join})
            assert await declare(liar, lives_s=4.0)
            found = await gather(*(peer.find for peer in peers.peers[:2]))
            assert all(ids(group) == {peer.rpc.peer_id for peer in peers.peers[:2]} for group in found)
            assert 1 <= num_asked <= 2

    run(test)


@simulated
async def test_a_cancelled_leader_sends_its_followers_away() -> None:
    """Its declaration is withdrawn within a second, and the others are a group without it by their next window."""
    async with swarm(3) as peers:
        leader, *others = peers.peers

        async def cancelled() -> None:
            with trio.move_on_after(2.0):
                await leader.find()
                raise AssertionError("it found a group")
            assert trio.current_time() - start <= 2.0 + CONFIG.withdrawal_timeout_s
            record = await others[0].dht.get(group_key("model", LINE, 0, 0))
            declared = {candidate.contact.peer_id for candidate in candidates_in_untrusted(record)}
            assert declared == {peer.rpc.peer_id for peer in others}

        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancelled)
            found = await gather(*(partial(find_later, peer, 0.5) for peer in others))
        assert all(ids(group) == {peer.rpc.peer_id for peer in others} for group in found)
        assert trio.current_time() - start < 6.5


@simulated
async def test_a_cancelled_follower_is_not_in_the_group() -> None:
    """The leader, which came first, begins without it."""
    async with swarm(3) as peers:
        leader, follower, leaver = peers.peers

        async def cancelled() -> None:
            with trio.move_on_after(2.0):
                await find_later(leaver, 0.5)
                raise AssertionError("it found a group")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancelled)
            found = await gather(leader.find, partial(find_later, follower, 0.5))
        assert all(ids(group) == {leader.rpc.peer_id, follower.rpc.peer_id} for group in found)


@simulated
async def test_a_leader_that_falls_silent_costs_no_window() -> None:
    """Its followers notice within 3 s, and are a group when their own window ends."""
    async with swarm(3) as peers:
        leader, *followers = peers.peers

        async def die() -> None:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(leader.find)
                    await trio.sleep(1.5)
                    peers.take_down(leader)  # before it could withdraw anything
                    scope.cancel()

        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(die)
            found = await gather(*(partial(find_later, peer, 0.5) for peer in followers))
        assert all(ids(group) == {peer.rpc.peer_id for peer in followers} for group in found)
        assert trio.current_time() - start < 0.5 + CONFIG.window_s + 0.1


@pytest.mark.parametrize("seed", range(6))
def test_deadlines_hold_whoever_dies(seed: int) -> None:
    """30 % of 16 peers die at random times: the others end by their deadlines, in a group but for at most one."""

    async def test() -> None:
        rng = random.Random(seed)
        async with swarm(16, latency=LogNormal(0.05, 0.5), seed=seed) as peers:
            dying = rng.sample(peers.peers[1:], 5)
            living = [peer for peer in peers.peers if peer not in dying]

            async def die(peer: Peer) -> None:
                scope = trio.CancelScope()

                async def search() -> None:
                    with scope:
                        await peer.find()

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(search)
                    await trio.sleep(rng.uniform(0.0, 7.0))
                    peers.network.apply(HostDown(peer.host, silent=rng.random() < 0.7))
                    scope.cancel()

            async with trio.open_nursery() as nursery:
                for peer in dying:
                    nursery.start_soon(die, peer)
                found = await gather(*(peer.find for peer in living))
            for peer, group in zip(living, found, strict=True):
                assert group is None or peer.rpc.peer_id in ids(group)
            assert found.count(None) <= 1

    run(test, seed=seed)


async def test_requests_are_checked(autojump_clock: MockClock) -> None:
    """Nonsense, and a peer that speaks for another, are refused with a reason; who does not look says so."""
    async with swarm(2) as peers:
        asked, asker = peers.peers
        core = Matchmaking(
            asker.member(),
            key="key",
            schema=SCHEMA,
            side=8,
            deadline=30.0,
            config=CONFIG,
            rng=random.Random(0),
            now=0.0,
        )
        good = request_body(core.request)
        bad = request_body(replace(core.request, member=asked.member()))
        for method in ("averaging.model.ask", "averaging.model.join"):
            reply = await asker.rpc.call(asked.member().contact, method, good, timeout_s=3.0)
            assert reply.body == {"refusal": "not_looking"}
            with pytest.raises(CallRefused, match="asks for"):
                await asker.rpc.call(asked.member().contact, method, bad, timeout_s=3.0)
            with pytest.raises(CallRefused, match="key"):
                await asker.rpc.call(asked.member().contact, method, {}, timeout_s=3.0)


@pytest.mark.parametrize("skew_s", [1.0, 3.5, 4.5])
def test_clocks_that_differ_by_less_than_a_window(skew_s: float) -> None:
    """One peer's clock is ahead: the leader still begins when its own window ends, and the other waits for that."""

    async def main() -> None:
        async with swarm(2) as peers:
            peers.peers[1].dht.clock.advance(skew_s)
            first, second = await gather(*(partial(peer.find, 60.0) for peer in peers.peers))
            assert first is not None
            assert first == second

    run(main)
