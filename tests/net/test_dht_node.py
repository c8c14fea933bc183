"""DHT nodes over a direct network in virtual time: joining, storing and finding."""

import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from dmoe_net.clock import SwarmClock
from dmoe_net.dht.config import DhtConfig
from dmoe_net.dht.entries import encode_value, sign_entry
from dmoe_net.dht.node import DhtNode, StoreItem, open_dht_node
from dmoe_net.dht.routing_table import key_id
from dmoe_net.errors import DialFailed
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.keys import Identity, Membership
from tests.net.direct_network import (
    DirectNetwork,
    address_of,
    exponential_latency,
    holders,
    nearest,
    now,
    open_node,
    open_swarm,
    value_at,
)


def network_of(nodes: Sequence[DhtNode]) -> DirectNetwork:
    """The network that these nodes are on."""
    network: DirectNetwork = nodes[0]._calls.caller._network  # type: ignore[attr-defined]
    return network


async def by_owner(node: DhtNode, key: str) -> dict[PeerId, Any]:
    """Values under a key by the peer that signed them."""
    return {entry.owner: entry.value for entry in await node.get(key)}


async def test_every_value_is_found_from_every_node(autojump_clock: MockClock) -> None:
    """16 nodes that ask 8 each, random latency: each value is found from each node, and lies on the 5 nearest."""
    network = DirectNetwork(latency_s=exponential_latency(0.05, seed=1))
    async with open_swarm(network, 16, config=DhtConfig(bucket_size=8)) as nodes:
        for number, node in enumerate(nodes[::3]):
            assert await node.store(f"key{number}", number, life_s=300) >= 5
        for number in range(6):
            kept = {node.peer_id for node in holders(nodes, f"key{number}")}
            assert kept >= nearest(nodes, f"key{number}", 5)
        for node in nodes:
            found = await node.get_many([f"key{number}" for number in range(6)])
            assert [entry.value for entries in found.values() for entry in entries] == list(range(6))
            assert 8 <= node.statistics().contacts <= 15


@pytest.mark.parametrize("replicas", [1, 3, 20])
async def test_replicas_are_counted_exactly(autojump_clock: MockClock, replicas: int) -> None:
    """The nearest `replicas` nodes keep a record, `store` says how many, and storing it again adds none."""
    async with open_swarm(DirectNetwork(), 24, config=DhtConfig(replicas=replicas)) as nodes:
        for step in range(3):
            assert await nodes[step].store("key", step, life_s=100) == replicas
            assert {node.peer_id for node in holders(nodes, "key")} == nearest(nodes, "key", replicas)


@pytest.mark.parametrize("seed", range(5))
async def test_what_the_first_node_stored_alone_is_kept_by_those_who_come(autojump_clock: MockClock, seed: int) -> None:
    """The first node takes others that come for holders nearer to its record than itself; none has it yet. Its
    own entry is found by all the same, also beside entries that the newcomers store."""
    network = DirectNetwork(latency_s=exponential_latency(0.05, seed=seed))
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(open_node(network, 10 * seed, []))
        assert await first.store("key", "first", life_s=300) == 1
        entrance = [address_of(10 * seed)]
        nodes = [
            await stack.enter_async_context(open_node(network, 10 * seed + index, entrance)) for index in range(1, 8)
        ]
        await trio.sleep(2.0)
        assert {node.peer_id for node in holders([first, *nodes], "key")} >= nearest([first, *nodes], "key", 5)
        for node in nodes:
            await node.store("key", "later", life_s=300)
        for node in nodes:
            assert len(await by_owner(node, "key")) == 8


async def test_nobody_writes_over_another(autojump_clock: MockClock) -> None:
    """Twelve owners, one key: each finds all twelve; one that stores again changes its own alone, and so does one that
    withdraws."""
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
        assert [(entry.suffix, entry.value) for entry in await nodes[1].get("key")] == [
            ("", ""),
            ("a", "a"),
            ("b", "b"),
        ]
        await nodes[0].withdraw("key", "a")
        await nodes[0].store("key", 7, life_s=60, suffix="b")
        assert [(entry.suffix, entry.value) for entry in await nodes[1].get("key")] == [("", ""), ("b", 7)]


async def test_partial_copies_are_merged_by_the_reader(autojump_clock: MockClock) -> None:
    """Two holders that each missed an entry: the reader gets the union, the highest sequence of each."""
    async with open_swarm(DirectNetwork(), 8) as nodes:
        await nodes[0].store("all", "base", life_s=100)
        first, second, *_ = holders(nodes, "all")
        for holder in holders(nodes, "all")[2:]:
            holder._storage.sweep(now() + 1000)
        rng = random.Random(1)
        owners = [Identity.from_seed(rng.randbytes(32)) for _ in range(3)]
        for holder, number, sequence, value in (
            (first, 0, 1, 1),
            (first, 1, 1, "old"),
            (second, 1, 2, "new"),
            (second, 2, 1, 3),
        ):
            entry = sign_entry(
                owners[number],
                key_id("all"),
                value=encode_value(value),
                sequence=sequence,
                issued_at=now(),
                life_s=100.0,
            )
            holder._storage.store(key_id("all"), [(entry, 100.0)], account=entry.owner, now=now())
        reader = next(node for node in nodes if node not in (first, second))
        found = await by_owner(reader, "all")
        assert found == {
            nodes[0].peer_id: "base",
            **{owner.peer_id: value for owner, value in zip(owners, (1, "new", 3), strict=True)},
        }


async def test_a_thorough_get_reads_all_copies(autojump_clock: MockClock) -> None:
    """An entry that one of the five keepers alone has taken, whichever it is, though the reader remembers holders."""
    async with open_swarm(DirectNetwork(), 9) as nodes:
        await nodes[0].store("key", "base", life_s=100)
        kept, rng = holders(nodes, "key"), random.Random(1)
        reader = next(node for node in nodes[1:] if node not in kept)
        assert await value_at(reader, "key") == "base"
        for number, holder in enumerate(kept, start=2):
            owner = Identity.from_seed(rng.randbytes(32))
            entry = sign_entry(owner, key_id("key"), value=encode_value(1), sequence=1, issued_at=now(), life_s=100.0)
            holder._storage.store(key_id("key"), [(entry, 100.0)], account=entry.owner, now=now())
            assert len(await reader.get("key", thoroughly=True)) == number


async def test_a_record_ends_when_it_says(autojump_clock: MockClock) -> None:
    """Found before its end, gone after it, swept from memory a little later; entries go one by one."""
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
    """Falsy values under an empty key come back as they were, type included."""
    async with open_swarm(DirectNetwork(), 3) as nodes:
        assert await nodes[0].store("", value, life_s=60)
        (found,) = await nodes[2].get("")
        assert (type(found.value), found.value) == (type(value), value)


async def test_a_large_record_is_read_page_by_page(autojump_clock: MockClock) -> None:
    """The entries of 40 owners of 4 KB each do not fit one message of 64 KiB; all are stored and found, by a client
    and by nodes that read on from what they know."""
    async with open_swarm(DirectNetwork(), 40) as nodes:
        for node in nodes:
            assert await node.store("big", b"x" * 4000, life_s=60)
        async with open_node(network_of(nodes), 99, [address_of(0)], client_mode=True) as reader:
            for _ in range(2):
                assert {entry.owner for entry in await reader.get("big")} == {node.peer_id for node in nodes}


async def test_wrong_arguments_store_nothing(autojump_clock: MockClock) -> None:
    """One bad item of many raises ValueError before anything is stored."""
    async with open_swarm(DirectNetwork(), 2) as nodes:
        good = StoreItem(key="key", value=1, life_s=60)
        bad_items = [
            StoreItem(key="key", value={1, 2}, life_s=60),
            StoreItem(key="k" * 513, value=1, life_s=60),
            StoreItem(key="key", value=1, suffix="s" * 65, life_s=60),
            StoreItem(key="key", value=1, life_s=float("nan")),
            StoreItem(key="key", value=1, life_s=301),
            StoreItem(key="key", value=-(2**64), life_s=60),
        ]
        for bad in bad_items:
            with pytest.raises(ValueError, match=r"DHT|suffix|lives"):
                await nodes[0].store_many([good, bad])
        with pytest.raises(ValueError, match="key"):
            await nodes[0].get("k" * 513)
        assert holders(nodes, "key") == []


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
    network = DirectNetwork()
    async with (
        open_swarm(network, 8) as nodes,
        open_node(network, 50, [address_of(0)], client_mode=True) as client,
    ):
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
    network = DirectNetwork()
    async with open_swarm(network, 40) as nodes:
        writers, reader = nodes[:5], nodes[20]
        for node in writers:
            await node.store("key", "first", life_s=200)
        await reader.get("key")
        for step in range(5):
            placed = len(network.calls)
            await writers[step].store("key", step, life_s=200)
            stored = network.calls[placed:]
            assert [method for _, _, method in stored] == ["dht.store"] * (5 - (writers[step] in holders(nodes, "key")))
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
    """A writer that remembers its holders hears of the newcomer by their answers, and a reader that walks there first
    finds everything."""
    network = DirectNetwork()
    async with open_swarm(network, 30) as nodes, AsyncExitStack() as stack:
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
        assert late in holders(everybody, "key")
        values = await by_owner(await stack.enter_async_context(open_node(network, 500, [address_of(5)])), "key")
        assert values == {writer.peer_id: 1, **{node.peer_id: 0 for node in nodes[1:6]}}


async def test_what_was_known_is_not_lost_to_a_holder_that_lacks_it(autojump_clock: MockClock) -> None:
    """A reader keeps what it has read for as long as it lives, though every holder has lost it since."""
    async with open_swarm(DirectNetwork(), 12) as nodes:
        await nodes[0].store("key", "kept", life_s=100)
        reader = next(node for node in nodes if node not in holders(nodes, "key"))
        assert await value_at(reader, "key") == "kept"
        for holder in holders(nodes, "key"):
            holder._storage.sweep(now() + 1000)
        assert await value_at(reader, "key") == "kept"
        await trio.sleep(100)
        assert await value_at(reader, "key") is None


async def test_a_process_that_is_started_again_goes_on_above_its_earlier_sequences(autojump_clock: MockClock) -> None:
    """Even if its clock was set back: a holder that has a later entry of it shows that, and it signs a higher one."""
    network = DirectNetwork()
    async with open_swarm(network, 6) as nodes:
        for start_s, value in ((now() + 100.0, "before"), (now(), "after")):
            async with _open_with_clock(network, 9, start_s, [address_of(0)]) as node:
                node.clock.follow = lambda guides=(): None  # type: ignore[method-assign]
                node.clock.advance(start_s - node.clock.now())
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
    network = DirectNetwork()
    async with open_swarm(network, 6) as nodes:
        identity = Identity.from_seed(b"x" * 32)
        caller = network.caller(None, identity.peer_id)
        async with open_dht_node(
            caller,
            identity=identity,
            swarm=Membership(secret=b"s" * 16).tag,
            clock=SwarmClock.virtual(),
            rng=random.Random(5),
            initial_peers=[address_of(0)],
        ) as stranger:
            assert await stranger.store("key", 1, life_s=60) == 0
            assert await nodes[3].get("key") == ()


async def test_an_identity_must_be_the_callers(autojump_clock: MockClock) -> None:
    """Entries signed by another key than the peer's would be another peer's."""
    caller = DirectNetwork().caller(None, PeerId(bytes(32)))
    with pytest.raises(ValueError, match="the identity is that of"):
        async with open_dht_node(
            caller, identity=Identity.generate(), clock=SwarmClock.virtual(), rng=random.Random(0)
        ):
            pass


async def test_joining_through_the_dead_names_them(autojump_clock: MockClock) -> None:
    """If no initial peer answers, DialFailed lists them all in one line, after a single timeout."""
    network = DirectNetwork()
    network.caller(address_of(1), PeerId(bytes(32)))
    network.take_down(address_of(1))
    started = now()
    with pytest.raises(DialFailed, match=r"10\.0\.0\.1:1001, 10\.0\.0\.1:1002$") as caught:
        async with open_node(network, 0, [address_of(1), address_of(2)]):
            pytest.fail("joined nobody")
    assert "\n" not in str(caught.value)
    assert now() - started < 3.5


async def test_one_living_initial_peer_is_enough(autojump_clock: MockClock) -> None:
    """Dead initial peers beside a living one cost a moment, not their timeout; the own address is skipped."""
    network = DirectNetwork()
    async with open_swarm(network, 4) as nodes:
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
    """Its records are found by others and end when they should, however wrong its own clock is; a difference of less
    than half a second is left alone."""
    network = DirectNetwork()
    async with (
        open_swarm(network, 3) as nodes,
        _open_with_clock(network, 5, now() + ahead_s, [address_of(0)]) as node,
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
    network = DirectNetwork()
    async with (
        open_swarm(network, 8) as nodes,
        _open_with_clock(network, 20, now(), [address_of(0)]) as node,
    ):
        node.clock.follow = lambda guides=(): None  # type: ignore[method-assign]
        node.clock.advance(ahead_s)
        assert await node.store("key", 1, life_s=30)
        assert await value_at(nodes[2], "key") == 1
        await trio.sleep(29.0)
        assert await value_at(nodes[3], "key") == 1
        await trio.sleep(2.0)
        assert all([await each.get("key") == () for each in nodes])


@pytest.mark.parametrize("ahead_s", [200.0, -200.0])
async def test_a_clock_that_is_too_far_off_is_refused_and_said(autojump_clock: MockClock, ahead_s: float) -> None:
    """Its entries are taken by nobody, and its doubts name by how much it is off."""
    network = DirectNetwork()
    await trio.sleep(1000.0)
    async with open_swarm(network, 5) as nodes, _open_with_clock(network, 20, now(), [address_of(0)]) as node:
        node.clock.follow = lambda guides=(): None  # type: ignore[method-assign]
        node.clock.advance(ahead_s)
        assert await node.store("key", 1, life_s=30) == 1, "it believes itself"
        assert holders(nodes, "key") == []
        assert f"is 200 s {'behind' if ahead_s > 0 else 'ahead of'} this one" in node.clock.doubts()


async def test_clocks_are_compared_again_and_again(autojump_clock: MockClock) -> None:
    """A clock that stood still for a while, as in a machine that was paused, is right again within two minutes."""
    network = DirectNetwork()
    async with open_swarm(network, 1) as nodes, _open_with_clock(network, 5, now(), [address_of(0)]) as node:
        node.clock.advance(-90.0)
        await node.get("key")
        assert f"the clock of peer {nodes[0].peer_id.short} is 90 s ahead of this one" in node.clock.doubts()
        await trio.sleep(120.0)
        assert node.clock.now() == pytest.approx(now(), abs=0.05)
        assert node.clock.doubts() == ""


async def test_a_small_difference_is_made_up_slowly(autojump_clock: MockClock) -> None:
    """Five seconds are slewed at a tenth of a second a second: no moment comes twice."""
    network = DirectNetwork()
    async with open_swarm(network, 4), _open_with_clock(network, 9, now(), [address_of(0)]) as node:
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
    network = DirectNetwork()
    async with open_swarm(network, 6) as nodes, AsyncExitStack() as stack:
        for number in range(15, 18):
            stranger = await stack.enter_async_context(_open_with_clock(network, number, now(), [address_of(0)]))
            stranger.clock.advance(3600.0)
            stranger.clock.follow = lambda guides=(): None  # type: ignore[method-assign]
        await trio.sleep(100.0)
        for node in nodes:
            assert len(await node.find_nearest(0)) == 8
            assert node.clock.now() == now()
            assert len(node.clock.astray()) == 3
            assert "3600 s ahead of this one (3 of " in node.clock.doubts()


def _open_with_clock(network: DirectNetwork, index: int, start_s: float, initial: Sequence[Address]) -> Any:
    """A node whose clock begins at `start_s`."""
    identity = Identity.from_seed(random.Random(index).randbytes(32))
    caller = network.caller(address_of(index), identity.peer_id)
    clock = SwarmClock(start_s=start_s)
    return open_dht_node(caller, identity=identity, clock=clock, rng=random.Random(index), initial_peers=initial)


async def test_peers_of_an_earlier_life_are_tried(autojump_clock: MockClock) -> None:
    """A node whose initial peers are all dead joins through those that it remembers; one that was told of nobody does,
    too, and is its own swarm until they answer."""
    network = DirectNetwork()
    async with open_swarm(network, 4) as nodes:
        known = nodes[0].contacts()
        network.take_down(address_of(0))

        def opened(index: int, initial: Sequence[Address], remembered: Sequence[Contact]) -> Any:
            identity = Identity.from_seed(random.Random(index).randbytes(32))
            return open_dht_node(
                network.caller(address_of(index), identity.peer_id),
                identity=identity,
                clock=SwarmClock.virtual(),
                rng=random.Random(index),
                initial_peers=initial,
                remembered=remembered,
            )

        async with opened(20, [address_of(0)], known) as node:
            assert {contact.peer_id for contact in node.contacts()} >= {each.peer_id for each in nodes[1:]}
        with pytest.raises(DialFailed, match="none of the initial peers"):
            async with opened(21, [address_of(0)], []):
                pass
        network.partition(address_of(22))
        async with opened(22, [], known) as node:
            assert await node.store("key", 1, life_s=60) == 1
            network.partition()
            await trio.sleep(20.0)
            assert len(node.contacts()) >= 3


async def test_a_machine_that_slept_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a machine is suspended trio's clock stands still, and the swarm's time goes on."""
    uptime = trio.current_time()
    monkeypatch.setattr("dmoe_net.clock.time.clock_gettime", lambda _: uptime)
    clock = SwarmClock.wall()
    before = clock.now()
    assert before == pytest.approx(time.time(), abs=60)
    uptime += 5000.0
    assert clock.now() == pytest.approx(before + 5000.0)


def test_a_config_is_checked() -> None:
    """Impossible settings raise ValueError and name the field."""
    for name in ("bucket_size", "depth_modulo", "replicas", "rpc_timeout_s", "parallelism", "max_storage_bytes"):
        with pytest.raises(ValueError, match=name):
            DhtConfig(**{name: 0})
