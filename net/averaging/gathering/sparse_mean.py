"""The mean of a group's sparse vectors: gathered by everybody, and computed by everybody for itself.

`net.wire.sparse` says why members gather such vectors and do not reduce them. All who have the vectors of the same
members compute the very same bits, as they add up in the order of the group.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import trio

from net.averaging.gathering.all_gather import AllGather
from net.averaging.gathering.payloads import BROKE_RULES, GatherConfig
from net.averaging.grouping.group import Group
from net.errors import RemoteProtocolError
from net.identity import PeerId
from net.rpc.base import Caller
from net.types import Array
from net.wire.sparse import (
    SparseCoding,
    SparseVector,
    encode_sparse,
    mean_of_sparse,
    parse_sparse_untrusted,
    sparse_nbytes,
)

Compute = Callable[..., Awaitable[Any]]
"""Returns `function(*args)`: the mean of long vectors takes time that the event loop has not."""


async def inline(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, computed here and now."""
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
        """Raises `ValueError` unless it is a vector of this layout; its values are not looked at."""
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


# Compared by identity: arrays have no single answer to `==`.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SparseMean:
    """The outcome of a gathering, as one member sees it."""

    average: Array
    """float32 [size]: the weighted mean of the vectors of all who are not in `lost`, this member's own included."""
    num_others: int
    """Vectors of others that are in it."""
    lost: Mapping[PeerId, str]
    """Members whose vectors it goes without, and why."""
    sent_bytes: int
    """Bytes of payloads that this member has sent."""


class SparseGather:
    """Averages sparse vectors under one name. One object serves all groups of a process, one at a time.

    Args:
      caller, prefix, config: as of `AllGather`.
      layout: of all vectors.
      compute: where packing, reading and averaging run.
    """

    def __init__(
        self,
        caller: Caller,
        *,
        prefix: str,
        layout: SparseLayout,
        config: GatherConfig,
        compute: Compute = inline,
    ) -> None:
        self._own_id = caller.peer_id
        self.layout = layout
        """The form of all vectors."""
        self._compute = compute
        self._gather = AllGather(caller, prefix=prefix, config=config)
        self.close, self.knows = self._gather.close, self._gather.knows

    async def packed(self, vector: SparseVector) -> Array:
        """The payload of a vector, before anybody waits for it.

        Raises:
          ValueError: it is not of the layout, or not finite; see `encode_sparse`.
        """
        self.layout.check(vector)
        return np.frombuffer(await self._compute(encode_sparse, vector), np.uint8)

    async def run(self, group: Group, payload: Array, *, timeout_s: float) -> SparseMean:
        """Average with the group; each vector counts by its member's weight. Ends in time.

        Args:
          group: as of `AllGather.run`.
          payload: this member's, made by `packed`.
          timeout_s: the longest that others are waited for.

        Raises:
          ValueError: this peer is not in the group.
        """
        gathered = await self._gather.run(group, payload, timeout_s=timeout_s)
        vectors, weights, lost = list[SparseVector](), list[float](), dict(gathered.lost)
        own = group.index(self._own_id)
        for place, each in gathered.payloads.items():
            try:
                vectors.append(
                    await self._compute(parse_sparse_untrusted, each.data, self.layout.coding, self.layout.sizes)
                )
            except RemoteProtocolError:
                assert place != own, "what this member has packed can be read"
                lost[place] = BROKE_RULES
            else:
                weights.append(group.members[place].weight)
        return SparseMean(
            average=await self._compute(mean_of_sparse, vectors, weights),
            num_others=len(vectors) - 1,
            lost={group.members[place].peer_id: lost[place] for place in sorted(lost)},
            sent_bytes=gathered.sent_bytes,
        )
