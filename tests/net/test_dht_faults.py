"""DHT nodes that die, lie, restart and lose each other, over a direct network in virtual time."""

import random
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from dmoe_net.clock import SwarmClock
from dmoe_net.dht.config import DhtConfig
from dmoe_net.dht.node import open_dht_node
from dmoe_net.errors import CallRefused, DialFailed, PeerTimeout, RemoteFailure
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.keys import Identity
from dmoe_net.rpc.base import Reply, Request
from tests.net.direct_network import (
    DirectNetwork,
    address_of,
    holders,
    nearest,
    now,
    open_node,
    open_swarm,
    value_at,
)


async def test_one_survivor_of_five_replicas_is_enough(autojump_clock: MockClock) -> None:
    """After four of the five holders die without a word, the value is still found."""
    network = DirectNetwork()
    async with open_swarm(network, 16) as nodes:
        await nodes[0].store("key", "alive", life_s=300)
        kept = holders(nodes, "key")
        network.take_down(*(node.address for node in kept[:4] if node.address))
        asker = next(node for node in nodes if node not in kept)
        assert await value_at(asker, "key") == "alive"


async def test_the_silent_are_blacklisted_exactly(autojump_clock: MockClock) -> None:
    """After two nodes die, others leave exactly those two alone; their return clears it."""
    network = DirectNetwork()
    async with open_swarm(network, 10) as nodes:
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
    network = DirectNetwork()
    async with open_swarm(network, 12) as nodes:
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
    network = DirectNetwork()
    async with open_swarm(network, 8) as nodes:
        network.take_down(address_of(0))
        await trio.sleep(120)
        async with open_node(network, 20, [address_of(5)]) as late:
            assert await late.store("key", 1, life_s=60)
            assert await value_at(nodes[3], "key") == 1


async def test_a_cut_off_node_comes_back(autojump_clock: MockClock) -> None:
    """A node that lost everybody tries its remembered peers every few seconds until one answers."""
    network = DirectNetwork()
    async with open_swarm(network, 6) as nodes:
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
                kept = {node.peer_id for node in holders(everybody, f"key{number}")}
                assert nearest(everybody, f"key{number}", 2) <= kept


async def test_another_peer_at_a_known_address_is_noticed(autojump_clock: MockClock) -> None:
    """When a node restarts with a new id, its old id leaves the tables and the new one enters."""
    network = DirectNetwork()
    async with open_swarm(network, 5) as nodes:
        old = nodes[4].peer_id
        identity = Identity.from_seed(b"r" * 32)
        async with open_dht_node(
            network.caller(address_of(4), identity.peer_id),
            identity=identity,
            clock=SwarmClock.virtual(),
            rng=random.Random(7),
            initial_peers=[address_of(0)],
        ) as reborn:
            await trio.sleep(1.0)
            for node in nodes[:4]:
                await node.get("anything")
                known = {contact.peer_id for contact in node.contacts()}
                assert reborn.peer_id in known
                assert old not in known


async def test_a_claimed_address_is_not_believed(autojump_clock: MockClock) -> None:
    """A caller that claims somebody else's address never gets into the table under it."""
    network = DirectNetwork()
    async with open_swarm(network, 4) as nodes:
        impostor = network.caller(None, PeerId.draw(random.Random(9)))
        impostor.address = address_of(2)
        await impostor.call(address_of(0), "dht.ping", {"client": False}, timeout_s=3.0)
        await trio.sleep(1.0)
        assert {c.peer_id for c in nodes[0].contacts()} == {node.peer_id for node in nodes[1:]}


async def test_bad_requests_are_refused_with_a_reason(autojump_clock: MockClock) -> None:
    """A stranger's malformed calls get CallRefused; the node lives on and takes in nothing."""
    network = DirectNetwork()
    async with open_swarm(network, 2) as nodes:
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


HOSTILE_BODIES: list[Any] = [
    {},
    {"peer_id": b"short", "contacts": []},
    {"peer_id": bytes(32), "contacts": [], "verdicts": [True], "now": 0.0},
    {"contacts": [[bytes(32), "h", 70_000]]},
    {"contacts": [], "copy": [1, 2, False], "entries": [["a", 1, float("inf")]], "now": 0.0},
    {"contacts": [], "copy": [1, 2, True], "entries": [], "now": 0.0},
    {"contacts": [], "copy": [1, 2, True], "now": 0.0},
    {"contacts": [], "copy": [1, 2, False], "now": 0.0},
    {"contacts": [], "verdicts": [[bytes(32), "", 1, 1, 1, b"\0", bytes(64), 1]], "now": 0.0},
    {
        "contacts": [[(n).to_bytes(32, "big"), "10.9.9.9", 9] for n in range(32)],
        "verdicts": [False],
        "now": 0,
    },
]


@pytest.mark.parametrize("body", HOSTILE_BODIES)
async def test_hostile_answers_do_no_harm(autojump_clock: MockClock, body: dict[str, Any]) -> None:
    """A peer that answers nonsense is dropped; stores and gets of the others go on."""
    network = DirectNetwork()
    async with open_swarm(network, 6) as nodes:
        hostile_id = PeerId.draw(random.Random(500))
        caller = network.caller(address_of(30), hostile_id)

        async def pong(request: Request) -> Reply:
            return Reply(body={"peer_id": hostile_id.raw, "now": now()})

        async def hostile(request: Request) -> Reply:
            return Reply(body={"peer_id": hostile_id.raw} | body)

        caller.add_handler("dht.ping", pong)
        caller.add_handler("dht.find", hostile)
        caller.add_handler("dht.store", hostile)
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
    network = DirectNetwork()
    async with open_swarm(network, 3) as nodes:
        async with open_node(network, 9, [address_of(0)]):
            await trio.sleep(1.0)
            assert len(nodes[0].contacts()) == 3
        with pytest.raises(CallRefused, match="unknown method"):
            await network.caller(None, PeerId(bytes(32))).call(
                address_of(9), "dht.ping", {"client": True}, timeout_s=3.0
            )
        await nodes[0].get("anything")
        assert len(nodes[0].contacts()) == 2


async def test_a_peer_has_one_node_at_a_time_and_another_afterwards(autojump_clock: MockClock) -> None:
    """Twice in a row a peer joins and is found; a second node beside the first is refused and does no harm."""
    network = DirectNetwork()
    async with open_swarm(network, 3) as nodes:
        identity = Identity.from_seed(b"9" * 32)
        caller = network.caller(address_of(9), identity.peer_id)

        def opened() -> Any:
            return open_dht_node(
                caller,
                identity=identity,
                clock=SwarmClock.virtual(),
                rng=random.Random(9),
                initial_peers=[address_of(0)],
            )

        for number in range(2):
            async with opened() as node:
                assert await node.store("key", number, life_s=60)
                with pytest.raises(ValueError, match=r"dht\.ping"):
                    await opened().__aenter__()
                await trio.sleep(1.0)
                assert caller.peer_id in {contact.peer_id for contact in nodes[0].contacts()}
                assert await value_at(nodes[1], "key") == number
            await trio.sleep(10.0)


async def test_a_cancelled_get_leaves_nothing_behind(autojump_clock: MockClock) -> None:
    """Cancelling a lookup ends its calls, and the node works on."""
    network = DirectNetwork(latency_s=1.0)
    async with open_swarm(network, 6) as nodes:
        with trio.move_on_after(0.5) as scope:
            await nodes[1].get("key")
        assert scope.cancelled_caught
        assert nodes[1].statistics().blacklisted == ()
        assert await nodes[1].store("key", 1, life_s=300)
        assert await value_at(nodes[2], "key") == 1


async def test_refresh_finds_what_nobody_looks_for(autojump_clock: MockClock) -> None:
    """A contact that died unnoticed leaves the table after a refresh period without any get."""
    network = DirectNetwork()
    async with open_swarm(network, 5) as nodes:
        network.take_down(address_of(4))
        await trio.sleep(2000)
        assert all(c.address != address_of(4) for node in nodes[:4] for c in node.contacts())


async def test_the_direct_network_tells_the_truth(autojump_clock: MockClock) -> None:
    """As in the RPC layer, nobody there, silence, unknown methods and crashes have their own errors."""
    network = DirectNetwork()
    caller, server = network.caller(None, PeerId(bytes(32))), network.caller(address_of(1), PeerId(b"1" * 32))

    async def crash(request: Request) -> Reply:
        raise KeyError(request.method)

    server.add_handler("crash", crash)
    with pytest.raises(DialFailed):
        await caller.call(address_of(2), "crash", {}, timeout_s=1.0)
    with pytest.raises(CallRefused):
        await caller.call(address_of(1), "other", {}, timeout_s=1.0)
    with pytest.raises(RemoteFailure):
        await caller.call(address_of(1), "crash", {}, timeout_s=1.0)
    network.take_down(address_of(1))
    with pytest.raises(PeerTimeout):
        await caller.call(address_of(1), "crash", {}, timeout_s=1.0)
    assert Contact(server.peer_id, address_of(1)).address == server.address
