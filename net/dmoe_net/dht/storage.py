"""The records that one node keeps, bounded and expiring.

Beyond the bounds the records that would have ended first go first. A long-lived record could therefore crowd out
others, which is why the lifetime of all that comes from the network is capped before it gets here.
"""

import heapq
from collections.abc import Iterator, Sequence

from dmoe_net.dht.records import Record, SubkeyEntry, live, merge_entries, size_bytes
from dmoe_net.dht.routing_table import NodeId


class RecordStorage:
    """Records by key id: at most `max_keys`, of at most `max_bytes` encoded bytes in all."""

    def __init__(self, *, max_keys: int, max_bytes: int) -> None:
        self._max_keys = max_keys
        self._max_bytes = max_bytes
        self._records: dict[NodeId, Record] = {}
        self._sizes: dict[NodeId, int] = {}
        self._bytes = 0
        # Keys by expiration. A pair is void unless it states the record's present expiration: a record that changes
        # pushes a new pair and leaves the old one to be skipped.
        self._by_expiration: list[tuple[float, NodeId]] = []

    def __len__(self) -> int:
        return len(self._records)

    @property
    def bytes_held(self) -> int:
        """Encoded size of all records (an upper bound)."""
        return self._bytes

    def get(self, key: NodeId, now: float) -> Record | None:
        """The live part of a record, or None."""
        return live(self._records.get(key), now)

    def items(self, now: float) -> Iterator[tuple[NodeId, Record]]:
        """Every live record. Do not store while iterating; take a list first."""
        for key, record in self._records.items():
            if (alive := live(record, now)) is not None:
                yield key, alive

    def store(self, key: NodeId, updates: Sequence[SubkeyEntry], now: float) -> tuple[bool, ...]:
        """Merge stores into a record; True for each that was accepted: not expired, and there was room for it."""
        fresh = [update for update in updates if update[1].expiration > now]
        after, accepted = merge_entries(self.get(key, now), fresh)
        self._put(key, after)
        if self._is_over():
            self.sweep(now)
        while self._is_over():
            self._drop_first()
        verdicts = iter(accepted)
        return tuple(entry.expiration > now and next(verdicts) and key in self._records for _, entry in updates)

    def sweep(self, now: float) -> int:
        """Forget the records that have ended; return their number."""
        before = len(self._records)
        while self._by_expiration and self._by_expiration[0][0] <= now:
            self._drop_first()
        return before - len(self._records)

    def _put(self, key: NodeId, record: Record | None) -> None:
        if record is not None and self._records.get(key) is record:
            return
        self._bytes -= self._sizes.pop(key, 0)
        if record is None:
            self._records.pop(key, None)
            return
        self._records[key] = record
        self._sizes[key] = size_bytes(record)
        self._bytes += self._sizes[key]
        heapq.heappush(self._by_expiration, (record.expiration, key))
        if len(self._by_expiration) > 2 * len(self._records) + 64:  # void pairs must not pile up
            self._by_expiration = [(record.expiration, key) for key, record in self._records.items()]
            heapq.heapify(self._by_expiration)

    def _is_over(self) -> bool:
        return len(self._records) > self._max_keys or self._bytes > self._max_bytes

    def _drop_first(self) -> None:
        """Take the first pair by expiration, and its record with it unless the pair is void."""
        expiration, key = heapq.heappop(self._by_expiration)
        if key in self._records and self._records[key].expiration == expiration:
            self._put(key, None)
