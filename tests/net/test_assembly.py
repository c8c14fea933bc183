"""Groups assemble over a simulated network, though peers die, lie, stall and change their mind, in virtual time."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio

from dmoe_net.averaging.grouping.group import Group, Role
from dmoe_net.averaging.grouping.group_key import MoshpitGrid, group_key
from dmoe_net.averaging.grouping.join_messages import JoinRequest, candidates_in_untrusted, request_body
from dmoe_net.averaging.grouping.matchmaking import AssemblyConfig
from dmoe_net.errors import CallRefused
from dmoe_net.rpc.base import Handler, Reply, Request
from dmoe_net.transport.sim.events import HostDown
from dmoe_net.transport.sim.links import Constant, LogNormal
from tests.net.assembly_swarm import (
    CONFIG,
    LINE,
    SCHEMA,
    SQUARE,
    Peer,
    Swarm,
    cancelled_after,
    check_disjoint,
    declare,
    find_later,
    gather,
    ids,
    swarm,
    willing_until,
)
from tests.net.sim_hosts import in_simulation


@in_simulation
async def test_twenty_peers_on_one_key() -> None:
    """Groups of 8, 8 and 4 form: nobody is in two, and nobody is left over."""
    async with swarm(20) as peers:
        start = trio.current_time()
        found = await gather(*(peer.find for peer in peers.peers))
        check_disjoint(peers.peers, found)
        assert sorted(Counter(len(ids(group)) for group in found).items()) == [(4, 4), (8, 16)]
        assert trio.current_time() - start == pytest.approx(CONFIG.window_s, abs=1.0)  # the four could not be more


@pytest.mark.parametrize("round_number", [0, 1])
@in_simulation
async def test_a_grid_of_64_peers_forms_8_full_groups(round_number: int) -> None:
    """They form along either axis, long before the window ends."""
    async with swarm(64, grid=SQUARE) as peers:
        slots = [SQUARE.slot(cell, round_number) for cell in range(64)]
        groups = [SQUARE.group(cell, round_number) for cell in range(64)]
        start = trio.current_time()
        found = await gather(
            *(
                partial(peer.find, cell=cell, round_number=round_number, wanted_slot=slots[cell])
                for cell, peer in enumerate(peers.peers)
            )
        )
        assert trio.current_time() - start < 4.0
        check_disjoint(peers.peers, found)
        for cell, group in enumerate(found):
            mates = [peer for mate, peer in enumerate(peers.peers) if groups[mate] == groups[cell]]
            assert ids(group) == {peer.rpc.peer_id for peer in mates}
            assert group.slots == tuple(range(8))


@in_simulation
async def test_clients_join_nodes() -> None:
    """Peers that cannot be called are in the group that a node leads, with slots of their own; alone they are none."""
    async with swarm(1) as peers:
        node, clients = peers.peers[0], [await peers.add(client=True) for _ in range(2)]
        assert await gather(*(partial(client.find, 4.0) for client in clients)) == [None, None]
        found = await gather(*(peer.find for peer in peers.peers))
        assert all(ids(group) == {peer.rpc.peer_id for peer in (node, *clients)} for group in found)
        assert found[0].slots == (0, 1, 2)


@in_simulation
async def test_auxiliary_peers_take_nobodys_place() -> None:
    """Two nodes with side 2 and an auxiliary peer are one group of three; one node and two of these are none."""
    async with swarm(3, grid=MoshpitGrid(side=2, dims=1)) as peers:
        first, second, third = peers.peers
        second_helps, third_helps = (partial(peer.find, role=Role.AUXILIARY) for peer in (second, third))
        found = await gather(first.find, partial(find_later, second, 1.0), third_helps)
        assert all(ids(group) == {peer.rpc.peer_id for peer in peers.peers} for group in found)
        assert [member.sends for member in found[0].members] == [True, True, False]
        assert await gather(first.find, second_helps, third_helps) == [None, None, None]


@in_simulation
async def test_other_schemas_are_refused() -> None:
    """Peers with two kinds of vectors under one key are two groups."""
    async with swarm(2) as peers:
        for _ in range(2):
            await peers.add(schema=b"a vector of 4")
        found = await gather(*(peer.find for peer in peers.peers))
        check_disjoint(peers.peers, found)
        assert ids(found[0]) == {peer.rpc.peer_id for peer in peers.peers[:2]}
        assert ids(found[2]) == {peer.rpc.peer_id for peer in peers.peers[2:]}


@in_simulation
async def test_two_peers_ask_each_other() -> None:
    """Two peers find each other within the first of their windows; one that comes when that is over, in the next."""
    async with swarm(2) as peers:
        for delay_s in (0.0, 0.02, 0.1, 0.3, 1.0, 3.0, 6.0):
            start = trio.current_time()
            found = await gather(peers.peers[0].find, partial(find_later, peers.peers[1], delay_s))
            assert found[0] == found[1] is not None
            assert trio.current_time() - start <= (2 if delay_s > CONFIG.window_s else 1) * CONFIG.window_s + 0.1


@in_simulation
async def test_a_leader_that_follows_takes_its_followers_along() -> None:
    """A leader with a follower finds one with an earlier expiration: all three are one group, when that one begins."""
    async with swarm(3) as peers:
        leader, follower, hurried = peers.peers
        start = trio.current_time()
        found = await gather(leader.find, partial(find_later, follower, 0.5), partial(find_later, hurried, 1.0, 3.0))
        assert all(ids(group) == {peer.rpc.peer_id for peer in peers.peers} for group in found)
        assert trio.current_time() - start == pytest.approx(4.0 - CONFIG.margin_s, abs=0.1)


@in_simulation
async def test_a_key_is_searched_again_at_once() -> None:
    """After a search and a withdrawal, the next one under the same key works though its window ends earlier."""
    async with swarm(3) as peers:
        for seconds in (20.0, 4.0, 3.0):
            start = trio.current_time()
            found = await gather(*(partial(peer.find, seconds) for peer in peers.peers[:2]))
            assert found[0] == found[1] is not None
            assert trio.current_time() - start < 5.1
            for peer in peers.peers[:2]:
                await peer.matchmaker.withdraw()
            record = await peers.peers[2].dht.get(group_key("model", LINE, 0, 0))
            assert candidates_in_untrusted(record) == ()


STEPS = AssemblyConfig(window_s=2.0, request_timeout_s=1.0, poll_s=0.25, silence_s=2.0)
"""Settings of a collaboration."""


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
@in_simulation
async def test_uneven_latencies_cost_nobody_its_group(seed: int) -> None:
    """Peers come within seconds, latencies have a heavy tail: nobody is in two groups, and one at most in none."""
    rng = random.Random(seed)
    async with swarm(11, latency=LogNormal(0.08, 0.8), seed=seed) as peers:
        found = await gather(*(partial(find_later, peer, rng.uniform(0.0, 3.0)) for peer in peers.peers))
        check_disjoint(peers.peers, found)
        assert found.count(None) <= 1


@pytest.mark.parametrize("seed", range(3))
@in_simulation
async def test_peers_that_know_of_each_other_meet_in_five_round_trips(seed: int) -> None:
    """They have 2 s, round trips of 400 ms, and each its own idea of when they begin."""
    rng, grid = random.Random(seed), MoshpitGrid(side=16, dims=1)
    async with swarm(12, latency=Constant(0.2), seed=seed, grid=grid, config=STEPS) as peers:
        latest = peers.peers[0].dht.clock.now() + 2.0
        begins_at = [latest - rng.choice((0.0, 1e-6, 0.03)) for _ in peers.peers]
        searches = (
            partial(peer.find_with, peers.peers, at, told_after_s=0.2, told=max(begins_at))
            for peer, at in zip(peers.peers, begins_at, strict=True)
        )
        found = await gather(*searches)
        assert len(ids(found[0])) == 12
        assert all(group == found[0] for group in found)


@in_simulation
async def test_a_late_postponement_loses_no_follower() -> None:
    """Three have met when a fourth says that they begin three seconds later. All four are the group, and know it."""
    async with swarm(4, latency=Constant(0.2), config=STEPS) as peers:
        begins_at = peers.peers[0].dht.clock.now() + 2.0

        async def find(peer: Peer, at: float, sleep_s: float = 0.0) -> Group | None:
            await trio.sleep(sleep_s)
            return await peer.find_with(peers.peers, at, told_after_s=1.6, told=begins_at + 3.0)

        *three, fourth = peers.peers
        found = await gather(
            *(partial(find, peer, begins_at) for peer in three), partial(find, fourth, begins_at + 3.0, 1.4)
        )
        assert [len(ids(group)) for group in found] == [4] * 4
        assert peers.peers[0].dht.clock.now() >= begins_at + 3.0


@in_simulation
async def test_dead_leaders_cost_one_timeout() -> None:
    """Three dead peers that would lead are asked at once: the living are a group after their window."""
    async with swarm(6) as peers:
        *living, _, _, _ = peers.peers
        for dead in peers.peers[3:]:
            assert await declare(dead, lives_s=4.0)
            peers.take_down(dead)
        start = trio.current_time()
        found = await gather(*(peer.find for peer in living))
        assert all(ids(group) == {peer.rpc.peer_id for peer in living} for group in found)
        assert trio.current_time() - start < CONFIG.window_s + 1.0


async def check_group_beside(**fakes: Handler) -> None:
    """Two peers are a group beside one with these handlers that declares itself, too."""
    async with swarm(2) as peers:
        assert await declare(await peers.add(fakes=fakes), lives_s=4.0)
        found = await gather(*(peer.find for peer in peers.peers[:2]))
        assert all(ids(group) == {peer.rpc.peer_id for peer in peers.peers[:2]} for group in found)


@in_simulation
async def test_a_leader_that_never_answers() -> None:
    """Neither one that is silent when asked, nor one that has us wait for ever, keeps others from their group."""

    async def sleep(request: Request) -> Reply:
        await trio.sleep_forever()
        raise AssertionError(request)

    for ask in (sleep, willing_until(4.0)):
        await check_group_beside(ask=ask, join=sleep)


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
@in_simulation
async def test_a_leader_that_sends_nonsense(lie: dict[str, Any]) -> None:
    """It is not asked again, and the others find their group."""
    num_asked = 0

    async def join(request: Request) -> Reply:
        nonlocal num_asked
        num_asked += 1
        return Reply(body=lie)

    await check_group_beside(ask=willing_until(4.0), join=join)
    assert 1 <= num_asked <= 2


@in_simulation
async def test_a_cancelled_leader_sends_its_followers_away() -> None:
    """Its declaration is withdrawn within a second, and the others are a group without it by their next window."""
    async with swarm(3) as peers:
        leader, *others = peers.peers

        async def cancelled() -> None:
            await cancelled_after(2.0, leader.find)
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


@in_simulation
async def test_a_cancelled_follower_is_not_in_the_group() -> None:
    """The leader, which came first, begins without it."""
    async with swarm(3) as peers:
        leader, follower, leaver = peers.peers
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancelled_after, 2.0, partial(find_later, leaver, 0.5))
            found = await gather(leader.find, partial(find_later, follower, 0.5))
        assert all(ids(group) == {leader.rpc.peer_id, follower.rpc.peer_id} for group in found)


async def search_and_die(peer: Peer, peers: Swarm, after_s: float, *, silent: bool = True) -> None:
    """Search until the host goes down, before anything can be withdrawn."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.find)
        await trio.sleep(after_s)
        peers.network.apply(HostDown(peer.host, silent=silent))
        nursery.cancel_scope.cancel()


@in_simulation
async def test_a_leader_that_falls_silent_costs_no_window() -> None:
    """Its followers notice within 3 s, and are a group when their own window ends."""
    async with swarm(3) as peers:
        leader, *followers = peers.peers
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(search_and_die, leader, peers, 1.5)
            found = await gather(*(partial(find_later, peer, 0.5) for peer in followers))
        assert all(ids(group) == {peer.rpc.peer_id for peer in followers} for group in found)
        assert trio.current_time() - start < 0.5 + CONFIG.window_s + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@in_simulation
async def test_deadlines_hold_whoever_dies(seed: int) -> None:
    """30 % of 16 peers die at random times: the others end by their deadlines, in a group but for at most one."""
    rng = random.Random(seed)
    async with swarm(16, latency=LogNormal(0.05, 0.5), seed=seed) as peers, trio.open_nursery() as nursery:
        dying = rng.sample(peers.peers[1:], 5)
        for peer in dying:
            nursery.start_soon(partial(search_and_die, peer, peers, rng.uniform(0.0, 7.0), silent=rng.random() < 0.7))
        living = [peer for peer in peers.peers if peer not in dying]
        found = await gather(*(peer.find for peer in living))
        for peer, group in zip(living, found, strict=True):
            assert group is None or peer.rpc.peer_id in ids(group)
        assert found.count(None) <= 1


@in_simulation
async def test_requests_are_checked() -> None:
    """Nonsense, and a peer that speaks for another, are refused with a reason; a peer that does not look says so."""
    async with swarm(2) as peers:
        asked, asker = peers.peers
        good = JoinRequest(key="key", schema=SCHEMA, side=8, member=asker.member(), expiration=5.0, window=None)
        bad = replace(good, member=asked.member())
        for method in ("averaging.model.ask", "averaging.model.join"):
            call = partial(asker.rpc.call, asked.member().contact, method, timeout_s=3.0)
            assert (await call(request_body(good))).body == {"refusal": "not_looking"}
            with pytest.raises(CallRefused, match="asks for"):
                await call(request_body(bad))
            with pytest.raises(CallRefused, match="key"):
                await call({})


@pytest.mark.parametrize("skew_s", [1.0, 3.5, 4.5])
@in_simulation
async def test_clocks_that_differ_by_less_than_a_window(skew_s: float) -> None:
    """One peer's clock is ahead: the leader still begins when its own window ends, and the other waits for that."""
    async with swarm(2) as peers:
        peers.peers[1].dht.clock.advance(skew_s)
        first, second = await gather(*(partial(peer.find, 60.0) for peer in peers.peers))
        assert first == second is not None
