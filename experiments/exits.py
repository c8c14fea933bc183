"""Early ends of an experiment: signals, errors told in one line, exit statuses."""

import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from dmoe_jax.runs.endings import EXIT_INTERRUPTED, UsageError, ending_signals, one_line

EXIT_FAILED = 1

Errors = tuple[type[Exception], ...]


@dataclass(frozen=True, slots=True)
class Ending:
    """An exit status and the line that explains it."""

    status: int
    message: str


def ending_of(error: BaseException, *, expected: Errors = (), causes: Errors = (), hint: str = "") -> Ending | None:
    """Decide whether an error ends a run with one line. A KeyboardInterrupt, a `UsageError` and the errors named do;
    nurseries may have put them into groups.

    Args:
      error: what was raised.
      expected: errors that are explained by their message, if nothing else was raised beside them.
      causes: errors that explain whatever was raised beside them.
      hint: what follows "interrupted".

    Returns:
      None where the error is a bug and wants its traceback.
    """
    errors = BaseExceptionGroup[BaseException]("", [error])
    if errors.subgroup(KeyboardInterrupt) is not None:
        return Ending(EXIT_INTERRUPTED, f"interrupted{hint}")
    kinds: Errors = (UsageError, *expected)
    understood, others = errors.split(kinds)
    explanation = errors.subgroup(causes) or (None if others else understood)
    if explanation is None:
        return None
    leaf: BaseException = explanation
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    return Ending(EXIT_FAILED, f"error: {one_line(leaf)}")


@contextmanager
def one_line_errors(prog: str, *, expected: Errors = (), causes: Errors = (), hint: str = "") -> Iterator[None]:
    """Turn the errors that `ending_of` knows into one line on standard error and the exit status for it.

    In the block SIGTERM does what Ctrl-C does (`interruptible`).

    Raises:
      SystemExit: for those errors. All others are raised as they are.
    """
    # Not in an `except*` clause: what that raises comes out in a group, with a traceback and status 1, if anything was
    # left to raise beside it, and before Python 3.11.4 always.
    try:
        with interruptible():
            yield
    except BaseException as error:
        ending = ending_of(error, expected=expected, causes=causes, hint=hint)
        if ending is None:
            raise
        print(f"{prog}: {ending.message}", file=sys.stderr)
        sys.exit(ending.status)


@contextmanager
def interruptible() -> Iterator[None]:
    """In the block SIGTERM, and the end of the terminal, raise KeyboardInterrupt, as Ctrl-C does; afterwards their
    handlers are as they were before.

    Whoever ends a process from outside wants what Ctrl-C gives: a report, and a run that can be resumed.
    """
    before = {number: signal.signal(number, signal.default_int_handler) for number in ending_signals()[1:]}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def run_until_signal(main: Callable[[], Awaitable[None]], *, prog: str) -> None:
    """Run an async function under trio until it is done, or until SIGINT or SIGTERM cancels it.

    A second signal while it winds up interrupts it at once.

    Raises:
      BaseExceptionGroup: with a KeyboardInterrupt, if a signal came.
    """

    async def interrupt_on_signal(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(*ending_signals()) as signals:
            task_status.started()
            async for _ in signals:
                break
        print(f"{prog}: interrupted, ending what was started", file=sys.stderr)
        raise KeyboardInterrupt

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(interrupt_on_signal)
            await main()
            nursery.cancel_scope.cancel()

    trio.run(run)
