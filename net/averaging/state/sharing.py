"""A whole state from a peer that has it: for one that joins late, or fell behind.

Theory of operation. Donors announce under the DHT key `prefix.state` how far their state is (its *version*, such as the
number of trunk updates). Who needs one asks the donor that is furthest: `open` makes it take a snapshot (or offers the
one that it just took for another) and answers with table and digest; `chunk` then fetches the snapshot piece by piece,
a few at a time. A lost connection costs the pieces that were on their way: the download goes on with any donor that
offers the same state, first of all the same one again. Another state begins anew.
"""

import math
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import trio

from net.averaging.state.buffer import StateBuffer, Table, pack
from net.averaging.state.download import (
    SharedState,
    StateDownload,
    StateSharingConfig,
    state_key,
    state_methods,
)
from net.dht.messages import contact_to_wire
from net.dht.node import DhtNode
from net.errors import CallRefused, PeerBusy
from net.identity import Contact
from net.rpc.base import Caller, Reply, Request, handlers

_DEFAULTS = StateSharingConfig()


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
        config: StateSharingConfig = _DEFAULTS,
    ) -> None:
        self._caller = caller
        self._dht = dht
        self._key = state_key(prefix)
        self._source = source
        self._config = config
        self._download = StateDownload(caller, dht, prefix=prefix, rng=rng, config=config)
        self._snapshots: dict[bytes, _Snapshot] = {}
        self._taken_at = -math.inf  # when the last snapshot was
        self._taking = trio.Lock()
        self._served = ExitStack()
        if source is not None and caller.address is not None:
            open_method, chunk_method = state_methods(prefix)
            self._served.enter_context(handlers(caller, {open_method: self._serve_open}, max_concurrent=16))
            self._served.enter_context(handlers(caller, {chunk_method: self._serve_chunk}))

    def close(self) -> None:
        """Serve no more calls. What was announced runs out by itself."""
        self._served.close()

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
        self,
        *,
        min_version: int = 0,
        timeout_s: float,
        attempts: int | None = None,
        expects: Callable[[int, Table], bool] = lambda version, table: True,
        accepts: Callable[[SharedState], bool] = lambda state: True,
    ) -> SharedState | None:
        """See `StateDownload.run`."""
        return await self._download.run(
            min_version=min_version, timeout_s=timeout_s, attempts=attempts, expects=expects, accepts=accepts
        )

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
            self._make_room()
            state = await self._source.snapshot()
            self._taken_at = trio.current_time()
            snapshot = _Snapshot(state.version, dict(state.facts), pack(state.tensors), self._taken_at)
            self._snapshots[snapshot.packed.digest] = snapshot
            return snapshot

    def _make_room(self) -> None:
        """For one more snapshot, if there is any.

        Raises:
          PeerBusy: the last one was taken only now, or all are being downloaded.
        """
        now, config = trio.current_time(), self._config
        if now - self._taken_at < config.snapshot_period_s:
            raise PeerBusy("a snapshot of this peer's state was taken only now")
        while len(self._snapshots) >= config.max_snapshots:
            oldest = min(self._snapshots, key=lambda digest: self._snapshots[digest].used_at)
            if now - self._snapshots[oldest].used_at < min(config.call_timeout_s, config.snapshot_lifetime_s):
                raise PeerBusy(f"{len(self._snapshots)} snapshots of this peer's state are being downloaded")
            del self._snapshots[oldest]

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
