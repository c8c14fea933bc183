"""The entries that one node keeps for the swarm: bounded, expiring, and read by their changes.

Whoever brings an entry pays for it: each entry is charged to the peer on whose connection it came, its *account*, which
for what owners store themselves is the owner. Beyond a bound the account that holds most gives up its oldest entries.
So a flood costs the flooder's entries, in one record as in the whole. The sums are kept, not counted anew.

Every change of an entry has a number. A reader that says which number it has seen last gets only what changed since.
Numbers are counted over all records, so that one stays good when its record was forgotten in between; `epoch` tells a
node that was started again from the one that counted before.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from dmoe_net.dht.entries import MAX_SKEW_S, Entry, Subkey
from dmoe_net.dht.routing_table import NodeId
from dmoe_net.identity import PeerId

MAX_ENTRIES = 4096
"""Most entries of one record."""

MAX_RECORD_BYTES = 1024 * 1024
"""Most bytes of one record."""

_FAIR_BYTES = 16 * 1024
"""Bytes that an account may hold in a full record and be left alone: otherwise thousands of small entries would make an
honest host the one that holds most."""

MAX_OF_OWNER = 16
"""Most entries of one owner in one record; a further one takes the place of its oldest."""


@dataclass(slots=True, kw_only=True, eq=False)
class Held:
    """An entry that is kept."""

    entry: Entry
    ends_at: float
    """Time of the node's clock until which it lives, seconds."""
    seen_at: float
    """Time at which it was first seen, which no later sight of it moves."""
    kept_until: float
    """Time until which it is remembered though its life has ended: for so long somebody could hand it on again as new,
    or what it has replaced."""
    account: PeerId
    """The peer that brought it."""
    change: int = 0
    """Number of the change that brought it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The reason for which an entry was not taken."""

    held: Entry | None = None
    """The entry that stands in its place, of an equal or higher sequence."""
    ahead_s: float = 0.0
    """Seconds by which its times are ahead of the node's clock, where that is too far to take it; else 0."""


NO_ROOM = Refusal()
"""The entry did not fit: others in this record, or altogether, hold what there is."""

Verdict = Refusal | None
"""None: the entry stands here now."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Record:
    entries: dict[Subkey, Held] = field(default_factory=dict)  # from the oldest change to the newest
    bytes_of: dict[PeerId, int] = field(default_factory=dict)  # by account
    count_of: dict[PeerId, int] = field(default_factory=dict)  # by owner
    size_bytes: int = 0


class EntryStorage:
    """Records by key id: at most `max_bytes` in all, as entries are on the wire; `epoch` is drawn at random."""

    def __init__(self, *, max_bytes: int, epoch: int = 0) -> None:
        self.epoch = epoch
        self._max_bytes = max_bytes
        self._records: dict[NodeId, _Record] = {}
        self._accounts: dict[PeerId, dict[tuple[NodeId, Subkey], int]] = {}  # sizes, from the oldest change on
        self._bytes_of: dict[PeerId, int] = {}
        self.bytes_held = 0
        """Bytes of all entries."""
        self._changes = 0
        self._count_held = 0
        # When entries are forgotten. A row is void unless it states a present change: a later one leaves it behind.
        self._ends: list[tuple[float, int, NodeId, Subkey]] = []

    def __len__(self) -> int:
        """Number of records, those too whose entries have ended and are remembered for a while."""
        return len(self._records)

    def get(self, key: NodeId, now: float) -> tuple[Held, ...]:
        """The living entries of a record, from the oldest change to the newest; withdrawn ones too."""
        record = self._records.get(key)
        return () if record is None else tuple(held for held in record.entries.values() if held.ends_at > now)

    def since(self, key: NodeId, change: int, now: float) -> tuple[Held, ...]:
        """The living entries that have changed after this number, from the oldest change to the newest."""
        record, found = self._records.get(key), list[Held]()
        for held in reversed(record.entries.values()) if record is not None else ():
            if held.change <= change:
                break
            if held.ends_at > now:
                found.append(held)
        return tuple(reversed(found))

    def items(self, now: float) -> Iterator[tuple[NodeId, tuple[Held, ...]]]:
        """Every record with living entries. Do not store while iterating; take a list first."""
        for key in self._records:
            if alive := self.get(key, now):
                yield key, alive

    def store(
        self,
        key: NodeId,
        entries: Sequence[tuple[Entry, float]],
        *,
        account: PeerId,
        now: float,
        swarm_now: float | None = None,
    ) -> list[Verdict]:
        """Take entries in; return a verdict for each.

        Args:
          entries: each with the seconds for which it lives on, more than 0.
          now: seconds of the clock of `Held.ends_at`, which is steady, whatever is done to the swarm's.
          swarm_now: swarm time, seconds; None: the same.
        """
        ahead_s = 0.0 if swarm_now is None else swarm_now - now
        verdicts = [self._take(key, entry, left_s, account, now, ahead_s) for entry, left_s in entries]
        if self.bytes_held > self._max_bytes:
            self.sweep(now)
        while self.bytes_held > self._max_bytes:
            self._shed(max(self._bytes_of, key=self._bytes_of.__getitem__))
        return [
            NO_ROOM if verdict is None and not self._has(key, entry) else verdict
            for verdict, (entry, _) in zip(verdicts, entries, strict=True)
        ]

    def sweep(self, now: float) -> int:
        """Forget the entries that nobody could hand on any more; return their number."""
        count = 0
        while self._ends and self._ends[0][0] <= now:
            _, change, key, subkey = heapq.heappop(self._ends)
            if self._is_current(change, key, subkey):
                self._drop(key, subkey)
                count += 1
        return count

    def _take(self, key: NodeId, entry: Entry, left_s: float, account: PeerId, now: float, ahead_s: float) -> Verdict:
        record = self._records.get(key) or _Record()
        before = record.entries.get(entry.subkey)
        if before is not None and entry.sequence <= before.entry.sequence:
            if entry.signature != before.entry.signature or entry.sequence != before.entry.sequence:
                return Refusal(held=before.entry)
            # Whoever brought it first may have said that less is left than there is, and pays for it no longer than
            # until its owner comes.
            end = min(now + left_s, before.seen_at + entry.life_s)
            if end > before.ends_at:
                self._change(key, before, end, before.account)
            if account == entry.owner != before.account:
                self._change(key, before, before.ends_at, account)
            return None
        if before is not None:
            self._drop(key, entry.subkey)
        elif record.count_of.get(entry.owner, 0) >= MAX_OF_OWNER:
            self._drop(key, next(subkey for subkey in record.entries if subkey.owner == entry.owner))
        if not self._make_room(key, entry, account, now):
            if before is not None:
                self._put(key, before)
            return NO_ROOM
        ends_at = now + left_s
        kept_until = max(ends_at, entry.issued_at + entry.life_s + MAX_SKEW_S - ahead_s)
        self._put(key, Held(entry=entry, ends_at=ends_at, seen_at=now, kept_until=kept_until, account=account))
        return None

    def _make_room(self, key: NodeId, entry: Entry, account: PeerId, now: float) -> bool:
        """Make room for a newcomer in a record; False if nobody there holds more than its account would."""

        def full() -> _Record | None:
            record = self._records.get(key)
            has_room = record is None or (
                len(record.entries) < MAX_ENTRIES and record.size_bytes + entry.size_bytes <= MAX_RECORD_BYTES
            )
            return None if has_room else record

        if (record := full()) is not None:
            for subkey in [subkey for subkey, held in record.entries.items() if held.ends_at <= now]:
                self._drop(key, subkey)
        while (record := full()) is not None:
            largest = max(record.bytes_of, key=record.bytes_of.__getitem__)
            fair = max(_FAIR_BYTES, record.bytes_of.get(account, 0) + entry.size_bytes)
            if largest != account and record.bytes_of[largest] <= fair:
                return False
            theirs = [subkey for subkey, held in record.entries.items() if held.account == largest]
            if largest == account and len(theirs) == 1:
                return False
            # Half of them at once: to look for the largest account takes longer than to drop an entry.
            for subkey in islice(theirs, (len(theirs) + 1) // 2):
                self._drop(key, subkey)
        return True

    def _shed(self, account: PeerId) -> None:
        """Give up the oldest half of what an account holds."""
        places = list(self._accounts[account])
        for key, subkey in places[: (len(places) + 1) // 2]:
            self._drop(key, subkey)

    def _has(self, key: NodeId, entry: Entry) -> bool:
        held = self._held(key, entry.subkey)
        return held is not None and held.entry.signature == entry.signature

    def _is_current(self, change: int, key: NodeId, subkey: Subkey) -> bool:
        held = self._held(key, subkey)
        return held is not None and held.change == change

    def _held(self, key: NodeId, subkey: Subkey) -> Held | None:
        record = self._records.get(key)
        return None if record is None else record.entries.get(subkey)

    def _change(self, key: NodeId, held: Held, ends_at: float, account: PeerId) -> None:
        """Let what is held live longer, or be charged to another account."""
        self._drop(key, held.entry.subkey)
        held.ends_at, held.account = ends_at, account
        self._put(key, held)

    def _put(self, key: NodeId, held: Held) -> None:
        """Keep an entry, as the newest change."""
        record, subkey = self._records.setdefault(key, _Record()), held.entry.subkey
        self._changes += 1
        held.change = self._changes
        record.entries[subkey] = held
        self._accounts.setdefault(held.account, {})[key, subkey] = held.entry.size_bytes
        heapq.heappush(self._ends, (held.kept_until, held.change, key, subkey))
        self._count(record, held, 1)
        if len(self._ends) > 2 * self._count_held + 64:
            self._forget_void_ends()

    def _drop(self, key: NodeId, subkey: Subkey) -> None:
        record = self._records[key]
        held = record.entries.pop(subkey)
        del self._accounts[held.account][key, subkey]
        if not self._accounts[held.account]:
            del self._accounts[held.account]
        self._count(record, held, -1)
        if not record.entries:
            del self._records[key]

    def _count(self, record: _Record, held: Held, sign: int) -> None:
        size = sign * held.entry.size_bytes
        self._count_held += sign
        record.size_bytes += size
        self.bytes_held += size
        for sums in (record.bytes_of, self._bytes_of):
            _add(sums, held.account, size)
        _add(record.count_of, held.entry.owner, sign)

    def _forget_void_ends(self) -> None:
        self._ends = [row for row in self._ends if self._is_current(*row[1:])]
        heapq.heapify(self._ends)


def _add(sums: dict[PeerId, int], who: PeerId, number: int) -> None:
    sums[who] = sums.get(who, 0) + number
    if not sums[who]:
        del sums[who]
