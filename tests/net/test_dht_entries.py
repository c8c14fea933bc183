"""Entries of records: who may write what, what is signed, and how long it is believed."""

import hashlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmoe_net.dht.entries import (
    MAX_LIFE_S,
    MAX_SKEW_S,
    MAX_VALUE_BYTES,
    Entry,
    EntryReader,
    check_life,
    check_suffix,
    encode_value,
    entry_to_wire,
    sign_entry,
)
from dmoe_net.dht.routing_table import key_id
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import PeerId
from dmoe_net.keys import Identity, Membership
from dmoe_net.wire.codec import decode_untrusted, encode

ALICE, BOB = Identity.from_seed(b"a" * 32), Identity.from_seed(b"b" * 32)
KEY = key_id("layer0.2d3")

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


def entry(
    identity: Identity = ALICE,
    value: object = 1,
    *,
    suffix: str = "",
    sequence: int = 7,
    issued_at: float = 1000.0,
    life_s: float = 30.0,
) -> Entry:
    return sign_entry(
        identity,
        KEY,
        suffix=suffix,
        value=None if value is None else encode_value(value),
        sequence=sequence,
        issued_at=issued_at,
        life_s=life_s,
    )


@given(value=values, suffix=st.text("abc/0", max_size=8), sequence=st.integers(0, 2**64 - 1))
def test_what_is_signed_is_read(value: object, suffix: str, sequence: int) -> None:
    """An entry that went through the codec is the same one, with the owner that its key proves."""
    sent = sign_entry(
        ALICE, KEY, suffix=suffix, value=encode_value(value), sequence=sequence, issued_at=12.3456, life_s=30.0
    )
    row = decode_untrusted(encode(entry_to_wire(sent, left_s=12.5)))
    read, left_s = EntryReader().read_untrusted(KEY, row)
    assert (read, left_s) == (sent, 12.5)
    assert read.value == decode_untrusted(encode(value))
    assert (read.owner, read.suffix) == (ALICE.peer_id, suffix)
    assert read.owner == PeerId(hashlib.sha256(ALICE.public_key).digest())
    assert read.issued_at == 12.346, "times travel as whole milliseconds"


def test_the_signature_covers_everything_but_what_is_left() -> None:
    """No field can be changed, no row moved to another key or swarm or owner; what is left is each holder's word."""
    row = entry_to_wire(entry(suffix="a"), left_s=30.0)
    reader = EntryReader()
    reader.read_untrusted(KEY, row)
    others = [BOB.public_key, "b", 8, 1_000_001, 30_001, encode(2), b"\0" * 64]
    for place, other in enumerate(others):
        with pytest.raises(RemoteProtocolError, match="is not signed by it"):
            reader.read_untrusted(KEY, [*row[:place], other, *row[place + 1 :]])
    with pytest.raises(RemoteProtocolError, match="is not signed by it"):
        reader.read_untrusted(KEY, [*row[:5], None, *row[6:]])
    with pytest.raises(RemoteProtocolError, match="is not signed by it"):
        reader.read_untrusted(KEY ^ 1, row)
    with pytest.raises(RemoteProtocolError, match="is not signed by it"):
        EntryReader(Membership(secret=b"s" * 16).tag).read_untrusted(KEY, row)
    assert reader.read_untrusted(KEY, [*row[:7], 1])[1] == 0.001


def test_a_suffix_cannot_be_taken_for_a_number() -> None:
    """The length of the suffix is signed: its last byte is not the first of the sequence."""
    row = entry_to_wire(entry(suffix="aA", sequence=1), left_s=30.0)
    moved = [row[0], "a", (ord("A") << 56) | 0, *row[3:]]
    with pytest.raises(RemoteProtocolError, match="is not signed by it"):
        EntryReader().read_untrusted(KEY, moved)


@pytest.mark.parametrize(
    ("place", "wrong", "names"),
    [
        (0, b"short", "public_key"),
        (1, "x" * 65, "suffix"),
        (1, "\u00e9", "ASCII"),
        (2, -1, "sequence"),
        (3, 1.5, "issued_ms"),
        (4, 300_001, "life_ms"),
        (4, 0, "life_ms"),
        (5, b"x" * (MAX_VALUE_BYTES + 1), "value"),
        (6, b"", "signature"),
        (7, 0, "left_ms"),
    ],
)
def test_a_malformed_row_is_refused_by_its_field(place: int, wrong: object, names: str) -> None:
    """The error names the field."""
    row = entry_to_wire(entry(), left_s=30.0)
    with pytest.raises(RemoteProtocolError, match=names):
        EntryReader().read_untrusted(KEY, [*row[:place], wrong, *row[place + 1 :]])


def test_a_value_that_no_codec_wrote_is_refused_though_it_is_signed() -> None:
    """The owner may sign anything; readers keep what they can read."""
    signed = sign_entry(
        ALICE, KEY, value=b"\x18\x01", sequence=1, issued_at=0.0, life_s=1.0
    )  # 1, not in its shortest form
    with pytest.raises(RemoteProtocolError):
        EntryReader().read_untrusted(KEY, entry_to_wire(signed, left_s=1.0))


def test_each_signature_is_verified_once() -> None:
    """A good one is remembered, a bad one is not."""
    reader = EntryReader()
    row = entry_to_wire(entry(), left_s=30.0)
    for _ in range(3):
        reader.read_untrusted(KEY, row)
    assert reader.verified == 1
    forged = [*row[:2], 8, *row[3:]]
    for _ in range(2):
        with pytest.raises(RemoteProtocolError):
            reader.read_untrusted(KEY, forged)
    assert reader.verified == 3


def test_a_withdrawn_entry_has_no_value_and_none_is_a_value() -> None:
    """None as a value is stored as CBOR's null; a withdrawal has no value at all."""
    gone, none = entry(value=None), sign_entry(ALICE, KEY, value=encode_value(None), sequence=1, issued_at=0, life_s=1)
    for sent, is_withdrawn in ((gone, True), (none, False)):
        read, _ = EntryReader().read_untrusted(KEY, entry_to_wire(sent, left_s=1.0))
        assert (read.value, read.is_withdrawn) == (None, is_withdrawn)


def test_life_counts_from_the_first_sight() -> None:
    """Whatever the clocks say, as long as they differ by no more than two minutes: a node at -30 s is found."""
    issued = entry(issued_at=1000.0, life_s=30.0)
    assert issued.left(1000.0) == 30.0
    assert issued.left(1000.0, 12.0) == 12.0, "a holder says how much has passed"
    assert issued.left(1000.0, 99.0) == 30.0, "but nobody makes it live longer"
    for off_s in (-30.0, -119.0, 119.0):
        assert issued.left(1000.0 + off_s) == 30.0
    assert issued.left(1000.0 - MAX_SKEW_S - 1) == 0.0, "issued too far in the future"
    # 30 s of life end at 1030; 120 s of doubt later nobody believes it any more, whoever hands it on.
    assert issued.left(1149.0, 30.0) == pytest.approx(1.0)
    assert issued.left(1150.0, 30.0) == 0.0
    assert issued.left(5000.0) < 0


def test_what_may_not_be_stored_is_said() -> None:
    """Lives, suffixes and values out of bounds."""
    for life_s in (0, -1, MAX_LIFE_S + 1, math.nan, math.inf, "30", True):
        with pytest.raises(ValueError, match="lives up to 300 s"):
            check_life(life_s)  # type: ignore[arg-type]
    for suffix in ("x" * 65, "\u00e9", 3):
        with pytest.raises(ValueError, match="64 ASCII characters"):
            check_suffix(suffix)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="16384 encoded bytes"):
        encode_value(b"x" * MAX_VALUE_BYTES)
    with pytest.raises(ValueError, match="no DHT value"):
        encode_value({1, 2})
