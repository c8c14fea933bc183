"""A run's folder as it is taken up again: under the same settings, from its last checkpoint, nothing written twice.

`prepare_run` looks and refuses, `PreparedRun.begin` writes: a run that cannot be resumed stays as it was.
"""

import json
import math
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dmoe_jax.machine.disk import CheckpointError, check_not_held, hold_folder, is_empty
from dmoe_jax.runs.run_folder import METRICS, RunFolder, Sink, changed_settings, check_new, new_folder
from dmoe_net.meaning import contradiction

CHECKPOINT_FOLDER = "checkpoints"

_TRUST = ", or give --trust-run for all that the run names"

_KEPT_EVENTS = ("interrupted", "failed", "resumed", "time_limit")
"""Events that happened once; others are told anew by the part of a run that is trained again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run that may begin, or go on, in its folder. Made by `prepare_run`."""

    path: Path | None
    """The folder; None for a new one under runs/, with this name."""
    settings: Mapping[str, object]
    """All that decides what the run computes."""
    name: str = "run"
    goes_on: bool = False
    """True if there is a run in the folder to go on with."""
    changes: tuple[str, ...] = ()
    """Settings that differ from before: "steps: 200 -> 600"."""
    open_sink: Callable[[Path], Sink] | None = None
    """See `RunFolder.create`."""

    @property
    def has_checkpoint(self) -> bool:
        """True if there may be a checkpoint to go on from: its folder has the number of a step for a name."""
        return self.path is not None and any(each.name.isdigit() for each in (self.path / CHECKPOINT_FOLDER).glob("*"))

    @property
    def headline(self) -> dict[str, Any] | None:
        """The headline of a run that was completed; None for one that is to be trained or resumed."""
        return finished_headline(RunFolder(self.path)) if self.path is not None and self.goes_on else None

    def check_meaning(self, meaning: str) -> None:
        """Raise CheckpointError if there is a run to go on with whose numbers mean something else."""
        if self.path is not None and self.goes_on:
            check_meaning_of_run(self.path, meaning)

    @contextmanager
    def held(self) -> Iterator["PreparedRun"]:
        """The run with its folder, which no other process takes up while the block lasts.

        Raises:
          FolderInUse: another process trains in it. OSError: the folder cannot be written.
        """
        path = new_folder(Path("runs"), self.name) if self.path is None else self.path
        with hold_folder(path, "run"):
            yield replace(self, path=path)

    def begin(self) -> RunFolder:
        """Make the folder, or take it up: see `RunFolder.create`."""
        return RunFolder.create(self.path, self.settings, name=self.name, resume=self.goes_on, open_sink=self.open_sink)


def prepare_run(
    path: Path | None,
    settings: Mapping[str, object],
    *,
    name: str = "run",
    resume: bool = False,
    may_differ: Collection[str] = (),
) -> PreparedRun:
    """Look whether a run may begin in a folder, or go on there with `resume`. Writes nothing.

    Args:
      path, settings, name: as of `PreparedRun`.
      may_differ: settings that may differ from before; nested ones as "expert.d_model".

    Raises:
      ValueError: a setting differs; or the folder is not empty although `resume` is false, or is not a run folder.
      FolderInUse: another process trains in it.
    """
    if path is not None:
        check_not_held(path, "run")
    if path is not None and not resume:
        check_new(path, hint=", or --resume")
    if path is None or not path.exists() or (path.is_dir() and is_empty(path)):
        return PreparedRun(path=path, settings=settings, name=name)
    changes = changed_settings(saved_settings(path), settings)
    for setting, (then, now) in changes.items():
        if setting not in may_differ:
            raise ValueError(f"the run in {path} was begun with {setting} {then!r} and cannot be resumed with {now!r}")
    told = tuple(f"{setting}: {then!r} -> {now!r}" for setting, (then, now) in changes.items() if setting != "join")
    return PreparedRun(path=path, settings=settings, name=name, goes_on=True, changes=told)


def saved_settings(path: Path) -> dict[str, Any]:
    """The settings of the run in a folder. Raises ValueError if there is none."""
    try:
        settings: dict[str, Any] = RunFolder(path).config()["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a run that could be resumed: it has no readable config.json") from error
    return settings


def check_meaning_of_run(path: Path, meaning: str) -> None:
    """Raise CheckpointError if the numbers of a run stand for something else than now: see `Task.meaning`.

    An empty meaning fits all runs, and all fit a run with an empty one.
    """
    told = [record for record in RunFolder(path).metrics() if record["kind"] == "task"]
    then = str(told[0].get("meaning") or "") if told else ""
    if facts := contradiction(then, meaning):
        raise CheckpointError(
            f"the numbers that the run in {path} has learnt stand for something else than now: it was begun with "
            f"{facts[0]}; the data or the model now has {facts[1]}"
        )


def is_code(value: object) -> bool:
    """True for what names an object in a Python file, which is run to get it: "path/to/file.py:attribute"."""
    return isinstance(value, str) and value.rpartition(":")[0].endswith(".py")


def check_code(path: Path, words: Iterable[str], *, named: Iterable[str], otherwise: str = _TRUST) -> None:
    """Raise ValueError if a file is to be run only because the folder of a run names it: it may be a stranger's.

    Args:
      words: flags and their values that are to be used, some of which are `named` on the command line.
      otherwise: ends the message: an alternative to naming the file.
    """
    trusted = {part for word in named for part in (word, word.partition("=")[2])}
    for word in words:
        file = next((part for part in _parts(word) if is_code(part)), None)
        if file is not None and word not in trusted:
            path_of_file = Path(file.rpartition(":")[0]).expanduser().absolute()
            raise ValueError(
                f"the run in {path} would run code out of {path_of_file}, which nothing else names; if that file is "
                f"yours, name {word} again{otherwise}"
            )


def _parts(word: str) -> Iterator[str]:
    """The word, and its parts to a shell: a flag's value may be flags for another process, in quotes or not."""
    try:
        parts = shlex.split(word)
    except ValueError:  # a quote without its end
        parts = []
    for part in (*parts, word) if word.startswith("-") else (word, *parts):  # the first is shown
        yield from (part.partition("=")[2], part)


def finished_headline(folder: RunFolder) -> dict[str, Any] | None:
    """The headline of a run that has been completed; None for one that is still to be trained or resumed."""
    headlines = [record for record in folder.metrics() if record["kind"] == "headline"]
    if not headlines or not headlines[-1].get("complete"):
        return None
    return {name: value for name, value in headlines[-1].items() if name != "kind"}


def best_step(records: Iterable[Mapping[str, Any]], steps: Collection[int]) -> int | None:
    """The one of these steps whose evaluation on the way had the least loss; None if none of them was evaluated.

    Only evaluations over as many words or samples as the last one count: others had other words before them.
    """
    points = [record for record in records if record.get("kind") == "eval" and _is_loss(record.get("loss"))]
    if not points:
        return None
    alike = [point for point in points if all(point.get(key) == points[-1].get(key) for key in ("split", "items"))]
    losses = {step: point["loss"] for point in alike for step in steps if step == point.get("step")}
    return min(losses, key=losses.__getitem__, default=None)


def _is_loss(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def cut_metrics(folder: RunFolder, *, step: int, size: int | None) -> None:
    """Take the records after the checkpoint of a step out of the metrics, but for the run's ends and beginnings.

    Args:
      size: bytes of metrics.jsonl at the checkpoint; None if records of later steps may stand before it.
    """
    if not folder.metrics_path.exists():
        return
    data = folder.metrics_path.read_bytes()
    kept, place = [], 0
    for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
        place += len(line)
        record = json.loads(line)
        is_kept_event = record["kind"] == "event" and record.get("name") in _KEPT_EVENTS
        is_before = (record.get("step") or 0) <= step and (size is None or place <= size)
        if is_kept_event or (is_before and record["kind"] != "headline"):
            kept.append(line)
    if sum(map(len, kept)) != len(data):
        folder.write_text(METRICS, b"".join(kept).decode())
