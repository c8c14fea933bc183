"""The iterative lookup of Kademlia (section 2.3) as a state machine without I/O.

Theory of operation. The lookup keeps the peers it has heard of, ordered by their distance to the target, each in one
`_State`. The shell calls `next(now)` until it is told to wait, asks each contact that it gets, and reports the outcome
by `on_success` or `on_failure`. The lookup is finished when the `beam_size` nearest peers that can be reached have
answered.

- At most `parallelism` (alpha) questions are open at once. When alpha answers in a row brought nobody nearer,
  the lookup has *stalled*: it then asks all of the `beam_size` nearest at once (the paper's final round), and returns
  to alpha as soon as somebody nearer turns up.
- A peer silent for `slow_after_s` becomes UNRESPONSIVE: it holds no place among the open questions, and once
  `beam_size` others have answered the result does not wait for it. Otherwise its late answer or its failure is
  awaited: where everybody is slow, impatience would find nobody.
- Peers that invent ever nearer peers cannot keep a lookup going: it asks at most `max_queries` times.
"""

import enum
import math
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from dmoe_net.dht.records import Record, merge
from dmoe_net.dht.routing_table import NodeId, node_id
from dmoe_net.identity import Contact, PeerId


class _State(enum.Enum):
    NEW = enum.auto()
    """Heard of, not asked. Left by being asked."""
    WAITING = enum.auto()
    """Asked, and counted against the parallelism. Left by an answer, a failure, or `slow_after_s`."""
    UNRESPONSIVE = enum.auto()
    """Asked long ago; awaited only if the others are too few. Left by a late answer or a failure."""
    SUCCEEDED = enum.auto()
    """Answered. Final."""
    FAILED = enum.auto()
    """Did not answer, or answered nonsense. Final."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupConfig:
    """Parameters of a lookup."""

    parallelism: int = 3
    """alpha of the paper: open questions while the lookup makes progress."""
    beam_size: int = 20
    """k of the paper: how many of the nearest peers must have answered."""
    slow_after_s: float = 1.0
    """Silence in seconds after which others are asked in a peer's stead."""
    max_queries: int = 200
    """Most questions of one lookup: ten times what the beam needs, room for a swarm that is mostly dead."""

    def __post_init__(self) -> None:
        if self.parallelism < 1 or self.beam_size < 1 or self.max_queries < 1 or not self.slow_after_s > 0:
            raise ValueError(f"every parameter of a lookup must be positive, got {self}")


@dataclass(slots=True, kw_only=True)
class _Peer:
    contact: Contact
    state: _State = _State.NEW
    slow_at: float = 0.0


class Lookup:
    """One walk towards `target`. Each peer is asked at most once; `local_id` never.

    Args:
      target: the id walked towards.
      seeds: contacts to begin with.
      local_id: the own place.
    """

    def __init__(self, target: NodeId, seeds: Iterable[Contact], *, local_id: NodeId, config: LookupConfig) -> None:
        self.target = target
        self.record: Record | None = None
        """Every copy of the target's record that turned up, merged."""
        self.queries = 0
        self._local_id = local_id
        self._config = config
        self._peers: dict[int, _Peer] = {}  # by distance, which names a peer as well as its id does
        self._order: list[int] = []  # the same distances, sorted
        self._without_progress = 0
        self._finished = False
        self._learn(seeds)

    def next(self, now: float) -> Contact | float | None:
        """The next thing to do. Call again after each contact, each outcome, and when the time has come.

        Returns:
          a contact to be asked for others near the target (and for the record); a time before which there is nothing
          to do unless an outcome is reported, infinite if only that can help: every question must have one at some
          time, that is, every call a timeout; or None when the lookup is finished: read `closest()` and `record`, open
          questions may be abandoned.
        """
        if self._finished:
            return None
        for peer in self._peers.values():
            if peer.state is _State.WAITING and now >= peer.slow_at:
                peer.state = _State.UNRESPONSIVE
        waiting = [peer for peer in self._peers.values() if peer.state is _State.WAITING]
        until = min((peer.slow_at for peer in waiting), default=math.inf)
        candidate, is_complete = self._scan()
        if candidate is not None and self.queries >= self._config.max_queries:
            is_complete = not waiting
        elif candidate is not None:
            has_stalled = self._without_progress >= self._config.parallelism
            if len(waiting) >= max(self._config.parallelism, self._config.beam_size if has_stalled else 0):
                return until
            candidate.state = _State.WAITING
            candidate.slow_at = now + self._config.slow_after_s
            self.queries += 1
            return candidate.contact
        if not is_complete:
            return until
        self._finished = True
        return None

    def on_success(self, peer_id: PeerId, closer: Iterable[Contact], record: Record | None = None) -> None:
        """Take in a peer's answer, contacts and perhaps a record. Ignored unless its question is still open."""
        peer = self._asked(peer_id)
        if peer is None or self._finished:
            return
        peer.state = _State.SUCCEEDED
        self.record = merge(self.record, record)
        nearest = self._order[0]
        self._learn(closer)
        self._without_progress = 0 if self._order[0] < nearest else self._without_progress + 1

    def on_failure(self, peer_id: PeerId) -> None:
        """Note that a peer did not answer usefully."""
        if (peer := self._asked(peer_id)) is not None:
            peer.state = _State.FAILED

    def closest(self) -> tuple[Contact, ...]:
        """The nearest peers that answered, nearest first, at most `beam_size`."""
        nearest = (self._peers[distance] for distance in self._order)
        answered = (peer.contact for peer in nearest if peer.state is _State.SUCCEEDED)
        return tuple(islice(answered, self._config.beam_size))

    def unresponsive(self) -> tuple[Contact, ...]:
        """Peers that were asked and given up on while their calls were still open: worth a check."""
        return tuple(p.contact for p in self._peers.values() if p.state is _State.UNRESPONSIVE)

    def _asked(self, peer_id: PeerId) -> _Peer | None:
        """The peer, if its question is open."""
        peer = self._peers.get(node_id(peer_id) ^ self.target)
        return peer if peer is not None and peer.state in (_State.WAITING, _State.UNRESPONSIVE) else None

    def _learn(self, contacts: Iterable[Contact]) -> None:
        # Memory stays bounded: an answer holds a bounded number of contacts, and there are at most max_queries of them.
        for contact in contacts:
            node = node_id(contact.peer_id)
            distance = node ^ self.target
            if node != self._local_id and distance not in self._peers:
                self._peers[distance] = _Peer(contact=contact)
                insort(self._order, distance)

    def _scan(self) -> tuple[_Peer | None, bool]:
        """The nearest peer to ask among the beam, and whether the whole beam has answered.

        The beam is the `beam_size` nearest peers that answered, are being waited for, or have not been asked.
        """
        room = self._config.beam_size
        is_complete, has_silent = True, False
        for distance in self._order:
            peer = self._peers[distance]
            if peer.state is _State.NEW:
                return peer, False
            is_complete &= peer.state is not _State.WAITING
            has_silent |= peer.state is _State.UNRESPONSIVE
            if peer.state in (_State.WAITING, _State.SUCCEEDED):
                room -= 1
                if room == 0:
                    return None, is_complete
        return None, is_complete and not has_silent
