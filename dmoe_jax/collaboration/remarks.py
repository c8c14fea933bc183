"""Warnings, each once in the log, of a collaboration that loses work or has batches far above its target."""

import logging

from dmoe_jax.collaboration.settings import CollaborationTotals, GlobalStep

_log = logging.getLogger(__name__)

_STEPS = 3
"""Number of steps in a row without the others that is no accident."""


class Remarks:
    """Warns, of each kind once.

    Args:
      target: samples of a whole batch. totals: of this peer.
    """

    def __init__(self, target: int, totals: CollaborationTotals) -> None:
        self._target = target
        self._totals = totals
        self._alone = self._missed = 0
        self._lost = 0.0
        self._said: set[str] = set()

    def stepped(self, done: GlobalStep, *, num_behind: int) -> None:
        """This peer has made a step; so many with gradients report from earlier ones."""
        self._missed = 0
        self._alone = self._alone + 1 if done.peers == 1 and num_behind else 0
        if self._alone == _STEPS:
            self._say(
                "alone",
                f"the last {_STEPS} steps, up to {done.number}, were made by this peer alone while {num_behind} others "
                f"report from earlier steps and do not get in step: their samples are lost. A step took "
                f"{done.gathered_s:.2g} s; a larger target_batch_size than {self._target} gives them time",
            )
        if done.samples > 2 * self._target:
            self._say(
                "large",
                f"step {done.number} has {done.samples:.0f} samples of {done.peers} peers, more than twice the target "
                f"of {self._target}: are micro-batches too large? {done.own_samples:.0f} samples are this peer's",
            )

    def gathered(self) -> None:
        """A micro-batch was taken in, and whatever followed from it was done."""
        lost, self._lost = self._totals.samples_lost - self._lost, self._totals.samples_lost
        self._missed += lost > 0
        if self._missed == _STEPS:
            reasons = ", ".join(f"{count} times {reason}" for reason, count in self._totals.reasons.items())
            self._say(
                "missed",
                f"others made steps without this peer {_STEPS} times in a row: {self._lost:.0f} of its samples are in "
                f"no step, {self._totals.samples:.0f} are ({reasons or 'they were faster'})",
            )

    def _say(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            _log.warning(text)
