"""The rules of claiming: who wins a claim, who takes how many, who gives up. No network, no clock."""

import heapq
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmoe_jax.claims.claiming import Actions, ClaimConfig, Claiming, Listing, Stage, View
from dmoe_jax.claims.contest import Standing, gives_up, standing_untrusted
from dmoe_jax.claims.records import check_claimable, claim_item, claims_key, read_claims, read_listings, withdrawal_item
from dmoe_jax.claims.sharing import MAX_PAIRS, Claimant, dealt_out, own_order, those_who_share, weight
from dmoe_jax.claims.watch import to_watch
from dmoe_jax.directory.grid import expand_grid_pattern, parse_uid
from dmoe_net.dht.messages import contact_to_wire
from dmoe_net.dht.records import Dictionary, Entry, make_entry
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import Address, Contact, PeerId

PEERS = [PeerId.draw(random.Random(number)) for number in range(6)]
CONTACTS = [Contact(peer_id, Address(f"node{number}", 1)) for number, peer_id in enumerate(PEERS)]
CONFIG = ClaimConfig(max_experts=3, settle_s=2.0, lifetime_s=12.0)
UIDS = [f"ffn.{number}" for number in range(6)]


# What follows is a store that keeps its promise: a read sees what was written before it began. Reads and writes take
# any time up to more than the settling time, in any order; which is all that the theory of operation supposes.


@dataclass
class Peer:
    """A claimer, one task: it reads, decides and writes, again and again."""

    core: Claiming
    served: set[str] = field(default_factory=set)


@dataclass
class Store:
    """Claims and announcements, whole and at once; a write counts from the end of its operation."""

    claims: dict[str, dict[PeerId, bool]] = field(default_factory=dict)
    listed: dict[str, Listing] = field(default_factory=dict)


def play(num_peers: int, durations: list[float], until_s: float = 80.0) -> list[Peer]:
    """Claimers that want the same experts, whose operations take these times, again and again from the first one.

    Each announces an expert when it has won it, in the write after that, so that every gap is looked into.
    """
    peers = [Peer(Claiming(PEERS[number], UIDS, CONFIG)) for number in range(num_peers)]
    store, order = Store(), iter(range(10**9))
    times = iter(lambda: durations[next(order) % len(durations)], None)
    events: list[tuple[float, int, int, object]] = []
    ticket = iter(range(10**9))

    def at(when: float, number: int, what: object) -> None:
        heapq.heappush(events, (when, next(ticket), number, what))

    for number in range(num_peers):
        at(next(times), number, "read")
    while events and events[0][0] < until_s:
        now, _, number, what = heapq.heappop(events)
        peer, own = peers[number], PEERS[number]
        if what == "read":
            # What it sees is fixed when the reading begins, what it does with it is done when it ends.
            claims = {uid: dict(each) for uid, each in store.claims.items()}
            view = View(read_at=now, listed=dict(store.listed), claims=claims)
            at(now + next(times), number, view)
        elif isinstance(what, View):
            actions = peer.core.step(what, peer.served, is_warm=True, now=now)
            at(now + next(times), number, actions)
        elif isinstance(what, Actions):
            for uid in what.drop:
                store.claims.get(uid, {}).pop(own, None)
            for uid in what.confirm:
                store.claims.setdefault(uid, {})[own] = True
            won = what.take_up + peer.core.wrote(dict.fromkeys(what.confirm, True), now)
            for uid in what.claim:
                store.claims.setdefault(uid, {})[own] = False
            peer.core.wrote(dict.fromkeys(what.claim, True), now)
            at(now + next(times), number, won)
        elif isinstance(what, list):
            for uid in what:
                peer.served.add(uid)
                store.listed[uid] = Listing(contact=CONTACTS[number], expiration=1e9)
                peer.core.served(uid, "seed")
            at(now + next(times), number, "read")
    return peers


@given(st.integers(2, 4), st.lists(st.floats(0.01, 5.0), min_size=1, max_size=40))
@settings(max_examples=40, deadline=None)
def test_no_interleaving_gives_an_expert_to_two(num_peers: int, durations: list[float]) -> None:
    """However long reads and writes take, longer than the settling time too: one winner each, and no bound exceeded."""
    peers = play(num_peers, durations)
    served = [uid for peer in peers for uid in peer.served]
    assert len(served) == len(set(served))
    assert all(len(peer.served) <= CONFIG.max_experts for peer in peers)


def test_in_the_end_all_experts_are_served() -> None:
    """Two claimers have room for three experts each, and there are six."""
    for seed in range(5):
        rng = random.Random(seed)
        peers = play(2, [rng.uniform(0.05, 0.8) for _ in range(50)])
        assert [len(peer.served) for peer in peers] == [3, 3]
        totals = peers[0].core.totals
        assert (totals.won, totals.adopted) == (3, {"seed": 3})


def view(*, at: float, claims: Mapping[str, Mapping[PeerId, bool]] | None = None, **known: object) -> View:
    return View(read_at=at, listed=known.pop("listed", {}), claims=claims or {}, **known)  # type: ignore[arg-type]


def settled(core: Claiming, uid: str = "ffn.0") -> None:
    """Have it claim an expert at 0 s."""
    assert core.step(view(at=0.0), (), is_warm=True, now=0.0).claim == [uid]
    assert core.wrote({uid: True}, 0.0) == []


def one_claimer(number: int = 0) -> Claiming:
    core = Claiming(PEERS[number], ["ffn.0"], CONFIG)
    settled(core)
    return core


def test_a_claim_is_read_again_only_after_it_has_settled() -> None:
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


def test_why_claims_are_lost() -> None:
    """A better claim, a confirmed one, an announcement, or no claim of ours; those of the dead do not count."""
    better, worse = sorted(PEERS[:2], key=lambda peer_id: weight(peer_id, "ffn.0"), reverse=True)
    number = PEERS.index(worse)
    both = {"ffn.0": {better: False, worse: False}}
    listed = {"ffn.0": Listing(contact=CONTACTS[PEERS.index(better)], expiration=99.0)}
    own = {"ffn.0": {worse: False}}
    for seen, why in [
        (view(at=2.0, claims=both), f"{better.short} has the better claim"),
        (view(at=2.0, claims={"ffn.0": {better: True, worse: False}}), f"{better.short} has confirmed its claim"),
        (view(at=2.0, claims=own, listed=listed), f"{better.short} serves it"),
        (view(at=2.0), "the claim has ended before it was read"),
        (view(at=2.0, claims=both, dead={better}), None),
        (view(at=2.0, claims=own, listed=listed, dead={better}), None),
    ]:
        core = one_claimer(number)
        actions = core.step(seen, (), is_warm=True, now=2.0)
        assert actions.drop == ({} if why is None else {"ffn.0": why})
        assert actions.confirm == (["ffn.0"] if why is None else [])
        assert core.totals.lost == (why is not None)


def test_what_cannot_be_taken_up_is_left_to_others_for_a_while() -> None:
    core = one_claimer()
    core.step(view(at=2.0, claims={"ffn.0": {PEERS[0]: False}}), (), is_warm=True, now=2.0)
    core.wrote({"ffn.0": True}, 2.5)
    core.failed("ffn.0", 3.0)
    assert core.totals.failed == 1
    assert core.step(view(at=62.0), (), is_warm=True, now=62.0).claim == []
    assert core.step(view(at=63.5), (), is_warm=True, now=63.5).claim == ["ffn.0"]


def test_a_claim_that_reached_nobody_is_none() -> None:
    core = Claiming(PEERS[0], ["ffn.0"], CONFIG)
    core.step(view(at=0.0), (), is_warm=True, now=0.0)
    core.wrote({"ffn.0": False}, 0.0)
    assert (core.totals.failed, dict(core.held)) == (1, {})


def test_what_others_leave_lying_is_taken_after_some_rounds() -> None:
    """A member that never claims what is dealt to it keeps nobody from being served."""
    core = Claiming(PEERS[0], UIDS, ClaimConfig(max_experts=6))
    idle = Claimant(peer_id=PEERS[1], room=6, is_warm=True)
    first = core.step(view(at=0.0, claimants=(idle,)), (), is_warm=True, now=0.0).claim
    assert len(first) == 3
    core.wrote(dict.fromkeys(first, True), 0.0)
    own = {uid: {PEERS[0]: False} for uid in first}
    core.wrote(dict.fromkeys(core.step(view(at=2.0, claims=own), (), is_warm=True, now=2.0).confirm, True), 2.0)
    for uid in first:
        core.served(uid, "seed")
    served = set(first)
    # Three are left. In the next rounds one or two of them are dealt to each; after 6 s (three times the settling
    # time) the other's too may be taken, at most two, the fair share of three, in a round.
    left = core.step(view(at=6.0, claimants=(idle,)), served, is_warm=True, now=6.0).claim
    assert len(left) == 2


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=6))
def test_dealing_out_is_fair_and_agreed_upon(num_vacant: int, rooms: list[tuple[int, bool]]) -> None:
    """Whatever the order: nobody above its room or its share, nothing twice, nothing left that somebody might take."""
    claimants = [
        Claimant(peer_id=peer_id, room=room, is_warm=warm) for peer_id, (room, warm) in zip(PEERS, rooms, strict=False)
    ]
    vacant = [f"ffn.{number}" for number in range(num_vacant)]
    dealt = dealt_out(vacant, claimants)
    assert dealt_out(vacant[::-1], claimants[::-1]) == dealt
    uids = [uid for hand in dealt.values() for uid in hand]
    assert len(set(uids)) == len(uids)
    share = -(-num_vacant // len(claimants))
    full = [len(dealt[each.peer_id]) == min(share, each.room) for each in claimants]
    assert all(len(dealt[each.peer_id]) <= min(share, each.room) for each in claimants)
    assert all(full) or len(uids) == num_vacant


@pytest.mark.slow
def test_of_very_many_experts_the_same_ones_are_dealt_out_by_all() -> None:
    """With six claimers, 16,666 of 20,000 experts, and no more."""
    claimants = [Claimant(peer_id=peer_id, room=10**6, is_warm=True) for peer_id in PEERS]
    vacant = [f"ffn.{row}.{column}" for row in range(100) for column in range(200)]
    dealt = dealt_out(vacant, claimants)
    assert sum(map(len, dealt.values())) == MAX_PAIRS // 6
    assert dealt_out(reversed(vacant), claimants[::-1]) == dealt


def test_those_who_are_warm_go_first() -> None:
    """If they have room for all; those without room are not counted."""
    warm, cold, full = (
        Claimant(peer_id=peer_id, room=room, is_warm=is_warm)
        for peer_id, room, is_warm in zip(PEERS, (4, 9, 0), (True, False, True), strict=False)
    )
    assert those_who_share([warm, cold, full], 4) == [warm]
    assert those_who_share([warm, cold, full], 5) == [warm, cold]


def test_each_peer_walks_in_an_order_of_its_own() -> None:
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


def test_exactly_one_of_two_gives_up() -> None:
    """Fewer updates; then the smaller id. Who was told to serve an expert keeps it; two of these both do."""
    small, large = sorted(PEERS[:2])
    for one, other, gone in [
        (Standing(peer_id=large, updates=3), Standing(peer_id=small, updates=4), (True, False)),
        (Standing(peer_id=small, updates=4), Standing(peer_id=large, updates=4), (True, False)),
        (Standing(peer_id=small, updates=9), Standing(peer_id=large, updates=0, is_fixed=True), (True, False)),
        (
            Standing(peer_id=small, updates=9, is_fixed=True),
            Standing(peer_id=large, updates=0, is_fixed=True),
            (False, False),
        ),
    ]:
        assert (gives_up(one, other), gives_up(other, one)) == gone


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


def test_only_well_formed_claims_are_read() -> None:
    """Whatever a stranger writes, a claim for a day too, is left out; what was taken back is none."""
    uid, now = parse_uid("ffn.3.1"), 100.0
    own = claim_item(uid, CONTACTS[0], is_confirmed=True, expiration=now + 10)
    other = claim_item(uid, CONTACTS[1], is_confirmed=False, expiration=now + 10)
    gone = withdrawal_item(uid, CONTACTS[2], expiration=now + 10)
    wire = contact_to_wire(CONTACTS[3])
    entries: dict[str, Entry] = {
        item.subkey or "": make_entry(item.value, item.expiration) for item in (own, other, gone)
    }
    entries |= {
        f"3.1/{PEERS[3]}": make_entry([wire, False], now + 86_400),
        f"3.1/{PEERS[4]}": make_entry([wire, False], now + 10),  # another's contact
        f"3.2/{PEERS[3]}": make_entry([wire, False], now + 10),  # an expert that we do not claim
        f"3.1/{PEERS[5]}": make_entry([contact_to_wire(CONTACTS[5]), 1], now + 10),
        "junk": make_entry("junk", now + 10),
        "3.1": make_entry([], now + 10),
    }
    assert own.key == claims_key("ffn") == "claims:ffn"
    found = read_claims("ffn", Dictionary(entries=entries), {"ffn.3.1"}, now=now)
    assert found == {"ffn.3.1": {PEERS[0]: True, PEERS[1]: False}}
    assert read_claims("ffn", make_entry("plain", now + 10), {"ffn.3.1"}, now=now) == {}
    assert read_claims("ffn", None, {"ffn.3.1"}, now=now) == {}


def test_listings_are_read_row_by_row() -> None:
    now, wire = 5.0, contact_to_wire(CONTACTS[0])
    entries = {
        "1": make_entry(wire, now + 10),
        "2": make_entry(None, now + 10),  # taken back
        "3": make_entry(wire, now - 1),  # ended
        "4": make_entry(True, now + 10),  # a row
        "5": make_entry(wire, now + 10),  # not one of ours
    }
    found = read_listings("ffn.0.", Dictionary(entries=entries), {f"ffn.0.{n}" for n in range(5)}, now=now)
    assert found == {"ffn.0.1": Listing(contact=CONTACTS[0], expiration=now + 10)}


def test_an_expert_is_listed_as_long_as_one_of_its_replicas_lives() -> None:
    """Slot 0 comes first unless its node is dead; without it the others stand for the expert, which is not vacant."""
    first, second = (make_entry(contact_to_wire(contact), 15.0) for contact in CONTACTS[:2])
    record = Dictionary(entries={"1": first, "1~2": second, "2~1": second})
    uids = {"ffn.0.1", "ffn.0.2"}
    for dead, expected in ((set(), 0), ({CONTACTS[0].peer_id}, 1), ({each.peer_id for each in CONTACTS[:2]}, 0)):
        found = read_listings("ffn.0.", record, uids, now=5.0, dead=dead)
        assert {uid: listing.contact for uid, listing in found.items()} == {
            "ffn.0.1": CONTACTS[expected],
            "ffn.0.2": CONTACTS[1],
        }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_experts": 0}, "max_experts must be an integer of at least 1, got 0"),
        ({"settle_s": 0.0}, "settle_s must be a positive number"),
        ({"gather_s": -1.0}, "gather_s must be 0 or"),
        ({"settle_s": 7.0}, "lifetime_s must exceed twice settle_s.*got 12.0 and 7.0"),
    ],
)
def test_settings_check_themselves(setting: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClaimConfig(**({"max_experts": 3} | setting))  # type: ignore[arg-type]


def test_patterns_too_large_to_look_after_are_refused() -> None:
    uid = parse_uid("ffn.0")
    with pytest.raises(ValueError, match="of 1 to 65536 experts, got patterns of 65537"):
        check_claimable({str(number): uid for number in range(65_537)})
    with pytest.raises(ValueError, match="in 1025 rows of their grids, at most 1024"):
        check_claimable({str(uid): uid for uid in expand_grid_pattern("ffn.[0:1025].0")})
