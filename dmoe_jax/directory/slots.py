"""Several nodes that serve one expert: how they stand in the DHT, and which of them a trainer asks.

Key `ffn.3.` has a subkey `17` with the contact that serves `ffn.3.17`. A further node that serves the same expert is a
*replica* with a slot number of its own: slot 0 is that subkey, slot r is `17~r`. Readers who know nothing of slots
ignore such subkeys, since they are no coordinates. The copy in slot 0 is in no way the first among them: an expert
whose slot 0 is empty is served by the others.

Which one a trainer asks follows from who it is, by rendezvous hashing (Thaler and Ravishankar 1998): each trainer has
an order of preference of its own for each expert, which changes for those experts alone whose replicas come or go.
Nodes that serve many experts of the row are preferred less (weights as of Schindelhauer and Schomaker 2005), so that
one that came to share the load of a few experts takes more of these few.

Everything here is pure. Strangers write what `children_of_untrusted` reads; whatever is malformed is left out.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dmoe_jax.directory.grid import parse_coordinate
from dmoe_net.dht.messages import parse_contact_untrusted
from dmoe_net.dht.records import Dictionary, Record
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import Contact, PeerId

MAX_SLOTS = 8
"""Most nodes that serve one expert. A row of 256 experts with as many replicas still fits into one record."""

MAX_SUSPECTS = 4096
"""Nodes that failed of which it is remembered what they announced; the first ones are forgotten beyond it, which means
that they wait for two more looks."""

_MARK = "~"
_FURTHER_SLOT = re.compile(f"[1-{MAX_SLOTS - 1}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A node that serves an expert, as it announced itself."""

    contact: Contact
    """Where it is called."""
    slot: int
    """0 to `MAX_SLOTS` - 1."""
    expiration: float
    """Swarm time until which the announcement stands, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """What a coordinate of a prefix stands for: a row of experts, or an expert and who serves it."""

    row_until: float = -math.inf
    """Swarm time until which it is a row, seconds."""
    replicas: tuple[Replica, ...] = ()
    """Who serves the expert, each node once; in the order of slots, or of somebody's preference."""

    def living(self, now: float) -> tuple[Replica, ...]:
        """Those whose announcement stands at `now`."""
        return tuple(replica for replica in self.replicas if replica.expiration > now)


def subkey_of(coordinate: str, slot: int) -> str:
    """The subkey of a slot: `17` for slot 0, `17~2` for slot 2.

    Raises:
      ValueError: there is no such slot.
    """
    if not 0 <= slot < MAX_SLOTS:
        raise ValueError(f"slots go from 0 to {MAX_SLOTS - 1}, got {slot}")
    return f"{coordinate}{_MARK}{slot}" if slot else coordinate


def parse_subkey(text: str) -> tuple[int, int]:
    """Coordinate and slot from their only spelling.

    Raises:
      ValueError: naming the text.
    """
    coordinate, mark, slot = text.partition(_MARK)
    if mark and not _FURTHER_SLOT.fullmatch(slot):
        raise ValueError(f"expected COORDINATE or COORDINATE{_MARK}SLOT, slot 1 to {MAX_SLOTS - 1}, got {text!r:.80}")
    return parse_coordinate(coordinate), int(slot) if mark else 0


def children_of_untrusted(record: Record | None) -> dict[int, Child]:
    """The well-formed children of a prefix, by coordinate and in its order; anything else is left out.

    A node that stands in several slots of one expert counts once, with the announcement that ends last: it would
    otherwise draw several shares of the load.
    """
    entries = record.entries if isinstance(record, Dictionary) else {}
    rows: dict[int, float] = {}
    found: dict[int, dict[PeerId, Replica]] = {}
    for subkey, entry in entries.items():
        try:
            coordinate, slot = parse_subkey(subkey)
            if entry.value is True and slot == 0:
                rows[coordinate] = entry.expiration
                continue
            contact = parse_contact_untrusted(entry.value)
        except (ValueError, RemoteProtocolError):
            continue
        replicas = found.setdefault(coordinate, {})
        before = replicas.get(contact.peer_id)
        if before is None or (entry.expiration, -slot) > (before.expiration, -before.slot):
            replicas[contact.peer_id] = Replica(contact=contact, slot=slot, expiration=entry.expiration)
    return {
        coordinate: Child(
            row_until=rows.get(coordinate, -math.inf),
            replicas=tuple(sorted(found.get(coordinate, {}).values(), key=lambda replica: replica.slot)),
        )
        for coordinate in sorted({*rows, *found})
    }


def by_preference(children: Mapping[int, Child], key: str, reader: PeerId) -> dict[int, Child]:
    """The same children, the replicas of each expert in the order in which `reader` prefers them.

    Args:
      children: of one prefix.
      key: the prefix, such as `ffn.3.`.
      reader: who will ask them.
    """
    serves = Counter(replica.contact.peer_id for child in children.values() for replica in child.replicas)

    def rank(uid: str, replica: Replica) -> float:
        peer_id = replica.contact.peer_id
        # An exponential variable with the node's weight, 1 / (experts that it serves here), as its rate: the least one
        # is each node's with a probability in proportion to its weight.
        return -math.log(_uniform(reader, uid, peer_id)) * serves[peer_id]

    return {
        coordinate: child
        if len(child.replicas) < 2
        else Child(
            row_until=child.row_until,
            replicas=tuple(sorted(child.replicas, key=lambda each: rank(f"{key}{coordinate}", each))),
        )
        for coordinate, child in children.items()
    }


@dataclass(slots=True, kw_only=True)
class _Suspect:
    troubled_at: float  # by trio's clock
    announced_until: float  # what its announcement said when it was first looked up after that
    is_renewed: bool = False


class Renewals:
    """Which nodes that failed have announced themselves since; of at most `MAX_SUSPECTS`.

    It shows in the second look after a failure, for what the first one finds may be older than that.
    """

    def __init__(self) -> None:
        self._suspects: dict[PeerId, _Suspect] = {}

    def note(self, found: Iterable[Child], troubled_at: Callable[[PeerId], float | None], asked_at: float) -> None:
        """Take notice of announcements.

        Args:
          found: what a look into the DHT has brought.
          troubled_at: when a node last failed, seconds; None if it has answered since.
          asked_at: when the look began, on the same clock.
        """
        until: dict[PeerId, float] = {}
        for child in found:
            for replica in child.replicas:
                peer_id = replica.contact.peer_id
                until[peer_id] = max(replica.expiration, until.get(peer_id, -math.inf))
        for peer_id, expiration in until.items():
            failed_at = troubled_at(peer_id)
            suspect = self._suspects.get(peer_id)
            if failed_at is None:
                self._suspects.pop(peer_id, None)
            elif suspect is not None and suspect.troubled_at == failed_at:
                suspect.is_renewed |= expiration > suspect.announced_until
            elif failed_at <= asked_at:
                self._suspects[peer_id] = _Suspect(troubled_at=failed_at, announced_until=expiration)
        while len(self._suspects) > MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]

    def awaits(self, peer_id: PeerId, troubled_at: float | None) -> bool:
        """Whether a node that failed at this time, if it did, has not announced itself again since."""
        if troubled_at is None:
            return False
        suspect = self._suspects.get(peer_id)
        return suspect is None or suspect.troubled_at != troubled_at or not suspect.is_renewed


def lowest_free(taken: Iterable[int]) -> int | None:
    """The lowest slot that is not among these; None if all are."""
    return next((slot for slot in range(MAX_SLOTS) if slot not in set(taken)), None)


def own_expiration(expiration: float, peer_id: PeerId) -> float:
    """An expiration that no other peer has: up to a millisecond later.

    Of two that take a slot at once the later expiration wins. Were they equal, to the last bit, each replica of the
    record would keep the one that came first, and the two could not agree on who has lost.
    """
    return expiration + int.from_bytes(peer_id.raw[:4]) / 2**32 * 1e-3


def _uniform(reader: PeerId, uid: str, peer_id: PeerId) -> float:
    """A number above 0 and below 1 that follows from the three."""
    digest = hashlib.blake2b(reader.raw + uid.encode() + peer_id.raw, digest_size=8).digest()
    return (int.from_bytes(digest) + 0.5) / 2**64
