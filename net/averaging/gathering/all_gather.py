"""All-gather of equally long payloads within a group that has been assembled.

    bring    {"group": 16 bytes, "size": bytes of a payload, "start": of the piece}    one uint8 tensor: the piece
    fetch    {"group", "size", "start", "of": place of a member in the group}          answered by that piece

Every member brings its payload, piece by piece, to each member that can be called. A client, which cannot be called,
fetches the others' payloads from those who have them: a node's from the node itself, another client's from any node.
`bring` is answered as soon as the piece is there, `fetch` when the payload is whole.

Failures. Whoever has brought nothing for `sender_timeout_s`, or cannot be called, is not waited for. If it has died,
some have its payload and others do not; these ask the others, one after the other: with crashes alone, a payload that
is whole at one living node comes to all, and all average the same. So members that have all they need still serve what
they hold until their next group is over. A member could forge what it holds of a third one's payload, as a reducer
could the mean of its part: only clients, and those who look for the payload of a member that is gone, take it thence.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import trio

from net.averaging.gathering.payloads import (
    OUT_OF_TIME,
    SILENT,
    UNREACHABLE,
    GatherConfig,
    Payloads,
    bytes_untrusted,
)
from net.averaging.group_calls import MAX_CALLS, KnownGroups, placed
from net.averaging.grouping.group import GROUP_ID, MAX_GROUP_SIZE, Group, Role
from net.averaging.window import BulkWindow
from net.dht.calls import PEER_ERRORS
from net.errors import CallRefused, PeerUnavailable, RemoteProtocolError
from net.identity import PeerId
from net.rpc.base import Body, Caller, Reply, Request, read_request
from net.types import Array
from net.wire.fields import integer

_MAX_EARLY_OF_ONE = 32
"""Calls of one peer for groups that this member has not heard of yet."""

_MAX_PIECES = 128
"""Pieces under way to one member at most: one connection serves 256 calls at once."""

_NBYTES, _PLACE = integer(0, 2**63 - 1), integer(0, MAX_GROUP_SIZE - 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gathered:
    """The outcome of a gathering, as one member sees it. Members are named by their place in the group."""

    payloads: dict[int, Array]
    """uint8, of those who are there, this member's own included; in the order of the group."""
    lost: dict[int, str]
    """Why the others are not."""
    sent_bytes: int
    """Bytes of payloads that left this member and arrived, others' too that it has passed on, since the last gathering:
    slower members fetch after the end, which counts for the next one."""


class AllGather:
    """All-gathers under one name. One object serves all groups of a process, one at a time.

    Args:
      caller: on which to call and be called, as `averaging.{prefix}.bring` and `.fetch`.
      prefix: what is gathered.

    Raises:
      ValueError: the caller has such a method already.
    """

    def __init__(self, caller: Caller, *, prefix: str, config: GatherConfig) -> None:
        self.caller = caller
        self.config = config
        self.bring_method, self.fetch_method = f"averaging.{prefix}.bring", f"averaging.{prefix}.fetch"
        self.sent_bytes = 0
        """Bytes as of `Gathered`, so far."""
        # The group at work, and the last one that is over: others may still fetch from it.
        self._groups = KnownGroups[_Gathering]("gather", max_early=_MAX_EARLY_OF_ONE, wait_s=config.sender_timeout_s)
        caller.add_handler(self.bring_method, self._serve_bring, max_concurrent=MAX_CALLS)
        caller.add_handler(self.fetch_method, self._serve_fetch, max_concurrent=MAX_CALLS)

    def close(self) -> None:
        """Serve no more calls, and hold nothing any more."""
        self.caller.remove_handler(self.bring_method)
        self.caller.remove_handler(self.fetch_method)
        self._groups.at_work.clear()

    def knows(self, group_id: bytes) -> bool:
        """True if such a group is or was at work here: a sound leader draws a new id for each."""
        return group_id in self._groups

    async def run(self, group: Group, payload: Array, *, timeout_s: float) -> Gathered:
        """Exchange payloads with the group. Ends in time, whatever the others do.

        If cancelled, others get what has left by then. One group at a time.

        Args:
          group: the same in all members, in each of which this runs at about the same time; one that `knows` not yet.
          payload: uint8, as long as everybody's, at least one byte; nobody writes to it any more.
          timeout_s: the longest it may take; who is missing then is left out.

        Raises:
          ValueError: this peer is not in the group.
        """
        gathering = _Gathering(self, group, payload)
        self._groups.begin(group.group_id, gathering)
        if len(self._groups.at_work) > 2:
            self._groups.end(next(iter(self._groups.at_work)))
        try:
            with trio.move_on_after(timeout_s):
                await gathering.run()
        finally:
            gathering.close()
        sent_bytes, self.sent_bytes = self.sent_bytes, 0
        payloads, lost = gathering.outcome()
        return Gathered(payloads=payloads, lost=lost, sent_bytes=sent_bytes)

    async def _serve_bring(self, request: Request) -> Reply:
        group_id, nbytes, start = read_request(request, group=GROUP_ID, size=_NBYTES, start=_NBYTES)
        gathering = await self._groups.find(request.peer_id, group_id)
        try:
            gathering.receive_untrusted(request, nbytes, start)
        except RemoteProtocolError as error:
            raise CallRefused(str(error)) from error
        return Reply()

    async def _serve_fetch(self, request: Request) -> Reply:
        group_id, nbytes, start, of = read_request(request, group=GROUP_ID, size=_NBYTES, start=_NBYTES, of=_PLACE)
        gathering = await self._groups.find(request.peer_id, group_id)
        try:
            return await gathering.give_untrusted(request, nbytes, start, of)
        except RemoteProtocolError as error:
            raise CallRefused(str(error)) from error


class _Gathering:
    """This member's part in one group's gathering."""

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

    def outcome(self) -> tuple[dict[int, Array], dict[int, str]]:
        """Return the payloads that are here, and why the others are not; see `Gathered`."""
        whole, lost = self._core.whole, self._core.lost
        missing = (place for place in sorted(self._places.values()) if place not in whole)
        return {place: whole[place] for place in sorted(whole)}, {each: lost.get(each, OUT_OF_TIME) for each in missing}

    def receive_untrusted(self, request: Request, nbytes: int, start: int) -> None:
        """Take a piece that a member brings of its payload.

        Raises:
          RemoteProtocolError: it does not count.
        """
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
        """Answer with a piece of a member's payload, once that is whole.

        Raises:
          RemoteProtocolError: there is none.
        """
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
        """Bring a member this one's payload."""

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
        """Move all pieces of a payload to or from a member, as many at a time as fill the line.

        Raises:
          PEER_ERRORS: the first failure; the others are given up.
        """
        chunk_bytes = self._gather.config.chunk_bytes
        window = BulkWindow.towards(
            self._gather.caller.bulk,
            self._group.members[place].peer_id,
            start_bytes=max(chunk_bytes, self._gather.config.window_bytes),
            most_bytes=_MAX_PIECES * chunk_bytes,
        )
        await window.move(self._core.starts, chunk_bytes, move)
