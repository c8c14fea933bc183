"""What goes over the wire: round trips, pages that fit a header, and garbage that raises only one error."""

import math
import random
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmoe_net.dht import messages
from dmoe_net.dht.messages import PAGE_BYTES, FindReply
from dmoe_net.dht.records import MAX_VALUE_BYTES, Dictionary, SubkeyEntry, make_entry
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import Address, Contact, PeerId
from tests.net.test_dht_records import values

RNG = random.Random(0)
PEERS = [Contact(PeerId.draw(RNG), Address(f"host-{n}.example", 1 + n)) for n in range(32)]

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=33)
garbage = st.recursive(
    scalars,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=2),
    max_leaves=4,
)
ids = st.binary(min_size=32, max_size=32) | garbage
bodies = st.fixed_dictionaries(
    {},
    optional={
        "target": ids,
        "record": st.booleans() | garbage,
        "after": st.text() | garbage,
        "more": st.booleans() | garbage,
        "contacts": st.lists(st.lists(ids | st.text() | st.integers(0, 99999), min_size=3, max_size=3)) | garbage,
        "entries": st.lists(st.lists(garbage, min_size=3, max_size=3), max_size=3) | garbage,
        "accepted": st.lists(st.booleans() | garbage, max_size=3),
    },
)


def test_a_find_survives_the_wire() -> None:
    """Request and answer read back as they were written."""
    body = messages.find_body(12345, record=True, after="k")
    assert messages.parse_find_untrusted(body) == (12345, True, "k")
    entries = (("a", make_entry(None, 5.0)), ("b", make_entry([], 6.0)))
    for reply in (FindReply(tuple(PEERS), entries, more=True), FindReply(())):
        assert messages.parse_find_reply_untrusted(messages.find_reply_body(reply), latest_expiration=9.0) == reply


def test_a_store_survives_the_wire() -> None:
    """Its entries read back with their types, and its target."""
    entries = ((None, make_entry(0, 5.0)), ("", make_entry(False, 6.0)))
    body = messages.store_body(1, entries)
    assert messages.parse_store_untrusted(body, latest_expiration=9.0) == (1, entries)


@given(bodies)
@settings(max_examples=60, deadline=None)
def test_garbage_raises_only_a_protocol_error(body: dict[str, Any]) -> None:
    """Every parser either reads a body or raises RemoteProtocolError."""
    parsers = [
        messages.parse_find_untrusted,
        lambda b: messages.parse_store_untrusted(b, latest_expiration=9.0),
        lambda b: messages.parse_find_reply_untrusted(b, latest_expiration=9.0),
        lambda b: messages.parse_store_reply_untrusted(b, count=1),
    ]
    for parse in parsers:
        with suppress(RemoteProtocolError):
            parse(body)


@pytest.mark.parametrize(
    "item",
    [
        [],
        [b"x" * 31, "h", 1],
        [b"x" * 32, "", 1],
        [b"x" * 32, "h" * 256, 1],
        [b"x" * 32, "h\u00f6st", 1],
        [b"x" * 32, "h", 0],
        [b"x" * 32, "h", 65536],
        [b"x" * 32, "h", True],
        [b"x" * 32, "h", 1.0],
        {"peer_id": b"x" * 32},
        None,
    ],
)
def test_a_malformed_contact_is_refused(item: Any) -> None:
    """Wrong lengths, ports and types raise RemoteProtocolError."""
    with pytest.raises(RemoteProtocolError):
        messages.parse_contact_untrusted(item)


def test_too_many_contacts_are_refused() -> None:
    """An answer with more than 32 contacts comes from a broken peer."""
    body = {"contacts": [messages.contact_to_wire(PEERS[0])] * 33}
    with pytest.raises(RemoteProtocolError, match="32"):
        messages.parse_find_reply_untrusted(body, latest_expiration=9.0)


def test_a_plain_value_stands_alone() -> None:
    """An answer that mixes a plain value with subkeys, or pages it, is refused."""
    for entries, more in ([[None, 1, 5.0], ["a", 1, 5.0]], False), ([[None, 1, 5.0]], True):
        body = {"contacts": [], "entries": entries, "more": more}
        with pytest.raises(RemoteProtocolError, match="plain"):
            messages.parse_find_reply_untrusted(body, latest_expiration=9.0)


def test_the_largest_answer_fits_a_header() -> None:
    """32 contacts of the longest names and a full page encode to less than 64 KiB."""
    cbor2 = pytest.importorskip("cbor2")
    contacts = tuple(Contact(PeerId.draw(RNG), Address("h" * 255, 65535)) for _ in range(32))
    entries = [(f"{n:0256}", make_entry(b"x" * (MAX_VALUE_BYTES - 5), 1e9)) for n in range(5)]
    (page, *_) = messages.batches(entries)
    assert len(page) == 2
    reply = FindReply(contacts, page, more=True)
    assert 32 * 1024 < len(cbor2.dumps(messages.find_reply_body(reply))) < 64 * 1024


def test_batches_keep_order_and_fit() -> None:
    """Cutting loses nothing, and no batch of more than one entry passes the page size."""
    entries = [(f"{n}", make_entry(b"x" * (n * 37 % 5000), 1.0)) for n in range(100)]
    cut = list(messages.batches(entries))
    assert [entry for batch in cut for entry in batch] == entries
    assert all(sum(entry.size_bytes for _, entry in batch) <= PAGE_BYTES for batch in cut)
    assert list(messages.batches([])) == []


def test_pages_cover_a_record_once() -> None:
    """Reading page after page gives every entry once, in order, each page within its budget; a plain value is one."""
    record = Dictionary(entries={f"{n}": make_entry(b"x" * (n % 7) * 1000, 1.0) for n in range(200)})
    seen: list[SubkeyEntry] = []
    after, more, num_pages = None, True, 0
    while more:
        entries, more = messages.page(record, after)
        assert sum(entry.size_bytes for _, entry in entries) <= PAGE_BYTES
        after, num_pages = entries[-1][0], num_pages + 1
        seen += entries
    assert dict(seen) == record.entries
    assert [subkey for subkey, _ in seen] == sorted(record.entries)
    assert num_pages > 10
    assert messages.page(make_entry(1, 5.0), None) == (((None, make_entry(1, 5.0)),), False)
    assert messages.page(None, None) == ((), False)


@given(values, st.floats(0, 1e9), st.none() | st.text(max_size=30))
@settings(max_examples=50, deadline=None)
def test_entries_survive_the_wire(value: Any, expiration: float, subkey: str | None) -> None:
    """What is written for the wire reads back equal, with falsy values as good as any."""
    entry = make_entry(value, expiration)
    body = messages.store_body(7, [(subkey, entry)])
    assert messages.parse_store_untrusted(body, latest_expiration=1e9) == (7, ((subkey, entry),))


@pytest.mark.parametrize(
    "item",
    [["a" * 257, 1, 1.0], ["a", 1, 10**400], ["a", 1, math.inf], [1, 1, 1.0], ["a", math.nan, 1.0], ["a", 1], {}],
)
def test_a_malformed_entry_is_refused(item: Any) -> None:
    """Long subkeys, expirations that are no float, values that no node may hold, rows of another length."""
    with pytest.raises(RemoteProtocolError, match=r"DHT|subkey|expiration"):
        messages.parse_entries_untrusted([item], 100.0)


def test_strangers_cannot_store_for_ever() -> None:
    """An expiration beyond the allowed one is brought down to it."""
    ((_, entry),) = messages.parse_entries_untrusted([["a", 1, 1e300]], 100.0)
    assert entry.expiration == 100.0
