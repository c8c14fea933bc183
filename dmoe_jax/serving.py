"""Experts that a process serves, from their compilation to their withdrawal; those that it claims, too."""

import functools
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

import optax
import trio

from dmoe_jax.claims.claimer import CannotTakeUp, Claimer
from dmoe_jax.claims.claiming import ClaimConfig
from dmoe_jax.claims.records import check_claimable
from dmoe_jax.experts.base import Expert
from dmoe_jax.grid import ExpertUid, expand_grid_pattern
from dmoe_jax.node.backend import ExpertBackend, make_backend
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.devices import PlacedDevice, all_of
from dmoe_jax.node.listing import SoleListing
from dmoe_jax.node.placement import Place, bytes_by_place
from dmoe_jax.node.saving import ExpertSaver
from dmoe_jax.node.server import ExpertNode, open_expert_node
from dmoe_jax.peer import SwarmPeer
from dmoe_jax.replicas import ReplicaConfig, replicating
from net.identity import Contact
from net.nursery import background_nursery


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedExpert:
    """An expert that somebody serves now."""

    contact: Contact
    """The node that serves it."""
    updates: int
    """Optimiser steps that it has taken."""


class Served:
    """Experts that this process serves. Made by `Swarm.serve`; they are served until `close` or the swarm's end."""

    def __init__(self, node: ExpertNode, backends: Mapping[str, ExpertBackend]) -> None:
        self.node = node
        self.backends = backends
        """By uid: parameters and optimiser states, as they are now. Of a node that claims experts they come and go."""
        self._leave = trio.Event()
        self._gone = trio.Event()

    @property
    def uids(self) -> tuple[str, ...]:
        """Which experts."""
        return tuple(self.backends)

    async def close(self) -> None:
        """Refuse new calls, withdraw the experts from the swarm, answer what was accepted, and save once more if they
        are saved. How long answers may take says `NodeConfig.leave_timeout_s`."""
        self._leave.set()
        await self._gone.wait()

    @property
    def is_closed(self) -> bool:
        """Whether they are served no more."""
        return self._gone.is_set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where an expert that is taken up may be found as it was."""

    name: str
    """What it is called where adoptions are counted."""
    fill: Callable[[str, ExpertBackend], Awaitable[bool]]
    """(uid, fresh backend) -> whether it was there, and the backend has taken it up.

    It raises ValueError, RuntimeError or OSError if it is there and cannot be taken up."""


async def begin_from(sources: Sequence[Source], uid: str, backend: ExpertBackend) -> str:
    """Fill a fresh backend from the first of these sources that has the expert; returns that one's name, else "seed".

    Raises:
      ValueError, RuntimeError, OSError: a source has it, and it cannot be taken up. Nobody falls back on a worse source
        then: another node may be able to.
    """
    for source in sources:
        if await source.fill(uid, backend):
            return source.name
    return "seed"


def checkpoints_of(saver: ExpertSaver) -> Source:
    """The folder of a saver."""

    async def fill(uid: str, backend: ExpertBackend) -> bool:
        return await saver.restore_one(uid, backend) is not None

    return Source(name="checkpoint", fill=fill)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimable:
    """What a node may claim. Made by `claimable_of`."""

    config: ClaimConfig
    """How."""
    uids: Mapping[str, ExpertUid]
    """Which experts, by their names."""
    make: Callable[[str, Place], ExpertBackend]
    """Makes one of them in a place, as its seed says; blocks."""
    prototypes: tuple[ExpertBackend, ...]
    """One of each kind in each place."""


def fixed_of(experts: Mapping[str, Expert], claim: ClaimConfig) -> dict[str, Expert]:
    """The patterns that a node serves from the start, of those that were handed to it.

    Raises:
      ValueError: it is to claim a pattern that was not handed to it; the message names it.
    """
    if unknown := [pattern for pattern in claim.of if pattern not in experts]:
        raise ValueError(f"claim.of names {unknown[0]!r}, which is not among the patterns: {', '.join(experts)}")
    return {pattern: expert for pattern, expert in experts.items() if claim.of and pattern not in claim.of}


def claimable_of(
    experts: Mapping[str, Expert],
    claim: ClaimConfig,
    optimizer: optax.GradientTransformation | None,
    *,
    seed: int,
    places: Sequence[Place],
) -> Claimable:
    """What a node may claim of these patterns; makes one expert of each kind in each place.

    Args:
      experts, optimizer, seed, places: as of `make_backends`.

    Raises:
      ValueError: as `make_backends`, and if there are too many experts.
    """
    fixed = fixed_of(experts, claim)
    patterns: dict[str, str] = {}
    uids: dict[str, ExpertUid] = {}
    for pattern in experts:
        for uid in expand_grid_pattern(pattern):
            name = str(uid)
            if name in patterns:
                raise ValueError(f"expert {uid} is named twice, by {patterns[name]!r} and by {pattern!r}")
            patterns[name] = pattern
            if pattern not in fixed:
                uids[name] = uid
    check_claimable(uids)

    def make(uid: str, place: Place) -> ExpertBackend:
        return make_backend(uids[uid], experts[patterns[uid]], optimizer, seed=seed, place=place)

    first_of_kind = {id(experts[patterns[uid]]): uid for uid in reversed(uids)}
    prototypes = tuple(make(uid, place) for uid in first_of_kind.values() for place in places)
    return Claimable(config=claim, uids=uids, make=make, prototypes=prototypes)


class _ClaimingNode:
    """A node, as its claimer sees it (`dmoe_jax.claims.claimer.Host`)."""

    def __init__(
        self,
        node: ExpertNode,
        backends: Mapping[str, ExpertBackend],
        devices: Sequence[PlacedDevice],
        make: Callable[[str, Place], ExpertBackend],
        begin: Callable[[str, ExpertBackend], Awaitable[str]],
    ) -> None:
        self._node, self._backends, self._devices, self._make, self._begin = node, backends, devices, make, begin
        self.introduce = node.introduce
        self.give_up = node.give_up
        self.outlast = node.outlast

    @property
    def served(self) -> Collection[str]:
        return self._backends.keys()

    @property
    def is_warm(self) -> bool:
        return self._node.warm.is_set()

    def updates(self, uid: str) -> int:
        return self._backends[uid].update_count

    async def take_up(self, uid: str) -> str:
        try:
            # Beside the device: batches of the experts that are served go on.
            own = self._emptiest()
            backend = await own.device.aside(self._make, uid, own.place)
            origin = await self._begin(uid, backend)
        except (ValueError, RuntimeError, OSError) as error:  # RuntimeError: XLA's, where the memory is full
            raise CannotTakeUp(str(error).strip().partition("\n")[0] or type(error).__name__) from error
        self._node.adopt(uid, backend)
        return origin

    def _emptiest(self) -> PlacedDevice:
        held = bytes_by_place(((each.place, each.nbytes) for each in self._backends.values()), len(self._devices))
        return min(self._devices, key=lambda each: held[each.place.number])

    async def announce(self, uids: Collection[str]) -> None:
        await self._node.warm.wait()
        await self._node.introduce(uids)


def _sole_listing(peer: SwarmPeer, *, claims: bool) -> SoleListing | None:
    """Announces experts alone; who else does is the claimer's business if there is one."""
    if peer.rpc.address is None:
        return None
    return SoleListing(peer.dht, Contact(peer.rpc.peer_id, peer.rpc.address), warns=not claims)


async def serve_until_left(
    peer: SwarmPeer,
    devices: Sequence[PlacedDevice],
    backends: dict[str, ExpertBackend],
    config: NodeConfig,
    saver: ExpertSaver | None,
    *,
    period_s: float,
    on_progress: Callable[[str], None],
    claimable: Claimable | None = None,
    compiling: AbstractAsyncContextManager[object] = nullcontext(),  # noqa: B008 (stateless)
    replicate: ReplicaConfig | None = None,
    task_status: trio.TaskStatus[Served] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve experts until `Served.close`; they are saved every `period_s` seconds and once more at the end.

    Args:
      backends: the experts to begin with; none, if it claims some.
      claimable: what it may claim; those are claimed that nobody serves, at first while the programs are compiled. They
        begin with what the saver's folder has, else with their seeds.
      compiling: see `open_expert_node`.
      replicate: the experts are replicas of those that other nodes serve, and begin with the state that they have
        there.
    """
    served: Served | None = None
    claimer: Claimer | None = None

    def begin_to_claim(node: ExpertNode) -> None:
        nonlocal claimer
        if claimable is not None:
            # No living copies among them: an expert of which there is one is not vacant.
            begin = functools.partial(begin_from, () if saver is None else (checkpoints_of(saver),))
            host = _ClaimingNode(node, backends, devices, claimable.make, begin)
            claimer = Claimer(
                peer.rpc, peer.dht, config.swarm, claimable.uids, claimable.config, host, on_progress=on_progress
            )
            node.claims = claimer.status
            nursery.start_soon(claimer.run)

    try:
        async with (
            background_nursery() as nursery,
            replicating(
                peer.rpc,
                peer.dht,
                backends,
                swarm=config.swarm,
                device=all_of(devices),
                rng=peer.rng,
                config=replicate,
                on_progress=on_progress,
            ) as replicas,
            open_expert_node(
                peer.rpc,
                peer.dht,
                backends,
                device=devices,
                config=config,
                prototypes=() if claimable is None else claimable.prototypes,
                on_progress=on_progress,
                on_open=begin_to_claim,
                listing=replicas or _sole_listing(peer, claims=claimable is not None),
                compiling=compiling,
            ) as node,
        ):
            if saver is not None:
                nursery.start_soon(saver.run, period_s)
            if claimer is not None:
                await claimer.settled.wait()
            served = Served(node, backends)
            task_status.started(served)
            await served._leave.wait()
            if claimer is not None:
                claimer.stop()
    finally:
        if served is not None:
            # After the withdrawal: nobody sends gradients any more.
            with trio.CancelScope(shield=True):
                if saver is not None:
                    await saver.save()
            served._gone.set()
