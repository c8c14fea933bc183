"""A whole run in a few numbers, from its metrics: what a comparison of runs shows of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from dmoe_jax.runs.figure import Metrics, columns, new_calls
from dmoe_jax.runs.style import natural_order


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The figures of one run; None for what it did not measure.

    Attributes:
      perplexity: validation perplexity at the end, over as much text as was read then; of a run that has not ended,
        that of the last evaluation.
      test_perplexity: of the test text, at the end.
      final_load_cv, final_load_entropy: of the load in the last window that was measured, mean over layers.
      final_dead_experts: experts of all layers without a sample in that window.
      calls_lost: failed calls / all calls, over the whole run.
      staleness: mean trunk updates by others between a step's reading and writing of the parameters.
      virtual_s: seconds of virtual time, of a simulated run.
      wall_s: seconds until the last training step.
      tokens_per_s: training tokens a second, as the run's headline has it (without compilation, it may be), else
        training tokens / wall_s.
    """

    perplexity: float | None
    test_perplexity: float | None
    final_load_cv: float | None
    final_load_entropy: float | None
    final_dead_experts: float | None
    calls_lost: float | None
    staleness: float | None
    virtual_s: float | None
    wall_s: float | None
    tokens_per_s: float | None


FIGURES = tuple(field.name for field in fields(RunSummary))
"""Names of a summary's figures, in order."""


def summarise_run(metrics: Metrics) -> RunSummary:
    """The figures of a run, whole or not, from its records in the kinds listed in `dmoe_jax.runs`."""
    lines = balance_lines(metrics)
    _, ok, failed = new_calls(metrics)
    calls = float(ok.sum() + failed.sum())
    times, tokens = columns(metrics, "train", "time_s", "items")
    (staleness,) = columns(metrics, "train", "staleness")
    wall_s = float(times.max()) if times.size else None
    tokens_per_s = _last(metrics, "tokens_per_s")
    if tokens_per_s is None and wall_s:
        tokens_per_s = float(tokens.sum()) / wall_s
    return RunSummary(
        perplexity=_last_perplexity(metrics, "valid"),
        test_perplexity=_last_perplexity(metrics, "test"),
        final_load_cv=mean(lines.cv[:, -1:]),
        final_load_entropy=mean(lines.entropy[:, -1:]),
        final_dead_experts=float(lines.dead) if lines.layers else None,
        calls_lost=float(failed.sum()) / calls if calls else None,
        staleness=mean(staleness),
        virtual_s=_last(metrics, "virtual_s"),
        wall_s=wall_s,
        tokens_per_s=tokens_per_s,
    )


class BalanceLines(NamedTuple):
    """Balance over steps.

    Attributes:
      layers: names, in order.
      steps: [windows], trunk updates at the end of each window.
      cv, entropy: [layer, window]; NaN where a layer has no figure.
      dead, experts: of all layers, those without a sample in their layer's last window, and all.
    """

    layers: tuple[str, ...]
    steps: np.ndarray
    cv: np.ndarray
    entropy: np.ndarray
    dead: int
    experts: int


def balance_lines(metrics: Metrics) -> BalanceLines:
    """The "balance" records of a run; without layers if it has none. Of two for a layer and step the last counts."""
    table: dict[str, dict[float, Mapping[str, Any]]] = {}
    for record in metrics:
        if record["kind"] == "balance" and isinstance(record.get("step"), int | float) and record.get("layer"):
            table.setdefault(str(record["layer"]), {})[record["step"]] = record
    layers = tuple(sorted(table, key=natural_order))
    steps = sorted({step for windows in table.values() for step in windows})
    last = [windows[max(windows)] for windows in table.values()]

    def figures(field: str) -> np.ndarray:
        values = [[table[layer].get(step, {}).get(field) for step in steps] for layer in layers]
        return np.array(values, dtype=np.float64).reshape(len(layers), len(steps))  # None becomes NaN

    return BalanceLines(
        layers=layers,
        steps=np.array(steps, dtype=np.float64),
        cv=figures("cv"),
        entropy=figures("entropy"),
        dead=sum(record.get("dead") or 0 for record in last),
        experts=sum(len(record.get("histogram") or ()) for record in last),
    )


def known(summaries: Sequence[RunSummary], figure: str) -> np.ndarray:
    """The values of one figure, of those runs that have it."""
    return np.array([value for run in summaries if (value := getattr(run, figure)) is not None], dtype=np.float64)


def mean(values: np.ndarray) -> float | None:
    """Mean of the values that are numbers; None if none is."""
    numbers = values[~np.isnan(values)]
    return float(numbers.mean()) if numbers.size else None


def deviation(values: np.ndarray) -> float | None:
    """Standard deviation of a sample (n - 1); None for fewer than two values."""
    return float(values.std(ddof=1)) if values.size > 1 else None


def perplexity_curve(metrics: Metrics) -> dict[float, tuple[float, float]]:
    """Step -> (training tokens seen by then, validation perplexity), every point over the same text.

    Of two evaluations of a step the last counts.
    """
    steps, tokens = columns(metrics, "train", "step", "items")
    curve = {}
    for record in _evaluations(metrics, "eval", "valid"):
        step = float(record["step"])
        seen = record.get("items_seen")
        curve[step] = (float(tokens[steps <= step].sum() if seen is None else seen), float(record["perplexity"]))
    return dict(sorted(curve.items()))


def _evaluations(metrics: Metrics, kind: str, split: str) -> list[Mapping[str, Any]]:
    return [
        record
        for record in metrics
        if record["kind"] == kind
        and record.get("split", "valid") == split
        and all(isinstance(record.get(field), int | float) for field in ("step", "perplexity"))
    ]


def _last_perplexity(metrics: Metrics, split: str) -> float | None:
    evaluations = _evaluations(metrics, "final_eval", split) or _evaluations(metrics, "eval", split)
    return float(evaluations[-1]["perplexity"]) if evaluations else None


def _last(metrics: Metrics, field: str) -> float | None:
    return next((float(r[field]) for r in reversed(metrics) if isinstance(r.get(field), int | float)), None)
