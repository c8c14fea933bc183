"""This process's peer in a swarm: its connections and its DHT node. Nothing here imports JAX."""

import ipaddress
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from dmoe_jax.peers.joining import LISTED_WAIT_S, Target, WrongPeer, await_peers, find_named_entrances, parse_targets
from dmoe_jax.peers.listed import Named, PeersFile, keep_following, peers_now
from dmoe_jax.peers.remembered import keep_remembering, load_peers
from dmoe_jax.peers.security import Security, Tls
from dmoe_net.clock import SwarmClock
from dmoe_net.dht.node import DhtNode, open_dht_node
from dmoe_net.errors import DialFailed
from dmoe_net.identity import Address, Contact
from dmoe_net.keys import OPEN_SWARM, Identity
from dmoe_net.nursery import background_nursery
from dmoe_net.rpc.base import Caller
from dmoe_net.rpc.bulk import MemoryBudget
from dmoe_net.rpc.faults import FaultInjector, FaultPlan
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.sim.network import SimNetwork

if TYPE_CHECKING:
    from dmoe_jax.mixture.statistics import CallStatistics

_log = logging.getLogger(__name__)

_Entrances = tuple[Contact | Address, ...]

SIM_PORT = 1
"""Port of every peer in a simulation: each has a host of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmPeer:
    """A peer that has joined a swarm. Made by `open_peer`."""

    rpc: Caller
    """Places and serves calls."""
    dht: DhtNode
    """Finds peers and records."""
    rng: random.Random
    """Source of what this peer draws."""
    is_simulated: bool
    """True in virtual time."""

    @property
    def own_contact(self) -> Contact | None:
        """Contact of this peer; None if it listens nowhere."""
        return None if self.rpc.address is None else Contact(self.rpc.peer_id, self.rpc.address)

    @property
    def contact(self) -> str:
        """PEERID@HOST:PORT, what others join through. Raises ValueError if this peer listens nowhere."""
        if self.own_contact is None:
            raise ValueError("this peer is a client: nobody can join through it; give listen='HOST:PORT'")
        return self.own_contact.full


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """Place of a peer: arguments of `dmoe_jax.swarm.opening.open_swarm`, which says what they mean."""

    listen: str | Address | None = "auto"
    announce: str | None = None
    security: Security = field(default_factory=Tls)
    network: SimNetwork | None = None
    host: str = ""
    seed: int | None = None
    faults: FaultPlan | None = None
    memory_budget: int | str | MemoryBudget | None = None
    state_dir: Path | None = None
    """Folder in which the peers that this one has met are remembered; None: they are not."""

    def budget(self) -> MemoryBudget | None:
        """The memory budget. Raises ValueError if it is none."""
        if self.memory_budget is None or isinstance(self.memory_budget, MemoryBudget):
            return self.memory_budget
        try:
            return MemoryBudget(self.memory_budget)
        except ValueError as error:
            raise ValueError(f"memory_budget: {error}") from error

    def where_to_listen(self, targets: _Entrances) -> Address | None:
        """Address to listen at beside those to join through; None: this peer only calls."""
        if self.listen != "auto":
            return Address.parse(self.listen) if isinstance(self.listen, str) else self.listen
        if self.host:
            return Address(self.host, SIM_PORT)
        are_here = all(_is_loopback(each.address if isinstance(each, Contact) else each) for each in targets)
        return Address("127.0.0.1", 0) if are_here else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seams:
    """Parts that a test or an experiment puts in the place of a swarm's own; None: its own."""

    caller: Caller | None = None
    """Places and serves calls. What the configuration says of links then has no effect."""
    identity: Identity | None = None
    """Key of the caller's peer; together with `caller`."""
    clock: SwarmClock | None = None
    """Time of the swarm."""
    statistics: "CallStatistics | None" = None
    """Totals to go on counting in."""


@asynccontextmanager
async def open_peer(
    join: Target | Sequence[Target] = (), config: PeerConfig | None = None, testing: Seams | None = None
) -> AsyncIterator[SwarmPeer]:
    """Open this process's peer and DHT node, and join the swarm until the block ends.

    Arguments and errors are those of `dmoe_jax.swarm.opening.open_swarm`.
    """
    config, seams = config or PeerConfig(), testing or Seams()
    named, is_simulated = parse_targets(join), config.network is not None
    if is_simulated and any(isinstance(each, PeersFile) for each in named):
        raise ValueError(f"a simulation has no files of peers, got {' '.join(map(str, named))}")
    if config.memory_budget is not None and seams.caller is not None:
        raise ValueError("memory_budget would have no effect: the caller that was given has one already")
    if (seams.caller is None) != (seams.identity is None):
        raise ValueError("a caller and the key of its peer are given together")
    rng: random.Random = random.SystemRandom() if config.seed is None else random.Random(f"{config.seed}/{config.host}")
    async with AsyncExitStack() as stack:
        remembered = () if config.state_dir is None else load_peers(config.state_dir)
        caller, identity, swarm = seams.caller, seams.identity, OPEN_SWARM
        if caller is None or identity is None:
            caller, identity, swarm, targets = await _open_caller(stack, config, named, rng, remembered)
        else:
            targets = peers_now(named)
        node = await stack.enter_async_context(
            open_dht_node(
                caller,
                identity=identity,
                swarm=swarm,
                clock=seams.clock or (SwarmClock.virtual() if is_simulated else SwarmClock.wall()),
                rng=rng,
                initial_peers=targets,
                remembered=remembered,
                client_mode=caller.address is None,
            )
        )
        if any(isinstance(each, PeersFile) for each in named):
            nursery = await stack.enter_async_context(background_nursery())
            nursery.start_soon(keep_following, named, node)
        if config.state_dir is not None:
            nursery = await stack.enter_async_context(background_nursery())
            nursery.start_soon(keep_remembering, config.state_dir, node)
        yield SwarmPeer(rpc=caller, dht=node, rng=rng, is_simulated=is_simulated)


async def _open_caller(
    stack: AsyncExitStack, config: PeerConfig, named: Sequence[Named], rng: random.Random, remembered: _Entrances
) -> tuple[Caller, Identity, bytes, _Entrances]:
    """This peer's connections, open until the stack is, its key, the swarm's tag, and who answers among those to join
    through, whom this peer does not wait for if it remembers others."""
    until = trio.current_time() + (0.0 if remembered else LISTED_WAIT_S)
    targets: _Entrances = tuple(each for each in named if not isinstance(each, PeersFile))
    if not remembered:
        targets = await await_peers(named, until=until)
    budget, security, swarm = config.budget(), config.security, OPEN_SWARM
    if config.network is None:
        transport, identity, swarm = stack.enter_context(security.open())
    elif config.host:
        identity = Identity.from_seed(rng.randbytes(32))
        transport = config.network.transport(config.host, identity.peer_id)
    else:
        raise ValueError("each peer of a simulated network has its own host: give network=..., host='node0'")
    here = config.where_to_listen(targets)
    caller = await stack.enter_async_context(
        open_rpc_peer(
            transport,
            peer_id=identity.peer_id,
            listen=here,
            announce=config.announce,
            faults=None if config.faults is None else FaultInjector(config.faults),
            memory_budget=budget,
        )
    )
    if config.network is None:
        if here is not None and security.is_open and not _is_loopback(here):
            _log.warning("without a swarm secret everybody who reaches %s may join this swarm", caller.address)
        is_plain = not isinstance(security, Tls)
        try:
            targets = await find_named_entrances(caller, named, until=until, terms=security.terms, is_plain=is_plain)
        except DialFailed as error:
            # The peers that are remembered may be there; the others are tried again by and by.
            if isinstance(error, WrongPeer) or not remembered:
                raise
            _log.warning("%s; trying the peers that are remembered in %s", error, config.state_dir)
    return caller, identity, swarm, targets


def _is_loopback(address: Address) -> bool:
    """True if only this machine can reach it."""
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return address.host == "localhost"
