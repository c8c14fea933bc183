"""All-gather of equally long payloads within a group that has been assembled.

Theory of operation. Every member brings its payload, piece by piece, to each member that can be called. So with n
payloads n - 1 leave each member, and n - 1 come. A client, which cannot be called, fetches the others' payloads from
those who have them: a node's from the node itself, another client's from any node.

    bring    {"group": 16 bytes, "size": bytes of a payload, "start": of the piece}    one uint8 tensor: the piece
    fetch    {"group", "size", "start", "of": place of a member in the group}          answered by that piece

`bring` is answered as soon as the piece is there, `fetch` when the payload is whole.

Failures. Whoever has brought nothing for `sender_timeout_s`, or cannot be called, is not waited for. If it has died,
some have its payload and others do not. So these ask the others, one after the other, for what they have: with crashes
alone, a payload that is whole at one living node comes to all, and all average the same. Members that have all they
need still serve what they hold until their next group is over. Who is missing in the end is left out, with a reason.
The whole ends within `timeout_s`.

Trust. What a member holds of a third one's payload it could forge, as a reducer could the mean of its part. Only
clients, and those who look for the payload of a member that is gone, take payloads from third ones.

Memory. A member holds one payload of each other member; see `payloads`.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import trio

from net.averaging.gathering.payloads import (
    GROUP_ID,
    NBYTES,
    OUT_OF_TIME,
    PLACE,
    SILENT,
    UNREACHABLE,
    GatherConfig,
    Payloads,
    bytes_untrusted,
)
from net.averaging.group_calls import MAX_CALLS, KnownGroups, placed
from net.averaging.grouping.group import Group, Role
from net.averaging.window import BulkWindow
from net.dht.calls import PEER_ERRORS
from net.errors import CallRefused, PeerUnavailable, RemoteProtocolError
from net.identity import Contact, PeerId
from net.rpc.base import Body, Caller, Reply, Request, read_request
from net.types import Array

_MAX_EARLY_OF_ONE = 32
"""Calls of one peer for groups that this member has not heard of yet."""

_MAX_PIECES = 128
"""Pieces under way to one member at most: one connection serves 256 calls at once."""


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
      config: how.

    Raises:
      ValueError: the caller has such a method already.
    """

    def __init__(self, caller: Caller, *, prefix: str, config: GatherConfig) -> None:
        self._caller = caller
        self._config = config
        self._bring, self._fetch = f"averaging.{prefix}.bring", f"averaging.{prefix}.fetch"
        # The group at work, and the last one that is over: others may still fetch from it.
        self._groups = KnownGroups[_Gathering]("gather", max_early=_MAX_EARLY_OF_ONE, wait_s=config.sender_timeout_s)
        self._sent_bytes = 0
        caller.add_handler(self._bring, self._serve_bring, max_concurrent=MAX_CALLS)
        caller.add_handler(self._fetch, self._serve_fetch, max_concurrent=MAX_CALLS)

    def close(self) -> None:
        """Serve no more calls, and hold nothing any more."""
        self._caller.remove_handler(self._bring)
        self._caller.remove_handler(self._fetch)
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
        methods = self._bring, self._fetch
        gathering = _Gathering(self._caller, methods, group, payload, self._config, on_sent=self._count)
        self._groups.begin(group.group_id, gathering)
        if len(self._groups.at_work) > 2:
            self._groups.end(next(iter(self._groups.at_work)))
        try:
            with trio.move_on_after(timeout_s):
                await gathering.run()
        finally:
            gathering.close()
        sent_bytes, self._sent_bytes = self._sent_bytes, 0
        return gathering.gathered(sent_bytes)

    def _count(self, nbytes: int) -> None:
        self._sent_bytes += nbytes

    async def _serve_bring(self, request: Request) -> Reply:
        group_id, nbytes, start = read_request(request, group=GROUP_ID, size=NBYTES, start=NBYTES)
        gathering = await self._groups.find(request.peer_id, group_id)
        try:
            gathering.receive_untrusted(request, nbytes, start)
        except RemoteProtocolError as error:
            raise CallRefused(str(error)) from error
        return Reply()

    async def _serve_fetch(self, request: Request) -> Reply:
        group_id, nbytes, start, of = read_request(request, group=GROUP_ID, size=NBYTES, start=NBYTES, of=PLACE)
        gathering = await self._groups.find(request.peer_id, group_id)
        try:
            return await gathering.give_untrusted(request, nbytes, start, of)
        except RemoteProtocolError as error:
            raise CallRefused(str(error)) from error


class _Gathering:
    """This member's part in one group's gathering.

    Args:
      methods: to bring a piece, and to fetch one.
      payload: this member's.
      on_sent: told how many bytes of payloads have left.
    """

    def __init__(
        self,
        caller: Caller,
        methods: tuple[str, str],
        group: Group,
        payload: Array,
        config: GatherConfig,
        *,
        on_sent: Callable[[int], None],
    ) -> None:
        self._caller = caller
        self._bring, self._fetch = methods
        self._group = group
        self._config = config
        self._own = own = group.index(caller.peer_id)
        self._payload = payload.view()
        self._payload.flags.writeable = False
        self._places = {member.peer_id: place for place, member in enumerate(group.members) if member.sends}
        self._is_client = group.members[own].role is Role.CLIENT
        self._core = Payloads(
            self._places.values(),
            (own, self._payload),
            chunk_bytes=config.chunk_bytes,
            silence_s=math.inf if self._is_client else config.sender_timeout_s,
            now=trio.current_time(),
        )
        self._nodes = [place for place, member in enumerate(group.members) if member.role is Role.NODE and place != own]
        self._is_closed = False
        self._on_sent = on_sent
        self._changed = trio.Event()  # set, and replaced, when a payload is whole, or is not waited for any more

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
        self._wake()

    def gathered(self, sent_bytes: int) -> Gathered:
        """Return the outcome."""
        whole, lost = self._core.whole, self._core.lost
        return Gathered(
            payloads={place: whole[place] for place in sorted(whole)},
            lost={place: lost.get(place, OUT_OF_TIME) for place in sorted(self._places.values()) if place not in whole},
            sent_bytes=sent_bytes,
        )

    def receive_untrusted(self, request: Request, nbytes: int, start: int) -> None:
        """A member brings a piece of its payload.

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
                self._wake()

    async def give_untrusted(self, request: Request, nbytes: int, start: int, of: int) -> Reply:
        """Answer with a piece of a member's payload, once that is whole.

        Raises:
          RemoteProtocolError: there is none.
        """
        self._place_untrusted(request.peer_id)
        self._core.check_untrusted(nbytes, start)
        while self._core.is_awaited(of) and not self._is_closed:
            await self._changed.wait()
        payload = self._core.whole.get(of)
        if payload is None:
            raise RemoteProtocolError(f"this peer has no payload of member {of}")
        piece = payload[self._core.piece(start)]
        self._on_sent(piece.size)
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
            await self._call(self._contact(place), self._bring, {"start": start}, piece)
            self._on_sent(piece.size)

        try:
            await self._all_pieces(place, bring)
        except PeerUnavailable:
            self._core.lose(place, UNREACHABLE)  # what it has not brought by now does not come
            self._wake()
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
                    await self._changed.wait()
                self._core.tick(place, trio.current_time())
            self._wake()  # others may have asked for it
            if place in self._core.whole or self._core.lost[place] not in (SILENT, UNREACHABLE):
                return
        for source in sources:
            if (payload := await self._fetched(place, source)) is not None:
                self._core.take(place, payload)
                self._wake()
                return
        self._core.lose(place, UNREACHABLE)

    async def _fetched(self, place: int, source: int) -> Array | None:
        """A member's payload, from one that may have it; None if that has not."""
        payload = np.empty(self._core.nbytes, np.uint8)

        async def fetch(start: int) -> None:
            where = self._core.piece(start)
            reply = await self._call(self._contact(source), self._fetch, {"start": start, "of": place})
            payload[where] = bytes_untrusted(reply.tensors, where)

        try:
            await self._all_pieces(source, fetch)
        except PEER_ERRORS:
            return None
        return payload

    async def _call(self, contact: Contact, method: str, body: Body, *tensors: Array) -> Reply:
        named = {"group": self._group.group_id, "size": self._core.nbytes, **body}
        piece_bytes = min(self._config.chunk_bytes, self._core.nbytes)
        # Who is asked for a payload may have to wait for it himself; what is brought is taken at once.
        timeout_s = self._config.sender_timeout_s * (2 if method == self._fetch else 1)
        return await placed(
            lambda: self._caller.call(contact, method, named, tensors, timeout_s=timeout_s, bulk_bytes=piece_bytes)
        )

    async def _all_pieces(self, place: int, move: Callable[[int], Awaitable[None]]) -> None:
        """Move all pieces of a payload to or from a member, as many at a time as fill the line.

        Raises:
          PEER_ERRORS: the first failure; the others are given up.
        """
        chunk_bytes = self._config.chunk_bytes
        window = BulkWindow.towards(
            self._caller.bulk,
            self._group.members[place].peer_id,
            start_bytes=max(chunk_bytes, self._config.window_bytes),
            most_bytes=_MAX_PIECES * chunk_bytes,
        )
        await window.move(self._core.starts, chunk_bytes, move)

    def _contact(self, place: int) -> Contact:
        return self._group.members[place].contact

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
