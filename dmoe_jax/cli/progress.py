"""Progress of a training run: a live bar on a terminal, a line every few seconds anywhere else."""

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_LINE_PERIOD_S = 10.0
"""Between lines when the output is not a terminal: enough to see that it moves, few enough for a log."""


class TrainingProgress:
    """Shows where a run is. Use as a context manager around the training.

    Args:
      num_steps: trunk updates of the whole run.
    """

    def __init__(self, num_steps: int) -> None:
        self._console = Console(stderr=True)
        self._num_steps = num_steps
        self._last_line_at = time.monotonic()
        self._smoothed_loss: float | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=num_steps, figures="")

    def __enter__(self) -> "TrainingProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(text, highlight=False)

    def start_evaluation(self, num_batches: int, *, text: str = "validation text") -> Callable[[], None]:
        """Show a bar for an evaluation of this text; call the result after each batch."""
        task = self._bar.add_task("evaluating", total=num_batches, figures=text)
        if self._bar.disable:
            self.say(f"evaluating {num_batches} batches of {text}")
        return lambda: self._bar.advance(task)

    def update(self, step: int, loss: float, tokens_per_s: float, failed_calls: int) -> None:
        """Show the figures of a step. The loss shown is an exponential mean over about 20 steps."""
        self._smoothed_loss = loss if self._smoothed_loss is None else 0.95 * self._smoothed_loss + 0.05 * loss
        figures = f"loss {self._smoothed_loss:.3f}  {tokens_per_s:.0f} tokens/s  {failed_calls} failed calls"
        self._bar.update(self._task, completed=step, figures=figures)
        now = time.monotonic()
        if self._bar.disable and now - self._last_line_at >= _LINE_PERIOD_S:
            self._last_line_at = now
            self.say(f"step {step}/{self._num_steps}  {figures}")
