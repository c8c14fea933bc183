"""Fetching a whole state from whichever peers have it; see `net.averaging.state.sharing`.

Trust. Whoever is in the swarm may call itself a donor. What does not have the digest in the end is thrown away. If it
all came from one donor, that one is not asked again; if several gave pieces, nobody knows who lied, and from then on
each has to give the whole. What the newcomer cannot use (other shapes, an absurd version, values that are no numbers)
it says by `expects` and `accepts`, and other donors are asked. Donors that do not answer a ping are passed over.
"""

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import trio

from net.averaging.state.buffer import Table, check_table_untrusted, receive_untrusted
from net.averaging.state.sharing import (
    DIGEST,
    VERSION,
    SharedState,
    StateSharingConfig,
    state_key,
    state_methods,
)
from net.dht.messages import parse_contact_untrusted
from net.dht.node import DhtNode
from net.dht.records import Dictionary
from net.errors import CallFailed, NetError, PeerTimeout, RemoteProtocolError
from net.identity import Contact, PeerId
from net.rpc.base import Caller, Reply
from net.rpc.service import PING
from net.wire.fields import MAPPING, integer, row_untrusted, rows
from net.wire.tensors import aligned_buffer

MAX_PINGED = 32
"""Donors that are looked at, the furthest first."""

_ANY_VERSION = integer(-(2**63), 2**63)


class StateUnavailable(NetError):
    """Donors are announced that should have had the state, and none gave it."""


@dataclass(slots=True, eq=False)
class _Partial:
    """What has come of one state so far."""

    version: int
    facts: Mapping[str, Any]
    table: Table
    digest: bytes
    buffer: memoryview
    missing: set[int]
    donors: set[PeerId] = field(default_factory=set)
    """Who gave pieces of it."""

    def is_of(self, version: int, facts: Mapping[str, Any], table: Table, digest: bytes) -> bool:
        """Whether this is the state that is offered."""
        return (self.version, self.facts, self.table, self.digest) == (version, facts, table, digest)


@dataclass(slots=True, kw_only=True, eq=False)
class _Download:
    """One search for a state."""

    min_version: int
    deadline: float
    """Of trio's clock."""
    expects: Callable[[int, Table], bool]
    accepts: Callable[[SharedState], bool]
    partial: _Partial | None = None
    banned: set[PeerId] = field(default_factory=set)
    may_mix: bool = True
    """Whether pieces of one state may come from several donors."""
    num_announced: int = 0
    """Donors that the last look at the DHT found."""


class StateDownload:
    """Searches for a state, one after another.

    Args:
      caller: places the calls. dht: where donors are announced.
      prefix: what is shared.
      rng: chooses among donors that are equally far.
    """

    def __init__(
        self, caller: Caller, dht: DhtNode, *, prefix: str, rng: random.Random, config: StateSharingConfig
    ) -> None:
        self._caller = caller
        self._dht = dht
        self._key = state_key(prefix)
        self._open_method, self._chunk_method = state_methods(prefix)
        self._rng = rng
        self._config = config

    async def run(
        self,
        *,
        min_version: int = 0,
        timeout_s: float = 600.0,
        attempts: int | None = None,
        expects: Callable[[int, Table], bool] = lambda version, table: True,
        accepts: Callable[[SharedState], bool] = lambda state: True,
    ) -> SharedState | None:
        """The freshest state that a donor gives.

        Args:
          min_version: states behind it are of no use.
          timeout_s: after which it is given up.
          attempts: how often all known donors are asked; None: again and again, for one may come up.
          expects: whether a state of this version and table is of use; asked before anything is allocated for it. The
            table has `[dtype name, shape]` for each array.
          accepts: whether the values are. A donor whose state is not is not asked again.

        Returns: the state; its arrays are read-only. None: nobody is announced who might have one.

        Raises:
          StateUnavailable: somebody is, and no state was whole in time that could be used.
        """
        deadline = trio.current_time() + timeout_s
        search = _Download(min_version=min_version, deadline=deadline, expects=expects, accepts=accepts)
        with trio.move_on_at(deadline):
            pause_s = 0.1
            for _ in itertools.count() if attempts is None else range(attempts):
                for contact in await self._donors(search):
                    state = await self._try(contact, search)
                    if state is not None:
                        return state
                # A donor may be back, or others announced, in a moment.
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, 5.0)
        if search.num_announced:
            raise StateUnavailable(
                f"{search.num_announced} peers are announced as donors of {self._key} from version {min_version} on, "
                "and none gave a state of use"
            )
        return None

    async def _try(self, contact: Contact, search: _Download) -> SharedState | None:
        """The state of one donor, if it is one of use."""
        try:
            state = await self._download_from(contact, search)
        except RemoteProtocolError:
            search.banned.add(contact.peer_id)
        except NetError:
            pass
        else:
            if search.accepts(state):
                return state
            search.banned.add(contact.peer_id)
        return None

    async def _donors(self, search: _Download) -> list[Contact]:
        """Whom to ask, the furthest first; at the same version in random order. Only those that live."""
        record = await self._dht.get(self._key)
        if not isinstance(record, Dictionary):
            search.num_announced = 0
            return []
        found = []
        for subkey, entry in record.entries.items():
            try:
                version, raw = row_untrusted(entry.value, "an announcement", version=_ANY_VERSION, contact=rows(3))
                contact = parse_contact_untrusted(raw)
            except RemoteProtocolError:
                continue
            is_own = contact.peer_id == self._caller.peer_id or str(contact.peer_id) != subkey
            if not is_own:
                found.append((-version, self._rng.random(), contact))
        # An announcement may be old: a donor that is behind may be further by now, and is asked. But it is no sign that
        # there is a state of use.
        search.num_announced = sum(-version >= search.min_version for version, _, _ in found)
        in_order = [contact for _, _, contact in sorted(found, key=lambda item: item[:2])]
        return await self._living([contact for contact in in_order if contact.peer_id not in search.banned])

    async def _living(self, contacts: list[Contact]) -> list[Contact]:
        """Those that answer a ping: all dead ones together cost one timeout."""
        living: set[PeerId] = set()

        async def ping(contact: Contact) -> None:
            try:
                await self._caller.call(contact, PING, {}, timeout_s=self._config.ping_timeout_s)
            except CallFailed:
                living.add(contact.peer_id)  # it answers
            except NetError:
                return
            else:
                living.add(contact.peer_id)

        async with trio.open_nursery() as nursery:
            for contact in contacts[:MAX_PINGED]:
                nursery.start_soon(ping, contact)
        return [contact for contact in contacts if contact.peer_id in living]

    async def _download_from(self, contact: Contact, search: _Download) -> SharedState:
        """A whole state from this donor, with what others gave of the same one.

        Raises:
          NetError: it has none that will do, it broke off, or would not be done in time; what came is in
            `search.partial`.
          RemoteProtocolError: it does not keep to the rules.
        """
        reply = await self._caller.call(
            contact,
            self._open_method,
            {
                "min_version": search.min_version,
                "offered": [] if search.partial is None else [search.partial.digest],
            },
            timeout_s=self._config.call_timeout_s,
        )
        partial = self._parse_offer_untrusted(reply, contact.peer_id, search)
        chunks = iter(sorted(partial.missing))
        errors: list[NetError] = []

        async def fetch() -> None:
            for index in chunks:
                try:
                    await self._fetch(contact, partial, index)
                except NetError as error:
                    errors.append(error)
                    nursery.cancel_scope.cancel()
                    return
            if not partial.missing:
                nursery.cancel_scope.cancel()

        async def watch() -> None:
            if not await self._would_end_in_time(partial, search.deadline):
                errors.append(PeerTimeout(f"{contact} is too slow"))
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            for _ in range(self._config.window):
                nursery.start_soon(fetch)
        if errors:
            raise errors[0]
        search.partial = None
        try:
            packed = receive_untrusted(partial.table, partial.buffer, partial.digest)
        except RemoteProtocolError as error:
            if partial.donors == {contact.peer_id}:
                raise
            search.may_mix = False
            raise StateUnavailable("pieces from several donors do not make up a state") from error
        return SharedState(version=partial.version, tensors=packed.tensors(), facts=partial.facts)

    async def _would_end_in_time(self, partial: _Partial, deadline: float) -> bool:
        """Returns False once the pieces come so slowly that the last would come too late; else not at all."""
        began, num_wanted = trio.current_time(), len(partial.missing)
        while True:
            await trio.sleep(self._config.call_timeout_s)
            now, num_left = trio.current_time(), len(partial.missing)
            if num_left * (now - began) > (num_wanted - num_left) * (deadline - now):
                return False

    def _parse_offer_untrusted(self, reply: Reply, donor: PeerId, search: _Download) -> _Partial:
        body, config = reply.body, self._config
        version, digest = VERSION.of_untrusted(body, "version"), DIGEST.of_untrusted(body, "digest")
        facts = MAPPING.of_untrusted(body, "facts")
        table: Any = body.get("table")
        if version < search.min_version:
            raise RemoteProtocolError(f"expected a state of version {search.min_version} or later, got {version}")
        nbytes = check_table_untrusted(table, max_bytes=config.max_bytes)
        if not search.expects(version, table):
            raise RemoteProtocolError(f"a state of version {version} and {len(table)} arrays is of no use here")
        known = search.partial
        is_same = known is not None and known.is_of(version, facts, table, digest)
        if known is not None and is_same and (search.may_mix or known.donors <= {donor}):
            return known
        # One state at a time: what came of another is given up, or newcomers would hold several.
        search.partial = None
        try:
            buffer = aligned_buffer(nbytes)
        except MemoryError as error:
            raise RemoteProtocolError(f"there is no memory for a state of {nbytes} bytes") from error
        missing = set(range(-(-nbytes // config.chunk_bytes)))
        search.partial = _Partial(version, facts, table, digest, buffer, missing)
        return search.partial

    async def _fetch(self, contact: Contact, partial: _Partial, index: int) -> None:
        start = index * self._config.chunk_bytes
        target = partial.buffer[start : start + self._config.chunk_bytes]
        body = {"digest": partial.digest, "index": index, "chunk_bytes": self._config.chunk_bytes}
        reply = await self._caller.call(contact, self._chunk_method, body, timeout_s=self._config.call_timeout_s)
        if len(reply.tensors) != 1:
            raise RemoteProtocolError(f"expected one piece of a state, got {len(reply.tensors)}")
        (piece,) = reply.tensors
        if not isinstance(piece, np.ndarray) or piece.dtype != np.uint8 or piece.shape != (target.nbytes,):
            raise RemoteProtocolError(f"expected a piece of {target.nbytes} bytes")
        target[:] = piece.data
        partial.missing.discard(index)
        partial.donors.add(contact.peer_id)
