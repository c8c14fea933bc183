"""The two ends of the calls that an all-reduce consists of: who brings chunks of a part, and who averages them."""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import trio

from net.averaging.grouping.group import MAX_GROUP_SIZE, Group, Member
from net.averaging.placing import placed
from net.averaging.reduction.partition import (
    MAX_ROOM,
    MAX_WINDOW,
    ROOM,
    TOTAL_WEIGHT,
    AllReduceConfig,
    ChunkName,
    Part,
)
from net.averaging.reduction.reducer import Array, PartReduction, values_untrusted
from net.averaging.window import BulkWindow
from net.dht.calls import PEER_ERRORS
from net.errors import CallRefused, RemoteProtocolError
from net.identity import PeerId
from net.rpc.base import Caller, Reply, Request
from net.rpc.bulk import MemoryBudget
from net.wire.fields import FLAG, integer
from net.wire.tensors import Outgoing, as_outgoing, plain

_SENDERS = integer(1, MAX_GROUP_SIZE)


class Mean(NamedTuple):
    """What has come of a chunk: its values as they may leave, the vectors in them, and the sum of their weights."""

    values: Outgoing
    num_senders: int
    weight: float


class Ready(NamedTuple):
    """A chunk that may be brought: of what weight, None for that of the vector, and the mean of how many vectors."""

    chunk: int
    weight: float | None
    vectors: int


class ChunkReducer:
    """Serves this member's part of one all-reduce.

    Args:
      group: whose members may call.
      own: this member's place in it.
      part: what is reduced here.
      vector: this member's values, if it has any.
      average: the vector into whose part the means are written. Answers are views of it.
      budget: from which senders are granted to bring more than `MAX_WINDOW` chunks ahead of the answers.
      weight: of this member's vector; None: as it was announced.
      most_vectors: of how many vectors each member may bring the mean, in the order of the group; None: of one.
      on_mean: told of each chunk that is reduced, in place of those who wait for it, for whom is then `deliver`; None:
        they are told at once.
    """

    def __init__(
        self,
        group: Group,
        own: int,
        *,
        part: Part,
        vector: Array | None,
        average: Array,
        config: AllReduceConfig,
        budget: MemoryBudget,
        weight: float | None = None,
        most_vectors: Sequence[int] | None = None,
        on_mean: Callable[[int, Mean], None] | None = None,
    ) -> None:
        self._places = {member.peer_id: place for place, member in enumerate(group.members)}
        self._own = own
        self._part = part
        self._average = average
        self._compression = config.compression
        weights = {place: member.weight for place, member in enumerate(group.members) if member.sends}
        if weight is not None and own in weights:
            weights[own] = weight
        self.reduction = PartReduction(
            part,
            weights,
            own=None if vector is None else (own, vector),
            average=average,
            sender_timeout_s=config.sender_timeout_s,
            now=trio.current_time(),
            compression=config.compression,
            is_identical=config.is_identical,
        )
        self._most_vectors = most_vectors
        self._on_mean = on_mean
        # For each chunk that was brought and is not finished, a list to which its mean will be added.
        self._awaited: dict[int, list[Mean]] = {}
        self._change = trio.Event()  # set, and replaced, when a chunk is finished or waiting is pointless
        self._num_lost = 0
        self._is_closed = False
        self._budget = budget
        self._reserved_bytes = 0
        # One sender cannot take what others need: all together half of the budget, each as much.
        num_senders = sum(member.sends for member in group.members)
        share_bytes = budget.max_bytes // (2 * max(1, num_senders))
        self._max_room = min(MAX_ROOM, part.num_chunks, MAX_WINDOW + share_bytes // part.chunk_bytes)

    async def run(self) -> None:
        """Return when the part is reduced."""
        self._tell()  # of what was reduced from the beginning: nobody else has a vector
        while not self.reduction.is_done:
            with trio.move_on_at(self.reduction.deadline()):
                await self._change.wait()
            self.reduction.tick(trio.current_time())
            self._tell()

    def close(self) -> None:
        """Refuse what is not finished, and give the memory back."""
        self._is_closed = True
        self._budget.release(self._reserved_bytes)
        self._reserved_bytes = 0
        self._wake()

    def lose(self, peer_id: PeerId) -> None:
        """A member is gone: nothing more is expected from it."""
        if (place := self._places.get(peer_id)) is not None:
            self.reduction.drop(place, trio.current_time())
            self._tell()
            self._wake()

    async def serve_untrusted(self, request: Request, name: ChunkName) -> Reply:
        """A peer brings a chunk: answer with the mean, when there is one.

        Raises:
          RemoteProtocolError: the call is not as it should be.
          CallRefused: nothing comes of it.
        """
        sender = self._places.get(request.peer_id)
        if sender is None:
            raise RemoteProtocolError("you are not in this group")
        if name.size != self._average.size:
            raise RemoteProtocolError(f"this group averages {self._average.size} numbers, not {name.size}")
        chunk = self._part.index_untrusted(name.start)
        if self._is_closed:
            raise CallRefused("this peer has left the group")
        vectors = 1 if name.vectors is None else name.vectors
        most_vectors = 1 if self._most_vectors is None else self._most_vectors[sender]
        if vectors > most_vectors:
            raise RemoteProtocolError(f"you have the mean of {most_vectors} vectors at most, not of {vectors}")
        awaited = self._awaited.setdefault(chunk, [])
        try:
            values = self.reduction.receive_untrusted(
                sender, chunk, request.tensors, trio.current_time(), weight=name.weight, vectors=vectors
            )
        finally:
            self._tell()
        try:
            mean = await self._mean(sender, awaited)
        except trio.Cancelled:
            # The sender gave up, or its connection broke: it does not come back, and nobody need wait for that.
            self.reduction.drop(sender, trio.current_time())
            self._tell()
            raise
        is_difference = self.reduction.sends_differences
        answer = mean.values
        if is_difference:
            answer = as_outgoing(np.subtract(plain(answer), values), self._compression)
        return Reply(
            body={
                "senders": mean.num_senders,
                "difference": is_difference,
                "room": self._room(sender, name.wish),
                "weight": mean.weight,
            },
            tensors=(answer,),
        )

    def bring_own(self, ready: Ready, values: Array) -> None:
        """This member brings a chunk itself, of which it had no vector to begin with. Nobody writes to it any more.

        Values that are not finite do not count, as if another had brought them.
        """
        with contextlib.suppress(RemoteProtocolError):  # it is out, which the number of vectors tells all
            self.reduction.receive_untrusted(
                self._own, ready.chunk, (values,), trio.current_time(), weight=ready.weight, vectors=ready.vectors
            )
        self._tell()

    def deliver(self, chunk: int, mean: Mean) -> None:
        """Answer those who wait for a chunk."""
        self._awaited.pop(chunk, []).append(mean)
        self._wake()

    def _room(self, sender: int, wish: int | None) -> int:
        """How many chunks the sender may be ahead from now on: never fewer than it was told before."""
        room = self.reduction.room.get(sender, MAX_WINDOW)
        wanted = min(wish or 0, self._max_room)
        nbytes = (wanted - room) * self._part.chunk_bytes
        if nbytes > 0 and not self._is_closed and self._budget.reserve(nbytes):
            self._reserved_bytes += nbytes
            self.reduction.room[sender] = room = wanted
        return room

    async def _mean(self, sender: int, awaited: list[Mean]) -> Mean:
        while not awaited:
            if self._is_closed:
                raise CallRefused("this peer has left the group")
            if sender in self.reduction.lost:
                raise CallRefused("you were too late with another chunk, or broke the rules")
            await self._change.wait()
        return awaited[0]

    def _tell(self) -> None:
        """Wake those for whom something has changed."""
        finished = self.reduction.take_finished()
        for chunk, values in finished:
            mean = Mean(values, self.reduction.num_senders[chunk] or 0, self.reduction.total_weights[chunk])
            if self._on_mean is None:
                self._awaited.pop(chunk, []).append(mean)
            else:
                self._on_mean(chunk, mean)
        if finished or len(self.reduction.lost) != self._num_lost:
            self._num_lost = len(self.reduction.lost)
            self._wake()

    def _wake(self) -> None:
        self._change.set()
        self._change = trio.Event()


class ChunkSender:
    """Brings one reducer the chunks of its part, and takes their means.

    Args:
      caller, method: on which and what to call.
      group: whose all-reduce it is.
      reducer: whom of it to call; not a client.
      part: what that one reduces.
      vector: this member's values.
      average: where the means go.
      full_bytes: what fills the path to the reducer, for its share of the vector.
      weight: of the vector; None: as it was announced.
      on_mean: told of each chunk that has come back.
    """

    def __init__(
        self,
        caller: Caller,
        method: str,
        *,
        group: Group,
        reducer: Member,
        part: Part,
        vector: Array,
        average: Array,
        config: AllReduceConfig,
        full_bytes: Callable[[], float],
        weight: float | None = None,
        on_mean: Callable[[int], None] = lambda chunk: None,
    ) -> None:
        self._group_id = group.group_id
        self.reducer = reducer
        """Whom it calls."""
        self._part = part
        self._vector = vector
        self._average = average
        self._weight = weight
        self._on_mean = on_mean
        self._announced_weight = math.fsum(member.weight for member in group.members if member.sends)
        self._window = BulkWindow(
            caller.bulk.budget,
            start_bytes=config.window(len(group.members), chunk_size=part.chunk_size) * part.chunk_bytes,
            full_bytes=full_bytes,
            most_bytes=MAX_WINDOW * part.chunk_bytes,
        )
        self._patience_s = 2 * config.sender_timeout_s
        self._compression = config.compression
        self._call = functools.partial(caller.call, reducer.contact, method, timeout_s=config.timeout_s)
        self._patience = trio.CancelScope()
        self.num_chunks = part.num_chunks
        """How many there are."""
        self.num_senders = [0] * part.num_chunks
        """Vectors in the mean that came back, for each chunk; 0: none did."""
        self.total_weights = [0.0] * part.num_chunks
        """Sum of their weights."""

    async def run(self, ready: trio.MemoryReceiveChannel[Ready] | None = None) -> None:
        """Return when all chunks have come back, or the reducer is lost.

        Args:
          ready: the chunks, each when it may be brought; None: all may be.
        """
        with self._patience:
            async with trio.open_nursery() as nursery:
                if ready is None:
                    for chunk in range(self._part.num_chunks):
                        await self._begin(Ready(chunk, self._weight, 1), nursery)
                else:
                    async for each in ready:
                        await self._begin(each, nursery)

    def stop(self) -> None:
        """The reducer is lost: what has not come back does not come."""
        self._patience.cancel()

    def _be_patient(self) -> None:
        """Count from now how long the reducer has been silent, if it owes us anything."""
        owes = self._window.under_way_bytes > 0
        self._patience.deadline = trio.current_time() + self._patience_s if owes else math.inf

    async def _begin(self, ready: Ready, nursery: trio.Nursery) -> None:
        """Bring a chunk once there is room for it."""
        await self._window.take(self._part.chunk_bytes)
        if self._patience.deadline == math.inf:
            self._be_patient()
        nursery.start_soon(self._bring, ready)

    async def _bring(self, ready: Ready) -> None:
        """Bring a chunk for which there is room."""
        try:
            await self._average_untrusted(ready)
        except PEER_ERRORS:
            self.stop()  # all that is under way
            return
        finally:
            self._window.give_back(self._part.chunk_bytes)
        self._be_patient()
        self._on_mean(ready.chunk)

    async def _average_untrusted(self, ready: Ready) -> None:
        chunk = ready.chunk
        where = self._part.chunk(chunk)
        values = self._vector[where]
        # Twice of it, so that the room is there when the window has grown.
        wish = min(MAX_ROOM, 2 * self._window.wanted_bytes // self._part.chunk_bytes)
        vectors = None if ready.vectors == 1 else ready.vectors
        name = ChunkName(self._group_id, self._vector.size, where.start, wish, ready.weight, vectors)
        average = self._average[where]
        reply = await self._placed(name, values, into=average)
        num_senders = _SENDERS.of_untrusted(reply.body, "senders")
        total_weight = TOTAL_WEIGHT.of_untrusted(reply.body, "weight")
        is_difference = FLAG.of_untrusted(reply.body, "difference")
        received = values_untrusted([plain(tensor) for tensor in reply.tensors], values.size)
        if is_difference:
            np.add(values, received, out=average)
        elif received.ctypes.data != average.ctypes.data:  # it came compressed
            average[:] = received
        self.num_senders[chunk] = num_senders
        self.total_weights[chunk] = self._announced_weight if total_weight is None else total_weight
        room = ROOM.of_untrusted(reply.body, "room")
        if room is not None:
            self._window.most_bytes = min(MAX_ROOM, room) * self._part.chunk_bytes

    async def _placed(self, name: ChunkName, values: Array, *, into: Array) -> Reply:
        body, tensors = name.body(), (as_outgoing(values, self._compression),)
        return await placed(lambda: self._call(body, tensors, bulk_bytes=values.nbytes, into=into))
