"""The two ends of the calls that an all-reduce consists of: who brings chunks of a part, and who averages them."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

import numpy as np
import trio

from net.averaging.grouping.group import Group, Member
from net.averaging.reduction.partition import ChunkAnswer, ChunkName, Part, parse_answer_untrusted
from net.averaging.reduction.reducer import Array, PartReduction, values_untrusted
from net.errors import CallFailed, CallRefused, DialFailed, PeerBusy, PeerUnavailable, RemoteProtocolError
from net.rpc.base import Caller, Reply, Request
from net.wire.compression import Compression
from net.wire.tensors import as_outgoing, plain

_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Before a call that the reducer has not had is placed again. When a group begins all of its members dial each other at
once, and of two connections that meet one goes; and whoever has just been too busy may not be for long."""


class _Outcome:
    """What those wait for who have brought a chunk."""

    def __init__(self) -> None:
        self.mean: Array | None = None
        self.change = trio.Event()  # it came, or it is pointless to wait

    def tell(self) -> None:
        """Let all of them look again."""
        self.change.set()
        self.change = trio.Event()


class ChunkReducer:
    """Serves the own part of one all-reduce.

    Args:
      group: whose members may call.
      part: what is reduced here.
      reduction: of this part, fresh.
      average: the vector into which it writes. Answers are views of it.
      compression: of answers.
    """

    def __init__(
        self, group: Group, *, part: Part, reduction: PartReduction, average: Array, compression: Compression
    ) -> None:
        self._members = {member.peer_id: index for index, member in enumerate(group.members)}
        self._part = part
        self._reduction = reduction
        self._average = average
        self._compression = compression
        self._outcomes: dict[int, _Outcome] = {}  # of chunks that have come and are not finished
        self._done = trio.Event()
        self._num_lost = 0
        self._is_closed = False
        self._tell()

    async def run(self) -> None:
        """Until the part is reduced."""
        while not self._reduction.is_done:
            with trio.move_on_at(self._reduction.deadline()):
                await self._done.wait()
            self._reduction.tick(trio.current_time())
            self._tell()

    def close(self) -> None:
        """Refuse what is not finished."""
        self._is_closed = True
        self._wake_all()

    async def serve_untrusted(self, request: Request, name: ChunkName) -> Reply:
        """A peer brings a chunk: answer with the mean, when there is one.

        Raises:
          RemoteProtocolError: the call is not as it should be.
          CallRefused: nothing comes of it.
        """
        sender = self._members.get(request.peer_id)
        if sender is None:
            raise RemoteProtocolError("you are not in this group")
        if name.size != self._average.size:
            raise RemoteProtocolError(f"this group averages {self._average.size} numbers, not {name.size}")
        chunk = self._part.index_untrusted(name.start)
        if self._is_closed:
            raise CallRefused("this peer has left the group")
        outcome = self._outcomes.setdefault(chunk, _Outcome())
        try:
            values = self._reduction.receive_untrusted(sender, chunk, request.tensors, trio.current_time())
        finally:
            self._tell()
        try:
            mean = await self._mean(sender, outcome)
        except trio.Cancelled:
            # The sender gave up, or its connection broke: it does not come back, and nobody need wait for that.
            self._reduction.drop(sender, trio.current_time())
            self._tell()
            raise
        is_difference = self._compression is not Compression.NONE
        answer = np.subtract(mean, values) if is_difference else mean
        num_senders = self._reduction.num_senders(chunk)
        assert num_senders
        return Reply(
            body=ChunkAnswer(num_senders=num_senders, is_difference=is_difference).body(),
            tensors=(as_outgoing(answer, self._compression),),
        )

    async def _mean(self, sender: int, outcome: _Outcome) -> Array:
        while outcome.mean is None:
            if self._is_closed:
                raise CallRefused("this peer has left the group")
            if sender in self._reduction.lost:
                raise CallRefused("you were too late with another chunk, or broke the rules")
            await outcome.change.wait()
        return outcome.mean

    def _tell(self) -> None:
        """Wake those for whom something has changed."""
        for chunk, mean in self._reduction.take_finished():
            if (outcome := self._outcomes.pop(chunk, None)) is not None:
                outcome.mean = mean
                outcome.tell()
        if len(self._reduction.lost) != self._num_lost:
            self._num_lost = len(self._reduction.lost)
            self._wake_all()
        if self._reduction.is_done:
            self._done.set()

    def _wake_all(self) -> None:
        for outcome in self._outcomes.values():
            outcome.tell()


@dataclass(eq=False)
class ChunkSender:
    """Brings one reducer the chunks of its part, and takes their means.

    Args:
      caller, method: on which and what to call.
      group_id: of which all-reduce.
      reducer: whom to call. Not a client.
      part: what it reduces.
      vector: our values.
      average: where the means go.
      window: chunks under way at once.
      patience_s: without an answer, after which the reducer is given up.
      timeout_s: of each call, above everything that patience may add up to.
      compression: of the values.
    """

    caller: Caller
    method: str
    _: KW_ONLY
    group_id: bytes
    reducer: Member
    part: Part
    vector: Array
    average: Array
    window: int
    patience_s: float
    timeout_s: float
    compression: Compression

    def __post_init__(self) -> None:
        self._patience = trio.CancelScope()
        self._num_senders = [0] * self.part.num_chunks

    @property
    def num_senders(self) -> list[int]:
        """Of each chunk, the vectors in the mean that came back; 0: none did."""
        return self._num_senders

    async def run(self) -> None:
        """Until all chunks have come back, or the reducer is lost."""
        self._be_patient()
        with self._patience:
            async with trio.open_nursery() as nursery:
                chunks = iter(range(self.part.num_chunks))
                for _ in range(min(self.window, self.part.num_chunks)):
                    nursery.start_soon(self._bring, chunks)

    def _be_patient(self) -> None:
        self._patience.deadline = trio.current_time() + self.patience_s

    async def _bring(self, chunks: Iterator[int]) -> None:
        """One chunk after the other; several tasks share the iterator."""
        for chunk in chunks:
            try:
                await self._average_untrusted(chunk)
            except (PeerUnavailable, CallFailed, RemoteProtocolError):
                self._patience.cancel()  # for all that is under way: the reducer is lost
                return
            self._be_patient()

    async def _average_untrusted(self, chunk: int) -> None:
        where = self.part.chunk(chunk)
        values = self.vector[where]
        name = ChunkName(group_id=self.group_id, size=self.vector.size, start=where.start)
        reply = await self._call(name, values)
        answer = parse_answer_untrusted(reply.body)
        received = values_untrusted([plain(tensor) for tensor in reply.tensors], values.size)
        if answer.is_difference:
            np.add(values, received, out=self.average[where])
        else:
            self.average[where] = received
        self._num_senders[chunk] = answer.num_senders

    async def _call(self, name: ChunkName, values: Array) -> Reply:
        tensors = (as_outgoing(values, self.compression),)
        for pause_s in (*_PAUSES_S, None):
            try:
                return await self.caller.call(
                    self.reducer.contact, self.method, name.body(), tensors, timeout_s=self.timeout_s
                )
            except (DialFailed, PeerBusy):
                if pause_s is None:
                    raise
                await trio.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")
