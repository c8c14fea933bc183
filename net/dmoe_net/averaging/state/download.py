"""Fetching a whole state from whichever peers have it; see `dmoe_net.averaging.state.sharing`.

A state is what the furthest donor offers; others give pieces of it if they say that theirs has the same digest and the
same hashes of pieces. A piece with another hash is thrown away, and its donor is not asked again. If all pieces are
right and the whole does not have the digest, then the hashes were a lie, and none of those who vouched for them is
asked again; an honest donor computes both from its own bytes.
"""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
import trio

from dmoe_net.averaging.state.buffer import (
    HASH_BYTES,
    MAX_PIECES,
    OVERDUE_S,
    Pieces,
    Table,
    check_table_untrusted,
    piece_hash,
    receive_untrusted,
)
from dmoe_net.averaging.state.sharing import (
    CHUNK_BYTES,
    DIGEST,
    VERSION,
    SharedState,
    StateSharingConfig,
    state_key,
    state_methods,
)
from dmoe_net.averaging.window import BulkWindow
from dmoe_net.dht.messages import parse_contact_untrusted
from dmoe_net.dht.node import DhtNode
from dmoe_net.errors import CallFailed, CallRefused, NetError, PeerUnavailable, RemoteProtocolError
from dmoe_net.identity import Contact, PeerId
from dmoe_net.nursery import background_nursery
from dmoe_net.rpc.base import Caller
from dmoe_net.rpc.service import PING
from dmoe_net.wire.fields import MAPPING, integer, row_untrusted, rows
from dmoe_net.wire.tensors import aligned_buffer

MAX_PINGED = 32
"""Donors that are looked at, the furthest first."""

_ANY_VERSION = integer(-(2**63), 2**63)


class StateUnavailable(NetError):
    """Donors are announced that should have had the state, and none gave it."""


class StateRefused(StateUnavailable):
    """All donors that are announced said that they have no state of use now."""


async def download_state(
    caller: Caller,
    dht: DhtNode,
    *,
    prefix: str,
    rng: random.Random,
    config: StateSharingConfig,
    min_version: int = 0,
    timeout_s: float = 600.0,
    attempts: int | None = None,
    expects: Callable[[int, Table], bool] = lambda version, table: True,
    accepts: Callable[[SharedState], bool] = lambda state: True,
    known: Sequence[Contact] | None = None,
) -> SharedState | None:
    """The freshest state that a donor gives.

    Args:
      caller: places the calls. dht: where donors are announced.
      prefix: what is shared.
      rng: chooses among donors that are equally far.
      min_version: states behind it are of no use.
      timeout_s: after which it is given up.
      attempts: how often all known donors are asked; None: again and again, for one may come up.
      expects: whether a state of this version and table is of use; asked before anything is allocated for it. The
        table has `[dtype name, shape]` for each array.
      accepts: whether the values are. A donor whose state is not is not asked again.
      known: the donors, the one to begin with first; None: those that are announced in the DHT.

    Returns: the state; its arrays are read-only. None: nobody is announced who might have one.

    Raises:
      StateUnavailable: somebody is, and no state was whole in time that could be used.
      StateRefused: all who are announced said that they have none of use now.
    """
    deadline = trio.current_time() + timeout_s
    search = _Search(caller, dht, prefix, rng, config, min_version, deadline, expects, accepts, known)
    with trio.move_on_at(deadline):
        pause_s = 0.1
        for _ in itertools.count() if attempts is None else range(attempts):
            donors = await search.donors()
            for place, contact in enumerate(donors):
                if contact.peer_id in search.banned:  # since they were looked up
                    continue
                try:
                    return await search.state_of(contact, donors[place + 1 :])
                except RemoteProtocolError:
                    search.banned.add(contact.peer_id)
                except CallRefused:
                    search.announced.discard(contact.peer_id)
                except NetError:
                    continue
            # A donor may be back, or others announced, in a moment.
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)
    if search.num_announced:
        error = StateUnavailable if search.announced else StateRefused
        raise error(
            f"{search.num_announced} peers are announced as donors of {state_key(prefix)} from version {min_version} "
            "on, and none gave a state of use"
        )
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Offer:
    version: int
    facts: Mapping[str, Any]
    table: Table
    nbytes: int
    digest: bytes
    chunk_bytes: int
    hashes: np.ndarray
    """uint8 [pieces, 32]."""

    def is_same(self, other: "_Offer") -> bool:
        """True if pieces of both are pieces of one state, as far as can be told."""
        is_alike = (self.digest, self.table, self.chunk_bytes) == (other.digest, other.table, other.chunk_bytes)
        return is_alike and np.array_equal(self.hashes, other.hashes)


class _Partial:
    """One state as far as it has come."""

    def __init__(self, offer: _Offer) -> None:
        self.offer = offer
        self.buffer = aligned_buffer(offer.nbytes)
        self.pieces = Pieces(offer.nbytes, offer.chunk_bytes)
        self.donors: dict[PeerId, _Offer] = {}
        """Peers that vouch for it, the first one first."""
        self.errors: list[NetError] = []
        """Failures of donors since it was last asked for."""
        self.waiting = trio.lowlevel.ParkingLot()
        """Tasks that wait for something to be asked for, or for the whole."""


@dataclass(eq=False)
class _Search:
    caller: Caller
    dht: DhtNode
    prefix: str
    rng: random.Random
    config: StateSharingConfig
    min_version: int
    deadline: float  # by trio's clock
    expects: Callable[[int, Table], bool]
    accepts: Callable[[SharedState], bool]
    known: Sequence[Contact] | None
    partial: _Partial | None = None
    banned: set[PeerId] = field(default_factory=set)
    num_announced: int = 0  # donors that the last look at the DHT found
    announced: set[PeerId] = field(default_factory=set)  # those of them that have not refused

    async def donors(self) -> list[Contact]:
        """Donors that live, the furthest first; at the same version in random order."""
        known = self.known
        found = await self._in_dht() if known is None else [(self.min_version, contact) for contact in known]
        # An announcement may be old: a donor that is behind may be further by now, and is asked. But it is no sign that
        # there is a state of use.
        self.announced = {contact.peer_id for version, contact in found if version >= self.min_version}
        self.num_announced = len(self.announced)
        return await self._living([contact for _, contact in found if contact.peer_id not in self.banned])

    async def _in_dht(self) -> list[tuple[int, Contact]]:
        """All who announce a state, with its version."""
        found = list[tuple[int, float, Contact]]()
        for entry in await self.dht.get(state_key(self.prefix)):
            try:
                version, raw = row_untrusted(entry.value, "an announcement", version=_ANY_VERSION, contact=rows(3))
                contact = parse_contact_untrusted(raw)
            except RemoteProtocolError:
                continue
            if contact.peer_id != self.caller.peer_id and contact.peer_id == entry.owner:
                found.append((-version, self.rng.random(), contact))
        return [(-negative, contact) for negative, _, contact in sorted(found, key=lambda item: item[:2])]

    async def _living(self, contacts: list[Contact]) -> list[Contact]:
        """The contacts that answer a ping: all dead ones together cost one timeout."""
        living: set[PeerId] = set()

        async def ping(contact: Contact) -> None:
            with contextlib.suppress(PeerUnavailable, RemoteProtocolError):
                with contextlib.suppress(CallFailed):  # it answers
                    await self.caller.call(contact, PING, {}, timeout_s=self.config.ping_timeout_s)
                living.add(contact.peer_id)

        async with trio.open_nursery() as nursery:
            for contact in contacts[:MAX_PINGED]:
                nursery.start_soon(ping, contact)
        return [contact for contact in contacts if contact.peer_id in living]

    async def state_of(self, first: Contact, others: Sequence[Contact]) -> SharedState:
        """The whole state that the first donor has, from all donors that have it.

        Raises:
          NetError: it has none that will do, or it did not come whole, or not in time; what came is kept.
        """
        offer = await self._offer_untrusted(first)
        if self.partial is None or not self.partial.offer.is_same(offer):
            # One state at a time: what came of another is given up, or newcomers would hold several.
            self.partial = None
            try:
                self.partial = _Partial(offer)
            except MemoryError as error:
                raise RemoteProtocolError(f"there is no memory for a state of {offer.nbytes} bytes") from error
        partial, left = self.partial, iter(others)
        partial.donors[first.peer_id] = offer
        partial.errors.clear()

        async def until_whole(scope: trio.CancelScope) -> None:  # some donor may never answer
            while partial.pieces.num_missing:
                await partial.waiting.park()
            scope.cancel()

        async with background_nursery() as nursery:
            nursery.start_soon(self._watch, partial, nursery.cancel_scope)
            nursery.start_soon(until_whole, nursery.cancel_scope)
            async with trio.open_nursery() as fetching:
                fetching.start_soon(self._fetch_from, first, partial)
                for _ in range(self.config.max_donors - 1):
                    fetching.start_soon(self._fetch_from_others, left, partial)
        if partial.pieces.num_missing:
            failure = next(iter(partial.errors), None)
            why = ", or too slowly" if failure is None else f": {failure}"
            raise StateUnavailable(f"{partial.pieces.num_missing} pieces did not come{why}") from failure
        self.partial = None
        try:
            tensors = receive_untrusted(offer.table, partial.buffer, offer.digest)
        except RemoteProtocolError as error:
            self.banned.update(partial.donors)
            raise StateUnavailable(str(error)) from error
        # The digest does not cover version and facts: they are as somebody said who has not been caught lying.
        said = next((each for peer_id, each in partial.donors.items() if peer_id not in self.banned), offer)
        state = SharedState(version=said.version, tensors=tensors, facts=said.facts)
        if not self.accepts(state):
            self.banned.update(partial.donors)
            raise StateUnavailable("the values are of no use")
        return state

    async def _watch(self, partial: _Partial, scope: trio.CancelScope) -> None:
        """Cancel everything once the pieces come so slowly that the last would come too late."""
        began, num_wanted = trio.current_time(), partial.pieces.num_missing
        while True:
            await trio.sleep(self.config.call_timeout_s)
            now, num_left = trio.current_time(), partial.pieces.num_missing
            if num_left * (now - began) > (num_wanted - num_left) * (self.deadline - now):
                scope.cancel()

    async def _fetch_from_others(self, left: Iterator[Contact], partial: _Partial) -> None:
        """Ask one donor after the other for this very state, and fetch from those who have it."""
        for contact in left:
            if not partial.pieces.num_missing:
                return
            try:
                offer = await self._offer_untrusted(contact, like=partial.offer)
            except RemoteProtocolError:
                self.banned.add(contact.peer_id)
                continue
            except NetError:
                continue
            if offer.is_same(partial.offer):
                partial.donors[contact.peer_id] = offer
                await self._fetch_from(contact, partial)

    async def _fetch_from(self, contact: Contact, partial: _Partial) -> None:
        """Fetch pieces from one donor until all are there, from whomever, or until it fails."""
        donor, pieces, chunk_bytes = contact.peer_id, partial.pieces, partial.offer.chunk_bytes
        window = BulkWindow.towards(self.caller.bulk, donor, start_bytes=self.config.window * chunk_bytes)
        under_way: set[int] = set()

        async def fetch(index: int) -> None:
            try:
                await self._fetch_untrusted(contact, partial, index)
                under_way.discard(index)
                partial.waiting.unpark_all()
            except NetError as error:
                partial.errors.append(error)
                if isinstance(error, RemoteProtocolError):
                    self.banned.add(donor)
                nursery.cancel_scope.cancel()
            finally:
                window.give_back(chunk_bytes)

        try:
            async with trio.open_nursery() as nursery:
                while pieces.num_missing:
                    await window.take(chunk_bytes)
                    index = pieces.next_for(donor, trio.current_time())
                    if index is not None:
                        under_way.add(index)
                        nursery.start_soon(fetch, index)
                        continue
                    window.give_back(chunk_bytes)
                    with trio.move_on_after(OVERDUE_S):
                        await partial.waiting.park()
        finally:
            pieces.lost(donor, under_way)
            partial.waiting.unpark_all()

    async def _offer_untrusted(self, contact: Contact, *, like: _Offer | None = None) -> _Offer:
        """Ask a donor for its offer; with `like`, for one of that version and perhaps the same."""
        known = like if like is not None else None if self.partial is None else self.partial.offer
        body: dict[str, Any] = {
            "min_version": self.min_version,
            "offered": [] if known is None else [known.digest],
            "version": None if like is None else like.version,
        }
        open_method, _ = state_methods(self.prefix)
        reply = await self.caller.call(contact, open_method, body, timeout_s=self.config.call_timeout_s)
        said = reply.body
        table: Any = said.get("table")
        version, digest = VERSION.of_untrusted(said, "version"), DIGEST.of_untrusted(said, "digest")
        facts, chunk_bytes = MAPPING.of_untrusted(said, "facts"), CHUNK_BYTES.of_untrusted(said, "chunk_bytes")
        if version < self.min_version:
            raise RemoteProtocolError(f"expected a state of version {self.min_version} or later, got {version}")
        nbytes = check_table_untrusted(table, max_bytes=self.config.max_bytes)
        if not self.expects(version, table):
            raise RemoteProtocolError(f"a state of version {version} and {len(table)} arrays is of no use here")
        num_pieces, hashes = -(-nbytes // chunk_bytes), reply.tensors[0] if len(reply.tensors) == 1 else None
        if num_pieces > MAX_PIECES or not _is_bytes(hashes, (num_pieces, HASH_BYTES)):
            raise RemoteProtocolError(f"expected a hash of {HASH_BYTES} bytes for each of {num_pieces} pieces")
        return _Offer(version, facts, table, nbytes, digest, chunk_bytes, hashes)

    async def _fetch_untrusted(self, contact: Contact, partial: _Partial, index: int) -> None:
        offer, target = partial.offer, partial.buffer[partial.pieces.where(index)]
        body, (_, chunk_method) = {"digest": offer.digest, "index": index}, state_methods(self.prefix)
        reply = await self.caller.call(
            contact, chunk_method, body, timeout_s=self.config.call_timeout_s, bulk_bytes=target.nbytes
        )
        piece = reply.tensors[0] if len(reply.tensors) == 1 else None
        if not _is_bytes(piece, (target.nbytes,)):
            raise RemoteProtocolError(f"expected a piece of {target.nbytes} bytes")
        if piece_hash(piece) != offer.hashes[index].tobytes():
            raise RemoteProtocolError(f"piece {index} of the state does not have its hash")
        if partial.pieces.came(index):
            target[:] = piece.data


def _is_bytes(tensor: object, shape: tuple[int, ...]) -> TypeGuard[np.ndarray]:
    return isinstance(tensor, np.ndarray) and tensor.dtype == np.uint8 and tensor.shape == shape
