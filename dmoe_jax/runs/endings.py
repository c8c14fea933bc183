"""Ends of a command: mistakes told in one line, and the signals that ask for an end. Nothing here imports JAX."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from dmoe_jax.machine.disk import FolderInUse
from dmoe_jax.runs.speech import shown

EXIT_INTERRUPTED = 130
"""128 + SIGINT: what a shell reports for a command that Ctrl-C ended."""

EXIT_AGAIN = 75
"""EX_TEMPFAIL of sysexits.h: nothing is wrong with the command, and time may heal what failed it. Schedulers start it
again, and need not take a bug, whose traceback gives 1, for the same."""

EXIT_HELP = f"""\
Exit status:
  0 done; 1 failed; 2 a mistake; {EXIT_INTERRUPTED} stopped; {EXIT_AGAIN} failed for now, start it again
"""
"""Text about them in `dmoe --help`."""


class UsageError(Exception):
    """A mistake of the user's; the message is the one line that is printed."""

    status = 2
    """Exit status of the command."""


class CommandFailed(UsageError):
    """The command could not do what it was rightly asked for; the message is the one line that is printed."""

    status = 1


class TryAgain(CommandFailed):
    """The command could not do it now, because of others: the same command may succeed later."""

    status = EXIT_AGAIN


@contextlib.contextmanager
def mistakes_in_one_line(flag: str = "") -> Iterator[None]:
    """Turn what a wrong setting, of the flag if one is named, or a damaged file raises in the block into a
    `UsageError`, a full disk into a `CommandFailed`, and a folder that another process writes to into `TryAgain`."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"{flag}: {one_line(error)}" if flag else one_line(error)) from error
    except OSError as error:
        raise failure_of(error) from error


def failure_of(error: BaseException) -> CommandFailed:
    """The failure of a command for an error of a disk or a checkpoint."""
    return (TryAgain if isinstance(error, FolderInUse) else CommandFailed)(one_line(error))


def one_line(error: BaseException) -> str:
    """The first line of an error's message; libraries follow it with advice that fills a screen."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def fail(message: str, *, status: int = 1, prog: str = "dmoe") -> NoReturn:
    """Print one line to standard error and exit."""
    print(f"{prog}: error: {shown(message)}", file=sys.stderr)
    sys.exit(status)


def ending_signals() -> list[signal.Signals]:
    """The signals that end a command in order: Ctrl-C, SIGTERM, and a closed terminal unless `nohup` ignores it."""
    hangup: signal.Signals | None = getattr(signal, "SIGHUP", None)
    is_heard = hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([hangup] if hangup is not None and is_heard else [])]
