"""Fetching a whole state from whichever peers have it; see `net.averaging.state.sharing`.

Trust. Whoever is in the swarm may call itself a donor. All of a state comes from one donor: what does not have the
digest in the end is thrown away, and that donor is not asked again. What the newcomer cannot use (other shapes, an
absurd version, values that are no numbers) it says by `expects` and `accepts`, and other donors are asked. Donors that
do not answer a ping are passed over.
"""

import contextlib
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
from net.errors import CallFailed, NetError, PeerTimeout, PeerUnavailable, RemoteProtocolError
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
    """What has come of one donor's state so far."""

    offer: tuple[PeerId, int, Mapping[str, Any], Table, bytes]
    """Donor, version, facts, table and digest."""
    buffer: memoryview
    missing: set[int]
    """Pieces that have not come."""


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

    Returns: the state; its arrays are read-only. None: nobody is announced who might have one.

    Raises:
      StateUnavailable: somebody is, and no state was whole in time that could be used.
    """
    search = _Search(
        caller=caller,
        dht=dht,
        prefix=prefix,
        rng=rng,
        config=config,
        min_version=min_version,
        deadline=trio.current_time() + timeout_s,
        expects=expects,
    )
    with trio.move_on_at(search.deadline):
        pause_s = 0.1
        for _ in itertools.count() if attempts is None else range(attempts):
            for contact in await search.donors():
                try:
                    state = await search.state_of(contact)
                except RemoteProtocolError:
                    search.banned.add(contact.peer_id)
                    continue
                except NetError:
                    continue
                if accepts(state):
                    return state
                search.banned.add(contact.peer_id)
            # A donor may be back, or others announced, in a moment.
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)
    if search.num_announced:
        raise StateUnavailable(
            f"{search.num_announced} peers are announced as donors of {state_key(prefix)} from version {min_version} "
            "on, and none gave a state of use"
        )
    return None


@dataclass(kw_only=True, eq=False)
class _Search:
    """One search for a state; see `download_state`."""

    caller: Caller
    dht: DhtNode
    prefix: str
    rng: random.Random
    config: StateSharingConfig
    min_version: int
    deadline: float  # by trio's clock
    expects: Callable[[int, Table], bool]
    partial: _Partial | None = None
    banned: set[PeerId] = field(default_factory=set)
    num_announced: int = 0  # donors that the last look at the DHT found

    def __post_init__(self) -> None:
        self.open_method, self.chunk_method = state_methods(self.prefix)

    async def donors(self) -> list[Contact]:
        """Donors that live, the furthest first; at the same version in random order."""
        record = await self.dht.get(state_key(self.prefix))
        found = []
        for subkey, entry in record.entries.items() if isinstance(record, Dictionary) else ():
            try:
                version, raw = row_untrusted(entry.value, "an announcement", version=_ANY_VERSION, contact=rows(3))
                contact = parse_contact_untrusted(raw)
            except RemoteProtocolError:
                continue
            if contact.peer_id != self.caller.peer_id and str(contact.peer_id) == subkey:
                found.append((-version, self.rng.random(), contact))
        # An announcement may be old: a donor that is behind may be further by now, and is asked. But it is no sign that
        # there is a state of use.
        self.num_announced = sum(-version >= self.min_version for version, _, _ in found)
        in_order = [contact for _, _, contact in sorted(found, key=lambda item: item[:2])]
        return await self._living([contact for contact in in_order if contact.peer_id not in self.banned])

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

    async def state_of(self, contact: Contact) -> SharedState:
        """A whole state from this donor, with the pieces that it gave before.

        Raises:
          NetError: it has none that will do, it broke off, or would not be done in time; what came is kept.
          RemoteProtocolError: it does not keep to the rules.
        """
        offered = [] if self.partial is None else [self.partial.offer[-1]]
        body = {"min_version": self.min_version, "offered": offered}
        reply = await self.caller.call(contact, self.open_method, body, timeout_s=self.config.call_timeout_s)
        partial = self._parse_offer_untrusted(reply, contact.peer_id)
        _, version, facts, table, digest = partial.offer
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
            await self._becomes_too_slow(partial)
            errors.append(PeerTimeout(f"{contact} is too slow"))
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            for _ in range(self.config.window):
                nursery.start_soon(fetch)
        if errors:
            raise errors[0]
        self.partial = None
        return SharedState(version=version, tensors=receive_untrusted(table, partial.buffer, digest), facts=facts)

    async def _becomes_too_slow(self, partial: _Partial) -> None:
        """Return once the pieces come so slowly that the last would come too late."""
        began, num_wanted = trio.current_time(), len(partial.missing)
        while True:
            await trio.sleep(self.config.call_timeout_s)
            now, num_left = trio.current_time(), len(partial.missing)
            if num_left * (now - began) > (num_wanted - num_left) * (self.deadline - now):
                return

    def _parse_offer_untrusted(self, reply: Reply, donor: PeerId) -> _Partial:
        body, config = reply.body, self.config
        version, digest = VERSION.of_untrusted(body, "version"), DIGEST.of_untrusted(body, "digest")
        facts = MAPPING.of_untrusted(body, "facts")
        table: Any = body.get("table")
        if version < self.min_version:
            raise RemoteProtocolError(f"expected a state of version {self.min_version} or later, got {version}")
        nbytes = check_table_untrusted(table, max_bytes=config.max_bytes)
        if not self.expects(version, table):
            raise RemoteProtocolError(f"a state of version {version} and {len(table)} arrays is of no use here")
        offer = (donor, version, facts, table, digest)
        if self.partial is not None and self.partial.offer == offer:
            return self.partial
        # One state at a time: what came of another is given up, or newcomers would hold several.
        self.partial = None
        try:
            buffer = aligned_buffer(nbytes)
        except MemoryError as error:
            raise RemoteProtocolError(f"there is no memory for a state of {nbytes} bytes") from error
        missing = set(range(-(-nbytes // config.chunk_bytes)))
        self.partial = _Partial(offer, buffer, missing)
        return self.partial

    async def _fetch(self, contact: Contact, partial: _Partial, index: int) -> None:
        start = index * self.config.chunk_bytes
        target = partial.buffer[start : start + self.config.chunk_bytes]
        body = {"digest": partial.offer[-1], "index": index, "chunk_bytes": self.config.chunk_bytes}
        reply = await self.caller.call(contact, self.chunk_method, body, timeout_s=self.config.call_timeout_s)
        piece = reply.tensors[0] if len(reply.tensors) == 1 else None
        if not isinstance(piece, np.ndarray) or piece.dtype != np.uint8 or piece.shape != (target.nbytes,):
            raise RemoteProtocolError(f"expected a piece of {target.nbytes} bytes")
        target[:] = piece.data
        partial.missing.discard(index)
