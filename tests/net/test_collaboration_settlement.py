"""Progress of each peer, and the time at which the batch is full; and settlements: all use a group's average, or nobody
does, whoever votes what and goes in the middle."""

import itertools
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio

from dmoe_net.averaging.collaboration.progress import (
    NO_CHAIN,
    Pace,
    Report,
    forecast,
    next_chain,
    parse_report_untrusted,
    report_to_wire,
    reports_in_untrusted,
)
from dmoe_net.averaging.collaboration.rounds import has_majority
from dmoe_net.averaging.collaboration.settlement import CLIENT_S, Case, Outcome, Settlement, Vote
from dmoe_net.averaging.grouping.group import Group, Member, Role
from dmoe_net.dht.entries import Found
from dmoe_net.errors import CallRefused, RemoteProtocolError
from dmoe_net.identity import Address, PeerId
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.sim import simulate
from dmoe_net.transport.sim.events import Heal, HostDown, Partition
from dmoe_net.transport.sim.links import Constant
from dmoe_net.transport.sim.network import SimNetwork
from tests.net.sim_hosts import in_simulation, peer

WHOLE, BROKEN = Vote(complete=True, digest=b"d" * 16), Vote(complete=False, digest=b"")
COMMITTED = Outcome(committed=True)


def group_of(count: int, *, clients: tuple[int, ...] = (), group_id: bytes = b"g" * 16) -> Group:
    roles = [Role.CLIENT if n in clients else Role.NODE for n in range(count)]
    addresses = [None if n in clients else Address(f"host{n}", 1) for n in range(count)]
    members = tuple(
        Member(peer_id=peer(f"host{n}"), address=address, role=role)
        for n, (address, role) in enumerate(zip(addresses, roles, strict=True))
    )
    return Group(group_id=group_id, members=members, side=16)


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


def check_settled(outcomes: dict[int, Outcome | None], expected: Outcome = COMMITTED) -> None:
    assert set(outcomes.values()) == {expected}


@in_simulation
async def test_all_have_it_and_notes_add_up() -> None:
    async with settlements(3) as (_, members):
        votes = {n: Vote(complete=True, digest=WHOLE.digest, note=float(n)) for n in range(3)}
        outcomes, took_s = await settled(members, group_of(3), votes)
    check_settled(outcomes, Outcome(committed=True, notes=3.0))
    assert took_s < 0.5


@pytest.mark.parametrize(
    ("weight", "last"),
    [
        (None, BROKEN),
        # A reducer that gave members different means is found out by their digests.
        (None, Vote(complete=True, digest=b"e" * 16)),
        # Somebody has told reducers different weights: an auxiliary member, which has no digest, notices too.
        (96.5, Vote(complete=True, digest=b"", weight=97.5)),
    ],
    ids=["a part is missing", "another average", "other weights"],
)
@in_simulation
async def test_one_that_lacks_a_part_or_has_another_average_has_all_average_once_more(
    weight: float | None, last: Vote
) -> None:
    async with settlements(3) as (_, members):
        whole = replace(WHOLE, weight=weight)
        outcomes, _ = await settled(members, group_of(3), {0: whole, 1: whole, 2: last})
    (outcome,) = set(outcomes.values())
    assert not outcome.committed
    assert outcome.group_after(group_of(3)).members == group_of(3).members


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("gone", [0, 1, 2])
@in_simulation
async def test_one_that_is_gone_is_not_waited_for(gone: int, silent: bool) -> None:
    """The others have its vector in their average, or none is whole, also if it was the one that decides."""
    async with settlements(3) as (network, members):
        network.apply(HostDown(f"host{gone}", silent=silent))
        votes = {n: WHOLE for n in range(3) if n != gone}
        outcomes, took_s = await settled(members, group_of(3), votes)
        check_settled(outcomes)
        assert took_s < 5
        outcomes, _ = await settled(members, group_of(3, group_id=b"h" * 16), dict.fromkeys(votes, BROKEN))
        (outcome,) = set(outcomes.values())
        assert outcome.survivors == tuple(sorted(votes))


@in_simulation
async def test_an_outcome_that_somebody_knows_is_not_decided_anew() -> None:
    """Two decide while the third is cut off; the first dies, and the third, which lacks a part, asks the other."""
    async with settlements(3) as (network, members):
        group = group_of(3)
        members[2].open(group)
        network.apply(Partition((frozenset({"host2"}),)))
        outcomes, _ = await settled(members, group, {0: WHOLE, 1: WHOLE})
        check_settled(outcomes)
        network.apply(HostDown("host0"))
        network.apply(Heal())
        assert await members[2].settle(group, BROKEN) == COMMITTED


@in_simulation
async def test_a_member_that_still_averages_is_waited_for() -> None:
    async with settlements(2) as (_, members):
        outcomes, took_s = await settled(members, group_of(2), {0: WHOLE, 1: WHOLE}, after_s={1: 6.0})
    check_settled(outcomes)
    assert 6 <= took_s < 7


@in_simulation
async def test_a_member_that_gave_up_is_not_waited_for() -> None:
    async with settlements(2) as (_, members):
        members[1].open(group_of(2))
        members[1].give_up(group_of(2))
        outcomes, took_s = await settled(members, group_of(2), {0: WHOLE})
    assert outcomes == {0: COMMITTED}
    assert took_s < 3


@in_simulation
async def test_a_client_votes_and_is_missed_only_for_a_while() -> None:
    async with settlements(3, clients=(0,)) as (_, members):
        outcomes, took_s = await settled(members, group_of(3, clients=(0,)), dict.fromkeys(range(3), WHOLE))
        check_settled(outcomes)
        assert took_s < 0.5
        again = group_of(3, clients=(0,), group_id=b"h" * 16)
        outcomes, took_s = await settled(members, again, {1: WHOLE, 2: WHOLE})
    check_settled(outcomes)
    assert CLIENT_S <= took_s < CLIENT_S + 1


@in_simulation
async def test_a_member_that_was_not_told_the_weight_learns_it() -> None:
    """It is an auxiliary member whose part is empty, and may be the one that decides."""
    for unknown in range(3):
        async with settlements(3) as (_, members):
            votes = {n: replace(WHOLE, weight=96.5) for n in range(3)}
            votes[unknown] = Vote(complete=True, digest=b"")
            outcomes, _ = await settled(members, group_of(3), votes)
        check_settled(outcomes, Outcome(committed=True, weight=96.5))


@pytest.mark.parametrize("weight", [-1.0, float("inf"), 1e16, 5, "x"])
@in_simulation
async def test_weights_that_cannot_be(weight: object) -> None:
    async with settlements(2) as (_, members):
        members[0].open(group_of(2))
        vote = {"group": b"g" * 16, "complete": True, "digest": b"", "note": 0.0, "weight": weight}
        with pytest.raises(CallRefused, match="weight must be a float from 0 to"):
            await members[1].caller.call(group_of(2).members[0].contact, "averaging.x.settle", vote, timeout_s=5.0)


def test_the_rule_in_every_order() -> None:
    """The outcome is that of who is there and what they have, whatever order votes and losses come in."""
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
def test_one_part_of_a_group_that_fell_apart_goes_on(count: int, left: tuple[int, ...], goes_on: bool) -> None:
    group = group_of(count)
    following = Outcome(committed=False, survivors=left, next_id=b"n" * 16).group_after(group)
    assert has_majority(group, following) is goes_on


IDS = [PeerId(bytes([number]) * 32) for number in range(1, 6)]


def report(number: int, **changes: object) -> Report:
    who = {"peer_id": IDS[number], "address": Address("host", 7), "role": Role.NODE}
    progress = {"step": 3, "chain": NO_CHAIN, "samples": 10.0, "rate": 2.0, "at": 100.0, "trained": 300.0}
    return Report(**{**who, **progress, **changes})


def test_the_end_is_where_all_together_reach_the_target() -> None:
    own, others = report(0), [report(1, rate=3.0, at=98.0), report(2, samples=0.0, rate=5.0)]
    view = forecast(own, others, target=110, now=102.0)
    # 10 + 2 * 2, 10 + 3 * 4, 0 + 5 * 2 samples by now; 10 a second from now on.
    assert view.samples == pytest.approx(14 + 22 + 10)
    assert view.ends_at == pytest.approx(102 + (110 - 46) / 10)
    assert view.quorum == 2


def test_who_is_behind_or_in_another_chain_does_not_count() -> None:
    other = next_chain(NO_CHAIN, b"x")
    own = report(0)
    behind, lost = report(1, step=2), report(2, chain=other, trained=200.0)
    view = forecast(own, [behind, lost], target=100, now=100.0)
    assert view.peers == (own,)
    assert view.leader is None
    for ahead in (report(3, step=4, chain=other), report(3, chain=other, trained=301.0)):
        assert forecast(own, [behind, ahead], target=100, now=100.0).leader == ahead


def test_nobody_gathers_no_end_and_a_full_batch_is_over() -> None:
    idle = report(0, rate=0.0)
    assert forecast(idle, [], target=100, now=100.0).ends_at == math.inf
    assert forecast(idle, [], target=5, now=100.0).ends_at == 100.0
    assert forecast(report(0), [report(1, role=Role.AUXILIARY, samples=0.0)], target=14, now=102.0).quorum == 1


def test_a_report_comes_back_as_it_was_and_strangers_are_passed_over() -> None:
    sent = report(1, role=Role.CLIENT, address=None)
    assert parse_report_untrusted(report_to_wire(sent), IDS[1]) == sent
    wire = report_to_wire(sent)
    values = [wire, [*wire[:-1], math.inf], None, report_to_wire(replace(sent, at=1e9))]
    record = [Found(IDS[number], "", value, 200.0) for number, value in enumerate(values, start=1)]
    assert reports_in_untrusted(record, now=100.0) == [sent]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, "host", "both host and port or neither"),
        (2, "node", "a client has no address"),
        (3, -1, "the step of a report must be an integer"),
        (4, b"short", "the chain of a report must be 8 bytes"),
        (5, math.nan, "the samples of a report must be"),
        (6, 1e30, "the rate of a report must be"),
    ],
)
def test_a_report_that_is_none_is_refused(place: int, value: object, message: str) -> None:
    wire = list(report_to_wire(report(1, role=Role.CLIENT, address=None)))
    wire[place] = value
    with pytest.raises(RemoteProtocolError, match=message):
        parse_report_untrusted(wire, IDS[1])


def test_pace_follows_a_change_of_speed() -> None:
    pace = Pace()
    assert pace.rate == 0
    assert pace.seconds_for(10) == 0
    pace.measured(10, 1.0)
    assert pace.rate == pytest.approx(10.0)
    pace.measured(10, 3.0)
    assert pace.rate == pytest.approx(10 / 1.4)  # (0.8 * 10 + 0.2 * 10) / (0.8 * 1 + 0.2 * 3)
    pace.measured(10, 0.1)  # whatever was so much slower, such as compiling, is over
    assert pace.rate == pytest.approx(100.0)
    with pytest.raises(ValueError, match="must not be negative"):
        pace.measured(1, -1.0)
