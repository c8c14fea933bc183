"""Runs of the comparison: every router under every condition with every seed."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from experiments.compare_routers.settings import CompareRoutersSettings, Condition
from experiments.transformer_xl.settings import TrainingSettings, TransformerXLSettings
from experiments.transformer_xl.trainings import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRun:
    """One run of one router."""

    router: str
    """Name of the router in figures."""
    condition: Condition
    """Under which it is trained."""
    training: Training
    """The run itself."""


def run_name(label: str, seed: int) -> str:
    """Folder of a run; what may not stand in a path is replaced, a router's name being anybody's choice."""
    return f"{re.sub(r'[^A-Za-z0-9_.+-]', '_', label)}-seed{seed}"


def router_runs(
    settings: CompareRoutersSettings,
    routers: Mapping[str, str],
    out: Path,
    *,
    seeds: Sequence[int],
    steps: int | None = None,
) -> list[RouterRun]:
    """All runs: every router under every condition before the next seed, so that what was interrupted can be compared.

    Args:
      routers: label -> how the router is asked for.
      out: folder of the comparison.
      steps: updates of each run; None: those of the settings.
    """
    shared = {field.name: getattr(settings, field.name) for field in fields(TrainingSettings)}
    wanted = steps or settings.steps
    if settings.quick:
        most = settings.quick_steps[settings.place]
        wanted = min(wanted or most, most)
        words = settings.quick_eval_tokens
        shared["eval_tokens"] = min(settings.eval_tokens or words, words)
    shared |= {"where": settings.place, "steps": wanted, "model": ("dmoe",), "seeds": 1}
    runs = []
    for seed in seeds:
        for condition in settings.conditions:
            for router, spec in routers.items():
                label = condition.label(router)
                own = {"seed": seed, "router": spec, "out": out / run_name(label, seed), **condition.changes}
                training = Training(
                    label=label,
                    settings=TransformerXLSettings(**{**shared, **own}),
                    may_fail=True,
                    keeps_checkpoints=settings.keep_checkpoints,
                )
                runs.append(RouterRun(router=router, condition=condition, training=training))
    return runs
