"""Scenes of this experiment, in virtual time: machines of a world that join, train and fail."""

import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
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
      target: samples of a step.
      latency_s: one way, between every two hosts.
      lines: of every host, or a function of its name.
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


async def fail(
    world: World, *, every_s: float, chance: random.Random, down_s: float = _DOWN_S, only_silently: bool = False
) -> None:
    """Let machines die at random times; each comes back as a newcomer that knows nothing. Nobody dies while half of
    them are down.

    Args:
      every_s: mean time between two failures; infinite: none.
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


def play_equal(*, steps: int, seed: int) -> tuple[Comparison, Played]:
    """Four of five machines of unequal speed begin; the fifth joins; one is killed in the middle of an averaging."""
    specs = unequal(5, slowest_s=0.25)

    async def body(world: World, played: Played) -> None:
        for spec in specs[:4]:
            world.start(spec)
        await world.wait_for_step(steps // 4)
        world.start(specs[4])
        await world.wait_for_step(steps // 2)
        victim = next(life.peer for life in world.lives if life.spec is specs[1])
        assert victim is not None
        while not victim.standing.is_averaging:  # noqa: ASYNC110 (virtual time)
            await trio.sleep(0.005)
        await trio.sleep(LATENCY_S / 2)
        step, killed_at = world.step, trio.current_time()
        world.kill(specs[1].name)
        await world.wait_for_step(step + 1)
        played.recovered_s.append(trio.current_time() - killed_at)
        await world.wait_for_step(steps)
        await trio.sleep(2)

    played = play(body, target=256, seed=seed, keep=True)
    return compare_with_one_machine(regression(), played.lives, steps), played


def play_batches(*, virtual_s: float, seed: int) -> Played:
    """Eight machines with a spread of speeds of 1 to 10; nothing happens."""

    async def body(world: World, played: Played) -> None:
        for spec in unequal(8, slowest_s=0.5):
            world.start(spec)
        await trio.sleep(virtual_s)

    return play(body, target=1024, seed=seed)


def play_churn(*, virtual_s: float, failure_every_s: float, seed: int, **how: Any) -> Played:
    """Sixteen machines, two of which cannot be called; one fails now and then, half of the times silently.

    Args:
      virtual_s: how long they train.
      failure_every_s: mean time between two failures; infinite: none.
      how: as of `play`: lines and what is trained, if others than those of this experiment.
    """

    async def body(world: World, played: Played) -> None:
        async def failures() -> None:
            await trio.sleep(30)
            await fail(world, every_s=failure_every_s, chance=random.Random(seed))

        for spec in unequal(16, slowest_s=0.5, clients=(7, 15)):
            world.start(spec)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(failures)
            await trio.sleep(virtual_s)
            nursery.cancel_scope.cancel()

    return play(body, target=2048, seed=seed, **how)


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
