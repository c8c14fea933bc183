"""The search for step sizes: as many values for every label, on a seed that no reported run has."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.report import ReportTable, format_value
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.training.prepared_run import finished_headline
from experiments.transformer_xl.presets import chosen_preset
from experiments.transformer_xl.settings import TransformerXLSettings
from experiments.transformer_xl.trainings import INGREDIENTS, SEARCHED, labels, search_trainings

Searched = Mapping[str, Mapping[float, float | None]]
"""Label -> factor of the preset's step sizes -> final validation perplexity; infinite for a run that failed, None for
one that has not ended."""


_MOST_SEARCHED = 6
"""Values for each label."""


def search_results(settings: TransformerXLSettings, out: Path) -> Searched:
    """Return the results of the search's runs in the experiment's folder; None for a run that is still to be made.

    Where the best of any label is at the edge of what was tried, a further value is added, for all labels.
    """
    factors = list(SEARCHED)
    while True:
        found: dict[str, dict[float, float | None]] = {label: {} for label in labels(settings)}
        for (label, factor), training in search_trainings(settings, out, factors).items():
            assert training.settings.out is not None
            found[label][factor] = _perplexity(RunFolder(training.settings.out))
        further = _further(found)
        if further is None or len(factors) == _MOST_SEARCHED:
            return found
        factors.append(further)


def _further(searched: Searched) -> float | None:
    """A value beyond the edge at which the best of a label is; None where there is no need, or a run has not ended."""
    if not has_ended(searched):
        return None
    for found in searched.values():
        ended = {factor: value for factor, value in found.items() if value is not None and math.isfinite(value)}
        best = min(ended, key=ended.__getitem__, default=None)
        if best == max(found):
            return 2 * max(found)
        if best in (min(found), None):  # where all have failed, they were too large
            return min(found) / 2
    return None


def tried(searched: Searched) -> list[float]:
    """The factors, in the order in which they were tried."""
    return list(next(iter(searched.values())))


def has_ended(searched: Searched) -> bool:
    """Return True if nothing of the search is to be trained any more."""
    return not any(value is None for found in searched.values() for value in found.values())


def _perplexity(folder: RunFolder) -> float | None:
    """Return the perplexity of a run of the search, as `Searched` has it."""
    if (headline := finished_headline(folder)) is not None:
        value: float | None = headline.get("validation_perplexity")
        return math.inf if value is None else value
    events = [record["name"] for record in folder.metrics() if record["kind"] == "event"]
    return math.inf if events and events[-1] == "failed" else None


def best_factors(searched: Searched) -> dict[str, float] | None:
    """The factor of the least validation perplexity for each label; None if a run of the search has not ended.

    Raises:
      UsageError: a label has learnt with none of the step sizes.
    """
    best: dict[str, float] = {}
    if not has_ended(searched):
        return None
    for label, found in searched.items():
        perplexities = {factor: value for factor, value in found.items() if value is not None}
        best[label] = min(perplexities, key=perplexities.__getitem__)
        if math.isinf(perplexities[best[label]]):
            raise UsageError(f"{label}: every run of the search failed, with the step sizes x{list(found)}")
    return best


def step_size_table(settings: TransformerXLSettings, searched: Searched) -> ReportTable:
    """The step sizes of each label, and where they are from; with a search all that it tried.

    Args:
      searched: empty without a search.
    """
    factors = (best_factors(searched) if searched else None) or {}
    rows: list[list[object]] = []
    for label, model in labels(settings).items():
        factor = settings.step_size * factors.get(label, 1.0)
        preset = chosen_preset(replace(settings, step_size=factor, **INGREDIENTS.get(label, {})), model)
        source = preset.step_size_source
        if settings.step_size != 1:
            source = f"{settings.step_size:g} times the preset's"
        if searched:
            source = _told(searched[label], factors.get(label))
        experts = preset.expert_recipe.learning_rate if model == "dmoe" else None
        rows.append([label, preset.recipe.learning_rate, experts, source])
    note = ""
    if searched:
        note = (
            f"Searched on a seed that is not reported, {settings.search_steps or 'as many'} updates a run, over "
            f"{len(tried(searched))} values for each label; the figures are final validation perplexities."
        )
    return ReportTable(title="Step sizes", head=("", "trunk or whole", "experts", "from"), rows=rows, note=note)


def _told(found: Mapping[float, float | None], best: float | None) -> str:
    """All that was tried for a label, and a warning where the best is at the edge of it."""
    words = {None: "not ended", math.inf: "failed"}
    all_tried = [f"x{factor:g}: {words.get(found[factor]) or format_value(found[factor])}" for factor in sorted(found)]
    is_at_edge = best in (min(found), max(found))
    return ", ".join(all_tried) + (" (the best is at the edge of what was tried)" if is_at_edge else "")
