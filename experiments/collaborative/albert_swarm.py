"""Peers of unequal speeds and lines that train the small ALBERT together, and the baselines' time with the same ones.

DeDLOC's setting (section 4.2-4.3): graphics cards whose speeds are spread 1 to 10; workstations with lines of 200 Mb/s
and servers with 1 Gb/s. The model of the paper, ALBERT-large, has 18 million parameters and this one far fewer.
So lines are made thinner, and what may be under way on them smaller, such that a vector takes as long as the paper's.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import trio

from dmoe_jax.collaboration import GlobalStep
from dmoe_net import AllReduceConfig, Constant, HostOptions
from experiments.collaborative.albert import AlbertTask
from experiments.collaborative.all_reduces import all_reduce_times
from experiments.collaborative.scenes import LATENCY_S, Played, fail, play, unequal
from experiments.collaborative.world import Life, PeerSpec, Problem, World, lines_of

FASTEST_PER_S = 4.0
"""Samples a second of the fastest peer: with 512 samples a step, one machine of its kind takes two minutes for a step,
about what a V100 would take for 4096 samples of ALBERT-large."""

_LARGEST_MICRO_BATCH = 4
"""Samples."""

_SERVER_BPS, _WORKSTATION_BPS = 1e9, 2e8
"""Lines, bits a second in each direction, before they are made thinner."""

_LARGE_BYTES = 2 * 18e6
"""Gradients of ALBERT-large's 18 million parameters (Lan et al. 2020, table 1) in 16 bits, as DeDLOC sends them."""

_SERVER_EVERY = 3
"""Every third peer has a server's line: 8 of 24, as the paper's servers and workstations together."""

_MEAN_LIFE_S, _DOWN_S = 1800.0, 60.0
"""Mean virtual seconds that a peer lives before it fails, and that it stays away."""

_JOIN_LATE, _JOINING_STEPS = 4, 4
"""One peer of so many joins late, after one of so many first steps."""


def _thinner(num_params: int) -> float:
    """Return the bytes of this model's gradients, in 32 bits, over those of the paper's."""
    return 4 * num_params / _LARGE_BYTES


def _all_reduce_config(num_params: int) -> AllReduceConfig:
    """Return settings with as large a share of a vector under way as the paper's has by default."""
    default, scale = AllReduceConfig(), _thinner(num_params)
    return AllReduceConfig(
        chunk_bytes=round(scale * default.chunk_bytes), window_bytes=round(scale * default.window_bytes)
    )


def machines(count: int, *, num_params: int) -> list[PeerSpec]:
    """Return so many peers of `unequal` speeds, fastest first, with lines as much thinner as the model is smaller."""
    specs = []
    for index, spec in enumerate(unequal(count, slowest_s=10 / FASTEST_PER_S)):
        bps = (_WORKSTATION_BPS if index % _SERVER_EVERY else _SERVER_BPS) * _thinner(num_params)
        # Powers of two, so that the gradient is compiled for few sizes.
        micro_batch = 2 ** int(math.log2(max(1.0, min(1 / spec.sample_s, _LARGEST_MICRO_BATCH))))
        specs.append(replace(spec, micro_batch=micro_batch, line=HostOptions(up_bps=bps, down_bps=bps)))
    return specs


def train_together(
    task: AlbertTask,
    specs: Sequence[PeerSpec],
    *,
    steps: int,
    mean_life_s: float = _MEAN_LIFE_S,
    keep: bool = False,
    seed: int = 0,
) -> tuple[list[tuple[float, float]], Played, Problem]:
    """Train in virtual time. A quarter of the peers joins late, and peers die silently and come back as newcomers.

    Args:
      steps: global steps.
      mean_life_s: of a peer, virtual seconds.
      keep: whether lives have their parameters after each step.

    Returns: for each step, the virtual time at which the first peer had made it, and the loss then; the scene; what was
      trained, which knows which samples were whose.
    """
    made: dict[int, tuple[float, float]] = {}

    def on_step(life: Life, done: GlobalStep) -> None:
        if done.number not in made:
            assert life.peer is not None
            made[done.number] = trio.current_time(), task.loss(life.peer.params)

    async def body(world: World, played: Played) -> None:
        async def failures() -> None:
            every_s = mean_life_s / len(specs)
            await fail(world, every_s=every_s, chance=random.Random(seed), down_s=_DOWN_S, only_silently=True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(_join, world, specs)
            nursery.start_soon(failures)
            await world.wait_for_step(steps)
            nursery.cancel_scope.cancel()

    problem = task.problem(len(specs))
    played = play(
        body,
        target=task.target,
        seed=seed,
        lines=lines_of(specs),
        problem=problem,
        all_reduce=_all_reduce_config(task.num_params),
        keep=keep,
        last_step=steps,
        on_step=on_step,
    )
    return [made[number] for number in sorted(made)], played, problem


async def _join(world: World, specs: Sequence[PeerSpec]) -> None:
    """Start three of four; the others join in four groups, one after each of the first steps."""
    late = specs[_JOIN_LATE - 1 :: _JOIN_LATE]
    for spec in specs:
        if spec not in late:
            world.start(spec)
    together = math.ceil(len(late) / _JOINING_STEPS)
    for number, spec in enumerate(late):
        await world.wait_for_step(1 + number // together)
        world.start(spec)


def baseline_step_s(specs: Sequence[PeerSpec], *, target: int, num_params: int) -> dict[str, float]:
    """Return the seconds of a step of each baseline with these machines.

        one_machine         target / the fastest one's speed
        all_reduce          target / n * seconds a sample of the slowest       + an all-reduce with equal shares
        parameter_server    target / speed of all together                     + the same, all of it reduced by one

    This flatters the baselines: nobody dies or joins, no group has to be found, and with the parameter server, which
    has the widest line, nobody waits for slower peers. The loss of all three is that of one machine: averaging
    gradients of parts of a batch makes the same steps.
    """
    seconds = [spec.sample_s for spec in specs]
    server = max(specs, key=lambda spec: spec.line.down_bps)
    with_server = [replace(spec, client=spec is not server) for spec in specs]
    return {
        "one_machine": target * min(seconds),
        "all_reduce": target / len(specs) * max(seconds) + averaging_s(specs, num_params),
        "parameter_server": target / sum(1 / each for each in seconds) + averaging_s(with_server, num_params),
    }


def averaging_s(specs: Sequence[PeerSpec], num_params: int, *, by_speed: bool = False) -> float:
    """Return the virtual seconds that the library's all-reduce takes these machines, as of `all_reduce_times`."""
    config, latency = _all_reduce_config(num_params), Constant(LATENCY_S)
    size = num_params + 1  # the number of samples travels with a gradient
    (seconds,), _ = all_reduce_times(specs, size, by_speed=by_speed, config=config, latency=latency)
    return seconds
