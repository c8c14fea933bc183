"""Throughput over the mean delay, a panel for each kind of block and what a batch goes through."""

from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dmoe_jax.runs.style import GREY, INK, KILLED, VALID, dress
from experiments.bench import Run
from experiments.throughput_vs_latency.analysis import Curve, compute_ceiling, cost_tables, curves, lag_ceiling
from experiments.throughput_vs_latency.costs import CostTable
from experiments.throughput_vs_latency.settings import (
    BLOCK_NAMES,
    PASSES,
    SIZES,
    BlockName,
    Delay,
    LatencySettings,
    Method,
    Passes,
)

_COLOURS: dict[Method, str] = {"asynchronous": VALID, "model_parallel": KILLED}


def latency_figure(run: Run[LatencySettings]) -> Figure | None:
    """Draw the curves with their ceilings; None where nothing was measured in virtual time."""
    if not run.records("point"):
        return None
    figure = Figure(figsize=(12, 8), layout="constrained")
    panels = figure.subplots(len(PASSES), len(BLOCK_NAMES), squeeze=False)
    for row, passes in zip(panels, PASSES, strict=True):
        for axes, block in zip(row, BLOCK_NAMES, strict=True):
            _draw(axes, run, block, passes)
    panels[0][0].legend(fontsize=8, frameon=False, loc="lower left")
    return figure


def _draw(axes: Axes, run: Run[LatencySettings], block: BlockName, passes: Passes) -> None:
    unit = "vectors/s" if block == "feedforward" else "sequences/s"
    title = "forward" if passes == "forward" else "forward and backward"
    axes.set_yscale("log")
    points = run.records("point")
    sweep, cloud = curves(points, cloud=False), curves(points, cloud=True)
    for method, colour in _COLOURS.items():
        curve, name = Curve(block, passes, method), method.replace("_", " ")
        found = sweep.get(curve, [])
        delays_ms, errors = [1e3 * point.delay_s for point in found], [point.std for point in found]
        means = [point.mean for point in found]
        axes.errorbar(delays_ms, means, errors, fmt="o-", color=colour, capsize=2, markersize=4, label=name)
        for point in cloud.get(curve, []):
            label = "the same in three regions" if method == "asynchronous" else None
            axes.errorbar(1e3 * point.delay_s, point.mean, point.std, fmt="*", color=INK, markersize=9, label=label)
    if block in (tables := cost_tables(run.records("costs"))):
        _draw_ceilings(axes, run.settings, block, passes, tables[block])
    dress(axes, f"{block}, {title} ({unit})", "mean delay of a layer call (ms)")


def _draw_ceilings(axes: Axes, settings: LatencySettings, block: BlockName, passes: Passes, costs: CostTable) -> None:
    """Dashed: what delays alone would allow to each method. Dotted: what the devices allow."""
    rows, last_s = SIZES[settings.size].blocks[block].batch_rows, settings.delays_s[-1]
    delays_s = np.geomspace(last_s / 100, last_s, 60)
    low, high = axes.get_ylim()
    for method, load in settings.grid()[:4]:
        if load.passes != passes:
            continue
        lag = [lag_ceiling(replace(load, delay=Delay(float(delay_s))), rows) for delay_s in delays_s]
        label = "lag ceiling" if method == "asynchronous" else None
        axes.plot(1e3 * delays_s, lag, color=_COLOURS[method], linestyle="--", linewidth=1, alpha=0.7, label=label)
        if method == "asynchronous":
            axes.axhline(
                compute_ceiling(load, costs), color=GREY, linestyle=":", linewidth=1.2, label="compute ceiling"
            )
    axes.set_ylim(low / 1.5, 3 * high)
