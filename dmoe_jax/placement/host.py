"""A node that claims experts: what it may claim, what a claimed expert begins with, and how it is taken up."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import optax

from dmoe_jax.directory.grid import ExpertUid, patterns_by_uid
from dmoe_jax.experts.base import Expert
from dmoe_jax.node.backend import ExpertBackend, make_backend
from dmoe_jax.node.saving import ExpertSaver
from dmoe_jax.node.server import ExpertNode
from dmoe_jax.node.sharding import Place, PlacedDevice, bytes_by_place
from dmoe_jax.placement.config import PlacementConfig
from dmoe_jax.placement.replicas import Replicas
from dmoe_jax.placement.survey import check_claimable
from dmoe_net.errors import NetError


class CannotTakeUp(Exception):
    """An expert cannot be taken up here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimable:
    """Experts that a node may claim. Made by `claimable_of`."""

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

    Arguments and errors are those of `make_backends`; ValueError too if there are too many experts.
    """
    fixed, patterns = fixed_of(experts, placement), patterns_by_uid(experts)
    uids = {str(uid): uid for uid, pattern in patterns.items() if pattern not in fixed}
    check_claimable(uids)

    def make(uid: str, place: Place) -> ExpertBackend:
        return make_backend(uids[uid], experts[patterns[uids[uid]]], optimizer, seed=seed, place=place)

    first_of_kind = {id(experts[patterns[uids[uid]]]): uid for uid in reversed(uids)}
    prototypes = tuple(make(uid, place) for uid in first_of_kind.values() for place in places)
    return Claimable(uids=uids, make=make, prototypes=prototypes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClaimingNode:
    """A node, as its claimer sees it."""

    node: ExpertNode
    backends: Mapping[str, ExpertBackend]
    """The experts that it serves by uid, those that it is giving up too."""
    devices: Sequence[PlacedDevice]
    make: Callable[[str, Place], ExpertBackend]
    """As of `Claimable`."""
    replicas: Replicas | None
    """Its experts as copies of others', where several are wanted."""
    saver: ExpertSaver | None
    """The folder of checkpoints."""

    async def take_up(self, uid: str) -> str:
        """Make an expert, fill it with what it is to begin with, and answer calls for it; says what that was.

        Whoever has the expert, and cannot give it, is not passed over for a worse source: another node may be able to
        take it up.

        Raises:
          CannotTakeUp: the reason.
        """
        try:
            # Beside the device: batches of the experts that are served go on.
            own = self._emptiest()
            backend = await own.device.aside(self.make, uid, own.place)
            origin = "seed"
            if self.replicas is not None and await self.replicas.fill(uid, backend):
                origin = "replica"
            elif self.saver is not None and await self.saver.restore_one(uid, backend) is not None:
                origin = "checkpoint"
        except (ValueError, RuntimeError, OSError, NetError) as error:  # RuntimeError: XLA's, where the memory is full
            raise CannotTakeUp(str(error).strip().partition("\n")[0] or type(error).__name__) from error
        self.node.adopt(uid, backend)
        return origin

    def _emptiest(self) -> PlacedDevice:
        held = bytes_by_place(((each.place, each.nbytes) for each in self.backends.values()), len(self.devices))
        return min(self.devices, key=lambda each: held[each.place.number])

    async def give_up(self, uid: str) -> None:
        """Refuse new calls for an expert, take its announcement back, answer what was accepted, and forget it."""
        await self.node.give_up(uid)
        if self.replicas is not None:
            self.replicas.forget(uid)

    async def announce(self, uids: Collection[str]) -> None:
        """Return when these experts are announced; when the node is warm, that is."""
        await self.node.warm.wait()
        await self.node.introduce(uids)
