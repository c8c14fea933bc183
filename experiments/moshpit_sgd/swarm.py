"""Peers that compute, average, vanish and come back, in the virtual time of `dmoe_net.run`, and how they average.

Every peer is a task: it computes a stretch of local steps, and then awaits the method, which decides when it goes on
and with which vector; the learner computes what the vectors are. When the peer vanishes its task is cancelled in
whatever it is.
"""

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import jax
import numpy as np
import optax
import trio
from jax.flatten_util import ravel_pytree

from dmoe_jax.arrays import PyTree
from dmoe_net import MoshpitGrid
from dmoe_net.averaging.grouping.group_key import assign_slots
from experiments.moshpit_sgd.settings import MethodName, TimeModel
from experiments.moshpit_sgd.tasks import Task


class PeerLearner:
    """The peers of one swarm. They begin with the same parameters, of the seed, as batches are."""

    def __init__(self, task: Task, *, num_peers: int, local_steps: int, seed: int) -> None:
        params = task.init(jax.random.key(seed))
        vector, unravel = ravel_pytree(params)
        self._local_steps = local_steps
        self._first_row = (task.optimizer.init(params), task.carry)
        self._rows = [self._first_row] * num_peers
        self._held = np.tile(vector, (num_peers, 1))
        self._after = list(self._held)
        self._batches = [task.batches(peer, num_peers, seed) for peer in range(num_peers)]

        def step(carried: PyTree, batch: PyTree) -> tuple[PyTree, None]:
            params, state, carry = carried
            grads, carry = jax.grad(task.loss, has_aux=True)(params, batch, carry)
            updates, state = task.optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state, carry), None

        def stretch(row: PyTree, vector: jax.Array, batches: PyTree) -> tuple[PyTree, jax.Array]:
            (params, *row), _ = jax.lax.scan(step, (unravel(vector), *row), batches)
            return tuple(row), ravel_pytree(params)[0]

        self._stretch = jax.jit(stretch)
        self._evaluate = jax.jit(jax.vmap(lambda vector: task.evaluate(unravel(vector))))

    def begin(self, peer: int) -> None:
        """Compute a stretch of the peer, from the parameters that it holds."""
        batches = [next(self._batches[peer]) for _ in range(self._local_steps)]
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
        self._rows[peer], self._after[peer] = self._stretch(self._rows[peer], self._held[peer], stacked)

    def results(self, peers: Sequence[int]) -> np.ndarray:
        """Return the parameters at the end of the stretches that these peers are in, [peers, numbers]."""
        return np.stack([self._after[peer] for peer in peers])

    def put(self, peers: Sequence[int], vectors: np.ndarray) -> None:
        """Hand these peers the outcome of averaging, [peers, numbers], with which they begin their next stretch."""
        self._held[list(peers)] = vectors

    def adopt(self, peer: int, donor: int) -> None:
        """Let a peer that is new hold what the donor holds; its optimiser begins anew."""
        self._held[peer] = self._held[donor]
        self._rows[peer] = self._first_row

    def losses(self, peers: Sequence[int]) -> np.ndarray:
        """Compute the validation losses of the parameters that these peers hold, [peers]."""
        return np.asarray(self._evaluate(self._held[list(peers)]))


class Method(Protocol):
    """Method by which peers average."""

    async def average(self, peer: int) -> None:
        """Average what the peer has learnt with others', and put the outcome into the learner."""

    async def join(self, peer: int) -> None:
        """Let a peer that is back adopt what another one holds."""


class Swarm:
    """The peers. They begin with `start`, in the nursery, as the method does. Speeds and absences are of the seed."""

    def __init__(
        self, times: TimeModel, learner: PeerLearner, nursery: trio.Nursery, *, num_peers: int, seed: int
    ) -> None:
        self.times, self.learner, self.nursery = times, learner, nursery
        self.num_peers, self.seed = num_peers, seed
        self._donors = random.Random(f"{seed}/donors")
        self._down_since: dict[int, float] = {}
        self._changed = trio.Event()

    def start(self, method: Method) -> None:
        """Let all peers begin to compute."""
        for index in range(self.num_peers):
            speed, stretches, chance = (
                random.Random(f"{self.seed}/{index}/{name}") for name in ("speed", "stretches", "absences")
            )
            stretch_s = functools.partial(self.times.stretch_s, stretches, self.times.speed_factor(speed))
            self.nursery.start_soon(self._live, index, method, stretch_s, self.times.absences(chance))

    async def _live(
        self, index: int, method: Method, stretch_s: Callable[[], float], absences: Iterable[tuple[float, float]]
    ) -> None:
        """A peer's task: train, vanish, come back."""
        for number, (down_s, up_s) in enumerate(itertools.chain(absences, [(math.inf, math.inf)])):
            with trio.move_on_at(down_s):
                if number:
                    await method.join(index)
                while True:
                    self.learner.begin(index)
                    await trio.sleep(stretch_s())
                    await method.average(index)
            now = self._down_since[index] = trio.current_time()
            back_s = max(up_s, now) + self.times.download_s()
            self.tell()
            await trio.sleep_until(min(now + self.times.timeout_s, back_s))
            self.tell()  # now others take notice
            await trio.sleep_until(back_s)
            del self._down_since[index]

    def tell(self) -> None:
        """Let all who wait `until` something look again."""
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds. It is tried now, at each `tell`, and when a peer vanishes or is missed."""
        while not condition():
            await self._changed.wait()

    def is_waited_for(self, index: int) -> bool:
        """Return True if others still count on it: it is up, or nobody has noticed yet that it is not."""
        return trio.current_time() < self._down_since.get(index, math.inf) + self.times.timeout_s

    def adopt(self, index: int) -> None:
        """Let a peer that is back hold what some other peer holds; its own if it is alone."""
        if others := [each for each in self.up if each != index]:
            self.learner.adopt(index, self._donors.choice(others))

    @property
    def up(self) -> list[int]:
        """Indices of the peers that are there."""
        return [index for index in range(self.num_peers) if index not in self._down_since]


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
        self._there: dict[int, bool] = {}
        """Peers that wait, True for those that have something to average."""
        self._over = trio.Event()
        swarm.nursery.start_soon(self._make_rounds)

    async def average(self, peer: int) -> None:
        await self._wait(peer, has_learnt=True)

    async def join(self, peer: int) -> None:
        await self._wait(peer, has_learnt=False)

    async def _wait(self, peer: int, *, has_learnt: bool) -> None:
        self._there[peer] = has_learnt
        self._swarm.tell()
        try:
            await self._over.wait()
        finally:
            self._there.pop(peer, None)

    def _lacks_one_of(self, members: Sequence[int]) -> bool:
        return not all(self._there.get(peer) for peer in members)

    async def _make_rounds(self) -> None:
        swarm = self._swarm
        while True:
            await swarm.until(self._is_complete)
            members = sorted(peer for peer, has_learnt in self._there.items() if has_learnt)
            with trio.move_on_after(swarm.times.all_reduce_s(len(members) or 1)):
                await swarm.until(functools.partial(self._lacks_one_of, members))
                continue
            if members:
                mean = swarm.learner.results(members).mean(axis=0, dtype=np.float64)
                swarm.learner.put(members, np.broadcast_to(mean, (len(members), mean.size)))
            for joiner in sorted(self._there.keys() - set(members)):
                swarm.adopt(joiner)
            self._there.clear()
            self._over.set()
            self._over = trio.Event()

    def _is_complete(self) -> bool:
        awaited = set(range(self._swarm.num_peers)) - self._there.keys()
        return bool(self._there) and not any(map(self._swarm.is_waited_for, awaited))


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
