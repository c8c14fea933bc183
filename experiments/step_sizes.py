"""Search for step sizes: each side of a comparison tries the same ones, on seeds that no reported training has."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dmoe_jax.runs.report import ReportTable, format_value
from experiments.bench import FACTORS, Run
from experiments.emulation.settings import FIRST_SEARCH_SEED
from experiments.emulation.trials import Trial, seeds_of, train_missing, trained

SEARCH_SEEDS = (FIRST_SEARCH_SEED, FIRST_SEARCH_SEED + 1)
"""Seeds of the search."""

Side = tuple[str, str]
"""Problem and label of a training whose step sizes are searched."""


def scaled(trial: Trial, factor: float) -> Trial:
    """The same training with so many times its step sizes, which its label says."""
    if factor == 1:
        return trial
    remedy = replace(trial.remedy, step_size=factor * trial.remedy.step_size)
    return replace(trial, remedy=remedy, label=scaled_label(trial.label, factor))


def scaled_label(label: str, factor: float) -> str:
    """Label of a training with so many times its step sizes, such as "dense, step sizes times 1/8"."""
    amount = f"{factor:g}" if factor >= 1 else f"1/{1 / factor:g}"
    return label if factor == 1 else f"{label}, step sizes times {amount}"


def search(run: Run[Any], sides: Sequence[Trial]) -> None:
    """Train what the search has no record of."""
    trials = [scaled(side, factor) for side in sides for factor in FACTORS]
    train_missing(run, seeds_of(trials, first=SEARCH_SEEDS[0], count=len(SEARCH_SEEDS)))


def searched(run: Run[Any], side: Trial, figure: str) -> dict[float, float]:
    """Factor -> mean figure at the end of a side's trainings in the search, of those that are done."""
    found, means = trained(run), dict[float, float]()
    for factor in FACTORS:
        seeds = found.get((side.problem, scaled_label(side.label, factor)), {})
        values = [seeds[seed]["points"][-1][figure] for seed in SEARCH_SEEDS if seed in seeds]
        if len(values) == len(SEARCH_SEEDS):
            means[factor] = sum(values) / len(values)
    return means


def best_factors(
    run: Run[Any], sides: Sequence[Trial], known: Mapping[Side, float], *, figure: str, least: bool
) -> dict[Side, float]:
    """The factor that was best for each side: in the run's search if that is done, else as it is known.

    Args:
      known: factors that an earlier search has found.
      figure: "loss" or "accuracy", at the end of a training.
      least: True if the least figure is the best.
    """
    best = dict(known)
    for side in sides:
        means = searched(run, side, figure)
        if len(means) == len(FACTORS):
            choose = min if least else max
            best[side.problem, side.label] = choose(means, key=means.__getitem__)
    return best


def search_table(run: Run[Any], sides: Sequence[Trial], figure: str) -> ReportTable | None:
    """All that was tried; None without a search."""
    rows: list[list[object]] = []
    for side in sides:
        if means := searched(run, side, figure):
            texts = [format_value(means.get(factor)) for factor in FACTORS]
            rows.append([side.label, *texts])
    head = ("", *(f"x{scaled_label('', factor).rpartition(' ')[2] or 1}" for factor in FACTORS))
    note = f"Mean {figure} at the end of {len(SEARCH_SEEDS)} trainings, of seeds that nothing else here has."
    return ReportTable(title="Search for step sizes", head=head, rows=rows, note=note) if rows else None
