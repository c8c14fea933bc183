"""The light network: calls instead of frames, and the same figures as the simulated network's."""

import random
import statistics
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio

from dmoe_net.clock import SwarmClock
from dmoe_net.dht.node import DhtNode, open_dht_node
from dmoe_net.errors import CallRefused, ConnectionLost, DialFailed, PeerBusy, PeerTimeout, RemoteFailure
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.keys import Identity
from dmoe_net.rpc.base import Caller, Reply, Request
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.sim import Constant, Heal, HostDown, HostUp, Partition, run, simulate
from dmoe_net.transport.sim.calls import PORT, CallingPeer, CallNetwork
from dmoe_net.transport.sim.links import Exponential
from tests.net.rpc_peers import Stuck
from tests.net.sim_hosts import in_simulation

LATENCY_S = 0.1


def identity_of(index: int) -> Identity:
    return Identity.from_seed(random.Random(index).randbytes(32))


def caller_of(network: CallNetwork, index: int, *, listens: bool = True) -> CallingPeer:
    return network.caller(f"host{index}", identity_of(index).peer_id, listens=listens)


def open_node(caller: Caller, index: int, *initial: Address) -> Any:
    own = {"identity": identity_of(index), "clock": SwarmClock.virtual(), "rng": random.Random(index)}
    return open_dht_node(caller, initial_peers=initial, **own)


async def echo(request: Request) -> Reply:
    return Reply(body=request.body)


def light_network(**options: Any) -> CallNetwork:
    return CallNetwork(seed=0, latency=Constant(LATENCY_S), **options)


@in_simulation
async def test_a_first_call_dials_and_later_ones_take_a_round_trip() -> None:
    """The dial, whose hello comes with it, takes a round trip, and the call one; calls back use the same link."""
    network = light_network()
    alice, bob = caller_of(network, 0), caller_of(network, 1)
    for each in (alice, bob):
        each.add_handler("echo", echo)

    async def check_call(caller: CallingPeer, target: Address | Contact, took_s: float) -> None:
        began = trio.current_time()
        assert (await caller.call(target, "echo", {"n": 1}, timeout_s=5.0)).body == {"n": 1}
        assert trio.current_time() - began == pytest.approx(took_s)

    await check_call(alice, bob.address, 0.4)
    await check_call(alice, bob.address, 0.2)
    await check_call(alice, Contact(bob.peer_id, Address("x", 1)), 0.2)
    await check_call(bob, Contact(alice.peer_id, alice.address), 0.2)
    assert (network.num_dials, network.num_calls["echo"]) == (1, 4)
    await trio.sleep(121.0)  # the idle link is closed
    await check_call(alice, bob.address, 0.4)


@in_simulation
async def test_a_link_is_idle_when_neither_end_uses_it() -> None:
    """Calls of one end keep it for the other; who hangs up takes it from both, and comes back by a dial."""
    network = light_network()
    alice, bob = caller_of(network, 0), caller_of(network, 1)
    for each in (alice, bob):
        each.add_handler("echo", echo)
    await alice.call(bob.address, "echo", {}, timeout_s=1.0)
    for _ in range(4):
        await trio.sleep(20.0)
        await alice.call(bob.address, "echo", {}, timeout_s=1.0)
    await bob.call(Contact(alice.peer_id, alice.address), "echo", {}, timeout_s=1.0)
    assert network.num_dials == 1
    assert alice.is_reached(Contact(bob.peer_id, bob.address))
    assert not bob.is_reached(Contact(alice.peer_id, alice.address)), "that was never dialled"
    alice.hang_up(tells=True)
    with pytest.raises(DialFailed, match="no connection"):
        await bob.call(alice.peer_id, "echo", {}, timeout_s=1.0)
    await alice.call(bob.address, "echo", {}, timeout_s=1.0)
    assert network.num_dials == 2


@in_simulation
async def test_errors_are_those_of_the_rpc_layer() -> None:
    network = light_network()
    alice, bob = caller_of(network, 0, listens=False), caller_of(network, 1)

    async def crash(request: Request) -> Reply:
        raise KeyError(request.method)

    async def check_fails(
        error: type[Exception], method: str, target: Any = bob.address, *, why: str | None = None, **options: Any
    ) -> None:
        with pytest.raises(error, match=why):
            await alice.call(target, method, {}, timeout_s=1.0, **options)

    bob.add_handler("crash", crash)
    bob.add_handler("stuck", Stuck(), max_concurrent=1)
    await check_fails(DialFailed, "echo", Address("nowhere", 1), why="nobody listens")
    await check_fails(DialFailed, "echo", Contact(PeerId(bytes(32)), bob.address), why="not")
    await trio.sleep(60.0)
    await check_fails(CallRefused, "echo", why="unknown method")
    await check_fails(RemoteFailure, "crash")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(check_fails, PeerTimeout, "stuck")
        await trio.sleep(0.5)
        await check_fails(PeerBusy, "stuck", Contact(bob.peer_id, Address("host1", PORT)))
    network.apply(HostDown("host1", silent=True))
    await check_fails(PeerTimeout, "crash")
    network.apply(HostUp("host1"))
    network.apply(HostDown("host1"))
    await trio.sleep(20.0)
    await check_fails(ConnectionLost, "crash")
    await check_fails(DialFailed, "crash", why="refuses")
    await check_fails(ValueError, "crash", why="bodies alone", tensors=(b"x",))


@in_simulation
async def test_a_partition_is_silence_until_it_heals() -> None:
    network = light_network()
    alice, bob = caller_of(network, 0), caller_of(network, 1)
    bob.add_handler("echo", echo)
    await alice.call(bob.address, "echo", {}, timeout_s=1.0)
    network.apply(Partition((frozenset({"host0"}),)))
    with pytest.raises(PeerTimeout):
        await alice.call(bob.address, "echo", {}, timeout_s=1.0)
    network.apply(Heal())
    await alice.call(bob.address, "echo", {}, timeout_s=1.0)


@in_simulation
async def test_an_address_that_nobody_reaches_enters_no_table() -> None:
    """A peer behind a router calls and stores as others do, and answers on its own connections: nobody lists it."""
    network = light_network(may_dial=lambda source, destination: destination != "host40")
    first = Address("host0", PORT)
    async with AsyncExitStack() as stack:
        opened = [open_node(caller_of(network, index), index, *[first] * bool(index)) for index in range(6)]
        nodes = [await stack.enter_async_context(each) for each in opened]
        hidden = await stack.enter_async_context(open_node(caller_of(network, 40), 40, first))
        for _ in range(5):
            await hidden.get("anything")
            assert await hidden.store("key", 1, life_s=60) >= 5
            await trio.sleep(20.0)
        assert len(hidden.contacts()) == 6
        known = {contact.peer_id for node in nodes for contact in node.contacts()}
        assert known == {node.peer_id for node in nodes}


@asynccontextmanager
async def swarm(kind: str, count: int, seed: int) -> AsyncIterator[tuple[list[DhtNode], Callable[[], int]]]:
    """The same nodes on one of the two networks, and a function that counts the calls."""
    async with AsyncExitStack() as stack:
        light = CallNetwork(seed=seed, latency=Exponential(0.05))
        full = await stack.enter_async_context(simulate(seed=seed, latency=Exponential(0.05)))
        nodes: list[DhtNode] = []
        for index in range(count):
            caller: Any
            if kind == "light":
                caller = caller_of(light, index)
            else:
                host, peer_id = f"host{index}", identity_of(index).peer_id
                caller = await stack.enter_async_context(
                    open_rpc_peer(full.transport(host, peer_id), peer_id=peer_id, listen=Address(host, PORT))
                )
            initial = [Address(f"host{each}", PORT) for each in {0, index // 2}] if index else []
            nodes.append(await stack.enter_async_context(open_node(caller, index, *initial)))
        yield nodes, lambda: sum(node.statistics().queries for node in nodes)


async def _study(kind: str, count: int, seed: int) -> tuple[float, float]:
    """Mean seconds of a get by a node that has not asked for that key, and mean questions of it."""
    async with swarm(kind, count, seed) as (nodes, queries):
        await trio.sleep(10.0)
        for number in range(20):
            await nodes[number].store(f"key{number}", number, life_s=300)
        took, asked = list[float](), queries()
        for number in range(200):
            began = trio.current_time()
            assert await nodes[(7 * number) % count].get(f"key{number % 20}")
            took.append(trio.current_time() - began)
        return statistics.mean(took), (queries() - asked) / 200


@pytest.mark.slow
def test_it_has_the_figures_of_the_simulated_network() -> None:
    """Calls of a get are equal within 2 % and times within 5 %: two and three standard errors over twelve seeds."""
    light = [run(_study, "light", 60, seed, seed=seed) for seed in range(12)]
    full = [run(_study, "full", 60, seed, seed=seed) for seed in range(12)]
    for place, within in ((0, 0.05), (1, 0.02)):
        ratio = statistics.mean(each[place] for each in light) / statistics.mean(each[place] for each in full)
        assert ratio == pytest.approx(1.0, abs=within)
