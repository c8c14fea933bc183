"""A swarm in one process and in virtual time: expert nodes and trainers' places on a simulated network.

The code that runs is the code of a real swarm: the RPC layer, the DHT, the expert nodes, the directory. Only the
network and the devices are simulated. Use it inside `net.transport.sim.simulate`, under `net.transport.sim.run`.
"""

import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from dmoe_jax.device import Device, InlineDevice
from dmoe_jax.directory import DirectoryConfig, ExpertDirectory, open_expert_directory
from dmoe_jax.grid import layer_prefix
from dmoe_jax.mixture.fan_out import CallPolicy, CallStatistics, ExpertCaller
from dmoe_jax.mixture.remote import MixtureConfig, RemoteMixture
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.server import NodeConfig, open_expert_node
from dmoe_jax.routing.base import Router
from dmoe_jax.trainer import SwarmModel
from net.clock import SwarmClock
from net.dht.config import DhtConfig
from net.dht.node import DhtNode, open_dht_node
from net.errors import DialFailed
from net.identity import Address, PeerId
from net.rpc.faults import FaultInjector, FaultPlan
from net.rpc.peer import RpcPeer, open_rpc_peer
from net.transport.sim.network import SimNetwork

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

    def transformer_xl(
        self, config: txl.TransformerXLConfig, router: Router, *, policy: CallPolicy, device: Device
    ) -> SwarmModel:
        """The Transformer-XL whose layers are mixtures of the swarm's experts.

        Args:
          config: its sizes.
          router: of every layer.
          policy: how long its calls wait.
          device: where its segments run.
        """
        mixtures = [
            RemoteMixture(
                expert=config.expert(),
                router=router,
                directory=self.directory,
                caller=self.caller,
                device=device,
                config=MixtureConfig(prefix=layer_prefix(layer), k_best=config.k_best, policy=policy),
            )
            for layer in range(config.num_layers)
        ]
        return SwarmModel(config, txl.segments(config, router), mixtures)


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

    They live as long as the network. A node whose host goes down and comes up again serves its experts as they were,
    and finds the swarm again through whichever of the other nodes is there.

    Args:
      network: where they live; none of these hosts may be down yet.
      backends: the experts by uid. Warm, or what is compiled at the first call takes real time, but no virtual time.
      num_nodes: at most one for each expert.
      seed: of the nodes' identities and choices.
      device: the device of a host, asked for at each of its starts; None: work takes no virtual time.
      faults: what goes wrong with their calls.
      config: of all nodes.

    Returns:
      where to join, once all of them serve.

    Raises:
      ValueError: there are more nodes than experts, or no nodes.
    """
    if not 1 <= num_nodes <= len(backends):
        raise ValueError(f"num_nodes must be from 1 to the {len(backends)} experts, got {num_nodes}")
    addresses = [Address(f"node{index}", PORT) for index in range(num_nodes)]
    first = addresses[0]
    all_serve = trio.Event()
    have_served: dict[str, None] = {}  # hosts

    async def serve(host: str, own: Mapping[str, ExpertBackend]) -> None:
        # At first they come one after the other to the first; later the first itself may be who is missing.
        others = [address for address in addresses if address.host != host]
        join = others if host in have_served else [first] if host != first.host else []
        own_device = InlineDevice() if device is None else device(host)
        while True:
            try:
                async with (
                    open_simulated_peer(network, host, seed=seed, join=join, faults=faults) as peer,
                    open_expert_node(peer.rpc, peer.dht, own, device=own_device, config=config or NodeConfig()),
                ):
                    have_served[host] = None
                    if len(have_served) == num_nodes:
                        all_serve.set()
                    await trio.sleep_forever()
            except DialFailed:  # nobody to join yet
                await trio.sleep(_JOIN_AGAIN_S)

    for index, address in enumerate(addresses):
        own = {uid: backends[uid] for uid in list(backends)[index::num_nodes]}
        network.start(address.host, serve, address.host, own)
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
    """A trainer's process: in client mode, as behind a router that lets nobody in.

    Args:
      network: where it lives.
      host: its host, with nothing else on it.
      seed: of its identity and choices.
      join: what `start_simulated_nodes` returned.
      statistics: of its expert calls; several trainers may share one.
      config: how often it looks for experts.

    Raises:
      DialFailed: nobody is there to join.
    """
    async with (
        open_simulated_peer(network, host, seed=seed, join=[join], client_mode=True) as peer,
        open_expert_directory(peer.dht, config=DirectoryConfig() if config is None else config) as directory,
    ):
        caller = ExpertCaller(peer.rpc, directory, CallStatistics() if statistics is None else statistics)
        yield SimulatedTrainer(peer=peer, directory=directory, caller=caller)
