"""The figures: what each is made of, its bar, and the arithmetic from the slices of a run to the headline."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One uninterrupted measurement.

    Attributes:
      calls: calls or transfers that were answered.
      nbytes: payload of transfers, bytes; 0 for small calls.
      wall_s: how long they took together.
      client_cpu_s, server_cpu_s: processor time of the two processes meanwhile.
      latencies_s: of each small call; empty for transfers.
    """

    calls: int
    nbytes: int
    wall_s: float
    client_cpu_s: float
    server_cpu_s: float
    latencies_s: tuple[float, ...] = ()

    def record(self) -> dict[str, Any]:
        """The slice as a line of metrics.jsonl, its latencies as two percentiles."""
        record: dict[str, Any] = {"calls": self.calls, "wall_s": self.wall_s, "calls_per_s": self.calls / self.wall_s}
        cpu_s = self.client_cpu_s + self.server_cpu_s
        record |= {"client_cpu_s": self.client_cpu_s, "server_cpu_s": self.server_cpu_s}
        if self.nbytes:
            gigabytes = self.nbytes / 1e9
            record |= {"gigabytes_per_s": gigabytes / self.wall_s, "cpu_s_per_gigabyte": cpu_s / gigabytes}
        if self.latencies_s:
            for percent in (50, 99):
                record[f"p{percent}_ms"] = 1e3 * percentile(self.latencies_s, percent)
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A ratio of two slices of the same round.

    Attributes:
      name: in the headline.
      quantity: key of the slices' records that is divided.
      ours, baseline: names of the slices; `ours` is the numerator.
      bar: what the median of the rounds must reach.
      is_upper_bound: whether the bar is a maximum and not a minimum.
    """

    name: str
    quantity: str
    ours: str
    baseline: str
    bar: float
    is_upper_bound: bool = False

    def is_met_by(self, value: float) -> bool:
        """Whether `value` is on the right side of the bar."""
        return value <= self.bar if self.is_upper_bound else value >= self.bar


FIGURES = (
    Figure(name="small_calls_ratio", quantity="calls_per_s", ours="rpc_tls_calls", baseline="blocking_calls", bar=0.5),
    Figure(name="tls_ratio", quantity="gigabytes_per_s", ours="rpc_tls_send", baseline="blocking_tls_send", bar=1.0),
    Figure(
        name="tls_receive_ratio",
        quantity="gigabytes_per_s",
        ours="rpc_tls_receive",
        baseline="blocking_tls_receive",
        bar=1.0,
    ),
    Figure(
        name="plain_ratio", quantity="gigabytes_per_s", ours="rpc_plain_send", baseline="blocking_plain_send", bar=0.6
    ),
    Figure(
        name="plain_receive_ratio",
        quantity="gigabytes_per_s",
        ours="rpc_plain_receive",
        baseline="blocking_plain_receive",
        bar=0.6,
    ),
    Figure(
        name="head_of_line_ratio",
        quantity="p99_ms",
        ours="rpc_tls_calls_while_sending",
        baseline="rpc_tls_one_caller",
        bar=20.0,
        is_upper_bound=True,
    ),
    Figure(
        name="head_of_line_receive_ratio",
        quantity="p99_ms",
        ours="rpc_tls_calls_while_receiving",
        baseline="rpc_tls_one_caller",
        bar=20.0,
        is_upper_bound=True,
    ),
)


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that `percent` per cent of all do not exceed (nearest rank).

    Raises:
      ValueError: there are no samples, or `percent` is not in (0, 100].
    """
    if not samples or not 0 < percent <= 100:
        raise ValueError(f"expected samples and a percentage in (0, 100], got {len(samples)} samples and {percent}")
    return sorted(samples)[math.ceil(len(samples) * percent / 100) - 1]


def ratios_of_rounds(figure: Figure, slices: Iterable[Mapping[str, Any]]) -> list[float]:
    """The figure in each round that has both of its slices, in order of the rounds.

    Args:
      slices: records of the kind "slice", with "round" and "name"; round 0 is the warm-up and does not count.
    """
    values = {
        (record["round"], record["name"]): record[figure.quantity]
        for record in slices
        if record["name"] in (figure.ours, figure.baseline)
    }
    rounds = sorted({number for number, _ in values if number > 0})
    pairs = [(values.get((number, figure.ours)), values.get((number, figure.baseline))) for number in rounds]
    return [ours / baseline for ours, baseline in pairs if ours is not None and baseline is not None]


def headline_of(slices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the run says: each figure as the median of its rounds' ratios, with the least and the greatest, and the
    medians of what it was made of."""
    headline: dict[str, Any] = {}
    missed = []
    for figure in FIGURES:
        ratios = ratios_of_rounds(figure, slices)
        headline[figure.name] = median(ratios)
        headline |= {f"{figure.name}_min": min(ratios), f"{figure.name}_max": max(ratios)}
        if not figure.is_met_by(median(ratios)):
            missed.append(figure.name)
    headline["missed_bars"] = missed
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for record in slices:
        if record["round"] > 0:
            by_name.setdefault(record["name"], []).append(record)
    for name, records in by_name.items():
        for quantity in ("gigabytes_per_s", "cpu_s_per_gigabyte", "calls_per_s", "p50_ms", "p99_ms"):
            # Transfers are told in bytes, small calls in calls.
            if quantity in records[0] and not (quantity == "calls_per_s" and "gigabytes_per_s" in records[0]):
                headline[f"{name}_{quantity}"] = median(record[quantity] for record in records)
    return headline
