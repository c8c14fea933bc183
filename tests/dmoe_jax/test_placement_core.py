"""The rules of claiming: who wins a claim, who takes how many, who gives up, and what is read and written for it."""

import heapq
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from dmoe_jax.directory.directory import Announcer
from dmoe_jax.directory.grid import expand_grid_pattern, parse_uid
from dmoe_jax.directory.members import declare_member
from dmoe_jax.placement.claiming import Actions, Claiming, Stage, View
from dmoe_jax.placement.config import PlacementConfig
from dmoe_jax.placement.contest import Standing, gives_up_to, standing_untrusted
from dmoe_jax.placement.sharing import MAX_PAIRS, Claimant, dealt_out, own_order, those_who_share, weight
from dmoe_jax.placement.survey import Claims, Survey, check_claimable, claims_in_untrusted
from dmoe_jax.placement.watch import to_watch
from dmoe_net.dht.entries import Found
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import Address, Contact, PeerId
from tests.net.direct_network import DirectNetwork, open_swarm

PEERS = [PeerId.draw(random.Random(number)) for number in range(6)]
CONTACTS = {peer_id: Contact(peer_id, Address(f"node{number}", 1)) for number, peer_id in enumerate(PEERS)}
UIDS = [f"ffn.{number}" for number in range(6)]


def config(most: int = 3, replicas: int = 1) -> PlacementConfig:
    return PlacementConfig(max_experts=most, replicas=replicas, settle_s=2.0, claim_life_s=12.0)


# What follows is a store that keeps its promise: a read sees what was written before it began. Reads and writes take
# any time up to more than the settling time, in any order; which is all that the theory of operation supposes. A read
# may also bring nothing at all.


@dataclass
class Peer:
    """A claimer, one task: it reads, decides and writes, again and again."""

    core: Claiming
    served: set[str] = field(default_factory=set)


def play(peers: list[Peer], durations: list[float], lost: list[bool], until_s: float = 80.0) -> None:
    """Claimers that want the same experts, whose operations take these times, again and again from the first one; of
    their reads these are lost, again and again.

    A write counts from the end of its operation, whole and at once. Each claimer announces an expert when it has won
    it, in the write after that, so that every gap is looked into.
    """
    claims: dict[str, dict[PeerId, bool]] = {uid: {} for uid in UIDS}
    holders: dict[str, dict[PeerId, Contact]] = {uid: {} for uid in UIDS}
    order, looks, ticket = iter(range(10**9)), iter(range(10**9)), iter(range(10**9))
    events: list[tuple[float, int, int, object]] = []

    def after(now: float, number: int, what: object) -> None:
        took_s = durations[next(order) % len(durations)]
        heapq.heappush(events, (now + took_s, next(ticket), number, what))

    for number in range(len(peers)):
        after(0.0, number, "read")
    while events and events[0][0] < until_s:
        now, _, number, what = heapq.heappop(events)
        peer, own = peers[number], PEERS[number]
        if what == "read":
            # What it sees is fixed when the reading begins, what it does with it is done when it ends.
            seen = View(read_at=now, holders=copied(holders), claims=copied(claims))
            after(now, number, view(at=now) if lost[next(looks) % len(lost)] else seen)
        elif isinstance(what, View):
            after(now, number, peer.core.step(what, peer.served, is_warm=True, now=now))
        elif isinstance(what, Actions):
            for uid in what.drop:
                claims[uid].pop(own, None)
            written = dict.fromkeys(what.claim, False) | dict.fromkeys(what.confirm, True)
            for uid, is_confirmed in written.items():
                claims[uid][own] = is_confirmed
            after(now, number, what.take_up + peer.core.wrote(dict.fromkeys(written, True), now))
        elif isinstance(what, list):
            for uid in what:
                peer.served.add(uid)
                holders[uid][own] = CONTACTS[own]
                peer.core.served(uid, "seed")
            after(now, number, "read")


def copied(record: Mapping[str, Mapping[PeerId, Any]]) -> dict[str, dict[PeerId, Any]]:
    return {uid: dict(each) for uid, each in record.items()}


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
    """However long reads and writes take, longer than the settling time too, and whatever reads are lost: no expert
    has more holders than are wanted, and no bound of a node is exceeded."""
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
            assert peer.core.totals.won == len(peer.served)
            assert peer.core.totals.adopted == {"seed": len(peer.served)}


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
    """Two seconds from the end of its write, and then it is confirmed."""
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
    """Others may have read in the meantime; whoever of them has confirmed too serves already, perhaps."""
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
    """And more of them than are wanted are to meet: whoever is dead is none."""
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
    """For a minute."""
    core = one_claimer()
    core.step(view(at=2.0, claims={"ffn.0": {PEERS[0]: False}}), (), is_warm=True, now=2.0)
    core.wrote({"ffn.0": True}, 2.5)
    core.failed("ffn.0", 3.0)
    assert core.totals.failed == 1
    assert core.step(view(at=62.0), (), is_warm=True, now=62.0).claim == []
    assert core.step(view(at=63.5), (), is_warm=True, now=63.5).claim == ["ffn.0"]


def test_a_claim_that_reached_nobody_is_none() -> None:
    """It counts as failed."""
    core = Claiming(PEERS[0], ["ffn.0"], config())
    core.step(view(at=0.0), (), is_warm=True, now=0.0)
    core.wrote({"ffn.0": False}, 0.0)
    assert (core.totals.failed, dict(core.held)) == (1, {})


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
    """Whatever the order: nobody above its room or its share, nobody what it holds, nothing twice, nothing left that
    somebody might take."""
    claimants = [
        Claimant(peer_id=peer_id, room=room, is_warm=warm) for peer_id, (room, warm) in zip(PEERS, rooms, strict=False)
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
    """With six claimers, 16,666 of 20,000 experts, and no more."""
    claimants = [Claimant(peer_id=peer_id, room=10**6, is_warm=True) for peer_id in PEERS]
    vacant: dict[str, tuple[PeerId, ...]] = {f"ffn.{row}.{column}": () for row in range(100) for column in range(200)}
    dealt = dealt_out(vacant, claimants)
    assert sum(map(len, dealt.values())) == MAX_PAIRS // 6
    assert dealt_out(dict(reversed(vacant.items())), claimants[::-1]) == dealt


def test_those_who_are_warm_go_first() -> None:
    """If they have room for all; those without room are not counted."""
    warm, cold, full = (
        Claimant(peer_id=peer_id, room=room, is_warm=is_warm)
        for peer_id, room, is_warm in zip(PEERS, (4, 9, 0), (True, False, True), strict=False)
    )
    assert those_who_share([warm, cold, full], 4) == [warm]
    assert those_who_share([warm, cold, full], 5) == [warm, cold]


def test_each_peer_walks_in_an_order_of_its_own() -> None:
    """It depends on the peer, and not on the order in which it heard of the experts."""
    orders = [own_order(peer_id, UIDS) for peer_id in PEERS]
    assert all(sorted(order) == UIDS for order in orders)
    assert len(set(map(tuple, orders))) > 1
    assert orders == [own_order(peer_id, reversed(UIDS)) for peer_id in PEERS]


def test_the_nearest_nodes_are_watched() -> None:
    """By XOR of the ids: 1 is nearer to 0 than 2 is, and a node does not watch itself."""

    def contact(number: int) -> Contact:
        return Contact(PeerId(number.to_bytes(32, "big")), Address("host", 1))

    nodes = {contact(number).peer_id: contact(number) for number in (4, 2, 1, 0, 7)}
    assert to_watch(contact(0).peer_id, nodes, 3) == [contact(1), contact(2), contact(4)]
    # 7 ^ 4 = 3, 7 ^ 2 = 5, 7 ^ 1 = 6.
    assert to_watch(contact(7).peer_id, nodes, 2) == [contact(4), contact(2)]


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6), st.integers(1, 3))
@settings(max_examples=40)
def test_the_weakest_give_up_until_as_many_are_left_as_are_wanted(rest: list[tuple[int, bool]], replicas: int) -> None:
    """Fewer updates; then the smaller id. Who was told to serve an expert keeps it. Those to whom one gives it up are
    as many as are wanted, and keep it."""
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
    for garbage in (
        {},
        {"updates": 3},
        {"updates": {"ffn.0": "7"}},
        {"updates": {"ffn.0": -1}},
        {"updates": {"ffn.0": True}},
        plain | {"claims": 1},
        plain | {"claims": {"fixed": 3}},
    ):
        with pytest.raises(RemoteProtocolError):
            standing_untrusted(garbage, "ffn.0", PEERS[0])


@pytest.mark.parametrize(
    "value",
    [
        "junk",
        [],
        [[3, 1]],
        [[3, 1], True],
        [[3, 1], [1]],
        [[3, "1"], [True]],
        [[3, -1], [True]],
        [[3, 1] * 1537, [True]],
        [[3], [True]],
        [[3, 2], [True]],  # an expert that we do not claim
        [[9, 1], [True]],  # one of another record
    ],
)
def test_only_well_formed_claims_are_read(value: Any) -> None:
    """Whatever a stranger writes is left out, and hides no other claims."""
    good = [[3, 1, 3, 0, 3, 1], [False, False, True]]
    record = [Found(PEERS[0], "claim", good, 9.0), Found(PEERS[1], "claim", value, 9.0), Found(PEERS[2], "", good, 9.0)]
    found = claims_in_untrusted("ffn.2d0", record, {"ffn.3.0", "ffn.3.1", "ffn.9.1"})
    assert found == {"ffn.3.1": {PEERS[0]: True}, "ffn.3.0": {PEERS[0]: False}}


GRID = {str(uid): uid for uid in expand_grid_pattern("ffn.[6:10].[0:3]")}


async def test_a_survey_sees_claims_holders_and_claimers(autojump_clock: MockClock) -> None:
    """Claims of one node share an entry for each record, also where two tasks write them at once. What is taken back is
    gone at once, and what is not written again after twelve seconds: a dead node's claims end."""
    async with open_swarm(DirectNetwork(), 4) as nodes:
        writer, host, reader = nodes[:3]
        assert host.address is not None
        claims, survey = Claims(writer, GRID, life_s=12.0), Survey(reader, "dmoe", GRID)

        async def seen() -> dict[str, bool]:
            await survey.scan()
            found = survey.view(reader.peer_id, frozenset(), read_at=trio.current_time()).claims
            assert all(each.keys() == {writer.peer_id} for each in found.values())
            return {uid: each[writer.peer_id] for uid, each in found.items()}

        assert await claims.write(["ffn.6.0", "ffn.9.0"]) == {"ffn.6.0": True, "ffn.9.0": True}
        assert await seen() == {"ffn.6.0": False, "ffn.9.0": False}
        await claims.write(["ffn.6.2"], confirmed=["ffn.6.0"], gone=["ffn.9.0"])
        assert await seen() == {"ffn.6.0": True, "ffn.6.2": False}
        await trio.sleep(8.0)

        async def write(uid: str) -> None:
            await claims.write(confirmed=[uid])

        async with trio.open_nursery() as nursery:
            for uid in ("ffn.6.1", "ffn.7.1", "ffn.7.2", "ffn.6.0"):
                nursery.start_soon(write, uid)
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
        await survey.scan()
        known = survey.view(reader.peer_id, frozenset(), read_at=trio.current_time())
        assert known.holders == {"ffn.6.0": {host.peer_id: contact}}
        assert known.claimants == (Claimant(peer_id=host.peer_id, room=3, is_warm=True),)
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
