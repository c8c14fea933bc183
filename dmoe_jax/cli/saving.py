"""What a training run keeps on disk to go on later: trunk, optimiser, places in the text, totals.

Experts are not in it: they live on the nodes. Neither is the trainers' memory of the text just read; a resumed trainer
starts the next segment with an empty one, as at the beginning of a text.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import trio

from dmoe_jax.checkpoints import Checkpoints, host_copy
from dmoe_jax.mixture.fan_out import CallStatistics
from dmoe_jax.trainer import Trainer
from dmoe_jax.trunk import SharedTrunk

CHECKPOINT_FOLDER = "checkpoints"


@dataclass(slots=True)
class RunTotals:
    """Running totals of a run, over all its parts if it was resumed."""

    time_s: float = 0.0
    """Seconds of training."""
    tokens: int = 0
    """Target tokens trained on."""
    steps_lost: int = 0
    """Steps given up."""
    staleness: int = 0
    """Sum over steps of the trunk updates that others made meanwhile."""


class RunSaver:
    """Saves and restores one run.

    Args:
      folder: the run folder.
      trunk, trainers, statistics, totals: what is saved; restored in place.
    """

    def __init__(
        self,
        folder: Path,
        trunk: SharedTrunk,
        trainers: Sequence[Trainer],
        statistics: CallStatistics,
        totals: RunTotals,
    ) -> None:
        self._checkpoints = Checkpoints(folder / CHECKPOINT_FOLDER)
        self._trunk = trunk
        self._trainers = tuple(trainers)
        self._statistics = statistics
        self._totals = totals
        self._turn = trio.Lock()

    async def save(self) -> None:
        """Write a checkpoint beside the training. If cancelled, it is written or absent, never half."""
        async with self._turn:
            step, state = await self._trunk.snapshot()
            await trio.to_thread.run_sync(self._checkpoints.save, step, state, self._facts())

    def save_now(self) -> None:
        """Write a checkpoint, blocking; for the end of a run, when no trainer runs any more."""
        self._checkpoints.save(self._trunk.step, host_copy(self._trunk.state), self._facts())
        self._checkpoints.close()

    def restore(self) -> None:
        """Continue from the latest checkpoint.

        Raises:
          CheckpointError: there is none, or it is of another model.
        """
        step, state, facts = self._checkpoints.restore_latest(self._trunk.state)
        self._trunk.restore(step, state)
        # With another number of trainers the text is dealt out anew, and each starts at its own beginning.
        if len(facts["positions"]) == len(self._trainers):
            for trainer, position in zip(self._trainers, facts["positions"], strict=True):
                trainer.seek(position)
        for name, value in facts["totals"].items():
            setattr(self._totals, name, value)
        for name, value in facts["statistics"].items():
            setattr(self._statistics, name, value)

    def _facts(self) -> dict[str, Any]:
        statistics = {name: value for name, value in asdict(self._statistics).items() if name != "host"}
        return {
            "positions": [trainer.position for trainer in self._trainers],
            "totals": asdict(self._totals),
            "statistics": statistics,
        }
