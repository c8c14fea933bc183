"""The lookup as a state machine, the peer book, the memory of holders, and patience with peers: time is a number."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmoe_net.dht.config import DhtConfig
from dmoe_net.dht.copies import MAX_RECORDS, Copies, Position, nearest
from dmoe_net.dht.lookup import Lookup, LookupConfig
from dmoe_net.dht.patience import Patience
from dmoe_net.dht.peer_book import MAX_LOST, PeerBook
from dmoe_net.dht.routing_table import NodeId, node_id
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.peer_health import PeerHealth

CONFIG = LookupConfig(parallelism=3, beam_size=5)


def contact(node: NodeId) -> Contact:
    return Contact(PeerId(node.to_bytes(32, "big")), Address("10.0.0.1", 1 + node % 60000))


def peers(*nodes: NodeId) -> list[Contact]:
    return [contact(node) for node in nodes]


def lookup_of(target: NodeId, seeds: list[Contact], *, local_id: NodeId = 100, config: LookupConfig = CONFIG) -> Lookup:
    return Lookup(target, seeds, local_id=local_id, config=config, patience=lambda peer_id: 1.0)


def ask_all(lookup: Lookup, now: float) -> list[NodeId]:
    """Everybody whom the lookup wants to ask now."""
    asked = []
    while isinstance(step := lookup.next(now), Contact):
        asked.append(node_id(step.peer_id))
    return asked


def test_the_nearest_are_asked_first() -> None:
    """A lookup asks the alpha seeds that are nearest to the target, nearest first, and then whom their answers name."""
    lookup = lookup_of(0, peers(9, 5, 7, 4, 8))
    assert ask_all(lookup, 0.0) == [4, 5, 7]
    assert lookup.next(0.0) == 1.0
    lookup.on_success(contact(5).peer_id, peers(2, 4))
    assert ask_all(lookup, 0.1) == [2]


def test_without_progress_the_whole_beam_is_asked() -> None:
    """After alpha answers that brought nobody nearer, all of the beam is asked at once (Kademlia, 2.3)."""
    lookup = lookup_of(0, peers(1, 2, 3, 4, 5, 6, 7, 8))
    assert ask_all(lookup, 0.0) == [1, 2, 3]
    for node in (1, 2):
        lookup.on_success(contact(node).peer_id, [])
    assert ask_all(lookup, 0.1) == [4, 5]  # two more at alpha = 3: one is still open
    lookup.on_success(contact(3).peer_id, [])
    assert ask_all(lookup, 0.2) == []  # the beam of five is 1 to 5, all asked
    for node in (4, 5):
        lookup.on_success(contact(node).peer_id, [])
    assert lookup.next(0.3) is None
    assert lookup.closest() == tuple(peers(1, 2, 3, 4, 5))


def test_a_failure_lets_the_next_nearest_into_the_beam() -> None:
    """A dead peer does not count: the sixth nearest takes its place in a beam of five."""
    lookup = lookup_of(0, peers(1, 2, 3, 4, 5, 6))
    done: list[NodeId] = []
    while asked := ask_all(lookup, 0.0):
        for node in asked:
            done.append(node)
            peer_id = contact(node).peer_id
            lookup.on_failure(peer_id) if node == 2 else lookup.on_success(peer_id, [])
    assert sorted(done) == [1, 2, 3, 4, 5, 6]
    assert lookup.closest() == tuple(peers(1, 3, 4, 5, 6))


def test_a_silent_peer_frees_its_place_and_may_still_answer() -> None:
    """Others are asked in its stead; its late answer counts."""
    lookup = lookup_of(0, peers(1, 2, 3, 4), config=LookupConfig(parallelism=1, beam_size=2))
    assert ask_all(lookup, 0.0) == [1]
    assert ask_all(lookup, 0.9) == []
    assert ask_all(lookup, 1.0) == [2]
    assert lookup.unresponsive() == (contact(1),)
    lookup.on_success(contact(1).peer_id, [])
    lookup.on_success(contact(2).peer_id, [])
    assert lookup.next(1.1) is None
    assert lookup.closest() == tuple(peers(1, 2))
    assert lookup.unresponsive() == ()


def test_where_everybody_is_slow_nobody_is_skipped() -> None:
    """With fewer than beam_size answers each silent peer is awaited until it answers or fails."""
    lookup = lookup_of(0, peers(1, 2, 3))
    assert ask_all(lookup, 0.0) == [1, 2, 3]
    assert lookup.next(1.0) == math.inf
    lookup.on_success(contact(3).peer_id, peers(4))
    assert ask_all(lookup, 51.0) == [4]
    lookup.on_success(contact(4).peer_id, [])
    lookup.on_success(contact(1).peer_id, [])
    assert lookup.next(52.0) == math.inf
    lookup.on_failure(contact(2).peer_id)
    assert lookup.next(52.0) is None
    assert lookup.closest() == tuple(peers(1, 3, 4))


def test_a_lookup_of_a_record_ends_at_enough_copies() -> None:
    """Two that hold the record end it, whoever else was to be asked; fewer, and the whole beam is walked."""
    config = LookupConfig(parallelism=3, beam_size=5, copies=2)
    lookup = lookup_of(0, peers(1, 2, 3, 4), config=config)
    assert ask_all(lookup, 0.0) == [1, 2, 3]
    lookup.on_success(contact(3).peer_id, peers(5), holds=True)
    lookup.on_success(contact(1).peer_id, [])
    assert ask_all(lookup, 0.0) == [4, 5]
    lookup.on_success(contact(4).peer_id, [], holds=True)
    assert lookup.next(0.0) is None
    assert lookup.holders == peers(3, 4)
    lookup = lookup_of(0, peers(1, 2), config=config)
    assert ask_all(lookup, 0.0) == [1, 2]
    lookup.on_success(contact(1).peer_id, [], holds=True)
    assert lookup.next(0.0) == 1.0
    lookup.on_success(contact(2).peer_id, [])
    assert lookup.next(0.0) is None
    assert lookup.holders == peers(1)


def test_a_walk_to_a_record_begins_with_few_questions() -> None:
    """It asks one more than the copies it wants; an answer without one, a failure or silence lets it ask two more."""
    config = LookupConfig(parallelism=8, beam_size=7, copies=2)
    lookup = lookup_of(0, peers(*range(1, 12)), config=config)
    assert ask_all(lookup, 0.0) == [1, 2, 3]
    lookup.on_success(contact(1).peer_id, [])
    assert ask_all(lookup, 0.1) == [4, 5, 6]
    lookup.on_failure(contact(2).peer_id)
    assert ask_all(lookup, 0.2) == [7, 8]
    walk = lookup_of(0, peers(*range(1, 12)), config=LookupConfig(parallelism=8, beam_size=10))
    assert len(ask_all(walk, 0.0)) == 8


def test_nobody_is_silent_while_this_process_is_late() -> None:
    """A timer that comes two seconds late says nothing of others: they are granted as much again, once."""
    lookup = lookup_of(0, peers(1, 2, 3, 4, 5))
    assert ask_all(lookup, 0.0) == [1, 2, 3]
    assert lookup.next(0.0) == 1.0
    assert lookup.next(3.0) == 5.0
    assert ask_all(lookup, 5.0) == [4, 5]


def test_each_peer_is_granted_its_own_patience() -> None:
    patience = {contact(1).peer_id: 0.2, contact(2).peer_id: 0.8}
    config = LookupConfig(parallelism=2, beam_size=2)
    lookup = Lookup(0, peers(1, 2, 3, 4), local_id=100, config=config, patience=patience.__getitem__)
    assert ask_all(lookup, 0.0) == [1, 2]
    assert lookup.next(0.0) == 0.2
    patience |= {contact(3).peer_id: 1.0, contact(4).peer_id: 1.0}
    assert ask_all(lookup, 0.2) == [3]
    assert ask_all(lookup, 0.7) == []
    assert ask_all(lookup, 0.8) == [4]


def test_knowing_nobody_is_finished() -> None:
    assert lookup_of(0, []).next(0.0) is None
    assert lookup_of(0, peers(100)).next(0.0) is None


def test_answers_that_nobody_asked_for_are_ignored() -> None:
    lookup = lookup_of(0, peers(1, 2, 3, 4))
    ask_all(lookup, 0.0)
    lookup.on_success(contact(77).peer_id, peers(50), holds=True)
    lookup.on_success(contact(4).peer_id, peers(50), holds=True)
    lookup.on_failure(contact(4).peer_id)
    assert lookup.holders == []
    lookup.on_success(contact(1).peer_id, [])
    lookup.on_success(contact(1).peer_id, peers(0), holds=True)
    lookup.on_failure(contact(1).peer_id)
    assert lookup.closest() == (contact(1),)
    assert ask_all(lookup, 0.0) == [4]


def test_inventors_of_ever_nearer_peers_are_outlasted() -> None:
    """A hostile swarm that always knows somebody nearer gets max_queries questions and no more."""
    config = LookupConfig(parallelism=3, beam_size=5, max_queries=40)
    lookup = lookup_of(0, peers(1 << 200), local_id=1 << 255, config=config)
    rounds = 0
    while (step := lookup.next(0.0)) is not None:
        assert isinstance(step, Contact)
        place = node_id(step.peer_id)
        lookup.on_success(step.peer_id, peers(place >> 1 or 1, place - 1, place - 2))
        rounds += 1
        assert rounds <= 40
    assert lookup.queries == 40
    assert len(lookup.closest()) == 5


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 60),
    dead_share=st.floats(0, 1),
    parallelism=st.integers(1, 5),
    beam_size=st.integers(1, 20),
)
@settings(max_examples=150)
def test_a_lookup_ends_asks_nobody_twice_and_keeps_its_bounds(
    seed: int, size: int, dead_share: float, parallelism: int, beam_size: int
) -> None:
    """It does so in any network with any mix of answers, failures and silence, however they interleave."""
    rng = random.Random(seed)
    swarm = [contact(rng.getrandbits(256)) for _ in range(size)]
    dead = {c.peer_id for c in swarm if rng.random() < dead_share}
    silent = {c.peer_id for c in swarm if rng.random() < dead_share / 2}
    known = {c.peer_id: rng.sample(swarm, min(size, 8)) for c in swarm}
    config = LookupConfig(parallelism=parallelism, beam_size=beam_size, max_queries=50)
    lookup = lookup_of(rng.getrandbits(256), rng.sample(swarm, min(size, 3)), local_id=1, config=config)
    now, open_since, asked = 0.0, dict[PeerId, float](), list[PeerId]()
    for _ in range(1000):
        step = lookup.next(now)
        if step is None:
            break
        if isinstance(step, Contact):
            asked.append(step.peer_id)
            open_since[step.peer_id] = now
            counted = sum(now - since < 1.0 for since in open_since.values())
            assert counted <= max(parallelism, beam_size)
            continue
        answering = [peer for peer in open_since if peer not in silent]
        if answering and rng.random() < 0.8:
            peer = rng.choice(answering)
            del open_since[peer]
            lookup.on_failure(peer) if peer in dead else lookup.on_success(peer, known[peer])
        elif step < math.inf:
            now = step
        else:  # only silent peers are left: their calls time out
            for peer in [peer for peer in open_since if peer in silent]:
                del open_since[peer]
                lookup.on_failure(peer)
    else:
        pytest.fail("the lookup did not end")
    assert len(asked) == len(set(asked)) == lookup.queries <= 50
    closest = lookup.closest()
    assert len(closest) <= beam_size
    assert not {c.peer_id for c in closest} & (dead | silent)
    distances = [node_id(c.peer_id) ^ lookup.target for c in closest]
    assert distances == sorted(set(distances))


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
@settings(max_examples=50)
def test_while_there_is_progress_alpha_is_the_bound(seed: int, parallelism: int) -> None:
    """As long as each answer brings somebody nearer, never more than alpha questions are open."""
    rng = random.Random(seed)
    config = LookupConfig(parallelism=parallelism, beam_size=20)
    lookup = lookup_of(0, [contact((1 << 250) + n) for n in range(10)], local_id=1 << 255, config=config)
    is_open: list[Contact] = []
    for depth in range(249, 200, -1):
        while isinstance(step := lookup.next(0.0), Contact):
            is_open.append(step)
            assert len(is_open) <= parallelism
        answerer = is_open.pop(rng.randrange(len(is_open)))
        lookup.on_success(answerer.peer_id, peers(1 << depth))


@given(st.integers(0, 2**32 - 1), st.integers(20, 80))
@settings(max_examples=50)
def test_in_a_healthy_swarm_the_nearest_are_found(seed: int, size: int) -> None:
    """If everybody answers with the nearest of all peers, the result is exact."""
    rng = random.Random(seed)
    swarm = [contact(rng.getrandbits(256)) for _ in range(size)]
    target = rng.getrandbits(256)
    by_distance = sorted(swarm, key=lambda c: node_id(c.peer_id) ^ target)
    lookup = lookup_of(target, [rng.choice(swarm)], local_id=1, config=LookupConfig(beam_size=10))
    while (step := lookup.next(0.0)) is not None:
        assert isinstance(step, Contact)
        lookup.on_success(step.peer_id, by_distance[:10])
    assert lookup.closest() == tuple(by_distance[:10])


@pytest.mark.parametrize("name", ["parallelism", "beam_size", "max_queries"])
def test_parameters_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match="positive"):
        LookupConfig(**{"beam_size": 5, name: 0})


class Book(PeerBook):
    """A peer book that keeps what it asks for."""

    def __init__(self, **config: int) -> None:
        self.to_check: list[Contact] = []
        self.newcomers: list[Contact] = []
        self.unreachable: set[Contact] = set()
        super().__init__(
            0,
            config=DhtConfig(**config),
            health=PeerHealth(),
            now=0.0,
            check=self.to_check.append,
            hand_over=self.newcomers.append,
            is_reached=lambda contact: contact not in self.unreachable,
        )


def test_the_pause_doubles_and_failures_within_it_do_not_count() -> None:
    """It is 5, 10, 20, 40, 80, then at most 120 s; an answer clears all."""
    known, peer, now = Book(), contact(9), 0.0
    for pause_s in (5.0, 10.0, 20.0, 40.0, 80.0, 120.0, 120.0):
        known.failed(peer, now, "silent")
        known.failed(peer, now + pause_s / 2, "silent")
        assert known.usable([peer], now + pause_s - 0.01) == ()
        assert known.left_alone(now + pause_s - 0.01) == (peer.peer_id,)
        now += pause_s
        assert known.usable([peer], now) == (peer,)
        assert known.left_alone(now) == ()
    known.answered(peer, now)
    known.failed(peer, now, "silent")
    assert known.usable([peer], now + 5.0) == (peer,)


def test_a_peer_must_prove_its_address() -> None:
    """A call, or an answer on the peer's own connection, proves none: the address is dialled, and so is a new one."""
    known, moved = Book(), Contact(contact(9).peer_id, Address("10.9.9.9", 9))
    known.heard_from(contact(9), 0.0)
    known.unreachable.add(contact(9))
    known.answered(contact(9), 1.0)
    assert known.to_check == [contact(9)] * 2
    assert len(known.table) == 0
    known.unreachable.clear()
    known.answered(contact(9), 2.0)
    assert known.table.contacts() == (contact(9),)
    known.unreachable.add(contact(9))  # its connection has ended since
    known.answered(contact(9), 3.0)
    known.heard_from(contact(9), 4.0)
    known.heard_from(moved, 5.0)
    assert known.to_check == [contact(9), contact(9), moved]
    assert known.table.contacts() == (contact(9),)


def test_a_full_bucket_is_not_pinged_for_every_caller() -> None:
    """Callers that would not fit are left alone; for one that answers a contact that is silent is checked."""
    known, top = Book(bucket_size=2, depth_modulo=1, replicas=2), 1 << 255
    for low in (1, 2):
        known.answered(contact(top + low), 0.0)
    known.answered(contact(5), 0.0)
    known.heard_from(contact(top + 3), 60.0)
    known.answered(contact(top + 4), 59.0)
    assert known.to_check == []
    known.answered(contact(top + 4), 60.0)
    assert known.to_check == [contact(top + 1)]
    known.failed(contact(top + 1), 61.0, "silent")
    assert contact(top + 4) in known.table.contacts()


def test_the_dead_are_named_to_others_for_a_minute_and_doubts_are_checked() -> None:
    """The last eight are named; whoever is told checks a contact that it has not seen for five seconds."""
    known = Book()
    for number in range(1, 11):
        known.answered(contact(number), 0.0)
        known.failed(contact(number), float(number), "silent")
    assert known.dead(10.0) == tuple(contact(number).peer_id for number in range(3, 11))
    assert known.dead(65.0) == tuple(contact(number).peer_id for number in range(5, 11))
    known.answered(contact(7), 66.0)
    assert contact(7).peer_id not in known.dead(66.0)
    other = Book()
    other.answered(contact(7), 100.0)
    other.doubted(contact(7).peer_id, 104.0)
    other.doubted(contact(8).peer_id, 110.0)
    assert other.to_check == []
    other.doubted(contact(7).peer_id, 106.0)
    assert other.to_check == [contact(7)]


def test_lost_peers_are_bounded_and_one_that_answers_is_a_newcomer_again() -> None:
    known = Book()
    for number in range(1, MAX_LOST + 2):
        known.answered(contact(number), 0.0)
        known.failed(contact(number), 0.0, "silent")
    lost = known.draw_lost(MAX_LOST + 1, random.Random(0))
    assert len(lost) == MAX_LOST
    assert contact(1) not in lost
    for now in (1.0, 2.0):
        known.answered(contact(2), now)
    assert contact(2) not in known.draw_lost(MAX_LOST, random.Random(0))
    assert known.newcomers.count(contact(2)) == 2


def test_the_nearest_holder_hands_over_to_who_belongs_there() -> None:
    """With two replicas and nodes 0 (own), 16 and 20, node 0 hands key 8 over to node 9, but not to node 32."""
    known = Book()
    for node in (16, 20):
        known.answered(contact(node), 0.0)
    # Distances to key 8: own 8, 16 -> 24, 20 -> 28, 9 -> 1, 32 -> 40.
    assert known.owes(contact(9), 8, replicas=2)
    assert not known.owes(contact(32), 8, replicas=2)
    assert known.owes(contact(32), 8, replicas=4)
    # Key 17: node 16 (distance 1) is nearer than the own id (17), so handing over is not ours.
    assert not known.owes(contact(18), 17, replicas=2)


def test_positions_outlive_the_minute_as_long_as_the_holder_is_found_again() -> None:
    """A new walk to the same holders brings their changes and not the whole record."""
    copies = Copies(life_s=60.0)
    copies.read(4, contact(5).peer_id, Position(7, 1))
    copies.read(4, contact(6).peer_id, Position(8, 2))
    copies.walked(4, [contact(5), contact(6)], 0.0)
    copies.read(4, contact(5).peer_id, Position(7, 3))
    assert copies.position(4, contact(5).peer_id) == Position(7, 3)
    copies.walked(4, [contact(5)], 100.0)
    assert copies.position(4, contact(5).peer_id) == Position(7, 3)
    assert copies.position(4, contact(6).peer_id) is None
    copies.changed(4, [contact(7), contact(6)])  # without a walk: they are not remembered for longer
    assert copies.holders(4, 159.9) == (contact(6), contact(7))
    assert copies.holders(4, 160.0) == ()


def test_the_least_recently_used_records_are_forgotten() -> None:
    copies = Copies(life_s=60.0)
    for key in range(MAX_RECORDS):
        copies.walked(key, [contact(5)], 0.0)
    copies.walked(0, [contact(6)], 0.0)
    copies.walked(MAX_RECORDS, [contact(5)], 0.0)
    assert copies.holders(0, 1.0) == (contact(6),)
    assert copies.holders(1, 1.0) == ()
    assert copies.holders(MAX_RECORDS, 1.0) == (contact(5),)


def test_a_peer_counts_once_among_the_nearest() -> None:
    moved = Contact(contact(5).peer_id, Address("10.9.9.9", 9))
    assert nearest([contact(5), contact(1), moved], 4) == (moved, contact(1))
    assert nearest([contact(5), contact(1)], 4, 1) == (contact(5),)


def test_patience_is_the_time_of_calls_and_four_deviations() -> None:
    """RFC 6298, section 2, gives by hand 0.2 s, then 0.3 s."""
    patience, peer = Patience(), contact(1).peer_id
    assert patience.of(peer, 0.0) == 1.0, "of nobody is anything known"
    patience.note(peer, 0.5, 0.5)  # a first call, with its dial: for others who are new
    patience.note(peer, 0.2, 1.0)
    # smoothed 0.2, deviation 0.1
    assert patience.of(peer, 1.0) == pytest.approx(0.2 + 4 * 0.1)
    patience.note(peer, 0.3, 2.0)
    # deviation 0.1 + (|0.3 - 0.2| - 0.1) / 4 = 0.1; smoothed 0.2 + 0.1 / 8 = 0.2125
    assert patience.of(peer, 2.0) == pytest.approx(0.2125 + 4 * 0.1)
    assert patience.of(contact(2).peer_id, 2.0) == 1.0, "first calls took 0.5 s, with a deviation of 0.25 s"


def test_patience_has_bounds_and_forgets_peers_that_were_not_called() -> None:
    """It is from 0.1 to 1 s; after a minute without calls a peer has to be dialled again, as one that is new."""
    patience, near, far = Patience(), contact(1).peer_id, contact(2).peer_id
    for peer, seconds in ((near, 0.001), (far, 5.0)):
        for number in range(100):
            patience.note(peer, seconds, float(number) / 10)
    assert patience.of(near, 10.0) == 0.1
    assert patience.of(far, 10.0) == 1.0
    for number in range(3, 40):
        patience.note(contact(number).peer_id, 0.15, 10.0)
    first = patience.of(contact(99).peer_id, 10.0)
    assert 0.1 < first < 1.0
    assert patience.of(near, 80.0) == first


def test_a_sweep_of_patience_changes_no_answer() -> None:
    """It forgets whom a call under way could not be measured against, and nobody else."""
    kept, swept = Patience(), Patience()
    for number in range(40):
        for patience in (kept, swept):
            patience.note(contact(number % 8).peer_id, 0.1 + number / 100, 3.0 * number)
        swept.sweep(3.0 * number)
        for now in (3.0 * number, 3.0 * number + 25.0):
            assert [kept.of(contact(n).peer_id, now) for n in range(9)] == [
                swept.of(contact(n).peer_id, now) for n in range(9)
            ]
    swept.sweep(200.0)
    assert not swept._peers
    assert kept._peers
