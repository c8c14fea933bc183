"""Helper processes of a measurement: modules of ours that answer orders, one JSON object a line.

The measuring process starts them with `open_helpers` and gives orders. A helper (`run_helper`) prints an object first,
once it is ready (`say`), then one for each of its `orders`. It ends when its standard input does, hence also when the
measuring process is killed. It runs in a session of its own: Ctrl-C reaches the measuring process alone, which ends the
others.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import trio

_END_GRACE_S = 5.0
"""A helper ends with its standard input, at once; after this many seconds it is killed."""


class HelperFailed(Exception):
    """A helper process ended too early; it has said why on standard error, unless it was killed."""


class HelperProcess:
    """The measuring process's end of a helper. Made by `open_helpers`.

    Attributes:
      hello: what it said when it was ready.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._orders, self._answers = process, process.stdin, process.stdout
        self.hello: dict[str, Any] = {}

    def tell(self, **order: object) -> None:
        """Send an order; `hear` has its answer.

        Raises:
          HelperFailed: it has ended.
        """
        try:
            print(json.dumps(order), file=self._orders, flush=True)
        except BrokenPipeError as exc:
            raise self._failure() from exc

    def hear(self) -> dict[str, Any]:
        """Wait for what it says next.

        Raises:
          HelperFailed: it has ended instead.
        """
        line = self._answers.readline()
        if not line:
            raise self._failure()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self) -> HelperFailed:
        """Return the error. A process that the system kills for want of memory says nothing on standard error."""
        try:
            status = self._process.wait(_END_GRACE_S)
        except subprocess.TimeoutExpired:
            status = 0  # it has closed its output and goes on
        killed = ": it was killed, perhaps for want of memory" if status == -signal.SIGKILL else ""
        return HelperFailed(f"a helper process ended too early{killed}")

    def ask(self, **order: object) -> dict[str, Any]:
        """Send an order and wait for its answer. Raises as `tell` and `hear`."""
        self.tell(**order)
        return self.hear()


@contextmanager
def open_helpers(
    module: str,
    settings: Sequence[Mapping[str, object]],
    *,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> Iterator[list[HelperProcess]]:
    """Start helpers side by side and wait until all are ready; they, and what they started, are gone when the block
    ends.

    Args:
      module: what to run, as of `python -m`; it calls `run_helper`.
      settings: the keyword arguments of each helper's function; JSON carries them.
      python: the interpreter; another one than ours finds the module and perhaps none of our libraries.
      environment: variables that the helpers have where ours has not.

    Raises:
      HelperFailed: one of them did not start.
    """
    with ExitStack() as stack:
        own = environment or {}
        helpers = [HelperProcess(stack.enter_context(_open_process(python, module, each, own))) for each in settings]
        for helper in helpers:
            helper.hello = helper.hear()
        yield helpers


@contextmanager
def _open_process(
    python: str, module: str, settings: Mapping[str, object], environment: Mapping[str, str]
) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [python, "-m", module, json.dumps(settings)],
        cwd=Path(__file__).parents[1],
        # Several helpers share one GPU.
        env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **environment, **os.environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_GRACE_S)
        finally:  # also where a second Ctrl-C ends the waiting: whoever listens to the helper would wait for its work
            # Its session, for it may have processes of its own.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()


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
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    sizes = {name: text for name, _, text in (line.partition(":") for line in lines)}
    if not {"VmRSS", "VmHWM"} <= sizes.keys():
        return None
    held, peak = (int(sizes[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return held, peak
