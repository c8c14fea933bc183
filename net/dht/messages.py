"""What DHT nodes say to each other: three calls, each a small CBOR map.

    dht.ping   {client}                          -> {peer_id, now}
    dht.find   {client, target, record, after?}  -> {peer_id, contacts, entries?, more?}
    dht.store  {client, target, entries}         -> {peer_id, accepted}

`client` true says: do not put me into your table. `peer_id` in each answer lets the caller notice that another peer
now listens at a remembered address. Ids travel as 32 bytes, contacts as `[id, host, port]`, entries as `[subkey or
None, value, expiration]` (a plain value is the single entry under None).

A message must fit a header of 64 KiB. Values therefore travel in pages of `PAGE_BYTES`: `more` says that subkeys
follow the last one given, and the caller asks again with `after`; stores are cut by `batches`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from net.dht.records import MAX_SUBKEY_BYTES, SubkeyEntry, entries_to_wire, parse_entries_untrusted
from net.dht.routing_table import NodeId
from net.errors import RemoteProtocolError
from net.identity import PEER_ID_BYTES, Address, Contact, PeerId
from net.rpc.base import Body
from net.wire.fields import FLAG, HOST, PEER_ID, PORT, Field, optional, row_untrusted, rows, several, text

PING, FIND, STORE = "dht.ping", "dht.find", "dht.store"

PAGE_BYTES = 40 * 1024
"""Most bytes of entries in one message. With 32 contacts of the longest names (10 KB) a header stays below 64 KiB."""

MAX_CONTACTS = 32
"""Most contacts of one answer; more is a broken peer."""

_AFTER = optional(text(0, MAX_SUBKEY_BYTES))
_LATEST_S = 2.0**63
_SECONDS: Field[float] = Field(
    f"a number of seconds up to {_LATEST_S:g}",
    lambda value: type(value) in (int, float) and abs(value) <= _LATEST_S,
    float,
)
_CONTACTS = rows(MAX_CONTACTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class FindReply:
    """An answer to `dht.find`."""

    peer_id: PeerId
    """Who answers."""
    contacts: tuple[Contact, ...]
    """The contacts nearest to the target that the answerer knows."""
    entries: tuple[SubkeyEntry, ...]
    """A page of the record, empty if there is none."""
    more: bool
    """Whether further subkeys follow."""


def ping_body(*, client: bool) -> Body:
    """A request of `dht.ping`."""
    return {"client": client}


def find_body(target: NodeId, *, client: bool, record: bool, after: str | None = None) -> Body:
    """A request of `dht.find`."""
    body: dict[str, object] = {"client": client, "target": _id_bytes(target), "record": record}
    if after is not None:
        body["after"] = after
    return body


def store_body(target: NodeId, entries: Sequence[SubkeyEntry], *, client: bool) -> Body:
    """A request of `dht.store`."""
    return {"client": client, "target": _id_bytes(target), "entries": entries_to_wire(entries)}


def ping_reply_body(peer_id: PeerId, now: float) -> Body:
    """An answer to `dht.ping`."""
    return {"peer_id": peer_id.raw, "now": now}


def find_reply_body(reply: FindReply) -> Body:
    """An answer to `dht.find`."""
    body: dict[str, object] = {
        "peer_id": reply.peer_id.raw,
        "contacts": [contact_to_wire(contact) for contact in reply.contacts],
    }
    if reply.entries:
        body["entries"] = entries_to_wire(reply.entries)
        body["more"] = reply.more
    return body


def store_reply_body(peer_id: PeerId, accepted: Sequence[bool]) -> Body:
    """An answer to `dht.store`."""
    return {"peer_id": peer_id.raw, "accepted": list(accepted)}


def batches(entries: Sequence[SubkeyEntry]) -> Iterator[tuple[SubkeyEntry, ...]]:
    """Cut entries into stores that fit a message."""
    batch: list[SubkeyEntry] = []
    used = 0
    for subkey, entry in entries:
        size = entry.size_bytes + (MAX_SUBKEY_BYTES if subkey is None else len(subkey.encode()))
        if batch and used + size > PAGE_BYTES:
            yield tuple(batch)
            batch, used = [], 0
        batch.append((subkey, entry))
        used += size
    if batch:
        yield tuple(batch)


def parse_client_untrusted(body: Body) -> bool:
    """Whether the caller is in client mode."""
    return FLAG.of_untrusted(body, "client")


def parse_find_untrusted(body: Body) -> tuple[NodeId, bool, str | None]:
    """A request of `dht.find`: target, whether the record is wanted, and the subkey after which to go on."""
    return _target(body), FLAG.of_untrusted(body, "record"), _AFTER.of_untrusted(body, "after")


def parse_store_untrusted(body: Body, *, latest_expiration: float) -> tuple[NodeId, tuple[SubkeyEntry, ...]]:
    """A request of `dht.store`: target and entries."""
    return _target(body), parse_entries_untrusted(body.get("entries"), latest_expiration=latest_expiration)


def parse_ping_reply_untrusted(body: Body) -> tuple[PeerId, float]:
    """An answer to `dht.ping`: who answers, and its swarm time."""
    return PEER_ID.of_untrusted(body, "peer_id"), _SECONDS.of_untrusted(body, "now")


def parse_find_reply_untrusted(body: Body, *, latest_expiration: float) -> FindReply:
    """An answer to `dht.find`."""
    contacts = tuple(map(parse_contact_untrusted, _CONTACTS.of_untrusted(body, "contacts")))
    entries = parse_entries_untrusted(body.get("entries", []), latest_expiration=latest_expiration)
    more = FLAG.of_untrusted(body, "more") if "more" in body else False
    if any(subkey is None for subkey, _ in entries) and (len(entries) > 1 or more):
        raise RemoteProtocolError("a plain value must be the only entry")
    return FindReply(peer_id=PEER_ID.of_untrusted(body, "peer_id"), contacts=contacts, entries=entries, more=more)


def parse_store_reply_untrusted(body: Body, *, count: int) -> tuple[PeerId, tuple[bool, ...]]:
    """An answer to `dht.store` of `count` entries."""
    accepted = several(FLAG, count).of_untrusted(body, "accepted")
    if len(accepted) != count:
        raise RemoteProtocolError(f"accepted must have {count} booleans, got {len(accepted)}")
    return PEER_ID.of_untrusted(body, "peer_id"), accepted


def parse_contact_untrusted(item: object) -> Contact:
    """A contact from `[peer id, host, port]`.

    Raises:
      RemoteProtocolError: if it is anything else.
    """
    peer_id, host, port = row_untrusted(item, "a contact", id=PEER_ID, host=HOST, port=PORT)
    return Contact(peer_id, Address(host, port))


def contact_to_wire(contact: Contact) -> list[object]:
    """The form that `parse_contact_untrusted` reads."""
    return [contact.peer_id.raw, contact.address.host, contact.address.port]


def _id_bytes(target: NodeId) -> bytes:
    return target.to_bytes(PEER_ID_BYTES, "big")


def _target(body: Body) -> NodeId:
    return int.from_bytes(PEER_ID.of_untrusted(body, "target").raw, "big")
