"""A whole small swarm for tests: expert nodes and a trainer's side, over any network that gives callers."""

import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
import trio

from dmoe_jax.directory.directory import DirectoryConfig, ExpertDirectory
from dmoe_jax.directory.grid import ExpertUid, all_uids
from dmoe_jax.experts.base import Expert
from dmoe_jax.machine.device import Device, InlineDevice
from dmoe_jax.mixture.remote import RemoteMixture
from dmoe_jax.mixture.statistics import CallStatistics
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.server import ExpertNode
from dmoe_jax.peers.peer import Seams
from dmoe_jax.routing.base import Router
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.swarm.swarm import Swarm
from dmoe_net.clock import SwarmClock
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.keys import Identity
from dmoe_net.peer_health import Pause
from dmoe_net.rpc.base import Caller
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.tcp import TcpTransport
from tests.net.direct_network import DirectCaller, DirectNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallSwarm:
    """Running swarm, as a test needs it."""

    swarm: Swarm
    """The trainer's place in it."""
    backends: dict[str, ExpertBackend]
    nodes: list[ExpertNode]

    @property
    def directory(self) -> ExpertDirectory:
        return self.swarm.directory

    @property
    def statistics(self) -> CallStatistics:
        return self.swarm.statistics

    def stacked_params(self, prefix: str, grid_size: tuple[int, ...]) -> Any:
        """Copies of the experts' parameters of one layer, stacked as `mixture.local` keeps them."""
        params = [self.backends[str(uid)].params for uid in all_uids(prefix, grid_size)]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *params)

    def mixture(self, expert: Expert, router: Router, prefix: str, **options: Any) -> RemoteMixture:
        return self.swarm.mixture(prefix, expert, router, **options)


def identity_of(index: int) -> Identity:
    """Key of the index-th caller."""
    return Identity.from_seed(random.Random(index).randbytes(32))


@asynccontextmanager
async def open_small_swarm(
    callers: Sequence[Caller],
    expert: Expert,
    optimizer: optax.GradientTransformation | None,
    *,
    prefixes: Sequence[str],
    grid_size: tuple[int, ...],
    node_config: NodeConfig | None = None,
    directory_config: DirectoryConfig | None = None,
    clock: SwarmClock | None = None,
    device: Device | None = None,
) -> AsyncIterator[SmallSwarm]:
    """Serve the grids from all callers but the last, dealt out in turn; the last caller is the trainer."""
    uids = [str(uid) for prefix in prefixes for uid in all_uids(prefix, grid_size)]
    clock = clock or SwarmClock(start_s=1000.0)
    async with AsyncExitStack() as stack:
        first = callers[0].address
        swarms = []
        for index, caller in enumerate(callers):
            opened = open_swarm(
                [first] if index and first is not None else [],
                device=device or InlineDevice(),
                seed=index,
                directory=directory_config or DirectoryConfig(),
                testing=Seams(caller=caller, identity=identity_of(index), clock=clock),
            )
            swarms.append(await stack.enter_async_context(opened))
        served = []
        for index, swarm in enumerate(swarms[:-1]):
            own = dict.fromkeys(uids[index :: len(callers) - 1], expert)
            served.append(await swarm.serve(own, optimizer=optimizer, seed=0, config=node_config))
        yield SmallSwarm(
            swarm=swarms[-1],
            backends={uid: backend for each in served for uid, backend in each.backends.items()},
            nodes=[each.node for each in served],
        )


@asynccontextmanager
async def tcp_callers(count: int) -> AsyncIterator[list[Caller]]:
    """Peers on loopback TCP; the last is in client mode."""
    async with AsyncExitStack() as stack:
        callers: list[Caller] = []
        for index in range(count):
            listen = Address("127.0.0.1", 0) if index < count - 1 else None
            peer = open_rpc_peer(TcpTransport(), peer_id=identity_of(index).peer_id, listen=listen)
            callers.append(await stack.enter_async_context(peer))
        yield callers


def direct_callers(network: DirectNetwork, count: int) -> list[DirectCaller]:
    """Peers of a direct network at node0, node1, ...; the last is in client mode."""
    addresses = [Address(f"node{index}", 1) for index in range(count - 1)]
    return [network.caller(address, identity_of(index).peer_id) for index, address in enumerate([*addresses, None])]


async def find_experts(directory: ExpertDirectory, uids: Iterable[ExpertUid]) -> dict[ExpertUid, Contact | None]:
    """Contact of the node that serves each of these experts; None for those that are not alive."""
    uids = list(uids)
    found: dict[tuple[str, int], dict[tuple[int, ...], Contact]] = {}
    for prefix, dims in {(uid.prefix, len(uid.coordinates)) for uid in uids}:
        same = [uid.coordinates for uid in uids if uid.prefix == prefix and len(uid.coordinates) == dims]
        sizes = [max(coordinates[dim] for coordinates in same) + 1 for dim in range(dims)]
        found[prefix, dims] = await directory.living(prefix, sizes)
    return {uid: found[uid.prefix, len(uid.coordinates)].get(uid.coordinates) for uid in uids}


def avoided(directory: ExpertDirectory) -> list[PeerId | str]:
    """The hosts, and the single experts by uid, that count as dead now because they failed."""
    usual = DirectoryConfig()
    pause = Pause(first_s=usual.backoff_base_s, longest_s=usual.backoff_cap_s)
    targets = directory.health.blocked(trio.current_time(), pause)
    return [peer_id if service == "expert" else service for peer_id, service in targets]


def close(left: Any, right: Any, atol: float = 1e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=0), left, right)
