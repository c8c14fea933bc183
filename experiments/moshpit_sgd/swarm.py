"""Peers that compute, average, vanish and come back, in the virtual time of `dmoe_net.run`.

Every peer is a task: it computes a stretch of local steps, and then awaits the method, which decides when it goes on
and with which vector; the learner computes what the vectors are. When the peer vanishes its task is cancelled in
whatever it is.
"""

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable
from typing import Protocol

import trio

from experiments.moshpit_sgd.learning import PeerLearner
from experiments.moshpit_sgd.time_model import TimeModel


class Method(Protocol):
    """Method by which peers average."""

    async def average(self, peer: int) -> None:
        """Average what the peer has learnt with others', and put the outcome into the learner."""

    async def join(self, peer: int) -> None:
        """Let a peer that is back adopt what another one holds."""


class Swarm:
    """The peers. They begin with `start`.

    Args:
      times: durations.
      learner: computes what peers hold.
      nursery: of the peers' tasks, and of the method's.
      num_peers: how many.
      seed: of speeds and absences.
    """

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
