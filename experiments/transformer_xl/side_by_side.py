"""Several models at once: a process for each, with its share of the cores.

A simulated run keeps one core busy and hardly two, so that two models side by side on two cores take little longer than
the slower of them. What a model computes does not depend on what runs beside it.

A child gets its task as one line of JSON on standard input, which stays open: when it closes, its parent is gone, and
the child ends as it would after Ctrl-C, with a report and a checkpoint to go on from. It has a session of its own, for
Ctrl-C in a terminal should reach it once, from its parent.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from dmoe_jax.cli.common import UsageError, set_up_jax
from dmoe_jax.data.corpora import load_corpus
from dmoe_jax.routing.base import RouterError
from experiments.exits import EXIT_INTERRUPTED, one_line_errors
from experiments.transformer_xl.names import Model
from experiments.transformer_xl.settings import NAME, TransformerXLSettings
from experiments.transformer_xl.training import train_model
from net.errors import NetError

_POLL_S = 0.2
_ENDING_S = 120.0
"""How long an interrupted child may take for its report; a stretch cannot be left before its current step."""


@dataclass(slots=True, eq=False)
class _Child:
    """A process that trains one model."""

    model: Model
    process: subprocess.Popen[str]
    cores: tuple[int, ...]
    reader: threading.Thread
    last_line: list[str]


def train_side_by_side(settings: TransformerXLSettings, path: Path, *, console: Console) -> None:
    """Train the models, as many at a time as the settings say, each in its folder under `path`.

    Raises:
      UsageError: a child failed; its last line. The others have been interrupted. KeyboardInterrupt:
        after all children have ended.
    """
    waiting = list(settings.models)
    running: list[_Child] = []
    free = _shares(settings.num_jobs)
    try:
        while waiting or running:
            while waiting and free:
                running.append(_start(settings, waiting.pop(0), path, free.pop(0), console))
            time.sleep(_POLL_S)
            for child in [each for each in running if each.process.poll() is not None]:
                running.remove(child)
                free.append(child.cores)
                _close(child)
                _check_end(child)
    finally:
        _end(running)


def _check_end(child: _Child) -> None:
    status = child.process.returncode
    if status == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if status:
        said = child.last_line[0].removeprefix("transformer_xl: error: ")
        raise UsageError(said or f"{child.model} ended with status {status}")


def _shares(jobs: int) -> list[tuple[int, ...]]:
    """The cores that this process may use, dealt out; nothing where the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return [()] * jobs
    cores = sorted(os.sched_getaffinity(0))
    return [tuple(cores[index::jobs]) for index in range(jobs)]


def _start(
    settings: TransformerXLSettings, model: Model, path: Path, cores: tuple[int, ...], console: Console
) -> _Child:
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.transformer_xl.side_by_side"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    flags = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()}
    task = {"settings": flags, "model": model, "path": str(path), "cores": cores}
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(json.dumps(task) + "\n")
    process.stdin.flush()
    last_line = [""]
    reader = threading.Thread(target=_copy, args=(process.stderr, model, console, last_line), daemon=True)
    reader.start()
    return _Child(model, process, cores, reader, last_line)


def _copy(stderr: IO[str], model: Model, console: Console, last_line: list[str]) -> None:
    """Show a child's lines under its name."""
    for line in stderr:
        last_line[0] = line.strip()
        if last_line[0]:
            console.print(f"[bold]{model}[/] ", end="", highlight=False)
            console.print(last_line[0].removeprefix(f"{model}: "), highlight=False, markup=False, soft_wrap=True)


def _end(children: Sequence[_Child]) -> None:
    """Interrupt what still runs and wait for its reports."""
    for child in children:
        # Not SIGINT, which a process that was started in the background of a script ignores, and its children too.
        child.process.terminate()
    deadline = time.monotonic() + _ENDING_S
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            child.process.kill()
            child.process.wait()
        _close(child)


def _close(child: _Child) -> None:
    """Free what is left of a child that has ended."""
    child.reader.join()
    for pipe in (child.process.stdin, child.process.stderr):
        if pipe is not None:
            pipe.close()


def _interrupt_at_end_of_input() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _main() -> None:
    """A child's whole life."""
    task: dict[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_interrupt_at_end_of_input, daemon=True).start()
    if task["cores"]:
        os.sched_setaffinity(0, task["cores"])
    flags = task["settings"]
    lists = {each.name: tuple(flags[each.name]) for each in fields(TransformerXLSettings) if each.name in _TUPLES}
    flags |= lists | {"out": None if flags["out"] is None else Path(flags["out"])}
    settings = TransformerXLSettings(**flags)
    with one_line_errors(NAME, expected=(FloatingPointError, RouterError, NetError)):
        set_up_jax()
        train_model(settings, task["model"], load_corpus(source=settings.data), Path(task["path"]) / task["model"])


_TUPLES = ("model", "join")
"""Fields that JSON knows only as lists."""


if __name__ == "__main__":
    _main()
