"""CBOR for headers and small records: one value, one encoding, nothing that a peer could surprise us with.

The only importer of cbor2, which is lenient by default: it ignores trailing bytes, accepts duplicate keys, compiles
regular expressions that a peer sends (tag 35), builds cyclic lists (tags 28 and 29) and encodes a `memoryview` as an
array of integers without a word. So both directions check every value against the same short list of types, and
decoding ends by encoding again and comparing bytes: whatever is not *the* canonical form is refused, which makes
signatures over encoded records sound.

cbor2 takes three times as long for the canonical form as for a plain one. The two differ only in the order of the keys
of maps and in the width of floats. So the check of types looks at these too, and what is in order already, as messages
are, is encoded plainly.

Values: None, bool, int (the range of int64 and uint64), float, str, bytes, list, dict with string keys. Tuples are
encoded as lists. NaN is refused in both directions: it is unequal to itself and makes every comparison false, so that
`expiration < now` would let a NaN live for ever. Send None where there is no number. Infinities are allowed.
"""

import math
import struct
from typing import Any, NoReturn

import cbor2

from dmoe_net.errors import LocalProtocolError, RemoteProtocolError

MAX_ENCODED_BYTES = 64 * 1024
"""Headers and records above this are refused. cbor2 spends up to 70 bytes and 0.5 us on each byte of a hostile input
(10 MB of 0x80 became 698 MB), so this bound keeps the worst case at 5 MB and 30 ms."""

MAX_DEPTH = 16
"""Containers inside containers. Ours nest about five deep, and recursion stays far from its limits."""

_MAX_REASON = 200
"""Characters of a reason, which may repeat what the peer sent: 64 KiB of it are not for a log."""

_FLOAT32 = struct.Struct("<f")
_INT_MIN = -(2**63)
_INT_MAX = 2**64 - 1

_KNOWN_TAGS = (
    0, 1, 2, 3, 4, 5, 25, 28, 29, 30, 35, 36, 37, 52, 54, 100, 256, 258, 260, 261, 1004, 43000, 55799,
)  # fmt: skip
"""Every tag for which cbor2 6.2 has a decoder of its own. These must be overridden one by one; all others reach
`tag_hook`. A tag that a later cbor2 learns still fails the check of types, or the comparison."""


def encode(value: Any) -> bytes:
    """Canonical CBOR of `value` (RFC 7049 section 3.9: shortest forms, map keys sorted by length, then bytes).

    Raises:
      LocalProtocolError: `value` holds anything outside the list above, is nested deeper than `MAX_DEPTH`, or
        takes more than `MAX_ENCODED_BYTES`.
    """
    try:
        data: bytes = cbor2.dumps(value, canonical=not _is_in_order(value, MAX_DEPTH))
    except (ValueError, cbor2.CBOREncodeError) as exc:  # UnicodeEncodeError (lone surrogates) is a ValueError
        raise LocalProtocolError(f"cannot encode: {exc}") from exc
    if len(data) > MAX_ENCODED_BYTES:
        raise LocalProtocolError(f"encoded value takes {len(data)} bytes, at most {MAX_ENCODED_BYTES} are allowed")
    return data


def decode_untrusted(data: bytes | bytearray | memoryview) -> Any:
    """The value whose canonical encoding `data` is; lists come back as lists, maps as dicts.

    Raises:
      RemoteProtocolError: `data` is not the canonical encoding of an allowed value, or exceeds the bounds.
    """
    if len(data) > MAX_ENCODED_BYTES:
        raise RemoteProtocolError(f"CBOR item of {len(data)} bytes, at most {MAX_ENCODED_BYTES} are allowed")
    raw = bytes(data)
    try:
        value = cbor2.loads(
            raw,
            tag_hook=_refuse_tag,
            semantic_decoders=_DECODERS,
            max_depth=MAX_DEPTH,
            allow_indefinite=False,
            allow_duplicate_keys=False,
            strict_hashable_types=True,  # else 260 KB of colliding keys cost 7 s
        )
        again = cbor2.dumps(value, canonical=not _is_in_order(value, MAX_DEPTH))
    except (cbor2.CBORError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as exc:
        raise RemoteProtocolError(f"malformed CBOR: {str(exc)[:_MAX_REASON]}") from exc
    if again != raw:
        raise RemoteProtocolError("CBOR is not canonical, or something follows it")
    return value


def _refuse_tag(*_: Any) -> NoReturn:
    raise ValueError("tags are not allowed")


_DECODERS = dict.fromkeys(_KNOWN_TAGS, _refuse_tag)


def _is_in_order(value: Any, depth: int) -> bool:
    """Return True if the plain encoding of `value` is the canonical one: the keys of all maps have its order, and no
    float would fit in fewer than eight bytes. Return False where that would take long to tell.

    Types are compared exactly: `np.float64` is a `float` and `IntEnum` an `int`, and both would come back as
    something else than was sent.

    Raises:
      ValueError: `value` is not of the allowed types.
    """
    kind = type(value)
    if kind is not dict and kind is not list and kind is not tuple:
        return _is_in_order((value,), depth + 1)
    if depth == 0:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    in_order = True
    if kind is dict:
        before, length = "", -1
        for key in value:
            if type(key) is not str:
                raise ValueError(f"map keys must be strings, got {key!r}")
            # Only in ASCII a key has as many bytes as characters.
            if ((size := len(key)) <= length and (size < length or key < before)) or not key.isascii():
                in_order = False
            before, length = key, size
        value = value.values()
    for item in value:
        kind = type(item)
        if kind is str or kind is bytes or kind is bool or item is None:
            continue
        if kind is int:
            if not _INT_MIN <= item <= _INT_MAX:
                raise ValueError(f"integer {item} does not fit 64 bits")
        elif kind is float:
            in_order &= _is_wide(item)
        elif kind is dict or kind is list or kind is tuple:
            in_order &= _is_in_order(item, depth - 1)
        else:
            raise ValueError(f"a value of type {kind.__module__}.{kind.__qualname__} is not allowed in CBOR")
    return in_order


def _is_wide(value: float) -> bool:
    """Return True if a float needs all of its eight bytes; raise ValueError for NaN."""
    if value != value:
        raise ValueError("NaN is not allowed")
    if math.isinf(value):
        return False
    try:
        (narrow,) = _FLOAT32.unpack(_FLOAT32.pack(value))
    except OverflowError:
        return True
    return bool(narrow != value)
