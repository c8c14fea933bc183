"""DHT nodes that die, lie, restart and lose each other, and strangers that try to take a record from its owner."""

import math
import random
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from dmoe_net.clock import SwarmClock
from dmoe_net.dht.config import DhtConfig
from dmoe_net.dht.entries import Entry, encode_value, entry_to_wire
from dmoe_net.dht.messages import FIND, STORE, batches, store_body
from dmoe_net.dht.node import DhtNode, open_dht_node
from dmoe_net.dht.routing_table import key_id
from dmoe_net.errors import CallRefused
from dmoe_net.identity import Address, PeerId
from dmoe_net.keys import Identity
from dmoe_net.rpc.base import Body, Handler, Reply, Request
from tests.net.direct_network import (
    DirectNetwork,
    address_of,
    copy_of,
    holders,
    nearest,
    now,
    open_node,
    open_swarm,
    signed,
    swarm_of,
    value_at,
)

STRANGER = Identity.from_seed(bytes(31) + b"s")


async def test_one_survivor_of_five_replicas_is_enough(autojump_clock: MockClock) -> None:
    """After four of the five holders die without a word, the value is still found."""
    async with swarm_of(16) as (network, nodes):
        await nodes[0].store("key", "alive", life_s=300)
        kept = await holders(network, nodes, "key")
        network.take_down(*(node.address for node in kept[:4]))
        asker = next(node for node in nodes if node not in kept)
        assert await value_at(asker, "key") == "alive"


async def test_a_slow_page_is_waited_for(autojump_clock: MockClock) -> None:
    """Holders that answer the first page as ever, and the further ones late, leave no part of the record out."""
    slow_from = math.inf
    async with swarm_of(4, latency_s=lambda: 2.0 if trio.current_time() > slow_from else 0.05) as (network, nodes):
        for node in nodes:
            for number in range(10):
                await node.store("key", "x" * 2000, suffix=str(number), life_s=300)
        async with open_node(network, 4, [address_of(0)], client_mode=True) as asker:
            slow_from = trio.current_time() + 0.01
            assert len(await asker.get("key")) == 40


@pytest.mark.parametrize("what", ["no pages named", "a page left out", "a page that does not exist", "counted anew"])
async def test_whatever_pages_a_holder_names_all_are_read(autojump_clock: MockClock, what: str) -> None:
    """Holders that name no pages, name them wrongly, or lose count between two of them, leave nothing out."""
    async with swarm_of(4) as (network, nodes):
        for node in nodes:
            for number in range(10):
                await node.store("key", "x" * 4000, suffix=str(number), life_s=300)
        answered = 0

        async def alter(answer: Handler, request: Request) -> Reply:
            nonlocal answered
            answered += 1
            body = (await answer(request)).body
            return Reply(body=altered(body, body.get("pages", [])))

        def altered(body: Body, pages: list[int]) -> Body:
            if what == "no pages named":
                return {name: each for name, each in body.items() if name != "pages"}
            if what == "a page left out" and len(pages) > 2:
                return {**body, "pages": [pages[0], *pages[2:]]}
            if what == "a page that does not exist" and pages:
                return {**body, "pages": [*pages, 10**6]}
            if what == "counted anew" and answered == 4:
                for each in nodes:
                    each._storage.epoch += 1
            return body

        for node in nodes:
            network.alter(node, FIND, alter)
        async with open_node(network, 4, [address_of(0)], client_mode=True) as asker:
            answered = 0
            assert len(await asker.get("key")) == 40
            assert answered > 4


@pytest.mark.parametrize("number", range(4))
async def test_a_holder_that_never_gives_its_pages_delays_a_get_little(autojump_clock: MockClock, number: int) -> None:
    """The others' copies of four pages are whole; one that promises thirty has the time that its calls usually take."""
    async with swarm_of(4) as (network, nodes):
        for node in nodes:
            for suffix in range(10):
                await node.store("key", "x" * 4000, suffix=str(suffix), life_s=300)

        async def never(answer: Handler, request: Request) -> Reply:
            reply = await answer(request)
            if request.body.get("since") is not None:
                await trio.sleep_forever()
            if "copy" not in reply.body:
                return reply
            epoch, change, _ = reply.body["copy"]
            return Reply(body={**reply.body, "copy": [epoch, change, True], "pages": list(range(change, change + 30))})

        network.alter(nodes[number], FIND, never)
        async with open_node(network, 4, [address_of(0)], client_mode=True) as asker:
            began = trio.current_time()
            assert len(await asker.get("key")) == 40
            assert trio.current_time() - began < asker.config.rpc_timeout_s


async def test_the_silent_are_blacklisted_exactly(autojump_clock: MockClock) -> None:
    """After two nodes die, others leave exactly those two alone; their return clears it."""
    async with swarm_of(10) as (network, nodes):
        dead = [nodes[4], nodes[7]]
        network.take_down(address_of(4), address_of(7))
        await nodes[0].find_nearest(0)
        await trio.sleep(3.5)
        assert nodes[0].statistics().blacklisted == tuple(sorted(node.peer_id for node in dead))
        assert not {c.peer_id for c in nodes[0].contacts()} & {node.peer_id for node in dead}
        asked_before = len(network.calls)
        await nodes[0].find_nearest(0)
        targets = {target for source, target, _ in network.calls[asked_before:] if source == nodes[0].address}
        assert not targets & {address_of(4), address_of(7)}
        network.bring_up(address_of(4), address_of(7))
        for node in dead:
            await node.find_nearest(0)  # their calls announce them; they are pinged and known again
        await trio.sleep(1.0)
        assert nodes[0].statistics().blacklisted == ()
        assert nodes[0].statistics().contacts == 9


async def test_a_split_swarm_heals(autojump_clock: MockClock) -> None:
    """Two halves that lost each other meet again once the cut is mended, and find everything."""
    async with swarm_of(12) as (network, nodes):
        island, mainland = nodes[6:], nodes[:6]
        network.partition(*(address_of(index) for index in range(6, 12)))
        for _ in range(3):
            for node in nodes:
                await node.find_nearest(0)
            await trio.sleep(60)
        ours = {node.peer_id for node in island}
        assert all({c.peer_id for c in node.contacts()} == ours - {node.peer_id} for node in island)
        assert await island[0].store("island", 1, life_s=300)
        assert await mainland[0].store("mainland", 2, life_s=300)
        assert await mainland[1].get("island") == ()
        network.partition()
        await trio.sleep(240)
        for node in nodes:
            assert len(node.contacts()) == 11
            assert await value_at(node, "island") == 1
            assert await value_at(node, "mainland") == 2


async def test_a_swarm_survives_its_first_node(autojump_clock: MockClock) -> None:
    """When the only bootstrap node dies, the others go on, and a newcomer can join through any of them."""
    async with swarm_of(8) as (network, nodes):
        network.take_down(address_of(0))
        await trio.sleep(120)
        async with open_node(network, 20, [address_of(5)]) as late:
            assert await late.store("key", 1, life_s=60)
            assert await value_at(nodes[3], "key") == 1


async def test_swarms_of_two_seeds_become_one_through_a_seed_that_is_named_later(autojump_clock: MockClock) -> None:
    """The first seed was started again as another peer, at another address, and knows nobody of its old swarm."""
    async with (
        swarm_of(4) as (network, nodes),
        open_node(network, 20, []) as seed,
        open_node(network, 21, [address_of(20)]) as late,
    ):
        network.take_down(address_of(0))
        await trio.sleep(120)
        assert {contact.address for contact in late.contacts()} == {address_of(20)}
        for node in nodes[1:]:
            node.rejoin_through([address_of(20)])
        await trio.sleep(120)
        assert await seed.store("key", 1, life_s=60)
        assert {contact.address for contact in late.contacts()} == {address_of(index) for index in (1, 2, 3, 20)}
        assert await value_at(nodes[3], "key") == 1


async def test_a_cut_off_node_comes_back(autojump_clock: MockClock) -> None:
    """A node that lost everybody tries its remembered peers every few seconds until one answers."""
    async with swarm_of(6) as (network, nodes):
        network.partition(address_of(3))
        for _ in range(4):
            await nodes[3].get("anything")
            await trio.sleep(5)
        assert nodes[3].contacts() == ()
        network.partition()
        await trio.sleep(15)
        assert len(nodes[3].contacts()) == 5


async def test_records_are_handed_to_a_nearer_newcomer(autojump_clock: MockClock) -> None:
    """Newcomers that belong to the two nearest of a key get its record, though nobody stores it again."""
    network, config = DirectNetwork(), DhtConfig(replicas=2)
    async with open_swarm(network, 3, config=config) as first:
        for number in range(20):
            await first[0].store(f"key{number}", number, life_s=300)
        async with AsyncExitStack() as stack:
            everybody = list(first)
            for index in range(10, 16):
                late = open_node(network, index, [address_of(0)], config=config)
                everybody.append(await stack.enter_async_context(late))
                await trio.sleep(1.0)
            for number in range(20):
                kept = {node.peer_id for node in await holders(network, everybody, f"key{number}")}
                assert nearest(everybody, f"key{number}", 2) <= kept


async def test_another_peer_at_a_known_address_is_noticed(autojump_clock: MockClock) -> None:
    """When a node restarts with a new id, its old id leaves the tables and the new one enters."""
    async with swarm_of(5) as (network, nodes):
        old = nodes[4].peer_id
        identity = Identity.from_seed(b"r" * 32)
        async with open_node(network, 4, [address_of(0)], identity=identity) as reborn:
            await trio.sleep(1.0)
            for node in nodes[:4]:
                await node.get("anything")
                known = {contact.peer_id for contact in node.contacts()}
                assert reborn.peer_id in known
                assert old not in known


async def test_a_claimed_address_is_not_believed(autojump_clock: MockClock) -> None:
    """A caller that claims somebody else's address never gets into the table under it."""
    async with swarm_of(4) as (network, nodes):
        impostor = network.caller(None, PeerId.draw(random.Random(9)))
        impostor.address = address_of(2)
        await impostor.call(address_of(0), "dht.ping", {"client": False}, timeout_s=3.0)
        await trio.sleep(1.0)
        assert {c.peer_id for c in nodes[0].contacts()} == {node.peer_id for node in nodes[1:]}


async def test_bad_requests_are_refused_with_a_reason(autojump_clock: MockClock) -> None:
    """A stranger's malformed calls get CallRefused; the node lives on and takes in nothing."""
    async with swarm_of(2) as (network, nodes):
        stranger = network.caller(None, PeerId.draw(random.Random(9)))
        good = {"client": True, "target": bytes(32), "contacts": 5, "record": True}
        bad_calls: list[tuple[str, dict[str, Any]]] = [
            ("dht.ping", {}),
            ("dht.ping", {"client": 1}),
            ("dht.ping", {"client": True, "dead": [b"x"]}),
            ("dht.find", {**good, "target": b"short"}),
            ("dht.find", {**good, "record": "yes"}),
            ("dht.find", {**good, "contacts": 33}),
            ("dht.find", {**good, "since": [1]}),
            ("dht.store", good),
            ("dht.store", {**good, "entries": [["a", 1]]}),
            ("dht.store", {**good, "entries": [[bytes(32), "", 1, 1, 1, b"\0", bytes(64), 1]]}),
        ]
        for method, body in bad_calls:
            with pytest.raises(CallRefused, match=r"must|DHT|signed"):
                await stranger.call(address_of(0), method, body, timeout_s=3.0)
        assert nodes[0].statistics().records == 0
        assert await nodes[1].store("key", 1, life_s=60)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"peer_id": b"short", "contacts": []},
        {"peer_id": bytes(32), "contacts": [], "verdicts": [True], "now": 0.0},
        {"contacts": [[bytes(32), "h", 70_000]]},
        {"contacts": [], "copy": [1, 2, False], "entries": [["a", 1, float("inf")]], "now": 0.0},
        {"contacts": [], "copy": [1, 2, True], "entries": [], "now": 0.0},
        {"contacts": [], "copy": [1, 2, True], "now": 0.0},
        {"contacts": [], "copy": [1, 2, False], "now": 0.0},
        {"contacts": [], "copy": [1, 2, True], "pages": [9, 8], "now": 0.0},
        {"contacts": [], "verdicts": [[bytes(32), "", 1, 1, 1, b"\0", bytes(64), 1]], "now": 0.0},
        {"contacts": [[n.to_bytes(32), "10.9.9.9", 9] for n in range(32)], "verdicts": [False], "now": 0},
    ],
)
async def test_hostile_answers_do_no_harm(autojump_clock: MockClock, body: dict[str, Any]) -> None:
    """A peer that answers nonsense is dropped; stores and gets of the others go on."""
    async with swarm_of(6) as (network, nodes):
        hostile_id = PeerId.draw(random.Random(500))
        caller = network.caller(address_of(30), hostile_id)

        async def answer(said: dict[str, Any], request: Request) -> Reply:
            return Reply(body={"peer_id": hostile_id.raw, "now": now()} if request.method == "dht.ping" else said)

        for method in ("dht.ping", "dht.find", STORE):
            caller.add_handler(method, partial(answer, {"peer_id": hostile_id.raw} | body))
        for index in range(6):
            await caller.call(address_of(index), "dht.ping", {"client": False}, timeout_s=3.0)
        await trio.sleep(1.0)
        assert any(contact.peer_id == hostile_id for contact in nodes[0].contacts())
        for number in range(5):
            assert await nodes[number].store(f"key{number}", number, life_s=300)
        for number in range(5):
            assert await value_at(nodes[5 - number], f"key{number}") == number
        # What a hostile peer invents is never believed: the contacts 0 to 31 do not exist.
        assert all(contact.address != Address("10.9.9.9", 9) for node in nodes for contact in node.contacts())


async def test_a_closed_node_is_gone(autojump_clock: MockClock) -> None:
    """After its block ends a node's methods are unknown at its peer, and the others drop it."""
    async with swarm_of(3) as (network, nodes):
        async with open_node(network, 9, [address_of(0)]):
            await trio.sleep(1.0)
            assert len(nodes[0].contacts()) == 3
        with pytest.raises(CallRefused, match="unknown method"):
            await network.caller(None, STRANGER.peer_id).call(address_of(9), "dht.ping", {}, timeout_s=3.0)
        await nodes[0].get("anything")
        assert len(nodes[0].contacts()) == 2


async def test_a_peer_has_one_node_at_a_time_and_another_afterwards(autojump_clock: MockClock) -> None:
    """Twice in a row a peer joins and is found; a second node beside the first is refused and does no harm."""
    async with swarm_of(3) as (network, nodes):
        caller, rng = network.caller(address_of(9), STRANGER.peer_id), random.Random(9)
        known = {"identity": STRANGER, "clock": SwarmClock.virtual(), "initial_peers": [address_of(0)]}
        for number in range(2):
            async with open_dht_node(caller, rng=rng, **known) as node:
                assert await node.store("key", number, life_s=60)
                with pytest.raises(ValueError, match=r"dht\.ping"):
                    await open_dht_node(caller, rng=rng, **known).__aenter__()
                await trio.sleep(1.0)
                assert caller.peer_id in {contact.peer_id for contact in nodes[0].contacts()}
                assert await value_at(nodes[1], "key") == number
            await trio.sleep(10.0)


async def test_a_cancelled_get_leaves_nothing_behind(autojump_clock: MockClock) -> None:
    """Cancelling a lookup ends its calls, and the node works on."""
    async with open_swarm(DirectNetwork(latency_s=1.0), 6) as nodes:
        with trio.move_on_after(0.5) as scope:
            await nodes[1].get("key")
        assert scope.cancelled_caught
        assert nodes[1].statistics().blacklisted == ()
        assert await nodes[1].store("key", 1, life_s=300)
        assert await value_at(nodes[2], "key") == 1


async def test_refresh_finds_what_nobody_looks_for(autojump_clock: MockClock) -> None:
    """A contact that died unnoticed leaves the table after a refresh period without any get."""
    async with swarm_of(5) as (network, nodes):
        network.take_down(address_of(4))
        await trio.sleep(2000)
        assert all(c.address != address_of(4) for node in nodes[:4] for c in node.contacts())


KEY = "layer0.2d0"
HONEST = "the owner's"


async def bring_all(network: DirectNetwork, nodes: Sequence[DhtNode], key: str, entries: Iterable[Entry]) -> None:
    """Let the stranger store entries at every node."""
    stranger = network.caller(None, STRANGER.peer_id)
    for batch in batches([(entry, 300.0) for entry in entries]):
        for node in nodes:
            body = {**store_body(key_id(key), batch), "client": True}
            await stranger.call(node.address, STORE, body, timeout_s=9.0)


async def check_found(nodes: Sequence[DhtNode]) -> None:
    """Make sure that every node finds the owner's entry, whatever stands beside it."""
    for node in nodes:
        assert [found.value for found in await node.get(KEY) if found.owner == nodes[0].peer_id] == [HONEST]


async def test_nobody_signs_for_another(autojump_clock: MockClock) -> None:
    """A plain value, a withdrawal, a later value and a longer life under the owner's name are refused whole."""
    async with swarm_of(6) as (network, nodes):
        await nodes[0].store(KEY, HONEST, life_s=300.0)
        stranger = network.caller(None, STRANGER.peer_id)
        ((held, _),) = (await copy_of(network, nodes[0], KEY)).entries
        row = entry_to_wire(held, left_s=300.0)
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
            body = {**store_body(key_id(KEY), []), "entries": [wrong], "client": True}
            for node in nodes:
                with pytest.raises(CallRefused, match=r"must|signed"):
                    await stranger.call(node.address, STORE, body, timeout_s=9.0)
            await check_found(nodes)
        assert await value_at(nodes[1], KEY) == HONEST


@pytest.mark.parametrize("count", [600, pytest.param(4096, marks=pytest.mark.slow)])
async def test_entries_of_strangers_stand_beside_the_owners(autojump_clock: MockClock, count: int) -> None:
    """The entry stays, and can be renewed, beside those of many owners that one stranger made, with every suffix."""
    network, rng = DirectNetwork(), random.Random(1)
    async with open_swarm(network, 6) as nodes:
        await nodes[0].store(KEY, HONEST, life_s=300.0)
        junk = (signed(Identity.from_seed(rng.randbytes(32)), KEY, suffix=str(number % 8)) for number in range(count))
        await bring_all(network, nodes, KEY, junk)
        await check_found(nodes)
        assert await nodes[0].store(KEY, HONEST, life_s=300.0) == 5
        await check_found(nodes)


async def test_a_flood_of_keys_takes_no_record_away(autojump_clock: MockClock) -> None:
    """Junk under other keys, twice as much as the nodes have room for, costs the flooder's own."""
    network, config = DirectNetwork(), DhtConfig(max_storage_bytes=200_000)
    async with open_swarm(network, 6, config=config) as nodes:
        await nodes[0].store(KEY, HONEST, life_s=300.0)
        for key in (f"junk{number}" for number in range(50)):
            await bring_all(network, nodes, key, [signed(STRANGER, key, b"j" * 8000)])
        await check_found(nodes)
        assert all(node.statistics().record_bytes <= config.max_storage_bytes for node in nodes)
        assert await nodes[1].store("another", 1, life_s=60.0) == 5


async def test_what_was_withdrawn_comes_back_through_nobody(autojump_clock: MockClock) -> None:
    """A stranger that hands the entry on to all and to a newcomer is refused, or believed no longer than its life."""
    async with swarm_of(6) as (network, nodes):
        await nodes[0].store(KEY, HONEST, life_s=30.0)
        ((held, _),) = (await copy_of(network, nodes[0], KEY)).entries
        await nodes[0].withdraw(KEY)
        async with open_node(network, 6, [address_of(0)]) as newcomer:
            ends_at = now() + 30.0
            while now() < ends_at + 150.0:
                await bring_all(network, [*nodes, newcomer], KEY, [held])
                assert await value_at(nodes[2], KEY) is None
                assert await value_at(newcomer, KEY) is None or now() < ends_at
                await trio.sleep(5.0)
