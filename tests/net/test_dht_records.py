"""Records: which copy wins, what is too large, and what strangers may write."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmoe_net.dht.records import (
    MAX_DICTIONARY_BYTES,
    MAX_SUBKEYS,
    MAX_VALUE_BYTES,
    Dictionary,
    Record,
    live,
    make_entry,
    merge,
    merge_entries,
    size_bytes,
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3), max_leaves=8
)


def plain(value: Any, expiration: float) -> Record:
    return make_entry(value, expiration)


def table(**entries: tuple[Any, float]) -> Dictionary:
    return Dictionary(entries={subkey: make_entry(value, end) for subkey, (value, end) in entries.items()})


def put(record: Record | None, subkey: str | None, value: Any, expiration: float) -> tuple[Record | None, bool]:
    after, (accepted,) = merge_entries(record, [(subkey, make_entry(value, expiration))])
    return after, accepted


@pytest.mark.parametrize(
    ("before", "subkey", "value", "expiration", "after", "accepted"),
    [
        (None, None, "x", 5.0, plain("x", 5.0), True),
        (None, "a", "x", 5.0, table(a=("x", 5.0)), True),
        (plain("old", 5.0), None, "new", 6.0, plain("new", 6.0), True),
        (plain("old", 5.0), None, "new", 4.0, plain("old", 5.0), False),
        (plain("old", 5.0), None, "new", 5.0, plain("old", 5.0), False),
        (plain("old", 5.0), "a", "new", 6.0, table(a=("new", 6.0)), True),
        (plain("old", 5.0), "a", "new", 5.0, plain("old", 5.0), False),
        (plain("old", 5.0), "a", "new", 4.0, plain("old", 5.0), False),
        (table(a=(1, 5.0)), "a", 2, 6.0, table(a=(2, 6.0)), True),
        (table(a=(1, 5.0)), "a", 2, 4.0, table(a=(1, 5.0)), False),
        (table(a=(1, 5.0)), "b", 2, 4.0, table(a=(1, 5.0), b=(2, 4.0)), True),
        (table(a=(1, 5.0), b=(2, 7.0)), None, "x", 6.0, table(a=(1, 5.0), b=(2, 7.0)), False),
        (table(a=(1, 5.0), b=(2, 7.0)), None, "x", 8.0, plain("x", 8.0), True),
        (table(a=(1, 5.0)), "a", None, 6.0, table(a=(None, 6.0)), True),
    ],
)
def test_the_later_expiration_wins(
    before: Record | None, subkey: str | None, value: Any, expiration: float, after: Record, accepted: bool
) -> None:
    """Whenever plain values and dictionaries meet: the later expiration wins, a tie changes nothing."""
    assert put(before, subkey, value, expiration) == (after, accepted)


def test_storing_the_same_again_is_accepted() -> None:
    """A retry is no conflict; but 1, 1.0 and True are three different values."""
    assert put(plain(1, 5.0), None, 1, 5.0) == (plain(1, 5.0), True)
    assert put(table(a=(1, 5.0)), "a", 1, 5.0)[1]
    assert not put(plain(1, 5.0), None, True, 5.0)[1]
    assert not put(plain(1, 5.0), None, 1.0, 5.0)[1]
    assert not put(plain(1, 5.0), "a", 1, 5.0)[1]


def test_merging_does_not_change_its_arguments() -> None:
    """Records are values: a merge makes a new one."""
    before = table(a=(1, 5.0))
    put(before, "b", 2, 6.0)
    assert before == table(a=(1, 5.0))


@given(st.permutations([("a", 1, 3.0), ("a", 2, 5.0), ("b", 3, 4.0), ("a", 4, 4.0), ("b", 5, 9.0)]))
@settings(max_examples=60, deadline=None)
def test_the_order_of_stores_does_not_matter(stores: list[tuple[str, int, float]]) -> None:
    """Subkey stores with distinct expirations lead to one dictionary in any order."""
    record: Record | None = None
    for subkey, value, expiration in stores:
        record, _ = put(record, subkey, value, expiration)
    assert isinstance(record, Dictionary)
    assert dict(record.entries) == dict(table(a=(2, 5.0), b=(5, 9.0)).entries)


def test_copies_are_merged_subkey_by_subkey() -> None:
    """Two dictionaries become their union of latest entries; a plain copy is weighed against the whole."""
    left, right = table(a=(1, 5.0), b=(2, 9.0)), table(a=(3, 6.0), c=(4, 1.0))
    both = {"a": (3, 6.0), "b": (2, 9.0), "c": (4, 1.0)}
    assert merge(left, right) == merge(right, left) == table(**both)
    assert merge(left, plain("x", 8.0)) == left
    assert merge(plain("x", 10.0), left) == plain("x", 10.0)
    assert merge(None, left) == merge(left, None) == left
    assert merge(None, None) is None


def test_an_expired_part_is_gone() -> None:
    """`live` keeps what ends strictly later than now, and an emptied dictionary is nothing."""
    record = table(a=(1, 5.0), b=(2, 7.0))
    assert live(record, 4.0) is record
    assert live(record, 5.0) == table(b=(2, 7.0))
    assert live(record, 7.0) is None
    assert live(plain(0, 5.0), 4.9) == plain(0, 5.0)
    assert live(plain(0, 5.0), 5.0) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1: 2}, "map keys must be strings"),
        ({1}, "builtins.set"),
        (object(), "builtins.object"),
        (math.nan, "NaN"),
        (2**64, "64 bits"),
        (-(2**63) - 1, "64 bits"),
        (b"x" * MAX_VALUE_BYTES, "at most 16384 encoded bytes"),
        ([[[[[[[[[[[[[]]]]]]]]]]]]], "nested"),
        ("\ud800", "surrogates"),
    ],
)
def test_what_cbor_cannot_carry_is_refused(value: Any, message: str) -> None:
    """Foreign types, NaN, over-long integers, large and deep values raise ValueError."""
    with pytest.raises(ValueError, match=message):
        make_entry(value, 1.0)


@pytest.mark.parametrize("expiration", [math.nan, math.inf, -math.inf, 10**400, True, "soon", None])
def test_an_expiration_is_a_finite_number(expiration: Any) -> None:
    """Anything else raises ValueError."""
    with pytest.raises(ValueError, match="finite"):
        make_entry(1, expiration)


@given(values)
@settings(max_examples=60, deadline=None)
def test_the_measured_size_bounds_the_real_one(value: Any) -> None:
    """The size is never below the length of the CBOR encoding (cbor2 is the independent oracle)."""
    cbor2 = pytest.importorskip("cbor2")
    entry = make_entry(value, 1.5)
    assert len(cbor2.dumps([None, value, 1.5], canonical=True)) <= entry.size_bytes


def test_a_dictionary_keeps_its_latest_entries() -> None:
    """Beyond the bound on subkeys the earliest expiring entries go; one that cannot stay is not accepted."""
    full = Dictionary(entries={f"{n:05}": make_entry(n, 100.0 + n) for n in range(MAX_SUBKEYS)})
    after, accepted = put(full, "new", 1, 1000.5)
    assert accepted
    assert isinstance(after, Dictionary)
    assert len(after.entries) == MAX_SUBKEYS
    assert "00000" not in after.entries
    after, accepted = put(full, "early", 1, 1.0)
    assert not accepted
    assert after == full


def test_a_dictionary_is_bounded_in_bytes() -> None:
    """A hundred values of 15 KB do not fit one MiB: the latest stay."""
    updates = [(f"{n:03}", make_entry(b"x" * 15_000, 1.0 + n)) for n in range(100)]
    record, accepted = merge_entries(None, updates)
    assert isinstance(record, Dictionary)
    assert size_bytes(record) <= MAX_DICTIONARY_BYTES
    assert accepted == tuple(subkey in record.entries for subkey, _ in updates)
    assert max(record.entries) == "099"
    assert 60 < len(record.entries) < 70  # 2**20 / 15 000 = 69.9
