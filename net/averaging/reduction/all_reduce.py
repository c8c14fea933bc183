"""Butterfly all-reduce of a flat vector within a group that has been assembled.

Theory of operation. Every member reduces its part of the vector (`Group.parts`). It sends each other part to the
member whose part that is, chunk by chunk, a few at a time; a chunk is one call, and the answer to it is the
mean of that chunk. So every number travels once to its reducer and once back, at the same time in all directions.

Failures. A reducer that is lost costs its part: there the members keep their own values. A sender that is lost is
missing in what was not averaged yet. How long either may be silent is in `AllReduceConfig`; a broken connection is
noticed at once. Nothing is tried again: the next all-reduce of the group's members does the same work.

Memory. The average is one array as long as the vector, into which answers are received and the own part is averaged;
chunks are sent as views of the vector, answers as views of the average. Beside the two there are the chunks that came
to be averaged, up to `window_bytes`. Of a chunk that did not come back in the end, whatever has come of it is
overwritten with own values. The average's memory stays with the process, and is used for the next one of that size if
nobody has the last one any more: pages that are touched for the first time cost a tenth.

Windows. On a long line `window_bytes` would leave it idle. So the window towards each reducer follows the line
(`net.averaging.window`), as far as the reducer grants: a chunk says how many its sender would like to
have under way, and the answer how many it may. What goes beyond `window_bytes` at either end comes out of the process's
memory budget.

Compression. A chunk travels compressed to its reducer; the answer is the compressed *difference* of the mean to what
came of the sender's values, and is added to these values themselves; the reducer treats its own values likewise.
Differences are smaller than values and lose less, and members that agree keep what they have, to rounding, however
coarse the compression. But each then has its own rounding: where all must end with the very same numbers
(`AllReduceConfig.is_identical`), the answer is the compressed mean itself, and the reducer keeps what the others get.

Weights. What a member's vector counts was announced when the group formed, or is told with its chunks, if it was not
known then. Answers say the sum of the weights in them. Where two of them differ somebody is missing in one of them, or
has told its reducers different weights: the average is not complete.
"""

import functools
import math
import sys
from dataclasses import dataclass

import numpy as np
import trio

from net.averaging.group_calls import MAX_CALLS, KnownGroups
from net.averaging.grouping.group import Group
from net.averaging.reduction.chunk_exchange import ChunkReducer, ChunkSender, Task
from net.averaging.reduction.partition import MAX_WEIGHT, MAX_WINDOW, AllReduceConfig, parse_name_untrusted, parts_of
from net.averaging.window import Pace
from net.errors import CallRefused, RemoteProtocolError
from net.identity import PeerId
from net.rpc.base import Caller, Reply, Request
from net.types import Array

_KEPT_BYTES = 8 * 2**20
"""Twice as much may stay with the process between all-reduces: the chunks that a member holds for others, up to
`window_bytes`, and what else is in work. With half as much they are paged in afresh now and then."""


# Compared by identity: arrays have no single answer to `==`.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AllReduceResult:
    """The outcome of an all-reduce, as one member sees it."""

    average: Array
    """float32 [size], read-only, since answers to others may still be leaving from it. Where nothing was received: the
    own values, or zeros for a member that has none."""
    received: float
    """Share of the vector that holds an average, whoever is in it, 0 to 1. A member that only reduces gets its own part
    alone."""
    lost_reducers: tuple[PeerId, ...]
    """Those of whose parts something is missing, this member's own included; in the order of the group."""
    lost_senders: tuple[PeerId, ...]
    """Those that this member's own part went on without, in the order in which they failed."""
    complete: bool
    """Nothing is missing that this member was to get: all of it is the mean of all members that have a vector, with the
    same weights throughout."""
    weight: float | None
    """Sum of the weights in the average, the same to the last bit in all members. None where it is not complete, and in
    an auxiliary member whose part is empty: nobody tells it."""


class AllReduce:
    """All-reduces under one name. One object serves all groups of a process, also several at once.

    Args:
      caller: on which to call and be called, as `averaging.{prefix}.reduce`.
      prefix: what is averaged, as in `group_key`.
      config: how.

    Raises:
      ValueError: the caller has such a method already.
    """

    def __init__(self, caller: Caller, *, prefix: str, config: AllReduceConfig) -> None:
        self._caller = caller
        self._config = config
        self._method = f"averaging.{prefix}.reduce"
        self._groups = KnownGroups[_Exchange]("average", max_early=MAX_WINDOW, wait_s=config.sender_timeout_s)
        self._last: Array | None = None  # average, see `_memory`
        caller.add_handler(self._method, self._serve, max_concurrent=MAX_CALLS)
        # glibc gives freed memory back to the system beyond a threshold that follows the largest block ever freed, from
        # 128 KiB up to 32 MiB (mallopt(3), M_MMAP_THRESHOLD). So one is freed here, which costs nothing as nobody has
        # touched it: else every chunk that comes in is paged in afresh, measured a fifth of an all-reduce's time.
        np.empty(_KEPT_BYTES, np.uint8)

    def close(self) -> None:
        """Serve no more calls, and keep no memory."""
        self._last = None
        self._caller.remove_handler(self._method)

    def knows(self, group_id: bytes) -> bool:
        """True if such a group is or was at work here: a sound leader draws a new id for each."""
        return group_id in self._groups

    def lose(self, group_id: bytes, peer_id: PeerId) -> None:
        """Go on without a member that is known to be gone: what is not averaged yet does not wait for it."""
        if (exchange := self._groups.at_work.get(group_id)) is not None:
            exchange.lose(peer_id)

    async def run(
        self,
        group: Group,
        vector: Array | None,
        *,
        size: int,
        weight: float | None = None,
        timeout_s: float = math.inf,
    ) -> AllReduceResult:
        """Average with the group. Ends within the timeouts, whatever the others do.

        Args:
          group: the same in all members, in each of which this runs at about the same time; one that `knows` not yet.
          vector: float32 [size], contiguous and finite. Nobody may write to it until this returns, and a moment longer
            if it is cancelled. None for an auxiliary member.
          size: of everybody's vector, 1 or more.
          weight: of this member's, 0 to `MAX_WEIGHT`, in place of what the group was told; None: as it was told. With 0
            it adds nothing to the mean; where all have 0 the mean is 0.
          timeout_s: the longest it may take, if that is less than configured.

        Raises:
          ValueError: this peer is not in the group, or the weight is out of range.
        """
        if weight is not None and not 0 <= weight <= MAX_WEIGHT:
            raise ValueError(f"the weight of a vector is from 0 to {MAX_WEIGHT:g}, got {weight}")
        own, average = group.index(self._caller.peer_id), self._memory(size)
        if vector is None:
            average[:] = 0.0
        task = Task(
            caller=self._caller,
            method=self._method,
            group=group,
            own=own,
            vector=vector,
            average=average,
            weight=None if weight is None else float(weight),  # as the wire demands
            config=self._config,
        )
        exchange = _Exchange(task)
        self._groups.begin(group.group_id, exchange)
        try:
            with trio.move_on_after(min(timeout_s, self._config.timeout_s)):
                await exchange.run()
        finally:
            exchange.reducer.close()
            self._groups.end(group.group_id)
        result = exchange.result()
        self._last = average
        return result

    def _memory(self, size: int) -> Array:
        """An array for the next average: that of the last one, if nobody has it any more.

        Whoever has an array, or a view of it or of its bytes (a caller with a result, an answer that is still leaving)
        has a reference to it: with the two that are here there is nobody else.
        """
        last, self._last = self._last, None
        if last is None or last.size != size or sys.getrefcount(last) != 2:
            return np.empty(size, np.float32)
        last.flags.writeable = True
        return last

    async def _serve(self, request: Request) -> Reply:
        try:
            name = parse_name_untrusted(request.body)
            exchange = await self._groups.find(request.peer_id, name.group_id)
            return await exchange.reducer.serve_untrusted(request, name)
        except RemoteProtocolError as error:
            raise CallRefused(str(error)) from error


class _Exchange:
    """One member's part in one all-reduce: what it reduces, and what it brings to whom."""

    def __init__(self, task: Task) -> None:
        group, own = task.group, task.own
        self._task = task
        self._parts = parts_of(group, task.average.size, chunk_size=task.config.chunk_size(len(group.members)))
        self.reducer = ChunkReducer(task, self._parts[own])
        self._senders: dict[int, ChunkSender] = {}  # by the places of those to whom they bring
        if task.vector is not None:
            pace = Pace(task.caller.bulk, group, own, [each.end - each.start for each in self._parts])
            self._senders = {
                place: ChunkSender(task, member, self._parts[place], functools.partial(pace.full_bytes, place))
                for place, member in enumerate(group.members)
                if place != own and self._parts[place].num_chunks
            }

    async def run(self) -> None:
        """Return when all is done, or given up."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.reducer.run)
            for sender in self._senders.values():
                nursery.start_soon(sender.run)

    def lose(self, peer_id: PeerId) -> None:
        """Go on without a member."""
        self.reducer.lose(peer_id)
        for sender in self._senders.values():
            if sender.reducer.peer_id == peer_id:
                sender.stop()

    def result(self) -> AllReduceResult:
        """The outcome, when it is over."""
        members, average, reduction = self._task.group.members, self._task.average, self.reducer.reduction
        counts = {place: sender.num_senders for place, sender in self._senders.items()}
        counts[self._task.own] = [count or 0 for count in reduction.num_senders]
        weights = set(reduction.total_weights).union(*(sender.total_weights for sender in self._senders.values()))
        num_received = self._keep_own(counts)
        average.flags.writeable = False
        num_vectors = sum(member.sends for member in members)
        complete = len(weights) <= 1 and all(count == num_vectors for each in counts.values() for count in each)
        return AllReduceResult(
            average=average,
            received=num_received / average.size,
            lost_reducers=tuple(members[place].peer_id for place in sorted(counts) if 0 in counts[place]),
            lost_senders=tuple(members[place].peer_id for place in reduction.lost),
            complete=complete,
            weight=next(iter(weights)) if weights and complete else None,
        )

    def _keep_own(self, counts: dict[int, list[int]]) -> int:
        """Put own values where no mean came back. Returns how many numbers hold a mean."""
        vector, average, num_received = self._task.vector, self._task.average, 0
        for place, chunk_counts in counts.items():
            for chunk, count in enumerate(chunk_counts):
                where = self._parts[place].chunk(chunk)
                if count:
                    num_received += where.stop - where.start
                else:  # part of an answer may be there
                    average[where] = 0.0 if vector is None else vector[where]
        return num_received
