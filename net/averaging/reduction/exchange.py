"""What one member does in one all-reduce: whom it brings which chunks, what it reduces, and how much is under way.

`OneRound` is the butterfly of a group; `net.averaging.reduction.two_rounds` has the same for a grid.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import trio

from net.averaging.grouping.group import Group
from net.averaging.reduction.chunk_exchange import ChunkReducer, ChunkSender
from net.averaging.reduction.partition import AllReduceConfig, Part, parts_of
from net.averaging.reduction.reducer import Array
from net.rpc.base import Caller
from net.rpc.bulk import BulkTraffic


class Gathered(NamedTuple):
    """What a member has of an all-reduce that is over."""

    parts: Sequence[Part]
    """What the vector was cut into."""
    owners: Sequence[int]
    """Of each part, who has reduced it for this member, by its place in the group."""
    counts: Mapping[int, Sequence[int]]
    """By part, for those that this member was to get: of each chunk the vectors in its mean, 0 if it has none."""
    weights: frozenset[float]
    """The sums of weights in the means, all that differ; 0 for a chunk without a mean."""
    lost: Sequence[int]
    """Members that this one's own part went on without, in the order in which they failed."""


class OneRound:
    """A butterfly all-reduce among all members of a group.

    Args:
      caller, method: on which and what to call.
      group: the members. own: this one's place among them.
      vector: this member's values, if it has any. average: where the means go, as long.
      weight: of the vector; None: as it was announced.
    """

    def __init__(
        self,
        caller: Caller,
        method: str,
        *,
        group: Group,
        own: int,
        vector: Array | None,
        average: Array,
        weight: float | None,
        config: AllReduceConfig,
    ) -> None:
        self._own = own
        self._parts = parts_of(group, average.size, chunk_size=config.chunk_size(len(group.members)))
        self._reducer = ChunkReducer(
            group,
            own,
            part=self._parts[own],
            vector=vector,
            average=average,
            config=config,
            budget=caller.bulk.budget,
            weight=weight,
        )
        self.reducers = {group.group_id: self._reducer}
        """What this member reduces, by the group ids with which chunks of it come."""
        self._senders: dict[int, ChunkSender] = {}
        """Those who bring the other members their parts of the vector, by the places of these."""
        if vector is not None:
            pace = Pace(caller.bulk, group, own, [each.end - each.start for each in self._parts])
            self._senders = {
                index: ChunkSender(
                    caller,
                    method,
                    group=group,
                    reducer=member,
                    part=self._parts[index],
                    vector=vector,
                    average=average,
                    config=config,
                    full_bytes=functools.partial(pace.full_bytes, index),
                    weight=weight,
                )
                for index, member in enumerate(group.members)
                if index != own and self._parts[index].num_chunks
            }
        self.senders = tuple(self._senders.values())
        """Those who bring its chunks to others."""

    async def run(self) -> None:
        """Return when all is done, or given up."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._reducer.run)
            for sender in self.senders:
                nursery.start_soon(sender.run)

    def gathered(self) -> Gathered:
        """What has come of it."""
        reduction = self._reducer.reduction
        counts = {index: sender.num_senders for index, sender in self._senders.items()}
        counts[self._own] = [count or 0 for count in reduction.num_senders]
        weights = {weight for sender in self.senders for weight in sender.total_weights}
        return Gathered(
            parts=self._parts,
            owners=range(len(self._parts)),
            counts=counts,
            weights=frozenset(weights.union(reduction.total_weights)),
            lost=reduction.lost,
        )


class Pace:
    """What one member keeps under way to fill its line, for each reducer.

    All parts should be done at the same time: the rate that all paths to reducers have together is shared in proportion
    to the parts, whatever each path got. (By its own rate, a path that had got little would be asked for little.)

    A chunk is averaged when the furthest sender has brought it. How far that one is from the reducer a member does not
    know, but no further than from the member itself plus from there to the reducer: so a mean takes up to half of the
    round trip to the furthest sender longer than the round trip to its reducer. Where the triangle inequality does not
    hold, windows are somewhat small. Where the reducer takes it across first, it is taken to be as far from those
    whom it meets there as this member is from its furthest: one and a half of its round trips more.

    Args:
      bulk: of this member. group: whose members are meant. own: its place among them.
      lengths: of what each of them reduces.
      goes_across: whether means are taken further before they come back.
    """

    def __init__(
        self, bulk: BulkTraffic, group: Group, own: int, lengths: Sequence[int], *, goes_across: bool = False
    ) -> None:
        self._line = bulk.line
        self._paths = {index: bulk.path(member.peer_id) for index, member in enumerate(group.members) if index != own}
        self._senders = [path for index, path in self._paths.items() if group.members[index].sends]
        self._lengths = {index: lengths[index] for index in self._paths}
        self._total = max(1, sum(self._lengths.values()))
        self._detour = 2.0 if goes_across else 0.5

    def full_bytes(self, reducer: int, length: int | None = None) -> float:
        """What fills the line, of chunks for this reducer.

        Args:
          length: of that part of what it reduces which is meant; None: of all.
        """
        length = self._lengths[reducer] if length is None else length
        rate = min(self._line.rate, math.fsum(path.rate for index, path in self._paths.items() if self._lengths[index]))
        furthest_s = max((path.round_trip_s or 0.0 for path in self._senders), default=0.0)
        answer_s = (self._paths[reducer].round_trip_s or 0.0) + self._detour * furthest_s
        return rate * length / self._total * answer_s
