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
(`net.averaging.window`, `exchange.Pace`), as far as the reducer grants: a chunk says how many its sender would like to
have under way, and the answer how many it may. What goes beyond `window_bytes` at either end comes out of the process's
memory budget.

Compression. A chunk travels compressed to its reducer; the answer is the compressed *difference* of the mean to what
came of the sender's values, and is added to these values themselves; the reducer treats its own values likewise.
Differences are smaller than values and lose less, and members that agree keep what they have, to rounding, however
coarse the compression. But each then has its own rounding: where all must end with the very same numbers
(`AllReduceConfig.is_identical`), the answer is the compressed mean itself, and the reducer keeps what the others get.

Large groups. In one group each member calls all others. Told a `group_size`, a larger group averages on a grid, in two
rounds: within rows of so many members, and across the rows (`grid`, `two_rounds`). All of the above is true of each.

Weights. What a member's vector counts was announced when the group formed, or is told with its chunks, if it was not
known then. Answers say the sum of the weights in them. Where two of them differ somebody is missing in one of them, or
has told its reducers different weights: the average is not complete.
"""

import math
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import trio

from net.averaging.grouping.group import Group
from net.averaging.reduction.chunk_exchange import ChunkReducer, ChunkSender
from net.averaging.reduction.exchange import OneRound
from net.averaging.reduction.grid import ReductionGrid, grid_of
from net.averaging.reduction.partition import MAX_WEIGHT, MAX_WINDOW, AllReduceConfig, Part, parse_name_untrusted
from net.averaging.reduction.reducer import Array
from net.averaging.reduction.two_rounds import TwoRounds
from net.errors import CallRefused, PeerBusy, RemoteProtocolError
from net.identity import PeerId
from net.rpc.base import Caller, Reply, Request

MAX_CALLS = 4096
"""Calls served at once, of all groups: a full window of 256 members. How many bytes a member may have under way is
bounded for each connection by the RPC layer."""

MAX_EARLY_CALLS = 512
"""Of these, calls for a group that this member has not heard of yet; of one peer at most `MAX_WINDOW`."""

_MAX_PAST_GROUPS = 64
"""Groups that are over and still known, so that late calls are refused at once. More only make them wait."""

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
        self._running: dict[bytes, ChunkReducer] = {}
        """By the group ids that calls name: on a grid there are several to a group."""
        self._reducing: dict[bytes, tuple[ChunkReducer, ...]] = {}
        self._sending: dict[bytes, tuple[ChunkSender, ...]] = {}
        self._past: deque[frozenset[bytes]] = deque(maxlen=_MAX_PAST_GROUPS)
        self._num_early: Counter[PeerId] = Counter()
        self._arrival = trio.Event()  # of the next group
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
        """Whether such a group is or was at work here: a sound leader draws a new id for each."""
        return group_id in self._sending or self._is_past(group_id)

    def _is_past(self, group_id: bytes) -> bool:
        return any(group_id in each for each in self._past)

    def lose(self, group_id: bytes, peer_id: PeerId) -> None:
        """A member is known to be gone: what is not averaged yet goes on without waiting for it."""
        for reducer in self._reducing.get(group_id, ()):
            reducer.lose(peer_id)
        for sender in self._sending.get(group_id, ()):
            if sender.reducer.peer_id == peer_id:
                sender.stop()

    async def run(
        self,
        group: Group,
        vector: Array | None,
        *,
        size: int,
        weight: float | None = None,
        group_size: int | None = None,
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
          group_size: most members that average with each other in each of two rounds, the same in all members; see
            `net.averaging.reduction.grid`. On a grid all members end with the very same numbers. None: one round.
          timeout_s: the longest it may take, if that is less than configured.

        Raises:
          ValueError: this peer is not in the group, or the weight or the group size is out of range.
        """
        if weight is not None and not 0 <= weight <= MAX_WEIGHT:
            raise ValueError(f"the weight of a vector is from 0 to {MAX_WEIGHT:g}, got {weight}")
        weight = None if weight is None else float(weight)  # as the wire demands
        own = group.index(self._caller.peer_id)
        average = self._memory(size)
        if vector is None:
            average[:] = 0.0
        exchange = self._exchange(group, own, vector, average, weight, group_size)
        self._reducing[group.group_id] = tuple(exchange.reducers.values())
        self._sending[group.group_id] = tuple(exchange.senders)
        self._running.update(exchange.reducers)
        self._arrival.set()
        self._arrival = trio.Event()
        try:
            with trio.move_on_after(min(timeout_s, self._config.timeout_s)):
                await exchange.run()
        finally:
            for group_id, reducer in exchange.reducers.items():
                reducer.close()
                del self._running[group_id]
            del self._reducing[group.group_id], self._sending[group.group_id]
            self._past.append(frozenset({group.group_id, *exchange.reducers}))
        result = _result(group, exchange, vector, average)
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

    def _exchange(
        self,
        group: Group,
        own: int,
        vector: Array | None,
        average: Array,
        weight: float | None,
        group_size: int | None,
    ) -> OneRound | TwoRounds:
        """This member's part: on a grid if the group is larger than `group_size`."""
        caller, method, config = self._caller, self._method, self._config
        grid = self._grid(group, average.size, group_size)
        if grid is None:
            return OneRound(
                caller, method, group=group, own=own, vector=vector, average=average, weight=weight, config=config
            )
        return TwoRounds(
            caller, method, grid=grid, own=own, vector=vector, average=average, weight=weight, config=config
        )

    def partners(self, group: Group, size: int, *, group_size: int | None) -> frozenset[PeerId]:
        """With whom this member exchanges anything in such a `run`."""
        grid = self._grid(group, size, group_size)
        if grid is None:
            return frozenset(member.peer_id for member in group.members) - {self._caller.peer_id}
        return grid.partners(group.index(self._caller.peer_id))

    def _grid(self, group: Group, size: int, group_size: int | None) -> ReductionGrid | None:
        return None if group_size is None else grid_of(group, size, group_size=group_size, config=self._config)

    async def _serve(self, request: Request) -> Reply:
        try:
            name = parse_name_untrusted(request.body)
            reducer = self._running.get(name.group_id) or await self._early(request.peer_id, name.group_id)
            return await reducer.serve_untrusted(request, name)
        except RemoteProtocolError as error:
            raise CallRefused(str(error)) from error

    async def _early(self, peer_id: PeerId, group_id: bytes) -> ChunkReducer:
        """Wait for the group: its members do not hear of it at the same moment.

        Raises:
          CallRefused: it is over, or does not come.
          PeerBusy: too many calls wait already.
        """
        if self._num_early[peer_id] >= MAX_WINDOW or self._num_early.total() >= MAX_EARLY_CALLS:
            raise PeerBusy("too many calls wait for groups to be heard of")
        self._num_early[peer_id] += 1
        try:
            with trio.move_on_after(self._config.sender_timeout_s):
                while not self._is_past(group_id):
                    if (reducer := self._running.get(group_id)) is not None:
                        return reducer
                    await self._arrival.wait()
        finally:
            self._num_early[peer_id] -= 1
            if not self._num_early[peer_id]:
                del self._num_early[peer_id]
        raise CallRefused(f"this peer does not average with group {group_id.hex()}")


def _result(group: Group, exchange: OneRound | TwoRounds, vector: Array | None, average: Array) -> AllReduceResult:
    """What has come of an all-reduce that is over."""
    found = exchange.gathered()
    counts = found.counts
    received = _keep_own(found.parts, counts, vector, average)
    average.flags.writeable = False
    num_vectors = sum(member.sends for member in group.members)
    complete = len(found.weights) <= 1 and all(count == num_vectors for each in counts.values() for count in each)
    lost_reducers = sorted({found.owners[part] for part in counts if 0 in counts[part]})
    return AllReduceResult(
        average=average,
        received=received,
        lost_reducers=tuple(group.members[index].peer_id for index in lost_reducers),
        lost_senders=tuple(group.members[index].peer_id for index in found.lost),
        complete=complete,
        weight=next(iter(found.weights)) if found.weights and complete else None,
    )


def _keep_own(
    parts: Sequence[Part], counts: Mapping[int, Sequence[int]], vector: Array | None, average: Array
) -> float:
    """Put own values where no mean came back. Returns the share of the vector that holds a mean."""
    num_received = 0
    for index, chunk_counts in counts.items():
        for chunk, count in enumerate(chunk_counts):
            where = parts[index].chunk(chunk)
            if count:
                num_received += where.stop - where.start
            else:  # part of an answer may be there
                average[where] = 0.0 if vector is None else vector[where]
    return num_received / average.size
