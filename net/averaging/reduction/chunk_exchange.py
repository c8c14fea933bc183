"""The two ends of the calls that an all-reduce consists of: who brings chunks of a part, and who averages them."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import trio

from net.averaging.group_calls import placed
from net.averaging.grouping.group import MAX_GROUP_SIZE, Group, Member
from net.averaging.reduction.partition import (
    MAX_ROOM,
    MAX_WINDOW,
    ROOM,
    TOTAL_WEIGHT,
    AllReduceConfig,
    ChunkName,
    Part,
)
from net.averaging.reduction.reducer import PartReduction, values_untrusted
from net.averaging.window import BulkWindow
from net.dht.calls import PEER_ERRORS
from net.errors import CallRefused, RemoteProtocolError
from net.identity import PeerId
from net.rpc.base import Caller, Reply, Request
from net.types import Array
from net.wire.fields import FLAG, integer
from net.wire.tensors import Outgoing, as_outgoing, plain

_SENDERS = integer(1, MAX_GROUP_SIZE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """The work of one member in one all-reduce."""

    caller: Caller
    method: str
    """To be called, on the others."""
    group: Group
    own: int
    """This member's place in it."""
    vector: Array | None
    """This member's values, if it has any."""
    average: Array
    """The vector into which the means are written. Answers to others are views of it."""
    weight: float | None
    """Weight of this member's vector; None: as it was announced."""
    config: AllReduceConfig


class ChunkReducer:
    """Serves this member's part of one all-reduce.

    Senders may bring more than `MAX_WINDOW` chunks ahead of the answers as far as the caller's memory budget allows.
    """

    def __init__(self, task: Task, part: Part) -> None:
        members, config = task.group.members, task.config
        self._places = {member.peer_id: place for place, member in enumerate(members)}
        self._part = part
        self._average = task.average
        self._compression = config.compression
        weights = {place: member.weight for place, member in enumerate(members) if member.sends}
        if task.weight is not None and task.own in weights:
            weights[task.own] = task.weight
        self.reduction = PartReduction(
            part,
            weights,
            own=None if task.vector is None else (task.own, task.vector),
            average=task.average,
            sender_timeout_s=config.sender_timeout_s,
            now=trio.current_time(),
            compression=config.compression,
            is_identical=config.is_identical,
        )
        # For each chunk that was brought and is not finished, a list to which its mean will be added.
        self._awaited: dict[int, list[Outgoing]] = {}
        self._change = trio.Event()  # set, and replaced, when a chunk is finished or waiting is pointless
        self._num_lost = 0
        self._is_closed = False
        self._budget = budget = task.caller.bulk.budget
        self._reserved_bytes = 0
        # One sender cannot take what others need: all together half of the budget, each as much.
        share_bytes = budget.max_bytes // (2 * max(1, len(weights)))
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
        """Expect nothing more from a member: it is gone."""
        if (place := self._places.get(peer_id)) is not None:
            self.reduction.drop(place, trio.current_time())
            self._tell()
            self._wake()

    async def serve_untrusted(self, request: Request, name: ChunkName) -> Reply:
        """Take a chunk that a peer brings, and answer with the mean, when there is one.

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
            await self._change.wait()
        return awaited[0]

    def _tell(self) -> None:
        """Wake those for whom something has changed."""
        finished = self.reduction.take_finished()
        for chunk, mean in finished:
            self._awaited.pop(chunk, []).append(mean)
        if finished or len(self.reduction.lost) != self._num_lost:
            self._num_lost = len(self.reduction.lost)
            self._wake()

    def _wake(self) -> None:
        self._change.set()
        self._change = trio.Event()


class ChunkSender:
    """Brings one reducer the chunks of its part of this member's vector, and takes their means.

    Args:
      reducer: whom to call; not a client. part: what that one reduces.
      full_bytes: what fills the path to the reducer, for its share of the vector.
    """

    def __init__(self, task: Task, reducer: Member, part: Part, full_bytes: Callable[[], float]) -> None:
        assert task.vector is not None
        caller, config = task.caller, task.config
        self.reducer = reducer
        """Whom it calls."""
        self._group_id = task.group.group_id
        self._part = part
        self._vector = task.vector
        self._average = task.average
        self._weight = task.weight
        self._window = BulkWindow(
            caller.bulk.budget,
            start_bytes=config.window(len(task.group.members)) * part.chunk_bytes,
            full_bytes=full_bytes,
            most_bytes=MAX_WINDOW * part.chunk_bytes,
        )
        self._patience_s = 2 * config.sender_timeout_s
        self._compression = config.compression
        self._call = functools.partial(caller.call, reducer.contact, task.method, timeout_s=config.timeout_s)
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
        """Bring a chunk for which there is room."""
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
