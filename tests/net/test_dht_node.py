"""DHT nodes over a direct network in virtual time: joining, storing and finding."""

import gc
import math
import random
import time
import weakref
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from dmoe_net.clock import SwarmClock
from dmoe_net.dht.config import DhtConfig
from dmoe_net.dht.entries import MAX_LIFE_S, MAX_VALUE_BYTES
from dmoe_net.dht.node import DhtNode, StoreItem, open_dht_node
from dmoe_net.errors import DialFailed
from dmoe_net.identity import PeerId
from dmoe_net.keys import Identity, Membership
from tests.net.direct_network import (
    DirectNetwork,
    address_of,
    bring,
    exponential_latency,
    holders,
    nearest,
    now,
    open_node,
    open_swarm,
    signed,
    swarm_of,
    value_at,
)


async def by_owner(node: DhtNode, key: str) -> dict[PeerId, Any]:
    return {entry.owner: entry.value for entry in await node.get(key)}


async def test_every_value_is_found_from_every_node(autojump_clock: MockClock) -> None:
    """Each of 16 nodes that ask 8 finds each value, at random latencies, and each lies on the 5 nearest."""
    latency_s = exponential_latency(0.05, seed=1)
    async with swarm_of(16, config=DhtConfig(bucket_size=8), latency_s=latency_s) as (network, nodes):
        for number, node in enumerate(nodes[::3]):
            assert await node.store(f"key{number}", number, life_s=300) >= 5
        for number in range(6):
            kept = {node.peer_id for node in await holders(network, nodes, f"key{number}")}
            assert kept >= nearest(nodes, f"key{number}", 5)
        for node in nodes:
            found = await node.get_many([f"key{number}" for number in range(6)])
            assert [entry.value for entries in found.values() for entry in entries] == list(range(6))
            assert 8 <= node.statistics().contacts <= 15


@pytest.mark.parametrize("replicas", [1, 3, 20])
async def test_replicas_are_counted_exactly(autojump_clock: MockClock, replicas: int) -> None:
    """The nearest `replicas` nodes keep a record, `store` says how many, and storing it again adds none."""
    async with swarm_of(24, config=DhtConfig(replicas=replicas)) as (network, nodes):
        for step in range(3):
            assert await nodes[step].store("key", step, life_s=100) == replicas
            kept = {node.peer_id for node in await holders(network, nodes, "key")}
            assert kept == nearest(nodes, "key", replicas)


@pytest.mark.parametrize("seed", range(5))
async def test_what_the_first_node_stored_alone_is_kept_by_those_who_come(autojump_clock: MockClock, seed: int) -> None:
    """All find the first node's entry beside theirs, though it takes newcomers that lack it for holders."""
    network = DirectNetwork(latency_s=exponential_latency(0.05, seed=seed))
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(open_node(network, 10 * seed, []))
        assert await first.store("key", "first", life_s=300) == 1
        opened = [open_node(network, 10 * seed + index, [address_of(10 * seed)]) for index in range(1, 8)]
        nodes = [await stack.enter_async_context(each) for each in opened]
        await trio.sleep(2.0)
        kept = {node.peer_id for node in await holders(network, [first, *nodes], "key")}
        assert kept >= nearest([first, *nodes], "key", 5)
        for node in nodes:
            await node.store("key", "later", life_s=300)
        for node in nodes:
            assert len(await by_owner(node, "key")) == 8


async def test_nobody_writes_over_another(autojump_clock: MockClock) -> None:
    """Each of twelve owners finds all twelve under one key; a store or a withdrawal changes one's own alone."""
    async with open_swarm(DirectNetwork(), 12) as nodes:
        for number, node in enumerate(nodes):
            assert await node.store("all", number, life_s=200) == 5
        expected = {node.peer_id: number for number, node in enumerate(nodes)}
        assert await by_owner(nodes[3], "all") == expected
        await nodes[7].store("all", "seven", life_s=100)
        await nodes[4].withdraw("all")
        expected[nodes[7].peer_id] = "seven"
        del expected[nodes[4].peer_id]
        for node in nodes:
            assert await by_owner(node, "all") == expected
        await nodes[4].store("all", "again", life_s=100)
        assert (await by_owner(nodes[0], "all"))[nodes[4].peer_id] == "again"


async def test_suffixes_tell_entries_of_one_owner_apart(autojump_clock: MockClock) -> None:
    """They come in the order of suffixes, and each is replaced and withdrawn by itself."""
    async with open_swarm(DirectNetwork(), 6) as nodes:
        items = [StoreItem(key="key", value=suffix, life_s=60, suffix=suffix) for suffix in ("b", "", "a")]
        assert await nodes[0].store_many(items) == [5, 5, 5]
        assert [(each.suffix, each.value) for each in await nodes[1].get("key")] == [("", ""), ("a", "a"), ("b", "b")]
        await nodes[0].withdraw("key", "a")
        await nodes[0].store("key", 7, life_s=60, suffix="b")
        assert [(entry.suffix, entry.value) for entry in await nodes[1].get("key")] == [("", ""), ("b", 7)]


OWNERS = [Identity.from_seed(bytes([number]) * 32) for number in range(5)]


async def test_partial_copies_are_merged_by_the_reader(autojump_clock: MockClock) -> None:
    """Two holders that each missed an entry: the reader gets the union, the highest sequence of each."""
    async with swarm_of(8) as (network, nodes):
        await nodes[0].store("all", "base", life_s=100)
        first, second, *others = await holders(network, nodes, "all")
        network.take_down(*(holder.address for holder in others))
        brought = [(first, 0, 1, 1), (first, 1, 1, "old"), (second, 1, 2, "new"), (second, 2, 1, 3)]
        for holder, number, sequence, value in brought:
            await bring(network, holder, "all", signed(OWNERS[number], "all", value, sequence=sequence))
        reader = next(node for node in nodes if node not in (first, second, *others))
        expected = {owner.peer_id: value for owner, value in zip(OWNERS, (1, "new", 3), strict=False)}
        assert await by_owner(reader, "all") == {nodes[0].peer_id: "base", **expected}


async def test_a_thorough_get_reads_all_copies(autojump_clock: MockClock) -> None:
    """It finds an entry that any one of the five keepers alone has taken, though the reader remembers holders."""
    async with swarm_of(9) as (network, nodes):
        await nodes[0].store("key", "base", life_s=100)
        kept = await holders(network, nodes, "key")
        reader = next(node for node in nodes[1:] if node not in kept)
        assert await value_at(reader, "key") == "base"
        for number, (holder, owner) in enumerate(zip(kept, OWNERS, strict=True), start=2):
            await bring(network, holder, "key", signed(owner, "key"))
            assert len(await reader.get("key", thoroughly=True)) == number


async def test_what_one_large_copy_alone_has_is_found_by_a_later_look(autojump_clock: MockClock) -> None:
    """An entry that one of two holders alone has taken, on its last page. A thorough look finds it at once."""
    async with swarm_of(9) as (network, nodes):
        for node in nodes[:3]:
            for number in range(10):
                await node.store("key", b"x" * 4000, suffix=str(number), life_s=100)
        first, second, *others = await holders(network, nodes, "key")
        network.take_down(*(holder.address for holder in others))
        await bring(network, second, "key", signed(OWNERS[0], "key"))
        readers = [node for node in nodes if node not in (first, second, *others)]
        for reader in readers[:2]:
            assert len(await reader.get("key")) >= 30
            await reader.get("key")
            assert len(await reader.get("key")) == 31
        assert len(await readers[2].get("key", thoroughly=True)) == 31


async def test_a_record_ends_when_it_says(autojump_clock: MockClock) -> None:
    """It is found before its end, gone after it, and swept from memory a little later; entries go one by one."""
    async with open_swarm(DirectNetwork(), 8) as nodes:
        await nodes[0].store("key", 1, life_s=60)
        await nodes[0].store("all", 1, life_s=60, suffix="early")
        await nodes[0].store("all", 2, life_s=120, suffix="late")
        await trio.sleep(50)
        assert await value_at(nodes[1], "key") == 1
        await trio.sleep(15)
        assert await nodes[1].get("key") == ()
        (found,) = await nodes[1].get("all")
        assert (found.suffix, found.ends_at) == ("late", pytest.approx(now() + 120 - 65, abs=1.0))
        await trio.sleep(250)  # what has ended is remembered for as long as somebody could bring it back
        assert all(node.statistics().records == 0 for node in nodes)


@pytest.mark.parametrize("value", [None, 0, False, 0.0, "", b"", [], {}, [None], {"": None}, -1, 2**64 - 1])
async def test_falsy_values_are_values(autojump_clock: MockClock, value: Any) -> None:
    async with open_swarm(DirectNetwork(), 3) as nodes:
        assert await nodes[0].store("", value, life_s=60)
        (found,) = await nodes[2].get("")
        assert (type(found.value), found.value) == (type(value), value)


async def test_the_pages_of_a_large_record_are_read_at_once(autojump_clock: MockClock) -> None:
    """A client finds 40 entries of 4 KB, of which a message holds ten, in two round trips of 50 ms: one for the first
    page and one for all others."""
    async with swarm_of(4) as (network, nodes):
        for node in nodes:
            for number in range(10):
                assert await node.store("big", b"x" * 4000, suffix=str(number), life_s=60)
        async with open_node(network, 99, [address_of(0)], client_mode=True) as reader:
            began, placed = trio.current_time(), len(network.calls)
            assert len(await reader.get("big")) == 40
            assert trio.current_time() - began == pytest.approx(0.1)
            placed = len(network.calls)
            assert len(await reader.get("big")) == 40
            assert len(network.calls) == placed + 1, "a second look asks for what changed"
        async with open_node(network, 98, [address_of(0)], client_mode=True) as reader:
            for node in nodes:
                await node.store("small", 1, life_s=60)
            await reader.get("small")
            for node in nodes:
                for number in range(10):
                    assert await node.store("small", b"x" * 4000, suffix=str(number), life_s=60)
            began = trio.current_time()
            assert len(await reader.get("small")) == 44
            assert trio.current_time() - began == pytest.approx(0.1), "what changed comes in pages too"


async def test_wrong_arguments_store_nothing(autojump_clock: MockClock) -> None:
    async with open_swarm(DirectNetwork(), 2) as nodes:
        good = StoreItem(key="key", value=1, life_s=60)
        bad: dict[tuple[str, str], Sequence[object]] = {
            ("value", "no DHT value"): ({1, 2}, -(2**64)),
            ("value", "16384 encoded bytes"): (b"x" * MAX_VALUE_BYTES,),
            ("key", "512 bytes"): ("k" * 513,),
            ("suffix", "64 ASCII characters"): ("s" * 65, "\u00e9", 3),
            ("life_s", "lives up to 300 s"): (0, -1, MAX_LIFE_S + 1, math.nan, math.inf, "30", True),
        }
        for (name, message), values in bad.items():
            for value in values:
                with pytest.raises(ValueError, match=message):
                    await nodes[0].store_many([good, replace(good, **{name: value})])
        with pytest.raises(ValueError, match="key"):
            await nodes[0].get("k" * 513)
        assert [node.statistics().records for node in nodes] == [0, 0]


async def test_what_the_caller_does_to_a_value_later_changes_nothing(autojump_clock: MockClock) -> None:
    """The node keeps a copy, as it arrives at the others: a tuple becomes a list."""
    async with open_swarm(DirectNetwork(), 2) as nodes:
        value = [1]
        await nodes[0].store("key", (value, 2), life_s=60)
        value.append(2)
        for node in nodes:
            assert await value_at(node, "key") == [[1], 2]


async def test_a_client_is_in_nobodys_table_and_keeps_nothing(autojump_clock: MockClock) -> None:
    """A node in client mode stores and finds, but nobody knows it and no replica lies with it."""
    async with swarm_of(8) as (network, nodes), open_node(network, 50, [address_of(0)], client_mode=True) as client:
        for number in range(10):
            assert await client.store(f"key{number}", number, life_s=300)
        await trio.sleep(120)
        assert [await value_at(client, f"key{number}") for number in range(10)] == list(range(10))
        assert client.statistics().records == 0
        assert client.statistics().contacts == 8
        assert all(contact.peer_id != client.peer_id for node in nodes for contact in node.contacts())
        assert all(target != client.address for _, target, _ in network.calls)


async def test_a_lone_node_is_its_own_swarm(autojump_clock: MockClock) -> None:
    """Without peers a node keeps its records itself; a lone client reaches nobody, which is no error."""
    async with open_swarm(DirectNetwork(), 1) as (node,):
        assert await node.store("key", 1, life_s=60) == 1
        assert await value_at(node, "key") == 1
    async with open_node(DirectNetwork(), 0, [], client_mode=True) as client:
        assert await client.store("key", 1, life_s=60) == 0
        assert await client.get("key") == ()


async def test_reading_again_is_one_call_and_brings_what_changed(autojump_clock: MockClock) -> None:
    """Within a minute a reader asks one holder for its changes, and a writer stores at its five without a walk."""
    async with swarm_of(40) as (network, nodes):
        writers, reader = nodes[:5], nodes[20]
        for node in writers:
            await node.store("key", "first", life_s=200)
        await reader.get("key")
        for step in range(5):
            placed = len(network.calls)
            await writers[step].store("key", step, life_s=200)
            stored = network.calls[placed:]
            is_holder = writers[step] in await holders(network, nodes, "key")
            assert [method for _, _, method in stored] == ["dht.store"] * (5 - is_holder)
            placed = len(network.calls)
            found = await by_owner(reader, "key")
            assert [method for _, _, method in network.calls[placed:]] == ["dht.find"]
            assert found[writers[step].peer_id] == step
            await trio.sleep(5.0)
        await trio.sleep(60.0)
        placed = len(network.calls)
        await reader.get("key")
        assert len(network.calls) - placed > 1, "the holders are looked up again"


async def test_a_newcomer_that_belongs_to_the_nearest_is_written_to_at_once(autojump_clock: MockClock) -> None:
    """A writer that remembers holders hears of it by their answers; a reader that walks there finds everything."""
    async with swarm_of(30) as (network, nodes), AsyncExitStack() as stack:
        for node in nodes[:6]:
            await node.store("key", 0, life_s=200)
        everybody, writer = list(nodes), nodes[0]
        for index in range(100, 160):
            late = await stack.enter_async_context(open_node(network, index, [address_of(3)]))
            everybody.append(late)
            if late.peer_id in nearest(everybody, "key", 5):
                break
        else:
            pytest.fail("no newcomer was near")
        await trio.sleep(1.0)
        await writer.store("key", 1, life_s=200)
        assert late in await holders(network, everybody, "key")
        values = await by_owner(await stack.enter_async_context(open_node(network, 500, [address_of(5)])), "key")
        assert values == {writer.peer_id: 1, **{node.peer_id: 0 for node in nodes[1:6]}}


async def test_what_was_known_is_not_lost_to_peers_that_lack_it(autojump_clock: MockClock) -> None:
    """A reader keeps what it has read for as long as it lives, though all who can be asked answer that they lack it."""
    async with swarm_of(12) as (network, nodes):
        await nodes[0].store("key", "kept", life_s=100)
        kept = await holders(network, nodes, "key")
        reader = next(node for node in nodes if node not in kept)
        assert await value_at(reader, "key") == "kept"
        network.take_down(*(holder.address for holder in kept))
        assert await value_at(reader, "key") == "kept"
        await trio.sleep(100)
        assert await value_at(reader, "key") is None


def left_to_itself(node: DhtNode, ahead_s: float) -> None:
    """Make a node's clock follow nobody, and differ by so much from what it was."""
    node.clock.follow = lambda guides=(): None  # type: ignore[method-assign]
    node.clock.advance(ahead_s)


async def test_a_process_that_is_started_again_goes_on_above_its_earlier_sequences(autojump_clock: MockClock) -> None:
    """A holder shows it a later entry of its own, and it signs a higher one, though its clock was set back."""
    async with swarm_of(6) as (network, nodes):
        for ahead_s, value in ((100.0, "before"), (0.0, "after")):
            async with open_node(network, 9, [address_of(0)]) as node:
                left_to_itself(node, ahead_s)
                assert await node.store("key", value, life_s=200) >= 4
                assert await value_at(nodes[1], "key") == value
            await trio.sleep(10.0)


async def test_of_two_stores_that_cross_the_later_one_stands(autojump_clock: MockClock) -> None:
    """The earlier one is refused where the later one came first; it is not issued again above it."""
    async with open_swarm(DirectNetwork(latency_s=exponential_latency(0.2, seed=2)), 6) as nodes:

        async def store(key: str, value: str) -> None:
            await nodes[0].store(key, value, life_s=60)

        for number in range(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store, f"key{number}", "earlier")
                await trio.sleep(0.01)
                nursery.start_soon(store, f"key{number}", "later")
            assert await value_at(nodes[1], f"key{number}") == "later"


async def test_another_swarms_entries_are_nothing_here(autojump_clock: MockClock) -> None:
    """A node whose entries are signed for another secret stores nothing, though it reaches everybody."""
    async with swarm_of(6) as (network, nodes):
        other = Membership(secret=b"s" * 16).tag
        async with open_node(network, 9, [address_of(0)], client_mode=True, swarm=other) as stranger:
            assert await stranger.store("key", 1, life_s=60) == 0
            assert await nodes[3].get("key") == ()


async def test_an_identity_must_be_the_callers(autojump_clock: MockClock) -> None:
    """Entries signed by another key than the peer's would be another peer's."""
    caller = DirectNetwork().caller(None, PeerId(bytes(32)))
    node = open_dht_node(caller, identity=Identity.generate(), clock=SwarmClock.virtual(), rng=random.Random(0))
    with pytest.raises(ValueError, match="the identity is that of"):
        await node.__aenter__()


async def test_joining_through_the_dead_names_them(autojump_clock: MockClock) -> None:
    """If no initial peer answers, DialFailed lists them all in one line, after a single timeout."""
    network = DirectNetwork()
    network.caller(address_of(1), PeerId(bytes(32)))
    network.take_down(address_of(1))
    started = now()
    with pytest.raises(DialFailed, match=r"10\.0\.0\.1:1001, 10\.0\.0\.1:1002$") as caught:
        await open_node(network, 0, [address_of(1), address_of(2)]).__aenter__()
    assert "\n" not in str(caught.value)
    assert now() - started < 3.5


async def test_one_living_initial_peer_is_enough(autojump_clock: MockClock) -> None:
    """Dead initial peers beside a living one cost a moment, not their timeout; the own address is skipped."""
    async with swarm_of(4) as (network, nodes):
        network.caller(address_of(60), PeerId(bytes(32)))
        network.take_down(address_of(60))
        started = now()
        initial = [address_of(60), address_of(61), address_of(2), address_of(9)]
        async with open_node(network, 9, initial) as late:
            assert now() - started < 2.0
            assert {contact.peer_id for contact in late.contacts()} == {node.peer_id for node in nodes}


async def test_the_same_seed_gives_the_same_swarm(autojump_clock: MockClock) -> None:
    """Two runs place the same calls (up to their order): all chance comes from the given rng."""
    logs = []
    for _ in range(2):
        network = DirectNetwork()
        async with open_swarm(network, 8) as nodes:
            for number in range(5):
                await nodes[number].store(f"key{number}", number, life_s=60)
        logs.append(sorted(map(str, network.calls)))
    assert logs[0] == logs[1]


@pytest.mark.parametrize("ahead_s", [45.0, -45.0, 32_400.0, 0.4])
async def test_a_newcomer_follows_the_clocks_of_the_swarm(autojump_clock: MockClock, ahead_s: float) -> None:
    """Its records are found and end in time, however wrong its clock is; less than half a second is left alone."""
    async with (
        swarm_of(3) as (network, nodes),
        open_node(network, 5, [address_of(0)], clock=SwarmClock(start_s=now() + ahead_s)) as node,
    ):
        left_s = ahead_s if abs(ahead_s) < 0.5 else 0.0
        assert node.clock.now() == pytest.approx(now() + left_s, abs=0.05)
        assert node.statistics().clock_skew_s == pytest.approx(-left_s, abs=0.05)
        assert await node.store("key", 1, life_s=30)
        assert await value_at(nodes[2], "key") == 1
        await trio.sleep(31.0)
        assert await nodes[2].get("key") == ()


@pytest.mark.parametrize("ahead_s", [-30.0, 30.0, 100.0])
async def test_a_clock_that_follows_nobody_is_borne(autojump_clock: MockClock, ahead_s: float) -> None:
    """Lives count from first sight, so an owner whose clock is two minutes off is found and, dead, gone in time."""
    async with swarm_of(8) as (network, nodes), open_node(network, 20, [address_of(0)]) as node:
        left_to_itself(node, ahead_s)
        assert await node.store("key", 1, life_s=30)
        assert await value_at(nodes[2], "key") == 1
        await trio.sleep(29.0)
        assert await value_at(nodes[3], "key") == 1
        await trio.sleep(2.0)
        assert all([await each.get("key") == () for each in nodes])


@pytest.mark.parametrize("ahead_s", [200.0, -200.0])
async def test_a_clock_that_is_too_far_off_is_refused_and_said(autojump_clock: MockClock, ahead_s: float) -> None:
    """Its entries are taken by nobody, and its doubts name by how much it is off."""
    await trio.sleep(1000.0)
    async with swarm_of(5) as (network, nodes), open_node(network, 20, [address_of(0)]) as node:
        left_to_itself(node, ahead_s)
        assert await node.store("key", 1, life_s=30) == 1, "it believes itself"
        assert [each.statistics().records for each in nodes] == [0] * 5
        assert f"is 200 s {'behind' if ahead_s > 0 else 'ahead of'} this one" in node.clock.doubts()


async def test_clocks_are_compared_again_and_again(autojump_clock: MockClock) -> None:
    """A clock that stood still for a while, as in a machine that was paused, is right again within two minutes."""
    async with swarm_of(1) as (network, nodes), open_node(network, 5, [address_of(0)]) as node:
        node.clock.advance(-90.0)
        await node.get("key")
        assert f"the clock of peer {nodes[0].peer_id.short} is 90 s ahead of this one" in node.clock.doubts()
        await trio.sleep(120.0)
        assert node.clock.now() == pytest.approx(now(), abs=0.05)
        assert node.clock.doubts() == ""


async def test_a_small_difference_is_made_up_slowly(autojump_clock: MockClock) -> None:
    """Five seconds are slewed at a tenth of a second a second: no moment comes twice."""
    async with swarm_of(4) as (network, _), open_node(network, 9, [address_of(0)]) as node:
        node.clock.advance(5.0)
        before = node.clock.now()
        for _ in range(160):
            await node.get("key")
            await trio.sleep(1.0)
            assert node.clock.now() > before + 0.8
            before = node.clock.now()
        assert node.clock.now() == pytest.approx(now(), abs=0.6)


async def test_a_few_wrong_clocks_move_nobody_and_are_named(autojump_clock: MockClock) -> None:
    """Three of nine are an hour ahead: the median is right, and everybody says which clocks are off."""
    async with swarm_of(6) as (network, nodes), AsyncExitStack() as stack:
        for number in range(15, 18):
            stranger = await stack.enter_async_context(open_node(network, number, [address_of(0)]))
            left_to_itself(stranger, 3600.0)
        await trio.sleep(100.0)
        for node in nodes:
            assert len(await node.find_nearest(0)) == 8
            assert node.clock.now() == now()
            assert len(node.clock.astray()) == 3
            assert "3600 s ahead of this one (3 of " in node.clock.doubts()


async def test_peers_of_an_earlier_life_are_tried(autojump_clock: MockClock) -> None:
    """A node joins through peers that it remembers if all initial ones are dead, or if there are none."""
    async with swarm_of(4) as (network, nodes):
        known = nodes[0].contacts()
        network.take_down(address_of(0))
        async with open_node(network, 20, [address_of(0)], remembered=known) as node:
            assert {contact.peer_id for contact in node.contacts()} >= {each.peer_id for each in nodes[1:]}
        with pytest.raises(DialFailed, match="none of the initial peers"):
            await open_node(network, 21, [address_of(0)]).__aenter__()
        network.partition(address_of(22))
        async with open_node(network, 22, [], remembered=known) as node:
            assert await node.store("key", 1, life_s=60) == 1
            network.partition()
            await trio.sleep(20.0)
            assert len(node.contacts()) >= 3


async def test_what_a_node_has_read_goes_when_it_is_closed(autojump_clock: MockClock) -> None:
    """At once, and not when a collector of circles comes by: a process may open and close many."""
    async with swarm_of(6) as (network, nodes):
        await nodes[0].store("key", "value", life_s=60)
        gc.disable()
        try:
            async with open_node(network, 9, [address_of(1)]) as node:
                assert await value_at(node, "key") == "value"
                await node.store("other", 1, life_s=60)
                closed = weakref.ref(node)
            del node
            await trio.sleep(1.0)
            assert closed() is None
        finally:
            gc.enable()


async def test_a_machine_that_slept_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a machine is suspended trio's clock stands still, and the swarm's time goes on."""
    uptime = trio.current_time()
    monkeypatch.setattr(time, "clock_gettime", lambda _: uptime)
    clock = SwarmClock.wall()
    before = clock.now()
    assert before == pytest.approx(time.time(), abs=60)
    uptime += 5000.0
    assert clock.now() == pytest.approx(before + 5000.0)


def test_a_config_is_checked() -> None:
    for name in ("bucket_size", "depth_modulo", "replicas", "rpc_timeout_s", "parallelism", "max_storage_bytes"):
        with pytest.raises(ValueError, match=name):
            DhtConfig(**{name: 0})
