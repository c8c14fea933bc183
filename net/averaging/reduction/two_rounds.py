"""One member's part in an all-reduce on a grid: within its row, and across the rows in the lanes that it owns.

Theory of operation. A member brings the chunks of each lane to the owner of that lane in its row, as in a butterfly.
When the row has brought a chunk, the owner does not answer yet, but brings the row's mean, with the sum of its weights
and the number of its vectors, to the member that reduces the chunk for all rows: an owner of the same lane in another
row, or itself. What comes back from there is the answer to the row. So both rounds go on at once, chunk by chunk, and
nobody waits for a round to end.

Failures. Who is lost in a row is missing in that row's mean, who is lost across takes its row's mean with it; the count
of vectors in the answers tells, as everywhere. Where a chunk cannot cross, the row has its own mean back: it goes on
with the next one, and nobody waits for chunks that do not come. A row may wait for a member as long as any reducer does
(`sender_timeout_s`), so those across wait twice as long for a row, and senders again twice as long for an answer.

Compression. Values are compressed on their way to the row's owner, the row's mean on its way across, and the mean of
all once, by whoever has reduced it. The owner passes that on as it came: compressed again where that changes no bit,
else as it is.
"""

import functools
from dataclasses import dataclass, replace

import numpy as np
import trio

from net.averaging.grouping.group import Group
from net.averaging.reduction.chunk_exchange import ChunkReducer, ChunkSender, Mean, Ready
from net.averaging.reduction.exchange import Gathered, Pace
from net.averaging.reduction.grid import ReductionGrid
from net.averaging.reduction.partition import AllReduceConfig
from net.averaging.reduction.reducer import Array
from net.rpc.base import Caller
from net.wire.compression import Compression, compressed_in_place
from net.wire.messages import MAX_TIMEOUT_S
from net.wire.tensors import Outgoing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Task:
    """What a member has to do: the arguments of `TwoRounds`, and what follows from them."""

    caller: Caller
    method: str
    grid: ReductionGrid
    row: int
    """Of this member."""
    vector: Array | None
    average: Array
    weight: float | None
    config: AllReduceConfig
    """For the row."""
    patient: AllReduceConfig
    """For whoever waits for rows."""


class TwoRounds:
    """An all-reduce on a grid.

    Args:
      caller, method: on which and what to call.
      grid: who reduces what. own: this member's place in the group.
      vector: this member's values, if it has any. average: where the means go, as long.
      weight: of the vector; None: as it was announced.
      config: `is_identical` is taken to be set.
    """

    def __init__(
        self,
        caller: Caller,
        method: str,
        *,
        grid: ReductionGrid,
        own: int,
        vector: Array | None,
        average: Array,
        weight: float | None,
        config: AllReduceConfig,
    ) -> None:
        self._grid = grid
        self._row = row = grid.row_of(own)
        config = replace(config, is_identical=True)
        task = _Task(
            caller=caller,
            method=method,
            grid=grid,
            row=row,
            vector=vector,
            average=average,
            weight=weight,
            config=config,
            patient=replace(config, sender_timeout_s=min(2 * config.sender_timeout_s, MAX_TIMEOUT_S)),
        )
        # Means of the row, in the lanes that this member owns alone: the rest is never touched, and takes no memory.
        row_means = np.empty(average.size, np.float32)
        self._carriers = {
            number: _Carrier(task, number, row_means)
            for number, lane in enumerate(grid.lanes)
            if lane.owners[row] == own
        }
        self._senders = {} if vector is None else self._to_owners(task, vector)
        self.senders = (
            *self._senders.values(),
            *(sender for carrier in self._carriers.values() for sender in carrier.senders.values()),
        )
        """Those who bring its chunks to others, in either round."""
        self.reducers = {
            group_id: reducer for carrier in self._carriers.values() for group_id, reducer in carrier.reducers.items()
        }
        """What this member reduces, by the group ids with which chunks of it come."""

    def _to_owners(self, task: _Task, vector: Array) -> dict[int, ChunkSender]:
        """Those who bring the owners in this row their lanes of the vector, by the numbers of these."""
        grid, row = self._grid, self._row
        whole_row = grid.within(0, row)
        lengths = [self._owned(place) for place in grid.rows[row]]
        own = whole_row.index(task.caller.peer_id)
        pace = Pace(task.caller.bulk, whole_row, own, lengths, goes_across=True)
        found = {}
        for number, lane in enumerate(grid.lanes):
            reducer = grid.rows[row].index(lane.owners[row])
            if reducer != own:
                found[number] = ChunkSender(
                    task.caller,
                    task.method,
                    group=grid.within(number, row),
                    reducer=whole_row.members[reducer],
                    part=lane.part,
                    vector=vector,
                    average=task.average,
                    config=task.patient,
                    full_bytes=functools.partial(pace.full_bytes, reducer, lane.part.end - lane.part.start),
                    weight=task.weight,
                )
        return found

    def _owned(self, place: int) -> int:
        """Numbers in all lanes of a member of this row."""
        return sum(lane.part.end - lane.part.start for lane in self._grid.lanes if lane.owners[self._row] == place)

    async def run(self) -> None:
        """Return when all is done, or given up."""
        async with trio.open_nursery() as nursery:
            for carrier in self._carriers.values():
                nursery.start_soon(carrier.run)
            for sender in self._senders.values():
                nursery.start_soon(sender.run)

    def gathered(self) -> Gathered:
        """What has come of it."""
        both = (self._carriers | self._senders).items()
        row = self._grid.rows[self._row]
        lost: dict[int, None] = {}
        for number, carrier in self._carriers.items():
            lost.update(dict.fromkeys(row[place] for place in carrier.within.reduction.lost))
            lost.update(dict.fromkeys(self._grid.lanes[number].owners[each] for each in carrier.across.reduction.lost))
        return Gathered(
            parts=[lane.part for lane in self._grid.lanes],
            owners=[lane.owners[self._row] for lane in self._grid.lanes],
            counts={number: each.num_senders for number, each in both},
            weights=frozenset(weight for _, each in both for weight in each.total_weights),
            lost=list(lost),
        )


class _Carrier:
    """Takes what a row has brought of a lane across to the other rows, and what comes of it back to the row.

    Args:
      number: of a lane that this member owns in its row.
      row_means: where the means of the row go, as long as the vector.
    """

    def __init__(self, task: _Task, number: int, row_means: Array) -> None:
        grid, caller = task.grid, task.caller
        self._lane = grid.lanes[number]
        self._row = row = task.row
        self._row_means = row_means
        self._average = task.average
        self._compression = task.config.compression
        within, across = grid.within(number, row), grid.across(number)
        self.within = ChunkReducer(
            within,
            within.index(caller.peer_id),
            part=self._lane.part,
            vector=task.vector,
            average=row_means,
            config=replace(task.config, compression=Compression.NONE),  # it is compressed when it goes across
            budget=caller.bulk.budget,
            weight=task.weight,
            on_mean=self._reduced,
        )
        """Reduces the lane for the row."""
        own_range = self._lane.ranges[row]
        self.across = ChunkReducer(
            across,
            row,
            part=own_range,
            vector=None,
            average=task.average,
            config=task.patient,
            budget=caller.bulk.budget,
            most_vectors=[grid.num_vectors(each) for each in range(len(grid.rows))],
            on_mean=self._averaged,
        )
        """Reduces a range of it for all rows."""
        self.across.reduction.room[row] = own_range.num_chunks  # nobody answers to what this member has itself
        self.reducers = {within.group_id: self.within, across.group_id: self.across}
        self.senders = self._to_other_rows(task, across)
        """Those who bring the row's means to the other rows, by the numbers of these."""
        # Bounded by what can be sent, which is numbers of chunks.
        self._ready = {
            other: trio.open_memory_channel[Ready](sender.num_chunks) for other, sender in self.senders.items()
        }
        self.num_senders = [0] * self._lane.part.num_chunks
        """Vectors in the mean of each chunk that has crossed; 0: it has not."""
        self.total_weights = [0.0] * self._lane.part.num_chunks
        """Sum of their weights."""
        self._is_over = [False] * self._lane.part.num_chunks
        self._early: dict[int, Mean] = {}
        """What all other rows have brought of chunks that this one has not, and will be too late with."""

    def _to_other_rows(self, task: _Task, across: Group) -> dict[int, ChunkSender]:
        pace = Pace(task.caller.bulk, across, self._row, [each.end - each.start for each in self._lane.ranges])
        return {
            other: ChunkSender(
                task.caller,
                task.method,
                group=across,
                reducer=across.members[other],
                part=part,
                vector=self._row_means,
                average=self._average,
                config=task.patient,
                full_bytes=functools.partial(pace.full_bytes, other),
                on_mean=functools.partial(self._came_back, other),
            )
            for other, part in enumerate(self._lane.ranges)
            if other != self._row and part.num_chunks
        }

    async def run(self) -> None:
        """Return when the lane is reduced and all of it has crossed, or cannot any more."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.across.run)
            for other in self.senders:
                nursery.start_soon(self._bring, other)
            await self.within.run()
            for send, _ in self._ready.values():
                send.close()

    async def _bring(self, other: int) -> None:
        """Bring another row what it reduces, as it becomes ready; if that row's owner is lost, none of it crosses."""
        receive = self._ready[other][1]
        with receive:
            await self.senders[other].run(receive)
        first = self._first(other)
        for chunk in range(first, first + self._lane.ranges[other].num_chunks):
            if not self._is_over[chunk]:
                self._stays(chunk)

    def _first(self, row: int) -> int:
        """The first chunk of a row's range."""
        return (self._lane.ranges[row].start - self._lane.part.start) // self._lane.part.chunk_size

    def _reduced(self, chunk: int, mean: Mean) -> None:
        """The row has brought a chunk."""
        where = self._lane.part.chunk(chunk)
        if not mean.num_senders:
            self._row_means[where] = 0.0  # nobody has written there
        row = self._lane.row_of_chunk(chunk)
        ready = Ready(chunk - self._first(row), mean.weight, mean.num_senders)
        if (early := self._early.pop(chunk, None)) is not None:
            self.within.deliver(chunk, early)
        elif row == self._row:
            self.across.bring_own(ready, self._row_means[where])
        else:
            try:
                self._ready[row][0].send_nowait(ready)
            except trio.BrokenResourceError:
                self._stays(chunk)

    def _averaged(self, number: int, mean: Mean) -> None:
        """All rows that are left have brought a chunk of this member's range; its own row perhaps has not yet, and
        comes too late."""
        self.across.deliver(number, mean)
        chunk = number + self._first(self._row)
        if mean.num_senders:
            self._cross(chunk, mean)
        else:
            self._stays(chunk)

    def _came_back(self, other: int, number: int) -> None:
        """A chunk of another row's range has come back from there."""
        sender, chunk = self.senders[other], number + self._first(other)
        values = as_it_came(self._average[self._lane.part.chunk(chunk)], self._compression)
        self._cross(chunk, Mean(values, sender.num_senders[number], sender.total_weights[number]))

    def _stays(self, chunk: int) -> None:
        """A chunk will not cross: if the row has brought it, the row has its own mean of it."""
        reduction, where = self.within.reduction, self._lane.part.chunk(chunk)
        if num_senders := reduction.num_senders[chunk]:
            self._average[where] = self._row_means[where]
            self._cross(chunk, Mean(self._average[where], num_senders, reduction.total_weights[chunk]))

    def _cross(self, chunk: int, mean: Mean) -> None:
        """A chunk has crossed: tell the row, once the row has brought it."""
        self._is_over[chunk] = True
        self.num_senders[chunk], self.total_weights[chunk] = mean.num_senders, mean.weight
        if self.within.reduction.num_senders[chunk] is None:
            self._early[chunk] = mean
        else:
            self.within.deliver(chunk, mean)


def as_it_came(values: Array, compression: Compression) -> Outgoing:
    """These values as they may travel: compressed if they come out of that to the last bit, else as they are.

    What was compressed alike before comes out so.
    """
    if compression is Compression.NONE:
        return values
    copy = values.copy()
    compressed = compressed_in_place(copy, compression)
    return compressed if np.array_equal(copy.view(np.uint32), values.view(np.uint32)) else values
