"""A whole state from a peer that has it: for one that joins late, or fell behind.

Donors announce under the DHT key `prefix.state` how far their state is (its *version*, such as the number of trunk
updates). A newcomer asks the donor that is furthest: `open` makes it take a snapshot, or offers one that it took for
another; `chunk` fetches the snapshot piece by piece. Two states with one digest are one state: the newcomer asks other
donors for the version and digest that it got from the first one, and fetches pieces from all who have just that. So
that one who lies costs its own pieces and no more, donors also give a hash of each piece.

    open   {"min_version": int, "offered": digests that the newcomer has begun to fetch,
            "version": a state of any other version is of no use; not there: of any version}
           answer {"version", "digest", "table", "facts", "chunk_bytes": of a piece}
                  one uint8 tensor [pieces, 32]: their SHA-256
    chunk  {"digest", "index"}                       answer: one uint8 tensor, the piece
"""

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import trio

from dmoe_net.averaging.state.buffer import HASH_BYTES, MAX_PIECES, StateBuffer, pack, piece_hash
from dmoe_net.dht.entries import MAX_LIFE_S
from dmoe_net.dht.messages import contact_to_wire
from dmoe_net.dht.node import DhtNode
from dmoe_net.errors import CallRefused, PeerBusy
from dmoe_net.identity import Contact
from dmoe_net.rpc.base import Caller, Reply, Request, handlers, read_request
from dmoe_net.wire.fields import Field, integer, octets, optional, several
from dmoe_net.wire.tensors import Tensor

DIGEST = octets(32, 32)
MAX_VERSION = 2**62
VERSION = integer(0, MAX_VERSION)
MAX_CHUNK_BYTES = 2**24
CHUNK_BYTES = integer(1, MAX_CHUNK_BYTES)


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
    """Seconds between two announcements, which live three times as long."""
    snapshot_lifetime_s: float = 60.0
    """Seconds that a snapshot is kept after it was last asked for."""
    max_lag: int = 100
    """Versions by which a snapshot may be behind for a later newcomer to get it, too."""
    max_snapshots: int = 2
    """Snapshots kept at once: one that is being downloaded and a fresher one. Each is a whole state in memory."""
    chunk_bytes: int = 2**20
    """Bytes in a piece, at most 16 MiB; more where a state would have over 65,536 pieces."""
    window: int = 4
    """Pieces on their way from each donor to a newcomer, to begin with. On longer lines the window grows as far as
    these carry and the memory budget allows (`dmoe_net.rpc.bulk`)."""
    max_donors: int = 8
    """Donors from which a newcomer fetches at once."""
    snapshot_period_s: float = 2.0
    """Fewest seconds between two snapshots, whatever is asked for: each costs a copy of the state and a digest."""
    call_timeout_s: float = 30.0
    """Seconds that one piece, or the snapshot, may take."""
    ping_timeout_s: float = 3.0
    """A donor that does not answer a ping for so long is passed over. An announcement outlives its peer."""
    max_bytes: int = 2**34
    """Bytes of the largest state that is accepted."""

    def __post_init__(self) -> None:
        for name in ("announce_period_s", "snapshot_lifetime_s", "call_timeout_s", "ping_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("max_snapshots", "chunk_bytes", "window", "max_donors", "max_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.chunk_bytes > MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes must be at most {MAX_CHUNK_BYTES}, got {self.chunk_bytes}")


def state_key(prefix: str) -> str:
    """The DHT key under which donors are announced."""
    return f"{prefix}.state"


def state_methods(prefix: str) -> tuple[str, str]:
    """Methods of a donor: one for a snapshot, one for a piece of it."""
    return f"averaging.{prefix}.state.open", f"averaging.{prefix}.state.chunk"


@dataclass(frozen=True, slots=True)
class StateSource:
    """The source of a donor's state."""

    version: Callable[[], int]
    """Returns how far the state is now; called often."""
    snapshot: Callable[[], Awaitable[SharedState]]
    """Returns a consistent copy of it, or at least one that nobody writes to before it was packed."""


@dataclass(slots=True, eq=False)
class _Snapshot:
    version: int
    facts: Mapping[str, Any]
    packed: StateBuffer
    used_at: float  # when it was last asked for
    chunk_bytes: int
    hashes: np.ndarray  # uint8 [pieces, 32]
    left: set[int]  # pieces that nobody has asked for since it was last opened


@dataclass(eq=False)
class StateSharing:
    """Announces this peer's state and serves it. Make one for each caller and prefix."""

    caller: Caller
    """Places and serves the calls."""
    dht: DhtNode
    """Network in which donors are announced."""
    _: KW_ONLY
    prefix: str
    """Name of what is shared."""
    source: StateSource
    config: StateSharingConfig

    def __post_init__(self) -> None:
        self._snapshots: dict[bytes, _Snapshot] = {}
        self._taken_at = -math.inf  # when the last snapshot was
        self._taking = trio.Lock()

    async def run(self) -> None:
        """Announce and serve until cancelled; what was announced runs out by itself. A client has nothing to do."""
        if self.caller.address is None:
            return
        contact = contact_to_wire(Contact(self.caller.peer_id, self.caller.address))
        with self.serving():
            while True:
                await self.dht.store(
                    state_key(self.prefix),
                    [self.source.version(), contact],
                    life_s=min(3 * self.config.announce_period_s, MAX_LIFE_S),
                )
                await trio.sleep(self.config.announce_period_s)
                self._forget_old()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve as long as the block lasts, without announcing it: to peers that know of this donor by other ways."""
        open_method, chunk_method = state_methods(self.prefix)
        with (
            handlers(self.caller, {open_method: self._serve_open}, max_concurrent=16),
            handlers(self.caller, {chunk_method: self._serve_chunk}),
        ):
            yield

    @property
    def used_at(self) -> float:
        """Time at which a snapshot was last asked for, by trio's clock; minus infinity if none is held."""
        return max((held.used_at for held in self._snapshots.values()), default=-math.inf)

    @property
    def is_fetched(self) -> bool:
        """True if each piece of every snapshot that is held has been asked for, and there is one."""
        return bool(self._snapshots) and not any(held.left for held in self._snapshots.values())

    async def _serve_open(self, request: Request) -> Reply:
        min_version, offered, wanted = read_request(request, **_OPEN)
        version = self.source.version()
        if version < min_version:
            raise CallRefused(f"this peer's state is of version {version}, {min_version} was asked for")
        held = any(digest in self._snapshots for digest in offered)
        if wanted is not None and version != wanted and not held:  # a snapshot would cost a copy, for nothing
            raise CallRefused(f"this peer's state is of version {version}, {wanted} and no other was asked for")
        snapshot = await self._snapshot(min_version, offered)
        if snapshot.version < min_version:
            raise CallRefused(f"this peer's state is of version {snapshot.version}, {min_version} was asked for")
        return Reply(
            body={
                "version": snapshot.version,
                "digest": snapshot.packed.digest,
                "table": snapshot.packed.table,
                "facts": snapshot.facts,
                "chunk_bytes": snapshot.chunk_bytes,
            },
            tensors=(snapshot.hashes,),
        )

    async def _snapshot(self, min_version: int, offered: Sequence[bytes]) -> _Snapshot:
        """A snapshot that the newcomer has begun to fetch, one that is fresh enough, or a new one."""
        async with self._taking:  # several newcomers at once share one
            self._forget_old()
            oldest = max(min_version, self.source.version() - self.config.max_lag)
            fresh = [digest for digest, held in self._snapshots.items() if held.version >= oldest]
            for digest in (*(each for each in offered if each in fresh), *reversed(fresh)):
                held = self._snapshots[digest]
                held.used_at, held.left = trio.current_time(), set(range(len(held.hashes)))
                return held
            self._make_room()
            state = await self.source.snapshot()
            self._taken_at = trio.current_time()
            packed = pack(state.tensors)
            chunk_bytes = max(self.config.chunk_bytes, -(-packed.buffer.nbytes // MAX_PIECES))
            hashes = np.empty((-(-packed.buffer.nbytes // chunk_bytes), HASH_BYTES), np.uint8)
            for index in range(len(hashes)):
                hashes[index] = np.frombuffer(piece_hash(packed.chunk(index, chunk_bytes)), np.uint8)
                await trio.lowlevel.checkpoint()  # a large state takes seconds, and others want to be served
            now = trio.current_time()
            left = set(range(len(hashes)))
            snapshot = _Snapshot(state.version, dict(state.facts), packed, now, chunk_bytes, hashes, left)
            self._snapshots[packed.digest] = snapshot
            return snapshot

    def _make_room(self) -> None:
        """Make room for one more snapshot, or raise `PeerBusy`."""
        now, config = trio.current_time(), self.config
        if now - self._taken_at < config.snapshot_period_s:
            raise PeerBusy("a snapshot of this peer's state was taken only now")
        while len(self._snapshots) >= config.max_snapshots:
            oldest = min(self._snapshots, key=lambda digest: self._snapshots[digest].used_at)
            if now - self._snapshots[oldest].used_at < min(config.call_timeout_s, config.snapshot_lifetime_s):
                raise PeerBusy(f"{len(self._snapshots)} snapshots of this peer's state are being downloaded")
            del self._snapshots[oldest]

    async def _serve_chunk(self, request: Request) -> Reply:
        digest, index = read_request(request, digest=DIGEST, index=_INDEX)
        snapshot = self._snapshots.get(digest)
        if snapshot is None:
            raise CallRefused("this state is no longer held; open it again")
        if index >= len(snapshot.hashes):
            raise CallRefused(f"a state of {len(snapshot.hashes)} pieces has no piece {index}")
        snapshot.used_at = trio.current_time()
        snapshot.left.discard(index)
        return Reply(tensors=(snapshot.packed.chunk(index, snapshot.chunk_bytes),))

    def _forget_old(self) -> None:
        oldest = trio.current_time() - self.config.snapshot_lifetime_s
        for digest in [each for each, held in self._snapshots.items() if held.used_at < oldest]:
            del self._snapshots[digest]


_OPEN: dict[str, Field[Any]] = {
    "min_version": integer(-(2**63), 2**63),
    "offered": several(octets(0, 64), 64),
    "version": optional(VERSION),
}
_INDEX = integer(0, MAX_PIECES)
