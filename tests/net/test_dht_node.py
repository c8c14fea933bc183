"""DHT nodes over a direct network in virtual time: joining, storing and finding."""

import math
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
from dmoe_net.dht.lookup import LookupConfig
from dmoe_net.dht.node import DhtNode, StoreItem, open_dht_node
from dmoe_net.dht.records import Dictionary, Entry, make_entry
from dmoe_net.dht.routing_table import key_id
from dmoe_net.errors import DialFailed
from dmoe_net.identity import Address, PeerId
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


async def test_every_value_is_found_from_every_node(autojump_clock: MockClock) -> None:
    """16 nodes that ask 8 each, random latency: each value is found from each node, and lies on the 5 nearest."""
    network = DirectNetwork(latency_s=exponential_latency(0.05, seed=1))
    config = DhtConfig(bucket_size=8, lookup=LookupConfig(beam_size=8))
    async with open_swarm(network, 16, config=config) as nodes:
        for number, node in enumerate(nodes[::3]):
            assert await node.store(f"key{number}", number, expiration=now() + 3600)
        for number in range(6):
            kept = {node.peer_id for node in holders(nodes, f"key{number}")}
            assert kept == nearest(nodes, f"key{number}", 5)
        for node in nodes:
            found = await node.get_many([f"key{number}" for number in range(6)])
            assert [entry.value for entry in found.values() if isinstance(entry, Entry)] == list(range(6))
            assert 8 <= node.statistics().contacts <= 15


@pytest.mark.parametrize("replicas", [1, 3, 20])
async def test_replicas_are_counted_exactly(autojump_clock: MockClock, replicas: int) -> None:
    """The nearest `replicas` nodes keep a record, and storing it again adds none."""
    async with open_swarm(DirectNetwork(), 24, config=DhtConfig(replicas=replicas)) as nodes:
        for step in range(3):
            assert await nodes[step].store("key", step, expiration=now() + 100)
            assert {node.peer_id for node in holders(nodes, "key")} == nearest(nodes, "key", replicas)


async def test_the_later_expiration_wins_in_both_orders(autojump_clock: MockClock) -> None:
    """The longer lived value stands whether it was stored first (the other is rejected) or second."""
    async with open_swarm(DirectNetwork(), 10) as nodes:
        assert await nodes[1].store("key", "long", expiration=now() + 100)
        assert not await nodes[2].store("key", "short", expiration=now() + 50)
        assert await value_at(nodes[3], "key") == "long"
        assert await nodes[4].store("key", "longer", expiration=now() + 200)
        assert await value_at(nodes[5], "key") == "longer"


async def test_dictionaries_grow_from_many_nodes(autojump_clock: MockClock) -> None:
    """Subkeys stored from different nodes are found together, each with its own expiration."""
    async with open_swarm(DirectNetwork(), 12) as nodes:
        ends = [now() + 100.0 + number for number in range(12)]
        for number, node in enumerate(nodes):
            assert await node.store("all", number, subkey=f"{number}", expiration=ends[number])
        found = await nodes[3].get("all")
        assert isinstance(found, Dictionary)
        assert dict(found.entries) == {f"{n}": make_entry(n, ends[n]) for n in range(12)}


async def test_partial_copies_are_merged_by_the_reader(autojump_clock: MockClock) -> None:
    """Replicas that each missed something: the reader gets the union, the latest of each subkey."""
    async with open_swarm(DirectNetwork(), 8) as nodes:
        end = now() + 100.0
        await nodes[0].store("all", "base", subkey="base", expiration=end)
        first, second, *_ = holders(nodes, "all")
        first._storage.store(key_id("all"), [("a", make_entry(1, end)), ("b", make_entry("old", end))], now())
        second._storage.store(key_id("all"), [("b", make_entry("new", end + 1)), ("c", make_entry(3, end))], now())
        found = await nodes[-1].get("all")
        assert isinstance(found, Dictionary)
        assert {subkey: entry.value for subkey, entry in found.entries.items()} == {
            "base": "base",
            "a": 1,
            "b": "new",
            "c": 3,
        }


async def test_a_record_ends_when_it_says(autojump_clock: MockClock) -> None:
    """Found before its expiration, gone after it, swept from memory a little later; subkeys go one by one."""
    async with open_swarm(DirectNetwork(), 8) as nodes:
        end = now() + 60.0
        await nodes[0].store("key", 1, expiration=end)
        await nodes[0].store("all", 1, subkey="early", expiration=end)
        await nodes[0].store("all", 2, subkey="late", expiration=end + 60)
        await trio.sleep(50)
        assert await value_at(nodes[1], "key") == 1
        await trio.sleep(15)
        assert await nodes[1].get("key") is None
        found = await nodes[1].get("all")
        assert isinstance(found, Dictionary)
        assert list(found.entries) == ["late"]
        await trio.sleep(80)
        assert all(node.statistics().records == 0 for node in nodes)


async def test_an_expired_store_is_refused_and_a_far_one_is_capped(autojump_clock: MockClock) -> None:
    """A record that has ended is not stored; one that is to end in a century, or never, ends in five minutes."""
    async with open_swarm(DirectNetwork(), 4) as nodes:
        await trio.sleep(10)
        assert not await nodes[0].store("key", 1, expiration=now())
        assert await nodes[1].get("key") is None
        for key, expiration in (("a", now() + 1e10), ("b", math.inf), ("c", 10**400)):
            before = now()
            assert await nodes[0].store(key, 1, expiration=expiration)
            found = await nodes[1].get(key)
            assert isinstance(found, Entry)
            assert before + 300 <= found.expiration <= now() + 300


@pytest.mark.parametrize("value", [None, 0, False, 0.0, "", b"", [], {}, [None], {"": None}, -1, 2**64 - 1])
async def test_falsy_values_are_values(autojump_clock: MockClock, value: Any) -> None:
    """Falsy values, empty keys and empty subkeys come back as they were, type included."""
    async with open_swarm(DirectNetwork(), 3) as nodes:
        assert await nodes[0].store("", value, expiration=now() + 60)
        assert await nodes[1].store("d", value, subkey="", expiration=now() + 60)
        plain, table = await nodes[2].get(""), await nodes[2].get("d")
        assert isinstance(plain, Entry)
        assert isinstance(table, Dictionary)
        for found in (plain.value, table.entries[""].value):
            assert (type(found), found) == (type(value), value)


async def test_a_large_dictionary_is_read_page_by_page(autojump_clock: MockClock) -> None:
    """600 subkeys of 300 bytes do not fit one message of 64 KiB; all are stored and found."""
    async with open_swarm(DirectNetwork(), 4) as nodes:
        end = now() + 60
        items = [StoreItem(key="big", subkey=f"{n:03}", value=b"x" * 300, expiration=end) for n in range(600)]
        assert all(await nodes[0].store_many(items))
        async with open_node(nodes_network(nodes), 99, [address_of(0)], client_mode=True) as reader:
            found = await reader.get("big")
        assert isinstance(found, Dictionary)
        assert sorted(found.entries) == [f"{n:03}" for n in range(600)]


def nodes_network(nodes: list[DhtNode]) -> DirectNetwork:
    """The network that these nodes are on."""
    network: DirectNetwork = nodes[0]._calls.caller._network  # type: ignore[attr-defined]
    return network


async def test_wrong_arguments_store_nothing(autojump_clock: MockClock) -> None:
    """One bad item of many raises ValueError before anything is stored."""
    async with open_swarm(DirectNetwork(), 2) as nodes:
        good = StoreItem(key="key", value=1, expiration=now() + 60)
        bad_items = [
            StoreItem(key="key", value={1, 2}, expiration=now() + 60),
            StoreItem(key="k" * 513, value=1, expiration=now() + 60),
            StoreItem(key="key", value=1, subkey="s" * 257, expiration=now() + 60),
            StoreItem(key="key", value=1, expiration=float("nan")),
            StoreItem(key="key", value=-(2**64), expiration=now() + 60),
        ]
        for bad in bad_items:
            with pytest.raises(ValueError, match=r"DHT|subkey|expiration"):
                await nodes[0].store_many([good, bad])
        with pytest.raises(ValueError, match="key"):
            await nodes[0].get("k" * 513)
        assert holders(nodes, "key") == []


async def test_what_the_caller_does_to_a_value_later_changes_nothing(autojump_clock: MockClock) -> None:
    """The node keeps a copy, as it arrives at the others: a tuple becomes a list."""
    async with open_swarm(DirectNetwork(), 2) as nodes:
        value = [1]
        await nodes[0].store("key", (value, 2), expiration=now() + 60)
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
            assert await client.store(f"key{number}", number, expiration=now() + 600)
        await trio.sleep(120)
        assert [await value_at(client, f"key{number}") for number in range(10)] == list(range(10))
        assert client.statistics().records == 0
        assert client.statistics().contacts == 8
        assert all(contact.peer_id != client.peer_id for node in nodes for contact in node.contacts())
        assert all(target != client.address for _, target, _ in network.calls)


async def test_a_lone_node_is_its_own_swarm(autojump_clock: MockClock) -> None:
    """Without peers a node keeps its records itself; a lone client reaches nobody, which is no error."""
    async with open_swarm(DirectNetwork(), 1) as (node,):
        assert await node.store("key", 1, expiration=now() + 60)
        assert await value_at(node, "key") == 1
    async with open_node(DirectNetwork(), 0, [], client_mode=True) as client:
        assert not await client.store("key", 1, expiration=now() + 60)
        assert await client.get("key") is None


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
                await nodes[number].store(f"key{number}", number, expiration=now() + 60)
        logs.append(sorted(map(str, network.calls)))
    assert logs[0] == logs[1]


@pytest.mark.parametrize("ahead_s", [45.0, -45.0, 32_400.0, 0.9])
async def test_a_newcomer_follows_the_clocks_of_its_initial_peers(autojump_clock: MockClock, ahead_s: float) -> None:
    """Its records are found by others and end when they should, however wrong its own clock is; a difference of less
    than a second is left alone."""
    network = DirectNetwork()
    async with (
        open_swarm(network, 3) as nodes,
        _open_with_clock(network, 5, now() + ahead_s, [address_of(0)]) as node,
    ):
        left_s = ahead_s if abs(ahead_s) < 1 else 0.0
        assert node.clock.now() == pytest.approx(now() + left_s, abs=0.05)
        assert node.statistics().clock_skew_s == pytest.approx(-left_s, abs=0.05)
        assert await node.store("key", 1, expiration=node.clock.now() + 30.0)
        found = await nodes[2].get("key")
        assert isinstance(found, Entry)
        assert found.value == 1
        await trio.sleep(31.0)
        assert await nodes[2].get("key") is None


async def test_clocks_are_compared_again_and_again(autojump_clock: MockClock) -> None:
    """A clock that stood still for a while, as in a machine that was paused, is right again within two minutes."""
    network = DirectNetwork()
    async with open_swarm(network, 1) as nodes, _open_with_clock(network, 5, now(), [address_of(0)]) as node:
        node.clock.advance(-90.0)
        assert not await node.store("key", 1, expiration=node.clock.now() + 30.0)
        assert f"the clock of peer {nodes[0].peer_id.short} is 90 s ahead of this one" in node.clock.doubts()
        await trio.sleep(120.0)
        assert node.clock.now() == pytest.approx(now(), abs=0.05)
        assert node.clock.doubts() == ""


async def test_strangers_do_not_move_a_clock_but_are_named(autojump_clock: MockClock) -> None:
    """Three peers an hour ahead, against one initial peer: its clock is kept, and a node that began the swarm keeps its
    own. Both say which clocks are off."""
    network = DirectNetwork()
    async with open_swarm(network, 2) as nodes, AsyncExitStack() as stack:
        for number in range(5, 8):
            stranger = await stack.enter_async_context(_open_with_clock(network, number, now(), [address_of(0)]))
            stranger.clock.advance(3600.0)
            stranger.clock.follow = lambda guides: None  # type: ignore[method-assign]
        await trio.sleep(100.0)
        for node in nodes:
            await node.get("key")
            assert node.clock.now() == now()
            assert len(node.clock.astray()) == 3
            assert node.clock.skew_s == pytest.approx(3600.0, abs=0.05)
            assert "3600 s ahead of this one (3 of 4 peers are off)" in node.clock.doubts()


def _open_with_clock(network: DirectNetwork, index: int, start_s: float, initial: Sequence[Address]) -> Any:
    """A node whose clock begins at `start_s`."""
    caller = network.caller(address_of(index), PeerId.draw(random.Random(index)))
    clock = SwarmClock(start_s=start_s)
    return open_dht_node(caller, clock=clock, rng=random.Random(index), initial_peers=initial)


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
    for name in ("bucket_size", "depth_modulo", "replicas", "rpc_timeout_s", "max_keys", "max_storage_bytes"):
        with pytest.raises(ValueError, match=name):
            DhtConfig(**{name: 0})
