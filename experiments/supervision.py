"""How an experiment of several processes begins and ends: signals, one-line errors, exit status."""

import signal
import sys
from collections.abc import Awaitable, Callable
from typing import NoReturn

import trio

from dmoe_jax.cli.common import UsageError, fail, one_line
from experiments.local_swarm import ProcessFailed

EXIT_INTERRUPTED = 130
"""128 + SIGINT: what a shell reports for a program that Ctrl-C ended."""


def run_supervised(main: Callable[[], Awaitable[int]], *, prog: str) -> int:
    """Run an experiment until it is done or a signal arrives, which cancels it; returns the exit status.

    A process that failed, a wrong value and an early or second Ctrl-C end this process with one line.

    Args:
      main: the experiment. Cancelled, it ends the processes that it started.
      prog: what its messages begin with.
    """
    try:
        return trio.run(_supervise, main, prog)
    except (KeyboardInterrupt, ProcessFailed, UsageError, ValueError, OSError, BaseExceptionGroup) as error:
        _exit_after(error, prog)


async def _supervise(main: Callable[[], Awaitable[int]], prog: str) -> int:
    status = EXIT_INTERRUPTED

    async def run() -> None:
        nonlocal status
        status = await main()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_cancel_on_signal, nursery.cancel_scope, prog)
        nursery.start_soon(run)
    return status


async def _cancel_on_signal(scope: trio.CancelScope, prog: str) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            print(f"{prog}: interrupted, ending all processes", file=sys.stderr)
            scope.cancel()
            return


def _exit_after(error: BaseException, prog: str) -> NoReturn:
    """One line and an exit, unless the error is a bug: then it is raised as it is.

    Not in an `except*` clause: what that raises comes out in a group, with a traceback and status 1, if anything was
    left to raise beside it, and before Python 3.11.4 always.
    """
    errors = BaseExceptionGroup("", [error])
    if errors.subgroup(KeyboardInterrupt) is not None:
        print(f"{prog}: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    wrong_values, others = errors.split((UsageError, ValueError, OSError))
    explanation = errors.subgroup(ProcessFailed) or (None if others else wrong_values)
    if explanation is not None:
        fail(one_line(_first_leaf(explanation)), prog=prog)
    raise error


def _first_leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
