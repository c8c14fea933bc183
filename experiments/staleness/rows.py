"""The rows of the table, as trials."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from experiments.emulation.trials import Trial
from experiments.staleness.settings import StalenessSettings

ONE, ONE_DEFAULT, TRUNK, PLAIN, DEFAULT = (
    "one trainer",
    "one trainer, default",
    "stale trunk",
    "stale trunk and experts",
    "default: scaled by (1 + s)^-1/2, stale gradients without first moment",
)
FAILING, FAILING_DEFAULT = "10 % failures", "10 % failures, default"
MANY_ONE = "one trainer, as many updates"
SWARM_PLAIN, SWARM_DEFAULT = "simulated swarm", "simulated swarm, default"

_NOTHING: dict[str, float] = {"trunk_power": 0.0, "expert_power": 0.0, "yields": False}
_SCALED: dict[str, float] = {"yields": False}
_REMEDIES: dict[str, dict[str, float]] = {
    "trunk scaled by (1 + s)^-1/2": {**_SCALED, "expert_power": 0.0},
    "experts scaled by (1 + s)^-1/2": {**_SCALED, "trunk_power": 0.0},
    "both scaled by (1 + s)^-1/2": _SCALED,
    "both scaled by (1 + s)^-1": {**_SCALED, "trunk_power": 1.0, "expert_power": 1.0},
    "no first moment at all": {**_NOTHING, "momentum": 0.0},
    "both scaled by (1 + s)^-1/2, no first moment at all": {**_SCALED, "momentum": 0.0},
    "step sizes divided by 2": {**_NOTHING, "step_size": 0.5},
    "step sizes divided by 4": {**_NOTHING, "step_size": 0.25},
    "step sizes divided by 4, no first moment at all": {**_NOTHING, "step_size": 0.25, "momentum": 0.0},
    "both scaled by (1 + s)^-1/2, trunk compensated (DC-ASGD)": {**_SCALED, "compensation": 1.0},
}
_BEST_REMEDIES = (
    "both scaled by (1 + s)^-1/2",
    "both scaled by (1 + s)^-1/2, no first moment at all",
    "step sizes divided by 4",
    "step sizes divided by 4, no first moment at all",
)
"""Tried for Transformer-XL, too: the three that lose less than half on MNIST, and smaller steps by themselves."""
_LARGER_STEPS: dict[str, dict[str, float]] = {
    "step sizes times 4": {**_NOTHING, "step_size": 4.0},
    "default, step sizes times 4": {"step_size": 4.0},
}
"""For Transformer-XL: what the preset of asynchronous trainers has, since the default divides every stale update."""


def many_plain(settings: StalenessSettings) -> str:
    """The row of many trainers without a remedy."""
    return f"{settings.many_trainers} trainers"


def many_default(settings: StalenessSettings) -> str:
    """The row of many trainers with the default."""
    return f"{many_plain(settings)}, default"


def all_trials(settings: StalenessSettings) -> list[Trial]:
    """Return the trials that the settings ask for; the seeds of a row stand together.

    Raises:
      ValueError: no row has a text in its name that the settings ask for.
    """
    problems = ("mnist", "transformer-xl") if settings.problem == "both" else (settings.problem,)
    if settings.quick and settings.problem == "both":
        problems = ("mnist",)
    count = min(settings.seeds, 2) if settings.quick else settings.seeds
    seeds = range(settings.seed, settings.seed + count)
    rows = [row for problem in problems for row in _rows(problem, settings)]
    if settings.only:
        labels = list(dict.fromkeys(row.label for row in rows))
        chosen = {label for text in settings.only for label in _named(text, labels)}
        rows = [row for row in rows if row.label in chosen]
    return [dataclasses.replace(row, seed=seed) for row in rows for seed in seeds]


def _named(text: str, labels: Sequence[str]) -> Sequence[str]:
    """The row of this name, or those that have the text in theirs.

    Raises:
      ValueError: there are none.
    """
    found = [label for label in labels if label == text] or [label for label in labels if text in label]
    if not found:
        raise ValueError(f"--only: no row has {text!r} in its name; there are {'; '.join(labels)}")
    return found


def _rows(problem: str, settings: StalenessSettings) -> list[Trial]:
    is_mnist = problem == "mnist"
    updates = settings.updates if is_mnist else 2 * settings.updates
    # Half as many words a step as in figure 6: most of a step is the optimiser's, and the rows are many.
    sizes: dict[str, Any] = {"grid_size": (2, 4), "seq_len": 64, "num_evaluated": 8192}
    if is_mnist:
        sizes = {"d_model": 32, "grid_size": (8, 8), "num_evaluated": 2000}
    elif settings.quick:
        updates = min(updates, 256)
    plain = Trial(
        label=PLAIN,
        seed=0,
        problem=problem,
        sizes=sizes,
        num_trainers=settings.trainers,
        num_updates=updates,
        num_points=8,
        remedy=_NOTHING,
    )

    def row(label: str, **changes: Any) -> Trial:
        return dataclasses.replace(plain, label=label, **changes)

    ones = [row(ONE, num_trainers=1), row(ONE_DEFAULT, num_trainers=1, remedy={})]
    default = row(DEFAULT, remedy={})
    if settings.quick:
        return [*ones, plain, default]
    rows = [*ones, row(TRUNK, fresh_experts=True), plain, default]
    rows += [row(FAILING, failure_rate=0.1), row(FAILING_DEFAULT, failure_rate=0.1, remedy={})]
    tried = _REMEDIES if is_mnist else _BEST_REMEDIES
    rows += [row(label, remedy=_REMEDIES[label]) for label in tried]
    if not is_mnist:
        rows += [row(f"{ONE}, step sizes times 4", num_trainers=1, remedy=_LARGER_STEPS["step sizes times 4"])]
        rows += [row(label, remedy=remedy) for label, remedy in _LARGER_STEPS.items()]
    if settings.many_trainers:
        many = {"num_trainers": settings.many_trainers, "num_updates": 2 * updates}
        rows += [
            row(many_plain(settings), **many),
            row(many_default(settings), **many, remedy={}),
            row(MANY_ONE, num_trainers=1, num_updates=2 * updates),
        ]
        if not is_mnist:
            rows += [row(f"{many_plain(settings)}, {name}", **many, remedy=how) for name, how in _LARGER_STEPS.items()]
    if settings.swarm and is_mnist:
        rows += [row(SWARM_PLAIN, in_swarm=True), row(SWARM_DEFAULT, in_swarm=True, remedy={})]
    return rows
