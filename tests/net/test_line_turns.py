"""Members of a group measure their lines one at a time, while nobody averages; in virtual time."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import trio

from dmoe_net.averaging.collaboration.rounds import cautious
from dmoe_net.averaging.grouping.group import Group, Member, Role
from dmoe_net.averaging.line.monitor import PERIOD_S
from dmoe_net.averaging.line.turns import CALM_S, MEASURING_S, SLOT_S, has_time, wait_of
from dmoe_net.averaging.reduction.load_balance import peer_fractions
from dmoe_net.averaging.speeds import UNKNOWN, Speeds
from dmoe_net.identity import Address
from dmoe_net.rpc.peer import RpcPeer
from dmoe_net.transport.sim.links import HostOptions
from tests.net.sim_hosts import in_simulation, peer
from tests.net.test_line_monitor import MB, monitors_of, peers_on

LINE = HostOptions(up_bps=1 * MB, down_bps=1 * MB)


def for_ever() -> float:
    return float("inf")


def group_of(peers: Sequence[RpcPeer]) -> Group:
    members = tuple(
        Member(peer_id=each.peer_id, address=each.address, wanted_slot=slot) for slot, each in enumerate(peers)
    )
    return Group(group_id=b"g" * 16, members=members, side=len(members))


def test_everybody_has_the_first_slot_in_its_turn_and_no_two_have_the_same() -> None:
    for num_members in (2, 5):
        for step in range(2 * num_members):
            waits = [wait_of(place, step=step, num_members=num_members) for place in range(num_members)]
            assert sorted(waits) == [CALM_S + SLOT_S * slot for slot in range(num_members)]
            assert waits[step % num_members] == CALM_S


def test_a_measurement_ends_within_its_slot() -> None:
    assert MEASURING_S < SLOT_S
    assert has_time(SLOT_S)
    assert not has_time(SLOT_S - 0.1)


@in_simulation
async def test_members_measure_one_after_the_other_and_find_their_own_lines() -> None:
    """Four lines of 1 MB a second, in one pause: to 15 %. All at once each would find what the others leave."""
    async with peers_on(dict.fromkeys("abcd", LINE)) as peers, trio.open_nursery() as nursery:
        group, monitors = group_of(peers), monitors_of(peers)
        for each in monitors:
            each.measure_in_turn(group, 1, nursery, for_ever)
        await trio.sleep(CALM_S + SLOT_S)
        assert [each.speeds() == UNKNOWN for each in monitors] == [True, False, True, True]  # step 1: the second place
        await trio.sleep(3 * SLOT_S)
        for each in monitors:
            assert each.outcomes == {"measured": 1}
            assert each.speeds().up == pytest.approx(1e6, rel=0.15)
            assert each.speeds().down == pytest.approx(1e6, rel=0.15)
            each.measure_in_turn(group, 2, nursery, for_ever)  # not due again
        await trio.sleep(PERIOD_S / 2)
        assert [each.outcomes["measured"] for each in monitors] == [1, 1, 1, 1]


@in_simulation
async def test_nobody_measures_when_the_next_step_is_near() -> None:
    """One slot fits into the time that is foretold when it begins; the next step gives the other its turn."""
    async with peers_on({"a": LINE, "b": LINE}) as peers, trio.open_nursery() as nursery:
        group, monitors = group_of(peers), monitors_of(peers)
        for step in range(2):
            ends_at = trio.current_time() + CALM_S + 1.5 * SLOT_S

            def quiet_s(ends_at: float = ends_at) -> float:
                return ends_at - trio.current_time()

            for each in monitors:
                each.measure_in_turn(group, step, nursery, quiet_s)
            await trio.sleep(30.0)
            assert [each.outcomes["measured"] for each in monitors] == ([1, 0], [1, 1])[step]


@pytest.mark.parametrize("after_s", [0.5, CALM_S + 0.6])
def test_a_step_ends_a_measurement_and_what_it_found_is_thrown_away(after_s: float) -> None:
    """Before its turn, or within it: nothing is known, and it is due again at once, when nothing disturbs."""

    @in_simulation
    async def test() -> None:
        async with peers_on({"a": LINE, "b": LINE}) as peers, trio.open_nursery() as nursery:
            group, (mine, _) = group_of(peers), monitors_of(peers)
            mine.measure_in_turn(group, 0, nursery, for_ever)
            await trio.sleep(after_s)
            mine.disturb("a step began")
            await trio.sleep(1.0)  # what was on its way comes, and the rest is not sent
            moved = peers[0].moved_bytes(peers[1].peer_id)
            await trio.sleep(60.0)
            assert peers[0].moved_bytes(peers[1].peer_id) - moved < 2**16
            assert mine.speeds() == UNKNOWN
            assert mine.outcomes == ({"a step began": 1} if after_s > CALM_S else {})
            mine.measure_in_turn(group, 0, nursery, for_ever)
            await trio.sleep(SLOT_S + CALM_S)
            assert mine.speeds().up == pytest.approx(1e6, rel=0.15)

    test()


@in_simulation
async def test_two_who_measure_at_once_find_nothing() -> None:
    """As when their clocks or their steps differ: both give up, rather than take half a line for all of it."""
    async with peers_on({"a": LINE, "b": LINE}) as peers, trio.open_nursery() as nursery:
        group, monitors = group_of(peers), monitors_of(peers)
        for step, each in enumerate(monitors):
            each.measure_in_turn(group, step, nursery, for_ever)
        await trio.sleep(SLOT_S)
        assert [each.speeds() for each in monitors] == [UNKNOWN, UNKNOWN]
        assert [dict(each.outcomes) for each in monitors] == [{"another peer measured": 1}] * 2


@in_simulation
async def test_a_line_too_slow_for_a_slot_stays_unknown_and_a_lonely_member_asks_nobody() -> None:
    """256 KiB at 20 kB a second take 13 s."""
    async with peers_on({"a": HostOptions(up_bps=0.02 * MB), "b": LINE}) as peers, trio.open_nursery() as nursery:
        (mine, _), group = monitors_of(peers), group_of(peers)
        mine.measure_in_turn(group, 0, nursery, for_ever)
        await trio.sleep(CALM_S + SLOT_S)
        assert mine.outcomes == {"it took too long": 1}
        assert mine.speeds() == UNKNOWN
        clients = tuple(
            replace(each, address=None, role=Role.CLIENT) if each.peer_id != peers[0].peer_id else each
            for each in group.members
        )
        mine.measure_in_turn(replace(group, members=clients), 0, nursery, for_ever)
        await trio.sleep(60.0)
        assert mine.outcomes == {"it took too long": 1}


def test_an_unknown_line_never_gets_more_than_an_equal_share() -> None:
    """Whoever is known: the slowest of a group has no more than anybody else. With the mean of the known it would be
    more: of one fast and one slow member known, four unknown ones would count as fairly fast."""
    rng = random.Random(0)
    for _ in range(200):
        num_members = rng.randint(2, 9)
        known = [rng.choice([None, rng.uniform(1e4, 1e8)]) for _ in range(num_members)]
        members = tuple(
            Member(peer_id=peer(str(place)), address=Address("host", 1 + place), speeds=Speeds(up=up, down=up))
            for place, up in enumerate(known)
        )
        group = cautious(Group(group_id=b"g" * 16, members=members, side=num_members))
        shares = peer_fractions([each.role for each in group.members], [each.speeds for each in group.members])
        for up, share, member, before in zip(known, shares, group.members, members, strict=True):
            if up is None:
                assert share <= 1 / num_members + 1e-9
            else:
                assert member == before
