"""The record under a key, and how two copies of it become one.

A record is either one `Entry` (a value with its expiration) or a `Dictionary` of entries under subkeys, each with an
expiration of its own. As in hivemind's DHT, the later expiration wins. A store whose expiration is not later is
rejected, but for one of exactly what is there, so that a retry or a hand-over is harmless. A plain value replaces the
whole dictionary, or a subkey the plain value, if it expires later.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dmoe_net.errors import LocalProtocolError
from dmoe_net.wire.codec import encode

Value = Any
"""None, bool, int, float, str, bytes, or lists and string-keyed dicts of these; tuples are stored as lists. Treat as
read-only once stored."""

MAX_VALUE_BYTES = 16 * 1024
"""Largest encoded value. Records are small facts (who serves what); tensors go from peer to peer."""

MAX_SUBKEY_BYTES = 256
MAX_SUBKEYS = 4096
"""Most entries of one dictionary. A row of an expert grid has some hundreds, a swarm's node list some thousands."""

MAX_DICTIONARY_BYTES = 1024 * 1024
"""Largest encoded dictionary: 4096 entries of 256 bytes."""

MAX_KEY_BYTES = 512

_ENTRY_OVERHEAD_BYTES = 16  # framing of an entry on the wire: array head, expiration (9 bytes), string head


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A value and the swarm time at which it ends. Made by `make_entry`, which checks and measures the value."""

    value: Value
    """The value; None is a value like any other (it serves as a tombstone)."""
    expiration: float
    """Swarm time in seconds from which the entry no longer exists."""
    size_bytes: int
    """Upper bound of the encoded size, without the subkey."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dictionary:
    """Entries under subkeys, at least one."""

    entries: Mapping[str, Entry]
    """Subkey -> entry."""

    @property
    def expiration(self) -> float:
        """Swarm time at which the last entry ends."""
        return max(entry.expiration for entry in self.entries.values())


Record = Entry | Dictionary
SubkeyEntry = tuple[str | None, Entry]
"""One thing to store: under a subkey, or (None) as the key's plain value."""


def make_entry(value: Value, expiration: float, *, latest: float = math.inf) -> Entry:
    """Check and measure a value; an expiration after `latest` is brought down to that.

    Raises:
      ValueError: the codec cannot carry the value, it is too large or too deep, or the expiration is not finite.
    """
    is_number = isinstance(expiration, int | float) and not isinstance(expiration, bool)
    if not is_number or not abs(expiration) <= sys.float_info.max:
        raise ValueError(f"an expiration must be a finite number of seconds, got {expiration!r:.80}")
    try:
        size = len(encode([[[[value]]]])) - 4  # inside as many containers as in a message: the codec bounds the depth
    except LocalProtocolError as error:
        raise ValueError(f"this is no DHT value: {error}") from error
    if size > MAX_VALUE_BYTES:
        raise ValueError(f"a DHT value takes at most {MAX_VALUE_BYTES} encoded bytes, got {size}")
    return Entry(value=value, expiration=float(min(expiration, latest)), size_bytes=size + _ENTRY_OVERHEAD_BYTES)


def check_subkey(subkey: str | None) -> str | None:
    """Return the subkey; ValueError if it is neither None nor a string of at most `MAX_SUBKEY_BYTES`."""
    if subkey is not None and (not isinstance(subkey, str) or len(subkey.encode()) > MAX_SUBKEY_BYTES):
        raise ValueError(f"a subkey is None or a string of at most {MAX_SUBKEY_BYTES} bytes, got {subkey!r:.80}")
    return subkey


def size_bytes(record: Record) -> int:
    """Upper bound of the record's encoded size."""
    if isinstance(record, Entry):
        return record.size_bytes
    return sum(entry.size_bytes + 4 * len(subkey) for subkey, entry in record.entries.items())


def live(record: Record | None, now: float) -> Record | None:
    """The part of a record that has not expired at `now`, or None."""
    if record is None or isinstance(record, Entry):
        return record if record is not None and record.expiration > now else None
    if all(entry.expiration > now for entry in record.entries.values()):
        return record
    entries = {subkey: entry for subkey, entry in record.entries.items() if entry.expiration > now}
    return Dictionary(entries=entries) if entries else None


def merge_entries(record: Record | None, updates: Sequence[SubkeyEntry]) -> tuple[Record | None, tuple[bool, ...]]:
    """Apply stores in order; return the record afterwards (`record` is not changed), and True for each accepted one."""
    accepted: list[bool] = []
    owned = False  # True if record.entries is a copy made here, which may be written to
    for subkey, entry in updates:
        is_table = isinstance(record, Dictionary)
        current = record.entries.get(subkey) if subkey is not None and isinstance(record, Dictionary) else record
        if current is not None and entry.expiration <= current.expiration:
            # To store the same again is no conflict. repr tells 1, 1.0 and True apart, which == does not.
            accepted.append(is_table == (subkey is not None) and repr(current) == repr(entry))
            continue
        accepted.append(True)
        if subkey is None:
            record, owned = entry, False
            continue
        if not isinstance(record, Dictionary):
            record, owned = Dictionary(entries={}), True
        elif not owned:
            record, owned = Dictionary(entries=dict(record.entries)), True
        assert isinstance(record.entries, dict)
        record.entries[subkey] = entry
    if owned and isinstance(record, Dictionary):
        record = _trimmed(record)
        kept = record.entries
        accepted = [ok and (s is None or s in kept) for ok, (s, _) in zip(accepted, updates, strict=True)]
    return record, tuple(accepted)


def merge(left: Record | None, right: Record | None) -> Record | None:
    """One record of two copies."""
    if left is None or right is None:
        return right if left is None else left
    if isinstance(left, Dictionary) and isinstance(right, Dictionary):
        return merge_entries(left, tuple(right.entries.items()))[0]
    return right if right.expiration > left.expiration else left


def as_updates(record: Record) -> tuple[SubkeyEntry, ...]:
    """The stores that rebuild a record elsewhere."""
    return ((None, record),) if isinstance(record, Entry) else tuple(record.entries.items())


def _trimmed(record: Dictionary) -> Dictionary:
    """The record, without its earliest expiring entries if it has outgrown its bounds."""
    size = size_bytes(record)
    if len(record.entries) <= MAX_SUBKEYS and size <= MAX_DICTIONARY_BYTES:
        return record
    kept = dict(record.entries)
    for subkey in sorted(kept, key=lambda name: (kept[name].expiration, name)):
        if len(kept) <= MAX_SUBKEYS and size <= MAX_DICTIONARY_BYTES:
            break
        size -= kept.pop(subkey).size_bytes + 4 * len(subkey)
    return Dictionary(entries=kept)
