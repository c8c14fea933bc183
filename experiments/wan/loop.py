"""Part `loop`: what averaging in the background costs a trainer, on this machine and by its clock.

A trainer of `dmoe train` steps as fast as it can; beside it, in a process of its own and over TCP on loopback, is
somebody to average with: this module, run as a helper. Turns with and without averaging follow each other, and the
figure is the ratio of their steps a second. Both processes share this machine's cores, so the figure contains what the
other one computes.
"""

import itertools
import random
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import trio

from dmoe_jax import Model, Outcome, Plain, Trainers, TreeAveragerConfig, moshpit_average, open_swarm
from dmoe_jax.trunk import open_trunk_averaging
from experiments.bench import Run
from experiments.processes import open_helpers, orders, run_helper, say
from experiments.wan.settings import WanSettings

PERIODS_S = (1.0, 5.0, 30.0)
"""Seconds between two averages; with --quick the first two."""

_CONFIG = TreeAveragerConfig(side=2, window_s=10.0, timeout_s=30.0)
_WIDTH, _LAYERS, _ROWS = 1024, 4, 64
"""Width of the network, and rows of a batch."""


def _loss(params: Any, x: Any) -> Any:
    """Mean square of what is left of `x` after all layers."""
    for layer in params.values():
        x = x + jnp.tanh(x @ layer)
    return jnp.mean(x**2)


class Dense(Model[Any, Any]):
    """A network without experts, of 4.2 million parameters: every step is the trunk's alone."""

    def init(self, key: Any) -> Any:
        return {f"layer{index}": jnp.zeros((_WIDTH, _WIDTH)) for index in range(_LAYERS)}

    async def forward(self, run: Any, params: Any, batch: Any, state: Any, keys: Any) -> Outcome:
        return Outcome(loss=run(_loss, params, batch), items=len(batch))


def measure(run: Run[WanSettings]) -> None:
    """Turns with and without averaging, for each period."""
    settings = run.settings
    with open_helpers("experiments.wan.loop", [{}]) as (partner,):
        for period_s in PERIODS_S[: 2 if settings.quick else None]:
            for turn in range(min(settings.loop_turns, 2) if settings.quick else settings.loop_turns):
                # Which of the two comes first changes from turn to turn: what drifts counts for both.
                pair = (None, period_s) if turn % 2 else (period_s, None)
                found = {each: trio.run(_turn, partner.hello["contact"], settings.loop_s, each) for each in pair}
                (alone, _), (steps_per_s, averages) = found[None], found[period_s]
                run.say(f"loop: {averages} averages, one in {period_s:g} s: {steps_per_s:.1f} of {alone:.1f} steps/s")
                shown = {"line": "each turn", "x": period_s, "values": [steps_per_s / alone]}
                run.log("loop", name=f"loop_ratio_{period_s:g}s", **shown, steps_per_s=steps_per_s, averages=averages)


async def _turn(contact: str, least_s: float, period_s: float | None) -> tuple[float, int]:
    """Steps a second, and averages, of a trainer that averages so often; None: never."""
    rng = np.random.default_rng(0)
    batches = itertools.cycle([rng.normal(size=(_ROWS, _WIDTH)).astype(np.float32) for _ in range(8)])
    async with open_swarm(contact, listen="127.0.0.1:0", security=Plain(), seed=0) as swarm:
        trainers = swarm.trainer(Dense(), optax.adam(1e-4), batches)
        step_s = await _seconds_a_step(trainers, 5)
        if period_s is None:
            return 1 / await _seconds_a_step(trainers, max(5, round(least_s / step_s))), 0
        # As `dmoe train --average-every` does it.
        optimizer = moshpit_average(optax.adam(1e-4), every=max(1, round(period_s / step_s)))
        trainers = swarm.trainer(Dense(), optimizer, batches)
        place = replace(swarm.peer, rng=random.Random(0))
        how: dict[str, Any] = {"name": "loop", "config": _CONFIG, "device": swarm.device}
        async with open_trunk_averaging(place, trainers.trunk, **how) as averager:
            await trainers.run(5)
            before = averager.totals.done
            step_s = await _seconds_a_step(trainers, max(5, round(max(least_s, 2 * period_s) / step_s)))
            return 1 / step_s, averager.totals.done - before


async def _seconds_a_step(trainers: Trainers[Any, Any, Any], num_steps: int) -> float:
    """Mean time of some steps; the first three, which may compile, are not counted."""
    await trainers.run(3)
    began = time.perf_counter()
    await trainers.run(num_steps)
    jax.block_until_ready(trainers.params)
    return (time.perf_counter() - began) / num_steps


async def be_partner() -> None:
    """Average with whoever looks for a group, again and again, and train nothing, until standard input closes."""
    optimizer, params = moshpit_average(optax.identity(), every=1), Dense().init(None)
    zeros = jax.tree.map(jnp.zeros_like, params)
    async with (
        open_swarm(listen="127.0.0.1:0", security=Plain(), seed=1) as swarm,
        swarm.averager(params, optimizer, name="loop", config=_CONFIG) as averager,
        trio.open_nursery() as nursery,
    ):

        async def rounds() -> None:
            state = optimizer.init(params)
            while True:
                _, state = optimizer.update(zeros, state, params)
                state = await averager.step(state, params, wait=True)

        nursery.start_soon(rounds)
        say(contact=swarm.contact)
        async for _ in orders():
            pass
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    run_helper(be_partner)
