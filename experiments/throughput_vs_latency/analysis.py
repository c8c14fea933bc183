"""Pure functions of what was measured: curves, ceilings, what is kept of the throughput, ratios, agreement."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median, pstdev
from typing import Any, NamedTuple

from experiments.throughput_vs_latency.costs import CostTable
from experiments.throughput_vs_latency.settings import (
    BLOCK_NAMES,
    PASSES,
    SIZES,
    BlockName,
    LatencySettings,
    Load,
    Method,
    Passes,
)

Records = Sequence[Mapping[str, Any]]

CEILINGS_APART = 2.0
"""Delays count as short, so that throughput must be kept, if the lag ceiling is at least so many times the other."""


class Curve(NamedTuple):
    """Key of a curve: kind of block, what a batch goes through, and how many batches are in flight."""

    block: BlockName
    passes: Passes
    method: Method


@dataclass(frozen=True, slots=True)
class Point:
    """Throughput at one mean delay.

    Attributes:
      delay_s: mean delay of a layer call, seconds.
      samples_per_s: of each repeat, in order of the seeds.
    """

    delay_s: float
    samples_per_s: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over the repeats."""
        return mean(self.samples_per_s)

    @property
    def std(self) -> float:
        """Standard deviation over the repeats; 0 for a single one."""
        return pstdev(self.samples_per_s)

    def __str__(self) -> str:
        return f"{self.mean:,.4g} ± {self.std:.2g}"


def curves(records: Records, *, cloud: bool) -> dict[Curve, list[Point]]:
    """The points of each curve by rising delay, of the sweep or of the three regions."""
    values: dict[Curve, dict[float, list[float]]] = {}
    for record in records:
        if record["cloud"] == cloud:
            curve = Curve(record["block"], record["passes"], record["method"])
            values.setdefault(curve, {}).setdefault(record["delay_s"], []).append(record["samples_per_s"])
    return {
        curve: [Point(delay_s, tuple(found)) for delay_s, found in sorted(points.items())]
        for curve, points in values.items()
    }


def cost_tables(records: Records) -> dict[BlockName, CostTable]:
    """The cost tables that a run logged."""
    return {
        record["block"]: CostTable(
            {name: {int(rows): cost for rows, cost in sizes.items()} for name, sizes in record["seconds"].items()}
        )
        for record in records
    }


def lag_ceiling(load: Load, batch_rows: int) -> float:
    """Rows per second if nothing but the delays took time: trainers * batch / (calls of a batch * mean delay)."""
    delay_s = load.delay.mean_s
    return load.trainers * batch_rows / (load.calls_per_batch * delay_s) if delay_s else math.inf


def compute_ceiling(load: Load, costs: CostTable) -> float:
    """Rows per second if every device were always busy with batches of the cheapest size."""
    row_s = costs.least_row_s("forward") + (costs.least_row_s("backward") if load.passes == "training" else 0.0)
    return (1 if load.place.shared_device else load.place.servers) / (load.place.layers * row_s)


def short_delays(settings: LatencySettings, block: BlockName, passes: Passes, costs: CostTable) -> list[float]:
    """The delays above 0 whose lag ceiling is at least `CEILINGS_APART` times the compute ceiling."""
    rows = SIZES[settings.size].blocks[block].batch_rows
    return [
        load.delay.mean_s
        for method, load in settings.grid()
        if method == "asynchronous"
        and load.passes == passes
        and load.delay.std_s is None
        and math.inf > lag_ceiling(load, rows) >= CEILINGS_APART * compute_ceiling(load, costs)
    ]


def kept(settings: LatencySettings, records: Records, tables: Mapping[BlockName, CostTable]) -> dict[Curve, float]:
    """Least share of the zero-delay throughput that asynchronous trainers have at a short delay, where there is one."""
    shares = {}
    for curve, points in curves(records, cloud=False).items():
        if curve.method == "asynchronous" and curve.block in tables and points[0].delay_s == 0:
            short = short_delays(settings, curve.block, curve.passes, tables[curve.block])
            found = [point.mean / points[0].mean for point in points if point.delay_s in short]
            if found:
                shares[curve] = min(found)
    return shares


def cloud_ratios(records: Records) -> dict[tuple[BlockName, Passes], list[float]]:
    """Asynchronous over model parallel throughput in the three regions, seed by seed."""
    found = curves(records, cloud=True)
    ratios = {}
    for block in BLOCK_NAMES:
        for passes in PASSES:
            ours, alone = (found.get(Curve(block, passes, method)) for method in ("asynchronous", "model_parallel"))
            if ours and alone:
                pairs = zip(ours[0].samples_per_s, alone[0].samples_per_s, strict=False)
                ratios[block, passes] = [one / other for one, other in pairs]
    return ratios


def agreement_ratios(records: Records) -> dict[tuple[Curve, float], list[float]]:
    """Virtual over real throughput of each curve and delay, round by round."""
    ratios: dict[tuple[Curve, float], list[float]] = {}
    for record in records:
        curve = Curve(record["block"], record["passes"], record["method"])
        ratios.setdefault((curve, record["delay_s"]), []).append(record["virtual_per_s"] / record["real_per_s"])
    return ratios


def agreement(records: Records) -> float | None:
    """Largest |virtual / real - 1| of the medians over the rounds; None without any record."""
    return max((abs(median(ratios) - 1) for ratios in agreement_ratios(records).values()), default=None)
