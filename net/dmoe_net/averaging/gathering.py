"""All-gather of equally long payloads within a group that has been assembled.

    bring    {"group": 16 bytes, "size": bytes of a payload, "start": of the piece}    one uint8 tensor: the piece
    fetch    {"group", "size", "start", "of": place of a member in the group}          answered by that piece

Every member brings its payload, piece by piece, to each member that can be called. A client, which cannot be called,
fetches the others' payloads from those who have them: a node's from the node itself, another client's from any node.
`bring` is answered as soon as the piece is there, `fetch` when the payload is whole.

A member that has brought nothing for `sender_timeout_s`, or cannot be called, is not waited for. If it has died, some
have its payload and others do not; these ask the others, one after the other: with crashes alone, a payload that is
whole at one living node comes to all, and all average the same. So members that have all they need still serve what
they hold until their next group is over. (A member could forge what it holds of a third one's payload, as a reducer
could the mean of its part.)

Sparse vectors are gathered and not reduced (`dmoe_net.wire.sparse` says why): all who have the vectors of the same
members come to the very same mean, as they add up in the order of the group.
"""

import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import trio

from dmoe_net.averaging.group_calls import MAX_CALLS, KnownGroups, placed
from dmoe_net.averaging.grouping.group import GROUP_ID, MAX_GROUP_SIZE, Group, Role
from dmoe_net.averaging.window import BulkWindow
from dmoe_net.dht.calls import PEER_ERRORS
from dmoe_net.errors import CallRefused, PeerUnavailable, RemoteProtocolError
from dmoe_net.identity import PeerId
from dmoe_net.rpc.base import Body, Caller, Reply, Request, read_request
from dmoe_net.types import Array
from dmoe_net.wire.fields import integer
from dmoe_net.wire.messages import MAX_TIMEOUT_S
from dmoe_net.wire.sparse import SparseCoding, SparseVector, mean_of_sparse, parse_sparse_untrusted, sparse_nbytes

Compute = Callable[..., Awaitable[Any]]
"""Returns `function(*args)`: the mean of long vectors takes time that the event loop has not."""

SILENT = "silent"
UNREACHABLE = "unreachable"
BROKE_RULES = "broke the rules"
OUT_OF_TIME = "out of time"

_MAX_EARLY_OF_ONE = 32
"""Calls of one peer for groups that this member has not heard of yet."""
_MAX_PIECES = 128
"""Pieces under way to one member at most: one connection serves 256 calls at once."""
_NBYTES, _PLACE = integer(0, 2**63 - 1), integer(0, MAX_GROUP_SIZE - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherConfig:
    """Settings of a gathering. Members must agree on `chunk_bytes`."""

    chunk_bytes: int = 2**20
    """Bytes of a payload in one call."""
    window_bytes: int = 4 * 2**20
    """Bytes under way from one member to another, to begin with; one piece at least. On longer lines the window grows
    as far as these carry and the memory budget allows (`dmoe_net.rpc.bulk`)."""
    sender_timeout_s: float = 30.0
    """Seconds without a piece after which a member is not waited for any more."""
    max_bytes: int = 2**32
    """Bytes that a full group's payloads may have together. More is refused at start. Twice as much is held at most:
    the last group's payloads stay for those who are slower."""

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "window_bytes", "max_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.sender_timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(
                f"sender_timeout_s must be above 0 and at most {MAX_TIMEOUT_S:g} s, got {self.sender_timeout_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gathered:
    """The outcome of a gathering, as one member sees it. Members are named by their place in the group."""

    payloads: dict[int, Array]
    """uint8 payloads that are there, this member's own included; in the order of the group."""
    lost: dict[int, str]
    """Reasons why the others are not."""
    sent_bytes: int
    """Bytes of payloads that left this member and arrived, others' too that it has passed on, since the last gathering:
    slower members fetch after the end, which counts for the next one."""


class AllGather:
    """All-gathers under one name, as `averaging.{prefix}.bring` and `.fetch`, of all groups, one at a time."""

    def __init__(self, caller: Caller, *, prefix: str, config: GatherConfig) -> None:
        self.caller = caller
        self.config = config
        self.bring_method, self.fetch_method = f"averaging.{prefix}.bring", f"averaging.{prefix}.fetch"
        self.sent_bytes = 0
        # The group at work, and the last one that is over: others may still fetch from it.
        self.groups = KnownGroups[_Gathering]("gather", max_early=_MAX_EARLY_OF_ONE, wait_s=config.sender_timeout_s)
        caller.add_handler(self.bring_method, self._serve_bring, max_concurrent=MAX_CALLS)
        caller.add_handler(self.fetch_method, self._serve_fetch, max_concurrent=MAX_CALLS)

    def close(self) -> None:
        self.caller.remove_handler(self.bring_method)
        self.caller.remove_handler(self.fetch_method)
        self.groups.at_work.clear()

    async def run(self, group: Group, payload: Array, *, timeout_s: float) -> Gathered:
        """Exchange payloads with the group. Ends in time, whatever the others do; whoever is missing then is left out.

        Args:
          group: the same in all members, in each of which this runs at about the same time; new to `groups`.
          payload: uint8, as long as everybody's, at least one byte; nobody writes to it any more.
        """
        gathering = _Gathering(self, group, payload)
        self.groups.begin(group.group_id, gathering)
        if len(self.groups.at_work) > 2:
            self.groups.end(next(iter(self.groups.at_work)))
        try:
            with trio.move_on_after(timeout_s):
                await gathering.run()
        finally:
            gathering.close()
        sent_bytes, self.sent_bytes = self.sent_bytes, 0
        return gathering.outcome(sent_bytes)

    async def _serve_bring(self, request: Request) -> Reply:
        group_id, nbytes, start = read_request(request, group=GROUP_ID, size=_NBYTES, start=_NBYTES)
        gathering = await self.groups.find(request.peer_id, group_id)
        try:
            gathering.receive_untrusted(request, nbytes, start)
        except RemoteProtocolError as error:
            raise CallRefused(str(error)) from error
        return Reply()

    async def _serve_fetch(self, request: Request) -> Reply:
        group_id, nbytes, start, of = read_request(request, group=GROUP_ID, size=_NBYTES, start=_NBYTES, of=_PLACE)
        gathering = await self.groups.find(request.peer_id, group_id)
        try:
            return await gathering.give_untrusted(request, nbytes, start, of)
        except RemoteProtocolError as error:
            raise CallRefused(str(error)) from error


class _Gathering:
    def __init__(self, gather: AllGather, group: Group, payload: Array) -> None:
        self._gather = gather
        self._group = group
        self._own = own = group.index(gather.caller.peer_id)
        self._payload = payload.view()
        self._payload.flags.writeable = False
        self._places = {member.peer_id: place for place, member in enumerate(group.members) if member.sends}
        self._is_client = group.members[own].role is Role.CLIENT
        self._core = Payloads(
            self._places.values(),
            (own, self._payload),
            chunk_bytes=gather.config.chunk_bytes,
            silence_s=math.inf if self._is_client else gather.config.sender_timeout_s,
            now=trio.current_time(),
        )
        self._nodes = [place for place, member in enumerate(group.members) if member.role is Role.NODE and place != own]
        self._is_closed = False
        self._waiting = trio.lowlevel.ParkingLot()  # until a payload is whole, or is not waited for any more

    async def run(self) -> None:
        """Return when this member's payload is everywhere, and all others' are here or cannot be had."""
        async with trio.open_nursery() as nursery:
            for place in self._nodes:
                nursery.start_soon(self._bring_to, place)
            for place in self._places.values():
                if place != self._own:
                    nursery.start_soon(self._obtain, place)

    def close(self) -> None:
        """Wait for nothing more; what is whole is still given to others."""
        self._is_closed = True
        self._waiting.unpark_all()

    def outcome(self, sent_bytes: int) -> Gathered:
        whole, places = self._core.whole, sorted(self._places.values())
        lost = {place: self._core.lost.get(place, OUT_OF_TIME) for place in places if place not in whole}
        return Gathered(payloads={place: whole[place] for place in sorted(whole)}, lost=lost, sent_bytes=sent_bytes)

    def receive_untrusted(self, request: Request, nbytes: int, start: int) -> None:
        place = self._place_untrusted(request.peer_id)
        if self._is_closed:
            raise RemoteProtocolError("this peer has left the group")
        self._core.check_untrusted(nbytes, start)
        was_awaited = self._core.is_awaited(place)
        try:
            self._core.receive_untrusted(place, start, request.tensors, trio.current_time())
        finally:
            if was_awaited != self._core.is_awaited(place):
                self._waiting.unpark_all()

    async def give_untrusted(self, request: Request, nbytes: int, start: int, of: int) -> Reply:
        """Answer with a piece of a member's payload, once that is whole."""
        self._place_untrusted(request.peer_id)
        self._core.check_untrusted(nbytes, start)
        while self._core.is_awaited(of) and not self._is_closed:
            await self._waiting.park()
        payload = self._core.whole.get(of)
        if payload is None:
            raise RemoteProtocolError(f"this peer has no payload of member {of}")
        piece = payload[self._core.piece(start)]
        self._gather.sent_bytes += piece.size
        return Reply(tensors=(piece,))

    def _place_untrusted(self, peer_id: PeerId) -> int:
        place = self._places.get(peer_id)
        if place is None:
            raise RemoteProtocolError("you have no payload in this group")
        return place

    async def _bring_to(self, place: int) -> None:

        async def bring(start: int) -> None:
            piece = self._payload[self._core.piece(start)]
            await self._call(place, self._gather.bring_method, {"start": start}, piece)
            self._gather.sent_bytes += piece.size

        try:
            await self._all_pieces(place, bring)
        except PeerUnavailable:
            self._core.lose(place, UNREACHABLE)  # what it has not brought by now does not come
            self._waiting.unpark_all()
        except PEER_ERRORS:
            pass  # it goes without our payload, and tells nobody why; what it brings counts

    async def _obtain(self, place: int) -> None:
        """Return when a member's payload is here, or cannot be had."""
        sources = [other for other in self._nodes if other != place]
        # Everybody begins elsewhere, so that not all ask the same one.
        turn = self._own % max(1, len(sources))
        sources = sources[turn:] + sources[:turn]
        if self._is_client:
            sources = [place, *sources] if place in self._nodes else sources
        else:
            while self._core.is_awaited(place):
                with trio.move_on_at(self._core.deadline(place)):
                    await self._waiting.park()
                self._core.tick(place, trio.current_time())
            self._waiting.unpark_all()  # others may have asked for it
            if place in self._core.whole or self._core.lost[place] not in (SILENT, UNREACHABLE):
                return
        for source in sources:
            if (payload := await self._fetched(place, source)) is not None:
                self._core.take(place, payload)
                self._waiting.unpark_all()
                return
        self._core.lose(place, UNREACHABLE)

    async def _fetched(self, place: int, source: int) -> Array | None:
        """A member's payload, from one that may have it; None if that has not."""
        payload = np.empty(self._core.nbytes, np.uint8)

        async def fetch(start: int) -> None:
            where = self._core.piece(start)
            reply = await self._call(source, self._gather.fetch_method, {"start": start, "of": place})
            payload[where] = bytes_untrusted(reply.tensors, where)

        try:
            await self._all_pieces(source, fetch)
        except PEER_ERRORS:
            return None
        return payload

    async def _call(self, place: int, method: str, body: Body, *tensors: Array) -> Reply:
        gather, contact = self._gather, self._group.members[place].contact
        named = {"group": self._group.group_id, "size": self._core.nbytes, **body}
        piece_bytes = min(gather.config.chunk_bytes, self._core.nbytes)
        # Who is asked for a payload may have to wait for it himself; what is brought is taken at once.
        timeout_s = gather.config.sender_timeout_s * (2 if method == gather.fetch_method else 1)
        return await placed(
            lambda: gather.caller.call(contact, method, named, tensors, timeout_s=timeout_s, bulk_bytes=piece_bytes)
        )

    async def _all_pieces(self, place: int, move: Callable[[int], Awaitable[None]]) -> None:
        chunk_bytes = self._gather.config.chunk_bytes
        window = BulkWindow.towards(
            self._gather.caller.bulk,
            self._group.members[place].peer_id,
            start_bytes=max(chunk_bytes, self._gather.config.window_bytes),
            most_bytes=_MAX_PIECES * chunk_bytes,
        )
        await window.move(self._core.starts, chunk_bytes, move)


class Payloads:
    """The payloads of a group, as far as one member has them.

    Args:
      senders: places of all members that have a payload, this one's too.
      own: this member's place, and its payload.
      silence_s: how long a member may be silent; infinite where nobody brings anything.
    """

    def __init__(
        self, senders: Collection[int], own: tuple[int, Array], *, chunk_bytes: int, silence_s: float, now: float
    ) -> None:
        self.nbytes = own[1].size
        """Bytes of each payload."""
        self._chunk_bytes = chunk_bytes
        self._silence_s = silence_s
        self._heard_at = dict.fromkeys(senders, now)
        self._buffers: dict[int, Array] = {}
        self._missing: dict[int, set[int]] = {}  # where the pieces begin that have not come, of those that came in part
        self.whole: dict[int, Array] = {own[0]: own[1]}
        """The payloads that are here, uint8 [nbytes] each."""
        self.lost: dict[int, str] = {}
        """Reasons why payloads are not waited for any more."""

    @property
    def starts(self) -> range:
        return range(0, self.nbytes, self._chunk_bytes)

    def piece(self, start: int) -> slice:
        return slice(start, min(start + self._chunk_bytes, self.nbytes))

    def is_awaited(self, place: int) -> bool:
        """True if the member's payload may still be brought."""
        return place in self._heard_at and place not in self.whole and place not in self.lost

    def check_untrusted(self, nbytes: int, start: int) -> None:
        if nbytes != self.nbytes:
            raise RemoteProtocolError(f"payloads of this group have {self.nbytes} bytes, not {nbytes}")
        if start not in self.starts:
            raise RemoteProtocolError(f"no piece of {self._chunk_bytes} bytes begins at {start} of {nbytes}")

    def receive_untrusted(self, place: int, start: int, tensors: Sequence[object], now: float) -> None:
        """Take a piece at a place that `check_untrusted` has passed; whoever brings one of another form is out."""
        if not self.is_awaited(place):
            raise RemoteProtocolError("nothing is expected from you here, or you were too late")
        try:
            piece = bytes_untrusted(tensors, self.piece(start))
        except RemoteProtocolError:
            self.lose(place, BROKE_RULES)
            raise
        missing = self._missing.setdefault(place, set(self.starts))
        if start not in missing:
            raise RemoteProtocolError("this piece came before")
        if place not in self._buffers:
            self._buffers[place] = np.empty(self.nbytes, np.uint8)
        self._buffers[place][self.piece(start)] = piece
        missing.remove(start)
        self._heard_at[place] = now
        if not missing:
            self.take(place, self._buffers[place])

    def take(self, place: int, payload: Array) -> None:
        self.whole.setdefault(place, payload)
        self.lost.pop(place, None)
        self._forget(place)

    def lose(self, place: int, why: str) -> None:
        """Wait no longer for a member's payload, unless it is here."""
        if self.is_awaited(place):
            self.lost[place] = why
            self._forget(place)

    def deadline(self, place: int) -> float:
        """Time at which to call `tick` for this member."""
        return self._heard_at[place] + self._silence_s if self.is_awaited(place) else math.inf

    def tick(self, place: int, now: float) -> None:
        """Wait no longer for a member that has been silent long enough."""
        if now >= self.deadline(place):
            self.lose(place, SILENT)

    def _forget(self, place: int) -> None:
        self._missing.pop(place, None)
        self._buffers.pop(place, None)


def bytes_untrusted(tensors: Sequence[object], where: slice) -> Array:
    nbytes = where.stop - where.start
    tensor = tensors[0] if len(tensors) == 1 else None
    if not isinstance(tensor, np.ndarray) or tensor.dtype != np.uint8 or tensor.shape != (nbytes,):
        raise RemoteProtocolError(f"expected one tensor of {nbytes} bytes")
    return tensor


async def inline(function: Callable[..., Any], *args: Any) -> Any:
    """Compute `function(*args)` here and now."""
    await trio.lowlevel.checkpoint()
    return function(*args)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLayout:
    """The form of vectors of few values; the same at all peers that average together."""

    coding: SparseCoding
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
        """Refuse what is no vector of this layout, by `ValueError`; values are not looked at."""
        if not isinstance(vector, SparseVector) or (vector.coding, vector.sizes) != (self.coding, self.sizes):
            raise ValueError(f"expected a sparse vector of {self.size} values, {self.schema:.160}, got {vector!r:.160}")

    def check_memory(self, side: int, config: GatherConfig) -> None:
        """Refuse a layout whose payloads of `side` members would be too much to hold, by `ValueError`."""
        nbytes = side * self.nbytes
        if nbytes > config.max_bytes:
            raise ValueError(
                f"{side} sparse payloads of {self.nbytes} bytes take {nbytes} bytes of memory, more than the "
                f"{config.max_bytes} that are allowed: smaller groups, or fewer values of a block"
            )


async def mean_untrusted(
    gathered: Gathered, group: Group, layout: SparseLayout, compute: Compute
) -> tuple[Array, dict[PeerId, str]]:
    """The weighted mean of a group's vectors, float32 [layout.size], and the members that it goes without, and why."""
    vectors, weights, lost = list[SparseVector](), list[float](), dict(gathered.lost)
    for place, each in gathered.payloads.items():
        try:
            vectors.append(await compute(parse_sparse_untrusted, each.data, layout.coding, layout.sizes))
        except RemoteProtocolError:
            lost[place] = BROKE_RULES
        else:
            weights.append(group.members[place].weight)
    mean = await compute(mean_of_sparse, vectors, weights)
    return mean, {group.members[place].peer_id: lost[place] for place in sorted(lost)}
