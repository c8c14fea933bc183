"""The mean of a group's sparse vectors: gathered by everybody, and computed by everybody for itself.

`net.wire.sparse` says why members gather sparse vectors and do not reduce them. All who have the vectors of the same
members compute the very same bits, as they add up in the order of the group.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import trio

from net.averaging.gathering.all_gather import Gathered
from net.averaging.gathering.payloads import BROKE_RULES, GatherConfig
from net.averaging.grouping.group import Group
from net.errors import RemoteProtocolError
from net.identity import PeerId
from net.types import Array
from net.wire.sparse import SparseCoding, SparseVector, mean_of_sparse, parse_sparse_untrusted, sparse_nbytes

Compute = Callable[..., Awaitable[Any]]
"""Returns `function(*args)`: the mean of long vectors takes time that the event loop has not."""


async def inline(function: Callable[..., Any], *args: Any) -> Any:
    """Compute `function(*args)` here and now."""
    await trio.lowlevel.checkpoint()
    return function(*args)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLayout:
    """The form of vectors of few values; the same at all peers that average together.

    Raises:
      ValueError: there is no value.
    """

    coding: SparseCoding
    """Cutting and packing of a vector."""
    sizes: tuple[int, ...]
    """Values in each of its segments, such as the arrays of a model."""

    def __post_init__(self) -> None:
        if self.size < 1 or min(self.sizes) < 0:
            raise ValueError(f"a vector has at least one value, got segments of {self.sizes!r:.80}")

    @property
    def size(self) -> int:
        """Values in all, zeros included."""
        return sum(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of each payload."""
        return sparse_nbytes(self.coding, self.sizes)

    @property
    def schema(self) -> str:
        """The layout in words, on which peers must agree."""
        coding = self.coding
        segments = ",".join(map(str, self.sizes))
        return f"sparse 1: {coding.kept} of {coding.block_size} in {coding.bits} bits, segments {segments}"

    def check(self, vector: object) -> None:
        """Refuse what is no vector of this layout, by `ValueError`; values are not looked at."""
        if not isinstance(vector, SparseVector) or (vector.coding, vector.sizes) != (self.coding, self.sizes):
            raise ValueError(f"expected a sparse vector of {self.size} values, {self.schema:.160}, got {vector!r:.160}")

    def check_memory(self, side: int, config: GatherConfig) -> None:
        """Refuse a layout whose payloads would be too much to hold.

        Args:
          side: members in a full group.

        Raises:
          ValueError: they come to more than `config.max_bytes`.
        """
        nbytes = side * self.nbytes
        if nbytes > config.max_bytes:
            raise ValueError(
                f"{side} sparse payloads of {self.nbytes} bytes take {nbytes} bytes of memory, more than the "
                f"{config.max_bytes} that are allowed: smaller groups, or fewer values of a block"
            )


async def mean_untrusted(
    gathered: Gathered, group: Group, layout: SparseLayout, compute: Compute
) -> tuple[Array, dict[PeerId, str]]:
    """Average the vectors that a group has gathered; each counts by its member's weight.

    Returns: the mean, float32 [layout.size], and the members that it goes without, and why: in the order of the group.
    """
    vectors, weights, lost = list[SparseVector](), list[float](), dict(gathered.lost)
    for place, each in gathered.payloads.items():
        try:
            vectors.append(await compute(parse_sparse_untrusted, each.data, layout.coding, layout.sizes))
        except RemoteProtocolError:
            lost[place] = BROKE_RULES
        else:
            weights.append(group.members[place].weight)
    mean = await compute(mean_of_sparse, vectors, weights)
    return mean, {group.members[place].peer_id: lost[place] for place in sorted(lost)}
