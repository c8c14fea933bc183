"""The figures: what each is made of, its bar, and the arithmetic from the rounds of a run to the headline."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from experiments.transport_speed.ratios import Figure, ratios_of_rounds

NETWORKS = ("tls", "plain")
SIDES = ("blocking", "rpc")

FIGURES = tuple(
    Figure(
        name=f"allreduce_{network}_ratio",
        quantity="wall_s",
        ours=f"rpc_{network}",
        baseline=f"blocking_{network}",
        bar=bar,
        is_upper_bound=True,
    )
    for network, bar in zip(NETWORKS, (3.0, 4.0), strict=True)
)
MEMORY_BAR = 2.5
"""The most that a member may need, over the vector."""


def record_of(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One exchange as a line of metrics.jsonl.

    Args:
      answers: what each member said: when it `started` and `ended`, its `cpu_s`, and of ours its `grown_bytes`.
    """
    record: dict[str, Any] = {
        "wall_s": max(answer["ended"] for answer in answers) - min(answer["started"] for answer in answers),
        "cpu_s": sum(answer["cpu_s"] for answer in answers),
    }
    if "grown_bytes" in answers[0]:
        record["grown_bytes"] = max(answer["grown_bytes"] for answer in answers)
    return record


def headline_of(slices: Sequence[Mapping[str, Any]], *, vector_bytes: int) -> dict[str, Any]:
    """What the run says: each ratio as the median of its rounds', with the least and the greatest, and what it was made
    of. Round 0 warms up and counts for memory alone.

    Args:
      slices: records of the kind "slice", with "round" and "name".
    """
    headline: dict[str, Any] = {}
    missed = []
    for figure in FIGURES:
        ratios = ratios_of_rounds(figure, slices)
        headline[figure.name] = median(ratios)
        headline |= {f"{figure.name}_min": min(ratios), f"{figure.name}_max": max(ratios)}
        if not figure.is_met_by(median(ratios)):
            missed.append(figure.name)
    headline["memory_ratio"] = max(record.get("grown_bytes", 0) for record in slices) / vector_bytes
    if headline["memory_ratio"] > MEMORY_BAR:
        missed.append("memory_ratio")
    headline["missed_bars"] = missed
    for network in NETWORKS:
        for side in SIDES:
            name = f"{side}_{network}"
            records = [record for record in slices if record["name"] == name and record["round"] > 0]
            for quantity in ("wall_s", "cpu_s"):
                headline[f"{name}_{quantity}"] = median(record[quantity] for record in records)
    return headline
