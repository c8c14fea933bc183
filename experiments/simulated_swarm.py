"""Expert nodes on a simulated network (`dmoe_net.simulate`), which outlive the crashes of their hosts.

A trainer is `dmoe_jax.open_swarm(join, network=network, host=..., listen=None, seed=...)`: the code that runs is that
of a real swarm, and only the network and the devices are simulated.
"""

from collections.abc import Callable, Mapping

import trio

from dmoe_jax import DirectoryConfig, NodeConfig
from dmoe_jax.machine.device import Device, InlineDevice
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.server import open_expert_node
from dmoe_jax.peers.peer import SIM_PORT, PeerConfig, open_peer
from dmoe_net import Address, Caller, DialFailed, FaultPlan, SimNetwork

# Nodes that stay: announced and looked up every few virtual minutes, not every few seconds as on a volunteer's machine.
NODE_CONFIG = NodeConfig(announce_period_s=100.0, record_lifetime_s=300.0)
# Announcements have two thirds of `ttl_s` left when they are read. A failed call says nothing of the next one: each
# fails by itself. So nobody is avoided, and routers choose among all.
DIRECTORY_CONFIG = DirectoryConfig(ttl_s=300.0, idle_s=3600.0, backoff_base_s=0.0)

_JOIN_AGAIN_S = 0.3


async def start_simulated_nodes(
    network: SimNetwork,
    backends: Mapping[str, ExpertBackend],
    *,
    num_nodes: int,
    seed: int,
    device: Callable[[str], Device] | None = None,
    faults: FaultPlan | Callable[[str], FaultPlan] | None = None,
    config: NodeConfig | None = None,
    through: Callable[[Caller], Caller] = lambda caller: caller,
) -> Address:
    """Start expert nodes as programs of the hosts node0, node1, ...; experts are dealt out in turn.

    They live as long as the network. A node whose host goes down and comes up again serves its experts as they were,
    and finds the swarm again through whichever of the other nodes is there.

    Args:
      network: where they live; none of these hosts may be down yet.
      backends: the experts by uid, at least one for each node.
      device: the device of a host, asked for at each of its starts; None: work takes no virtual time.
      faults: what goes wrong with their calls; perhaps by host.
      through: what a node serves through, made of its peer's caller.

    Returns: where to join, once all of them serve.
    """
    if not 1 <= num_nodes <= len(backends):
        raise ValueError(f"num_nodes must be from 1 to the {len(backends)} experts, got {num_nodes}")
    addresses = [Address(f"node{index}", SIM_PORT) for index in range(num_nodes)]
    first = addresses[0]
    all_serve = trio.Event()
    have_served: set[str] = set()

    async def serve(host: str, own: Mapping[str, ExpertBackend]) -> None:
        # At first they come one after the other to the first; later the first itself may be who is missing.
        others = [address for address in addresses if address.host != host]
        join = others if host in have_served else [first] if host != first.host else []
        own_device = InlineDevice() if device is None else device(host)
        own_faults = faults(host) if callable(faults) else faults
        while True:
            try:
                async with (
                    open_peer(join, PeerConfig(network=network, host=host, seed=seed, faults=own_faults)) as peer,
                    open_expert_node(
                        through(peer.rpc), peer.dht, dict(own), device=own_device, config=config or NodeConfig()
                    ),
                ):
                    have_served.add(host)
                    if len(have_served) == num_nodes:
                        all_serve.set()
                    await trio.sleep_forever()
            except DialFailed:  # nobody to join yet
                await trio.sleep(_JOIN_AGAIN_S)

    for index, address in enumerate(addresses):
        network.start(address.host, serve, address.host, dict(list(backends.items())[index::num_nodes]))
    await all_serve.wait()
    return first
