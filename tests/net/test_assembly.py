"""Groups assemble over a simulated network, in virtual time."""

from collections import Counter
from functools import partial

import pytest
import trio

from dmoe_net.averaging.grouping.group import Role
from dmoe_net.averaging.grouping.group_key import MoshpitGrid, group_key
from dmoe_net.averaging.grouping.join_messages import (
    candidates_in_untrusted,
)
from dmoe_net.transport.sim import run
from tests.net.assembly_swarm import CONFIG, LINE, SQUARE, check_disjoint, find_later, gather, ids, simulated, swarm


@simulated
async def test_twenty_peers_on_one_key() -> None:
    """Groups of 8, 8 and 4: nobody is in two, and nobody left over."""
    async with swarm(20) as peers:
        start = trio.current_time()
        found = await gather(*(peer.find for peer in peers.peers))
        check_disjoint(peers.peers, found)
        assert sorted(Counter(len(ids(group)) for group in found).items()) == [(4, 4), (8, 16)]
        assert trio.current_time() - start == pytest.approx(CONFIG.window_s, abs=1.0)  # the four could not be more


@pytest.mark.parametrize("round_number", [0, 1])
def test_a_grid_of_64_peers_forms_8_full_groups(round_number: int) -> None:
    """Along either axis, long before the window ends."""

    async def test() -> None:
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
                assert group is not None
                assert group.slots == tuple(range(8))

    run(test)


@simulated
async def test_a_late_peer_is_found_in_a_later_window() -> None:
    """The first looks again after its window, and the second, which came in the meantime, joins it."""
    async with swarm(2) as peers:
        early, late = peers.peers

        found = await gather(early.find, partial(find_later, late, 6.0))
        assert ids(found[0]) == ids(found[1]) == {early.rpc.peer_id, late.rpc.peer_id}


@simulated
async def test_clients_join_nodes() -> None:
    """Peers that cannot be called are in the group that a node leads, with slots of their own; alone they are none."""
    async with swarm(1) as peers:
        node, clients = peers.peers[0], [await peers.add(client=True) for _ in range(2)]
        assert await gather(*(partial(client.find, 4.0) for client in clients)) == [None, None]
        found = await gather(*(peer.find for peer in peers.peers))
        assert all(ids(group) == {peer.rpc.peer_id for peer in (node, *clients)} for group in found)
        assert found[0] is not None
        assert found[0].slots == (0, 1, 2)


@simulated
async def test_auxiliary_peers_take_nobodys_place() -> None:
    """Two nodes with side 2 and an auxiliary peer are one group of three; one node and two of these are none."""
    grid = MoshpitGrid(side=2, dims=1)
    async with swarm(3, grid=grid) as peers:
        first, second, third = peers.peers
        helper = partial(third.find, role=Role.AUXILIARY)

        found = await gather(first.find, partial(find_later, second, 1.0), helper)
        assert all(ids(group) == {peer.rpc.peer_id for peer in peers.peers} for group in found)
        assert found[0] is not None
        assert [member.sends for member in found[0].members] == [True, True, False]
        one_node = await gather(
            first.find, partial(second.find, role=Role.AUXILIARY), partial(third.find, role=Role.AUXILIARY)
        )
        assert one_node == [None, None, None]


@simulated
async def test_other_schemas_are_refused() -> None:
    """Peers with two kinds of vectors under one key are two groups."""
    async with swarm(2) as peers:
        for _ in range(2):
            await peers.add(schema=b"a vector of 4")
        found = await gather(*(peer.find for peer in peers.peers))
        check_disjoint(peers.peers, found)
        assert ids(found[0]) == {peer.rpc.peer_id for peer in peers.peers[:2]}
        assert ids(found[2]) == {peer.rpc.peer_id for peer in peers.peers[2:]}


@simulated
async def test_two_peers_ask_each_other() -> None:
    """Whatever their distance in time, two peers find each other within the first of their windows."""
    async with swarm(2) as peers:
        for delay_s in (0.0, 0.02, 0.1, 0.3, 1.0, 3.0):
            start = trio.current_time()
            found = await gather(peers.peers[0].find, partial(find_later, peers.peers[1], delay_s))
            assert found[0] is not None
            assert found[0] == found[1]
            assert trio.current_time() - start <= CONFIG.window_s + 0.1


@simulated
async def test_a_leader_that_follows_takes_its_followers_along() -> None:
    """A leader with a follower finds one with an earlier expiration: all three are one group, when that one begins."""
    async with swarm(3) as peers:
        leader, follower, hurried = peers.peers

        start = trio.current_time()
        found = await gather(leader.find, partial(find_later, follower, 0.5), partial(find_later, hurried, 1.0, 3.0))
        assert all(ids(group) == {peer.rpc.peer_id for peer in peers.peers} for group in found)
        assert trio.current_time() - start == pytest.approx(4.0 - CONFIG.margin_s, abs=0.1)


@simulated
async def test_a_key_is_searched_again_at_once() -> None:
    """After a search and a withdrawal, the next one under the same key works though its window ends earlier."""
    async with swarm(3) as peers:
        for seconds in (20.0, 4.0, 3.0):
            start = trio.current_time()
            found = await gather(*(partial(peer.find, seconds) for peer in peers.peers[:2]))
            assert found[0] is not None
            assert found[0] == found[1]
            assert trio.current_time() - start < 5.1
            await peers.peers[0].matchmaker.withdraw()
            await peers.peers[1].matchmaker.withdraw()
            record = await peers.peers[2].dht.get(group_key("model", LINE, 0, 0))
            assert candidates_in_untrusted(record) == ()
