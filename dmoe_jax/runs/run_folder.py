"""A run's folder on disk, which can be read at whatever moment the process dies.

A metrics line is one append of one write, and every other file is written under another name and moved into place.
"""

import csv
import dataclasses
import errno
import io
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from dmoe_jax.machine.disk import check_local, errors_name, is_empty

CONFIG = "config.json"
METRICS = "metrics.jsonl"
FIGURE = "figure.png"
REPORT = "report.md"
RESULTS = "results.csv"
"""File beside the report of a comparison, with a row for each of its runs."""

RUN_FILES = frozenset(
    {CONFIG, METRICS, FIGURE, REPORT, RESULTS, "vocabulary.json", "tokenizer.json", "tokenizer.model"}
)
"""Files of ours in a run folder: one that has others too is never cleaned up as a whole."""

_PACKAGES = ("dmoe_jax", "jax", "jaxlib", "flax", "optax", "trio", "numpy")
"""Packages whose versions change what a run computes."""

Sink = Callable[[str, Mapping[str, Any]], None]
"""Takes each record, as (kind, fields), when it has been written. Must not raise."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunFolder:
    """An existing run folder. Made by `RunFolder.create`; holds no open file, so there is nothing to close."""

    path: Path
    sink: Sink | None = dataclasses.field(default=None, compare=False)
    """Gets each record beside `metrics.jsonl`."""

    @classmethod
    def create(
        cls,
        path: Path | None,
        config: object,
        *,
        name: str = "run",
        resume: bool = False,
        open_sink: Callable[[Path], Sink] | None = None,
    ) -> "RunFolder":
        """Make the folder and write `config.json` into it.

        Args:
          path: the folder; None for `runs/<name>-<date>-<time>`.
          config: the settings, a dataclass or a mapping; see `plain`.
          resume: continue in a folder that is not empty. A line that a killed writer left unfinished is cut
            off, and an event "resumed" says which settings have changed.
          open_sink: opens a sink for the folder.

        Raises:
          ValueError: the path is a file, or a folder that is not empty although `resume` is false.
          OSError: the folder cannot be written.
        """
        if path is None:
            path = new_folder(Path("runs"), name)
        elif not resume or path.is_file():
            check_new(path)
        path.mkdir(parents=True, exist_ok=True)
        folder = cls(path, None if open_sink is None else open_sink(path))
        before = folder.config() if (path / CONFIG).exists() else None
        record = _config_record(config)
        if before is not None:
            record["started"] = before.get("started", record["started"])
        folder.write_text(CONFIG, json.dumps(record, indent=2, allow_nan=False) + "\n")
        if before is not None:
            if folder.metrics_path.exists():
                data = folder.metrics_path.read_bytes()
                os.truncate(folder.metrics_path, data.rfind(b"\n") + 1)
            changes = changed_settings(before.get("settings", {}), config).items()
            detail = "; ".join(f"{name}: {then!r} -> {now!r}" for name, (then, now) in changes)
            folder.log("event", name="resumed", detail=detail or "with the same settings")
        return folder

    @property
    def metrics_path(self) -> Path:
        """The file of the records."""
        return self.path / METRICS

    def config(self) -> dict[str, Any]:
        """Settings, command, time, versions and platform. Raises ValueError for a damaged file, OSError for none."""
        try:
            config: dict[str, Any] = json.loads((self.path / CONFIG).read_text(encoding="utf-8"))
        except RecursionError as error:
            raise ValueError(f"{self.path / CONFIG} is nested too deeply") from error
        return config

    def log(self, kind: str, /, **fields: object) -> None:
        """Append one record to `metrics.jsonl`, and tell the sink of it."""
        append_metric(self.metrics_path, kind=kind, **fields)
        if self.sink is not None:
            self.sink(kind, fields)

    def metrics(self) -> list[dict[str, Any]]:
        """Return all records so far. Raises as `read_metrics`."""
        return read_metrics(self.metrics_path) if self.metrics_path.exists() else []

    def write_text(self, name: str, text: str) -> Path:
        """Write a text file into the folder, at once; return its path."""
        with replaced_file(self.path / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
        return self.path / name


def new_folder(parent: Path, name: str) -> Path:
    """Make a folder called by a name and the time, or the first of TIME-2, TIME-3 ... that is not there yet."""
    name, number = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}", 1
    path = parent / name
    while True:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
            path = parent / f"{name}-{number}"
        else:
            return path


def check_new(path: Path, *, hint: str = "") -> None:
    """Raises ValueError, which ends in the hint, unless a run may begin in this folder: it is not there, or empty."""
    check_local(path, "a run")
    if path.exists() and not path.is_dir():
        raise ValueError(f"the run folder {path} is a file; expected a new or empty folder")
    if path.is_dir() and not is_empty(path):
        raise ValueError(f"the run folder {path} is not empty; expected a new or empty folder{hint}")


def changed_settings(before: Mapping[str, Any], now: object) -> dict[str, tuple[Any, Any]]:
    """Setting -> (before, now), of those that differ from what a config.json says; nested ones as "a.b"."""
    then, now = flat(before), flat(plain(now))
    return {name: (then.get(name), now.get(name)) for name in sorted({*then, *now}) if then.get(name) != now.get(name)}


def append_metric(path: Path, /, *, kind: str, **fields: object) -> None:
    """Append one record to a metrics file, to which other processes may append, as one line in one write."""
    line = json.dumps(plain({"kind": kind, **fields}), allow_nan=False, separators=(",", ":")) + "\n"
    data = line.encode()
    with path.open("ab", buffering=0) as file:
        written = file.write(data)
        if written != len(data) and file.tell() == os.fstat(file.fileno()).st_size:
            file.truncate(file.tell() - written)  # half a line would spoil the next one
    if written != len(data):
        raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes could be written", str(path))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, in order, without a last line that is still being written.

    Raises:
      ValueError: naming the first line that is not a JSON object with a "kind".
      OSError: the file cannot be read.
    """
    return records_in(path.read_bytes(), path)


def records_in(data: bytes, path: Path) -> list[dict[str, Any]]:
    """The records in the bytes of a metrics file, as of `read_metrics`; the path is for the message."""
    records = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: expected a JSON object, got {line[:80]!r}") from error
        if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
            raise ValueError(f"{path}, line {number}: expected a JSON object with a kind, got {line[:80]!r}")
        records.append(record)
    return records


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Write a file at once: yields a temporary path of the same suffix, moved to `path` after the body. If the body
    raises, `path` keeps what it had and the temporary file goes; an OSError names `path`."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        with errors_name(path, temporary):
            yield temporary
            os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise


def plain(value: object) -> Any:
    """A value as JSON can say it: numbers that are not finite become None, functions and classes their names."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    to_list = getattr(value, "tolist", None)  # NumPy and JAX arrays and scalars, without importing either
    if callable(to_list):
        listed = to_list()
        return str(value) if listed is value else plain(listed)
    if callable(value):
        return getattr(value, "__qualname__", None) or str(value)
    return str(value)


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name: {"expert": {"d_model": 8}} as {"expert.d_model": 8}."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _config_record(config: object) -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "settings": plain(config),
        "command": _command_line(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions,
        "commit": _git_commit(),
        "platform": {"system": platform.platform(), "machine": platform.machine(), "cpu_count": os.cpu_count()},
    }


def _command_line() -> str:
    """The words that started this process, with PEER for those to join, which are gone when they are typed again."""
    arguments: list[str] = []
    is_join = False
    for argument in sys.orig_argv[1:]:
        if argument.startswith("-"):
            is_join = argument == "--join"
            arguments += [argument, "PEER"] if is_join else [argument]
        elif not is_join:
            arguments.append(argument)
    if arguments and Path(arguments[0]).parent == Path(sys.executable).parent:
        return shlex.join([Path(arguments[0]).name, *arguments[1:]])  # an installed script, such as `dmoe`
    return shlex.join(["python", *arguments])


def _git_commit() -> str | None:
    """The commit of this code, with a mark if it has been changed since; None if not known."""
    here = Path(__file__).parent
    if "site-packages" in here.parts:
        return None  # a repository around an installed package is somebody else's
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def write_runs(folder: RunFolder, runs: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> None:
    """Write the results.csv of a comparison as RFC 4180 has it: a header, and for each run a row with label, seed and
    final figures.

    A figure inside a figure has a column of its own, such as failures.timeout; lists have none. A figure that a run
    does not have, or that is not finite, is empty.

    Args:
      runs: label of a setting -> seed -> the final figures of that run.
    """
    rows = []
    for label, seeds in runs.items():
        for seed, figures in seeds.items():
            known = {name: value for name, value in flat(plain(figures)).items() if not isinstance(value, list)}
            known.pop("kind", None)  # of the record
            rows.append({"label": label, "seed": seed} | known | {"label": label, "seed": seed})
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    with replaced_file(folder.path / RESULTS) as temporary:
        temporary.write_text(text.getvalue(), encoding="utf-8", newline="")
