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

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from net.dht.records import MAX_SUBKEY_BYTES, SubkeyEntry, entries_to_wire, parse_entries_untrusted
from net.dht.routing_table import NodeId
from net.errors import RemoteProtocolError
from net.identity import PEER_ID_BYTES, Address, Contact, PeerId
from net.rpc.base import Body

PING, FIND, STORE = "dht.ping", "dht.find", "dht.store"

PAGE_BYTES = 40 * 1024
"""Most bytes of entries in one message. With 32 contacts of the longest names (10 KB) a header stays below 64 KiB."""

MAX_CONTACTS = 32
"""Most contacts of one answer; more is a broken peer."""

MAX_HOST_BYTES = 255
"""Longest host name (RFC 1035, section 2.3.4)."""


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
    return _flag(body, "client")


def parse_find_untrusted(body: Body) -> tuple[NodeId, bool, str | None]:
    """A request of `dht.find`: target, whether the record is wanted, and the subkey after which to go on."""
    after = body.get("after")
    if after is not None and (not isinstance(after, str) or len(after) > MAX_SUBKEY_BYTES):
        raise RemoteProtocolError(f"after must be a subkey, got {after!r:.80}")
    return _target(body), _flag(body, "record"), after


def parse_store_untrusted(body: Body, *, latest_expiration: float) -> tuple[NodeId, tuple[SubkeyEntry, ...]]:
    """A request of `dht.store`: target and entries."""
    return _target(body), parse_entries_untrusted(body.get("entries"), latest_expiration=latest_expiration)


def parse_ping_reply_untrusted(body: Body) -> tuple[PeerId, float]:
    """An answer to `dht.ping`: who answers, and its swarm time."""
    now = body.get("now")
    if isinstance(now, bool) or not isinstance(now, (int, float)) or not abs(now) < math.inf:
        raise RemoteProtocolError(f"now must be a number of seconds, got {now!r:.80}")
    try:
        return _peer_id(body.get("peer_id")), float(now)
    except OverflowError as error:
        raise RemoteProtocolError("now is beyond any time") from error


def parse_find_reply_untrusted(body: Body, *, latest_expiration: float) -> FindReply:
    """An answer to `dht.find`."""
    contacts = body.get("contacts")
    if not isinstance(contacts, list) or len(contacts) > MAX_CONTACTS:
        raise RemoteProtocolError(f"contacts must be a list of at most {MAX_CONTACTS}")
    entries = parse_entries_untrusted(body.get("entries", []), latest_expiration=latest_expiration)
    more = _flag(body, "more") if "more" in body else False
    if any(subkey is None for subkey, _ in entries) and (len(entries) > 1 or more):
        raise RemoteProtocolError("a plain value must be the only entry")
    return FindReply(
        peer_id=_peer_id(body.get("peer_id")),
        contacts=tuple(parse_contact_untrusted(item) for item in contacts),
        entries=entries,
        more=more,
    )


def parse_store_reply_untrusted(body: Body, *, count: int) -> tuple[PeerId, tuple[bool, ...]]:
    """An answer to `dht.store` of `count` entries."""
    accepted = body.get("accepted")
    if not isinstance(accepted, list) or len(accepted) != count or any(type(v) is not bool for v in accepted):
        raise RemoteProtocolError(f"accepted must be a list of {count} booleans")
    return _peer_id(body.get("peer_id")), tuple(accepted)


def parse_contact_untrusted(item: object) -> Contact:
    """A contact from `[peer id, host, port]`.

    Raises:
      RemoteProtocolError: if it is anything else.
    """
    if not isinstance(item, list) or len(item) != 3:
        raise RemoteProtocolError("a contact must be [peer id, host, port]")
    raw, host, port = item
    if type(port) is not int or not 1 <= port <= 65535:
        raise RemoteProtocolError(f"the port of a contact must be from 1 to 65535, got {port!r:.80}")
    if not isinstance(host, str) or not 1 <= len(host) <= MAX_HOST_BYTES or not host.isascii():
        raise RemoteProtocolError(f"the host of a contact must be 1 to {MAX_HOST_BYTES} ASCII characters")
    return Contact(_peer_id(raw), Address(host, port))


def contact_to_wire(contact: Contact) -> list[object]:
    """The form that `parse_contact_untrusted` reads."""
    return [contact.peer_id.raw, contact.address.host, contact.address.port]


def _id_bytes(target: NodeId) -> bytes:
    return target.to_bytes(PEER_ID_BYTES, "big")


def _target(body: Body) -> NodeId:
    return int.from_bytes(_peer_id(body.get("target")).raw, "big")


def _peer_id(raw: object) -> PeerId:
    if not isinstance(raw, bytes) or len(raw) != PEER_ID_BYTES:
        raise RemoteProtocolError(f"an id must be {PEER_ID_BYTES} bytes, got {raw!r:.80}")
    return PeerId(raw)


def _flag(body: Body, name: str) -> bool:
    value = body.get(name)
    if type(value) is not bool:
        raise RemoteProtocolError(f"{name} must be true or false, got {value!r:.80}")
    return value
