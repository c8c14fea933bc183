"""Methods of averaging: All-Reduce, PushSum and Moshpit, each deciding when a peer goes on and with what."""

import functools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import trio

from dmoe_net.averaging.grouping.group_key import MoshpitGrid, assign_slots
from experiments.moshpit_sgd.settings import MethodName
from experiments.moshpit_sgd.swarm import Method, Swarm


def make_method(name: MethodName, swarm: Swarm) -> Method:
    """The method for this swarm. Moshpit's grid is the smallest square that seats all peers."""
    if name == "all_reduce":
        return AllReduce(swarm)
    if name == "pushsum":
        return PushSum(swarm)
    side = math.isqrt(swarm.num_peers - 1) + 1
    cells = list(range(side * side))
    random.Random(f"{swarm.seed}/cells").shuffle(cells)
    return Moshpit(swarm, MoshpitGrid(side=side, dims=2), cells[: swarm.num_peers])


class AllReduce:
    """All peers wait for all, then all have the mean of all.

    When one vanishes the others notice after the timeout, and the all-reduce that it broke begins anew without it. Who
    comes back joins at the end of a round, without keeping anybody waiting.
    """

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._waiting: set[int] = set()
        self._joining: set[int] = set()
        self._over = trio.Event()
        swarm.nursery.start_soon(self._make_rounds)

    async def average(self, peer: int) -> None:
        await self._wait_among(self._waiting, peer)

    async def join(self, peer: int) -> None:
        await self._wait_among(self._joining, peer)

    async def _wait_among(self, peers: set[int], peer: int) -> None:
        peers.add(peer)
        self._swarm.tell()
        try:
            await self._over.wait()
        finally:
            peers.discard(peer)

    async def _make_rounds(self) -> None:
        swarm = self._swarm
        while True:
            await swarm.until(self._is_complete)
            members = sorted(self._waiting)
            with trio.move_on_after(swarm.times.all_reduce_s(len(members) or 1)):
                await swarm.until(functools.partial(self._has_lost_one, members))
                continue
            if members:
                mean = swarm.learner.results(members).mean(axis=0, dtype=np.float64)
                swarm.learner.put(members, np.broadcast_to(mean, (len(members), mean.size)))
            for joiner in sorted(self._joining):
                swarm.adopt(joiner)
            self._waiting.clear()
            self._joining.clear()
            self._over.set()
            self._over = trio.Event()

    def _has_lost_one(self, members: Sequence[int]) -> bool:
        return not self._waiting.issuperset(members)

    def _is_complete(self) -> bool:
        there = self._waiting | self._joining
        awaited = set(range(self._swarm.num_peers)) - there
        return bool(there) and not any(map(self._swarm.is_waited_for, awaited))


@dataclass(slots=True, eq=False)
class _Group:
    """A group of `Moshpit`, from the first who waits to the last who averages."""

    due_s: float
    """Time at which it begins, full or not."""
    begun: trio.Event = field(default_factory=trio.Event)
    members: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)
    """In the order in which they came, without those who vanished: the place along the axis, and the vector."""


class Moshpit:
    """Groups under keys, by the rule of `grouping.group_key`; a group begins when it is full or time is up.

    The first to come waits for others no longer than the patience: then the group is whoever is there, and a peer that
    found nobody goes on alone. A member that vanishes while the group averages costs the others the timeout, and its
    vector. Slow peers thus miss their group, and meet whoever is under their key when they come.
    """

    def __init__(self, swarm: Swarm, grid: MoshpitGrid, cells: list[int]) -> None:
        self._swarm, self._grid, self._cells = swarm, grid, cells
        self._rounds = [0] * len(cells)
        self._gathering: dict[tuple[int, ...], _Group] = {}

    async def average(self, peer: int) -> None:
        times, cell, number = self._swarm.times, self._cells[peer], self._rounds[peer]
        key = self._grid.coordinates(cell, number)
        group = self._gathering.setdefault(key, _Group(due_s=trio.current_time() + times.patience_s))
        group.members[peer] = (self._grid.slot(cell, number), self._swarm.learner.results([peer])[0])
        try:
            if len(group.members) == self._grid.side:
                group.begun.set()
                del self._gathering[key]
            with trio.move_on_at(group.due_s):
                await group.begun.wait()
            if self._gathering.get(key) is group:
                del self._gathering[key]
            if (size := len(group.members)) > 1:
                await trio.sleep(times.group_s(size, self._swarm.num_peers))
                if len(group.members) < size:
                    await trio.sleep(times.timeout_s)
        except trio.Cancelled:
            del group.members[peer]
            if not group.members and self._gathering.get(key) is group:
                del self._gathering[key]
            raise
        wanted, vectors = zip(*group.members.values(), strict=True)
        self._swarm.learner.put([peer], np.stack(vectors).mean(axis=0, keepdims=True, dtype=np.float64))
        slots = dict(zip(group.members, assign_slots(wanted, self._grid.side), strict=True))
        self._cells[peer] = self._grid.move(cell, number, slots[peer])
        self._rounds[peer] += 1

    async def join(self, peer: int) -> None:
        """Let it go on from the round that the swarm is in."""
        self._rounds[peer] = max(self._rounds[index] for index in self._swarm.up)
        self._swarm.adopt(peer)


Parcel = tuple[np.ndarray, float]
"""A share of weight x value, and of the weight."""


@dataclass(slots=True, eq=False)
class _Place:
    """A peer of `PushSum`, in one of its lives."""

    number: int = 0
    """Number of its round."""
    weight: float = 1.0
    inbox: list[Parcel] = field(default_factory=list)
    """Shares that it has to add up: those that came since it averaged last, and its own."""
    heard: set[tuple[int, int]] = field(default_factory=set)
    """(sender, round) of all that came."""


class PushSum:
    """Whole vectors to two others each round, on an exponential graph (SGP).

    A peer sends, waits for the messages of this round from its senders, no longer than the patience, and goes on with
    what came. PushSum (Kempe et al., 2003; Assran et al., 2019) hands on shares of (weight x value, weight): late ones
    still count, and what vanishes takes both along. SGP adds local progress to weight x value; here it counts by the
    weight, or whoever waited in vain for others' shares, and has little weight left, would multiply its step size.
    """

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._hops = max(1, (swarm.num_peers - 1).bit_length() - 1)
        self._places = [_Place() for _ in range(swarm.num_peers)]

    async def average(self, peer: int) -> None:
        swarm, place, number = self._swarm, self._places[peer], self._places[peer].number
        receivers = [each for each in self._neighbours(peer, 1) if swarm.is_waited_for(each)]
        weight = place.weight / (1 + len(receivers))
        parcel = (weight * swarm.learner.results([peer])[0], weight)
        arrival_s = trio.current_time() + swarm.times.send_s(len(receivers))
        for receiver in receivers:
            swarm.nursery.start_soon(self._deliver, self._places[receiver], (peer, number), parcel, arrival_s)
        place.inbox.append(parcel)
        await trio.sleep_until(arrival_s)
        senders = list(self._neighbours(peer, -1))
        with trio.move_on_after(swarm.times.patience_s):
            await swarm.until(
                lambda: all((each, number) in place.heard or not swarm.is_waited_for(each) for each in senders)
            )
        vectors, weights = zip(*place.inbox, strict=True)
        place.weight = sum(weights)
        swarm.learner.put([peer], np.sum(vectors, axis=0, keepdims=True) / place.weight)
        place.inbox.clear()
        place.number += 1

    async def join(self, peer: int) -> None:
        """Let it go on from the round that the swarm is in, with the weight 1: it has lost what it held."""
        others = [self._places[index].number for index in self._swarm.up if index != peer]
        self._places[peer] = _Place(number=max(others, default=0))
        self._swarm.adopt(peer)

    def _neighbours(self, peer: int, direction: int) -> Iterator[int]:
        """To whom it sends (1) or who sends to it (-1) in its round."""
        count, hop = self._swarm.num_peers, 2 ** (self._places[peer].number % self._hops)
        shifts = {direction * shift % count for shift in (hop, 2 * hop)}
        return ((peer + shift) % count for shift in sorted(shifts) if shift)

    async def _deliver(self, place: _Place, sent: tuple[int, int], parcel: Parcel, arrival_s: float) -> None:
        await trio.sleep_until(arrival_s)
        place.inbox.append(parcel)
        place.heard.add(sent)
        self._swarm.tell()
