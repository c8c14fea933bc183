"""Runs of one mixture with several routers and seeds, a folder each."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dmoe_jax.runs.figure import Metrics
from dmoe_jax.training.prepared_run import finished_headline
from experiments.transformer_xl.settings import TransformerXLSettings
from experiments.transformer_xl.side_by_side import run_folder
from experiments.transformer_xl.trainings import Training

Finished = dict[str, dict[int, Metrics]]
"""Router -> seed -> metrics of a run that was trained to its end."""


def router_runs(
    shared: Mapping[str, Any],
    routers: Mapping[str, str],
    out: Path,
    *,
    seeds: Sequence[int],
    factors: Mapping[str, float],
) -> list[Training]:
    """All runs: every router with one seed before the next seed, so that what was interrupted can be compared.

    Args:
      shared: settings of all runs.
      routers: name in figures, which names the folder too -> how the router is asked for.
      out: folder of the runs.
      factors: of the step sizes of routers that have others than the preset's.
    """
    runs = []
    for seed in seeds:
        for label, spec in routers.items():
            own = {"model": ("dmoe",), "seeds": 1, "router": spec, "seed": seed, "out": out / f"{label}-seed{seed}"}
            own["step_size"] = shared.get("step_size", 1.0) * factors.get(label, 1.0)
            settings = TransformerXLSettings(**{**shared, **own})
            runs.append(Training(label=label, settings=settings, may_fail=True, keeps_checkpoints=False))
    return runs


def finished(trainings: Sequence[Training]) -> Finished:
    """The runs that are finished; routers in the order of the trainings, whatever the seeds that are missing."""
    found: Finished = {training.label: {} for training in trainings}
    for training in trainings:
        if finished_headline(run_folder(training)) is not None:
            found[training.label][training.settings.seed] = run_folder(training).metrics()
    return {label: seeds for label, seeds in found.items() if seeds}
