"""Verdict on the model that ends lower, as far as the seeds allow: paired differences, final figures, equal FLOPs."""

from collections.abc import Mapping, Sequence
from typing import Any

from dmoe_jax.runs.figure import Metrics
from dmoe_jax.runs.report import ReportTable, format_value
from experiments.intervals import Interval, paired_difference, t_interval
from experiments.transformer_xl.flops import equal_flops, training_flops

Finished = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""Label -> seed -> the headline of its run, of the runs that were trained to their end."""


def perplexities(finished: Finished, label: str, split: str = "validation") -> dict[int, float]:
    """Seed -> final perplexity over a whole text."""
    name = f"{split}_perplexity"
    return {seed: all_[name] for seed, all_ in finished.get(label, {}).items() if all_.get(name) is not None}


def verdict(ours: str, theirs: str, difference: Interval) -> str:
    """One sentence on the mean of ours - theirs, no stronger than its interval.

    Args:
      ours, theirs: labels.
      difference: of final validation perplexities, paired by seed.
    """
    if difference.ends is None:
        return f"{ours} - {theirs}: {difference.mean:+.1f} with one seed, which shows nothing"
    low, high = difference.ends
    figures = f"{difference.mean:+.1f}, 95 % interval {low:+.1f} to {high:+.1f} over {difference.num_values} seeds"
    if difference.is_below_zero:
        return f"{ours} ends below {theirs}: {figures}"
    if difference.is_above_zero:
        return f"{ours} ends above {theirs}: {figures}"
    return f"it does not show that {ours} ends below {theirs}, nor above: {figures}"


def verdicts(finished: Finished) -> dict[str, Any]:
    """For the headline: dmoe against each of the others; it beats one if the interval of the difference is below 0."""
    ours, found = perplexities(finished, "dmoe"), dict[str, Any]()
    for other in finished:
        difference = None if other == "dmoe" else paired_difference(ours, perplexities(finished, other))
        if difference is None:
            continue
        found |= {
            f"dmoe_minus_{other}": difference.mean,
            f"dmoe_minus_{other}_interval": difference.ends,
            f"dmoe_beats_{other}": difference.is_below_zero,
            f"dmoe_against_{other}": verdict("dmoe", other, difference),
        }
    return found


def merged_headline(headlines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """The figures of a label's runs as one: means of numbers, sums of counts by reason, whether all are so.

    What no run knows is None.
    """
    merged: dict[str, Any] = {"seeds": len(headlines)}
    for name in names:
        values = [headline[name] for headline in headlines if headline.get(name) is not None]
        if not values:
            merged |= {name: None} if any(name in headline for headline in headlines) else {}
        elif isinstance(values[0], bool):
            merged[name] = all(values)
        elif isinstance(values[0], Mapping):
            reasons = sorted({reason for value in values for reason in value})
            merged[name] = {reason: sum(value.get(reason, 0) for value in values) for reason in reasons}
        else:
            merged[name] = values[0] if len(set(values)) == 1 else sum(values) / len(values)
    for name in ("validation_perplexity", "test_perplexity"):
        if len(values := [all_[name] for all_ in headlines if all_.get(name) is not None]) > 1:
            merged[f"{name}_interval"] = t_interval(values).ends
    return merged


def final_table(finished: Finished) -> ReportTable:
    """Final perplexities: means with their intervals, and every seed."""
    rows: list[list[object]] = []
    for label, seeds in finished.items():
        valid, test = (perplexities(finished, label, split) for split in ("validation", "test"))
        by_seed = ", ".join(f"{seed}: {format_value(value)}" for seed, value in valid.items())
        rows.append([label, len(seeds), _with_interval([*valid.values()]), by_seed, _with_interval([*test.values()])])
    head = ("", "runs", "validation perplexity", "by seed", "test perplexity")
    note = (
        "Over the whole texts, at the end: figures of their own, no points of the curves. In brackets 95 % intervals."
    )
    return ReportTable(title="Final perplexities", head=head, rows=rows, note=note)


def difference_table(finished: Finished) -> ReportTable | None:
    """dmoe against each of the others, paired by seed; None where there is nothing to compare."""
    found = verdicts(finished)
    rows = [[found[f"dmoe_against_{other}"]] for other in finished if f"dmoe_against_{other}" in found]
    if not rows:
        return None
    note = "Final validation perplexities, paired by seed. One model ends below another if the interval excludes 0."
    return ReportTable(title="What the seeds show", head=("dmoe minus another",), rows=rows, note=note)


def flops_table(runs: Mapping[str, Sequence[Metrics]], forward: Mapping[str, float]) -> ReportTable:
    """FLOPs of each label, and where its curve is at equal FLOPs.

    Args:
      runs: label -> metrics of its runs. forward: label -> FLOPs of a forward pass for a word.
    """
    budget, found = equal_flops(runs, forward)
    rows: list[list[object]] = []
    for label in runs:
        known = [value for value in found[label] if value is not None]
        thousand_words = budget / training_flops(forward[label], 1) / 1e3
        rows.append([label, forward[label] / 1e6, thousand_words, _with_interval(known)])
    head = ("", "MFLOPs of a forward pass for a word", "thousand words", "validation perplexity")
    note = (
        f"At {budget / 1e12:.4g} TFLOPs of training, those of the cheapest run; a training step counts as three passes "
        "forward, in matrix products. Perplexities are read off the curves, over their words. The schedules of the "
        "dearer models were not at their end by then: runs planned for that length would probably end lower."
    )
    return ReportTable(title="At equal FLOPs", head=head, rows=rows, note=note)


def _with_interval(values: Sequence[float]) -> str | None:
    """The mean with its interval; None for no values."""
    if not values:
        return None
    interval = t_interval(values)
    ends = "" if interval.ends is None else " ({} to {})".format(*map(format_value, interval.ends))
    return format_value(interval.mean) + ends
