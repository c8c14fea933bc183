"""The way into a swarm: a peer that joins it, and the `Swarm` of that peer."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from dmoe_jax.directory.directory import DirectoryConfig, open_expert_directory
from dmoe_jax.machine.device import Device, InlineDevice, ThreadDevice
from dmoe_jax.mixture.fan_out import ExpertCaller
from dmoe_jax.mixture.statistics import CallStatistics
from dmoe_jax.peers.joining import Target
from dmoe_jax.peers.peer import PeerConfig, Seams, SwarmPeer, open_peer
from dmoe_jax.peers.security import Security, Tls
from dmoe_jax.swarm.swarm import Swarm
from dmoe_net.identity import Address
from dmoe_net.nursery import background_nursery
from dmoe_net.rpc.bulk import MemoryBudget
from dmoe_net.rpc.faults import FaultPlan
from dmoe_net.transport.sim.network import SimNetwork


@asynccontextmanager
async def open_swarm(
    join: Target | Sequence[Target] = (),
    *,
    listen: str | Address | None = "auto",
    announce: str | None = None,
    security: Security = Tls(),  # noqa: B008 (frozen)
    network: SimNetwork | None = None,
    host: str = "",
    name: str = "dmoe",
    seed: int | None = None,
    device: Device | None = None,
    faults: FaultPlan | None = None,
    directory: DirectoryConfig = DirectoryConfig(),  # noqa: B008 (frozen)
    memory_budget: int | str | MemoryBudget | None = None,
    testing: Seams | None = None,
) -> AsyncIterator[Swarm]:
    """Take part in a swarm until the block ends.

    Args:
      join: peers to join through, as HOST:PORT, PEERID@HOST:PORT to make sure who is there, or file:PATH, which lists
        some, a line each, and is waited for. None starts a new swarm.
      listen: HOST:PORT to be called at, port 0 for one that the system chooses; None: this peer only calls, and can
        serve nothing. "auto": on loopback if there is nobody to join or only on this machine, else None; in a
        simulation, at `host`.
      announce: host under which others reach this peer, if it is not the one that it listens on.
      security: `Tls` (the default) or `Plain`.
      network: a simulated network, in virtual time, instead of a real one. host: this peer's on it, its alone.
      name: the swarm's: members find each other under it.
      seed: seed of what this process draws. In a simulation its identity follows from it and the host. None: chance.
      device: runs XLA work; None: a worker thread, in a simulation the calling task.
      faults: errors of this peer's answers, on purpose.
      directory: settings of the look-up of experts.
      memory_budget: bytes, or a text such as "256MiB", that averages and states under way may hold in this process
        beyond the few MiB that each begins with, at least 1 MiB; swarms of one process may share a `MemoryBudget`. With
        less than a long line wants they take longer. None: 512 MiB.
      testing: parts that a test or an experiment puts in the place of this swarm's.

    Raises:
      ValueError: an address or file cannot be used, or the budget is none; the message names it.
      DialFailed: nobody answers among the peers to join through, or another peer than the one that was named; with a
        file, for five minutes.
      ListenFailed: the port is taken.
    """
    config = PeerConfig(
        listen=listen,
        announce=announce,
        security=security,
        network=network,
        host=host,
        seed=seed,
        faults=faults,
        memory_budget=memory_budget,
    )
    statistics = None if testing is None else testing.statistics
    async with (
        open_peer(join, config, testing) as peer,
        swarm_of(peer, name=name, seed=seed or 0, device=device, directory=directory, statistics=statistics) as swarm,
    ):
        yield swarm


@asynccontextmanager
async def swarm_of(
    peer: SwarmPeer,
    *,
    name: str = "dmoe",
    seed: int = 0,
    device: Device | None = None,
    directory: DirectoryConfig = DirectoryConfig(),  # noqa: B008 (frozen)
    statistics: CallStatistics | None = None,
) -> AsyncIterator[Swarm]:
    """The swarm of a peer that has joined already, until the block ends.

    Args:
      statistics: totals to go on counting in; None: new ones.
      name, seed, device, directory: as of `open_swarm`.
    """
    if device is None:
        device = InlineDevice() if peer.is_simulated else ThreadDevice()
    async with (
        open_expert_directory(peer.dht, swarm=name, config=directory) as experts,
        background_nursery() as nursery,
    ):
        caller = ExpertCaller(peer.rpc, experts, statistics or CallStatistics())
        swarm = Swarm(name, peer, caller, device, nursery, seed=seed)
        try:
            yield swarm
        finally:
            await swarm.close_served()
