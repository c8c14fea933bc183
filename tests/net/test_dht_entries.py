"""Entries of records: who may write what, what is signed, and how long it is believed; the vectors of their
specification, checked by code that knows the specification alone, and against the library; and messages on the wire."""

import hashlib
import random
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import cbor2
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from dmoe_net.dht import messages
from dmoe_net.dht.copies import Position
from dmoe_net.dht.entries import (
    MAX_SKEW_S,
    MAX_VALUE_BYTES,
    Entry,
    EntryReader,
    encode_value,
    entry_to_wire,
    sign_entry,
)
from dmoe_net.dht.messages import PAGE_BYTES, Find, FindReply
from dmoe_net.dht.routing_table import key_id
from dmoe_net.dht.storage import NO_ROOM, EntryStorage, Held, Refusal
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.keys import OPEN_SWARM, Identity, Membership
from dmoe_net.wire.codec import decode_untrusted, encode

ALICE = Identity.from_seed(b"a" * 32)
KEY = key_id("layer0.2d3")

any_value = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


def entry(value: object = 1, *, owner: Identity = ALICE, **fields: Any) -> Entry:
    """An entry under the key; None is a withdrawal."""
    known = {"sequence": 7, "issued_at": 1000.0, "life_s": 30.0, **fields}
    return sign_entry(owner, KEY, value=None if value is None else encode_value(value), **known)


@given(value=any_value, suffix=st.text("abc/0", max_size=8), sequence=st.integers(0, 2**64 - 1))
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


def test_a_value_cannot_be_taken_away_and_what_is_left_is_each_holders_word() -> None:
    """Nor can another be the owner; the signature covers all else, too: see the forgeries of the vectors below."""
    row = entry_to_wire(entry(suffix="a"), left_s=30.0)
    for forgery in ([*row[:5], None, *row[6:]], [Identity.from_seed(b"b" * 32).public_key, *row[1:]]):
        with pytest.raises(RemoteProtocolError, match="is not signed by it"):
            EntryReader().read_untrusted(KEY, forgery)
    assert EntryReader().read_untrusted(KEY, [*row[:7], 1])[1] == 0.001


def test_a_malformed_row_is_refused_by_its_field() -> None:
    row = entry_to_wire(entry(), left_s=30.0)
    names = ("public_key", "suffix", "sequence", "issued_ms", "life_ms", "value", "signature", "left_ms")
    wrong = ([b"short"], ["x" * 65, "\u00e9"], [-1], [1.5], [300_001, 0], [b"x" * (MAX_VALUE_BYTES + 1)], [b""], [0])
    for place, (name, values) in enumerate(zip(names, wrong, strict=True)):
        for value in values:
            with pytest.raises(RemoteProtocolError, match=name):
                EntryReader().read_untrusted(KEY, [*row[:place], value, *row[place + 1 :]])


def test_a_value_that_no_codec_wrote_is_refused_though_it_is_signed() -> None:
    """The owner may sign anything; readers keep what they can read."""
    raw = b"\x18\x01"  # 1, not in its shortest form
    signed = sign_entry(ALICE, KEY, value=raw, sequence=1, issued_at=0.0, life_s=1.0)
    with pytest.raises(RemoteProtocolError):
        EntryReader().read_untrusted(KEY, entry_to_wire(signed, left_s=1.0))


def test_each_signature_is_verified_once() -> None:
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


def test_an_entry_that_somebody_holds_is_the_same_for_all_readers() -> None:
    """One verification for a process, for exactly this entry; once nobody holds it, it has to prove itself again."""
    first, second, elsewhere = EntryReader(), EntryReader(), EntryReader(Membership(secret=b"s" * 16).tag)
    row = entry_to_wire(entry("held"), left_s=30.0)
    held, _ = first.read_untrusted(KEY, row)
    again, left_s = second.read_untrusted(KEY, [*row[:7], 9000])
    assert again is held
    assert (left_s, second.verified) == (9.0, 0)
    forgeries = [(second, KEY + 1, row), (elsewhere, KEY, row)]
    forgeries += [(second, KEY, [*row[:place], row[place] + 1, *row[place + 1 :]]) for place in (2, 3, 4)]
    forgeries += [(second, KEY, [*row[:place], value, *row[place + 1 :]]) for place, value in ((1, "b"), (5, b"\x01"))]
    for reader, key, forged in forgeries:
        with pytest.raises(RemoteProtocolError, match="is not signed by it"):
            reader.read_untrusted(key, forged)
    del held, again
    third = EntryReader()
    third.read_untrusted(KEY, row)
    assert third.verified == 1


def test_a_withdrawn_entry_has_no_value_and_none_is_a_value() -> None:
    """None as a value is stored as CBOR's null; a withdrawal has no value at all."""
    gone, none = entry(None), sign_entry(ALICE, KEY, value=encode_value(None), sequence=1, issued_at=0, life_s=1)
    for sent, is_withdrawn in ((gone, True), (none, False)):
        read, _ = EntryReader().read_untrusted(KEY, entry_to_wire(sent, left_s=1.0))
        assert (read.value, read.is_withdrawn) == (None, is_withdrawn)


def test_life_counts_from_the_first_sight() -> None:
    """A node at -30 s is found: clocks may differ by up to two minutes."""
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


README = Path(__file__).parents[2] / "net" / "dmoe_net" / "dht" / "README.md"


def vectors() -> dict[str, bytes]:
    """The named values of the page's last section."""
    section = README.read_text().partition("## Vectors")[2]
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if match := re.fullmatch(r"    (\S.*?)(?:  +([0-9a-f]+))?", line):
            name = match[1]
            found[name] = match[2] or ""
        elif match := re.fullmatch(r"        ([0-9a-f]+)", line):
            found[name] += match[1]
    return {name: bytes.fromhex(value) for name, value in found.items()}


def signed_bytes(tag: bytes, key: bytes, row: list[Any]) -> bytes:
    """Bytes that are signed, written anew after the page."""
    public_key, suffix, sequence, issued_ms, life_ms, value, *_ = row
    return b"".join(
        (
            b"dmoe dht entry 1\0", tag, key, public_key, bytes([len(suffix)]), suffix.encode(),
            sequence.to_bytes(8), issued_ms.to_bytes(8), life_ms.to_bytes(4), b"\0", value,
        )
    )  # fmt: skip


def test_the_page_agrees_with_the_standards() -> None:
    """Hashes are hashlib's, signatures are of RFC 8032's own curve, rows are a CBOR library's."""
    page = vectors()
    key = Ed25519PrivateKey.from_private_bytes(page["seed of the key"])
    assert key.public_key().public_bytes_raw() == page["public key"]
    assert hashlib.sha256(page["public key"]).digest() == page["peer id"]
    assert hashlib.sha256(b"layer0.2d3").digest() == page['key "layer0.2d3"']
    row = cbor2.loads(page["row in CBOR"])
    assert row[:5] == [page["public key"], "claim", 1_700_000_000_123, 1_700_000_000_123, 30_000]
    assert row[5:] == [page["value"], page["signature"], 12_500]
    assert cbor2.loads(page["value"]) == [["10.0.0.1", 31337], True]
    signed = signed_bytes(page["swarm tag, no secret"], page['key "layer0.2d3"'], row)
    assert signed == page["signed, after the purpose"]
    assert key.sign(b"dmoe_jax signed data v1\0" + signed) == page["signature"]
    other = signed_bytes(page["swarm tag, that secret"], page['key "layer0.2d3"'], row)
    with pytest.raises(InvalidSignature):
        Ed25519PublicKey.from_public_bytes(page["public key"]).verify(
            page["signature"], b"dmoe_jax signed data v1\0" + other
        )


def test_the_library_agrees_with_the_page() -> None:
    """It makes the same bytes, and refuses the forgeries that the page names."""
    page = vectors()
    identity = Identity.from_seed(page["seed of the key"])
    assert identity.peer_id.raw == page["peer id"]
    assert page["swarm tag, no secret"] == OPEN_SWARM
    assert Membership(secret=page["secret"]).tag == page["swarm tag, that secret"]
    times = {"sequence": 1_700_000_000_123, "issued_at": 1_700_000_000.123, "life_s": 30.0}
    sent = entry([["10.0.0.1", 31337], True], owner=identity, suffix="claim", **times)
    row = entry_to_wire(sent, left_s=12.5)
    assert cbor2.dumps(row) == page["row in CBOR"]
    reader = EntryReader()
    assert reader.read_untrusted(KEY, row) == (sent, 12.5)
    others = [bytes(32), "Claim", 0, 0, 1, b"\x01", bytes(64)]
    forgeries = [(KEY, [*row[:place], other, *row[place + 1 :]]) for place, other in enumerate(others)]
    # The length of the suffix is signed: its last byte is not the first of the sequence.
    forgeries.append((KEY, [row[0], "clai", (ord("m") << 56) + (1_700_000_000_123 >> 8), *row[3:]]))
    for key, forgery in [*forgeries, (KEY + 1, row)]:
        with pytest.raises(RemoteProtocolError, match="is not signed by it"):
            reader.read_untrusted(key, forgery)
    with pytest.raises(RemoteProtocolError, match="is not signed by it"):
        EntryReader(Membership(secret=page["secret"]).tag).read_untrusted(KEY, row)


RNG = random.Random(0)
PEERS = [Contact(PeerId.draw(RNG), Address(f"host-{n}.example", 1 + n)) for n in range(32)]

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=33)
garbage = st.recursive(
    scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=2), max_leaves=4
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
    dead = (PEERS[0].peer_id, PEERS[1].peer_id)
    for question in (Find(KEY, 12, True, Position(7, 9), dead), Find(KEY, 0)):
        assert messages.parse_find_untrusted(messages.find_body(question)) == question
    entries = [(entry(None), 3.0), (entry([], suffix="b"), 4.0)]
    last, later = Position(2**64 - 1, 3), Position(2**64 - 1, 9)
    for pages in ((), (last,), (last, later)):
        reply = FindReply(tuple(PEERS), last, entries, pages)
        assert messages.parse_found_untrusted(messages.found_body(reply), KEY, EntryReader()) == reply
    assert messages.parse_found_untrusted(messages.found_body(FindReply(())), KEY, EntryReader()) == FindReply(())


@pytest.mark.parametrize("pages", [[4, 9], [3, 3], [3, 9, 8], [3, "x"], 3, list(range(3, 36))])
def test_pages_begin_where_the_first_ends_and_rise(pages: object) -> None:
    with pytest.raises(RemoteProtocolError, match="pages"):
        messages.parse_found_untrusted({"contacts": [], "copy": [7, 3, True], "pages": pages}, KEY, EntryReader())


def test_an_answer_may_say_that_pages_follow_and_not_where() -> None:
    """As peers do that read a record page by page."""
    body = {"contacts": [], "copy": [7, 3, True]}
    assert messages.parse_found_untrusted(body, KEY, EntryReader()).pages == (Position(7, 3),)


def test_a_copy_without_changes_is_not_no_copy() -> None:
    """A holder says that it has the record though nothing in it is news."""
    body = messages.found_body(FindReply((), Position(1, 2)))
    assert messages.parse_found_untrusted(body, KEY, EntryReader()) == FindReply((), Position(1, 2), [])


def test_a_store_survives_the_wire() -> None:
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
    parsers = [
        messages.parse_find_untrusted,
        lambda b: messages.parse_store_untrusted(b, EntryReader()),
        lambda b: messages.parse_found_untrusted(b, KEY, EntryReader()),
        lambda b: messages.parse_stored_untrusted(b, KEY, EntryReader(), count=1),
    ]
    for parse in parsers:
        with suppress(RemoteProtocolError):
            parse(body)


def test_a_malformed_contact_is_refused() -> None:
    good: list[Any] = [b"x" * 32, "h", 1]
    wrong = ([b"x" * 31], ["", "h" * 256, "h\u00f6st"], [0, 65536, True, 1.0])
    rows = [[*good[:place], value, *good[place + 1 :]] for place, values in enumerate(wrong) for value in values]
    assert messages.parse_contact_untrusted(good) is messages.parse_contact_untrusted([*good])
    for item in [*rows, [], [*good, 1], [[], "h", 1], {"peer_id": good[0]}, tuple(good), None]:
        with pytest.raises(RemoteProtocolError, match="contact"):
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
    contacts = tuple(Contact(PeerId.draw(RNG), Address("h" * 255, 65535)) for _ in range(32))
    entries = [(entry(b"x" * (MAX_VALUE_BYTES - 5), suffix="s" * 64, sequence=n), 300.0) for n in range(5)]
    (page, *_) = messages.batches(entries)
    assert len(page) == 2
    pages = tuple(Position(2**64 - 1, 2**64 - 1 - n) for n in range(messages.MAX_PAGES))
    reply = FindReply(contacts, pages[0], page, pages)
    assert 32 * 1024 < len(cbor2.dumps(messages.found_body(reply))) < 64 * 1024


def test_an_entry_takes_no_more_than_it_says() -> None:
    """`size_bytes` bounds its row on the wire, which pages and budgets count on."""
    for value, suffix in ((0, ""), (b"x" * 16_000, "s" * 64), ("y" * 300, "claim")):
        each = entry(value, suffix=suffix, sequence=2**64 - 1, issued_at=4e9, life_s=300.0)
        assert len(cbor2.dumps(messages.entry_to_wire(each, left_s=300.0))) <= each.size_bytes


def test_batches_keep_order_and_fit() -> None:
    """Cutting loses nothing, and no batch of more than one entry passes the page size."""
    entries = [(entry(b"x" * (n * 37 % 5000), sequence=n), 1.0) for n in range(100)]
    cut = list(messages.batches(entries))
    assert [each for batch in cut for each in batch] == entries
    assert all(sum(each.size_bytes for each, _ in batch) <= PAGE_BYTES for batch in cut)
    assert list(messages.batches([])) == []


def test_pages_cover_a_record_once() -> None:
    """The pages that the first names give every entry once, in the order of changes, and so does reading one by one."""
    storage = EntryStorage(max_bytes=10**7)
    rng = random.Random(2)
    for number in range(200):
        owner = Identity.from_seed(rng.randbytes(32))
        each = entry(b"x" * (number % 7) * 1000, owner=owner, life_s=300.0)
        storage.store(KEY, [(each, 100.0)], account=owner.peer_id, now=0.0)
    first, named = messages.page(storage.get(KEY, 40.0), 40.0)
    assert len(named) > 10
    seen, since = list(first), named
    for change in named:
        assert since[0] == change
        entries, since = messages.page(storage.since(KEY, change, 40.0), 40.0)
        seen += entries
    assert since == ()
    assert all(left_s == 60.0 for _, left_s in seen)
    assert [each for each, _ in seen] == [held.entry for held in storage.get(KEY, 0.0)]
    assert messages.page((), 0.0) == ((), ())


def test_an_answer_names_a_bounded_number_of_pages() -> None:
    each = entry(b"x" * 16_000)
    held = [
        Held(entry=each, ends_at=9.0, seen_at=0.0, kept_until=9.0, change=n, account=ALICE.peer_id) for n in range(100)
    ]
    assert messages.page(held, 0.0)[1] == tuple(range(1, 2 * messages.MAX_PAGES, 2))
