"""Peers of unequal speeds and lines that train the small ALBERT together, while some fail and come back.

DeDLOC's setting (section 4.2-4.3): graphics cards whose speeds are spread 1 to 10; workstations with lines of 200 Mb/s
and servers with 1 Gb/s. The model of the paper, ALBERT-large, has 18 million parameters and this one far fewer.
So lines are made thinner, and what may be under way on them smaller, such that a vector takes as long as the paper's.
"""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import trio

from dmoe_jax.collaboration import CollaborationConfig, GlobalStep
from dmoe_net.averaging.reduction.partition import AllReduceConfig
from dmoe_net.transport.sim import run, simulate
from dmoe_net.transport.sim.links import Constant, HostOptions
from experiments.collaborative.albert_task import AlbertTask
from experiments.collaborative.scenes import LATENCY_S, Played
from experiments.collaborative.world import Life, PeerSpec, Problem, World, host_lines

FASTEST_PER_S = 4.0
"""Samples a second of the fastest peer: with 512 samples a step, one machine of its kind takes two minutes for a step,
about what a V100 would take for 4096 samples of ALBERT-large."""

SPREAD = 10.0
"""The fastest peer's speed over the slowest one's."""

SERVER_BPS, WORKSTATION_BPS = 1e9, 2e8
"""Lines, bits a second in each direction, before they are made thinner."""

LARGE_BYTES = 2 * 18e6
"""Gradients of ALBERT-large's 18 million parameters (Lan et al. 2020, table 1) in 16 bits, as DeDLOC sends them."""

_SERVER_EVERY = 3
"""Every third peer has a server's line: 8 of 24, as the paper's servers and workstations together."""

_MICRO_BATCH_S, _LARGEST_MICRO_BATCH = 1.0, 4

MEAN_LIFE_S = 1800.0
"""Mean virtual seconds that a peer lives before it fails."""

_DOWN_S = 60.0
"""Virtual seconds that a failed peer stays away."""

_LEAST_CHUNK_BYTES = 4096
"""Smaller ones are more calls than bytes."""

_JOIN_LATE, _JOINING_STEPS = 4, 4
"""One peer of so many joins late, after one of so many first steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The state of a training after a step."""

    step: int
    """Global steps so far."""
    virtual_s: float
    """When the first peer had made it."""
    samples: float
    """In all steps so far."""
    loss: float
    """On the held-out samples, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A training's loss over its steps and over virtual time."""

    points: tuple[Point, ...]

    @property
    def last(self) -> Point:
        """After the last step that was measured."""
        return self.points[-1]

    @property
    def samples_per_s(self) -> float:
        """Samples in steps, over the virtual time that they took, from the first measured step to the last."""
        first, last = self.points[0], self.points[-1]
        return (last.samples - first.samples) / (last.virtual_s - first.virtual_s)

    def seconds_to(self, loss: float) -> float:
        """Virtual time at which the loss is first as low as this, on straight lines between points; NaN if never."""
        before = None
        for point in self.points:
            if point.loss <= loss:
                if before is None:
                    return point.virtual_s
                part = (before.loss - loss) / (before.loss - point.loss)
                return before.virtual_s + part * (point.virtual_s - before.virtual_s)
            before = point
        return float("nan")

    def loss_after(self, step: int) -> float:
        """After the last measured step up to this one.

        Raises:
          ValueError: none was measured by then.
        """
        found = [point.loss for point in self.points if point.step <= step]
        if not found:
            raise ValueError(f"no loss was measured in the first {step} steps")
        return found[-1]

    def largest_gap(self, other: "Curve") -> float:
        """The largest difference of the losses after equal numbers of steps.

        Raises:
          ValueError: there are no steps that both have.
        """
        ours, theirs = ({each.step: each.loss for each in curve.points} for curve in (self, other))
        both = ours.keys() & theirs.keys()
        if not both:
            raise ValueError("two curves must have a step in common to be compared, got none")
        return max(abs(ours[step] - theirs[step]) for step in both)


@dataclass(slots=True, kw_only=True)
class Together:
    """Outcome of a collaboration: its curve, and the lives and failures of its peers."""

    curve: Curve
    problem: Problem
    """Problem that was trained; it knows which samples were whose."""
    lives: list[Life]
    failed_at: list[float]
    """Virtual times at which peers died."""

    @property
    def chains_apart(self) -> int:
        """Steps after which peers had several sets of parameters."""
        return Played(lives=self.lives).chains_apart

    @property
    def goodput(self) -> float:
        """Share of the computed samples that are in a step."""
        # Peers that are about to make the last step still hold what is in it.
        peers = [life.peer for life in self.lives if life.peer is not None and life.ended is None]
        at_hand = sum(peer.standing.gathered for peer in peers if peer.step >= self.curve.last.step)
        return (self.curve.last.samples + at_hand) / sum(life.computed for life in self.lives)


def thinner(num_params: int) -> float:
    """Bytes of this model's gradients, in 32 bits, over those of the paper's."""
    return 4 * num_params / LARGE_BYTES


def all_reduce_config(num_params: int) -> AllReduceConfig:
    """Return settings with as large a share of a vector under way as the paper's has by default, or a few chunks."""
    default, scale = AllReduceConfig(), thinner(num_params)
    return replace(
        default,
        chunk_bytes=max(_LEAST_CHUNK_BYTES, round(scale * default.chunk_bytes)),
        window_bytes=max(_LEAST_CHUNK_BYTES, round(scale * default.window_bytes)),
    )


def machines(count: int, *, num_params: int) -> list[PeerSpec]:
    """Peers whose speeds are spread evenly on a logarithmic scale, the fastest first; every third has a server's line.

    Args:
      count: of peers; at least 2. num_params: of the model; lines are as much thinner as it is smaller.

    Raises:
      ValueError: there are fewer than two.
    """
    if count < 2:
        raise ValueError(f"machines of unequal speed are at least 2, got {count}")
    specs = []
    for index, rate in enumerate(np.geomspace(FASTEST_PER_S, FASTEST_PER_S / SPREAD, count).tolist()):
        bps = (WORKSTATION_BPS if index % _SERVER_EVERY else SERVER_BPS) * thinner(num_params)
        # Powers of two, so that the gradient is compiled for few sizes.
        micro_batch = 2 ** int(np.log2(max(1.0, min(rate * _MICRO_BATCH_S, _LARGEST_MICRO_BATCH))))
        line = HostOptions(up_bps=bps, down_bps=bps)
        specs.append(PeerSpec(name=f"peer{index}", sample_s=1 / rate, micro_batch=micro_batch, line=line))
    return specs


def train_together(
    task: AlbertTask,
    specs: Sequence[PeerSpec],
    *,
    steps: int,
    mean_life_s: float = MEAN_LIFE_S,
    keep: bool = False,
    seed: int = 0,
) -> Together:
    """Train in virtual time. A quarter of the peers joins late, and peers die silently and come back as newcomers.

    Args:
      specs: see `machines`.
      steps: global steps.
      mean_life_s: of a peer, virtual seconds; infinite for no failure.
      keep: whether lives have their parameters after each step.
      seed: of everything but the task.
    """
    made: dict[tuple[int, bytes], _Made] = {}

    def on_step(life: Life, done: GlobalStep) -> None:
        key = (done.number, life.chains[done.number])
        if key not in made:
            assert life.peer is not None
            made[key] = _Made(trio.current_time(), done.samples, task.loss(life.peer.params))

    async def main() -> Together:
        hosts = host_lines(specs)
        async with simulate(seed=seed, latency=Constant(LATENCY_S), hosts=hosts) as network:
            config = CollaborationConfig(
                target_batch_size=task.size.target, lead_s=2.0, all_reduce=all_reduce_config(task.num_params)
            )
            problem = task.problem(len(specs))
            world = World(network, problem, config=config, seed=seed, keep=keep, last_step=steps, on_step=on_step)
            await world.open()
            failed_at: list[float] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_join, world, specs)
                nursery.start_soon(_fail, world, len(specs), mean_life_s, failed_at, random.Random(seed))
                await world.wait_for_step(steps)
                nursery.cancel_scope.cancel()
            return Together(curve=_curve_of(made, world.lives), problem=problem, lives=world.lives, failed_at=failed_at)

    return run(main, seed=seed)


class _Made(NamedTuple):
    """A step of a chain, when the first peer had made it."""

    virtual_s: float
    samples: float
    loss: float


def _curve_of(made: Mapping[tuple[int, bytes], _Made], lives: Sequence[Life]) -> Curve:
    """After each step; where peers went apart, that of the chain which most of them were in."""
    points: list[Point] = []
    samples = 0.0
    for number in sorted({number for number, _ in made}):
        chains = Counter(life.chains[number] for life in lives if number in life.chains)
        step = made[number, chains.most_common(1)[0][0]]
        samples += step.samples
        points.append(Point(step=number, virtual_s=step.virtual_s, samples=samples, loss=step.loss))
    return Curve(points=tuple(points))


async def _join(world: World, specs: Sequence[PeerSpec]) -> None:
    """Three of four begin; the others join in four groups, one after each of the first steps."""
    late = specs[_JOIN_LATE - 1 :: _JOIN_LATE]
    for spec in specs:
        if spec not in late:
            world.start(spec)
    together = math.ceil(len(late) / _JOINING_STEPS)
    for number, spec in enumerate(late):
        await world.wait_for_step(1 + number // together)
        world.start(spec)


async def _fail(
    world: World, num_machines: int, mean_life_s: float, failed_at: list[float], chance: random.Random
) -> None:
    """Peers die, silently as if unplugged, at random times; each comes back as a newcomer that knows nothing.

    Nobody dies while half of the machines are down.
    """

    async def come_back(name: str) -> None:
        await trio.sleep(_DOWN_S)
        world.revive(name)

    async with trio.open_nursery() as nursery:
        while True:
            await trio.sleep(mean_life_s / num_machines * chance.uniform(0.5, 1.5))
            names = [life.spec.name for life in world.living if life.peer is not None]
            if 2 * len(names) <= num_machines:
                continue  # what all have learnt must not be lost
            name = chance.choice(names)
            failed_at.append(trio.current_time())
            world.kill(name, silent=True)
            nursery.start_soon(come_back, name)
