"""Which of a node's experts lives where.

A *place* is what holds an expert and works by itself: a device, or a mesh of several. An expert keeps the place in
which it began. Experts are spread so that the places hold about the same number of bytes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dmoe_jax.node.sharding import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One of the places of a node."""

    number: int = 0
    """Its position among them."""
    layout: Layout | None = None
    """How an expert lies there; None: JAX decides, which puts it on its default device."""

    led: Callable[[str, Any], Any] | None = None
    """(uid, its `ExpertPrograms`) -> programs like them. If other processes hold parts of the experts, too, these have
    them do the same (`dmoe_jax.node.lockstep`)."""

    @property
    def name(self) -> str:
        """What metrics call it: its devices, or else its number."""
        return str(self.number) if self.layout is None else self.layout.name


DEFAULT_PLACE = Place()


def bytes_by_place(held: Iterable[tuple[Place, int]], num_places: int) -> list[int]:
    """How many bytes each place holds, given the place and the bytes of each expert."""
    loads = [0] * num_places
    for place, nbytes in held:
        loads[place.number] += nbytes
    return loads


def spread(nbytes: Mapping[str, int], places: Sequence[Place], loads: Sequence[int] = ()) -> dict[str, Place]:
    """A place for each expert: the largest first, each where the fewest bytes are, of equal places the first.

    Args:
      nbytes: of each expert's state, by uid. Experts of equal size are taken in this order.
      places: among which to choose.
      loads: bytes that each place holds already; none: they are empty.

    Returns: in the order of `nbytes`.
    """
    held = list(loads) or [0] * len(places)
    chosen: dict[str, Place] = {}
    for uid in sorted(nbytes, key=lambda uid: -nbytes[uid]):
        least = min(range(len(places)), key=held.__getitem__)
        held[least] += nbytes[uid]
        chosen[uid] = places[least]
    return {uid: chosen[uid] for uid in nbytes}
