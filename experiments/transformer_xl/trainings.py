"""Runs of the experiment: the compared models with each seed, and the search for step sizes. Imports no JAX."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dmoe_jax.runs.endings import CommandFailed
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.training.prepared_run import finished_headline
from experiments.bench import FACTORS
from experiments.transformer_xl.settings import MAX_SEEDS, Model, TransformerXLSettings

INGREDIENTS: Mapping[str, dict[str, Any]] = {
    "dmoe-synchronous": {"concurrency": 1, "delay_s": 0.0, "failure_rate": 0.0},
    "dmoe-stale": {"failure_rate": 0.0},
    "dmoe-failing": {"concurrency": 1, "delay_s": 0.0},
}
"""Label -> settings that differ from those of `dmoe`, which has both. Where one trainer is at work at once nothing is
stale, and a delay would only be waited for."""

SEARCH_STEPS = 2000
"""Most updates of a run of the search."""

Searched = Mapping[str, Mapping[float, float | None]]
"""Label -> factor of the preset's step sizes -> final validation perplexity; infinite for a run that failed, None for
one that has not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One run of one model."""

    label: str
    """Name in figures."""
    settings: TransformerXLSettings
    """With one model, one seed, and the run's own folder as `out`."""
    may_fail: bool = False
    """True if the others go on when this one ends in a loss that is not finite, or the like."""
    keeps_checkpoints: bool = True
    """True if its checkpoints stay when it is finished; it needs none of them any more."""


def labels(settings: TransformerXLSettings) -> dict[str, Model]:
    """Label -> model, of all that is compared."""
    models: dict[str, Model] = {str(model): model for model in settings.models}
    return models | (dict.fromkeys(INGREDIENTS, "dmoe") if settings.ingredients else {})


def compared_trainings(
    settings: TransformerXLSettings, out: Path, factors: Mapping[str, float] | None = None
) -> list[Training]:
    """The runs that are reported: all labels with the first seed come before the second seed.

    Args:
      out: folder of the experiment.
      factors: of the labels whose step sizes were searched, the best.
    """
    seeds, best = range(settings.seed, settings.seed + settings.num_seeds), factors or {}
    return [
        _training(settings, label, out / label / f"seed{seed}", factor=best.get(label, 1.0), seed=seed)
        for seed in seeds
        for label in labels(settings)
    ]


def search_trainings(settings: TransformerXLSettings, out: Path) -> dict[tuple[str, float], Training]:
    """(label, factor of the preset's step sizes) -> its run, on a seed that no reported run has."""
    steps = min(settings.steps or SEARCH_STEPS, SEARCH_STEPS)
    own: dict[str, Any] = {"seed": settings.seed + MAX_SEEDS, "steps": steps}
    return {
        (label, factor): replace(
            _training(settings, label, out / "search" / label / f"x{factor:g}", factor=factor, **own),
            label=f"{label} x{factor:g}",
            may_fail=True,
        )
        for factor in FACTORS
        for label in labels(settings)
    }


def _training(settings: TransformerXLSettings, label: str, folder: Path, *, factor: float, **changes: Any) -> Training:
    """A training of a label under these settings, changed."""
    alone = {"out": folder, "seeds": 1, "search": False, "ingredients": False}
    own = {"model": (labels(settings)[label],), "step_size": settings.step_size * factor, **INGREDIENTS.get(label, {})}
    return Training(label=label, settings=replace(settings, **{**alone, **own, **changes}))


def search_results(trainings: Mapping[tuple[str, float], Training]) -> Searched:
    """The results of a search, from the folders of its runs."""
    found: dict[str, dict[float, float | None]] = {}
    for (label, factor), training in trainings.items():
        assert training.settings.out is not None
        found.setdefault(label, {})
        folder = RunFolder(training.settings.out)
        if (headline := finished_headline(folder)) is not None:
            value = headline.get("validation_perplexity")
            found[label][factor] = math.inf if value is None else value
        else:
            events = [record["name"] for record in folder.metrics() if record["kind"] == "event"]
            found[label][factor] = math.inf if events[-1:] == ["failed"] else None
    return found


def best_factors(searched: Searched) -> dict[str, float] | None:
    """The factor of the least validation perplexity for each label; None if a run of the search has not ended.

    Raises:
      CommandFailed: a label has learnt with none of the step sizes.
    """
    best: dict[str, float] = {}
    for label, found in searched.items():
        ended = {factor: value for factor, value in found.items() if value is not None}
        if len(ended) < len(found):
            return None
        best[label] = min(ended, key=ended.__getitem__)
        if math.isinf(ended[best[label]]):
            raise CommandFailed(f"{label}: every run of the search failed, with the step sizes x{list(found)}")
    return best
