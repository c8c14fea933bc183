"""The messages of DHT nodes: three calls, each a small CBOR map.

    dht.ping   {client}                          -> {peer_id, now}
    dht.find   {client, target, record, after?}  -> {peer_id, now, contacts, entries?, more?}
    dht.store  {client, target, entries}         -> {peer_id, now, accepted}

`client` true says: do not put me into your table. `peer_id` in each answer tells who answered at an address, `now` is
the answerer's swarm time; `dmoe_net.dht.calls` writes and reads these three. Ids travel as 32 bytes, contacts as `[id,
host, port]`, entries as `[subkey or None, value, expiration]` (a plain value is the single entry under None).

A message must fit a header of 64 KiB. Values therefore travel in pages of `PAGE_BYTES`: `more` says that subkeys
follow the last one given, and the caller asks again with `after`; stores are cut by `batches`.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dmoe_net.dht.records import (
    MAX_SUBKEY_BYTES,
    MAX_SUBKEYS,
    Record,
    SubkeyEntry,
    as_updates,
    check_subkey,
    make_entry,
)
from dmoe_net.dht.routing_table import NodeId
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import PEER_ID_BYTES, Address, Contact
from dmoe_net.rpc.base import Body
from dmoe_net.wire.fields import FLAG, HOST, PEER_ID, PORT, Field, octets, optional, row_untrusted, rows, several, text

PING, FIND, STORE = "dht.ping", "dht.find", "dht.store"

PAGE_BYTES = 40 * 1024
"""Most bytes of entries in one message. With 32 contacts of the longest names (10 KB) a header stays below 64 KiB."""

MAX_CONTACTS = 32
"""Most contacts of one answer."""

_LATEST_S = 2.0**63
SECONDS: Field[float] = Field(
    f"a number of seconds up to {_LATEST_S:g}",
    lambda value: type(value) in (int, float) and abs(value) <= _LATEST_S,
    float,
)
_AFTER = optional(text(0, MAX_SUBKEY_BYTES))
_CONTACTS = rows(MAX_CONTACTS)
_ENTRIES = rows(MAX_SUBKEYS)
_TARGET: Field[NodeId] = Field(
    f"an id of {PEER_ID_BYTES} bytes",
    octets(PEER_ID_BYTES, PEER_ID_BYTES).holds,
    lambda raw: int.from_bytes(raw, "big"),
    lambda target: target.to_bytes(PEER_ID_BYTES, "big"),
)


class FindReply(NamedTuple):
    """An answer to `dht.find`."""

    contacts: tuple[Contact, ...]
    """Contacts nearest to the target that the answerer knows."""
    entries: tuple[SubkeyEntry, ...] = ()
    """A page of the record, empty if there is none."""
    more: bool = False
    """True if further subkeys follow."""


def find_body(target: NodeId, *, record: bool, after: str | None = None) -> Body:
    """A request of `dht.find`."""
    body = {"target": _TARGET.pack(target), "record": record}
    return body if after is None else {**body, "after": after}


def store_body(target: NodeId, entries: Iterable[SubkeyEntry]) -> Body:
    """A request of `dht.store`."""
    return {"target": _TARGET.pack(target), "entries": _entries_to_wire(entries)}


def find_reply_body(reply: FindReply) -> Body:
    """An answer to `dht.find`."""
    body: dict[str, object] = {"contacts": [contact_to_wire(contact) for contact in reply.contacts]}
    return {**body, "entries": _entries_to_wire(reply.entries), "more": reply.more} if reply.entries else body


def batches(entries: Iterable[SubkeyEntry]) -> Iterator[tuple[SubkeyEntry, ...]]:
    """Cut entries into batches that fit one message each."""
    batch: list[SubkeyEntry] = []
    used = 0
    for subkey, entry in entries:
        size = entry.size_bytes + len((subkey or "").encode())
        if batch and used + size > PAGE_BYTES:
            yield tuple(batch)
            batch, used = [], 0
        batch.append((subkey, entry))
        used += size
    if batch:
        yield tuple(batch)


def page(record: Record | None, after: str | None) -> tuple[tuple[SubkeyEntry, ...], bool]:
    """(entries of one message whose subkeys follow `after`, in the order of subkeys; True if more follow)."""
    rest = [
        (subkey, entry)
        for subkey, entry in (() if record is None else as_updates(record))
        if after is None or subkey is None or subkey > after
    ]
    rest.sort(key=lambda each: each[0] or "")
    taken = next(batches(rest), ())
    return taken, len(taken) < len(rest)


def parse_find_untrusted(body: Body) -> tuple[NodeId, bool, str | None]:
    """A request of `dht.find`: target, True if the record is wanted, and the subkey after which to go on."""
    return (
        _TARGET.of_untrusted(body, "target"),
        FLAG.of_untrusted(body, "record"),
        _AFTER.of_untrusted(body, "after"),
    )


def parse_store_untrusted(body: Body, *, latest_expiration: float) -> tuple[NodeId, tuple[SubkeyEntry, ...]]:
    """A request of `dht.store`: target and entries."""
    return _TARGET.of_untrusted(body, "target"), parse_entries_untrusted(body.get("entries"), latest_expiration)


def parse_find_reply_untrusted(body: Body, *, latest_expiration: float) -> FindReply:
    """An answer to `dht.find`."""
    contacts = tuple(map(parse_contact_untrusted, _CONTACTS.of_untrusted(body, "contacts")))
    entries = parse_entries_untrusted(body.get("entries", []), latest_expiration)
    more = FLAG.of_untrusted(body, "more") if "more" in body else False
    if any(subkey is None for subkey, _ in entries) and (len(entries) > 1 or more):
        raise RemoteProtocolError("a plain value must be the only entry")
    return FindReply(contacts, entries, more)


def parse_store_reply_untrusted(body: Body, *, count: int) -> tuple[bool, ...]:
    """An answer to `dht.store` of `count` entries: True for each that was accepted."""
    accepted = several(FLAG, count).of_untrusted(body, "accepted")
    if len(accepted) != count:
        raise RemoteProtocolError(f"accepted must have {count} booleans, got {len(accepted)}")
    return accepted


def parse_entries_untrusted(raw: object, latest_expiration: float) -> tuple[SubkeyEntry, ...]:
    """Read a list of `[subkey or None, value, expiration]`; later expirations are brought down to
    `latest_expiration`.

    Raises:
      RemoteProtocolError: it is anything else, or larger than records may be.
    """
    entries: list[SubkeyEntry] = []
    for item in _ENTRIES.read_untrusted(raw, "the DHT entries"):
        if not isinstance(item, list) or len(item) != 3:
            raise RemoteProtocolError("a DHT entry must be [subkey, value, expiration]")
        subkey, value, expiration = item
        try:
            entries.append((check_subkey(subkey), make_entry(value, expiration, latest=latest_expiration)))
        except ValueError as error:
            raise RemoteProtocolError(f"bad DHT entry: {error}") from error
    return tuple(entries)


def parse_contact_untrusted(item: object) -> Contact:
    """Read a contact as `[peer id, host, port]`; RemoteProtocolError for anything else."""
    peer_id, host, port = row_untrusted(item, "a contact", id=PEER_ID, host=HOST, port=PORT)
    return Contact(peer_id, Address(host, port))


def contact_to_wire(contact: Contact) -> list[object]:
    """The form that `parse_contact_untrusted` reads."""
    return [contact.peer_id.raw, contact.address.host, contact.address.port]


def _entries_to_wire(entries: Iterable[SubkeyEntry]) -> list[object]:
    return [[subkey, entry.value, entry.expiration] for subkey, entry in entries]
