"""Preference of a trainer among the nodes that serve one expert.

It follows from who the trainer is, by rendezvous hashing (Thaler and Ravishankar 1998): each trainer has an order of
preference of its own for each expert, which changes for those experts alone whose replicas come or go. Nodes that serve
many experts of the record are preferred less (weights as of Schindelhauer and Schomaker 2005), so that one that came to
share the load of a few experts takes more of these few.

Everything here is pure.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dmoe_jax.directory.grid import Coordinates
from dmoe_jax.directory.records import Replica, Replicas
from dmoe_net.identity import PeerId

MAX_SUSPECTS = 4096
"""Nodes that failed of which it is remembered what they announced; the first ones are forgotten beyond it, which means
that they wait for two more looks."""


def by_preference(experts: Mapping[Coordinates, Replicas], prefix: str, reader: PeerId) -> dict[Coordinates, Replicas]:
    """The same experts, those of one record, the replicas of each in the order in which `reader` prefers them."""
    serves = Counter(replica.contact.peer_id for replicas in experts.values() for replica in replicas)

    def rank(uid: str, replica: Replica) -> float:
        peer_id = replica.contact.peer_id
        # An exponential variable with the node's weight, 1 / (experts that it serves here), as its rate: the least one
        # is each node's with a probability in proportion to its weight.
        return -math.log(_uniform(reader, uid, peer_id)) * serves[peer_id]

    def ordered(coordinates: Coordinates, replicas: Replicas) -> Replicas:
        if len(replicas) < 2:
            return replicas
        uid = ".".join((prefix, *map(str, coordinates)))
        return tuple(sorted(replicas, key=lambda each: rank(uid, each)))

    return {coordinates: ordered(coordinates, replicas) for coordinates, replicas in experts.items()}


@dataclass(slots=True, kw_only=True)
class _Suspect:
    troubled_at: float  # by trio's clock
    announced_until: float  # what its announcement said when it was first looked up after that
    is_renewed: bool = False


class Renewals:
    """Nodes that failed and have announced themselves since; remembers at most `MAX_SUSPECTS` nodes.

    A renewal shows in the second look after a failure, for what the first one finds may be older than that.
    """

    def __init__(self) -> None:
        self._suspects: dict[PeerId, _Suspect] = {}

    def note(self, found: Iterable[Replica], troubled_at: Callable[[PeerId], float | None], asked_at: float) -> None:
        """Take notice of announcements.

        Args:
          found: what a look into the DHT has brought.
          troubled_at: when a node last failed, seconds; None if it has answered since.
          asked_at: when the look began, on the same clock.
        """
        until: dict[PeerId, float] = {}
        for replica in found:
            peer_id = replica.contact.peer_id
            until[peer_id] = max(replica.ends_at, until.get(peer_id, -math.inf))
        for peer_id, ends_at in until.items():
            failed_at = troubled_at(peer_id)
            suspect = self._suspects.get(peer_id)
            if failed_at is None:
                self._suspects.pop(peer_id, None)
            elif suspect is not None and suspect.troubled_at == failed_at:
                suspect.is_renewed |= ends_at > suspect.announced_until
            elif failed_at <= asked_at:
                self._suspects[peer_id] = _Suspect(troubled_at=failed_at, announced_until=ends_at)
        while len(self._suspects) > MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]

    def awaits(self, peer_id: PeerId, troubled_at: float | None) -> bool:
        """Return True if a node failed, at `troubled_at`, and has not announced itself again since."""
        if troubled_at is None:
            return False
        suspect = self._suspects.get(peer_id)
        return suspect is None or suspect.troubled_at != troubled_at or not suspect.is_renewed


def _uniform(reader: PeerId, uid: str, peer_id: PeerId) -> float:
    """A number above 0 and below 1 that follows from the three."""
    digest = hashlib.blake2b(reader.raw + uid.encode() + peer_id.raw, digest_size=8).digest()
    return (int.from_bytes(digest) + 0.5) / 2**64
