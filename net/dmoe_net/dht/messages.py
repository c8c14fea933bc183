"""The messages of DHT nodes: three calls, each a small CBOR map.

    dht.ping   {client}                                            -> {peer_id, now}
    dht.find   {client, target, contacts, record, since?, dead?}   -> {peer_id, now, contacts, copy?, entries?, pages?}
    dht.store  {client, target, entries, dead?}                    -> {peer_id, now, verdicts, contacts}

`client` true says: do not put me into your table. `peer_id` in each answer tells who answered at an address, `now` is
the answerer's swarm time; `dmoe_net.dht.calls` writes and reads these three. Ids travel as 32 bytes, contacts as `[id,
host, port]`, entries as the rows of `dmoe_net.dht.entries`.

`contacts` of a question is the number of contacts near the target that are wanted; answers to a store name the nearest
ones. `dead` names peers that did not answer of late. `copy` is `[epoch, change, more]` of the answerer's copy of the
record, and missing if it has none; `entries` are those that changed after `since`, `[epoch, change]`, in the order of
changes; `pages` are the changes after which further pages begin. A verdict is true (taken), false (no room), the row of
the entry that stands there instead, or the seconds by which the entry's times are ahead of the answerer's.

A message must fit a header of 64 KiB. Entries therefore travel in pages of `PAGE_BYTES`: `more` is true if further ones
follow, and the caller asks again since each change of `pages`, all at once; stores are cut by `batches`.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from dmoe_net.dht.copies import Position
from dmoe_net.dht.entries import Entry, EntryReader, SignedEntries, entry_to_wire
from dmoe_net.dht.routing_table import NodeId
from dmoe_net.dht.storage import MAX_ENTRIES, NO_ROOM, Held, Refusal, Verdict
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import PEER_ID_BYTES, Address, Contact, PeerId
from dmoe_net.rpc.base import Body
from dmoe_net.wire.fields import (
    FLAG,
    HOST,
    PEER_ID,
    PORT,
    Field,
    integer,
    octets,
    optional,
    row_untrusted,
    rows,
    several,
)

PING, FIND, STORE = "dht.ping", "dht.find", "dht.store"

PAGE_BYTES = 40 * 1024
"""Most bytes of entries in one message. With 32 contacts of the longest names (10 KB) a header stays below 64 KiB."""

MAX_PAGES = 32
"""Most further pages that an answer names."""

MAX_CONTACTS = 32
"""Most contacts of one answer."""

MAX_DEAD = 8
"""Most peers that a question names as dead."""

_MAX_SHARED = 16_384
"""Most contacts of which every reader gets the same object: tables, walks and copies name the same peers."""

_LATEST_S = 2.0**33
SECONDS: Field[float] = Field(
    f"a number of seconds up to {_LATEST_S:g}",
    lambda value: type(value) in (int, float) and abs(value) <= _LATEST_S,
    float,
)
_COUNTER = integer(0, 2**64 - 1)
_COUNT = integer(0, MAX_CONTACTS)
_CONTACTS = rows(MAX_CONTACTS)
_ENTRIES = rows(MAX_ENTRIES)
_DEAD = optional(several(PEER_ID, MAX_DEAD))
_SINCE: dict[str, Field[Any]] = {"epoch": _COUNTER, "change": _COUNTER}
_COPY: dict[str, Field[Any]] = {**_SINCE, "more": FLAG}
_PAGES = optional(several(_COUNTER, MAX_PAGES))
_TARGET: Field[NodeId] = Field(
    f"an id of {PEER_ID_BYTES} bytes",
    octets(PEER_ID_BYTES, PEER_ID_BYTES).holds,
    lambda raw: int.from_bytes(raw, "big"),
    lambda target: target.to_bytes(PEER_ID_BYTES, "big"),
)


class Find(NamedTuple):
    """A question of `dht.find`."""

    target: NodeId
    """Id that contacts and record are near to."""
    contacts: int
    """Number of contacts wanted."""
    record: bool = False
    """True if the record is wanted."""
    since: Position | None = None
    """Change that the caller has seen last of this copy; None: none."""
    dead: tuple[PeerId, ...] = ()
    """Peers that did not answer the caller of late."""


class FindReply(NamedTuple):
    """An answer to `dht.find`."""

    contacts: tuple[Contact, ...]
    """Contacts nearest to the target that the answerer knows."""
    position: Position | None = None
    """Last change among the entries, or in the whole copy if no more follow; None: the answerer has no copy."""
    entries: SignedEntries = ()
    """Entries that changed since then, the oldest change first, with the seconds left of their lives."""
    pages: tuple[Position, ...] = ()
    """Positions after which further pages begin, in order: the first is `position`. Empty: no entries follow."""


def find_body(question: Find) -> Body:
    """A question of `dht.find`."""
    body: dict[str, object] = {
        "target": _TARGET.pack(question.target),
        "contacts": question.contacts,
        "record": question.record,
        **_dead_body(question.dead),
    }
    return body if question.since is None else {**body, "since": list(question.since)}


def store_body(target: NodeId, entries: SignedEntries, dead: Sequence[PeerId] = ()) -> Body:
    """A question of `dht.store`."""
    return {"target": _TARGET.pack(target), "entries": _entries_to_wire(entries), **_dead_body(dead)}


def found_body(found: FindReply) -> Body:
    """An answer to `dht.find`."""
    body: dict[str, object] = {"contacts": [contact_to_wire(contact) for contact in found.contacts]}
    if found.position is not None:
        body["copy"] = [*found.position, bool(found.pages)]
    if len(found.pages) > 1:
        body["pages"] = [page.change for page in found.pages]
    return {**body, "entries": _entries_to_wire(found.entries)} if found.entries else body


def stored_body(verdicts: Iterable[Verdict], nearest: Iterable[Contact], *, owner: PeerId) -> Body:
    """An answer to `dht.store` of a peer; what stands in an entry's place is shown to its `owner` alone."""

    def packed(verdict: Verdict) -> object:
        if verdict is None:
            return True
        if verdict.held is not None and verdict.held.owner == owner:
            return entry_to_wire(verdict.held, left_s=verdict.held.life_s)
        return float(verdict.ahead_s) if verdict.ahead_s else False

    return {"verdicts": [packed(verdict) for verdict in verdicts], "contacts": list(map(contact_to_wire, nearest))}


def batches(entries: Iterable[tuple[Entry, float]]) -> Iterator[SignedEntries]:
    """Cut entries into batches that fit one message each."""
    batch: list[tuple[Entry, float]] = []
    used = 0
    for entry, left_s in entries:
        if batch and used + entry.size_bytes > PAGE_BYTES:
            yield tuple(batch)
            batch, used = [], 0
        batch.append((entry, left_s))
        used += entry.size_bytes
    if batch:
        yield tuple(batch)


def page(held: Sequence[Held], now: float) -> tuple[SignedEntries, tuple[int, ...]]:
    """Cut one message's worth off entries of a record in the order of changes; `now` is as of `Held.ends_at`.

    Returns: entries with the seconds left, and the numbers of the changes after which further pages begin.
    """
    pages = list(batches((each.entry, each.ends_at - now) for each in held))
    ends = list(accumulate(map(len, pages[: MAX_PAGES + 1])))
    return pages[0] if pages else (), tuple(held[end - 1].change for end in ends[:-1])


def parse_find_untrusted(body: Body) -> Find:
    """A question of `dht.find`."""
    since = body.get("since")
    return Find(
        _TARGET.of_untrusted(body, "target"),
        _COUNT.of_untrusted(body, "contacts"),
        FLAG.of_untrusted(body, "record"),
        None if since is None else Position(*row_untrusted(since, "since", **_SINCE)),
        dead_untrusted(body),
    )


def parse_store_untrusted(body: Body, reader: EntryReader) -> tuple[NodeId, SignedEntries]:
    """A question of `dht.store`: target and entries, verified."""
    target = _TARGET.of_untrusted(body, "target")
    return target, _read_entries_untrusted(body.get("entries"), target, reader)


def parse_found_untrusted(body: Body, target: NodeId, reader: EntryReader) -> FindReply:
    """An answer to `dht.find` for this target."""
    contacts = contacts_untrusted(body)
    if (raw := body.get("copy")) is None:
        return FindReply(contacts)
    epoch, change, more = row_untrusted(raw, "copy", **_COPY)
    changes = (_PAGES.of_untrusted(body, "pages") or (change,)) if more else ()
    if more and (changes[0] != change or any(a >= b for a, b in pairwise(changes))):
        raise RemoteProtocolError(f"expected pages that begin after {change} and rise, got {changes!r:.80}")
    entries = _read_entries_untrusted(body.get("entries", []), target, reader)
    return FindReply(contacts, Position(epoch, change), entries, tuple(Position(epoch, each) for each in changes))


def parse_stored_untrusted(body: Body, target: NodeId, reader: EntryReader, *, count: int) -> list[Verdict]:
    """The verdicts of an answer to `dht.store` of `count` entries."""
    raw = _ENTRIES.of_untrusted(body, "verdicts")
    if len(raw) != count:
        raise RemoteProtocolError(f"expected {count} verdicts, got {len(raw)}")

    def parsed(verdict: object) -> Verdict:
        if isinstance(verdict, bool):
            return None if verdict else NO_ROOM
        if isinstance(verdict, list):
            return Refusal(held=reader.read_untrusted(target, verdict)[0])
        return Refusal(ahead_s=SECONDS.read_untrusted(verdict, "a verdict"))

    return list(map(parsed, raw))


def contacts_untrusted(body: Body) -> tuple[Contact, ...]:
    """The contacts of an answer."""
    return tuple(map(parse_contact_untrusted, _CONTACTS.of_untrusted(body, "contacts")))


def dead_untrusted(body: Body) -> tuple[PeerId, ...]:
    """The peers that a question names as dead."""
    return _DEAD.of_untrusted(body, "dead") or ()


def _read_entries_untrusted(raw: object, target: NodeId, reader: EntryReader) -> SignedEntries:
    return [reader.read_untrusted(target, row) for row in _ENTRIES.read_untrusted(raw, "the DHT entries")]


def parse_contact_untrusted(item: object) -> Contact:
    """Read a contact as `[peer id, host, port]`; RemoteProtocolError for anything else."""
    try:
        return _contact(*item) if type(item) is list else _contact(item)
    except TypeError as error:  # something in it has no hash
        raise RemoteProtocolError(f"a contact must be [id, host, port], got {item!r:.80}") from error


@lru_cache(maxsize=_MAX_SHARED, typed=True)  # typed: true is no port, though it equals 1
def _contact(*row: object) -> Contact:
    peer_id, host, port = row_untrusted(list(row), "a contact", id=PEER_ID, host=HOST, port=PORT)
    return Contact(peer_id, Address(host, port))


def contact_to_wire(contact: Contact) -> list[object]:
    """The form that `parse_contact_untrusted` reads."""
    return [contact.peer_id.raw, contact.address.host, contact.address.port]


def _entries_to_wire(entries: SignedEntries) -> list[object]:
    return [entry_to_wire(entry, left_s=left_s) for entry, left_s in entries]


def _dead_body(dead: Sequence[PeerId]) -> dict[str, object]:
    return {"dead": [peer_id.raw for peer_id in dead]} if dead else {}
