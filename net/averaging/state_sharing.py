"""A whole state from a peer that has it: for one that joins late, or fell behind.

Theory of operation. Donors announce under the DHT key `prefix.state` how far their state is (its *version*, such as the
number of trunk updates). Who needs one asks the donor that is furthest: `open` makes it take a snapshot (or offers the
one that it just took for another) and answers with table and digest; `chunk` then fetches the snapshot piece by piece,
a few at a time. A lost connection costs the pieces that were on their way: the download goes on with any donor that
offers the same digest, first of all the same one again. Another digest is another state, and begins anew. What does not
have the digest in the end is thrown away, and its donor not asked again.
"""

import itertools
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import trio

from net.averaging.state_buffer import StateBuffer, check_table_untrusted, pack, receive_untrusted
from net.dht.messages import contact_to_wire, parse_contact_untrusted
from net.dht.node import DhtNode
from net.dht.records import Dictionary
from net.errors import CallRefused, NetError, RemoteProtocolError
from net.identity import Contact, PeerId
from net.rpc.base import Caller, Reply, Request
from net.wire.tensors import Tensor, aligned_buffer

DIGEST_BYTES = 32
MAX_VERSION = 2**62


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedState:
    """A state and how far it is."""

    version: int
    """Grows with training; the highest is the freshest."""
    tensors: tuple[Tensor, ...]
    """Its arrays, in an order that all peers of one prefix share."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Small things that belong to it; what the RPC layer carries in a body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSharingConfig:
    """Periods and bounds."""

    announce_period_s: float = 30.0
    """Between two announcements; they live three times as long."""
    snapshot_lifetime_s: float = 60.0
    """How long a snapshot is kept after it was last asked for. Within it later newcomers get the same one, unless it
    is more than `max_lag` versions old."""
    max_lag: int = 100
    """See `snapshot_lifetime_s`."""
    max_snapshots: int = 2
    """Kept at once: one that is being downloaded and a fresher one. Each is a whole state in memory."""
    chunk_bytes: int = 2**20
    """Of a piece: what others wait for behind it on the same connection."""
    window: int = 4
    """Pieces on their way to a newcomer."""
    call_timeout_s: float = 30.0
    """For one piece, and for the snapshot."""
    max_bytes: int = 2**34
    """Of a state that is accepted."""

    def __post_init__(self) -> None:
        for name in ("announce_period_s", "snapshot_lifetime_s", "call_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("max_snapshots", "chunk_bytes", "window", "max_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class StateSource:
    """Where a donor's state comes from.

    Args:
      version: how far the state is now; called often.
      snapshot: a consistent copy of it, or at least one that nobody writes to before it was packed.
    """

    def __init__(self, version: Callable[[], int], snapshot: Callable[[], Awaitable[SharedState]]) -> None:
        self.version = version
        self.snapshot = snapshot


@dataclass(slots=True, eq=False)
class _Snapshot:
    """A packed state, and when it was last asked for."""

    version: int
    facts: Mapping[str, Any]
    packed: StateBuffer
    used_at: float


@dataclass(slots=True, eq=False)
class _Download:
    """What has come of one state so far, from whichever donors."""

    version: int
    facts: Mapping[str, Any]
    table: list[list[Any]]
    digest: bytes
    buffer: memoryview
    missing: set[int]


class StateSharing:
    """Serves this peer's state and downloads others'. Make one for each caller and prefix.

    Args:
      caller: places and serves the calls. dht: where donors are announced.
      prefix: what is shared. source: this peer's state; None for one that has nothing to offer.
      rng: chooses among donors that are equally far.
    """

    def __init__(
        self,
        caller: Caller,
        dht: DhtNode,
        *,
        prefix: str,
        source: StateSource | None,
        rng: random.Random,
        config: StateSharingConfig = StateSharingConfig(),
    ) -> None:
        self._caller = caller
        self._dht = dht
        self._key = f"{prefix}.state"
        self._open_method = f"averaging.{prefix}.state.open"
        self._chunk_method = f"averaging.{prefix}.state.chunk"
        self._source = source
        self._rng = rng
        self._config = config
        self._snapshots: dict[bytes, _Snapshot] = {}
        self._taking = trio.Lock()
        if source is not None and caller.address is not None:
            caller.add_handler(self._open_method, self._serve_open, max_concurrent=16)
            caller.add_handler(self._chunk_method, self._serve_chunk, max_concurrent=64)

    async def run(self) -> None:
        """Announce this peer as a donor, until cancelled. A client, or a peer without a state, has nothing to do."""
        address, config = self._caller.address, self._config
        if self._source is None or address is None:
            return
        contact = contact_to_wire(Contact(self._caller.peer_id, address))
        while True:
            await self._dht.store(
                self._key,
                [self._source.version(), contact],
                subkey=str(self._caller.peer_id),
                expiration=self._dht.clock.now() + 3 * config.announce_period_s,
            )
            await trio.sleep(config.announce_period_s)
            self._forget_old()

    async def download(
        self, *, min_version: int = 0, timeout_s: float, attempts: int | None = None
    ) -> SharedState | None:
        """The freshest state that a donor gives.

        Args:
          min_version: states behind it are of no use.
          timeout_s: after which it is given up.
          attempts: how often all known donors are asked; None: again and again, for one may come up.

        Returns: the state; its arrays are read-only. None: no donor had one, or none was whole in time.
        """
        partial: dict[bytes, _Download] = {}
        banned: set[PeerId] = set()
        with trio.move_on_after(timeout_s):
            pause_s = 0.1
            for _ in itertools.count() if attempts is None else range(attempts):
                for contact in await self._donors(min_version, banned):
                    try:
                        state = await self._download_from(contact, min_version, partial)
                    except RemoteProtocolError:
                        banned.add(contact.peer_id)
                    except NetError:
                        continue
                    else:
                        return state
                # A donor may be back, or others announced, in a moment.
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, 5.0)
        return None

    async def _donors(self, min_version: int, banned: set[PeerId]) -> list[Contact]:
        """Whom to ask, the furthest first; at the same version in random order."""
        record = await self._dht.get(self._key)
        if not isinstance(record, Dictionary):
            return []
        found = []
        for subkey, entry in record.entries.items():
            try:
                version, contact = _parse_announcement_untrusted(entry.value)
            except RemoteProtocolError:
                continue
            is_own = contact.peer_id in (self._caller.peer_id, *banned) or str(contact.peer_id) != subkey
            # An announcement may be old: its donor is further by now.
            if not is_own:
                found.append((-version, self._rng.random(), contact))
        return [contact for _, _, contact in sorted(found, key=lambda item: item[:2])]

    async def _download_from(self, contact: Contact, min_version: int, partial: dict[bytes, _Download]) -> SharedState:
        """A whole state from this donor, with what others gave of the same one.

        Raises:
          NetError: it has none that will do, or it broke off; what came is in `partial`.
          RemoteProtocolError: it does not keep to the rules.
        """
        reply = await self._caller.call(
            contact,
            self._open_method,
            {"min_version": min_version, "offered": list(partial)},
            timeout_s=self._config.call_timeout_s,
        )
        download = self._parse_offer_untrusted(reply, min_version, partial)
        chunks = iter(sorted(download.missing))
        errors: list[NetError] = []

        async def fetch() -> None:
            for index in chunks:
                try:
                    await self._fetch(contact, download, index)
                except NetError as error:
                    errors.append(error)
                    nursery.cancel_scope.cancel()
                    return

        async with trio.open_nursery() as nursery:
            for _ in range(self._config.window):
                nursery.start_soon(fetch)
        if errors:
            raise errors[0]
        del partial[download.digest]
        packed = receive_untrusted(download.table, download.buffer, download.digest)
        return SharedState(version=download.version, tensors=packed.tensors(), facts=download.facts)

    def _parse_offer_untrusted(self, reply: Reply, min_version: int, partial: dict[bytes, _Download]) -> _Download:
        body, config = reply.body, self._config
        version, digest, facts = (body.get(name) for name in ("version", "digest", "facts"))
        table: Any = body.get("table")
        if type(version) is not int or not min_version <= version <= MAX_VERSION:
            raise RemoteProtocolError(f"expected a state of version {min_version} or later, got {version!r:.80}")
        if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES or not isinstance(facts, dict):
            raise RemoteProtocolError(f"expected a digest of {DIGEST_BYTES} bytes and a map of facts")
        nbytes = check_table_untrusted(table, max_bytes=config.max_bytes)
        known = partial.get(digest)
        if known is not None and known.table == table:
            return known
        # One state at a time: what came of another is given up, or newcomers would hold several.
        partial.clear()
        missing = set(range(-(-nbytes // config.chunk_bytes)))
        partial[digest] = _Download(version, facts, table, digest, aligned_buffer(nbytes), missing)
        return partial[digest]

    async def _fetch(self, contact: Contact, download: _Download, index: int) -> None:
        start = index * self._config.chunk_bytes
        target = download.buffer[start : start + self._config.chunk_bytes]
        body = {"digest": download.digest, "index": index, "chunk_bytes": self._config.chunk_bytes}
        reply = await self._caller.call(contact, self._chunk_method, body, timeout_s=self._config.call_timeout_s)
        if len(reply.tensors) != 1:
            raise RemoteProtocolError(f"expected one piece of a state, got {len(reply.tensors)}")
        (piece,) = reply.tensors
        if not isinstance(piece, np.ndarray) or piece.dtype != np.uint8 or piece.shape != (target.nbytes,):
            raise RemoteProtocolError(f"expected a piece of {target.nbytes} bytes")
        target[:] = piece.data
        download.missing.discard(index)

    async def _serve_open(self, request: Request) -> Reply:
        min_version, offered = request.body.get("min_version"), request.body.get("offered")
        if type(min_version) is not int or not isinstance(offered, list):
            raise CallRefused("expected min_version, an integer, and offered, a list of digests")
        assert self._source is not None
        version = self._source.version()
        if version < min_version:
            raise CallRefused(f"this peer's state is of version {version}, {min_version} was asked for")
        snapshot = await self._snapshot(min_version, [each for each in offered if isinstance(each, bytes)])
        if snapshot.version < min_version:
            raise CallRefused(f"this peer's state is of version {snapshot.version}, {min_version} was asked for")
        return Reply(
            body={
                "version": snapshot.version,
                "digest": snapshot.packed.digest,
                "table": snapshot.packed.table,
                "facts": snapshot.facts,
            }
        )

    async def _snapshot(self, min_version: int, offered: list[bytes]) -> _Snapshot:
        """One that the newcomer has begun to fetch, one that is fresh enough, or a new one."""
        assert self._source is not None
        async with self._taking:  # several newcomers at once share one
            self._forget_old()
            oldest = max(min_version, self._source.version() - self._config.max_lag)
            fresh = [digest for digest, held in self._snapshots.items() if held.version >= oldest]
            for digest in (*(each for each in offered if each in fresh), *reversed(fresh)):
                self._snapshots[digest].used_at = trio.current_time()
                return self._snapshots[digest]
            state = await self._source.snapshot()
            snapshot = _Snapshot(state.version, dict(state.facts), pack(state.tensors), trio.current_time())
            while len(self._snapshots) >= self._config.max_snapshots:
                del self._snapshots[min(self._snapshots, key=lambda digest: self._snapshots[digest].used_at)]
            self._snapshots[snapshot.packed.digest] = snapshot
            return snapshot

    async def _serve_chunk(self, request: Request) -> Reply:
        digest, index, size = (request.body.get(name) for name in ("digest", "index", "chunk_bytes"))
        snapshot = self._snapshots.get(digest) if isinstance(digest, bytes) else None
        if snapshot is None:
            raise CallRefused("this state is no longer held; open it again")
        if type(size) is not int or not 1 <= size <= 2**24 or type(index) is not int or index < 0:
            raise CallRefused(f"expected a piece's number and size (1 to {2**24}), got {index!r:.40} and {size!r:.40}")
        piece = snapshot.packed.chunk(index, size)
        if not piece.size:
            raise CallRefused(f"a state of {snapshot.packed.buffer.nbytes} bytes has no piece {index} of {size}")
        snapshot.used_at = trio.current_time()
        return Reply(tensors=(piece,))

    def _forget_old(self) -> None:
        oldest = trio.current_time() - self._config.snapshot_lifetime_s
        for digest in [each for each, held in self._snapshots.items() if held.used_at < oldest]:
            del self._snapshots[digest]


def _parse_announcement_untrusted(value: Any) -> tuple[int, Contact]:
    """(version, contact) of a donor.

    Raises:
      RemoteProtocolError: it is anything else.
    """
    if not isinstance(value, list) or len(value) != 2 or type(value[0]) is not int:
        raise RemoteProtocolError("an announcement is [version, contact]")
    return value[0], parse_contact_untrusted(value[1])
