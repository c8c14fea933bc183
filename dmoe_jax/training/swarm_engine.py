"""Asynchronous trainers over a swarm, as an engine for the run loop."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from dmoe_jax.mixture.fan_out import CallStatistics
from dmoe_jax.training.engine import Totals


def call_totals(statistics: CallStatistics, totals: Totals) -> Totals:
    """These totals with what is counted of the expert calls."""
    failures = {"failed": statistics.failed, "late": statistics.late}
    return replace(
        totals,
        calls_ok=statistics.ok,
        failures={reason: count for reason, count in failures.items() if count},
        load=dict(statistics.load),
        peers={uid: str(contact.address) for uid, contact in statistics.host.items()},
        figures={
            **totals.figures,
            "samples_without_experts": statistics.skipped_samples,
            "mean_expert_staleness": statistics.staleness_total / max(1, statistics.staleness_calls),
        },
    )


def saved_statistics(statistics: CallStatistics) -> dict[str, Any]:
    """The totals for a checkpoint; who serves an expert is not worth keeping."""
    return {name: value for name, value in asdict(statistics).items() if name != "host"}


def load_statistics(statistics: CallStatistics, saved: Mapping[str, Any]) -> None:
    """Go on counting from a checkpoint's totals."""
    for name, value in saved.items():
        setattr(statistics, name, value)
