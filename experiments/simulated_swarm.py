"""A swarm in one process and in virtual time: expert nodes and trainers' places on a simulated network.

The code that runs is the code of a real swarm: the RPC layer, the DHT, the expert nodes, the directory. Only the
network and the devices are simulated. Use it inside `net.transport.sim.simulate`, under `net.transport.sim.run`.
"""

import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from dmoe_jax.directory import DirectoryConfig, ExpertDirectory, open_expert_directory
from dmoe_jax.mixture.fan_out import CallStatistics, ExpertCaller
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.device import Device, InlineDevice
from dmoe_jax.node.server import NodeConfig, open_expert_node
from net.clock import SwarmClock
from net.dht.config import DhtConfig
from net.dht.node import DhtNode, open_dht_node
from net.errors import DialFailed
from net.identity import Address, PeerId
from net.rpc.faults import FaultInjector, FaultPlan
from net.rpc.peer import RpcPeer, open_rpc_peer
from net.transport.sim_network import SimNetwork

PORT = 1
"""Every peer's: each has a host of its own."""

_JOIN_AGAIN_S = 0.3

NO_FAULTS = FaultPlan()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPeer:
    """A process of the swarm."""

    rpc: RpcPeer
    """Places and serves calls."""
    dht: DhtNode
    """Finds things."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTrainer:
    """A trainer's access to the experts."""

    peer: SimulatedPeer
    """Its process."""
    directory: ExpertDirectory
    """Knows the living experts."""
    caller: ExpertCaller
    """Places the expert calls and counts them."""


@asynccontextmanager
async def open_simulated_peer(
    network: SimNetwork,
    host: str,
    *,
    seed: int,
    join: Sequence[Address] = (),
    client_mode: bool = False,
    faults: FaultPlan = NO_FAULTS,
    dht: DhtConfig | None = None,
) -> AsyncIterator[SimulatedPeer]:
    """A peer alone on `host`. Its identity and its choices follow from the seed and the host's name."""
    rng = random.Random(f"{seed}/{host}")
    peer_id = PeerId.draw(rng)
    listen = None if client_mode else Address(host, PORT)
    injector = FaultInjector(faults) if faults.rates else None
    transport = network.transport(host, peer_id)
    async with (
        open_rpc_peer(transport, peer_id=peer_id, listen=listen, faults=injector) as rpc,
        open_dht_node(
            rpc,
            clock=SwarmClock.virtual(),
            rng=rng,
            initial_peers=join,
            client_mode=client_mode,
            config=DhtConfig() if dht is None else dht,
        ) as node,
    ):
        yield SimulatedPeer(rpc=rpc, dht=node)


async def start_simulated_nodes(
    network: SimNetwork,
    backends: Mapping[str, ExpertBackend],
    *,
    num_nodes: int,
    seed: int,
    device: Callable[[str], Device] | None = None,
    faults: FaultPlan = NO_FAULTS,
    config: NodeConfig | None = None,
) -> Address:
    """Start expert nodes as programs of the hosts node0, node1, ...; experts are dealt out in turn.

    They live as long as the network. A node whose host goes down and comes up again serves its experts as they were.

    Args:
      device: the device of a host; None: work takes no virtual time.
      faults: what goes wrong with their calls.

    Returns:
      where to join, once all of them serve.
    """
    first = Address("node0", PORT)
    all_serve = trio.Event()
    num_serving = 0

    async def serve(host: str, own: Mapping[str, ExpertBackend]) -> None:
        nonlocal num_serving
        join = [] if host == first.host else [first]
        while True:
            try:
                async with (
                    open_simulated_peer(network, host, seed=seed, join=join, faults=faults) as peer,
                    open_expert_node(
                        peer.rpc,
                        peer.dht,
                        own,
                        device=InlineDevice() if device is None else device(host),
                        config=NodeConfig() if config is None else config,
                    ),
                ):
                    num_serving += 1
                    if num_serving == num_nodes:
                        all_serve.set()
                    await trio.sleep_forever()
            except DialFailed:  # nobody to join yet
                await trio.sleep(_JOIN_AGAIN_S)

    for index in range(num_nodes):
        own = {uid: backends[uid] for uid in list(backends)[index::num_nodes]}
        network.start(f"node{index}", serve, f"node{index}", own)
    await all_serve.wait()
    return first


@asynccontextmanager
async def open_simulated_trainer(
    network: SimNetwork,
    host: str,
    *,
    seed: int,
    join: Address,
    statistics: CallStatistics | None = None,
    config: DirectoryConfig | None = None,
) -> AsyncIterator[SimulatedTrainer]:
    """A trainer's process: in client mode, as behind a router that lets nobody in."""
    async with (
        open_simulated_peer(network, host, seed=seed, join=[join], client_mode=True) as peer,
        open_expert_directory(peer.dht, config=DirectoryConfig() if config is None else config) as directory,
    ):
        caller = ExpertCaller(peer.rpc, directory, CallStatistics() if statistics is None else statistics)
        yield SimulatedTrainer(peer=peer, directory=directory, caller=caller)
