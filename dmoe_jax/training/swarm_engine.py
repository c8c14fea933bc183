"""Trainers over a swarm, asynchronous or with one large batch, as an engine for the run loop."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from dmoe_jax.arrays import PyTree
from dmoe_jax.machine.disk import CheckpointError
from dmoe_jax.mixture.statistics import CallStatistics
from dmoe_jax.model import Evaluation
from dmoe_jax.runs.endings import one_line
from dmoe_jax.trainer import AnyTrainers, OnLost, OnStep, StepRecord
from dmoe_jax.training.engine import OnBatch, Totals

EvaluationBatches = Callable[[str, int | None], tuple[Iterable[Any], int | None]]
"""(split, tokens or samples wanted, None for all) -> (batches that stand for the whole, their number if it is known)"""


class SwarmEngine:
    """The trainers of this process, whose experts are elsewhere. An `Engine` that runs under trio.

    A checkpoint has the trunk, the optimiser and the places in the data. The experts live on their nodes, and stay as
    they are there; the trainers' own state, such as a memory of the text just read, begins anew.

    Args:
      statistics: totals of the trainers' expert calls.
      layers: layer -> uids of its experts.
      figures: further figures for the headline, such as those of averaging.
    """

    def __init__(
        self,
        trainers: AnyTrainers,
        statistics: CallStatistics,
        evaluation: EvaluationBatches,
        *,
        layers: Mapping[str, tuple[str, ...]],
        figures: Callable[[], Mapping[str, float | int | None]] = dict,
    ) -> None:
        self._trainers = trainers
        self._statistics = statistics
        self._evaluation = evaluation
        self.name, self.layers = trainers.model.name, layers
        self.state, self.snapshot = trainers.state, trainers.snapshot
        self._figures = figures
        self._counted: dict[str, Any] = {"items": 0, "staleness": 0, "steps_lost": 0}
        self.last_loss: float | None = None
        """Loss of the last step."""

    @property
    def step(self) -> int:
        return self._trainers.step

    async def advance(self, num_steps: int, on_step: OnStep, on_lost: OnLost) -> None:
        def count_step(record: StepRecord) -> None:
            self._counted["items"] += record.items
            self._counted["staleness"] += record.staleness
            self.last_loss = record.loss
            on_step(record)

        def count_lost(trainer: int, error: Exception) -> None:
            self._counted["steps_lost"] += 1
            on_lost(trainer, error)

        await self._trainers.run(num_steps, count_step, count_lost)

    async def evaluate(self, split: str, *, max_items: int | None, on_batch: OnBatch) -> Evaluation:
        batches, num_batches = self._evaluation(split, max_items)
        done = itertools.count(1)
        return await self._trainers.evaluate(batches, lambda: on_batch(next(done), num_batches))

    def facts(self) -> dict[str, Any]:
        return {
            "positions": [trainer.position for trainer in self._trainers.trainers],
            **self._counted,
            "statistics": saved_statistics(self._statistics),
            **self._trainers.facts(),
        }

    def load(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        self._trainers.restore(step, state, facts)
        trainers, positions = self._trainers.trainers, facts["positions"]
        # With another number of trainers the data is dealt out anew, and each starts at its own beginning.
        if len(positions) == len(trainers):
            for number, (trainer, position) in enumerate(zip(trainers, positions, strict=True)):
                try:
                    trainer.seek(position)
                except Exception as error:  # a state is taken by batches of the user's own
                    raise CheckpointError(f"the batches of trainer {number} cannot go on: {one_line(error)}") from error
        self._counted = {name: facts[name] for name in self._counted}
        load_statistics(self._statistics, facts["statistics"])

    def totals(self) -> Totals:
        return call_totals(self._statistics, Totals(**self._counted, figures=self._figures()))


def call_totals(statistics: CallStatistics, totals: Totals) -> Totals:
    """These totals with what is counted of the expert calls."""
    return replace(
        totals,
        calls_ok=statistics.ok,
        failures=dict(statistics.failures),
        load=dict(statistics.load),
        peers={uid: str(contact.address) for uid, contact in statistics.host.items()},
        figures={
            **totals.figures,
            "samples_without_experts": statistics.skipped_samples,
            "mean_expert_staleness": statistics.staleness_total / max(1, statistics.staleness_calls),
        },
    )


def saved_statistics(statistics: CallStatistics) -> dict[str, Any]:
    """The totals for a checkpoint; who serves an expert is not worth keeping."""
    return {name: value for name, value in asdict(statistics).items() if name != "host"}


def load_statistics(statistics: CallStatistics, saved: Mapping[str, Any]) -> None:
    """Go on counting from a checkpoint's totals."""
    if "samples" not in saved:  # an older version counted one of the two: begin anew with both
        saved = {name: value for name, value in saved.items() if name != "skipped_samples"}
    for name, value in saved.items():
        setattr(statistics, name, dict(value) if isinstance(value, Mapping) else value)
