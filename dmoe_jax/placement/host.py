"""A node that claims experts: what it may claim, what a claimed expert begins with, and how it is taken up."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import optax

from dmoe_jax.directory.grid import ExpertUid, expand_grid_pattern
from dmoe_jax.experts.base import Expert
from dmoe_jax.node.backend import ExpertBackend, make_backend
from dmoe_jax.node.saving import ExpertSaver
from dmoe_jax.node.server import ExpertNode
from dmoe_jax.node.sharding import Place, PlacedDevice, bytes_by_place
from dmoe_jax.peers.peer import SwarmPeer
from dmoe_jax.placement.claimer import CannotTakeUp, Claimer
from dmoe_jax.placement.config import PlacementConfig
from dmoe_jax.placement.replicas import Replicas
from dmoe_jax.placement.survey import check_claimable
from dmoe_net.errors import NetError


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Place where an expert that is taken up may be found as it was."""

    name: str
    """Name under which adoptions from there are counted."""
    fill: Callable[[str, ExpertBackend], Awaitable[bool]]
    """(uid, fresh backend) -> whether it was there, and the backend has taken it up.

    It raises ValueError, RuntimeError, OSError or NetError if it is there and cannot be taken up."""


async def begin_from(sources: Sequence[Source], uid: str, backend: ExpertBackend) -> str:
    """Fill a fresh backend from the first of these sources that has the expert; returns that one's name, else "seed".

    Raises:
      ValueError, RuntimeError, OSError, NetError: a source has it, and it cannot be taken up. Nobody falls back on a
        worse source then: another node may be able to.
    """
    for source in sources:
        if await source.fill(uid, backend):
            return source.name
    return "seed"


def copies_of(replicas: Replicas) -> Source:
    """The other nodes that serve an expert."""
    return Source(name="replica", fill=replicas.fill)


def checkpoints_of(saver: ExpertSaver) -> Source:
    """The folder of a saver."""

    async def fill(uid: str, backend: ExpertBackend) -> bool:
        return await saver.restore_one(uid, backend) is not None

    return Source(name="checkpoint", fill=fill)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimable:
    """Experts that a node may claim. Made by `claimable_of`."""

    config: PlacementConfig
    """Settings."""
    uids: Mapping[str, ExpertUid]
    """The experts, by their names."""
    make: Callable[[str, Place], ExpertBackend]
    """Makes one of them in a place, as its seed says; blocks."""
    prototypes: tuple[ExpertBackend, ...]
    """One of each kind in each place."""


def fixed_of(experts: Mapping[str, Expert], placement: PlacementConfig) -> dict[str, Expert]:
    """The patterns that a node serves from the start, of those that were handed to it.

    Raises:
      ValueError: it is to claim a pattern that was not handed to it; the message names it.
    """
    if unknown := [pattern for pattern in placement.of if pattern not in experts]:
        raise ValueError(f"placement.of names {unknown[0]!r}, which is not among the patterns: {', '.join(experts)}")
    return {pattern: expert for pattern, expert in experts.items() if placement.of and pattern not in placement.of}


def claimable_of(
    experts: Mapping[str, Expert],
    placement: PlacementConfig,
    optimizer: optax.GradientTransformation | None,
    *,
    seed: int,
    places: Sequence[Place],
) -> Claimable:
    """Experts of these patterns that a node may claim; makes one expert of each kind in each place.

    Args:
      experts, optimizer, seed, places: as of `make_backends`.

    Raises:
      ValueError: as `make_backends`, and if there are too many experts.
    """
    fixed = fixed_of(experts, placement)
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
    return Claimable(config=placement, uids=uids, make=make, prototypes=prototypes)


class ClaimingNode:
    """A node, as its claimer sees it (`dmoe_jax.placement.claimer.Host`).

    Args:
      sources: where experts that are taken up may be found, the best first.
      forgotten: told each expert that was given up.
    """

    def __init__(
        self,
        node: ExpertNode,
        backends: Mapping[str, ExpertBackend],
        devices: Sequence[PlacedDevice],
        make: Callable[[str, Place], ExpertBackend],
        sources: Sequence[Source],
        *,
        forgotten: Callable[[str], None] = lambda uid: None,
    ) -> None:
        self._node, self._backends, self._devices, self._make, self._sources = node, backends, devices, make, sources
        self.introduce = node.introduce
        self._forgotten = forgotten

    def expert(self, uid: str) -> Expert:
        return self._backends[uid].expert

    def claimer(self, peer: SwarmPeer, claimable: Claimable, *, on_progress: Callable[[str], None]) -> Claimer:
        """Make the claimer of this node; `node.status` then says how its claims go."""
        claimer = Claimer(
            peer.rpc,
            peer.dht,
            self._node.config.swarm,
            claimable.uids,
            claimable.config,
            self,
            on_progress=on_progress,
        )
        self._node.claims = claimer.status
        return claimer

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
            origin = await begin_from(self._sources, uid, backend)
        except (ValueError, RuntimeError, OSError, NetError) as error:  # RuntimeError: XLA's, where the memory is full
            raise CannotTakeUp(str(error).strip().partition("\n")[0] or type(error).__name__) from error
        self._node.adopt(uid, backend)
        return origin

    def _emptiest(self) -> PlacedDevice:
        held = bytes_by_place(((each.place, each.nbytes) for each in self._backends.values()), len(self._devices))
        return min(self._devices, key=lambda each: held[each.place.number])

    async def give_up(self, uid: str) -> None:
        await self._node.give_up(uid)
        self._forgotten(uid)

    async def announce(self, uids: Collection[str]) -> None:
        await self._node.warm.wait()
        await self._node.introduce(uids)
