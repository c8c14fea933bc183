"""Butterfly all-reduce of a flat vector within a group that has been assembled.

Theory of operation. Every member reduces its part of the vector (`Group.parts`). It sends each other part to the
member whose part that is, chunk by chunk, a few at a time; a chunk is one call, and the answer to it is the
mean of that chunk. So every number travels once to its reducer and once back, at the same time in all directions.

Failures. A reducer that is lost costs its part: there the members keep their own values. A sender that is lost is
missing in what was not averaged yet. How long either may be silent is in `AllReduceConfig`; a broken connection is
noticed at once. Nothing is tried again: the next all-reduce of the group's members does the same work.

Memory. The average is one array as long as the vector, into which answers are copied and the own part is averaged;
chunks are sent as views of the vector, answers as views of the average. Beside the two there are the chunks that came
to be averaged, up to `window_bytes`, and as many answers that come in.

Compression. A chunk travels compressed to its reducer; the answer is the compressed *difference* of the mean to what
came of the sender's values, and is added to these values themselves; the reducer treats its own values likewise.
Differences are smaller than values and lose less, and members that agree keep what they have, to rounding, however
coarse the compression.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import trio

from net.averaging.grouping.group import Group, Member
from net.averaging.reduction.chunk_exchange import ChunkReducer, ChunkSender
from net.averaging.reduction.partition import Part, parse_name_untrusted, parts_of
from net.averaging.reduction.reducer import MAX_WINDOW, Array, PartReduction, is_finite
from net.errors import CallRefused, PeerBusy, RemoteProtocolError
from net.identity import PeerId
from net.rpc.base import Caller, Reply, Request
from net.wire.compression import BLOCK_SIZE, Compression
from net.wire.messages import MAX_TIMEOUT_S
from net.wire.tensors import as_outgoing, as_received

MAX_CALLS = 4096
"""Calls served at once, of all groups: a full window of 256 members. How many bytes a member may have under way is
bounded for each connection by the RPC layer."""

MAX_EARLY_CALLS = 512
"""Of these, calls for a group that this member has not heard of yet; of one peer at most `MAX_WINDOW`."""

_MAX_PAST_GROUPS = 64
"""Groups that are over and still known, so that late calls are refused at once. More only make them wait."""

_KEPT_BYTES = 4 * 2**20
"""Twice as much may stay with the process between all-reduces."""

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceConfig:
    """How a vector is averaged. Members of a group must agree on `chunk_bytes` and `window_bytes`."""

    chunk_bytes: int = 1280 * 1024
    """Of the vector's float32 numbers in one call, at most. Smaller chunks cost calls, larger ones memory: with half
    as much, four members on one machine took a quarter longer without encryption."""
    window_bytes: int = 8 * 2**20
    """Of chunks that wait for their means, to all reducers together; one chunk or more to each, so that those of large
    groups are smaller. It bounds what a member holds for others, and once more the answers that come in. The more, the
    less members wait for each other: of four on one machine, with half of it they took a fifth longer."""
    sender_timeout_s: float = 30.0
    """A member that has not brought a chunk so long after all earlier ones were averaged is left out of the rest. All
    that the window allows may share its line, and has to pass it in that time."""
    reducer_timeout_s: float | None = None
    """A reducer that has not answered for so long is given up. None: twice `sender_timeout_s`, since it may have to
    wait for others that long itself."""
    timeout_s: float = 300.0
    """Of the whole all-reduce; what is not averaged by then keeps its own values."""
    compression: Compression = Compression.NONE
    """Of what this member sends, as sender and as reducer."""

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "window_bytes"):
            if getattr(self, name) < _FLOAT_BYTES:
                raise ValueError(f"{name} must be at least {_FLOAT_BYTES}, got {getattr(self, name)}")
        for name in ("sender_timeout_s", "reducer_timeout_s", "timeout_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds <= MAX_TIMEOUT_S:
                raise ValueError(f"{name} must be above 0 and at most {MAX_TIMEOUT_S:g} s, got {seconds}")

    def chunk_size(self, group_size: int) -> int:
        """Numbers in a chunk: as many for each member as `window_bytes` allows, in whole blocks of 4096, whose scales
        8-bit compression shares, where it comes to as many."""
        nbytes = min(self.chunk_bytes, self.window_bytes // group_size)
        numbers = nbytes // _FLOAT_BYTES
        return max(1, numbers - numbers % BLOCK_SIZE if numbers > BLOCK_SIZE else numbers)

    def window(self, group_size: int) -> int:
        """Chunks under way to each of the others."""
        in_all = self.window_bytes // (_FLOAT_BYTES * self.chunk_size(group_size))
        return max(1, min(MAX_WINDOW, in_all // max(1, group_size - 1)))

    @property
    def reducer_patience_s(self) -> float:
        """`reducer_timeout_s`, or what None stands for."""
        return 2 * self.sender_timeout_s if self.reducer_timeout_s is None else self.reducer_timeout_s


# Compared by identity: arrays have no single answer to `==`.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AllReduceResult:
    """What came of an all-reduce, as one member sees it."""

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
    """Nothing is missing that this member was to get: all of it is the mean of all members that have a vector."""


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
        self._past: deque[bytes] = deque(maxlen=_MAX_PAST_GROUPS)
        self._num_early: Counter[PeerId] = Counter()
        self._arrival = trio.Event()  # of the next group
        caller.add_handler(self._method, self._serve, max_concurrent=MAX_CALLS)
        _keep_freed_memory()

    def close(self) -> None:
        """Serve no more calls."""
        self._caller.remove_handler(self._method)

    def knows(self, group_id: bytes) -> bool:
        """Whether such a group is or was at work here: a sound leader draws a new id for each."""
        return group_id in self._running or group_id in self._past

    async def run(
        self, group: Group, vector: Array | None, *, size: int | None = None, timeout_s: float = math.inf
    ) -> AllReduceResult:
        """Average with the group. Ends within the timeouts, whatever the others do.

        Args:
          group: the same in all members, in each of which this runs at about the same time.
          vector: float32 [size], finite. Nobody may write to it until this returns, and a moment longer if it is
            cancelled. None for a member that only reduces.
          size: of everybody's vector; needed where there is none to tell.
          timeout_s: the longest it may take, if that is less than configured; what is not averaged by then keeps its
            own values.

        Raises:
          ValueError: an argument is wrong, this peer is not in the group, or it averages with this group already.
        """
        own = group.index(self._caller.peer_id)
        size = _checked_size(group.members[own], vector, size)
        weights = _weights(group)
        if self.knows(group.group_id):
            raise ValueError(f"group {group.group_id.hex()} averages already, or has")
        parts = parts_of(group, size, chunk_size=self._config.chunk_size(len(group.members)))
        average = np.zeros(size, np.float32) if vector is None else np.empty(size, np.float32)
        reduction = PartReduction(
            parts[own],
            weights,
            own=None if vector is None else (own, vector),
            average=average,
            sender_timeout_s=self._config.sender_timeout_s,
            now=trio.current_time(),
            as_sent=None if self._config.compression is Compression.NONE else self._as_sent,
        )
        reducer = ChunkReducer(
            group, part=parts[own], reduction=reduction, average=average, compression=self._config.compression
        )
        senders = {} if vector is None else self._senders(group, parts, vector, average)
        self._running[group.group_id] = reducer
        self._arrival.set()
        self._arrival = trio.Event()
        try:
            with trio.move_on_after(min(timeout_s, self._config.timeout_s)):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(reducer.run)
                    for sender in senders.values():
                        nursery.start_soon(sender.run)
        finally:
            reducer.close()
            del self._running[group.group_id]
            self._past.append(group.group_id)
        counts = {index: sender.num_senders for index, sender in senders.items()}
        counts[own] = [reduction.num_senders(chunk) or 0 for chunk in range(parts[own].num_chunks)]
        _keep_own(parts, counts, vector, average)
        average.flags.writeable = False
        return AllReduceResult(
            average=average,
            received=_received(parts, counts, size),
            lost_reducers=tuple(group.members[index].peer_id for index, each in sorted(counts.items()) if 0 in each),
            lost_senders=tuple(group.members[index].peer_id for index in reduction.lost),
            complete=all(count == len(weights) for each in counts.values() for count in each),
        )

    def _senders(self, group: Group, parts: tuple[Part, ...], vector: Array, average: Array) -> dict[int, ChunkSender]:
        """To everybody else who reduces something, by member."""
        return {
            index: ChunkSender(
                self._caller,
                self._method,
                group_id=group.group_id,
                reducer=member,
                part=parts[index],
                vector=vector,
                average=average,
                window=self._config.window(len(group.members)),
                patience_s=self._config.reducer_patience_s,
                timeout_s=self._config.timeout_s,
                compression=self._config.compression,
            )
            for index, member in enumerate(group.members)
            if parts[index].size and member.peer_id != self._caller.peer_id
        }

    def _as_sent(self, values: Array) -> Array:
        return as_received(as_outgoing(values, self._config.compression))

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
                while group_id not in self._past:
                    if (reducer := self._running.get(group_id)) is not None:
                        return reducer
                    await self._arrival.wait()
        finally:
            self._num_early[peer_id] -= 1
            if not self._num_early[peer_id]:
                del self._num_early[peer_id]
        raise CallRefused(f"this peer does not average with group {group_id.hex()}")


def _keep_freed_memory() -> None:
    """Have freed chunks reused: allocate a block once, and free it without having touched it.

    glibc gives freed memory back to the system beyond a threshold that follows the largest block ever freed, from
    128 KiB up to 32 MiB (mallopt(3), M_MMAP_THRESHOLD). Without this every chunk that comes in is paged in afresh:
    measured, a fifth of an all-reduce's time. Other allocators have ways of their own, and do not mind.
    """
    np.empty(_KEPT_BYTES, np.uint8)


def _checked_size(member: Member, vector: Array | None, size: int | None) -> int:
    if (vector is not None) != member.sends:
        raise ValueError(f"a member has a vector unless it is auxiliary, got {type(vector).__name__} as {member.role}")
    if vector is None:
        if size is None or size < 0:
            raise ValueError(f"without a vector its size must be given, from 0 upwards, got {size}")
        return size
    if vector.dtype != np.float32 or vector.ndim != 1 or not vector.flags.c_contiguous:
        raise ValueError(f"expected a contiguous float32 vector, got {vector.dtype}{list(vector.shape)}")
    if size not in (None, vector.size):
        raise ValueError(f"the vector has {vector.size} numbers, not {size}")
    if not is_finite(vector):
        raise ValueError("some of the vector's values are not finite: others would refuse them")
    return vector.size


def _weights(group: Group) -> dict[int, float]:
    weights = {index: member.weight for index, member in enumerate(group.members) if member.sends}
    for index, weight in weights.items():
        if not 0 < weight < math.inf:
            raise ValueError(f"weights are finite and above 0, got {weight} of {group.members[index].peer_id.short}")
    return weights


def _keep_own(
    parts: tuple[Part, ...], counts: Mapping[int, Sequence[int]], vector: Array | None, average: Array
) -> None:
    """Put own values where no mean came back. Without any, there are zeros already."""
    if vector is not None:
        for index, part_counts in counts.items():
            for chunk, count in enumerate(part_counts):
                if not count:
                    where = parts[index].chunk(chunk)
                    average[where] = vector[where]


def _received(parts: tuple[Part, ...], counts: Mapping[int, Sequence[int]], size: int) -> float:
    num_received = sum(
        parts[index].chunk_len(chunk)
        for index, part_counts in counts.items()
        for chunk, count in enumerate(part_counts)
        if count
    )
    return num_received / size if size else 1.0
