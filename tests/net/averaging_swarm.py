"""A simulated swarm for the tests of averaging: peers with a DHT, each on a host of its own, in virtual time."""

import functools
import inspect
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from dmoe_net.clock import SwarmClock
from dmoe_net.dht.config import DhtConfig
from dmoe_net.dht.node import DhtNode, open_dht_node
from dmoe_net.identity import Address
from dmoe_net.keys import Identity
from dmoe_net.rpc.peer import RpcPeer, open_rpc_peer
from dmoe_net.transport.sim import run, simulate
from dmoe_net.transport.sim.links import Constant
from dmoe_net.transport.sim.network import SimNetwork

PORT = 1
ROOT = Address("root", PORT)


@dataclass(slots=True)
class Swarm:
    """The network and its peers' joint fate."""

    network: SimNetwork
    seed: int
    done: dict[str, Any] = field(default_factory=dict)
    """Results of the `live` functions, by host."""


@dataclass(slots=True, frozen=True)
class Place:
    """A peer's own access to the swarm."""

    name: str
    rpc: RpcPeer
    dht: DhtNode
    rng: random.Random


@asynccontextmanager
async def open_place(swarm: Swarm, name: str, *, client_mode: bool = False) -> AsyncIterator[Place]:
    """A peer alone on host `name`, joined through the root if that is somebody else."""
    rng = random.Random(f"{swarm.seed}/{name}")
    async with open_place_on(swarm.network, name, rng, client_mode=client_mode) as place:
        yield place


@asynccontextmanager
async def open_place_on(
    network: SimNetwork,
    name: str,
    rng: random.Random,
    *,
    client_mode: bool = False,
    root: Address = ROOT,
    config: DhtConfig = DhtConfig(),  # noqa: B008 (frozen)
) -> AsyncIterator[Place]:
    """A peer alone on host `name` of a network, its identity drawn from `rng`."""
    identity = Identity.from_seed(rng.randbytes(32))
    transport, listen = network.transport(name, identity.peer_id), None if client_mode else Address(name, PORT)
    own = {"identity": identity, "clock": SwarmClock.virtual(), "rng": rng, "config": config}
    async with (
        open_rpc_peer(transport, peer_id=identity.peer_id, listen=listen) as rpc,
        open_dht_node(rpc, initial_peers=() if name == root.host else (root,), **own) as dht,
    ):
        yield Place(name, rpc, dht, rng)


def in_swarm(body: Callable[[Swarm], Awaitable[None]], *, seed: int = 0, latency_s: float = 0.02) -> None:
    """Run a test's body in a swarm that has a root peer, in virtual time from 0 s on."""

    async def main() -> None:
        async with simulate(seed=seed, latency=Constant(latency_s)) as network:
            swarm = Swarm(network, seed)
            ready = trio.Event()

            async def root() -> None:
                async with open_place(swarm, ROOT.host):
                    ready.set()
                    await trio.sleep_forever()

            network.start(ROOT.host, root)
            await ready.wait()
            await body(swarm)

    run(main, seed=seed)


def swarm_test(body: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A synchronous test out of an async one whose first argument is the swarm; `seed` is a parameter of both."""

    @functools.wraps(body)
    def test(**parameters: Any) -> None:
        in_swarm(functools.partial(body, **parameters), seed=parameters.get("seed", 0))

    _, *others = inspect.signature(body).parameters.values()
    test.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
    return test
