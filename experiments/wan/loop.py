"""Part `loop`: what averaging in the background costs a trainer, on this machine and by its clock.

A trainer of `dmoe train` steps as fast as it can; beside it, in a process of its own and over TCP on loopback, is
somebody to average with. Turns with and without averaging follow each other, and the figure is the ratio of their steps
a second. Both processes share this machine's cores, so the figure contains what the other one computes.
"""

import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import trio
from matplotlib.axes import Axes

from dmoe_jax import open_swarm
from dmoe_jax.arrays import PyTree
from dmoe_jax.averaging import Round
from dmoe_jax.model import Model, Outcome
from dmoe_jax.optim import moshpit_average
from dmoe_jax.peers.security import Plain
from dmoe_jax.runs.report import ReportTable
from dmoe_jax.runs.style import GREY, INK, VALID, dress
from dmoe_jax.trainer import Trainers
from dmoe_jax.trunk import open_trunk_averaging
from experiments.bench import Run
from experiments.intervals import t_interval
from experiments.processes import open_helpers
from experiments.results import Bar
from experiments.wan.loop_settings import CONFIG, NAME, WIDTH, params_of
from experiments.wan.settings import WanSettings

_ROWS = 64
"""Rows of a batch."""

_WARM_UP_STEPS = 3
BARS: tuple[Bar, ...] = ()


def loss_of(params: PyTree, x: Any) -> Any:
    """Mean square of what is left of `x` after all layers."""
    for layer in params.values():
        x = x + jnp.tanh(x @ layer)
    return jnp.mean(x**2)


class Dense(Model):
    """A network without experts: every step is the trunk's alone.

    Args:
      num_params: about so many.
    """

    name = "dense"

    def __init__(self, num_params: int) -> None:
        self._num_params = num_params

    def init(self, key: Any) -> PyTree:
        del key
        return params_of(self._num_params)

    async def forward(self, run: Any, params: PyTree, batch: Any, state: PyTree, keys: Any) -> Outcome:
        del state, keys
        return Outcome(loss=run(loss_of, params, batch), items=len(batch))


def measure(run: Run[WanSettings]) -> None:
    """Turns with and without averaging, for each period."""
    settings = run.settings
    with open_helpers("experiments.wan.partner", [{"num_params": settings.loop_params}]) as (partner,):
        for period_s in settings.chosen_loop_periods_s:
            for turn in range(settings.chosen_loop_turns):
                # Which of the two comes first changes from turn to turn: what drifts counts for both.
                order = (False, True) if turn % 2 else (True, False)
                found = {averages: trio.run(_turn, settings, partner.hello["contact"], period_s, averages)
                         for averages in order}  # fmt: skip
                run.log(
                    "loop",
                    period_s=period_s,
                    turn=turn,
                    steps_per_s=found[True][0],
                    steps_per_s_alone=found[False][0],
                    averages=found[True][1],
                )
                run.say(
                    f"loop: an average every {period_s:g} s: {found[True][0]:.1f} steps/s with {found[True][1]} "
                    f"averages, {found[False][0]:.1f} without"
                )


async def _turn(settings: WanSettings, contact: str, period_s: float, averages: bool) -> tuple[float, int]:
    """Steps a second in one turn, and averages that it had."""
    done = 0

    def count(round_: Round) -> None:
        nonlocal done
        done += round_.received > 0

    async with _open_trainers(settings, contact) as (trainers, place):
        step_s = await _seconds_a_step(trainers, 5)
        if not averages:
            return 1 / await _seconds_a_step(trainers, _steps_in(settings.loop_s, step_s)), 0
        every = max(1, round(period_s / step_s))
        async with _averaged(settings, place, every, count) as averaging:
            await _seconds_a_step(averaging, 5)
            begun = done
            took_s = await _seconds_a_step(averaging, _steps_in(max(settings.loop_s, 2 * period_s), step_s))
            return 1 / took_s, done - begun


def _steps_in(seconds: float, step_s: float) -> int:
    return max(5, round(seconds / step_s))


def _batches() -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    some = [rng.normal(size=(_ROWS, WIDTH)).astype(np.float32) for _ in range(8)]
    return itertools.cycle(some)


@asynccontextmanager
async def _open_trainers(settings: WanSettings, contact: str) -> AsyncIterator[tuple[Trainers, Any]]:
    async with open_swarm(contact, listen="127.0.0.1:0", security=Plain(), seed=0) as swarm:
        yield swarm.trainer(Dense(settings.loop_params), optax.adam(1e-4), _batches()), swarm


@asynccontextmanager
async def _averaged(settings: WanSettings, swarm: Any, every: int, on_round: Any) -> AsyncIterator[Trainers]:
    """Trainers whose trunk is averaged every so many updates, as `dmoe train --average-every` does it."""
    optimizer = moshpit_average(optax.adam(1e-4), every=every)
    trainers = swarm.trainer(Dense(settings.loop_params), optimizer, _batches())
    async with open_trunk_averaging(
        replace(swarm.peer, rng=random.Random(0)),
        trainers.trunk,
        name=NAME,
        config=CONFIG,
        device=swarm.device,
        on_round=on_round,
    ):
        yield trainers


async def _seconds_a_step(trainers: Trainers, num_steps: int) -> float:
    """Mean time of some steps, the first ones, which compile, not counted."""
    if not trainers.step:
        await trainers.run(_WARM_UP_STEPS)
    began = time.perf_counter()
    await trainers.run(num_steps)
    jax.block_until_ready(trainers.params)
    return (time.perf_counter() - began) / num_steps


def figures(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean ratio at each period, with the ends of its 95 % interval over the turns."""
    found: dict[str, Any] = {}
    for period_s, ratios in _ratios(records).items():
        name, interval = f"loop_ratio_{period_s:g}s", t_interval(ratios)
        found[name] = interval.mean
        if interval.ends is not None:
            found |= {f"{name}_min": interval.low, f"{name}_max": interval.high}
    return found


def table(records: Sequence[dict[str, Any]]) -> ReportTable:
    """A row for each period."""
    rows = []
    for period_s, ratios in _ratios(records).items():
        own = [each for each in records if each["period_s"] == period_s]
        interval = t_interval(ratios)
        averages = sum(each["averages"] for each in own)
        rows.append((period_s, len(own), averages, interval.mean, interval.low, interval.high))
    return ReportTable(
        title="Steps a second with averaging in the background, over those without",
        head=("period, s", "turns", "averages", "ratio", "95 % from", "to"),
        rows=rows,
        note="On this machine, whose cores both processes share. Two turns at least for an interval.",
    )


def draw(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    """Ratios over the period, a dot for each turn."""
    by_period = _ratios(records)
    for period_s, ratios in by_period.items():
        axes.plot([period_s] * len(ratios), ratios, "o", color=INK, ms=3)
    axes.plot(list(by_period), [t_interval(ratios).mean for ratios in by_period.values()], "-", color=VALID)
    axes.set_ylim(0, 1.2)
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.set_ylabel("steps/s, over those without", fontsize=9, color=GREY)
    dress(axes, "Training while it averages", "seconds between averages")


def _ratios(records: Sequence[dict[str, Any]]) -> dict[float, list[float]]:
    found: dict[float, list[float]] = {}
    for each in records:
        found.setdefault(each["period_s"], []).append(each["steps_per_s"] / each["steps_per_s_alone"])
    return dict(sorted(found.items()))
