"""Part `churn`: how much of what peers compute ends in a step, against how often one of them fails."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import mean
from typing import Any

from matplotlib.axes import Axes

from dmoe_jax.runs.report import ReportTable
from dmoe_jax.runs.style import GREY, INK, KILLED, VALID, dress
from dmoe_net.transport.sim import HostOptions
from experiments.bench import Run
from experiments.collaborative.scenes import churn_figures, play_churn
from experiments.results import Bar
from experiments.wan.problem import vector_of
from experiments.wan.settings import WanSettings

RATES = (0, 1, 2, 4, 8)
"""Failures a minute among sixteen peers."""

NUM_PARAMS = 2**17
LINE_BPS = 10e6
"""Bits a second of every host in each direction: with a vector of half a MiB an averaging takes a second."""

ROUND_TRIP_MS = 100.0

GOODPUT = Bar(name="churn_goodput_4", bound=0.9, comparison=">=")
BARS = (GOODPUT,)


def measure(run: Run[WanSettings]) -> None:
    """Play the scene for each rate and seed, in as many processes as there are cores."""
    settings = run.settings
    scenes = [(per_minute, seed) for per_minute in RATES for seed in settings.churn_seeds]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        played = pool.map(partial(scene, minutes=settings.churn_minutes), *zip(*scenes, strict=True))
        for (per_minute, seed), record in zip(scenes, played, strict=True):
            run.log("churn", per_minute=per_minute, seed=seed, **record)
            goodput = record["goodput"]
            run.say(f"churn: {per_minute} failures a minute among 16 peers, seed {seed}: goodput {goodput:.3f}")


def scene(per_minute: int, seed: int, *, minutes: float) -> dict[str, Any]:
    """Return the figures of a scene with so many failures a minute, after so many virtual minutes."""
    played = play_churn(
        virtual_s=60 * minutes,
        failure_every_s=60 / per_minute if per_minute else float("inf"),
        seed=seed,
        latency_s=ROUND_TRIP_MS / 2000,
        lines=HostOptions(up_bps=LINE_BPS, down_bps=LINE_BPS),
        problem=vector_of(NUM_PARAMS),
    )
    samples = [samples for _, _, samples in played.steps()]
    return {"steps": len(samples), "samples_per_s": sum(samples) / played.ended_at, **churn_figures(played)}


def figures(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean goodput at each rate over the seeds, with least and greatest."""
    found: dict[str, Any] = {}
    for per_minute, own in _by_rate(records):
        name, goodputs = f"churn_goodput_{per_minute}", [each["goodput"] for each in own]
        found |= {name: mean(goodputs), f"{name}_min": min(goodputs), f"{name}_max": max(goodputs)}
    return found | {"churn_chains_apart": sum(each["chains_apart"] for each in records)}


def table(records: Sequence[dict[str, Any]]) -> ReportTable:
    """A row for each rate."""
    rows = []
    for per_minute, own in _by_rate(records):
        goodputs = [each["goodput"] for each in own]
        rows.append(
            (
                per_minute,
                len(own),
                sum(each["failures"] for each in own),
                mean(goodputs),
                min(goodputs),
                max(goodputs),
                mean(each["samples_per_s"] for each in own),
                mean(each["median_step_s"] for each in own),
                max(each["longest_step_s"] for each in own),
            )
        )
    return ReportTable(
        title="Churn",
        head=(
            "failures a minute",
            "seeds",
            "failures",
            "goodput",
            "least",
            "most",
            "samples/s in steps",
            "median step, s",
            "longest step, s",
        ),
        rows=rows,
        note="Goodput: samples that are in a step, or at hand for the next, over all samples that were computed.",
    )


def draw(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    """Goodput over failures a minute, a dot for each seed."""
    by_rate = _by_rate(records)
    rates = [per_minute for per_minute, _ in by_rate]
    axes.plot(rates, [mean(each["goodput"] for each in own) for _, own in by_rate], "-", color=VALID)
    axes.plot([each["per_minute"] for each in records], [each["goodput"] for each in records], "o", color=INK, ms=3)
    axes.plot([4], [GOODPUT.bound], "_", color=KILLED, ms=16, mew=2)
    axes.set_xticks(rates)
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("samples in steps, share of computed", fontsize=9, color=GREY)
    dress(axes, "Goodput under churn (red: the bar)", "failures a minute among 16")


def _by_rate(records: Sequence[dict[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
    rates = sorted({each["per_minute"] for each in records})
    return [(rate, [each for each in records if each["per_minute"] == rate]) for rate in rates]
