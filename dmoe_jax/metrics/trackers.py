"""Experiment trackers, which get a run's records beside metrics.jsonl: Weights & Biases, Trackio and TensorBoard.

A tracker is somebody else's code, which talks to a server or a disk. So it has a thread of its own, and training hands
records over and never waits: at most `MAX_WAITING` wait, further ones are dropped. Errors of the tracker are counted,
and the first is shown; training goes on. Numbers and texts are sent under the record's kind, as `train/loss`; lists,
and the load of every expert, are left out.
"""

import importlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from dmoe_jax.runs.run_folder import Sink, plain

_log = logging.getLogger(__name__)

TrackerName = Literal["wandb", "trackio", "tensorboard"]

MAX_WAITING = 10_000
"""Records that may wait for a tracker: an hour of training at three a second."""
CLOSE_S = 10.0
"""Seconds that the end of a run waits for a tracker to take what is left."""

_PACKAGES = {"wandb": "wandb", "trackio": "trackio", "tensorboard": "tensorboardX"}
_LEFT_OUT = frozenset({"experts"})
_PLACES = ("step", "time_s")
"""Fields that say where on its axes a record belongs; they are not the kind's own."""


class _TensorBoard:
    """A tracker's run that is open: event files in the run folder; see `tensorboardX.SummaryWriter`."""

    def __init__(self, module: Any, folder: Path, settings: Mapping[str, Any], project: str) -> None:
        del project
        self._writer = module.SummaryWriter(logdir=str(folder / "tensorboard"))
        shown = "\n".join(f"    {name}: {value}" for name, value in settings.items())  # indented: as it is, in Markdown
        self._writer.add_text("settings", shown, 0)

    def log(self, numbers: Mapping[str, int | float], texts: Mapping[str, str], step: int | None) -> None:
        for name, number in numbers.items():
            if name not in _PLACES:
                self._writer.add_scalar(name, number, step)
        for name, text in texts.items():
            self._writer.add_text(name, text, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of wandb, or of trackio, which has the same functions."""

    def __init__(self, module: Any, folder: Path, settings: Mapping[str, Any], project: str) -> None:
        self._module = module
        own = {"dir": str(folder)} if module.__name__ == "wandb" else {}
        module.init(project=project, name=folder.name, config=dict(settings), **own)
        if hasattr(module, "define_metric"):
            # Not as the log's own step, which may never go back: an evaluation beside the training ends after later
            # steps than its own.
            module.define_metric("*", step_metric="step")

    def log(self, numbers: Mapping[str, int | float], texts: Mapping[str, str], step: int | None) -> None:
        del step
        self._module.log({**numbers, **texts})

    def close(self) -> None:
        self._module.finish()


class Tracker:
    """A tracker with its thread, in which `open_run` opens its run. Made by `tracking`."""

    def __init__(self, name: str, open_run: Callable[[], _TensorBoard | _Wandb]) -> None:
        self._name = name
        self._open_run = open_run
        self._waiting: queue.Queue[tuple[str, Mapping[str, Any]] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self.failed = 0
        """Records that the tracker did not take, because it raised."""
        self.dropped = 0
        """Records that found too many waiting."""
        self._thread.start()

    def log(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Hand a record over; never waits, never raises."""
        if kind in _LEFT_OUT:
            return
        try:
            self._waiting.put_nowait((kind, plain(fields)))
        except queue.Full:
            self.dropped += 1

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Have the tracker take what waits and end its run; after `timeout_s` seconds it is left to itself."""
        try:
            self._waiting.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
        except queue.Full:
            pass
        if self._thread.is_alive():
            _log.warning("tracker %s did not end within %g s; what it had not taken is lost", self._name, timeout_s)
        if self.failed or self.dropped:
            _log.warning("tracker %s failed %d times, and dropped %d records", self._name, self.failed, self.dropped)

    def _run(self) -> None:
        backend: _TensorBoard | _Wandb | None = None
        with self._counting():
            backend = self._open_run()
        while (record := self._waiting.get()) is not None:
            if backend is None:
                self.failed += 1
                continue
            with self._counting():
                kind, fields = record
                step = fields.get("step")
                backend.log(*_numbers_and_texts(kind, fields), step if isinstance(step, int) else None)
        if backend is not None:
            with self._counting():
                backend.close()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count what the tracker raises in the block, and show the first error."""
        try:
            yield
        except Exception as error:
            self.failed += 1
            if self.failed == 1:
                _log.warning("tracker %s failed, training goes on: %s: %s", self._name, type(error).__name__, error)


@contextmanager
def tracking(
    name: TrackerName | None, *, project: str, settings: Mapping[str, Any]
) -> Iterator[Callable[[Path], Sink] | None]:
    """Yields what opens a tracker's run for a run folder, and closes it at the end; None without a tracker.

    Raises:
      ValueError: its package is not installed; the message says how to install it.
    """
    if name is None:
        yield None
        return
    package = _PACKAGES[name]
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f"tracker {name} needs the package {package} ({error}): pip install {package}") from error
    opened: list[Tracker] = []
    backend = _TensorBoard if name == "tensorboard" else _Wandb

    def open_sink(folder: Path) -> Sink:
        opened.append(Tracker(name, lambda: backend(module, folder, plain(settings), project)))
        return opened[-1].log

    try:
        yield open_sink
    finally:
        for tracker in opened:
            tracker.close()


def _numbers_and_texts(kind: str, fields: Mapping[str, Any]) -> tuple[dict[str, int | float], dict[str, str]]:
    """A record's numbers and texts by the names that trackers show; a number of a map as `calls/failures/timeout`."""
    numbers: dict[str, int | float] = {}
    texts: dict[str, str] = {}

    def gather(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for name, item in value.items():
                gather(f"{prefix}/{name}", item)
        elif isinstance(value, str):
            texts[prefix] = value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[prefix] = value

    for name, value in fields.items():
        gather(name if name in _PLACES else f"{kind}/{name}", value)
    return numbers, texts
