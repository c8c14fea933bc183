"""The run folders below a folder, and for each the facts that `dmoe runs` shows. Imports no JAX."""

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from dmoe_jax.machine.disk import may_be_held
from dmoe_jax.runs.report import spoken
from dmoe_jax.runs.run_folder import CONFIG, RunFolder, flat
from dmoe_jax.trained.saved_run import LOGS, NODES, UP_FLAGS, first_trainer, saved_experts, up_logs
from dmoe_jax.training.prepared_run import CHECKPOINT_FOLDER

DEPTH = 4
"""Folders at most between the one that is listed and a run: a search of an experiment lies deepest."""

INNER_FOLDERS = (CHECKPOINT_FOLDER, "inspection", "tensorboard")
"""Folders of ours in a run folder, in which there are no other runs."""

State = Literal["complete", "running", "interrupted", "failed", "unreadable"]

_OWN_KEYS = {"settings", "command", "started"}
"""Keys that tell the config.json of a run from that of something else."""

_OF_ITS_PROCESS = {"out", "resume", "json", "join", "network", "listening", "tracker", "exit_on_stdin_eof"}
"""Settings that decide nothing about a run's results, or groups of these, such as whom a process joined."""

OF_A_TEXT = re.compile(r"(^|_)(perplexity|loss)(_|$)|^(validation|test)_(?!bits_per_byte)")
"""Figures that compare only where runs were evaluated alike. Bits for each byte do whatever a text is cut into."""

_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S%z"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """A run folder, as it is listed."""

    name: str
    """Its path below the folder that is listed."""
    command: str
    """Such as "dmoe train" or "compare_routers"."""
    begun: str
    """Local time, as ISO 8601 has it."""
    steps: int | None
    """Trunk updates; None where none are counted."""
    state: State
    figure: str
    """Name of its main figure, perplexity or loss; empty if it has none."""
    value: float | None
    """The main figure: of the last evaluation, or of the last step if there was no evaluation."""
    measure: str
    """Text and vocabulary that the main figure is over, and the number of words or samples that were evaluated: with
    others it does not compare. Empty if the run does not say."""
    size_bytes: int
    """Size of its files, with the logs and the nodes' experts beside it."""

    @property
    def state_text(self) -> str:
        """The state, and where the run stopped."""
        is_early = self.state in ("interrupted", "failed") and self.steps is not None
        return f"{self.state} at step {self.steps}" if is_early else self.state


def run_folders(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Every run folder up to so many levels below a folder, and the folder itself if it is one."""
    if config_of(folder) is not None:
        yield folder
    for each in folders_in(folder) if depth else ():
        yield from run_folders(each, depth - 1)


def folders_in(folder: Path) -> list[Path]:
    """The folders in a folder in which runs may lie, by name; those behind symbolic links and hidden ones are left."""
    try:
        found = [each for each in folder.iterdir() if each.is_dir() and not each.is_symlink()]
    except OSError:
        return []
    return sorted(
        each
        for each in found
        if not each.name.startswith(".") and each.name not in INNER_FOLDERS and each.suffix not in (LOGS, NODES)
    )


def config_of(folder: Path) -> dict[str, Any] | None:
    """The config.json of a run folder; None if the folder is none."""
    try:
        config = RunFolder(folder).config()
    except (OSError, ValueError):
        return None
    is_own = isinstance(config, dict) and config.keys() >= _OWN_KEYS and isinstance(config["settings"], dict)
    return config if is_own else None


def records_of(folder: Path) -> list[dict[str, Any]] | None:
    """The records of a run; None if its metrics are damaged or cannot be read."""
    try:
        return RunFolder(folder).metrics()
    except (OSError, ValueError):
        return None


def list_runs(root: Path) -> list[ListedRun]:
    """The runs in a folder and in their experiments' folders, the latest last."""
    found = []
    for path in run_folders(root):
        with suppress(ValueError, FileNotFoundError):  # removed meanwhile
            found.append(listed(path, root))
    return sorted(found, key=lambda run: (run.begun, run.name))


def listed(path: Path, root: Path) -> ListedRun:
    """The facts about the run in a run folder below `root`. Raises ValueError if there is none."""
    config = config_of(path)
    if config is None:
        raise ValueError(f"{path} is no run folder: it has no {CONFIG} of a run")
    records = records_of(path)
    steps = steps_of(records or ())
    figure, value = main_figure(records or ())
    return ListedRun(
        name=path.name if path == root else str(path.relative_to(root)),
        command=command_of(path, config),
        begun=_begun(path, config),
        steps=steps,
        state=state_of(path, records),
        figure=figure,
        value=value,
        measure=measure_of(records or ()),
        size_bytes=sum(map(size_of, (path, up_logs(path), saved_experts(path)))),
    )


def state_of(path: Path, records: Iterable[Mapping[str, Any]] | None) -> State:
    """The state of the run in a folder with these records, None if they cannot be read."""
    if may_be_held(path):
        return "running"
    return "unreadable" if records is None else ending_of(records)


def ending_of(records: Iterable[Mapping[str, Any]]) -> Literal["complete", "interrupted", "failed"]:
    """The end of a run that is not under way. One that says nothing of its end was killed: interrupted."""
    ended: Literal["interrupted", "failed"] | None = None
    is_complete = False
    for record in records:
        name = record.get("name") if record["kind"] == "event" else None
        if name in ("interrupted", "failed", "ended_early"):
            is_failed = name == "failed" or (name == "ended_early" and record.get("detail") != "interrupted")
            ended, is_complete = "failed" if is_failed else "interrupted", False
        elif name == "resumed":
            ended, is_complete = None, False
        elif record["kind"] == "headline":  # that of an experiment does not say
            is_complete = bool(record.get("complete", ended is None))
    return "complete" if is_complete else ended or "interrupted"


def steps_of(records: Iterable[Mapping[str, Any]]) -> int | None:
    """The last trunk update of a run; None if it has not made any."""
    steps = (record.get("step") or 0 for record in records if record["kind"] == "train")
    return max((step for step in steps if isinstance(step, int)), default=None)


def main_figure(records: Sequence[Mapping[str, Any]]) -> tuple[str, float | None]:
    """Name and value of the figure that stands for a run: see `ListedRun`."""
    name, record = _main(records)
    return name, float(record[name]) if name else None


def measure_of(records: Sequence[Mapping[str, Any]]) -> str:
    """The `ListedRun.measure` of a run with these records."""
    task = next((record for record in records if record["kind"] == "task"), None)
    if task is None:
        return ""
    meaning, items = str(task.get("meaning") or ""), _main(records)[1].get("items")
    unit = spoken(str(task.get("unit", "samples")), meaning)
    evaluated = f"{items:,} {unit} evaluated" if isinstance(items, int) else ""
    vocabulary = meaning.removeprefix("vocabulary: ").replace("\n", "; ")
    return ", ".join(filter(None, (str(task.get("name") or ""), vocabulary, evaluated)))


def _main(records: Sequence[Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    """Name of the main figure, and the record that has it; nothing if there is none."""
    for kinds in (("eval", "final_eval"), ("train",)):
        for record in reversed(records):
            if record["kind"] in kinds and record.get("split", "valid") == "valid":
                for name in ("perplexity", "loss"):
                    if isinstance(value := record.get(name), int | float) and abs(value) < 1e300:
                        return name, record if kinds[0] == "eval" else {name: value}
    return "", {}


def command_of(path: Path, config: Mapping[str, Any]) -> str:
    """The command that made a run: of `dmoe` or of an experiment, or the name of a script."""
    try:
        words = shlex.split(str(config["command"]))
    except ValueError:  # a quote without its end
        words = str(config["command"]).split()
    for number, word in enumerate(words[:-1]):
        if word in ("dmoe", "dmoe_jax.cli"):
            is_up = (up_logs(first_trainer(path)) / UP_FLAGS).exists()
            return "dmoe up" if is_up else f"dmoe {words[number + 1]}"
    experiments = [word.split(".")[1] for word in words if word.startswith("experiments.")]
    scripts = [Path(word).name for word in words if word.endswith(".py")]
    return next(iter([*experiments, *scripts, *words]), "")


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; 0 if there is nothing. Symbolic links are not followed."""
    if path.is_symlink() or not path.is_dir():
        return _bytes_of(path)
    # Not by rglob, which raises for a folder that is gone meanwhile, as a live run's half-written checkpoints are.
    return sum(_bytes_of(Path(folder, name)) for folder, _, names in os.walk(path) for name in names)


def _bytes_of(file: Path) -> int:
    try:
        return file.lstat().st_size
    except OSError:  # gone meanwhile
        return 0


def size_text(num_bytes: int) -> str:
    """A size for people."""
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:,.1f} kB"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRuns:
    """Several runs side by side; each name has a value for every run, None where a run does not have it."""

    runs: tuple[str, ...]
    settings: Mapping[str, Sequence[Any]]
    """Settings that are not the same for all, nested ones as "expert.d_model"."""
    measures: tuple[str, ...]
    """Text, vocabulary and size of each run's evaluation: `ListedRun.measure`."""
    figures: Mapping[str, Sequence[Any]]
    """Final figures of all, beginning with state, steps and main figure."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Letter of each run's measure; empty where all runs have one measure, or none says its own."""
        distinct = [*dict.fromkeys(self.measures)]
        return tuple(chr(ord("a") + distinct.index(each)) if len(distinct) > 1 else "" for each in self.measures)


def compare_runs(paths: Sequence[Path]) -> ComparedRuns:
    """Set the runs in these folders side by side. Raises ValueError naming the first that is no run folder."""
    settings: list[dict[str, Any]] = []
    figures: list[dict[str, Any]] = []
    measures: list[str] = []
    for path in paths:
        run, config, records = listed(path, path), config_of(path) or {}, records_of(path) or []
        flags = flat(config.get("settings", {})).items()
        settings.append({name: value for name, value in flags if name.partition(".")[0] not in _OF_ITS_PROCESS})
        measures.append(run.measure)
        headlines = [record for record in records if record["kind"] == "headline"]
        final = flat(headlines[-1] if headlines else {}).items()
        facts = {"state": run.state_text, "steps": run.steps, **({run.figure: run.value} if run.figure else {})}
        shown = {name: value for name, value in final if name not in ("kind", "complete", "steps")}
        figures.append(facts | {name: value for name, value in shown.items() if not isinstance(value, list)})
    differ = {name: row for name, row in _side_by_side(settings).items() if any(value != row[0] for value in row[1:])}
    return ComparedRuns(
        runs=tuple(map(str, paths)), settings=differ, measures=tuple(measures), figures=_side_by_side(figures)
    )


def _side_by_side(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: [table.get(name) for table in tables] for name in names}


def _begun(path: Path, config: Mapping[str, Any]) -> str:
    try:
        begun = datetime.strptime(str(config["started"]), _TIME_FORMAT).astimezone()
    except (ValueError, OverflowError):
        begun = datetime.fromtimestamp((path / CONFIG).stat().st_mtime).astimezone()
    return begun.isoformat(timespec="seconds")
