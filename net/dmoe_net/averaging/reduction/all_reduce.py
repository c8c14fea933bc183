"""Butterfly all-reduce of a flat vector within a group that has been assembled.

Every member reduces its part of the vector. It sends each other part, chunk by chunk, to the member whose part that is;
a chunk is one call, answered by the mean of that chunk. So every number travels once to its reducer and once back.

Failures. A reducer that is lost costs its part: there the members keep their own values. A sender that is lost is
missing in what was not averaged yet. A broken connection is noticed at once, silence after the times of
`AllReduceConfig`. Nothing is tried again: the next all-reduce of the group's members does the same work.

Memory. The average is one array as long as the vector, into which answers are received and the own part is averaged;
chunks leave as views of the vector, answers as views of the average. It is used again for the next average if nobody
has it any more: pages that are touched for the first time cost a tenth.

Compression. The answer is the compressed *difference* of the mean to what came of the sender's values, and is added to
these; the reducer treats its own values likewise. Differences are smaller than values and lose less, and members that
agree keep what they have. Where all must end with the very same numbers (`AllReduceConfig.is_identical`), the answer
is the compressed mean itself, and the reducer keeps what the others get.
"""

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import trio

from dmoe_net.averaging.group_calls import MAX_CALLS, KnownGroups, placed
from dmoe_net.averaging.grouping.group import MAX_GROUP_SIZE, Group, Member
from dmoe_net.averaging.reduction.load_balance import bytes_each_way
from dmoe_net.averaging.reduction.partition import (
    MAX_ROOM,
    MAX_WEIGHT,
    MAX_WINDOW,
    ROOM,
    TOTAL_WEIGHT,
    AllReduceConfig,
    ChunkName,
    Part,
    parse_name_untrusted,
    parts_of,
)
from dmoe_net.averaging.reduction.reducer import PartReduction, values_untrusted
from dmoe_net.averaging.window import BulkWindow, Pace
from dmoe_net.dht.calls import PEER_ERRORS
from dmoe_net.errors import CallRefused, RemoteProtocolError
from dmoe_net.identity import PeerId
from dmoe_net.rpc.base import Caller, Reply, Request
from dmoe_net.types import Array
from dmoe_net.wire.fields import FLAG, integer
from dmoe_net.wire.tensors import Outgoing, as_outgoing, plain

_KEPT_BYTES = 8 * 2**20
"""Half of what may stay with the process between all-reduces: chunks held for others, and what else is in work."""

_SENDERS = integer(1, MAX_GROUP_SIZE)


# Compared by identity: arrays have no single answer to `==`.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AllReduceResult:
    """The outcome of an all-reduce, as one member sees it."""

    average: Array
    """float32 [size], read-only, since answers to others may still be leaving from it. Where nothing was received: the
    own values, or zeros for a member that has none."""
    received: float
    """Share of the vector that holds an average, whoever is in it, 0 to 1; an auxiliary member's own part at most."""
    lost_reducers: tuple[PeerId, ...]
    """Members of whose parts something is missing, this one included; in the order of the group."""
    lost_senders: tuple[PeerId, ...]
    """Members that this one's part went on without, in the order in which they failed."""
    complete: bool
    """True if all that this member was to get is the mean of all members that have a vector, with the same weights."""
    weight: float | None
    """Sum of the weights in the average, the same to the last bit in all members. None where it is not complete, and in
    an auxiliary member whose part is empty."""
    moved_bytes: float
    """Bytes of float32 that this member was to send, and to receive as many; less if compressed."""


class AllReduce:
    """All-reduces under one name, as `averaging.{prefix}.reduce`, of all groups of a process, also several at once."""

    def __init__(self, caller: Caller, *, prefix: str, config: AllReduceConfig) -> None:
        self.caller = caller
        self.config = config
        self.method = f"averaging.{prefix}.reduce"
        self.groups = KnownGroups[Exchange]("average", max_early=MAX_WINDOW, wait_s=config.sender_timeout_s)
        self._last: Array | None = None  # average, see `_memory`
        caller.add_handler(self.method, self._serve, max_concurrent=MAX_CALLS)
        # glibc gives freed memory back to the system beyond a threshold that follows the largest block ever freed, to
        # 32 MiB (mallopt(3), M_MMAP_THRESHOLD). So one is freed here, untouched: else every chunk that comes in is
        # paged in afresh, measured a fifth of an all-reduce's time.
        np.empty(_KEPT_BYTES, np.uint8)

    def close(self) -> None:
        """Serve no more calls, and keep no memory."""
        self._last = None
        self.caller.remove_handler(self.method)

    def lose(self, group_id: bytes, peer_id: PeerId) -> None:
        """Go on without a member that is known to be gone."""
        if (exchange := self.groups.at_work.get(group_id)) is not None:
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
          group: the same in all members, in each of which this runs at about the same time; new to `groups`.
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
        own, average = group.index(self.caller.peer_id), self._memory(size)
        if vector is None:
            average[:] = 0.0
        exchange = Exchange(self, group, own, vector, average, weight)
        self.groups.begin(group.group_id, exchange)
        try:
            with trio.move_on_after(min(timeout_s, self.config.timeout_s)):
                await exchange.run()
        finally:
            exchange.reducer.close()
            self.groups.end(group.group_id)
        result = exchange.result()
        self._last = average
        return result

    def _memory(self, size: int) -> Array:
        """An array for the next average: that of the last one, if nobody has it any more."""
        # Whoever has a view of it or of its bytes (a caller, an answer that is still leaving) has a reference, too.
        last, self._last = self._last, None
        if last is None or last.size != size or sys.getrefcount(last) != 2:
            return np.empty(size, np.float32)
        last.flags.writeable = True
        return last

    async def _serve(self, request: Request) -> Reply:
        try:
            name = parse_name_untrusted(request.body)
            exchange = await self.groups.find(request.peer_id, name.group_id)
            return await exchange.reducer.serve_untrusted(request, name)
        except RemoteProtocolError as error:
            raise CallRefused(str(error)) from error


class Exchange:
    """One member's part in one all-reduce: what it reduces, and what it brings to whom.

    Args:
      own: this member's place in the group.
      vector: its values, if it has any.
      average: the vector into which the means are written. Answers to others are views of it.
      weight: of its vector; None: as it was announced.
    """

    def __init__(
        self, all_reduce: AllReduce, group: Group, own: int, vector: Array | None, average: Array, weight: float | None
    ) -> None:
        self.caller, self.method, self.config = all_reduce.caller, all_reduce.method, all_reduce.config
        self.group = group
        self.own = own
        self.vector = vector
        self.average = average
        self.weight = None if weight is None else float(weight)  # as the wire demands
        self._parts = parts_of(group, average.size, chunk_size=self.config.chunk_size(len(group.members)))
        self.reducer = ChunkReducer(self, self._parts[own])
        self._senders: dict[int, ChunkSender] = {}  # by the places of those to whom they bring
        if vector is not None:
            pace = Pace(self.caller.bulk, group, own, [each.end - each.start for each in self._parts])
            self._senders = {
                place: ChunkSender(self, vector, member, self._parts[place], functools.partial(pace.full_bytes, place))
                for place, member in enumerate(group.members)
                if place != own and self._parts[place].num_chunks
            }

    async def run(self) -> None:
        """Reduce and bring, until all is done or given up."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.reducer.run)
            for sender in self._senders.values():
                nursery.start_soon(sender.run)

    def lose(self, peer_id: PeerId) -> None:
        self.reducer.lose(peer_id)
        for sender in self._senders.values():
            if sender.reducer.peer_id == peer_id:
                sender.stop()

    def result(self) -> AllReduceResult:
        members, average, reduction = self.group.members, self.average, self.reducer.reduction
        counts = {place: sender.num_senders for place, sender in self._senders.items()}
        counts[self.own] = [count or 0 for count in reduction.num_senders]
        weights = set(reduction.total_weights).union(*(sender.total_weights for sender in self._senders.values()))
        num_received = self._keep_own(counts)
        average.flags.writeable = False
        num_vectors = sum(member.sends for member in members)
        complete = len(weights) <= 1 and all(count == num_vectors for each in counts.values() for count in each)
        part, role = self._parts[self.own], members[self.own].role
        share = (part.end - part.start) / average.size
        return AllReduceResult(
            average=average,
            received=num_received / average.size,
            lost_reducers=tuple(members[place].peer_id for place in sorted(counts) if 0 in counts[place]),
            lost_senders=tuple(members[place].peer_id for place in reduction.lost),
            complete=complete,
            weight=next(iter(weights)) if weights and complete else None,
            moved_bytes=4 * average.size * bytes_each_way(role, share, num_vectors=num_vectors),
        )

    def _keep_own(self, counts: dict[int, list[int]]) -> int:
        """Put own values where no mean came back. Returns how many numbers hold a mean."""
        num_received = 0
        for place, chunk_counts in counts.items():
            for chunk, count in enumerate(chunk_counts):
                where = self._parts[place].chunk(chunk)
                if count:
                    num_received += where.stop - where.start
                else:  # part of an answer may be there
                    self.average[where] = 0.0 if self.vector is None else self.vector[where]
        return num_received


class ChunkReducer:
    """Serves this member's part of one all-reduce."""

    def __init__(self, exchange: Exchange, part: Part) -> None:
        members, config = exchange.group.members, exchange.config
        self._places = {member.peer_id: place for place, member in enumerate(members)}
        self._part = part
        self._size = exchange.average.size
        self._compression = config.compression
        weights = {place: member.weight for place, member in enumerate(members) if member.sends}
        if exchange.weight is not None and exchange.own in weights:
            weights[exchange.own] = exchange.weight
        self.reduction = PartReduction(
            part,
            weights,
            own=None if exchange.vector is None else (exchange.own, exchange.vector),
            average=exchange.average,
            config=config,
            now=trio.current_time(),
        )
        # For each chunk that was brought and is not finished, a list to which its mean will be added.
        self._awaited: dict[int, list[Outgoing]] = {}
        self._waiting = trio.lowlevel.ParkingLot()  # until a chunk is finished or waiting is pointless
        self._num_lost = 0
        self._is_closed = False
        self._budget = budget = exchange.caller.bulk.budget
        self._reserved_bytes = 0
        # One sender cannot take what others need: all together half of the budget, each as much.
        share_bytes = budget.max_bytes // (2 * max(1, len(weights)))
        self._max_room = min(MAX_ROOM, part.num_chunks, MAX_WINDOW + share_bytes // part.chunk_bytes)

    async def run(self) -> None:
        """Return when the part is reduced."""
        self._tell()  # of what was reduced from the beginning: nobody else has a vector
        while not self.reduction.is_done:
            with trio.move_on_at(self.reduction.deadline()):
                await self._waiting.park()
            self.reduction.tick(trio.current_time())
            self._tell()

    def close(self) -> None:
        """Refuse what is not finished, and give the memory back."""
        self._is_closed = True
        self._budget.release(self._reserved_bytes)
        self._reserved_bytes = 0
        self._waiting.unpark_all()

    def lose(self, peer_id: PeerId) -> None:
        """Expect nothing more from a member: it is gone."""
        if (place := self._places.get(peer_id)) is not None:
            self.reduction.drop(place, trio.current_time())
            self._tell()
            self._waiting.unpark_all()

    async def serve_untrusted(self, request: Request, name: ChunkName) -> Reply:
        """Take a chunk that a peer brings, and answer with the mean when there is one; `CallRefused` if none comes."""
        sender = self._places.get(request.peer_id)
        if sender is None:
            raise RemoteProtocolError("you are not in this group")
        if name.size != self._size:
            raise RemoteProtocolError(f"this group averages {self._size} numbers, not {name.size}")
        chunk = self._part.index_untrusted(name.start)
        if self._is_closed:
            raise CallRefused("this peer has left the group")
        awaited = self._awaited.setdefault(chunk, [])
        try:
            values = self.reduction.receive_untrusted(
                sender, chunk, request.tensors, trio.current_time(), weight=name.weight
            )
        finally:
            self._tell()
        try:
            answer = await self._mean(sender, awaited)
        except trio.Cancelled:
            # The sender gave up, or its connection broke: it does not come back, and nobody need wait for that.
            self.reduction.drop(sender, trio.current_time())
            self._tell()
            raise
        is_difference = self.reduction.sends_differences
        if is_difference:
            answer = as_outgoing(np.subtract(plain(answer), values), self._compression)
        return Reply(
            body={
                "senders": self.reduction.num_senders[chunk],
                "difference": is_difference,
                "room": self._room(sender, name.wish),
                "weight": self.reduction.total_weights[chunk],
            },
            tensors=(answer,),
        )

    def _room(self, sender: int, wish: int) -> int:
        """Chunks that the sender may be ahead from now on: never fewer than it was told before."""
        room = self.reduction.room.get(sender, MAX_WINDOW)
        wanted = min(wish, self._max_room)
        nbytes = (wanted - room) * self._part.chunk_bytes
        if nbytes > 0 and not self._is_closed and self._budget.reserve(nbytes):
            self._reserved_bytes += nbytes
            self.reduction.room[sender] = room = wanted
        return room

    async def _mean(self, sender: int, awaited: list[Outgoing]) -> Outgoing:
        while not awaited:
            if self._is_closed:
                raise CallRefused("this peer has left the group")
            if sender in self.reduction.lost:
                raise CallRefused("you were too late with another chunk, or broke the rules")
            await self._waiting.park()
        return awaited[0]

    def _tell(self) -> None:
        finished = self.reduction.take_finished()
        for chunk, mean in finished:
            self._awaited.pop(chunk, []).append(mean)
        if finished or len(self.reduction.lost) != self._num_lost:
            self._num_lost = len(self.reduction.lost)
            self._waiting.unpark_all()


class ChunkSender:
    """Brings one reducer the chunks of its part of this member's vector, and takes their means.

    Args:
      full_bytes: what fills the path to the reducer, for its share of the vector.
    """

    def __init__(
        self, exchange: Exchange, vector: Array, reducer: Member, part: Part, full_bytes: Callable[[], float]
    ) -> None:
        caller, config, group = exchange.caller, exchange.config, exchange.group
        self.reducer = reducer
        self._group_id = group.group_id
        self._part = part
        self._vector = vector
        self._average = exchange.average
        self._weight = exchange.weight
        self._window = BulkWindow(
            caller.bulk.budget,
            start_bytes=config.window(len(group.members)) * part.chunk_bytes,
            full_bytes=full_bytes,
            most_bytes=MAX_WINDOW * part.chunk_bytes,
        )
        self._patience_s = 2 * config.sender_timeout_s
        self._compression = config.compression
        self._call = functools.partial(caller.call, reducer.contact, exchange.method, timeout_s=config.timeout_s)
        self._patience = trio.CancelScope()
        self.num_senders = [0] * part.num_chunks
        """Vectors in the mean that came back, for each chunk; 0: none did."""
        self.total_weights = [0.0] * part.num_chunks
        """Sum of their weights."""

    async def run(self) -> None:
        """Return when all chunks have come back, or the reducer is lost."""
        with self._patience:
            async with trio.open_nursery() as nursery:
                for chunk in range(self._part.num_chunks):
                    await self._window.take(self._part.chunk_bytes)
                    if self._patience.deadline == math.inf:
                        self._be_patient()
                    nursery.start_soon(self._bring, chunk)

    def stop(self) -> None:
        """Wait no more for what has not come back: the reducer is lost."""
        self._patience.cancel()

    def _be_patient(self) -> None:
        """Count from now how long the reducer has been silent, if it owes us anything."""
        owes = self._window.under_way_bytes > 0
        self._patience.deadline = trio.current_time() + self._patience_s if owes else math.inf

    async def _bring(self, chunk: int) -> None:
        try:
            await self._average_untrusted(chunk)
        except PEER_ERRORS:
            self.stop()  # all that is under way
            return
        finally:
            self._window.give_back(self._part.chunk_bytes)
        self._be_patient()

    async def _average_untrusted(self, chunk: int) -> None:
        where = self._part.chunk(chunk)
        values, average = self._vector[where], self._average[where]
        # Twice of it, so that the room is there when the window has grown.
        wish = min(MAX_ROOM, 2 * self._window.wanted_bytes // self._part.chunk_bytes)
        body = ChunkName(self._group_id, self._vector.size, where.start, wish, self._weight).body()
        tensors = (as_outgoing(values, self._compression),)
        reply = await placed(lambda: self._call(body, tensors, bulk_bytes=values.nbytes, into=average))
        num_senders = _SENDERS.of_untrusted(reply.body, "senders")
        total_weight = TOTAL_WEIGHT.of_untrusted(reply.body, "weight")
        is_difference, room = FLAG.of_untrusted(reply.body, "difference"), ROOM.of_untrusted(reply.body, "room")
        received = values_untrusted([plain(tensor) for tensor in reply.tensors], values.size)
        if is_difference:
            np.add(values, received, out=average)
        elif received.ctypes.data != average.ctypes.data:  # it came compressed
            average[:] = received
        self.num_senders[chunk], self.total_weights[chunk] = num_senders, total_weight
        self._window.most_bytes = min(MAX_ROOM, room) * self._part.chunk_bytes
