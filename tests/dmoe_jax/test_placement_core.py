"""The rules of placement: who wins a claim, takes how many and gives up; how copies count; whom readers ask."""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from dmoe_jax.directory.directory import Announcer, ExpertDirectory, open_expert_directory
from dmoe_jax.directory.grid import Coordinates, expand_grid_pattern, parse_uid
from dmoe_jax.directory.members import declare_member
from dmoe_jax.directory.preference import Renewals, by_preference
from dmoe_jax.directory.records import Replica, Replicas, experts_in_untrusted
from dmoe_jax.placement.claiming import Actions, Claiming, Stage, View
from dmoe_jax.placement.config import PlacementConfig
from dmoe_jax.placement.contest import Standing, gives_up_to, standing_untrusted
from dmoe_jax.placement.copies import LEAST_WEIGHT, CopyLayout, Progress
from dmoe_jax.placement.rounds import bundles_of, group_of, next_round, unweighted, weighted
from dmoe_jax.placement.sharing import MAX_PAIRS, Claimant, dealt_out, those_who_share, weight
from dmoe_jax.placement.survey import Claims, Survey, check_claimable, claims_in_untrusted
from dmoe_net.dht.entries import Found
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import Address, Contact, PeerId
from tests.net.direct_network import DirectNetwork, open_swarm

PEERS = [PeerId.draw(random.Random(number)) for number in range(6)]
CONTACTS = {peer_id: Contact(peer_id, Address(f"node{number}", 1)) for number, peer_id in enumerate(PEERS)}
UIDS = [f"ffn.{number}" for number in range(6)]
SOME = list(CONTACTS.values())[:3]


def config(most: int = 3, replicas: int = 1) -> PlacementConfig:
    return PlacementConfig(max_experts=most, replicas=replicas, settle_s=2.0, claim_life_s=12.0)


@dataclass
class Peer:
    """A claimer, one task: it reads, decides and writes, again and again."""

    core: Claiming
    served: set[str] = field(default_factory=set)


def copied(record: Mapping[str, Mapping[PeerId, Any]]) -> dict[str, dict[PeerId, Any]]:
    return {uid: dict(each) for uid, each in record.items()}


def play(peers: list[Peer], durations: list[float], lost: list[bool], until_s: float = 80.0) -> None:
    """Claimers that want the same experts; what they do takes these times and their reads are lost so, again and again.

    A read sees what was written before it began, all that the theory of operation supposes; a write counts from its
    end. An expert that was won is announced in the next write, so that every gap is looked into.
    """
    claims: dict[str, dict[PeerId, bool]] = {uid: {} for uid in UIDS}
    holders: dict[str, dict[PeerId, Contact]] = {uid: {} for uid in UIDS}
    took_s, is_lost, ticket = itertools.cycle(durations), itertools.cycle(lost), itertools.count()
    events: list[tuple[float, int, int, object]] = []

    def after(now: float, number: int, what: object) -> None:
        heapq.heappush(events, (now + next(took_s), next(ticket), number, what))

    for number in range(len(peers)):
        after(0.0, number, "read")
    while events and events[0][0] < until_s:
        now, _, number, what = heapq.heappop(events)
        peer, own = peers[number], PEERS[number]
        if what == "read":
            # What it sees is fixed when the reading begins, what it does with it is done when it ends.
            seen = View(read_at=now, holders=copied(holders), claims=copied(claims))
            after(now, number, view(at=now) if next(is_lost) else seen)
        elif isinstance(what, View):
            after(now, number, peer.core.step(what, peer.served, is_warm=True, now=now))
        elif isinstance(what, Actions):
            for uid in what.drop:
                claims[uid].pop(own, None)
            for uid in (*what.claim, *what.confirm):
                claims[uid][own] = uid in what.confirm
            after(now, number, what.take_up + peer.core.wrote(dict.fromkeys([*what.claim, *what.confirm], True), now))
        elif isinstance(what, list):
            for uid in what:
                peer.served.add(uid)
                holders[uid][own] = CONTACTS[own]
                peer.core.served(uid, "seed")
            after(now, number, "read")


@given(
    st.integers(2, 4),
    st.integers(1, 3),
    st.lists(st.floats(0.01, 5.0), min_size=1, max_size=40),
    st.lists(st.booleans(), min_size=1, max_size=10),
)
@settings(max_examples=60)
def test_no_interleaving_gives_an_expert_more_holders_than_places(
    num_peers: int, replicas: int, durations: list[float], lost: list[bool]
) -> None:
    """However long operations take and whatever reads fail, no expert has too many holders and no node too much."""
    peers = [Peer(Claiming(peer_id, UIDS, config(replicas=replicas))) for peer_id in PEERS[:num_peers]]
    play(peers, durations, lost, until_s=60.0)
    for uid in UIDS:
        assert sum(uid in peer.served for peer in peers) <= replicas
    assert all(len(peer.served) <= 3 for peer in peers)


@pytest.mark.parametrize(("num_peers", "most", "replicas"), [(2, 3, 1), (3, 6, 2), (3, 6, 3)])
def test_in_the_end_all_experts_have_their_holders(num_peers: int, most: int, replicas: int) -> None:
    """Each of six experts ends with as many holders as are wanted, where the claimers have room for all."""
    for seed in range(2):
        rng = random.Random(seed)
        peers = [Peer(Claiming(peer_id, UIDS, config(most, replicas))) for peer_id in PEERS[:num_peers]]
        play(peers, [rng.uniform(0.05, 0.8) for _ in range(50)], [False])
        assert [sum(uid in peer.served for peer in peers) for uid in UIDS] == [replicas] * 6
        for peer in peers:
            assert (peer.core.totals.won, peer.core.totals.adopted) == (len(peer.served), {"seed": len(peer.served)})


def view(*, at: float, claims: Mapping[str, Mapping[PeerId, bool]] | None = None, **known: Any) -> View:
    return View(read_at=at, holders=known.pop("holders", {}), claims=claims or {}, **known)


def held_by(*peers: PeerId) -> dict[str, dict[PeerId, Contact]]:
    """These nodes announce the only expert."""
    return {"ffn.0": {peer_id: CONTACTS[peer_id] for peer_id in peers}}


def one_claimer(peer_id: PeerId = PEERS[0], replicas: int = 1) -> Claiming:
    """One that has written a claim for the only expert at 0 s."""
    core = Claiming(peer_id, ["ffn.0"], config(replicas=replicas))
    assert core.step(view(at=0.0), (), is_warm=True, now=0.0).claim == ["ffn.0"]
    assert core.wrote({"ffn.0": True}, 0.0) == []
    return core


def test_a_claim_is_read_again_only_after_it_has_settled() -> None:
    """It is read two seconds from the end of its write, and then confirmed."""
    core = one_claimer()
    own = {"ffn.0": {PEERS[0]: False}}
    assert core.settles_at() == 2.0
    assert core.step(view(at=1.9, claims=own), (), is_warm=True, now=2.5) == Actions()
    assert core.step(view(at=2.0, claims=own), (), is_warm=True, now=2.1).confirm == ["ffn.0"]
    # Read at 2.0 s and confirmed by 4.0 s: won.
    assert core.wrote({"ffn.0": True}, 4.0) == ["ffn.0"]
    assert core.held == {"ffn.0": Stage.WON}
    assert core.room(()) == 2


def test_a_late_confirmation_is_read_once_more() -> None:
    """Others may have read in the meantime, and one that has confirmed too may serve already."""
    for rival, won in ((False, ["ffn.0"]), (True, [])):
        core = one_claimer()
        core.step(view(at=2.0, claims={"ffn.0": {PEERS[0]: False}}), (), is_warm=True, now=2.1)
        assert core.wrote({"ffn.0": True}, 4.1) == []
        claims = {"ffn.0": {PEERS[0]: True, PEERS[1]: rival}}
        assert core.step(view(at=6.0, claims=claims), (), is_warm=True, now=6.0).take_up == []
        actions = core.step(view(at=6.1, claims=claims), (), is_warm=True, now=6.2)
        assert actions.take_up == won
        assert bool(actions.drop) == rival


BETTER, WORSE = sorted(PEERS[:2], key=lambda peer_id: weight(peer_id, "ffn.0"), reverse=True)
THIRD = PEERS[2]
OWN, BOTH = {WORSE: False}, {BETTER: False, WORSE: False}


@pytest.mark.parametrize(
    ("replicas", "claims", "known", "why"),
    [
        (1, BOTH, {}, f"{BETTER.short} has the better claim"),
        (1, {BETTER: True, WORSE: False}, {}, f"{BETTER.short} has confirmed its claim"),
        (1, OWN, {"holders": held_by(BETTER)}, f"it is served by {BETTER.short}"),
        (1, {}, {}, "the claim has ended before it was read"),
        (1, BOTH, {"dead": {BETTER}}, None),
        (1, OWN, {"holders": held_by(BETTER), "dead": {BETTER}}, None),
        # Of two places one is left, for one claimer: who holds the other one is none any more.
        (2, {BETTER: True, WORSE: False}, {"holders": held_by(BETTER)}, None),
        (2, BOTH, {}, f"{BETTER.short} has the better claim"),
        (2, {BETTER: True, WORSE: False}, {}, f"{BETTER.short} has confirmed its claim"),
        (2, OWN, {"holders": held_by(BETTER, THIRD)}, "it is served by "),
        (2, OWN, {"holders": held_by(BETTER, THIRD), "dead": {THIRD}}, None),
    ],
)
def test_why_claims_are_lost(replicas: int, claims: Any, known: dict[str, Any], why: str | None) -> None:
    """Enough holders, a better claim, a confirmed one, or no claim of ours; those of the dead do not count."""
    core = one_claimer(WORSE, replicas)
    actions = core.step(view(at=2.0, claims={"ffn.0": claims}, **known), (), is_warm=True, now=2.0)
    assert actions.drop.keys() == (set() if why is None else {"ffn.0"})
    assert actions.drop.get("ffn.0", "").startswith(why or "")
    assert actions.confirm == (["ffn.0"] if why is None else [])
    assert core.totals.lost == (why is not None)


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_expert_is_vacant_while_it_has_too_few_living_holders_and_nobody_claims_it(replicas: int) -> None:
    """If it has more than are wanted these are to meet; whoever is dead does not count."""
    others, own = PEERS[1 : replicas + 1], PEERS[0]

    def step(served: tuple[str, ...] = (), **known: Any) -> Actions:
        core = Claiming(own, ["ffn.0"], config(replicas=replicas))
        return core.step(view(at=0.0, **known), served, is_warm=True, now=0.0)

    assert step(holders=held_by(*others)).claim == []
    assert step(holders=held_by(*others), dead={others[0]}).claim == ["ffn.0"]
    assert step(holders=held_by(own)).claim == ["ffn.0"], "what it announced in an earlier life"
    assert step(claims={"ffn.0": {PEERS[5]: False}}).claim == []
    assert step(claims={"ffn.0": {PEERS[5]: True}}, dead={PEERS[5]}).claim == ["ffn.0"]
    assert step(claims={"ffn.0": {others[0]: True}}, holders=held_by(*others), dead={others[-1]}).claim == ["ffn.0"]
    met = step(("ffn.0",), holders=held_by(own, *others))
    assert met.contest == {"ffn.0": tuple(CONTACTS[peer_id] for peer_id in others)}
    assert step(("ffn.0",), holders=held_by(own, *others), dead={others[0]}) == Actions()


def test_what_cannot_be_taken_up_is_left_to_others_for_a_while() -> None:
    """It is claimed again after a minute. A claim that reached nobody has failed at once."""
    core = one_claimer()
    core.step(view(at=2.0, claims={"ffn.0": {PEERS[0]: False}}), (), is_warm=True, now=2.0)
    core.wrote({"ffn.0": True}, 2.5)
    core.failed("ffn.0", 3.0)
    assert core.totals.failed == 1
    assert core.step(view(at=62.0), (), is_warm=True, now=62.0).claim == []
    assert core.step(view(at=63.5), (), is_warm=True, now=63.5).claim == ["ffn.0"]
    core.wrote({"ffn.0": False}, 63.5)
    assert (core.totals.failed, dict(core.held)) == (2, {})


def test_what_others_leave_lying_is_taken_after_some_rounds() -> None:
    """A member that never claims what is dealt to it keeps nobody from being served."""
    core = Claiming(PEERS[0], UIDS, config(6))
    idle = Claimant(peer_id=PEERS[1], room=6, is_warm=True)
    first = core.step(view(at=0.0, claimants=(idle,)), (), is_warm=True, now=0.0).claim
    assert len(first) == 3
    core.wrote(dict.fromkeys(first, True), 0.0)
    own = {uid: {PEERS[0]: False} for uid in first}
    core.wrote(dict.fromkeys(core.step(view(at=2.0, claims=own), (), is_warm=True, now=2.0).confirm, True), 2.0)
    for uid in first:
        core.served(uid, "seed")
    # Three are left. In the next rounds one or two of them are dealt to each; after 6 s (three times the settling
    # time) the other's too may be taken, at most two, the fair share of three, in a round.
    left = core.step(view(at=6.0, claimants=(idle,)), set(first), is_warm=True, now=6.0).claim
    assert len(left) == 2


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=6),
    st.lists(st.sets(st.sampled_from(PEERS), max_size=2), max_size=40),
)
@settings(max_examples=40)
def test_dealing_out_is_fair_and_agreed_upon(
    num_vacant: int, rooms: list[tuple[int, bool]], holders: list[set[PeerId]]
) -> None:
    """Whatever the order, nobody gets more than its room or share or what it holds; nothing is left or dealt twice."""
    claimants = [
        Claimant(peer_id=each, room=room, is_warm=warm) for each, (room, warm) in zip(PEERS, rooms, strict=False)
    ]
    vacant = {f"ffn.{number}": holders[number] if number < len(holders) else set() for number in range(num_vacant)}
    dealt = dealt_out(vacant, claimants)
    assert dealt_out(dict(reversed(vacant.items())), claimants[::-1]) == dealt
    uids = [uid for hand in dealt.values() for uid in hand]
    assert len(set(uids)) == len(uids)
    share = -(-num_vacant // len(claimants))
    for each in claimants:
        hand = dealt[each.peer_id]
        assert not any(each.peer_id in vacant[uid] for uid in hand)
        assert len(hand) <= min(share, each.room)
        if len(hand) < min(share, each.room):
            assert all(each.peer_id in vacant[uid] for uid in vacant.keys() - set(uids))


@pytest.mark.slow
def test_of_very_many_experts_the_same_ones_are_dealt_out_by_all() -> None:
    """Six claimers are dealt 16,666 of 20,000 experts, and no more."""
    claimants = [Claimant(peer_id=peer_id, room=10**6, is_warm=True) for peer_id in PEERS]
    vacant: dict[str, tuple[PeerId, ...]] = {f"ffn.{row}.{column}": () for row in range(100) for column in range(200)}
    dealt = dealt_out(vacant, claimants)
    assert sum(map(len, dealt.values())) == MAX_PAIRS // 6
    assert dealt_out(dict(reversed(vacant.items())), claimants[::-1]) == dealt


def test_those_who_are_warm_go_first() -> None:
    """They go alone if they have room for all; those without room are not counted."""
    warm, cold, full = (
        Claimant(peer_id=peer_id, room=room, is_warm=is_warm)
        for peer_id, room, is_warm in zip(PEERS, (4, 9, 0), (True, False, True), strict=False)
    )
    assert those_who_share([warm, cold, full], 4) == [warm]
    assert those_who_share([warm, cold, full], 5) == [warm, cold]


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6), st.integers(1, 3))
@settings(max_examples=40)
def test_the_weakest_give_up_until_as_many_are_left_as_are_wanted(rest: list[tuple[int, bool]], replicas: int) -> None:
    """Fewer updates give way, then the smaller id, to as many as are wanted; who was told to serve keeps it."""
    nodes = [
        Standing(peer_id=peer_id, updates=updates, is_fixed=is_fixed)
        for peer_id, (updates, is_fixed) in zip(PEERS, rest, strict=False)
    ]
    to = {node.peer_id: gives_up_to(node, [each for each in nodes if each != node], replicas) for node in nodes}
    kept = [node for node in nodes if not to[node.peer_id]]
    assert len(kept) == max(min(replicas, len(nodes)), sum(is_fixed for _, is_fixed in rest))
    gone = [node for node in nodes if to[node.peer_id]]
    assert not any(node.is_fixed for node in gone)
    for weak in gone:
        assert len(to[weak.peer_id]) == replicas
        for strong in to[weak.peer_id]:
            assert strong in kept
            assert strong.is_fixed or (strong.updates, strong.peer_id) > (weak.updates, weak.peer_id)


def test_standings_are_read_from_a_status() -> None:
    """A node without claims serves what it was told to; garbage is refused."""
    plain = {"updates": {"ffn.0": 7}}
    assert standing_untrusted(plain, "ffn.0", PEERS[0]) == Standing(peer_id=PEERS[0], updates=7, is_fixed=True)
    assert standing_untrusted(plain, "ffn.1", PEERS[0]) is None
    claiming = plain | {"claims": {"fixed": []}}
    assert standing_untrusted(claiming, "ffn.0", PEERS[0]) == Standing(peer_id=PEERS[0], updates=7)
    counts = ({"updates": {"ffn.0": count}} for count in ("7", -1, True))
    for garbage in ({}, {"updates": 3}, *counts, plain | {"claims": 1}, plain | {"claims": {"fixed": 3}}):
        with pytest.raises(RemoteProtocolError):
            standing_untrusted(garbage, "ffn.0", PEERS[0])


# The last but one is an expert that we do not claim, the last one of another record.
WRONG: list[Any] = [[3, "1"], [3, -1], [3, 1] * 1537, [3], [3, 2], [9, 1]]


@pytest.mark.parametrize(
    "value", ["junk", [], [[3, 1]], [[3, 1], True], [[3, 1], [1]], *([numbers, [True]] for numbers in WRONG)]
)
def test_only_well_formed_claims_are_read(value: Any) -> None:
    """Whatever a stranger writes is left out, and hides no other claims."""
    good = [[3, 1, 3, 0, 3, 1], [False, False, True]]
    record = [Found(PEERS[0], "claim", good, 9.0), Found(PEERS[1], "claim", value, 9.0), Found(PEERS[2], "", good, 9.0)]
    found = claims_in_untrusted("ffn.2d0", record, {"ffn.3.0", "ffn.3.1", "ffn.9.1"})
    assert found == {"ffn.3.1": {PEERS[0]: True}, "ffn.3.0": {PEERS[0]: False}}


GRID = {str(uid): uid for uid in expand_grid_pattern("ffn.[6:10].[0:3]")}


async def test_a_survey_sees_claims_holders_and_claimers(autojump_clock: MockClock) -> None:
    """Claims share an entry for each record, also if two tasks write; they end when taken back or not renewed."""
    async with open_swarm(DirectNetwork(), 4) as (writer, host, reader, _):
        assert host.address is not None
        claims, survey = Claims(writer, GRID, life_s=12.0), Survey(reader, "dmoe", GRID)

        async def known() -> View:
            await survey.scan()
            return survey.view(reader.peer_id, frozenset(), read_at=trio.current_time())

        async def seen() -> dict[str, bool]:
            return {uid: each[writer.peer_id] for uid, each in (await known()).claims.items()}

        assert await claims.write(["ffn.6.0", "ffn.9.0"]) == {"ffn.6.0": True, "ffn.9.0": True}
        assert await seen() == {"ffn.6.0": False, "ffn.9.0": False}
        await claims.write(["ffn.6.2"], confirmed=["ffn.6.0"], gone=["ffn.9.0"])
        assert await seen() == {"ffn.6.0": True, "ffn.6.2": False}
        async with trio.open_nursery() as nursery:
            for uid in ("ffn.6.1", "ffn.7.1", "ffn.7.2", "ffn.6.0"):
                nursery.start_soon(partial(claims.write, confirmed=[uid]))
        assert await seen() == dict.fromkeys(("ffn.6.0", "ffn.6.1", "ffn.7.1", "ffn.7.2"), True) | {"ffn.6.2": False}
        await claims.withdraw_all()
        assert await seen() == {}
        await claims.write(["ffn.6.0"])
        await trio.sleep(11.0)
        assert await seen() == {"ffn.6.0": False}
        await trio.sleep(1.5)
        assert await seen() == {}

        contact = Contact(host.peer_id, host.address)
        await Announcer(host, contact, life_s=30.0).announce([GRID["ffn.6.0"], parse_uid("ffn.6.3")])
        facts = {"role": "node", "state": "serving", "room": 3, "scope": survey.scope}
        await declare_member(host, "dmoe", contact, facts, life_s=30.0)
        await declare_member(writer, "dmoe", None, facts | {"scope": "of other experts"}, life_s=30.0)
        found = await known()
        assert found.holders == {"ffn.6.0": {host.peer_id: contact}}
        assert found.claimants == (Claimant(peer_id=host.peer_id, room=3, is_warm=True),)
        assert survey.nodes() == {host.peer_id: contact}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_experts": -1}, "max_experts must be an integer of at least 0, got -1"),
        ({"replicas": 0}, "replicas must be an integer of at least 1 and at most 8, got 0"),
        ({"replicas": 9}, "replicas must be an integer of at least 1 and at most 8, got 9"),
        ({"settle_s": 0.0}, "settle_s must be a positive number"),
        ({"gather_s": -1.0}, "gather_s must be 0 or a number of seconds, got -1"),
        ({"settle_s": 7.0}, "claim_life_s must exceed twice settle_s.*got 12.0 and 7.0"),
        ({"average_period_s": 0.0}, "average_period_s must be a positive"),
        ({"average_timeout_s": float("nan")}, "average_timeout_s must be a positive"),
        ({"average_period_s": 10.0}, "average_period_s must be at least 23 .*, got 10"),
        ({"of": ("ffn.0",)}, "of=.* names patterns to claim, and max_experts is 0"),
    ],
)
def test_settings_check_themselves(setting: dict[str, Any], message: str) -> None:
    """The message names the value."""
    with pytest.raises(ValueError, match=message):
        PlacementConfig(**setting)


def test_patterns_too_large_to_look_after_are_refused() -> None:
    """More experts, or records, than one node can look at again and again."""
    uid = parse_uid("ffn.0")
    with pytest.raises(ValueError, match="of 1 to 65536 experts, got patterns of 65537"):
        check_claimable({str(number): uid for number in range(65_537)})
    with pytest.raises(ValueError, match="in 257 groups of rows of their grids, at most 256"):
        check_claimable({str(uid): uid for uid in expand_grid_pattern("ffn.[0:2049].0")})


def state(*values: float, count: int = 0) -> dict[str, Any]:
    """State of an expert with two parameters and Adam: parameters, first and second moments."""
    w, m, v = (np.full(2, value, np.float32) for value in values)
    return {"params": {"w": w}, "opt_state": {"m": m, "v": v, "count": np.int32(count)}}


def test_parameters_take_the_difference_and_moments_the_average() -> None:
    """Sent 1, 2, 3; the average is 2, 4, 1; meanwhile parameters went to 1.5: 1.5 + (2 - 1) = 2.5. A second moment is
    never below zero, as 0.5 + (1 - 3) would be. Counts stay."""
    sent, now, average = state(1, 2, 3, count=5), state(1.5, 2.5, 0.5, count=7), state(2, 4, 1, count=9)
    layout = CopyLayout(sent)
    assert layout.size == 6
    sent, average = layout.vector(sent), layout.vector(average)
    new = layout.with_average(now, sent, average)
    jax.tree.map(np.testing.assert_array_equal, new, state(2.5, 4, 1, count=7))
    for broken in (np.nan, np.inf):
        vector = np.where(np.arange(6) == 3, broken, average)
        assert layout.with_average(now, sent, vector) is None
    assert layout.with_average(state(np.nan, 0, 0), sent, average) is None


def test_bfloat16_stays_bfloat16() -> None:
    """An average of float32 becomes what the expert has."""
    tree = {"params": {"w": jnp.ones(3, jnp.bfloat16)}, "opt_state": ()}
    layout = CopyLayout(tree)
    assert layout.vector(tree).dtype == np.float32
    new = layout.with_average(tree, layout.vector(tree), np.full(3, 2.0, np.float32))
    np.testing.assert_array_equal(new["params"]["w"], [2, 2, 2])


def test_a_copy_counts_as_what_it_has_learnt_since_all_were_the_same() -> None:
    """All updates from a seed, and those after another's state; a copy that is behind counts nearly nothing."""
    seeded, newcomer, behind = Progress(), Progress(), Progress()
    assert seeded.weight(0) == LEAST_WEIGHT
    assert seeded.weight(500) == 500
    newcomer.met(500)
    seeded.gave(500)
    assert (newcomer.weight(507), seeded.weight(520)) == (7, 20)
    behind.missed()
    assert behind.weight(40) == LEAST_WEIGHT
    behind.met(40)
    assert behind.weight(42) == 2
    seeded.met(520)
    seeded.gave(530)  # to a third one: those that average with it already know less of it
    assert seeded.weight(530) == 10


def test_a_copy_that_is_not_finite_spoils_no_others() -> None:
    """It counts nothing in the mean; where none counts there is no mean."""
    sound, broken = np.array([1, 2], np.float32), np.array([np.nan, 2], np.float32)
    mean = np.mean([weighted([sound, broken], [2.0, 1.0]), weighted([broken, broken], [2.0, 1.0])], axis=0)
    first, second = unweighted(mean, [2, 2])
    np.testing.assert_array_equal(first, sound)
    assert second is None


def test_bundles_are_of_the_same_nodes_and_bounded() -> None:
    """They are in the order of names; experts that nobody else serves are left out, and one too large is alone."""
    ab, abc, alone = frozenset(SOME[:2]), frozenset(SOME), frozenset(SOME[:1])
    members = {"e.3": ab, "e.1": ab, "e.2": abc, "e.4": ab, "e.5": alone, "e.6": ab}
    bundles = bundles_of(members, dict.fromkeys(members, 4) | {"e.6": 99}, max_size=8)
    assert [bundle.uids for bundle in bundles] == [("e.1", "e.3"), ("e.2",), ("e.4",), ("e.6",)]
    assert set(bundles[1].members) == abc
    assert list(bundles[0].members) == sorted(ab, key=lambda each: each.peer_id)


def test_those_who_see_the_same_find_the_same_group() -> None:
    """Another round, swarm, expert, shape or member is another group."""
    ((bundle,), (same,), (larger,)) = (
        bundles_of({"e.1": frozenset(hosts)}, {"e.1": 4}) for hosts in (SOME[:2], reversed(SOME[:2]), SOME)
    )

    def group(bundle: Any, swarm: str = "s", number: int = 1, schema: str = "w") -> Any:
        return group_of(bundle, swarm=swarm, round_number=number, schemas=[schema])

    assert group(bundle) == group(same)
    groups = [group(bundle), group(bundle, number=2), group(bundle, "t"), group(bundle, schema="v"), group(larger)]
    assert len({each.group_id for each in groups}) == 5
    assert sorted(groups[0].slots) == [0, 1]
    assert [next_round(now, 30.0) for now in (61.0, 90.0)] == [(3, 90.0), (4, 120.0)]


UID = parse_uid("ffn.1.7")


def test_a_node_counts_once_however_often_it_announces_an_expert() -> None:
    """It counts with what lives longest, and would otherwise draw several shares of the load."""
    ends = {"": 9.0, "1": 30.0, "2": 20.0}
    record = [Found(SOME[0].peer_id, suffix, ["node0", 1, [1, 7], None], at) for suffix, at in ends.items()]
    assert experts_in_untrusted("ffn.2d0", record) == {(1, 7): (Replica(contact=SOME[0], ends_at=30.0, due_at=30.0),)}


def experts(count: int, hosts: dict[int, range]) -> dict[Coordinates, Replicas]:
    """Experts 0..count-1 of row 1, and which of them each host serves."""
    return {
        (1, index): tuple(Replica(contact=SOME[host], ends_at=100.0) for host in hosts if index in hosts[host])
        for index in range(count)
    }


def firsts(found: dict[Coordinates, Replicas], readers: int) -> Counter[int]:
    """Number of times that each host comes first, over many readers and all experts."""
    rng, counts = random.Random(5), Counter[int]()
    for _ in range(readers):
        for replicas in by_preference(found, "ffn", PeerId.draw(rng)).values():
            counts[SOME.index(replicas[0].contact)] += 1
    return counts


def test_readers_spread_over_replicas() -> None:
    """2400 choices of 3: 800 each, deviation 23; when one leaves, nothing changes but for readers who had it first."""
    three, two = (experts(24, {host: range(24) for host in range(count)}) for count in (3, 2))
    assert all(abs(count - 800) < 4 * 23 for count in firsts(three, 100).values())
    before, after = (by_preference(found, "ffn", PeerId.draw(random.Random(9))) for found in (three, two))
    for coordinates, replicas in before.items():
        assert tuple(each for each in replicas if each.contact != SOME[2]) == after[coordinates]


@pytest.mark.slow
def test_a_node_that_serves_more_is_preferred_less() -> None:
    """A serves 8 experts, B two of them: each of the two goes to B with 1/2 : 1/8, four of five times."""
    counts = firsts(experts(8, {0: range(8), 1: range(2)}), 200)
    assert counts[0] + counts[1] == 1600
    assert abs(counts[1] - 320) < 4 * 8, "400 choices of 0.8: a deviation of 8"


def test_who_failed_is_waited_for_until_it_announces_itself_anew() -> None:
    """The first look after a failure may find an announcement from before it; only a later end is a sign of life."""
    renewals, who, failed = Renewals(), SOME[0].peer_id, dict[PeerId, float]()

    def awaited(ends_at: float, asked_at: float) -> bool:
        renewals.note([Replica(contact=SOME[0], ends_at=ends_at)], failed.get, asked_at)
        return renewals.awaits(who, failed.get(who))

    assert not awaited(30.0, 0.0)
    failed[who] = 10.0
    assert renewals.awaits(who, 10.0)
    # Asked before it failed; perhaps announced before it failed; and so again.
    assert [awaited(40.0, asked_at) for asked_at in (9.0, 11.0, 15.0)] == [True] * 3
    assert not awaited(50.0, 20.0)
    failed[who] = 30.0
    assert awaited(60.0, 31.0), "it failed again"
    assert not renewals.awaits(who, None)


@asynccontextmanager
async def two_hosts() -> AsyncIterator[tuple[dict[Contact, Announcer], ExpertDirectory, Callable[[], Any]]]:
    """Two hosts of an expert that have announced it for 30 s, a reader, and the host that it would ask."""
    async with open_swarm(DirectNetwork(), 4) as nodes:
        hosts = {Contact(node.peer_id, node.address): node for node in nodes[:2] if node.address is not None}
        announcers = {host: Announcer(node, host, life_s=30.0) for host, node in hosts.items()}
        for announcer in announcers.values():
            assert await announcer.announce([UID]) == []
        async with open_expert_directory(nodes[3]) as directory:

            async def chosen() -> Contact | None:
                return (await directory.living("ffn", (2, 8))).get(UID.coordinates)

            yield announcers, directory, chosen


async def test_a_reader_goes_on_to_another_replica(autojump_clock: MockClock) -> None:
    """One that is busy or failed comes last, the latter until it is announced anew; the expert is dead when all are."""
    async with two_hosts() as (announcers, directory, chosen):
        first = await chosen()
        (other,) = (host for host in announcers if host != first)
        assert directory.another(str(UID), first) == other
        directory.busy(first, 2.0)
        assert await chosen() == other
        await trio.sleep(2.0)
        assert await chosen() == first
        directory.avoid(str(UID), first, "refused")
        assert await chosen() == other
        await trio.sleep(1.0)
        assert await chosen() == first
        directory.health.failed((first.peer_id, "expert"), trio.current_time(), "no answer")
        assert not directory.answers(str(UID), first)
        await trio.sleep(5.0)
        assert directory.answers(str(UID), first), "its pause of 1 s is over"
        assert await chosen() == other
        directory.health.failed((other.peer_id, "expert"), trio.current_time(), "no answer")
        assert await chosen() == first
        directory.health.succeeded((other.peer_id, "expert"))
        assert await chosen() == other
        await trio.sleep(8.0)
        for announcer in announcers.values():
            await announcer.announce([UID])
        await trio.sleep(10.0)
        assert await chosen() == first, "it has announced itself since"
        for announcer in announcers.values():
            await announcer.withdraw([UID])
        await trio.sleep(10.0)
        assert await chosen() is None


async def test_one_that_is_late_to_announce_itself_comes_last(autojump_clock: MockClock) -> None:
    """In the last third of its announcement another one is preferred; alone it is listed to the end."""
    async with two_hosts() as (announcers, _, chosen):
        silent = await chosen()
        (other,) = (host for host in announcers if host != silent)
        for _ in range(4):
            assert await chosen() == silent
            await announcers[other].announce([UID])
            await trio.sleep(6.0)
        assert await chosen() == other
        await announcers[other].withdraw([UID])
        await trio.sleep(3.0)  # until the reader has looked again
        assert await chosen() == silent
