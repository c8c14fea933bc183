"""Entries: what a record is made of. Each belongs to the peer that signed it, and to nobody else.

A record is all entries under one key. An entry's *subkey* is its owner's id with a suffix, so that two owners never
write the same one. Of one subkey the highest sequence stands, and only the owner can sign a higher one: to replace the
value, or to withdraw it.

The owner signs, with its Ed25519 key (RFC 8032), under the purpose of `dmoe_net.keys.Identity.sign`:

    "dmoe dht entry 1" NUL | swarm tag (32 bytes) | key id (32) | public key (32) | length of the suffix (1) | suffix |
    sequence (8) | issued at, ms (8) | life, ms (4) | 1 if it is withdrawn, else 0 (1) | value as canonical CBOR

Integers are unsigned and big-endian. The same entry is therefore nothing under another key, in another swarm, or of
another owner, and anybody may hand it on.

Clocks differ, so an entry says both when it was issued and how long it lives. Its life counts from the moment at which
a peer first sees it, less what the peer that hands it on says has passed; but it never lasts longer than `MAX_SKEW_S`
beyond the end that its own times give. Thus a peer whose clock is wrong is found, and nothing can be replayed for ever.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from dmoe_net.dht.routing_table import NodeId
from dmoe_net.errors import LocalProtocolError, RemoteProtocolError
from dmoe_net.identity import PEER_ID_BYTES, PeerId
from dmoe_net.keys import OPEN_SWARM, PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, peer_id_of, verify
from dmoe_net.wire.codec import decode_untrusted, encode
from dmoe_net.wire.fields import Field, integer, octets, optional, row_untrusted, text

Value = Any
"""None, bool, int, float, str, bytes, or lists and string-keyed dicts of these; tuples are stored as lists. Treat as
read-only."""

MAX_VALUE_BYTES = 16 * 1024
"""Largest encoded value. Records are small facts (who serves what); tensors go from peer to peer."""

MAX_SUFFIX_BYTES = 64
"""Longest suffix, ASCII characters."""

MAX_LIFE_S = 300.0
"""Longest life of an entry, seconds: a living owner issues it again."""

MAX_SKEW_S = 120.0
"""Seconds by which the clocks of two peers may differ and their entries still pass."""

_MAX_VERIFIED = 65_536  # signatures that were found good, 32 bytes each
_DOMAIN = b"dmoe dht entry 1\0"
_ROW_BYTES = 38  # the row's numbers and heads of fields on the wire, where they are longest

_ROW: dict[str, Field[Any]] = {
    "public_key": octets(PUBLIC_KEY_BYTES, PUBLIC_KEY_BYTES),
    "suffix": text(0, MAX_SUFFIX_BYTES),
    "sequence": integer(0, 2**64 - 1),
    "issued_ms": integer(0, 2**63 - 1),
    "life_ms": integer(1, int(MAX_LIFE_S * 1000)),
    "value": optional(octets(1, MAX_VALUE_BYTES)),
    "signature": octets(SIGNATURE_BYTES, SIGNATURE_BYTES),
    "left_ms": integer(1, int(MAX_LIFE_S * 1000)),
}


class Subkey(NamedTuple):
    """Name of an entry within its record."""

    owner: PeerId
    """The peer that signed it."""
    suffix: str = ""
    """Tells several entries of one owner apart; ASCII, at most `MAX_SUFFIX_BYTES`."""


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Entry:
    """One signed fact. Made by `sign_entry` or `EntryReader.read_untrusted`."""

    subkey: Subkey
    """Name within the record; begins with the owner."""
    sequence: int
    """Version: of two entries of one subkey the higher one stands."""
    issued_at: float
    """Time at which the owner issued it, seconds of its clock."""
    life_s: float
    """Seconds that it lives from its first sight on."""
    raw_value: bytes | None = field(repr=False)
    """The value as canonical CBOR; None if the owner has withdrawn it."""
    public_key: bytes = field(repr=False)
    """The owner's, 32 bytes."""
    signature: bytes = field(repr=False)
    """64 bytes, see the module."""

    @property
    def owner(self) -> PeerId:
        """The peer that signed it."""
        return self.subkey.owner

    @property
    def suffix(self) -> str:
        """The subkey's suffix."""
        return self.subkey.suffix

    @property
    def is_withdrawn(self) -> bool:
        """True if its owner took it back: then it has no value, and only stands in the place of older ones."""
        return self.raw_value is None

    @property
    def value(self) -> Value:
        """The value, decoded anew each time (it takes many times the memory); None if it was withdrawn."""
        return None if self.raw_value is None else decode_untrusted(self.raw_value)

    @property
    def size_bytes(self) -> int:
        """Upper bound of its size on the wire."""
        value = 0 if self.raw_value is None else len(self.raw_value)
        return PUBLIC_KEY_BYTES + SIGNATURE_BYTES + len(self.suffix) + value + _ROW_BYTES

    def left(self, now: float, said_s: float = math.inf) -> float:
        """Seconds that it lives on if it is first seen at `now`; at most 0 if its times are too far from that.

        Args:
          now: the reader's swarm time, seconds.
          said_s: seconds of its life that are left, as the peer that hands it on says.
        """
        if self.issued_at > now + MAX_SKEW_S:
            return 0.0
        return min(said_s, self.life_s, self.issued_at + self.life_s + MAX_SKEW_S - now)


SignedEntries = Sequence[tuple[Entry, float]]
"""Entries with the seconds that are left of their lives."""


class Found(NamedTuple):
    """An entry, as a reader gets it."""

    owner: PeerId
    """The peer that signed it."""
    suffix: str
    """Tells several entries of one owner apart."""
    value: Value
    """The value; read-only."""
    ends_at: float
    """Time until which it lives, seconds of `SwarmClock.ticks`."""
    life_s: float = 0.0
    """Seconds that it lives in all, as its owner says."""


def check_suffix(suffix: str) -> str:
    """Return the suffix. Raises ValueError if it is no short ASCII string."""
    if not isinstance(suffix, str) or len(suffix) > MAX_SUFFIX_BYTES or not suffix.isascii():
        raise ValueError(f"a suffix is at most {MAX_SUFFIX_BYTES} ASCII characters, got {suffix!r:.80}")
    return suffix


def encode_value(value: Value) -> bytes:
    """Encode a value of an entry. Raises ValueError if the codec cannot carry it, or it is too large."""
    try:
        encoded = encode(value)
    except LocalProtocolError as error:
        raise ValueError(f"this is no DHT value: {error}") from error
    if len(encoded) > MAX_VALUE_BYTES:
        raise ValueError(f"a DHT value takes at most {MAX_VALUE_BYTES} encoded bytes, got {len(encoded)}")
    return encoded


def check_life(life_s: float) -> float:
    """Return a life in seconds. Raises ValueError if it is not positive, or longer than `MAX_LIFE_S`."""
    if not isinstance(life_s, int | float) or isinstance(life_s, bool) or not 0.001 <= life_s <= MAX_LIFE_S:
        raise ValueError(f"an entry lives up to {MAX_LIFE_S:g} s, got life_s={life_s!r:.80}")
    return float(life_s)


def sign_entry(
    identity: Identity,
    key: NodeId,
    *,
    suffix: str = "",
    value: bytes | None,
    sequence: int,
    issued_at: float,
    life_s: float,
    swarm: bytes = OPEN_SWARM,
) -> Entry:
    """Issue an entry.

    Args:
      value: as `encode_value` returns it; None withdraws what stood there.
      sequence: higher than all that this owner issued under this subkey before.
      issued_at: swarm time now, seconds.
      swarm: tag of the swarm, see `dmoe_net.keys.Membership.tag`.
    """
    # Times travel as whole milliseconds: what is signed is exactly what every reader sees.
    issued_ms, life_ms = max(0, round(issued_at * 1000)), round(life_s * 1000)
    signed = _signed(swarm, key, identity.public_key, suffix, sequence, issued_ms, life_ms, value)
    return Entry(
        subkey=Subkey(identity.peer_id, suffix),
        sequence=sequence,
        issued_at=issued_ms / 1000,
        life_s=life_ms / 1000,
        raw_value=value,
        public_key=identity.public_key,
        signature=identity.sign(signed),
    )


def entry_to_wire(entry: Entry, *, left_s: float) -> list[object]:
    """The row that `EntryReader.read_untrusted` reads: the entry, and the seconds that are left of its life."""
    return [
        entry.public_key,
        entry.suffix,
        entry.sequence,
        round(entry.issued_at * 1000),
        round(entry.life_s * 1000),
        entry.raw_value,
        entry.signature,
        max(1, min(round(left_s * 1000), round(entry.life_s * 1000))),
    ]


_KNOWN: WeakValueDictionary[tuple[Any, ...], Entry] = WeakValueDictionary()
"""Entries that somebody in this process has read and holds, by swarm, key and the whole of their rows. Several holders
bring the same ones; the nodes of a simulation, which all read and keep them, share the work and the memory."""


class EntryReader:
    """Reads entries of a swarm that strangers bring, and remembers the signatures that it has verified."""

    def __init__(self, swarm: bytes = OPEN_SWARM) -> None:
        self.swarm = swarm
        self.verified = 0
        """Signatures verified; those that were remembered do not count."""
        self._good: OrderedDict[bytes, None] = OrderedDict()

    def read_untrusted(self, key: NodeId, row: object) -> tuple[Entry, float]:
        """Read and verify an entry of a record; return it with the seconds that are said to be left of its life.

        Raises:
          RemoteProtocolError: it is malformed, or its signature is wrong.
        """
        *fields, left_ms = row_untrusted(row, "a DHT entry", **_ROW)
        name = self.swarm, key, *fields
        if (known := _KNOWN.get(name)) is not None:
            return known, left_ms / 1000
        public_key, suffix, sequence, issued_ms, life_ms, value, signature = fields
        if not suffix.isascii():
            raise RemoteProtocolError(f"the suffix of a DHT entry must be ASCII, got {suffix!r:.80}")
        signed = _signed(self.swarm, key, public_key, suffix, sequence, issued_ms, life_ms, value)
        self._verify(public_key, signed, signature)
        entry = Entry(
            subkey=Subkey(peer_id_of(public_key), suffix),
            sequence=sequence,
            issued_at=issued_ms / 1000,
            life_s=life_ms / 1000,
            raw_value=value,
            public_key=public_key,
            signature=signature,
        )
        if value is not None:
            entry.value  # noqa: B018 (a value that cannot be decoded must not be kept)
        _KNOWN[name] = entry
        return entry, left_ms / 1000

    def _verify(self, public_key: bytes, signed: bytes, signature: bytes) -> None:
        # Of all of it: a signature alone would vouch for other data.
        name = sha256(signed + signature).digest()
        if name in self._good:
            self._good.move_to_end(name)
            return
        self.verified += 1
        if not verify(public_key, signed, signature):
            raise RemoteProtocolError(f"the entry of {peer_id_of(public_key).short} is not signed by it")
        self._good[name] = None
        if len(self._good) > _MAX_VERIFIED:
            self._good.popitem(last=False)


def _signed(
    swarm: bytes,
    key: NodeId,
    public_key: bytes,
    suffix: str,
    sequence: int,
    issued_ms: int,
    life_ms: int,
    value: bytes | None,
) -> bytes:
    """The bytes that the owner signs, see the module."""
    name = suffix.encode("ascii", "replace")
    return b"".join(
        (
            _DOMAIN,
            swarm,
            key.to_bytes(PEER_ID_BYTES),
            public_key,
            len(name).to_bytes(1),
            name,
            sequence.to_bytes(8),
            issued_ms.to_bytes(8),
            life_ms.to_bytes(4),
            b"\1" if value is None else b"\0",
            value or b"",
        )
    )
