"""The timeline of a folder: a recording, or a run, which may still be running."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import trio

from dmoe_jax.directory.members import MAX_TEXT
from dmoe_jax.live.events import State, about, step_of
from dmoe_jax.live.feeds import Timeline
from dmoe_jax.live.recording import RECORDING
from dmoe_jax.live.run_states import RunStates
from dmoe_jax.live.snapshot import number_untrusted
from dmoe_jax.runs.run_folder import METRICS
from dmoe_jax.trained.saved_run import trainer_folders

MAX_FILE_BYTES = 256 * 2**20
"""Largest file that is shown."""
MAX_STATES = 1_000
"""Most states of a run's records so far."""
_BETWEEN_S = 0.1
"""Seconds of the run between two states, at least: records of one moment make one state."""
_LOOK_S = 2.0
"""Seconds between two looks at a file that may grow."""


class GrowingFile:
    """Lines of a file that others append to, or replace by another one, as long as it has at most so many bytes."""

    def __init__(self, path: Path, *, most_bytes: float = MAX_FILE_BYTES) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._inode = self._offset = 0

    def lines(self) -> tuple[list[bytes], bool]:
        """Return the whole lines since the last call, and True if they are the first of another file.

        Raises:
          ValueError: the file is too large. OSError: it cannot be read.
        """
        with self.path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_size > self._most_bytes:
                most = f"at most {self._most_bytes / 2**20:.0f} MiB are shown"
                raise ValueError(f"{self.path} has {stat.st_size / 2**20:.0f} MiB; {most}")
            is_another = self._inode not in (0, stat.st_ino) or stat.st_size < self._offset
            if is_another:
                self._offset = 0
            self._inode = stat.st_ino
            file.seek(self._offset)
            whole, end, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(end)
        return whole.splitlines(), is_another


class RunFeed:
    """Fills a timeline from a folder. Made by `open_folder`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[int, GrowingFile] = {}  # by the number of the trainer process
        self._is_recording = path.name == RECORDING
        self._states = RunStates()
        self._before: State = {}
        self.timeline = Timeline(self._head())
        lines, _ = self._look()
        self._take(lines, is_another=True)

    async def run(self) -> None:
        """Add what comes, for ever. A file that is gone, or too large by now, adds nothing."""
        while True:
            await trio.sleep(_LOOK_S)
            try:
                lines, is_another = await trio.to_thread.run_sync(self._look)
            except (OSError, ValueError):
                self._files = {}  # some may have been read already: all are read anew
                continue
            if is_another or any(lines.values()):
                self._take(lines, is_another)

    def _look(self) -> tuple[dict[int, list[bytes]], bool]:
        """Return the lines since the last call by process, and True if they are all that there are.

        Raises:
          ValueError: a file is too large. OSError: one cannot be read.
        """
        is_first, paths = not self._files, {0: self._path}
        if not self._is_recording:
            paths |= {number: each / METRICS for number, each in trainer_folders(self._path.parent).items() if number}
        lines = {}
        for number, path in paths.items():
            if number and not path.is_file():  # just begun
                continue
            file = self._files.setdefault(number, GrowingFile(path))
            lines[number], is_another = file.lines()
            if is_another:
                self._files = {}
                return self._look()
        return lines, is_first

    def _take(self, lines: Mapping[int, Sequence[bytes]], is_another: bool) -> None:
        if self._is_recording:
            self._take_recording(lines[0], is_another)
        else:
            self._take_records({number: [*map(_object_of, each)] for number, each in lines.items()}, is_another)

    def _take_recording(self, lines: Sequence[bytes], is_another: bool) -> None:
        """Pass the events on as they stand there."""
        events = [(_object_of(line), line.decode(errors="replace")) for line in lines]
        if is_another:
            self.timeline.restart(next((line for each, line in events if each.get("what") == "about"), self._head()))
        kept = [line for each, line in events if each.get("what") in ("all", "changes")]
        self.timeline.add(kept, is_over=any(each.get("what") == "end" for each, _ in events))

    def _take_records(self, records: Mapping[int, Sequence[Mapping[str, Any]]], is_another: bool) -> None:
        if is_another:
            self._states, self._before = RunStates(), {}
            tasks = [each for each in records[0] if each.get("kind") == "task"]
            self.timeline.restart(self._head(unit=str(tasks[0].get("unit"))[:MAX_TEXT] if tasks else "items"))
        self.timeline.add(list(self._events(_by_time(records))), is_over=self._states.is_over)

    def _head(self, unit: str = "items") -> str:
        return about(str(self._path.parent), "recorded", load="samples", unit=unit)

    def _events(self, records: Sequence[tuple[int, Mapping[str, Any]]]) -> Iterator[str]:
        """Events of the states after these records, each with the number of its process."""
        each, last_s, taken = -(-len(records) // MAX_STATES), -math.inf, 0
        for number, (process, record) in enumerate(records, start=1):
            self._states.take(record, process)
            taken += 1
            if number == len(records) or (taken >= each and self._states.time_s - last_s >= _BETWEEN_S):
                time_s, state = self._states.state()
                yield step_of(time_s, self._before, state)
                self._before, last_s, taken = state, time_s, 0


def _by_time(records: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[tuple[int, Mapping[str, Any]]]:
    """All records, each with the number of its process, by their time; those of one process keep their order."""
    timed = []
    for number, own in records.items():
        time_s = 0.0
        for record in own:
            time_s = max(time_s, number_untrusted(record.get("time_s")) or 0.0)
            timed.append((time_s, number, record))
    return [(number, record) for _, number, record in sorted(timed, key=lambda each: each[0])]


def _object_of(line: bytes) -> Mapping[str, Any]:
    """The object in a line; an empty one for a line that holds none, as of a writer that was killed in the middle."""
    try:
        found = json.loads(line, parse_constant=_refuse)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _refuse(word: str) -> None:
    """Refuse NaN and infinities: Python reads them, and no browser does."""
    raise ValueError(f"{word} is no JSON")


def open_folder(folder: Path) -> RunFeed:
    """Open the recording in a folder, else the records of the run, of all its trainer processes.

    Raises:
      ValueError: the folder has neither, or a file of it is too large. OSError: it cannot be read.
    """
    for name in (RECORDING, METRICS):
        if (folder / name).is_file():
            return RunFeed(folder / name)
    raise ValueError(f"{folder} is no folder of a run: expected {METRICS} or {RECORDING} in it")
