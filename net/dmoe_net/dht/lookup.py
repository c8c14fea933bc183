"""The iterative lookup of Kademlia (section 2.3) as a state machine without I/O.

Theory of operation. The lookup keeps the peers it has heard of, ordered by their distance to the target, each in one
`_State`. The shell calls `next(now)` until it is told to wait, asks each contact that it gets, and reports the outcome
by `on_success` or `on_failure`. The lookup is finished when the `beam_size` nearest peers that can be reached have
answered, or when `copies` of these have said that they hold the record, if it is that which is looked for.

- At most `parallelism` (alpha) questions are open at once. When alpha answers in a row brought nobody nearer,
  the lookup has *stalled*: it then asks all of the `beam_size` nearest at once (the paper's final round), and returns
  to alpha as soon as somebody nearer turns up.
- A peer that is silent for longer than it is granted becomes UNRESPONSIVE: it holds no place among the open questions,
  and once `beam_size` others have answered the result does not wait for it. Otherwise its late answer or its failure
  is awaited: where everybody is slow, impatience would find nobody. If it is this process that is late, because it
  has too much to do, then answers may lie here unread: nobody counts as silent, or it would have even more to do.
- Peers that invent ever nearer peers cannot keep a lookup going: it asks at most `max_queries` times.
"""

import enum
import math
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from dmoe_net.dht.routing_table import NodeId, node_id
from dmoe_net.identity import Contact, PeerId

_LATE_S = 0.02  # by which a timer may be late in a process that has time


class _State(enum.Enum):
    NEW = enum.auto()
    """Heard of, not asked. Left by being asked."""
    WAITING = enum.auto()
    """Asked, and counted against the parallelism. Left by an answer, a failure, or long silence."""
    UNRESPONSIVE = enum.auto()
    """Asked long ago; awaited only if the others are too few. Left by a late answer or a failure."""
    SUCCEEDED = enum.auto()
    """Answered. Final."""
    FAILED = enum.auto()
    """Did not answer, or answered nonsense. Final."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupConfig:
    """Parameters of a lookup."""

    beam_size: int
    """Number of the nearest peers that must have answered."""
    parallelism: int = 5
    """alpha of the paper: open questions while the lookup makes progress."""
    copies: int = 0
    """Number of peers holding the record at which the lookup ends; 0: the record is not looked for."""
    max_queries: int = 100
    """Most questions of one lookup: ten times what it needs, room for a swarm that is mostly dead."""

    def __post_init__(self) -> None:
        if min(self.beam_size, self.parallelism, self.max_queries) < 1 or self.copies < 0:
            raise ValueError(f"every parameter of a lookup must be positive, got {self}")


@dataclass(slots=True, kw_only=True)
class _Peer:
    contact: Contact
    other: Contact | None = None
    """The same peer at another address, to be tried if it is not at the first."""
    state: _State = _State.NEW
    slow_at: float = 0.0


class Lookup:
    """One walk towards `target`. Each peer is asked at most once; `local_id` never.

    Args:
      patience: returns the seconds of silence that a peer is granted, before others are asked in its stead.
    """

    def __init__(
        self,
        target: NodeId,
        seeds: Iterable[Contact],
        *,
        local_id: NodeId,
        config: LookupConfig,
        patience: Callable[[PeerId], float],
    ) -> None:
        self.target = target
        self.config = config
        self.holders: list[Contact] = []
        """Peers that said that they hold the record, in the order of their answers."""
        self.queries = 0
        self._local_id = local_id
        self._patience = patience
        self._peers: dict[int, _Peer] = {}  # by distance, which names a peer as well as its id does
        self._order: list[int] = []  # the same distances, sorted
        self._waiting: list[_Peer] = []  # and some that have had an outcome since the last `next`
        self._without_progress = 0
        self._due = math.inf  # when `next` is to be called
        self._finished = False
        self._learn(seeds)

    def next(self, now: float) -> Contact | float | None:
        """The next thing to do. Call again after each contact, each outcome, and when the time has come.

        Returns:
          a contact to be asked for others near the target (and for the record); a time before which there is nothing
          to do unless an outcome is reported, infinite if only that can help: every question must have one at some
          time, that is, every call a timeout; or None when the lookup is finished: read `closest()` and `holders`, open
          questions may be abandoned.
        """
        if self._finished:
            return None
        late_s, self._due = max(0.0, now - self._due), math.inf
        for peer in self._waiting:
            if peer.state is not _State.WAITING or now < peer.slow_at:
                continue
            if late_s > _LATE_S:
                peer.slow_at = now + late_s
            else:
                peer.state = _State.UNRESPONSIVE
        waiting = self._waiting = [peer for peer in self._waiting if peer.state is _State.WAITING]
        until = min((peer.slow_at for peer in waiting), default=math.inf)
        candidate, is_complete = self._scan()
        if candidate is not None and self.queries >= self.config.max_queries:
            is_complete = not waiting
        elif candidate is not None:
            has_stalled = self._without_progress >= self.config.parallelism
            if len(waiting) >= max(self._open_questions(), self.config.beam_size if has_stalled else 0):
                self._due = until
                return until
            candidate.state = _State.WAITING
            candidate.slow_at = now + self._patience(candidate.contact.peer_id)
            waiting.append(candidate)
            self.queries += 1
            return candidate.contact
        if not is_complete:
            self._due = until
            return until
        self._finished = True
        return None

    def on_success(self, peer_id: PeerId, closer: Iterable[Contact], *, holds: bool = False) -> None:
        """Take in a peer's answer: contacts, and True if it holds the record. Ignored unless its question is open."""
        peer = self._asked(peer_id)
        if peer is None or self._finished:
            return
        peer.state = _State.SUCCEEDED
        nearest = self._order[0]
        self._learn(closer)
        if holds:
            self.holders.append(peer.contact)
        if 0 < self.config.copies <= len(self.holders) and self._near_holders() >= self.config.copies:
            self._finished = True
            return
        self._without_progress = 0 if self._order[0] < nearest else self._without_progress + 1

    def on_failure(self, peer_id: PeerId) -> None:
        """Note that a peer did not answer usefully."""
        if (peer := self._asked(peer_id)) is None:
            return
        peer.state = _State.FAILED
        if peer.other is not None:  # who named the first address may have lied
            peer.contact, peer.other, peer.state = peer.other, None, _State.NEW

    def closest(self) -> tuple[Contact, ...]:
        """The nearest peers that answered, nearest first, at most `beam_size`."""
        nearest = (self._peers[distance] for distance in self._order)
        answered = (peer.contact for peer in nearest if peer.state is _State.SUCCEEDED)
        return tuple(islice(answered, self.config.beam_size))

    def unresponsive(self) -> tuple[Contact, ...]:
        """Peers that were asked and given up on while their calls were still open: worth a check."""
        return tuple(p.contact for p in self._peers.values() if p.state is _State.UNRESPONSIVE)

    def _open_questions(self) -> int:
        """Most open questions now. A walk to a record begins with one more than the copies that it wants, for the
        nearest known peers may have them, and asks two more for each that was asked in vain."""
        if not self.config.copies:
            return self.config.parallelism
        in_vain = sum(peer.state not in (_State.NEW, _State.WAITING) for peer in self._peers.values())
        return min(self.config.parallelism, self.config.copies + 1 + 2 * in_vain)

    def _near_holders(self) -> int:
        """Number of holders among the `beam_size` nearest peers that have not failed: anybody on the way may say that
        it holds a record."""
        near = (self._peers[distance] for distance in self._order)
        beam = islice((peer.contact for peer in near if peer.state is not _State.FAILED), self.config.beam_size)
        return len(set(beam).intersection(self.holders))

    def _asked(self, peer_id: PeerId) -> _Peer | None:
        """The peer, if its question is open."""
        peer = self._peers.get(node_id(peer_id) ^ self.target)
        return peer if peer is not None and peer.state in (_State.WAITING, _State.UNRESPONSIVE) else None

    def _learn(self, contacts: Iterable[Contact]) -> None:
        # Memory stays bounded: an answer holds a bounded number of contacts, and there are at most max_queries of them.
        for contact in contacts:
            node = node_id(contact.peer_id)
            distance = node ^ self.target
            if node == self._local_id:
                continue
            if (known := self._peers.get(distance)) is None:
                self._peers[distance] = _Peer(contact=contact)
                insort(self._order, distance)
            elif known.other is None and known.contact.address != contact.address:
                known.other = contact

    def _scan(self) -> tuple[_Peer | None, bool]:
        """The nearest peer to ask among the beam, and whether the whole beam has answered.

        The beam is the `beam_size` nearest peers that answered, are being waited for, or have not been asked.
        """
        room = self.config.beam_size
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
