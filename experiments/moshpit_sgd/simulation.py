"""Peers that compute, average, vanish and come back, in virtual time.

Theory of operation. A heap of events, ordered by time and then by number, so that one seed is one run. A peer is
computing (a stretch of local steps), or in the hands of the method (waiting for others, averaging), or down. The method
decides when a peer goes on and with which vector; the learner computes what the vectors are.
"""

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from experiments.moshpit_sgd.learning import PeerLearner
from experiments.moshpit_sgd.time_model import TimeModel

Action = Callable[[], None]
Ticket = tuple[int, int]
"""A peer and which life of it: one that vanishes and comes back meanwhile is not who it was."""


class Method(Protocol):
    """Method by which peers average."""

    def ready(self, peer: int) -> None:
        """The peer has finished a stretch."""

    def down(self, peer: int) -> None:
        """The peer is gone, whatever it was in."""

    def up(self, peer: int) -> None:
        """The peer is back and can download a state."""

    def silent(self, peer: int) -> None:
        """The peer has been down for so long that others take notice."""


@dataclass(slots=True)
class Peer:
    """State of a peer in the simulation."""

    speed_factor: float
    stretches: random.Random
    absences: Iterator[tuple[float, float]]
    is_up: bool = True
    life: int = 0
    """Goes up with each departure: what was planned for an earlier life does not happen."""
    down_since: float = 0.0


@dataclass(slots=True)
class Counts:
    """Counts of what happened.

    Attributes:
      stretches: stretches of local steps that ended.
      averagings: outcomes handed out.
      averaged_peers: peers that they were handed to.
      repeated: all-reduces, of all or of a group, during which somebody vanished.
      departures: peers that vanished.
    """

    stretches: int = 0
    averagings: int = 0
    averaged_peers: int = 0
    repeated: int = 0
    departures: int = 0


@dataclass(slots=True, eq=False)
class Simulation:
    """The swarm. It begins with `start`."""

    times: TimeModel
    learner: PeerLearner
    num_peers: int
    local_steps: int
    seed: int
    now: float = 0.0
    peers: list[Peer] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    _method: Method = field(init=False)
    _events: list[tuple[float, int, Action]] = field(default_factory=list)
    _number: int = 0
    _donors: random.Random = field(default_factory=random.Random)

    def start(self, method: Method) -> None:
        """Let all peers begin to compute."""
        self._method = method
        self._donors.seed(f"{self.seed}/donors")
        for index in range(self.num_peers):
            speed_factor = self.times.speed_factor(random.Random(f"{self.seed}/{index}/speed"))
            stretches = random.Random(f"{self.seed}/{index}/stretches")
            absences = self.times.absences(random.Random(f"{self.seed}/{index}/absences"))
            self.peers.append(Peer(speed_factor, stretches, absences))
            self._plan_absence(index)
        for index in range(self.num_peers):
            self.compute(index)

    def run_until(self, until_s: float) -> None:
        """Let everything happen up to this time."""
        while self._events and self._events[0][0] <= until_s:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = until_s

    def at(self, when_s: float, action: Action) -> None:
        """Do it then, after what was planned for the same time before."""
        self._number += 1
        heapq.heappush(self._events, (when_s, self._number, action))

    def compute(self, index: int) -> None:
        """Let a peer that is up begin its next stretch."""
        ticket, peer = self.ticket(index), self.peers[index]
        self.learner.begin(index)

        def done() -> None:
            if self.is_there(ticket):
                self.counts.stretches += 1
                self._method.ready(index)

        self.at(self.now + self.times.stretch_s(peer.stretches, self.local_steps, peer.speed_factor), done)

    def ticket(self, index: int) -> Ticket:
        """This peer in its present life."""
        return index, self.peers[index].life

    def is_there(self, ticket: Ticket) -> bool:
        """Return True if the peer has been there since the ticket was made."""
        peer = self.peers[ticket[0]]
        return peer.is_up and peer.life == ticket[1]

    def put_and_compute(self, group: Sequence[Ticket], vectors: np.ndarray) -> None:
        """Hand the outcome [peers, numbers] to those of the group who are still there; they go on with it."""
        there = [place for place, ticket in enumerate(group) if self.is_there(ticket)]
        if there:
            self.counts.averagings += 1
            self.counts.averaged_peers += len(there)
            self.learner.put([group[place][0] for place in there], vectors[there])
        for place in there:
            self.compute(group[place][0])

    def is_waited_for(self, index: int) -> bool:
        """Return True if others still count on it: it is up, or nobody has noticed yet that it is not."""
        peer = self.peers[index]
        return peer.is_up or self.now < peer.down_since + self.times.timeout_s

    def adopt_and_compute(self, index: int) -> None:
        """Let a peer that is back go on from what some other peer holds; from its own if it is alone."""
        if others := [each for each in self.up if each != index]:
            self.learner.adopt(index, self._donors.choice(others))
        self.compute(index)

    @property
    def up(self) -> list[int]:
        """Indices of the peers that are there."""
        return [index for index, peer in enumerate(self.peers) if peer.is_up]

    def _plan_absence(self, index: int) -> None:
        peer = self.peers[index]
        absence = next(peer.absences, None)
        if absence is None:
            return
        down_s, up_s = absence

        def down() -> None:
            peer.is_up, peer.down_since = False, self.now
            peer.life += 1
            self.counts.departures += 1
            life = peer.life
            self._method.down(index)
            self.at(self.now + self.times.timeout_s, lambda: self._notice(index, life))

        def up() -> None:
            peer.is_up = True
            self._method.up(index)
            self._plan_absence(index)

        self.at(max(down_s, self.now), down)
        self.at(max(up_s, self.now) + self.times.download_s(), up)

    def _notice(self, index: int, life: int) -> None:
        if self.peers[index].life == life and not self.peers[index].is_up:
            self._method.silent(index)
