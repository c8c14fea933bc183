"""A whole run in a few numbers, from its metrics: what a comparison of runs shows of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dmoe_jax.runs.figure import Metrics, columns, new_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The figures of one run; None for what it did not measure."""

    perplexity: float | None
    """Validation perplexity at the end; of a run that has not ended, that of the last evaluation."""
    test_perplexity: float | None
    """The same of the test text."""
    evaluated_words: int | None
    """Words of the validation text that its perplexity is over."""
    unigram_perplexity: float | None
    """Perplexity of a unigram model on these words; None for a run that has not ended."""
    final_load_entropy: float | None
    """Entropy of the load in the last window that was measured, mean over layers."""
    final_dead_experts: float | None
    """Experts of all layers without a sample in that window."""
    calls_lost: float | None
    """Failed calls / all calls, over the whole run."""
    virtual_s: float | None
    """Seconds of virtual time, of a simulated run."""
    wall_s: float | None
    """Seconds until the last training step."""


def summarise_run(metrics: Metrics) -> RunSummary:
    """The figures of a run, whole or not, from its records in the kinds listed in `dmoe_jax.runs`."""
    balances, valid = last_balances(metrics), _last_evaluation(metrics, "valid")
    _, ok, failed = new_calls(metrics)
    calls = float(ok.sum() + failed.sum())
    (times,) = columns(metrics, "train", "time_s")
    return RunSummary(
        perplexity=valid.get("perplexity"),
        test_perplexity=_last_evaluation(metrics, "test").get("perplexity"),
        evaluated_words=valid.get("items"),
        unigram_perplexity=next((r.get("unigram_perplexity") for r in metrics if r["kind"] == "headline"), None),
        final_load_entropy=mean(
            np.array([record.get("entropy") for record in balances], np.float64)
        ),  # None becomes NaN
        final_dead_experts=float(sum(record.get("dead") or 0 for record in balances)) if balances else None,
        calls_lost=float(failed.sum()) / calls if calls else None,
        virtual_s=next((float(r["virtual_s"]) for r in reversed(metrics) if r.get("virtual_s") is not None), None),
        wall_s=float(times.max()) if times.size else None,
    )


def last_balances(metrics: Metrics) -> list[Mapping[str, Any]]:
    """The "balance" record of each layer's last window. Of two for a layer and step the last counts."""
    last: dict[str, Mapping[str, Any]] = {}
    for record in metrics:
        if record["kind"] == "balance" and isinstance(record.get("step"), int | float) and record.get("layer"):
            before = last.get(record["layer"], record)
            last[record["layer"]] = record if record["step"] >= before["step"] else before
    return list(last.values())


def mean(values: np.ndarray) -> float | None:
    """Mean of the values that are numbers; None if none is."""
    numbers = values[~np.isnan(values)]
    return float(numbers.mean()) if numbers.size else None


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


def _last_evaluation(metrics: Metrics, split: str) -> Mapping[str, Any]:
    evaluations = _evaluations(metrics, "final_eval", split) or _evaluations(metrics, "eval", split)
    return evaluations[-1] if evaluations else {}
