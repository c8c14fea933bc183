"""Everybody uses a group's average, or nobody does: votes, outcomes, and members that go in the middle."""

import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from dmoe_net.averaging.collaboration.rounds import has_majority
from dmoe_net.averaging.collaboration.settlement import CLIENT_S, Case, Outcome, Settlement, Vote
from dmoe_net.averaging.grouping.group import Group, Member, Role
from dmoe_net.errors import CallRefused
from dmoe_net.identity import Address
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.sim import simulate
from dmoe_net.transport.sim.events import HostDown
from dmoe_net.transport.sim.links import Constant
from dmoe_net.transport.sim.network import SimNetwork
from tests.net.sim_hosts import in_simulation, peer

WHOLE, BROKEN = Vote(complete=True, digest=b"d" * 16), Vote(complete=False, digest=b"")


def group_of(count: int, *, clients: tuple[int, ...] = ()) -> Group:
    members = tuple(
        Member(
            peer_id=peer(f"host{n}"),
            address=None if n in clients else Address(f"host{n}", 1),
            role=Role.CLIENT if n in clients else Role.NODE,
        )
        for n in range(count)
    )
    return Group(group_id=b"g" * 16, members=members, side=16)


@asynccontextmanager
async def settlements(
    count: int, *, clients: tuple[int, ...] = ()
) -> AsyncIterator[tuple[SimNetwork, list[Settlement]]]:
    found: dict[int, Settlement] = {}

    async def live(number: int, opened: trio.Event) -> None:
        name = f"host{number}"
        listen = None if number in clients else Address(name, 1)
        async with open_rpc_peer(network.transport(name, peer(name)), peer_id=peer(name), listen=listen) as rpc:
            found[number] = Settlement(caller=rpc, prefix="x", rng=random.Random(number), timeout_s=20.0, silence_s=1.0)
            opened.set()
            await trio.sleep_forever()

    async with simulate(latency=Constant(0.05)) as network:
        for number in range(count):
            opened = trio.Event()
            network.start(f"host{number}", live, number, opened)
            await opened.wait()
        yield network, [found[number] for number in range(count)]


async def settled(
    members: list[Settlement], group: Group, votes: dict[int, Vote], *, after_s: dict[int, float] | None = None
) -> tuple[dict[int, Outcome | None], float]:
    """Outcomes that the voters are told, by number, and the seconds until all of them were."""
    outcomes: dict[int, Outcome | None] = {}
    began = trio.current_time()

    async def one(number: int, vote: Vote) -> None:
        members[number].open(group)
        await trio.sleep((after_s or {}).get(number, 0.0))
        outcomes[number] = await members[number].settle(group, vote)

    async with trio.open_nursery() as nursery:
        for number, vote in votes.items():
            nursery.start_soon(one, number, vote)
    return outcomes, trio.current_time() - began


@in_simulation
async def test_all_have_it_and_notes_add_up() -> None:
    async with settlements(3) as (_, members):
        votes = {n: Vote(complete=True, digest=WHOLE.digest, note=float(n)) for n in range(3)}
        outcomes, took_s = await settled(members, group_of(3), votes)
    assert set(outcomes.values()) == {Outcome(committed=True, notes=3.0)}
    assert took_s < 0.5


@in_simulation
async def test_one_that_lacks_a_part_has_all_average_once_more() -> None:
    async with settlements(3) as (_, members):
        outcomes, _ = await settled(members, group_of(3), {0: WHOLE, 1: BROKEN, 2: WHOLE})
    (outcome,) = set(outcomes.values())
    assert outcome is not None
    assert not outcome.committed
    assert outcome.group_after(group_of(3)).members == group_of(3).members


@in_simulation
async def test_other_averages_are_not_used() -> None:
    """A reducer that gave members different means is found out by their digests."""
    async with settlements(3) as (_, members):
        votes = {0: WHOLE, 1: WHOLE, 2: Vote(complete=True, digest=b"e" * 16)}
        outcomes, _ = await settled(members, group_of(3), votes)
    assert {outcome is not None and outcome.committed for outcome in outcomes.values()} == {False}


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_one_that_is_gone_is_not_waited_for(gone: int, silent: bool) -> None:
    """Whoever it is, the one that decides included; its vector is in the average of the others, or none is whole."""

    @in_simulation
    async def body() -> None:
        async with settlements(3) as (network, members):
            network.apply(HostDown(f"host{gone}", silent=silent))
            votes = {n: WHOLE for n in range(3) if n != gone}
            outcomes, took_s = await settled(members, group_of(3), votes)
            assert set(outcomes.values()) == {Outcome(committed=True)}
            assert took_s < 5

            again = Group(group_id=b"h" * 16, members=group_of(3).members, side=16)
            outcomes, _ = await settled(members, again, dict.fromkeys(votes, BROKEN))
            (outcome,) = set(outcomes.values())
            assert outcome is not None
            assert outcome.survivors == tuple(sorted(votes))

    body()


@in_simulation
async def test_an_outcome_that_somebody_knows_is_not_decided_anew() -> None:
    """The first member decides, tells the second and dies; the third, which lacks a part, hears it from the second."""
    async with settlements(3) as (network, members):
        group = group_of(3)
        for member in members:
            member.open(group)
        members[1]._cases[group.group_id].settle(Outcome(committed=True))
        network.apply(HostDown("host0"))
        assert await members[2].settle(group, BROKEN) == Outcome(committed=True)


@in_simulation
async def test_a_member_that_still_averages_is_waited_for() -> None:
    async with settlements(2) as (_, members):
        outcomes, took_s = await settled(members, group_of(2), {0: WHOLE, 1: WHOLE}, after_s={1: 6.0})
    assert set(outcomes.values()) == {Outcome(committed=True)}
    assert 6 <= took_s < 7


@in_simulation
async def test_one_that_gave_up_is_not() -> None:
    async with settlements(2) as (_, members):
        members[1].open(group_of(2))
        members[1].give_up(group_of(2))
        outcomes, took_s = await settled(members, group_of(2), {0: WHOLE})
    assert outcomes == {0: Outcome(committed=True)}
    assert took_s < 3


@in_simulation
async def test_a_client_votes_and_is_missed_only_for_a_while() -> None:
    async with settlements(3, clients=(0,)) as (_, members):
        group = group_of(3, clients=(0,))
        outcomes, took_s = await settled(members, group, dict.fromkeys(range(3), WHOLE))
        assert set(outcomes.values()) == {Outcome(committed=True)}
        assert took_s < 0.5
        again = Group(group_id=b"h" * 16, members=group.members, side=16)
        outcomes, took_s = await settled(members, again, {1: WHOLE, 2: WHOLE})
    assert set(outcomes.values()) == {Outcome(committed=True)}
    assert CLIENT_S <= took_s < CLIENT_S + 1


@in_simulation
async def test_a_member_that_was_not_told_the_weight_learns_it() -> None:
    """An auxiliary member whose part is empty; it may be the one that decides."""
    for unknown in range(3):
        async with settlements(3) as (_, members):
            votes = {n: Vote(complete=True, digest=WHOLE.digest, weight=96.5) for n in range(3)}
            votes[unknown] = Vote(complete=True, digest=b"")
            outcomes, _ = await settled(members, group_of(3), votes)
        assert set(outcomes.values()) == {Outcome(committed=True, weight=96.5)}


@in_simulation
async def test_an_average_of_other_weights_is_not_used() -> None:
    """Somebody has told reducers different weights: an auxiliary member, which has no digest, notices too."""
    async with settlements(3) as (_, members):
        votes = {n: Vote(complete=True, digest=WHOLE.digest, weight=96.5) for n in range(3)}
        votes[2] = Vote(complete=True, digest=b"", weight=97.5)
        outcomes, _ = await settled(members, group_of(3), votes)
    assert {outcome is not None and outcome.committed for outcome in outcomes.values()} == {False}


@pytest.mark.parametrize("weight", [-1.0, float("inf"), 1e16, 5, "x"])
def test_weights_that_cannot_be(weight: object) -> None:
    """The vote is refused; others go on without it."""

    @in_simulation
    async def body() -> None:
        async with settlements(2) as (_, members):
            members[0].open(group_of(2))
            vote = {"group": b"g" * 16, "complete": True, "digest": b"", "note": 0.0, "weight": weight}
            with pytest.raises(CallRefused, match="weight must be a float from 0 to"):
                await members[1].caller.call(group_of(2).members[0].contact, "averaging.x.settle", vote, timeout_s=5.0)

    body()


def test_the_rule_in_every_order() -> None:
    """Whatever order votes and losses come in, the outcome is that of who is there and what they have."""
    for order in itertools.permutations(range(3)):
        case = Case(group_of(3))
        for place in order:
            case.decide(random.Random(0))
            assert case.outcome is None
            if place == 2:
                case.lose(2)
            else:
                case.count(place, WHOLE if place else BROKEN, 0.0)
        case.decide(random.Random(0))
        assert case.outcome is not None
        assert case.outcome.survivors == (0, 1)


@pytest.mark.parametrize(
    ("count", "left", "goes_on"),
    [
        (5, (0, 1, 2), True),
        (5, (3, 4), False),
        (4, (0, 3), True),  # of two halves, the one with the first member
        (4, (1, 2), False),
        (2, (0,), True),
        (2, (1,), False),
    ],
)
def test_of_a_group_whose_members_lost_each_other_one_part_goes_on(
    count: int, left: tuple[int, ...], goes_on: bool
) -> None:
    group = group_of(count)
    following = Outcome(committed=False, survivors=left, next_id=b"n" * 16).group_after(group)
    assert has_majority(group, following) is goes_on
