"""Kademlia's routing table: the contacts to keep, and those nearest to a target.

Maymounkov and Mazieres, "Kademlia: A Peer-to-peer Information System Based on the XOR Metric" (2002), sections
2.2-2.4 and 4.2. When a bucket is full, `add` returns its least recently seen contact: the caller pings it and then
either refreshes it by another `add` or calls `remove`, which promotes a replacement.
"""

import hashlib
import random
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import lru_cache

from dmoe_net.identity import PEER_ID_BYTES, Contact, PeerId

NodeId = int
"""A point of the key space: an integer of 256 bits. Peers and keys share the space, whose metric is XOR."""

ID_BITS = 8 * PEER_ID_BYTES

MAX_KEY_BYTES = 512
"""Longest key of a record, UTF-8."""


@lru_cache(maxsize=16_384)  # the tables and walks of a process name the same peers, and share the objects
def node_id(peer_id: PeerId) -> NodeId:
    """The place of a peer in the key space."""
    return int.from_bytes(peer_id.raw, "big")


def key_id(key: str) -> NodeId:
    """The place of a key in the key space: SHA-256 of its UTF-8 text."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest(), "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A contact, and the last time at which it proved to be alive (seconds of the table's clock)."""

    contact: Contact
    last_seen: float


@dataclass(slots=True, kw_only=True)
class _Bucket:
    """The contacts whose ids share the first `depth` bits with `lower`; both mappings run from oldest to newest."""

    lower: NodeId
    depth: int
    last_lookup: float
    contacts: dict[NodeId, Seen] = field(default_factory=dict)
    replacements: dict[NodeId, Seen] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return 1 << (ID_BITS - self.depth)

    def covers(self, node: NodeId) -> bool:
        return self.lower <= node < self.lower + self.width


class RoutingTable:
    """Contacts in k-buckets that split where the own id lies, and elsewhere down to the next multiple of
    `depth_modulo`: at most `ID_BITS * 2**(depth_modulo - 1)` buckets, in practice some `10 * log2(peers)` contacts.

    Args:
      local_id: the own place; it is never a contact.
      bucket_size: k of the paper; a bucket has as many replacements.
      depth_modulo: b of section 4.2, "accelerated lookups": 1 splits only around the own id.
      now: seconds; buckets count as looked up then.
    """

    def __init__(self, local_id: NodeId, *, bucket_size: int = 20, depth_modulo: int = 5, now: float = 0.0) -> None:
        self.local_id = local_id
        self._bucket_size = bucket_size
        self._depth_modulo = depth_modulo
        # Sorted by `lower` and covering the whole space without gaps, so that a bucket is found by bisection.
        self._buckets = [_Bucket(lower=0, depth=0, last_lookup=now)]
        self._lowers = [0]

    def __len__(self) -> int:
        return sum(len(bucket.contacts) for bucket in self._buckets)

    def __contains__(self, peer_id: PeerId) -> bool:
        node = node_id(peer_id)
        return node in self._bucket_of(node).contacts

    @property
    def bucket_count(self) -> int:
        """Number of buckets."""
        return len(self._buckets)

    def contacts(self) -> tuple[Contact, ...]:
        """Every contact, in the order of buckets."""
        return tuple(seen.contact for bucket in self._buckets for seen in bucket.contacts.values())

    def get(self, peer_id: PeerId) -> Seen | None:
        """The entry of a peer, or None."""
        node = node_id(peer_id)
        return self._bucket_of(node).contacts.get(node)

    def add(self, contact: Contact, now: float) -> Seen | None:
        """Take in a contact that has just proved to be alive, or refresh it.

        Returns:
          None if it is in the table now (or is this node itself). Otherwise its bucket is full: it waits among the
          replacements, and the bucket's least recently seen contact is returned, to be pinged.
        """
        node = node_id(contact.peer_id)
        if node == self.local_id:
            return None
        while True:
            bucket = self._bucket_of(node)
            if node in bucket.contacts or len(bucket.contacts) < self._bucket_size:
                bucket.replacements.pop(node, None)
                bucket.contacts.pop(node, None)  # popped first: the newest stands last
                bucket.contacts[node] = Seen(contact=contact, last_seen=now)
                return None
            if self._may_split(bucket):
                self._split(bucket)
                continue
            bucket.replacements.pop(node, None)
            bucket.replacements[node] = Seen(contact=contact, last_seen=now)
            if len(bucket.replacements) > self._bucket_size:  # more than there are places could never all be used
                del bucket.replacements[next(iter(bucket.replacements))]
            return next(iter(bucket.contacts.values()))

    def has_room(self, peer_id: PeerId) -> bool:
        """True if `add` would put a newcomer into the table rather than among the replacements."""
        bucket = self._bucket_of(node_id(peer_id))
        return len(bucket.contacts) < self._bucket_size or self._may_split(bucket)

    def remove(self, peer_id: PeerId) -> bool:
        """Drop a contact; the most recent replacement of its bucket takes its place. False if it was not there."""
        node = node_id(peer_id)
        bucket = self._bucket_of(node)
        bucket.replacements.pop(node, None)
        if bucket.contacts.pop(node, None) is None:
            return False
        if bucket.replacements:
            bucket.contacts.update([bucket.replacements.popitem()])
        return True

    def nearest(self, target: NodeId, count: int) -> tuple[Contact, ...]:
        """The `count` contacts nearest to `target`, nearest first (fewer if the table holds fewer)."""
        # Buckets are aligned ranges, so their distances to the target are ranges that do not overlap: whole buckets
        # are taken in the order of any of their ids.
        ordered = sorted(self._buckets, key=lambda bucket: bucket.lower ^ target)
        found: list[NodeId] = []
        known: dict[NodeId, Seen] = {}
        for bucket in ordered:
            if len(found) >= count:
                break
            found += sorted(bucket.contacts, key=lambda node: node ^ target)
            known |= bucket.contacts
        return tuple(known[node].contact for node in found[:count])

    def looked_up(self, target: NodeId, now: float) -> None:
        """Note that a lookup went to `target`: its bucket needs no refresh for a while."""
        self._bucket_of(target).last_lookup = now

    def stale_targets(self, *, older_than: float, rng: random.Random) -> tuple[NodeId, ...]:
        """A random id in each bucket that has room and to which no lookup went since `older_than`, the stalest first.

        Full buckets keep themselves fresh: whoever does not answer makes room for a replacement.
        """
        stale = sorted(
            (b for b in self._buckets if b.last_lookup < older_than and len(b.contacts) < self._bucket_size),
            key=lambda bucket: bucket.last_lookup,
        )
        return tuple(bucket.lower + rng.randrange(bucket.width) for bucket in stale)

    def _bucket_of(self, node: NodeId) -> _Bucket:
        return self._buckets[bisect_right(self._lowers, node) - 1]

    def _may_split(self, bucket: _Bucket) -> bool:
        if bucket.depth == ID_BITS:
            return False
        return bucket.covers(self.local_id) or bucket.depth % self._depth_modulo != 0

    def _split(self, bucket: _Bucket) -> None:
        half = bucket.width // 2
        depth, last_lookup = bucket.depth + 1, bucket.last_lookup
        left = _Bucket(lower=bucket.lower, depth=depth, last_lookup=last_lookup)
        right = _Bucket(lower=bucket.lower + half, depth=depth, last_lookup=last_lookup)
        for node, seen in bucket.contacts.items():
            (left if left.covers(node) else right).contacts[node] = seen
        for node, seen in bucket.replacements.items():
            (left if left.covers(node) else right).replacements[node] = seen
        index = bisect_right(self._lowers, bucket.lower)
        self._buckets[index - 1 : index] = [left, right]
        self._lowers.insert(index, right.lower)
