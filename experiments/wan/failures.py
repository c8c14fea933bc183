"""Parts `churn` and `kill`: how much of what peers compute ends in a step, and how long the next step takes.

They are scenes of `experiments.collaborative` on lines of 10 Mb/s, with a vector of half a MiB.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import trio

from dmoe_jax.optim import collaborative
from dmoe_net import HostOptions
from experiments.bench import Run
from experiments.collaborative.scenes import Played, churn_figures, play, play_churn, unequal
from experiments.collaborative.world import Problem, World
from experiments.wan.settings import WanSettings

RATES = (0, 1, 2, 4, 8)
"""Failures a minute among sixteen peers."""

ROUND_TRIPS_MS = (20.0, 100.0, 200.0, 400.0)

_AVERAGING_S = 0.35
"""Seconds of an averaging on the line alone, with six members: kills come within it, and within the votes after it."""


def vector_of(num_params: int, shared: Any = "gradients") -> Problem:
    """A problem of which only the size matters: float32 parameters whose gradient is always the same.

    Args:
      shared: what peers add up, see `collaborative`.
    """
    grads, optimizer = {"w": np.full(num_params, 1e-3, np.float32)}, optax.sgd(1e-3)
    return Problem(
        params={"w": jnp.zeros(num_params)},
        gradient=lambda params, peer, number, count: grads,
        batch_gradient=lambda params, micro_batches: grads,
        together=collaborative(optimizer, shared=shared),
        optimizer=optimizer,
    )


def lines(round_trip_ms: float, bits_per_s: float = 10e6, problem: Problem | None = None) -> dict[str, Any]:
    """Arguments of `play` for such a line of every host, and what is trained; None: 2**17 parameters, with which an
    averaging takes a second."""
    hosts = HostOptions(up_bps=bits_per_s, down_bps=bits_per_s)
    return {"latency_s": round_trip_ms / 2000, "lines": hosts, "problem": problem or vector_of(2**17)}


def measure_churn(run: Run[WanSettings]) -> None:
    """Play the scene for each rate and seed, in as many processes as there are cores."""
    settings = run.settings
    seeds = range(settings.seed, settings.seed + (1 if settings.quick else settings.seeds))
    scenes = [(per_minute, seed) for per_minute in RATES for seed in seeds]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        played = pool.map(partial(churn_scene, minutes=4 if settings.quick else 5), *zip(*scenes, strict=True))
        for (per_minute, seed), figures in zip(scenes, played, strict=True):
            goodput = figures.pop("goodput")
            run.say(f"churn: {per_minute} failures a minute among 16 peers, seed {seed}: goodput {goodput:.3f}")
            name = f"churn_goodput_{per_minute}"
            run.log("churn", name=name, line="each seed", x=per_minute, values=[goodput], seed=seed, **figures)


def churn_scene(per_minute: int, seed: int, *, minutes: float) -> dict[str, Any]:
    """Return the figures of a scene with so many failures a minute, after so many virtual minutes."""
    every_s = 60 / per_minute if per_minute else float("inf")
    return churn_figures(play_churn(virtual_s=60 * minutes, failure_every_s=every_s, seed=seed, **lines(100.0)))


def measure_kills(run: Run[WanSettings]) -> None:
    """Kill peers one after the other at each round trip: killed processes, and machines that are unplugged."""
    kills = 3 if run.settings.quick else 6
    for round_trip_ms in ROUND_TRIPS_MS:
        for how in ("kill", "unplug"):
            run.say(f"{how} {kills} peers while they average, {round_trip_ms:g} ms")
            silent, seed = how == "unplug", run.settings.seed
            played = play_kills(round_trip_ms=round_trip_ms, kills=kills, silent=silent, seed=seed)
            where = {"name": f"{how}_next_step_s", "line": how, "x": round_trip_ms, "values": played.recovered_s}
            run.log("kill", **where, chains_apart=played.chains_apart)


def play_kills(*, round_trip_ms: float, kills: int, silent: bool, seed: int) -> Played:
    """Six machines; one after the other dies in the middle of an averaging and comes back later.

    Args:
      round_trip_ms: between every two hosts.
      kills: how many.
      silent: whether their connections hang, as those of a machine that is unplugged, and do not break.
    """
    specs = unequal(6, slowest_s=0.25)

    async def body(world: World, played: Played) -> None:
        for spec in specs:
            world.start(spec)
        await world.wait_for_step(2)
        for number in range(kills):
            name = specs[number % len(specs)].name
            victim = next(life.peer for life in world.living if life.spec.name == name)
            assert victim is not None
            for wanted in (False, True):  # an averaging from its beginning
                while victim.standing.is_averaging != wanted:  # noqa: ASYNC110 (virtual time)
                    await trio.sleep(0.005)
            await trio.sleep((number + 0.5) / kills * (_AVERAGING_S + round_trip_ms / 1000))
            step, killed_at = world.step, trio.current_time()
            world.kill(name, silent=silent)
            await world.wait_for_step(step + 1)
            played.recovered_s.append(trio.current_time() - killed_at)
            await trio.sleep(20)
            world.revive(name)
            await world.wait_for_step(world.step + 3)

    return play(body, target=384, seed=seed, **lines(round_trip_ms))
