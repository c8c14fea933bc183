"""Progress of a run: live bars on a terminal, a line every few seconds anywhere else. Something always moves."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

_LINE_PERIOD_S = 10.0
"""Time between lines when the output is not a terminal: they do not flood a log."""


class TrainingProgress:
    """Shows the progress of a run of so many updates; `quiet` shows nothing. A context manager around all that may take
    its time."""

    def __init__(self, num_steps: int, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._num_steps = num_steps
        self.unit = "tokens"
        """Unit of throughput: tokens, samples."""
        self._smoothed_loss: float | None = None
        self._step, self._figures, self._note = 0, "", ""
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            _Count(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._training = self._bar.add_task("training", total=num_steps, figures="", visible=False)
        self._now = ""
        self._now_since = self._last_line_at = time.monotonic()
        self._ended = threading.Event()
        self._depth = 0

    def __enter__(self) -> "TrainingProgress":
        self._depth += 1
        if self._depth == 1:
            self._bar.start()
            if self._bar.disable:
                # A thread, for nothing else runs while XLA compiles.
                self._ended.clear()
                threading.Thread(target=self._say_now_and_then, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._ended.set()
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self._last_line_at = time.monotonic()
        self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def phase(self, text: str) -> Iterator[Callable[[str], None]]:
        """Show a spinner with this text while the block runs, which gets a function to change the text."""
        if self._bar.disable:
            self.say(text)
        with self._shown(text) as task:

            def change(text: str) -> None:
                self._line(text)
                self._bar.update(task, description=text)

            yield change

    @contextmanager
    def evaluation(self, text: str) -> Iterator[Callable[[int, int | None], None]]:
        """Show a bar for an evaluation; the block gets a function to tell the batches done and their number."""
        with self._shown(f"evaluating {text}") as task:

            def on_batch(done: int, total: int | None) -> None:
                self._line(f"evaluating {text}: {done}{f' of {total}' if total else ''} batches")
                self._bar.update(task, completed=done, total=total)

            yield on_batch

    @contextmanager
    def _shown(self, text: str) -> Iterator[TaskID]:
        task, before = self._bar.add_task(text, total=None, figures=""), self._now
        self._line(text)
        try:
            yield task
        finally:
            self._now = before
            self._bar.remove_task(task)

    def _line(self, text: str) -> None:
        self._now, self._now_since = text, time.monotonic()

    def start_at(self, step: int) -> None:
        """Show the training bar, from this step on."""
        self._bar.update(self._training, completed=step, visible=True)

    def update(self, step: int, loss: float, items_per_s: float, failures: Mapping[str, int]) -> None:
        """Show the figures of a step. The loss shown is an exponential mean over about 20 steps."""
        self._smoothed_loss = loss if self._smoothed_loss is None else 0.95 * self._smoothed_loss + 0.05 * loss
        figures = f"loss {self._smoothed_loss:.3f}  {items_per_s:.0f} {self.unit}/s"
        if failures:
            figures += f"  failed calls: {describe_failures(failures)}"
        self._step, self._figures = step, figures
        self._bar.update(self._training, completed=step, visible=True)
        self._show()

    def note(self, text: str) -> None:
        """Show a text behind the figures of the last step, until it is replaced: the state of the whole swarm."""
        self._note = text
        self._show()

    def _show(self) -> None:
        shown = "  ".join(part for part in (self._figures, self._note) if part)
        self._bar.update(self._training, figures=shown)
        now = f"step {self._step}/{self._num_steps}  {shown}"
        if now != self._now:
            self._line(now)

    def _say_now_and_then(self) -> None:
        while not self._ended.wait(0.5):
            self._say_if_quiet()

    def _say_if_quiet(self) -> None:
        """Print a line if the last one is a while ago, with the seconds for which it has been the same."""
        now = time.monotonic()
        if self._now and now - self._last_line_at >= _LINE_PERIOD_S:
            waited = now - self._now_since
            self.say(self._now if waited < _LINE_PERIOD_S else f"{self._now} ({waited:.0f} s)")


def describe_failures(failures: Mapping[str, int]) -> str:
    """Failed calls by reason, the most frequent first: "12 timeout, 4 late"."""
    ordered = sorted(failures.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {reason}" for reason, count in ordered if count) or "none"


class _Count(ProgressColumn):
    """Steps done of all; nothing where their number is not known."""

    _counted = MofNCompleteColumn()

    def render(self, task: Task) -> Text:
        return Text("") if task.total is None else self._counted.render(task)
