"""Experiments that another experiment runs as processes: their commands, what they print, how they end.

A child runs in a session of its own: Ctrl-C reaches the parent alone, which ends the child as a Ctrl-C would, so that
it leaves its report and what `--resume` goes on from.
"""

import importlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dmoe_jax.runs.run_folder import CONFIG
from experiments.bench import ResumableSettings

END_GRACE_S = 25.0
"""A child that was told to end writes its report and a checkpoint; after this many seconds it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Exit status and last output of a child that has ended."""

    status: int
    """Its exit status, below 0 for a signal."""
    headline: Mapping[str, Any] | None
    """The JSON object that it printed last, if there is one."""
    last_line: str
    """Last line that it wrote to standard error."""

    @property
    def failure(self) -> str:
        """Why it counts as failed; empty if it does not."""
        if not self.status:
            return ""
        return self.last_line or (f"ended by signal {-self.status}" if self.status < 0 else f"status {self.status}")


def is_resumable(name: str) -> bool:
    """Return True if the settings of `experiments.name` know `--resume`, and False if there is no experiment `name`."""
    module_name = f"experiments.{name}.settings"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError:
        return False
    classes = [each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == module_name]
    return any(issubclass(each, ResumableSettings) for each in classes)


def prepare_folder(name: str, out: Path) -> list[str]:
    """The flags with which a child writes into this folder: it goes on there if it can, else it begins anew.

    What a child that cannot go on has left there is deleted.
    """
    if is_resumable(name) and (out / CONFIG).exists():
        return ["--out", str(out), "--resume"]
    if out.exists():
        shutil.rmtree(out)
    return ["--out", str(out)]


def run_child(words: Sequence[str]) -> Ended:
    """Run `python -m` with these words, a module and its flags, to its end. Its standard error goes to ours.

    Raises:
      KeyboardInterrupt: after the child has ended.
    """
    # Children start processes that need the same GPU, which JAX would take whole.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process, ThreadPoolExecutor(2) as threads:
        printed = threads.submit(_last_line, process.stdout)
        complained = threads.submit(_last_line, process.stderr, sys.stderr)
        try:
            process.wait()
        finally:
            _end(process)
    return Ended(status=process.returncode, headline=_json_object(printed.result()), last_line=complained.result())


def _last_line(stream: IO[str], copy_to: IO[str] | None = None) -> str:
    """Read to the end, copying on the way; the last line that is not blank."""
    last = ""
    for line in stream:
        if copy_to is not None:
            copy_to.write(line)
            copy_to.flush()
        last = line.strip() or last
    return last


def _end(process: "subprocess.Popen[str]") -> None:
    """Tell it to end if it has not, and kill what is left of its session."""
    with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        if process.poll() is None:
            # Not SIGINT: a shell's background processes inherit that it is ignored.
            process.terminate()
            process.wait(END_GRACE_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _json_object(line: str) -> Mapping[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
