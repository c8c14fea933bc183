"""Strangers that try to take a record from its owner, through the calls of a DHT node."""

import random
from collections.abc import Iterable, Sequence

import pytest
import trio
from trio.testing import MockClock

from dmoe_net.dht.config import DhtConfig
from dmoe_net.dht.entries import Entry, encode_value, entry_to_wire, sign_entry
from dmoe_net.dht.messages import batches, store_body
from dmoe_net.dht.node import DhtNode
from dmoe_net.dht.routing_table import NodeId, key_id
from dmoe_net.errors import CallRefused
from dmoe_net.keys import Identity
from dmoe_net.rpc.base import Reply
from tests.net.direct_network import DirectCaller, DirectNetwork, address_of, now, open_node, open_swarm

KEY = "layer0.2d0"
TARGET = key_id(KEY)
HONEST = "the owner's"
COUNT = 6
STRANGER = Identity.from_seed(bytes(31) + b"s")


def signed(identity: Identity, *, key: NodeId = TARGET, value: object = "junk", **fields: object) -> Entry:
    """An entry of now."""
    raw = None if value is None else encode_value(value)
    known = {"sequence": int(now() * 1000), "issued_at": now(), "life_s": 300.0} | fields
    return sign_entry(identity, key, value=raw, **known)  # type: ignore[arg-type]


async def bring(stranger: DirectCaller, entries: Iterable[Entry], *, key: NodeId = TARGET) -> list[Reply]:
    """Store entries at every node."""
    return [
        await stranger.call(address_of(index), "dht.store", {**store_body(key, batch), "client": True}, timeout_s=9.0)
        for batch in batches([(entry, 300.0) for entry in entries])
        for index in range(COUNT)
    ]


async def values_at(node: DhtNode) -> list[object]:
    """All values under the key."""
    return [found.value for found in await node.get(KEY)]


async def check_found(nodes: Sequence[DhtNode]) -> None:
    """Make sure that every node finds the owner's entry, whatever stands beside it."""
    for node in nodes:
        assert [found.value for found in await node.get(KEY) if found.owner == nodes[0].peer_id] == [HONEST]


async def test_nobody_signs_for_another(autojump_clock: MockClock) -> None:
    """A plain value, a withdrawal, a later value and a longer life under the owner's name are refused whole."""
    network = DirectNetwork()
    async with open_swarm(network, COUNT) as nodes:
        await nodes[0].store(KEY, HONEST, life_s=300.0)
        stranger = network.caller(None, STRANGER.peer_id)
        (held,) = nodes[0]._storage.get(TARGET, now())
        row = entry_to_wire(held.entry, left_s=300.0)
        public_key, suffix, sequence, issued_ms, life_ms, value, signature, left_ms = row
        later = int(str(sequence)) + 10**6
        forged: list[object] = [
            encode_value("plain"),
            [public_key, suffix, later, issued_ms, life_ms, None, signature, left_ms],
            [public_key, suffix, later, issued_ms, life_ms, encode_value("port 9"), signature, left_ms],
            [public_key, suffix, sequence, issued_ms, 299_999, value, signature, left_ms],
            [public_key, "1", sequence, issued_ms, life_ms, value, signature, left_ms],
        ]
        for wrong in forged:
            body = {**store_body(TARGET, []), "entries": [wrong], "client": True}
            for index in range(COUNT):
                with pytest.raises(CallRefused, match=r"must|signed"):
                    await stranger.call(address_of(index), "dht.store", body, timeout_s=9.0)
            await check_found(nodes)
        assert await values_at(nodes[1]) == [HONEST]


@pytest.mark.parametrize("count", [600, pytest.param(4096, marks=pytest.mark.slow)])
async def test_entries_of_strangers_stand_beside_the_owners(autojump_clock: MockClock, count: int) -> None:
    """So many owners made by one stranger under the key of a record, with every suffix that was a slot: the owner's
    entry stays, and can be renewed."""
    network, rng = DirectNetwork(), random.Random(1)
    async with open_swarm(network, COUNT) as nodes:
        await nodes[0].store(KEY, HONEST, life_s=300.0)
        stranger = network.caller(None, STRANGER.peer_id)
        junk = (signed(Identity.from_seed(rng.randbytes(32)), suffix=str(number % 8)) for number in range(count))
        await bring(stranger, junk)
        await check_found(nodes)
        assert await nodes[0].store(KEY, HONEST, life_s=300.0) == 5
        await check_found(nodes)


async def test_a_flood_of_keys_takes_no_record_away(autojump_clock: MockClock) -> None:
    """Junk under other keys, twice as much as the nodes have room for, costs the flooder's own."""
    network, config = DirectNetwork(), DhtConfig(max_storage_bytes=200_000)
    async with open_swarm(network, COUNT, config=config) as nodes:
        await nodes[0].store(KEY, HONEST, life_s=300.0)
        stranger = network.caller(None, STRANGER.peer_id)
        for number in range(50):
            key = key_id(f"junk{number}")
            await bring(stranger, [signed(STRANGER, key=key, value=b"j" * 8000)], key=key)
        await check_found(nodes)
        assert all(node.statistics().record_bytes <= config.max_storage_bytes for node in nodes)
        assert await nodes[1].store("another", 1, life_s=60.0) == 5


async def test_what_was_withdrawn_comes_back_through_nobody(autojump_clock: MockClock) -> None:
    """A stranger hands the owner's entry on, again and again, to everybody and to a newcomer that is nearest: those who
    know of the withdrawal refuse it, and nobody believes it for longer than its life."""
    network = DirectNetwork()
    async with open_swarm(network, COUNT) as nodes:
        await nodes[0].store(KEY, HONEST, life_s=30.0)
        (held,) = nodes[0]._storage.get(TARGET, now())
        stranger = network.caller(None, STRANGER.peer_id)
        await nodes[0].withdraw(KEY)
        async with open_node(network, COUNT, [address_of(0)]) as newcomer:
            ends_at = now() + 30.0
            while now() < ends_at + 150.0:
                await bring(stranger, [held.entry])
                body = {**store_body(TARGET, [(held.entry, 30.0)]), "client": True}
                await stranger.call(address_of(COUNT), "dht.store", body, timeout_s=9.0)
                assert await values_at(nodes[2]) == []
                assert await values_at(newcomer) == [] or now() < ends_at
                await trio.sleep(5.0)
