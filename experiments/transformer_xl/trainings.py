"""Runs of the experiment: the compared models with each seed, and the runs of the search. Imports no JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.transformer_xl.settings import MAX_SEEDS, Model, TransformerXLSettings

INGREDIENTS: Mapping[str, dict[str, Any]] = {
    "dmoe-synchronous": {"concurrency": 1, "delay_s": 0.0, "failure_rate": 0.0},
    "dmoe-stale": {"failure_rate": 0.0},
    "dmoe-failing": {"concurrency": 1, "delay_s": 0.0},
}
"""Label -> settings that differ from those of `dmoe`, which has both. Where one trainer is at work at once nothing is
stale, and a delay would only be waited for."""

SEARCHED = (0.5, 1.0, 2.0)
"""Factors of the preset's step sizes that the search tries at first: as many values for every label."""


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


def folder_of(out: Path, label: str, seed: int) -> Path:
    """Run folder of a label and seed."""
    return out / label / f"seed{seed}"


def compared_trainings(
    settings: TransformerXLSettings, out: Path, factors: Mapping[str, float] | None = None
) -> list[Training]:
    """The runs that are reported: all labels with the first seed come before the second seed.

    Args:
      out: folder of the experiment.
      factors: of the labels whose step sizes were searched, the best.
    """
    seeds = range(settings.seed, settings.seed + settings.num_seeds)
    return [
        _training(
            settings,
            folder_of(out, label, seed),
            label,
            model=(model,),
            seed=seed,
            step_size=settings.step_size * (factors or {}).get(label, 1.0),
            **INGREDIENTS.get(label, {}),
        )
        for seed in seeds
        for label, model in labels(settings).items()
    ]


def search_trainings(
    settings: TransformerXLSettings, out: Path, factors: Sequence[float] = SEARCHED
) -> dict[tuple[str, float], Training]:
    """(label, factor of the preset's step sizes) -> its run, on a seed that no reported run has."""
    return {
        (label, factor): _training(
            settings,
            out / "search" / label / f"x{factor:g}",
            f"{label} x{factor:g}",
            model=(model,),
            seed=settings.seed + MAX_SEEDS,
            steps=settings.search_steps or settings.steps,
            step_size=settings.step_size * factor,
            may_fail=True,
            **INGREDIENTS.get(label, {}),
        )
        for factor in factors
        for label, model in labels(settings).items()
    }


def _training(
    settings: TransformerXLSettings, folder: Path, label: str, *, may_fail: bool = False, **changes: Any
) -> Training:
    """A training under these settings, changed."""
    alone = {"out": folder, "seeds": 1, "search": False, "search_steps": None, "ingredients": False}
    return Training(label=label, settings=replace(settings, **{**alone, **changes}), may_fail=may_fail)
