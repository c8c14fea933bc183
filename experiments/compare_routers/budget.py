"""Seeds and updates that fit into a time: the cost of each router, measured, and the plan, a pure function."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dmoe_jax.data.corpora import Corpus
from dmoe_jax.runs.endings import UsageError
from dmoe_jax.training.run import train_without_waiting
from experiments.transformer_xl.training import make_engine, make_setup
from experiments.transformer_xl.trainings import Training

LEAST_SEEDS = 3
"""Fewer give no interval worth the name."""
MOST_SEEDS = 10
"""More than these are not planned: longer runs tell more."""
LEAST_STEPS = 20
"""Fewer updates are no training."""
_USED = 0.85
"""Share of the budget that is planned for: a timing is never quite repeated."""
_TIMED_STEPS = 10
"""Updates that are timed, behind the first two, which compile."""
_TIMED_WORDS = 2560
"""Words of its evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds that the runs of one router take."""

    start_s: float
    """Before training and evaluation are under way: to set up and to compile."""
    update_s: float
    """An update."""
    word_s: float
    """A word of an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPlan:
    """Seeds and updates that fit into the time."""

    seeds: tuple[int, ...]
    """Seeds of each router."""
    steps: int
    """Updates of each run."""
    expected_s: float
    """Seconds that all runs are expected to take."""

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "BudgetPlan":
        """The plan that the run folder keeps, see `record`."""
        return cls(seeds=tuple(record["seeds"]), steps=record["steps"], expected_s=record["expected_s"])

    def record(self) -> dict[str, Any]:
        """For the run folder."""
        return asdict(self)


def time_piece(training: Training, corpus: Corpus) -> Cost:
    """Time a short piece of a run: its beginning, some updates, an evaluation.

    Raises:
      ValueError: as of `make_setup`. And what the engine raises.
    """
    settings = training.settings
    began = time.monotonic()
    setup = make_setup(settings, corpus, model="dmoe", seed=settings.seed, router=settings.router, name=training.label)
    engine = make_engine(setup)

    def seconds_of(num_steps: int, num_words: int) -> tuple[float, float]:
        """Return the seconds of so many updates, and of a word of the evaluation."""
        at = time.monotonic()
        train_without_waiting(engine.advance(num_steps, lambda record: None, lambda trainer, error: None))
        between = time.monotonic()
        done = train_without_waiting(engine.evaluate("valid", max_items=num_words, on_batch=lambda number, total: None))
        return between - at, (time.monotonic() - between) / done.items

    seconds_of(2, 1)
    start_s = time.monotonic() - began
    updates_s, word_s = seconds_of(_TIMED_STEPS, _TIMED_WORDS)
    return Cost(start_s=start_s, update_s=updates_s / _TIMED_STEPS, word_s=word_s)


def plan_runs(
    costs: Sequence[Cost],
    *,
    budget_s: float,
    spent_s: float,
    num_words: int,
    num_jobs: int,
    most_steps: int,
    seeds: tuple[int, ...] = (),
    steps: int | None = None,
) -> BudgetPlan:
    """Choose seeds and updates: three seeds and as many updates as fit; of whole runs, as many seeds as fit.

    Args:
      costs: of each row of the comparison, with one seed.
      budget_s: for all. spent_s: of it, on the timing.
      num_words: that each run evaluates.
      num_jobs: runs at once.
      most_steps: of a whole run; more are not planned.
      seeds, steps: if they are given, the other is chosen.

    Raises:
      UsageError: not even the least fits; says what would.
    """

    def seconds(num_seeds: int, steps: int) -> float:
        one = sum(cost.start_s + num_words * cost.word_s + steps * cost.update_s for cost in costs)
        return num_seeds * one / num_jobs

    def steps_of(num_seeds: int) -> int:
        if steps is not None:
            return steps if seconds(num_seeds, steps) <= room_s else 0
        left_s = room_s - seconds(num_seeds, 0)
        fitting = int(left_s * num_jobs / num_seeds / sum(cost.update_s for cost in costs))
        return max(0, min(most_steps, fitting))

    room_s = _USED * budget_s - spent_s
    whole = most_steps if steps is None else steps
    counts = [len(seeds)] if seeds else range(LEAST_SEEDS, MOST_SEEDS + 1)
    chosen = max((count for count in counts if steps_of(count) >= whole), default=counts[0])
    planned = steps_of(chosen)
    if planned < min(LEAST_STEPS, whole):
        least = min(LEAST_STEPS, whole) if steps is None else steps
        needed_s = (seconds(counts[0], least) + spent_s) / _USED
        raise UsageError(
            f"--budget {budget_s / 60:.3g}m is too short for {len(costs)} rows: with {counts[0]} seeds and {least} "
            f"updates of each they need about {needed_s / 60:.3g}m; compare fewer --routers, or give more time"
        )
    return BudgetPlan(seeds=seeds or tuple(range(chosen)), steps=planned, expected_s=spent_s + seconds(chosen, planned))
