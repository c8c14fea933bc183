"""Processes of a measurement: helpers, which answer orders in JSON, and children, which are whole experiments.

A helper is a module that calls `run_helper`. It prints an object once it is ready (`say`), then one for each of its
`orders`, a line each, and ends when its standard input does, hence also when the measuring process is killed. All run
in sessions of their own: Ctrl-C reaches the measuring process alone, which ends the others.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import trio

HELPER_GRACE_S, CHILD_GRACE_S = 5.0, 25.0
"""Seconds until a process that was told to end is killed. A helper ends with its standard input, at once; a child
writes its report and a checkpoint."""


@contextmanager
def _own_session(
    command: Sequence[str], *, grace_s: float, environment: Mapping[str, str] | None = None, **options: Any
) -> Iterator["subprocess.Popen[str]"]:
    """Run a command in a session of its own; it, and what it started, is gone when the block ends.

    It is told by the end of its standard input, if that is a pipe, else by SIGTERM, which shells' background processes
    do not ignore as they do SIGINT; then killed.

    Args:
      environment: variables that it has where ours has not.
      options: of `subprocess.Popen`.
    """
    # Several processes share one GPU, which JAX would take whole.
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **(environment or {}), **os.environ}
    process = subprocess.Popen(command, env=variables, text=True, errors="replace", start_new_session=True, **options)
    try:
        yield process
    finally:
        try:
            if process.stdin is None:
                process.terminate()
            else:
                with suppress(BrokenPipeError):
                    process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        finally:  # also where a second Ctrl-C ends the waiting: whoever listens to it would wait for its work
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


class HelperFailed(Exception):
    """A helper process ended too early; it has said why on standard error, unless it was killed."""


class HelperProcess:
    """The measuring process's end of a helper. Made by `open_helpers`. Each method raises HelperFailed if it has ended.

    Attributes:
      hello: what it said when it was ready.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._orders, self._answers = process, process.stdin, process.stdout
        self.hello: dict[str, Any] = {}

    def tell(self, **order: object) -> None:
        """Send an order; `hear` has its answer."""
        try:
            print(json.dumps(order), file=self._orders, flush=True)
        except BrokenPipeError as exc:
            raise self._failure() from exc

    def hear(self) -> dict[str, Any]:
        """Wait for what it says next."""
        line = self._answers.readline()
        if not line:
            raise self._failure()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **order: object) -> dict[str, Any]:
        """Send an order and wait for its answer."""
        self.tell(**order)
        return self.hear()

    def _failure(self) -> HelperFailed:
        """Return the error. A process that the system kills for want of memory says nothing on standard error."""
        try:
            status = self._process.wait(HELPER_GRACE_S)
        except subprocess.TimeoutExpired:
            status = 0  # it has closed its output and goes on
        killed = ": it was killed, perhaps for want of memory" if status == -signal.SIGKILL else ""
        return HelperFailed(f"a helper process ended too early{killed}")


@contextmanager
def open_helpers(
    module: str,
    settings: Sequence[Mapping[str, object]],
    *,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> Iterator[list[HelperProcess]]:
    """Start helpers side by side and wait until all are ready; they are gone when the block ends.

    Args:
      module: what to run, as of `python -m`; it calls `run_helper`.
      settings: the keyword arguments of each helper's function; JSON carries them.
      python: the interpreter; another one than ours finds the module and perhaps none of our libraries.
      environment: variables that the helpers have where ours has not.

    Raises:
      HelperFailed: one of them did not start.
    """
    start = partial(
        _own_session,
        grace_s=HELPER_GRACE_S,
        environment=environment,
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with ExitStack() as stack:
        commands = [[python, "-m", module, json.dumps(each)] for each in settings]
        helpers = [HelperProcess(stack.enter_context(start(command))) for command in commands]
        for helper in helpers:
            helper.hello = helper.hear()
        yield helpers


def run_helper(main: Callable[..., Awaitable[None]]) -> None:
    """In a helper: run this function with the settings that `open_helpers` was given."""
    trio.run(partial(main, **json.loads(sys.argv[1])))


def say(**fields: object) -> None:
    """In a helper: print that it is ready, or the answer to an order."""
    print(json.dumps(fields), flush=True)


async def orders() -> AsyncIterator[dict[str, Any]]:
    """In a helper: yield the orders, until the measuring process is done or dead."""
    rest = b""
    # A duplicate: closing standard input itself would surprise the interpreter's end.
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stream:
        async for data in stream:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield json.loads(line)


def memory_bytes() -> tuple[int, int] | None:
    """Return what this process holds, and the most that it ever held; None where the system does not say.

    Not `getrusage`: on Linux its figure begins with that of the process that started this one.
    """
    try:
        sizes = dict(re.findall(r"^(VmRSS|VmHWM):\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE))
        return 1024 * int(sizes["VmRSS"]), 1024 * int(sizes["VmHWM"])
    except (OSError, KeyError):
        return None


def run_child(words: Sequence[str]) -> tuple[int, dict[str, Any] | None, str]:
    """Run `python -m` with these words, a module and its flags, to its end. Its standard error goes to ours.

    Returns:
      Its exit status, below 0 for a signal; the JSON object that it printed last, if there is one; why it failed, "" if
      it did not.

    Raises:
      KeyboardInterrupt: after the child has ended.
    """
    with TemporaryFile("w+", errors="replace") as printed, ThreadPoolExecutor(1) as thread:
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": subprocess.PIPE}
        with _own_session([sys.executable, "-m", *words], grace_s=CHILD_GRACE_S, **pipes) as process:
            assert process.stderr is not None
            complained = thread.submit(_shown, process.stderr)
            status = process.wait()
        printed.seek(0)
        last = printed.read().strip().rpartition("\n")[2]
        ended_by = f"ended by signal {-status}" if status < 0 else f"status {status}"
        failure = complained.result() or ended_by if status else ""
        return status, json.loads(last) if last.startswith("{") else None, failure


def _shown(errors: IO[str]) -> str:
    """Show what a child writes to standard error, to its end; return the last line that is not blank."""
    last = ""
    with errors:
        for line in errors:
            sys.stderr.write(line)
            sys.stderr.flush()
            last = line.strip() or last
    return last
