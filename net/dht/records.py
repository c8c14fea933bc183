"""What a key holds, and how two copies of it become one.

A record is either one `Entry` (a value with its expiration) or a `Dictionary` of entries under subkeys, each with an
expiration of its own. Rules of merging, after hivemind's DHT:

- the later expiration wins; a store whose expiration is not later changes nothing and is rejected;
- storing exactly what is there is accepted, so that a repeated store (a retry, a hand-over) is harmless;
- a plain value and a dictionary exclude each other; a dictionary's expiration is the latest of its entries; a
  plain value replaces the whole dictionary, or a subkey replaces the plain value, if it expires later.

Values are what CBOR carries without tags: None, bool, int (64 bits), float, str, bytes, lists, maps with string keys.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from net.errors import RemoteProtocolError

Value = Any
"""None, bool, int, float, str, bytes, or lists and string-keyed dicts of these. Treat as read-only once stored."""

MAX_VALUE_BYTES = 16 * 1024
"""Largest encoded value. Records are small facts (who serves what); tensors go from peer to peer, not here."""

MAX_VALUE_DEPTH = 8
"""Deepest nesting of a value; together with the message around it this stays below the codec's own limit."""

MAX_SUBKEY_BYTES = 256
MAX_SUBKEYS = 4096
"""Entries of one dictionary. A row of an expert grid has at most some hundreds, a swarm's node list some
thousands."""

MAX_DICTIONARY_BYTES = 1024 * 1024
"""Encoded size of one dictionary: 4096 entries of 256 bytes. It bounds what a reader holds for one key."""

MAX_KEY_BYTES = 512

_ENTRY_OVERHEAD_BYTES = 16
"""Framing of an entry on the wire: array head, expiration (9 bytes), string head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A value and the swarm time at which it ends. Made by `make_entry`, which checks and measures the value."""

    value: Value
    """The value; None is a value like any other (it serves as a tombstone)."""
    expiration: float
    """Absolute swarm time in seconds from which the entry no longer exists."""
    size_bytes: int
    """Upper bound of the encoded size of value and framing, without the subkey."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dictionary:
    """Entries under subkeys, at least one."""

    entries: Mapping[str, Entry]
    """Subkey -> entry."""

    @property
    def expiration(self) -> float:
        """When the last entry ends."""
        return max(entry.expiration for entry in self.entries.values())


Record = Entry | Dictionary
SubkeyEntry = tuple[str | None, Entry]
"""One thing to store: under a subkey, or (None) as the key's plain value."""


def make_entry(value: Value, expiration: float) -> Entry:
    """Check and measure a value.

    Raises:
      ValueError: if CBOR without tags cannot carry it, it is too large or too deep, or the expiration is not
        finite.
    """
    if isinstance(expiration, bool) or not isinstance(expiration, (int, float)) or not math.isfinite(expiration):
        raise ValueError(f"an expiration must be a finite number of seconds, got {expiration!r}")
    size = _encoded_size(value, MAX_VALUE_DEPTH)
    if size > MAX_VALUE_BYTES:
        raise ValueError(f"a DHT value takes at most {MAX_VALUE_BYTES} encoded bytes, got {size}")
    return Entry(value=value, expiration=float(expiration), size_bytes=size + _ENTRY_OVERHEAD_BYTES)


def check_subkey(subkey: str | None) -> str | None:
    """The subkey itself.

    Raises:
      ValueError: if it is neither None nor a string of at most `MAX_SUBKEY_BYTES`.
    """
    if subkey is not None and (not isinstance(subkey, str) or _text_size(subkey) > MAX_SUBKEY_BYTES):
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
    """Apply stores in order. `record` itself is not changed.

    Returns:
      the record afterwards, and for each update whether it was accepted.
    """
    accepted: list[bool] = []
    owned = False  # whether record.entries is a copy made here, which may be written to
    for subkey, entry in updates:
        current = _current(record, subkey)
        if current is not None and entry.expiration <= current.expiration:
            accepted.append(isinstance(current, Entry) and _same(current, entry) and _same_kind(record, subkey))
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
    trimmed = _trim(record) if owned else record
    if trimmed is not record:
        assert isinstance(trimmed, Dictionary)
        kept = trimmed.entries
        accepted = [ok and (s is None or s in kept) for ok, (s, _) in zip(accepted, updates, strict=True)]
    return trimmed, tuple(accepted)


def merge(left: Record | None, right: Record | None) -> Record | None:
    """One record of two copies: dictionaries are joined subkey by subkey; otherwise the later expiration wins
    whole."""
    if left is None or right is None:
        return right if left is None else left
    if isinstance(left, Dictionary) and isinstance(right, Dictionary):
        return merge_entries(left, tuple(right.entries.items()))[0]
    return right if right.expiration > left.expiration else left


def as_updates(record: Record) -> tuple[SubkeyEntry, ...]:
    """The stores that rebuild a record elsewhere."""
    return ((None, record),) if isinstance(record, Entry) else tuple(record.entries.items())


def page(record: Dictionary, *, after: str | None, budget_bytes: int) -> tuple[tuple[tuple[str, Entry], ...], bool]:
    """The entries whose subkeys follow `after`, in the order of subkeys, as many as fit the budget (at least one).

    Returns:
      the entries, and whether more follow them.
    """
    rest = sorted(subkey for subkey in record.entries if after is None or subkey > after)
    taken: list[tuple[str, Entry]] = []
    used = 0
    for subkey in rest:
        entry = record.entries[subkey]
        used += entry.size_bytes + _text_size(subkey)
        if taken and used > budget_bytes:
            break
        taken.append((subkey, entry))
    return tuple(taken), len(taken) < len(rest)


def parse_entries_untrusted(raw: object, *, latest_expiration: float) -> tuple[SubkeyEntry, ...]:
    """Read a list of `[subkey or None, value, expiration]`; later expirations are brought down to
    `latest_expiration`.

    Raises:
      RemoteProtocolError: if it is anything else, or larger than the bounds of this module.
    """
    if not isinstance(raw, list) or len(raw) > MAX_SUBKEYS:
        raise RemoteProtocolError(f"DHT entries must be a list of at most {MAX_SUBKEYS}")
    return tuple(_parse_entry_untrusted(item, latest_expiration) for item in raw)


def entries_to_wire(entries: Iterable[SubkeyEntry]) -> list[Value]:
    """The form that `parse_entries_untrusted` reads."""
    return [[subkey, entry.value, entry.expiration] for subkey, entry in entries]


def _parse_entry_untrusted(item: object, latest_expiration: float) -> SubkeyEntry:
    if not isinstance(item, list) or len(item) != 3:
        raise RemoteProtocolError("a DHT entry must be [subkey, value, expiration]")
    subkey, value, expiration = item
    try:
        entry = make_entry(value, expiration)
        if entry.expiration > latest_expiration:
            entry = Entry(value=value, expiration=latest_expiration, size_bytes=entry.size_bytes)
        return check_subkey(subkey), entry
    except (
        ValueError,
        OverflowError,
    ) as error:  # OverflowError: an integer expiration beyond what a float holds
        raise RemoteProtocolError(f"bad DHT entry: {error}") from error


def _current(record: Record | None, subkey: str | None) -> Record | None:
    """What a store under `subkey` has to outlive."""
    if subkey is not None and isinstance(record, Dictionary):
        return record.entries.get(subkey)
    return record


def _same(current: Entry, entry: Entry) -> bool:
    # repr tells 1, 1.0 and True apart, which == does not.
    return current.expiration == entry.expiration and repr(current.value) == repr(entry.value)


def _same_kind(record: Record | None, subkey: str | None) -> bool:
    return isinstance(record, Dictionary) == (subkey is not None)


def _trim(record: Record | None) -> Record | None:
    """Drop the earliest expiring entries of a dictionary that has outgrown its bounds."""
    if not isinstance(record, Dictionary):
        return record
    size = size_bytes(record)
    if len(record.entries) <= MAX_SUBKEYS and size <= MAX_DICTIONARY_BYTES:
        return record
    kept = dict(record.entries)
    for subkey in sorted(kept, key=lambda name: (kept[name].expiration, name)):
        if len(kept) <= MAX_SUBKEYS and size <= MAX_DICTIONARY_BYTES:
            break
        size -= kept.pop(subkey).size_bytes + 4 * len(subkey)
    return Dictionary(entries=kept)


def _encoded_size(value: Value, depth: int) -> int:
    """Upper bound of the CBOR encoding (RFC 8949) in bytes; floats count as 9 though a short form may exist."""
    if depth < 0:
        raise ValueError(f"a DHT value may be nested at most {MAX_VALUE_DEPTH} deep")
    kind = type(value)
    if value is None or kind is bool:
        return 1
    if kind is int and -(2**64) <= value < 2**64:
        return 9
    if kind is float and not math.isnan(value):  # NaN differs from itself, so copies could never be compared
        return 9
    if kind is bytes:
        return 5 + len(value)
    if kind is str:
        return 5 + _text_size(value)
    if kind is list:
        return 5 + sum(_encoded_size(item, depth - 1) for item in value)
    if kind is dict:
        return 5 + sum(_map_key_size(key) + _encoded_size(item, depth - 1) for key, item in value.items())
    raise ValueError(f"a DHT value is None, bool, 64-bit int, float, str, bytes, list or dict, got {value!r:.80}")


def _map_key_size(key: object) -> int:
    if type(key) is not str:
        raise ValueError(f"maps in DHT values have string keys, got {key!r:.80}")
    return 5 + _text_size(key)


def _text_size(text: str) -> int:
    return len(text.encode())  # lone surrogates raise UnicodeEncodeError, which is a ValueError
