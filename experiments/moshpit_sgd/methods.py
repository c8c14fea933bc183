"""Methods of averaging: All-Reduce, gossip, PushSum and Moshpit, each deciding when a peer goes on and with what."""

import functools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from dmoe_net.averaging.grouping.group_key import MoshpitGrid, assign_slots
from experiments.moshpit_sgd.settings import MethodName
from experiments.moshpit_sgd.simulation import Method, Simulation, Ticket


def make_method(name: MethodName, simulation: Simulation) -> Method:
    """The method for this swarm. Moshpit's grid is the smallest square that seats all peers."""
    num_peers = simulation.num_peers
    if name == "all_reduce":
        return AllReduce(simulation)
    if name == "moshpit":
        side = math.isqrt(num_peers - 1) + 1
        cells = list(range(side * side))
        random.Random(f"{simulation.seed}/cells").shuffle(cells)
        return Moshpit(simulation, MoshpitGrid(side=side, dims=2), cells[:num_peers])
    if name == "gossip":
        return Messages(simulation, lambda _: (-1, 1), is_push_sum=False)
    hops = max(1, (num_peers - 1).bit_length() - 1)
    return Messages(simulation, lambda number: (2 ** (number % hops), 2 ** (number % hops + 1)), is_push_sum=True)


@dataclass(slots=True, eq=False)
class AllReduce:
    """All peers wait for all, then all have the mean of all.

    When one vanishes the others notice after the timeout, and the all-reduce that it broke begins anew without it. Who
    comes back joins at the end of a round, without keeping anybody waiting.
    """

    simulation: Simulation
    waiting: dict[int, Ticket] = field(default_factory=dict)
    joining: set[int] = field(default_factory=set)
    running: list[Ticket] | None = None

    def ready(self, peer: int) -> None:
        self.waiting[peer] = self.simulation.ticket(peer)
        self._begin_if_complete()

    def down(self, peer: int) -> None:
        self.joining.discard(peer)
        if self.waiting.pop(peer, None) is not None and self.running is not None:
            self.simulation.counts.repeated += 1
            self.running = None
        self._release_if_alone()

    def up(self, peer: int) -> None:
        self.joining.add(peer)
        self._release_if_alone()
        self._begin_if_complete()

    def silent(self, peer: int) -> None:
        self._begin_if_complete()

    def _begin_if_complete(self) -> None:
        simulation = self.simulation
        if self.running is not None or not self.waiting:
            return
        awaited = set(range(simulation.num_peers)) - self.joining - self.waiting.keys()
        if any(simulation.is_waited_for(index) for index in awaited):
            return
        members = self.running = list(self.waiting.values())

        def finish() -> None:
            if self.running is not members:
                return
            mean = simulation.learner.results(sorted(self.waiting)).mean(axis=0, dtype=np.float64)
            self.running = None
            self.waiting.clear()
            simulation.put_and_compute(members, np.broadcast_to(mean, (len(members), mean.size)))
            for joiner in sorted(self.joining):
                simulation.adopt_and_compute(joiner)
            self.joining.clear()

        simulation.at(simulation.now + simulation.times.all_reduce_s(len(members)), finish)

    def _release_if_alone(self) -> None:
        """With nobody left who trains there is no round whose end could be waited for."""
        if self.joining.issuperset(self.simulation.up):
            for joiner in sorted(self.joining):
                self.simulation.compute(joiner)
            self.joining.clear()


@dataclass(slots=True, eq=False)
class Moshpit:
    """Groups under keys, by the rule of `grouping.group_key`; a group begins when it is full or time is up.

    The first to come waits for others no longer than the patience: then the group is whoever is there, and a peer that
    found nobody goes on alone. A member that vanishes while the group averages costs the others the timeout, and its
    vector. Slow peers thus miss their group, and meet whoever is under their key when they come.
    """

    simulation: Simulation
    grid: MoshpitGrid
    cells: list[int]
    rounds: list[int] = field(init=False)
    gathering: dict[tuple[int, ...], list[Ticket]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rounds = [0] * len(self.cells)

    def ready(self, peer: int) -> None:
        simulation, key = self.simulation, self._key(peer)
        group = self.gathering.setdefault(key, [])
        group.append(simulation.ticket(peer))
        if len(group) == self.grid.side:
            self._average(key)
        elif len(group) == 1:
            due_s = simulation.now + simulation.times.patience_s
            simulation.at(due_s, lambda: self._average(key) if self.gathering.get(key) is group else None)

    def down(self, peer: int) -> None:
        """Whoever waits under its key notices when nobody answers."""
        key = self._key(peer)
        group = self.gathering.get(key, [])
        group[:] = [ticket for ticket in group if ticket[0] != peer]
        if not group:
            self.gathering.pop(key, None)

    def up(self, peer: int) -> None:
        """It goes on from the round that the swarm is in."""
        self.rounds[peer] = max(self.rounds[index] for index in self.simulation.up)
        self.simulation.adopt_and_compute(peer)

    def silent(self, peer: int) -> None:
        """Nothing: no group waits for a certain peer."""

    def _key(self, peer: int) -> tuple[int, ...]:
        return self.grid.coordinates(self.cells[peer], self.rounds[peer])

    def _average(self, key: tuple[int, ...]) -> None:
        simulation, group = self.simulation, self.gathering.pop(key)
        times = simulation.times
        peers = [peer for peer, _ in group]
        vectors = simulation.learner.results(peers)  # now: whoever vanishes may hold another's when this is over
        if len(group) == 1:
            self._move_on(peers)
            simulation.put_and_compute(group, vectors)
            return
        took_s = times.matchmaking_s(simulation.num_peers) + times.group_s(len(group))

        def finish(is_late: bool = False) -> None:
            there = [simulation.is_there(ticket) for ticket in group]
            if not all(there) and not is_late:
                simulation.counts.repeated += 1
                simulation.at(simulation.now + times.timeout_s, lambda: finish(is_late=True))
            elif any(there):
                mean = vectors[there].mean(axis=0, dtype=np.float64)
                self._move_on([peer for peer, is_here in zip(peers, there, strict=True) if is_here])
                simulation.put_and_compute(group, np.broadcast_to(mean, vectors.shape))

        simulation.at(simulation.now + took_s, finish)

    def _move_on(self, peers: list[int]) -> None:
        slots = [self.grid.slot(self.cells[peer], self.rounds[peer]) for peer in peers]
        for peer, slot in zip(peers, assign_slots(slots, self.grid.side), strict=True):
            self.cells[peer] = self.grid.move(self.cells[peer], self.rounds[peer], slot)
            self.rounds[peer] += 1


@dataclass(slots=True, eq=False)
class _Place:
    """A peer of `Messages`."""

    number: int = 0
    """Number of its round."""
    weight: float = 1.0
    """PushSum's; gossip leaves it at 1."""
    own: tuple[np.ndarray, float] | None = None
    """While it waits: its own share."""
    open_s: float = 0.0
    """While it waits: when its own messages are out."""
    inbox: dict[tuple[int, int], tuple[np.ndarray, float]] = field(default_factory=dict)
    """Messages that came since it averaged last, by sender, and by the sender's round if none may be left out."""
    heard: set[tuple[int, int]] = field(default_factory=set)
    """(sender, round) of what came, for rounds that it has not passed."""


@dataclass(slots=True, eq=False)
class Messages:
    """Whole vectors to some neighbours each round: gossip on a ring, or PushSum on an exponential graph (SGP).

    A peer sends, waits for the messages of this round from its senders, no longer than the patience, and goes on with
    what came. In gossip that is the plain mean of its own vector and the newest of each sender. PushSum (Kempe et al.,
    2003; Assran et al., 2019) hands on shares of (weight x value, weight): late ones still count, and what vanishes
    takes both along. SGP adds local progress to weight x value; here it counts by the weight, or whoever waited in
    vain for others' shares, and has little weight left, would multiply its step size.
    """

    simulation: Simulation
    shifts: Callable[[int], tuple[int, ...]]
    is_push_sum: bool
    places: list[_Place] = field(init=False)

    def __post_init__(self) -> None:
        self.places = [_Place() for _ in range(self.simulation.num_peers)]

    def ready(self, peer: int) -> None:
        simulation, place = self.simulation, self.places[peer]
        number = place.number
        receivers = [each for each in self._neighbours(peer, 1) if simulation.is_waited_for(each)]
        weight = place.weight / (1 + len(receivers)) if self.is_push_sum else 1.0
        parcel = (weight * simulation.learner.results([peer])[0], weight)
        arrival_s = simulation.now + simulation.times.send_s(len(receivers))
        for receiver in receivers:
            deliver = functools.partial(self._deliver, simulation.ticket(receiver), peer, number, parcel)
            simulation.at(arrival_s, deliver)
        place.own, place.open_s = parcel, arrival_s
        finish = functools.partial(self._finish, simulation.ticket(peer), number)
        simulation.at(arrival_s, finish)
        simulation.at(arrival_s + simulation.times.patience_s, functools.partial(finish, is_late=True))

    def down(self, peer: int) -> None:
        """Lose what the peer holds; it comes back with another's state and the weight 1."""
        self.places[peer] = _Place()

    def up(self, peer: int) -> None:
        """It goes on from the round that the swarm is in."""
        self.places[peer] = _Place(number=max(self.places[index].number for index in self.simulation.up))
        self.simulation.adopt_and_compute(peer)

    def silent(self, peer: int) -> None:
        for index in self.simulation.up:
            self._finish(self.simulation.ticket(index), self.places[index].number)

    def _neighbours(self, peer: int, direction: int) -> Iterator[int]:
        """To whom it sends (1) or who sends to it (-1) in its round."""
        count = self.simulation.num_peers
        shifts = {direction * shift % count for shift in self.shifts(self.places[peer].number)}
        return ((peer + shift) % count for shift in sorted(shifts) if shift)

    def _deliver(self, ticket: Ticket, sender: int, number: int, parcel: tuple[np.ndarray, float]) -> None:
        if not self.simulation.is_there(ticket):
            return
        place = self.places[ticket[0]]
        place.inbox[sender, number if self.is_push_sum else 0] = parcel
        if number >= place.number:
            place.heard.add((sender, number))
        self._finish(ticket, place.number)

    def _finish(self, ticket: Ticket, number: int, *, is_late: bool = False) -> None:
        """End the peer's round with this number, unless it is to wait for more, or is not in it."""
        simulation, place = self.simulation, self.places[ticket[0]]
        if not simulation.is_there(ticket) or place.own is None or place.number != number:
            return
        if simulation.now < place.open_s:
            return
        awaited = (each for each in self._neighbours(ticket[0], -1) if simulation.is_waited_for(each))
        if not is_late and any((each, number) not in place.heard for each in awaited):
            return
        parcels = [place.own, *place.inbox.values()]
        weight = sum(own for _, own in parcels)
        mean = sum(vector for vector, _ in parcels) / weight
        self.places[ticket[0]] = _Place(
            number=number + 1,
            weight=weight if self.is_push_sum else 1.0,
            heard={entry for entry in place.heard if entry[1] > number},
        )
        simulation.put_and_compute([ticket], np.asarray(mean)[None])
