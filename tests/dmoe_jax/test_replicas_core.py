"""Replicas without a network: slots, preferences, claims, what is averaged, and who averages with whom."""

import functools
import random
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio
from trio.testing import MockClock

from dmoe_jax.directory.directory import declare_experts, open_expert_directory, withdraw_experts
from dmoe_jax.directory.grid import ExpertUid, parse_uid
from dmoe_jax.directory.slots import (
    MAX_SLOTS,
    Child,
    Renewals,
    Replica,
    by_preference,
    children_of_untrusted,
    own_expiration,
    parse_subkey,
    subkey_of,
)
from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.replicas.config import ReplicaConfig
from dmoe_jax.replicas.copies import LEAST_WEIGHT, CopyLayout, Progress
from dmoe_jax.replicas.listing import SlotListing
from dmoe_jax.replicas.replica_averager import add_average
from dmoe_jax.replicas.rounds import bundles_of, group_of, next_round, unweighted, weighted
from dmoe_jax.replicas.slot_claims import SlotClaims
from dmoe_net.dht.messages import contact_to_wire
from dmoe_net.dht.records import Dictionary, make_entry
from dmoe_net.identity import Address, Contact, PeerId
from tests.net.direct_network import DirectNetwork, open_swarm

RNG = random.Random(0)
HOSTS = [Contact(PeerId.draw(RNG), Address("10.0.0.1", 3000 + n)) for n in range(8)]
UID = parse_uid("ffn.1.7")


def replica(host: int, slot: int, expiration: float = 100.0) -> Replica:
    return Replica(contact=HOSTS[host], slot=slot, expiration=expiration)


def record(**entries: Any) -> Dictionary:
    return Dictionary(entries={subkey: make_entry(value, 100.0) for subkey, value in entries.items()})


def test_a_subkey_has_one_spelling() -> None:
    """Slot 0 is announced as it has ever been; malformed and unknown slots are refused."""
    assert [subkey_of("17", slot) for slot in (0, 1, 7)] == ["17", "17~1", "17~7"]
    assert [parse_subkey(text) for text in ("17", "17~1", "17~7")] == [(17, 0), (17, 1), (17, 7)]
    for text in (
        "17~",
        "17~-1",
        "17~999",
        "~1",
        "17~0",
        "17~8",
        "17~01",
        "17~1~1",
        "17~ 1",
        "x~1",
        "17~\u0661",
        "~",
        "",
    ):
        with pytest.raises(ValueError, match="got"):
            parse_subkey(text)
    with pytest.raises(ValueError, match="slots go from 0 to 7, got 8"):
        subkey_of("17", MAX_SLOTS)


def test_what_strangers_write_is_left_out() -> None:
    """Of a record only well-formed subkeys with contacts count, and a peer counts once, whatever slots it fills."""
    ours = contact_to_wire(HOSTS[0])
    greedy = {f"5~{slot}": contact_to_wire(HOSTS[1]) for slot in range(1, 8)}
    malformed = dict.fromkeys(("17~", "17~-1", "17~999", "~1"), ours)
    children = children_of_untrusted(
        record(
            **malformed, **greedy, **{"5": ours, "6~1": True, "7~2": ["nobody"], "8": True, "8~1": ours, "9~3": None}
        )
    )
    assert list(children) == [5, 8]
    assert [each.contact for each in children[5].replicas] == HOSTS[:2]
    assert children[8].row_until == 100.0, "a row stays a row"


def test_an_experts_slots_are_read_in_their_order() -> None:
    """Slot 0 may be missing, or have ended."""
    entries = {f"3~{slot}": make_entry(contact_to_wire(HOSTS[slot]), 50.0 * slot) for slot in (2, 1)}
    (child,) = children_of_untrusted(Dictionary(entries=entries)).values()
    assert child.replicas == (replica(1, 1, 50.0), replica(2, 2, 100.0))
    assert child.living(60.0) == (replica(2, 2, 100.0),)


def children(count: int, hosts: dict[int, range]) -> dict[int, Child]:
    """Experts 0..count-1, and which of them each host serves."""
    return {
        index: Child(replicas=tuple(replica(host, slot) for slot, host in enumerate(hosts) if index in hosts[host]))
        for index in range(count)
    }


def firsts(found: dict[int, Child], readers: int) -> Counter[int]:
    """How often each host comes first, over many readers and all experts."""
    rng, counts = random.Random(5), Counter[int]()
    for _ in range(readers):
        for child in by_preference(found, "ffn.1.", PeerId.draw(rng)).values():
            counts[HOSTS.index(child.replicas[0].contact)] += 1
    return counts


def test_readers_spread_over_replicas() -> None:
    """Of 3 replicas each is the first of a third of 2400 choices: 800 with a deviation of 23. One that leaves changes
    nothing but for those who had it first."""
    found = children(24, {host: range(24) for host in range(3)})
    assert all(abs(count - 800) < 4 * 23 for count in firsts(found, 100).values())
    reader = PeerId.draw(random.Random(9))
    before, after = (
        by_preference(children(24, {host: range(24) for host in hosts}), "ffn.1.", reader)
        for hosts in ((0, 1, 2), (0, 1))
    )
    for index in range(24):
        without = [each.contact for each in before[index].replicas if each.contact != HOSTS[2]]
        assert without == [each.contact for each in after[index].replicas]


def test_a_node_that_serves_more_is_preferred_less() -> None:
    """A serves 8 experts, B two of them: each of the two goes to B with 1/2 : 1/8, four of five times."""
    counts = firsts(children(8, {0: range(8), 1: range(2)}), 200)
    assert counts[0] + counts[1] == 1600
    assert abs(counts[1] - 320) < 4 * 8, "400 choices of 0.8: a deviation of 8"


def test_who_failed_is_waited_for_until_it_announces_itself_anew() -> None:
    """What the first look after a failure finds may be from before it; only a later end is a sign of life."""
    renewals, who = Renewals(), HOSTS[0].peer_id
    failed: dict[PeerId, float] = {}

    def look(expiration: float, asked_at: float) -> bool:
        renewals.note([Child(replicas=(replica(0, 0, expiration),))], failed.get, asked_at)
        return renewals.awaits(who, failed.get(who))

    assert not look(30.0, 0.0)
    failed[who] = 10.0
    assert renewals.awaits(who, 10.0)
    assert look(40.0, 9.0), "asked before it failed"
    assert look(40.0, 11.0), "perhaps announced before it failed"
    assert look(40.0, 15.0)
    assert not look(50.0, 20.0)
    failed[who] = 30.0
    assert look(60.0, 31.0), "it failed again"
    del failed[who]
    assert not renewals.awaits(who, None)


def test_claims_take_the_lowest_free_slot_and_the_loser_moves_on() -> None:
    """Decisions alone: what is found decides."""
    claims = SlotClaims(HOSTS[0].peer_id)
    assert claims.look([UID], {UID: (replica(1, 0), replica(2, 2))}) == [UID]
    assert claims.slots == {UID: 1}
    assert claims.held == {}
    assert claims.look([UID], {UID: (replica(1, 0), replica(3, 1), replica(2, 2))}) == [UID]
    assert claims.slots == {UID: 3}, "another has it: the next free one"
    assert claims.lost == 1
    assert claims.look([UID], {UID: (replica(0, 3),)}) == []
    assert claims.held == {UID: 3}, "it stays, though lower ones are free now"
    assert claims.look([UID], {UID: ()}) == []
    assert claims.held == {UID: 3}, "its announcement ran out, and nobody came"
    full = [replica(4, 0), *(replica(host, host) for host in range(1, 8))]
    assert claims.look([UID], {UID: full}) == []
    assert claims.slots == {}


def test_a_refused_slot_is_passed_over_until_the_next_time() -> None:
    """As where one who has withdrawn left an entry that ends later."""
    claims = SlotClaims(HOSTS[0].peer_id)
    claims.look([UID], {})
    claims.refused(UID)
    claims.look([UID], {})
    assert claims.slots == {UID: 1}
    other = SlotClaims(HOSTS[1].peer_id)
    assert other.look([UID], {UID: (replica(1, 4),)}) == []
    assert other.held == {UID: 4}, "the same peer, started again"


async def test_nodes_that_start_together_end_in_different_slots(autojump_clock: MockClock) -> None:
    """Four at the very same moment, with the same expiration: all look, and write, before any can see another."""
    uids = [ExpertUid("ffn", (1, index)) for index in range(3)]
    async with open_swarm(DirectNetwork(), 6) as nodes:
        listings = [SlotListing(nodes[index], HOSTS[index], settle_s=1.0) for index in range(4)]
        end = trio.current_time() + 100
        async with trio.open_nursery() as nursery:
            for listing in listings:
                nursery.start_soon(functools.partial(listing.announce, uids, expiration=end))
        for uid in uids:
            assert sorted(listing.claims.held[uid] for listing in listings) == [0, 1, 2, 3]
        assert trio.current_time() >= end - 100 + 2 * 1.0, "who is not in slot 0 has tried that first, and waited"
        assert all((await listings[0].announce(uids, expiration=end + 10)).values())
        async with open_expert_directory(nodes[5]) as directory:
            (found,) = (await directory.children(["ffn.1."])).values()
            assert set(found) == {0, 1, 2}
            first = next(each for each in listings if each.claims.held[uids[0]] == 0)
            await first.withdraw(uids)
        async with open_expert_directory(nodes[4]) as directory:
            (found,) = (await directory.children(["ffn.1."])).values()
            assert set(found) == {0, 1, 2}, "slot 0 is empty, and the expert lives"
            assert first._contact not in found.values()


async def test_a_reader_goes_on_to_another_replica(autojump_clock: MockClock) -> None:
    """If one fails, or is busy, the next question is answered with another, and the expert is never dead before all
    are; one that failed comes last until it has announced itself again, however long its pause is over."""
    async with open_swarm(DirectNetwork(), 4) as nodes:

        async def declare(host: int, slot: int) -> None:
            until = own_expiration(trio.current_time() + 30, HOSTS[host].peer_id)
            assert (await declare_experts(nodes[host], [UID], HOSTS[host], expiration=until, slots={UID: slot}))[UID]

        async def chosen() -> Contact | None:
            return (await directory.children(["ffn.1."]))["ffn.1."].get(7)

        await declare(0, 1)
        await declare(1, 2)
        async with open_expert_directory(nodes[3]) as directory:
            first = await chosen()
            other = next(host for host in HOSTS[:2] if host != first)
            assert first is not None
            assert directory.another(str(UID), first) == other
            directory.busy(first, 2.0)
            assert await chosen() == other
            await trio.sleep(2.0)
            assert await chosen() == first
            directory.avoid(str(UID), first, "refused")
            assert not directory.answers(str(UID), first)
            assert await chosen() == other
            await trio.sleep(1.0)
            assert await chosen() == first
            directory.health.failed((first.peer_id, "expert"), trio.current_time(), "no answer")
            await trio.sleep(5.0)
            assert directory.answers(str(UID), first), "its pause of 1 s is over"
            assert await chosen() == other
            directory.health.failed((other.peer_id, "expert"), trio.current_time(), "no answer")
            assert await chosen() == first
            directory.health.succeeded((other.peer_id, "expert"))
            assert await chosen() == other
            await trio.sleep(8.0)
            await declare(0, 1)
            await declare(1, 2)
            await trio.sleep(10.0)
            assert await chosen() == first, "it has announced itself since"
            await withdraw_experts(nodes[0], [UID], HOSTS[0], slots={UID: 1})
            await withdraw_experts(nodes[1], [UID], HOSTS[1], slots={UID: 2})
            await trio.sleep(10.0)
            assert await chosen() is None


def state(*values: float, count: int = 0) -> dict[str, Any]:
    """Of an expert with two parameters and Adam: parameters, first and second moments."""
    w, m, v = (np.full(2, value, np.float32) for value in values)
    return {"params": {"w": w}, "opt_state": {"m": m, "v": v, "count": np.int32(count)}}


def test_parameters_take_the_difference_and_moments_the_average() -> None:
    """Sent 1, 2, 3; the average is 2, 4, 1; meanwhile parameters went to 1.5: 1.5 + (2 - 1) = 2.5. A second moment is
    never below zero, as 0.5 + (1 - 3) would be. Counts stay."""
    sent, now, average = state(1, 2, 3, count=5), state(1.5, 2.5, 0.5, count=7), state(2, 4, 1, count=9)
    layout = CopyLayout(sent)
    assert layout.size == 6
    new = layout.with_average(now, layout.vector(sent), layout.vector(average))
    jax.tree.map(np.testing.assert_array_equal, new, state(2.5, 4, 1, count=7))
    for broken in (np.nan, np.inf):
        vector = layout.vector(average)
        vector[3] = broken
        assert layout.with_average(now, layout.vector(sent), vector) is None
    assert layout.with_average(state(np.nan, 0, 0), layout.vector(sent), layout.vector(average)) is None


@pytest.mark.parametrize("optimizer", [optax.adam(1e-2), optax.sgd(0.1), None], ids=["adam", "sgd", "frozen"])
def test_an_average_enters_an_expert_between_two_batches(optimizer: optax.GradientTransformation | None) -> None:
    """Two copies that learnt different things meet in the weighted mean; what one learns meanwhile stays."""
    expert = feedforward(d_model=4)
    one, other = (ExpertBackend(expert, optimizer, expert.init(jax.random.key(0))) for _ in range(2))
    rng = np.random.default_rng(0)

    def learn(backend: ExpertBackend) -> None:
        backend.backward([rng.normal(size=(3, 4)).astype(np.float32)], rng.normal(size=(3, 4)).astype(np.float32))

    for backend in (one, one, one, other):
        learn(backend)
    layout = CopyLayout(one.state)
    sent = [layout.vector(backend.state) for backend in (one, other)]
    (mean,) = unweighted(np.mean([weighted([sent[0]], [3.0]), weighted([sent[1]], [1.0])], axis=0), [layout.size])
    assert mean is not None
    np.testing.assert_allclose(mean, 0.75 * sent[0] + 0.25 * sent[1], atol=1e-6)
    learn(other)
    moved = jax.tree.map(np.array, other.params)
    assert add_average(one, layout, sent[0], mean)
    assert add_average(other, layout, sent[1], mean)
    expected = layout.with_average({**other.state, "params": moved}, sent[1], mean)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), other.state["params"], expected["params"])
    np.testing.assert_allclose(layout.vector(one.state), mean, atol=1e-6)
    assert one.update_count == (3 if optimizer else 0)
    assert not add_average(one, layout, sent[0], np.full_like(mean, np.inf))
    np.testing.assert_allclose(layout.vector(one.state), mean, atol=1e-6)
    learn(one)  # it learns on: types and layout are what the programs know


def test_bfloat16_stays_bfloat16() -> None:
    """An average of float32 becomes what the expert has."""
    tree = {"params": {"w": jnp.ones(3, jnp.bfloat16)}, "opt_state": ()}
    layout = CopyLayout(tree)
    assert layout.vector(tree).dtype == np.float32
    new = layout.with_average(tree, layout.vector(tree), np.full(3, 2.0, np.float32))
    np.testing.assert_array_equal(new["params"]["w"], [2, 2, 2])


def test_a_copy_counts_as_what_it_has_learnt_since_all_were_the_same() -> None:
    """From a seed as all of it, from another's state as what came after; one that is behind counts nearly nothing."""
    seeded, newcomer, behind = Progress(), Progress(), Progress()
    assert seeded.weight(0) == LEAST_WEIGHT
    assert seeded.weight(500) == 500
    newcomer.took(500)
    seeded.gave(500)
    assert (newcomer.weight(507), seeded.weight(520)) == (7, 20)
    behind.missed()
    assert behind.weight(40) == LEAST_WEIGHT
    behind.averaged(40)
    assert behind.weight(42) == 2
    seeded.averaged(520)
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
    """In the order of names; experts that nobody else serves are left out, and one too large is alone."""
    ab, abc = frozenset(HOSTS[:2]), frozenset(HOSTS[:3])
    members = {"e.3": ab, "e.1": ab, "e.2": abc, "e.4": ab, "e.5": frozenset(HOSTS[:1]), "e.6": ab}
    sizes = {"e.1": 4, "e.2": 4, "e.3": 4, "e.4": 4, "e.5": 4, "e.6": 99}
    bundles = bundles_of(members, sizes, max_size=8)
    assert [bundle.uids for bundle in bundles] == [("e.1", "e.3"), ("e.2",), ("e.4",), ("e.6",)]
    assert set(bundles[1].members) == abc
    assert list(bundles[0].members) == sorted(ab, key=lambda each: each.peer_id)


def test_those_who_see_the_same_find_the_same_group() -> None:
    """Another round, swarm, expert, shape or member is another group."""
    (bundle,) = bundles_of({"e.1": frozenset(HOSTS[:2])}, {"e.1": 4})
    (same,) = bundles_of({"e.1": frozenset(reversed(HOSTS[:2]))}, {"e.1": 4})
    (larger,) = bundles_of({"e.1": frozenset(HOSTS[:3])}, {"e.1": 4})
    group = group_of(bundle, swarm="s", round_number=1, schemas=["w"])
    assert group == group_of(same, swarm="s", round_number=1, schemas=["w"])
    others = [(bundle, "s", 2, "w"), (bundle, "t", 1, "w"), (bundle, "s", 1, "v"), (larger, "s", 1, "w")]
    ids = {group_of(each, swarm=swarm, round_number=n, schemas=[schema]).group_id for each, swarm, n, schema in others}
    assert len(ids - {group.group_id}) == 4
    assert sorted(group.slots) == [0, 1]
    assert next_round(61.0, 30.0) == (3, 90.0)
    assert next_round(90.0, 30.0) == (4, 120.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"average_period_s": 0.0}, "average_period_s must be a positive"),
        ({"settle_s": float("nan")}, "settle_s must be a positive"),
        ({"average_period_s": 10.0}, "average_period_s must be at least 23 .*, got 10"),
    ],
)
def test_settings_check_themselves(settings: dict[str, float], message: str) -> None:
    """The message names the value."""
    with pytest.raises(ValueError, match=message):
        ReplicaConfig(**settings)
