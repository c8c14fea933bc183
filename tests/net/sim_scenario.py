"""A busy simulation and the trace of what happened in it, for the tests of reproducibility."""

import random

import trio

from dmoe_net.errors import PeerUnavailable
from dmoe_net.identity import Address
from dmoe_net.rpc.base import Reply, Request
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.base import Link
from dmoe_net.transport.sim import run, simulate
from dmoe_net.transport.sim.events import Heal, HostDown, HostUp, NetworkEvent, Partition, SetHost
from dmoe_net.transport.sim.links import HostOptions, LogNormal
from dmoe_net.transport.sim.network import SimNetwork
from dmoe_net.transport.sim.transport import SimTransport
from dmoe_net.wire.frames import whole_part
from tests.net.link_frames import numbered
from tests.net.sim_hosts import peer

NUM_HOSTS = 12

SCHEDULE: list[tuple[float, NetworkEvent]] = [
    (1.0, SetHost("host1", HostOptions(up_bps=1e6, extra_latency_s=0.2))),
    (2.0, Partition((frozenset({"host0", "host1", "host2"}),))),
]
SCHEDULE += [(3.0, HostDown("host5")), (3.5, HostDown("host6", silent=True)), (4.0, Heal())]
SCHEDULE += [(6.0, HostUp("host5")), (6.0, HostUp("host6"))]


def links_trace(seed: int) -> list[str]:
    """Bare links: every host dials others at random, sends frames of random sizes, and notes what it gets."""
    return run(_links, seed, seed=seed)


async def _links(seed: int) -> list[str]:
    trace: list[str] = []
    async with simulate(
        seed=seed, latency=LogNormal(0.08, 0.8), loss=0.02, schedule=SCHEDULE, give_up_s=5.0
    ) as network:
        for index in range(NUM_HOSTS):
            network.start(f"host{index}", _host, network, index, seed, trace)
        await trio.sleep(20.0)
        trace.append(str(network.statistics()))
    return trace


async def _host(network: SimNetwork, index: int, seed: int, trace: list[str]) -> None:
    name, rng = f"host{index}", random.Random(f"{seed} {index}")
    transport = network.transport(name, peer(name))
    listener = await transport.listen(Address(name, 7))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_dial_others, transport, rng, trace)
        while True:
            nursery.start_soon(_note, await listener.accept(), name, trace)


async def _dial_others(transport: SimTransport, rng: random.Random, trace: list[str]) -> None:
    for count in range(8):
        await trio.sleep(rng.expovariate(2.0))
        address = Address(f"host{rng.randrange(NUM_HOSTS)}", 7)
        try:
            with trio.move_on_after(2.0):
                link = await transport.dial(address)
                for _ in range(5):
                    await link.send(whole_part(numbered(count, rng.randrange(100_000))))
                await link.aclose()
        except PeerUnavailable as exc:
            trace.append(f"{trio.current_time()} {exc}")


async def _note(link: Link, name: str, trace: list[str]) -> None:
    try:
        while (frame := await link.receive()) is not None:
            trace.append(f"{trio.current_time()} {name} {link.remote_address} {frame.header} {frame.tensors[0].nbytes}")
    except PeerUnavailable as exc:
        trace.append(f"{trio.current_time()} {exc}")
    link.abort()


def calls_trace(seed: int) -> list[str]:
    """Calls: every peer calls others at random and notes the answers and errors."""
    return run(_calls, seed, seed=seed)


async def _calls(seed: int) -> list[str]:
    trace: list[str] = []
    async with simulate(seed=seed, latency=LogNormal(0.08, 0.8), schedule=SCHEDULE, give_up_s=5.0) as network:
        for index in range(NUM_HOSTS):
            network.start(f"host{index}", _caller, network, index, seed, trace)
        await trio.sleep(15.0)
        trace.append(str(network.statistics()))
    return trace


async def _caller(network: SimNetwork, index: int, seed: int, trace: list[str]) -> None:
    name, rng = f"host{index}", random.Random(f"{seed} {index}")

    async def square(request: Request) -> Reply:
        await trio.sleep(rng.expovariate(10.0))
        return Reply(body={"square": request.body["n"] ** 2})

    transport = network.transport(name, peer(name))
    async with open_rpc_peer(transport, peer_id=peer(name), listen=Address(name, 7)) as caller:
        caller.add_handler("square", square)
        for number in range(30):
            await trio.sleep(rng.expovariate(3.0))
            address = Address(f"host{rng.randrange(NUM_HOSTS)}", 7)
            try:
                reply = await caller.call(address, "square", {"n": number}, timeout_s=1.0)
                trace.append(f"{trio.current_time()} {name} {address} {reply.body['square']}")
            except PeerUnavailable as exc:
                trace.append(f"{trio.current_time()} {name} {exc}")
