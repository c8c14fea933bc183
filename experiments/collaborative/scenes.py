"""Scenes of this experiment, in virtual time: machines of a world that join, train and fail."""

import math
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import trio

from dmoe_jax.collaboration import CollaborationConfig
from dmoe_net import AllReduceConfig, Constant, HostOptions, run, simulate
from experiments.collaborative.regression import regression
from experiments.collaborative.world import Comparison, Life, PeerSpec, Problem, World, compare_with_one_machine

LATENCY_S = 0.05
"""One way: a round trip of 100 ms."""

FRACTION = 0.05
"""Greatest permitted distance of a batch from the target, as a share of the target."""

_DOWN_S = 30.0
"""Virtual seconds that a failed machine stays away."""


@dataclass(slots=True, eq=False)
class Played:
    """A scene that is over."""

    target: int
    """Samples of a step."""
    lives: list[Life] = field(default_factory=list)
    ended_at: float = 0.0
    recovered_s: list[float] = field(default_factory=list)
    """From a failure to the next global step, virtual seconds, where the scene measures it."""

    def steps(self) -> Iterator[tuple[int, float, float]]:
        """(number, virtual time at which the first peer had made it, samples) of every global step."""
        first: dict[int, tuple[float, float]] = {}
        for life in self.lives:
            for done, at in zip(life.steps, life.stepped_at, strict=True):
                first[done.number] = min(first.get(done.number, (at, done.samples)), (at, done.samples))
        for number in sorted(first):
            yield number, *first[number]

    @property
    def failures(self) -> list[float]:
        """Virtual times at which machines died."""
        return [life.ended for life in self.lives if life.ended is not None]

    @property
    def chains_apart(self) -> int:
        """Steps after which peers had several sets of parameters."""
        numbers = {number for life in self.lives for number in life.chains}
        return sum(len({life.chains[n] for life in self.lives if n in life.chains}) > 1 for n in numbers)


def play(
    body: Callable[[World, Played], Awaitable[None]],
    *,
    target: int,
    seed: int,
    latency_s: float = LATENCY_S,
    lines: HostOptions | Callable[[str], HostOptions] = HostOptions(),  # noqa: B008 (frozen)
    problem: Problem | None = None,
    all_reduce: AllReduceConfig = AllReduceConfig(),  # noqa: B008 (frozen)
    **of_world: Any,
) -> Played:
    """Play a scene.

    Args:
      body: what happens, while the machines train.
      latency_s: one way, between every two hosts.
      problem: what is trained; None: the regression.
      all_reduce: chunks and windows of vectors.
      of_world: arguments of `World`; by default it keeps no parameters.
    """
    played = Played(target)

    async def main() -> None:
        async with simulate(seed=seed, latency=Constant(latency_s), hosts=lines) as network:
            config = CollaborationConfig(target_batch_size=target, lead_s=2.0, all_reduce=all_reduce)
            trained = regression() if problem is None else problem
            world = World(network, trained, config=config, seed=seed, **{"keep": False, **of_world})
            await world.open()
            await body(world, played)
            played.lives, played.ended_at = world.lives, trio.current_time()

    run(main, seed=seed)
    return played


def unequal(count: int, *, slowest_s: float, clients: Sequence[int] = ()) -> list[PeerSpec]:
    """Return machines whose speeds are spread evenly on a logarithmic scale, over a factor of ten."""
    seconds = np.geomspace(slowest_s / 10, slowest_s, count)
    return [
        PeerSpec(name=f"peer{index}", sample_s=float(each), client=index in clients)
        for index, each in enumerate(seconds)
    ]


CHURN: Mapping[str, Any] = {"specs": unequal(16, slowest_s=0.5, clients=(7, 15)), "target": 2048}
"""Sixteen machines, two of which cannot be called, as arguments of `play_swarm`."""


async def fail(
    world: World, *, every_s: float, chance: random.Random, down_s: float = _DOWN_S, only_silently: bool = False
) -> None:
    """Let machines die at random times; each comes back as a newcomer that knows nothing. Nobody dies while half of
    them are down.

    Args:
      every_s: mean time between two failures.
      down_s: how long one is away.
      only_silently: True if connections of the dead always hang, as if unplugged; if not, half of them break.
    """

    async def come_back(name: str) -> None:
        await trio.sleep(down_s)
        world.revive(name)

    async with trio.open_nursery() as nursery:
        while True:
            await trio.sleep(every_s * chance.uniform(0.5, 1.5))
            names = [life.spec.name for life in world.living if life.peer is not None]
            if 2 * len(names) <= len({life.spec.name for life in world.lives}):
                continue  # what all have learnt must not be lost
            name = chance.choice(names)
            world.kill(name, silent=only_silently or chance.random() < 0.5)
            nursery.start_soon(come_back, name)


async def kill_in_averaging(
    world: World, played: Played, name: str, *, after_s: float, anew: bool = True, silent: bool = False
) -> None:
    """Kill a machine in the middle of an averaging, and note how long the next step takes from there.

    Args:
      after_s: from the beginning of the averaging to the kill.
      anew: False if an averaging that is under way already will do.
      silent: True if its connections hang, as those of a machine that is unplugged, and do not break.
    """
    (victim,) = (life.peer for life in world.living if life.spec.name == name)
    assert victim is not None
    for wanted in (False, True) if anew else (True,):
        while victim.standing.is_averaging != wanted:  # noqa: ASYNC110 (virtual time)
            await trio.sleep(0.005)
    await trio.sleep(after_s)
    step, killed_at = world.step, trio.current_time()
    world.kill(name, silent=silent)
    await world.wait_for_step(step + 1)
    played.recovered_s.append(trio.current_time() - killed_at)


def play_equal(*, steps: int, seed: int) -> tuple[Comparison, Played]:
    """Four of five machines of unequal speed begin; the fifth joins; one is killed in the middle of an averaging."""
    specs = unequal(5, slowest_s=0.25)

    async def body(world: World, played: Played) -> None:
        for spec in specs[:4]:
            world.start(spec)
        await world.wait_for_step(steps // 4)
        world.start(specs[4])
        await world.wait_for_step(steps // 2)
        await kill_in_averaging(world, played, specs[1].name, after_s=LATENCY_S / 2, anew=False)
        await world.wait_for_step(steps)
        await trio.sleep(2)

    played = play(body, target=256, seed=seed, keep=True)
    return compare_with_one_machine(regression(), played.lives, steps), played


def play_swarm(
    specs: Sequence[PeerSpec], *, virtual_s: float, failure_every_s: float = math.inf, seed: int, **how: Any
) -> Played:
    """Let machines train for so long; one fails now and then, half of the times silently.

    Args:
      failure_every_s: mean time between two failures; infinite: none.
      how: as of `play`.
    """

    async def body(world: World, played: Played) -> None:
        async def failures() -> None:
            await trio.sleep(30)
            await fail(world, every_s=failure_every_s, chance=random.Random(seed))

        for spec in specs:
            world.start(spec)
        async with trio.open_nursery() as nursery:
            if failure_every_s < math.inf:
                nursery.start_soon(failures)
            await trio.sleep(virtual_s)
            nursery.cancel_scope.cancel()

    return play(body, seed=seed, **how)


def batch_figures(played: Played) -> dict[str, Any]:
    """Return figures of the batches' distance from the target, and of the time that machines are idle."""
    # The first batch is gathered by peers that do not know of each other yet.
    samples = np.array([samples for number, _, samples in played.steps() if number > 1])
    idle = [life.idle_share(played.ended_at) for life in played.lives if life.peer is not None and life.ended is None]
    return {
        "steps": len(samples) + 1,
        "batch_within_5_percent": float(np.mean(np.abs(samples / played.target - 1) <= FRACTION)),
        "most_idle": max(idle),
    }


def churn_figures(played: Played) -> dict[str, Any]:
    """Return figures of what failures cost: goodput, failures, chains apart and the times of steps."""
    used = sum(samples for _, _, samples in played.steps())
    at_hand = sum(life.peer.standing.gathered for life in played.lives if life.peer is not None and life.ended is None)
    computed = sum(life.computed for life in played.lives)
    times = np.diff([at for _, at, _ in played.steps()])
    return {
        "goodput": (used + at_hand) / computed,
        "failures": len(played.failures),
        "chains_apart": played.chains_apart,
        "median_step_s": float(np.median(times)),
        "longest_step_s": float(times.max()),
    }
