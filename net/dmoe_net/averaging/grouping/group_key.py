"""The rule by which peers meet: that of Moshpit All-Reduce (Ryabinin et al., NeurIPS 2021, algorithm 1).

Peers sit on the cells of a grid with `dims` axes of `side` slots each. In round t all peers that differ only along axis
t mod dims form a group and average; each reduces the chunk of its *slot*, its place along that axis. If somebody sits
there already it takes another, which is its place from then on. So those who met in a round do not meet again until its
digit is drawn anew, `dims` rounds later; on a full grid everybody has the exact mean after `dims` rounds.

The paper's key is made of the `dims` last chunk numbers, of which the newest would tell all members of a group apart;
the right number is `dims - 1`. Nor does our key name the round: peers that have lost count of each other's rounds
should still find each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_CELLS = 2**31 - 1
"""Cell numbers fit into an int32, the widest integer that JAX has by default."""

MAX_PREFIX_LENGTH = 64
_PREFIX_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")

Cell = Any
"""Number of a cell, 0 to num_cells - 1: an int, or an integer array of any shape, NumPy's or JAX's (also traced)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoshpitGrid:
    """A grid of side ** dims cells, and how its peers meet round by round."""

    side: int
    """Slots along each axis: the size of a full group (M in the paper)."""
    dims: int = 2
    """Axes (d in the paper). With one there is one group, of everybody."""

    def __post_init__(self) -> None:
        if self.side < 1 or self.dims < 1:
            raise ValueError(f"a grid has at least one axis and one slot, got side {self.side} and dims {self.dims}")
        if self.side**self.dims > MAX_CELLS:
            raise ValueError(f"a grid has at most {MAX_CELLS} cells, got {self.side}**{self.dims}")

    @property
    def num_cells(self) -> int:
        """Peers that the grid seats."""
        return int(self.side**self.dims)

    @property
    def num_groups(self) -> int:
        """Groups of each round."""
        return int(self.side ** (self.dims - 1))

    def slot(self, cell: Cell, round_number: Cell) -> Cell:
        """A peer's place along the axis of this round: the chunk that it would like to reduce, 0 to side - 1."""
        return cell // self._stride(round_number) % self.side

    def group(self, cell: Cell, round_number: Cell) -> Cell:
        """The number of its group in this round, 0 to num_groups - 1: its cell without the digit of the axis."""
        stride = self._stride(round_number)
        return cell // (stride * self.side) * stride + cell % stride

    def move(self, cell: Cell, round_number: Cell, slot: Cell) -> Cell:
        """The cell of a peer that reduced chunk `slot` in this round. Chunks beyond the side wrap around."""
        stride = self._stride(round_number)
        return cell + (slot % self.side - self.slot(cell, round_number)) * stride

    def coordinates(self, cell: int, round_number: int) -> tuple[int, ...]:
        """The dims - 1 digits that members of its group share in this round, from the oldest to the newest."""
        axis = round_number % self.dims
        axes = [(axis + offset) % self.dims for offset in range(1, self.dims)]
        return tuple(cell // self.side**each % self.side for each in axes)

    def _stride(self, round_number: Cell) -> Cell:
        """Cells between two neighbours along the axis of this round."""
        axis = round_number % self.dims
        if isinstance(axis, int):
            return self.side**axis
        # A power with a traced exponent would be one of floats.
        return sum((axis == each) * self.side**each for each in range(self.dims))


def check_prefix(prefix: str) -> str:
    """Return the prefix itself: the name of what is averaged, in DHT keys and methods.

    Raises:
      ValueError: it is empty, too long, or has other characters than letters, digits, '_' and '-'.
    """
    if not 1 <= len(prefix) <= MAX_PREFIX_LENGTH or not set(prefix) <= _PREFIX_CHARACTERS:
        raise ValueError(f"a prefix is 1 to {MAX_PREFIX_LENGTH} letters, digits, '_' or '-', got {prefix!r:.80}")
    return prefix


def group_key(prefix: str, grid: MoshpitGrid, cell: int, round_number: int) -> str:
    """The DHT key under which a peer looks for its group: `prefix.moshpit.3.0`, the coordinates after the name."""
    return ".".join((prefix, "moshpit", *map(str, grid.coordinates(cell, round_number))))


def assign_slots(wanted: Sequence[int], side: int) -> list[int]:
    """A chunk of its own for each member of a group that wants these slots, 0 to side - 1.

    The first to want a slot has it; others take the free slots from the lowest up, and past `side` where a group is
    larger than the side.
    """
    for slot in wanted:
        if not 0 <= slot < side:
            raise ValueError(f"slots go from 0 to {side - 1}, got {slot}")
    size = max(side, len(wanted))
    taken: dict[int, int] = {}
    for member, slot in enumerate(wanted):
        taken.setdefault(slot, member)
    free = (slot for slot in range(size) if slot not in taken)
    return [slot if taken[slot] == member else next(free) for member, slot in enumerate(wanted)]
