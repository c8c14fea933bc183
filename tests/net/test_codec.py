"""The strict CBOR codec and the fields of messages: what they accept comes back unchanged, all else is refused with one
error, which has name, bound and value."""

import datetime
import enum
import math
import random
from decimal import Decimal
from typing import Any

import cbor2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmoe_net.errors import LocalProtocolError, RemoteProtocolError
from dmoe_net.identity import PeerId
from dmoe_net.wire.codec import MAX_DEPTH, MAX_ENCODED_BYTES, decode_untrusted, encode
from dmoe_net.wire.fields import (
    FLAG,
    HOST,
    MAPPING,
    PEER_ID,
    PORT,
    Field,
    choice,
    integer,
    octets,
    optional,
    real,
    row_untrusted,
    rows,
    several,
    text,
)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
    | st.binary(max_size=40)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=15,
)


def same(left: Any, right: Any) -> bool:
    """Equality that tells 1 from 1.0 and True, and 0.0 from -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right and not (isinstance(left, float) and math.copysign(1, left) != math.copysign(1, right))


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_round_trip(value: Any) -> None:
    assert same(decode_untrusted(encode(value)), value)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=6))
def test_encoding_does_not_depend_on_insertion_order(value: dict[str, int]) -> None:
    assert encode(value) == encode(dict(reversed(value.items())))


FLOATS = st.floats(allow_nan=False) | st.floats(allow_nan=False, width=32) | st.floats(allow_nan=False, width=16)
TEXTS = st.text(st.sampled_from("aé€😀"), max_size=3)  # one to four bytes each
DISORDERED = st.recursive(
    FLOATS | st.integers(-3, 3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=15,
)


@settings(max_examples=500, deadline=None)
@given(DISORDERED)
def test_plain_encodings_are_used_only_where_they_are_canonical(value: Any) -> None:
    """It is what cbor2 calls canonical, whatever the order of keys and the width of floats; nothing else is read."""
    canonical, plain = cbor2.dumps(value, canonical=True), cbor2.dumps(value)
    assert encode(value) == canonical
    if plain == canonical:
        assert same(decode_untrusted(plain), value)
    else:
        with pytest.raises(RemoteProtocolError, match="not canonical"):
            decode_untrusted(plain)


def test_golden_bytes() -> None:
    """RFC 7049 section 3.9 gives these by hand: shortest heads, shorter keys first, floats as short as they can be."""
    value = {"bb": [1, -1, 1.5], "a": b"\x01", "c": None}
    # map(3) | "a" bytes(1) 01 | "c" null | "bb" array(3) 1 -1 half(1.5 = 0x3e00)
    assert encode(value).hex() == "a3616141016163f6626262830120f93e00"
    assert encode({"a": (1, (2,))}) == encode({"a": [1, [2]]}), "nothing on the wire tells a tuple from a list"


class Colour(enum.IntEnum):
    RED = 1


UNENCODABLE = [
    memoryview(b"ab"), bytearray(b"ab"), np.float64(1.0), np.int64(1), np.zeros(2), {1: 2}, {b"a": 1}, {"a": {None: 1}},
    {1, 2}, 2**64, -(2**63) - 1, math.nan, [float("-nan")], Decimal(1), datetime.date(2020, 1, 1), cbor2.undefined,
    cbor2.CBORTag(5000, 1), cbor2.CBORSimpleValue(40), Colour.RED, "\ud800", {"\udfff": 1}, object(),
]  # fmt: skip


# Not every repr is the same in two processes: a memoryview's has its address.
@pytest.mark.parametrize("value", UNENCODABLE, ids=lambda value: type(value).__name__)
def test_encode_refuses_everything_outside_the_list(value: Any) -> None:
    """A value that would come back as something else, or not at all, is this side's bug, at any depth."""
    with pytest.raises(LocalProtocolError):
        encode(value)
    with pytest.raises(LocalProtocolError):
        encode({"a": [value]})


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_nesting_is_bounded_alike_in_both_directions() -> None:
    """MAX_DEPTH containers pass, one more does not; a cycle ends as an error and not as a RecursionError."""
    assert decode_untrusted(encode(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    with pytest.raises(LocalProtocolError, match="nested deeper"):
        encode(nested(MAX_DEPTH + 1))
    with pytest.raises(RemoteProtocolError):
        decode_untrusted(b"\x81" * (MAX_DEPTH + 1) + b"\x01")
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(LocalProtocolError, match="nested deeper"):
        encode(cycle)


def test_size_is_bounded_in_both_directions() -> None:
    """64 KiB exactly pass (a byte string of n >= 256 costs 3 more bytes), one byte more does not."""
    largest = bytes(MAX_ENCODED_BYTES - 3)
    assert decode_untrusted(encode(largest)) == largest
    with pytest.raises(LocalProtocolError, match="65537 bytes"):
        encode(largest + b"x")
    with pytest.raises(RemoteProtocolError, match="65537 bytes"):
        decode_untrusted(b"\x59\xff\xfe" + bytes(MAX_ENCODED_BYTES - 2))


HOSTILE = {
    "nothing": "", "trailing byte": "0100", "trailing item": "a00000", "lone break": "ff",
    "indefinite array": "9f01ff", "indefinite map": "bf616101ff", "indefinite bytes": "5f4101ff",
    "indefinite text": "7f6161ff", "duplicate keys": "a2616101616102", "keys out of order": "a2616201616102",
    "integer key": "a10102", "bytes key": "a1416102", "array key": "a1800a", "integer in a long form": "1800",
    "length in a long form": "5800", "float in a long form": "fb3ff0000000000000", "NaN": "f97e00",
    "NaN with a payload": "fb7ff8000000000001", "undefined": "f7", "simple value": "f820",
    "unassigned simple value": "e0", "below 64 bits": "3bffffffffffffffff", "invalid UTF-8": "61ff",
    "array of 2^62": "9b4000000000000000", "map of 2^62": "bb4000000000000000", "bytes of 2^62": "5b4000000000000000",
    "text of 2^63": "7b8000000000000000", "shared cycle": "d81c81d81d00", "tag inside a map": "a16161c101",
}  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_input_is_refused(data: str) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_untrusted(bytes.fromhex(data))


def test_every_tag_is_refused_whatever_it_holds() -> None:
    """No tag number gets through, known to cbor2 or not (the short forms, and long ones that are known or not)."""
    heads = [bytes([0xC0 | tag]) for tag in range(24)]
    heads += [bytes([0xD8, tag]) for tag in range(24, 256)]
    heads += [b"\xd9" + tag.to_bytes(2, "big") for tag in (256, 258, 260, 261, 1004, 5000, 43000, 55799, 65535)]
    for head in heads:
        for content in (b"\x61a", b"\x01", b"\x80", b"\xa0", b"\x41a", b"\x6a2020-01-01", b"\x49\x01" + bytes(8)):
            with pytest.raises(RemoteProtocolError):
                decode_untrusted(head + content)


def test_colliding_bignum_keys_are_refused_before_they_are_hashed() -> None:
    """A map of integer keys stops at the first key instead of filling a dictionary of collisions."""
    modulus = 2**61 - 1  # CPython's hash of an integer is its value modulo this
    keys = b"".join(b"\x1b" + (1 + index % 7 * modulus).to_bytes(8, "big") + b"\x01" for index in range(5000))
    with pytest.raises(RemoteProtocolError, match="map key must be a text string"):
        decode_untrusted(b"\xb9" + (5000).to_bytes(2, "big") + keys)


def test_mutations_are_parsed_canonically_or_refused() -> None:
    """4000 damaged encodings: each is refused, or is itself the canonical form of what it decodes to."""
    rng = random.Random(0)
    seeds = [
        encode({"type": "call", "id": 7, "body": {"uid": ["ffn.3", 1.5, None], "blob": b"\x00" * 30}}),
        encode([{"a": -1, "bb": 2**40}, True, "text", 0.1]),
    ]
    num_refused = 0
    for _ in range(4000):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        try:
            value = decode_untrusted(bytes(data))
        except RemoteProtocolError:
            num_refused += 1
        else:
            assert encode(value) == data
    assert 1000 < num_refused < 4000  # both branches were taken, or this test says nothing


class Kind(enum.StrEnum):
    ONE = "one"
    TWO = "two"


FIELDS: list[tuple[Field[Any], list[Any], list[Any]]] = [
    (integer(1, 5), [1, 5], [0, 6, True, 1.0, "1", None]),
    (real(), [-1e300, 0.0], [math.inf, -math.inf, math.nan, 1, True]),
    (real(1.0, 2.0), [1.0, 2.0], [0.5, 2.5, 1]),
    (text(1, 3), ["a", "\u00fcbe"], ["", "abcd", b"a", None]),
    (octets(2, 3), [b"ab", b"abc"], [b"a", b"abcd", "ab", bytearray(b"ab")]),
    (choice(Kind), ["one", "two"], ["ONE", "three", None, ["one"]]),
    (several(integer(0, 9), 2), [[], [0, 9]], [[0, 1, 2], [10], [True], (1,), None]),
    (rows(2), [[], [None, []]], [[1, 2, 3], (1,), None]),
    (optional(PORT), [None, 1, 65535], [0, 65536, "1"]),
    (HOST, ["h", "h" * 255], ["", "h" * 256, "h\u00f6st", b"h"]),
    (FLAG, [True, False], [0, 1, None, "true"]),
    (MAPPING, [{}, {"a": 1}], [[], None, "{}"]),
    (PEER_ID, [bytes(32)], [bytes(31), bytes(33), "0" * 32]),
]


@pytest.mark.parametrize(("field", "good", "bad"), FIELDS, ids=lambda each: getattr(each, "expected", ""))
def test_what_holds_travels_there_and_back_and_what_does_not_is_told(
    field: Field[Any], good: list[Any], bad: list[Any]
) -> None:
    """A refusal has the field's name, what it must be, and what came, however long that is."""
    for value in good:
        packed = field.pack(field.read_untrusted(value, "x"))
        assert (packed, type(packed)) == (value, type(value))
    for value in bad:
        with pytest.raises(RemoteProtocolError) as caught:
            field.of_untrusted({"speed": value}, "speed")
        assert str(caught.value).startswith(f"speed must be {field.expected}, got {value!r}"[:60])
        assert len(str(caught.value)) < 300


def test_meanings() -> None:
    """Ids are ids and names are members; a missing field reads as None."""
    assert PEER_ID.read_untrusted(bytes(32), "x") == PeerId(bytes(32))
    assert choice(Kind).read_untrusted("two", "x") is Kind.TWO
    assert several(choice(Kind), 2).read_untrusted(["two"], "x") == (Kind.TWO,)
    assert optional(PORT).of_untrusted({}, "port") is None
    with pytest.raises(RemoteProtocolError, match="port must be an integer from 1 to 65535, got None"):
        PORT.of_untrusted({}, "port")


@given(st.none() | st.integers() | st.lists(st.none() | st.integers(0, 99) | st.sampled_from(["", "h"]), max_size=3))
def test_a_row_is_one_value_for_each_field(value: Any) -> None:
    """Anything else is refused by the name of the whole, or of the value in it."""
    if isinstance(value, list) and len(value) == 2 and HOST.holds(value[0]) and PORT.holds(value[1]):
        assert row_untrusted(value, "a contact", host=HOST, port=PORT) == tuple(value)
        return
    with pytest.raises(RemoteProtocolError, match=r"^(a contact must be \[host, port\]|the \w+ of a contact must be )"):
        row_untrusted(value, "a contact", host=HOST, port=PORT)
