"""Messages on the wire: round trips, pages that fit a header, and garbage that raises only one error."""

import random
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmoe_net.dht import messages
from dmoe_net.dht.copies import Position
from dmoe_net.dht.entries import MAX_VALUE_BYTES, Entry, EntryReader, encode_value, sign_entry
from dmoe_net.dht.messages import PAGE_BYTES, Find, FindReply
from dmoe_net.dht.storage import NO_ROOM, EntryStorage, Refusal
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.keys import Identity

ALICE = Identity.from_seed(b"a" * 32)
KEY = 12345


def entry(value: object = 1, *, suffix: str = "", sequence: int = 1) -> Entry:
    return sign_entry(
        ALICE, KEY, suffix=suffix, value=encode_value(value), sequence=sequence, issued_at=5.0, life_s=30.0
    )


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
        "since": st.lists(st.integers(0, 9), min_size=2, max_size=2) | garbage,
        "copy": st.lists(st.integers(0, 9) | st.booleans(), min_size=3, max_size=3) | garbage,
        "dead": st.lists(ids, max_size=3) | garbage,
        "contacts": st.integers(0, 40)
        | st.lists(st.lists(ids | st.text() | st.integers(0, 99999), min_size=3, max_size=3))
        | garbage,
        "entries": st.lists(st.lists(garbage, min_size=8, max_size=8), max_size=3) | garbage,
        "verdicts": st.lists(st.booleans() | garbage, max_size=3),
    },
)


def test_a_find_survives_the_wire() -> None:
    """Question and answer read back as they were written."""
    dead = (PEERS[0].peer_id, PEERS[1].peer_id)
    for question in (Find(KEY, 12, True, Position(7, 9), dead), Find(KEY, 0)):
        assert messages.parse_find_untrusted(messages.find_body(question)) == question
    entries = [(entry(None), 3.0), (entry([], suffix="b"), 4.0)]
    for reply in (FindReply(tuple(PEERS), Position(2**64 - 1, 3), entries, more=True), FindReply(())):
        assert messages.parse_found_untrusted(messages.found_body(reply), KEY, EntryReader()) == reply


def test_a_copy_without_changes_is_not_no_copy() -> None:
    """A holder says that it has the record though nothing in it is news."""
    body = messages.found_body(FindReply((), Position(1, 2)))
    assert messages.parse_found_untrusted(body, KEY, EntryReader()) == FindReply((), Position(1, 2), [], False)


def test_a_store_survives_the_wire() -> None:
    """Entries with what is left of their lives, and each kind of verdict."""
    entries = [(entry(0), 5.0), (entry(False, suffix="x"), 6.0)]
    body = messages.store_body(KEY, entries, [PEERS[3].peer_id])
    assert messages.parse_store_untrusted(body, EntryReader()) == (KEY, entries)
    assert messages.dead_untrusted(body) == (PEERS[3].peer_id,)
    verdicts = [None, NO_ROOM, Refusal(held=entry(2, sequence=9)), Refusal(ahead_s=-240.5)]
    body = messages.stored_body(verdicts, PEERS[:5], owner=ALICE.peer_id)
    assert messages.parse_stored_untrusted(body, KEY, EntryReader(), count=4) == verdicts
    assert messages.contacts_untrusted(body) == tuple(PEERS[:5])
    to_others = messages.stored_body(verdicts[2:3], (), owner=PEERS[0].peer_id)
    assert messages.parse_stored_untrusted(to_others, KEY, EntryReader(), count=1) == [NO_ROOM]
    with pytest.raises(RemoteProtocolError, match="expected 3 verdicts, got 4"):
        messages.parse_stored_untrusted(body, KEY, EntryReader(), count=3)


@given(bodies)
@settings(max_examples=60)
def test_garbage_raises_only_a_protocol_error(body: dict[str, Any]) -> None:
    """Every parser either reads a body or raises RemoteProtocolError."""
    parsers = [
        messages.parse_find_untrusted,
        lambda b: messages.parse_store_untrusted(b, EntryReader()),
        lambda b: messages.parse_found_untrusted(b, KEY, EntryReader()),
        lambda b: messages.parse_stored_untrusted(b, KEY, EntryReader(), count=1),
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
    """An answer with more than 32 contacts comes from a broken peer, and so does a question for more."""
    body: dict[str, Any] = {"contacts": [messages.contact_to_wire(PEERS[0])] * 33}
    with pytest.raises(RemoteProtocolError, match="32"):
        messages.parse_found_untrusted(body, KEY, EntryReader())
    with pytest.raises(RemoteProtocolError, match="32"):
        messages.parse_find_untrusted(messages.find_body(Find(KEY, 33)))


def test_the_largest_answer_fits_a_header() -> None:
    """32 contacts of the longest names and a full page encode to less than 64 KiB."""
    cbor2 = pytest.importorskip("cbor2")
    contacts = tuple(Contact(PeerId.draw(RNG), Address("h" * 255, 65535)) for _ in range(32))
    entries = [(entry(b"x" * (MAX_VALUE_BYTES - 5), suffix="s" * 64, sequence=n), 300.0) for n in range(5)]
    (page, *_) = messages.batches(entries)
    assert len(page) == 2
    reply = FindReply(contacts, Position(2**64 - 1, 2**64 - 1), page, more=True)
    assert 32 * 1024 < len(cbor2.dumps(messages.found_body(reply))) < 64 * 1024


def test_an_entry_takes_no_more_than_it_says() -> None:
    """`size_bytes` bounds its row on the wire, which pages and budgets count on."""
    cbor2 = pytest.importorskip("cbor2")
    for value, suffix in ((0, ""), (b"x" * 16_000, "s" * 64), ("y" * 300, "claim")):
        each = sign_entry(
            ALICE, KEY, suffix=suffix, value=encode_value(value), sequence=2**64 - 1, issued_at=4e9, life_s=300.0
        )
        assert len(cbor2.dumps(messages.entry_to_wire(each, left_s=300.0))) <= each.size_bytes


def test_batches_keep_order_and_fit() -> None:
    """Cutting loses nothing, and no batch of more than one entry passes the page size."""
    entries = [(entry(b"x" * (n * 37 % 5000), sequence=n), 1.0) for n in range(100)]
    cut = list(messages.batches(entries))
    assert [each for batch in cut for each in batch] == entries
    assert all(sum(each.size_bytes for each, _ in batch) <= PAGE_BYTES for batch in cut)
    assert list(messages.batches([])) == []


def test_pages_cover_a_record_once() -> None:
    """Reading on since the last change of each page gives every entry once, in the order of changes."""
    storage = EntryStorage(max_bytes=10**7)
    rng = random.Random(2)
    for number in range(200):
        owner = Identity.from_seed(rng.randbytes(32))
        value = encode_value(b"x" * (number % 7) * 1000)
        each = sign_entry(owner, KEY, value=value, sequence=1, issued_at=0.0, life_s=300.0)
        storage.store(KEY, [(each, 100.0)], account=owner.peer_id, now=0.0)
    seen: list[Entry] = []
    since, more, num_pages = 0, True, 0
    while more:
        entries, since, more = messages.page(storage.since(KEY, since, 40.0), 40.0)
        assert all(left_s == 60.0 for _, left_s in entries)
        seen += [each for each, _ in entries]
        num_pages += 1
    assert seen == [held.entry for held in storage.get(KEY, 0.0)]
    assert num_pages > 10
    assert messages.page((), 0.0) == ((), 0, False)
