"""Early ends of an experiment: signals, errors told in one line, exit statuses."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from dmoe_jax.runs.endings import EXIT_INTERRUPTED, UsageError, ending_signals, one_line

Errors = tuple[type[Exception], ...]


class Ending(NamedTuple):
    """An exit status and the line that explains it."""

    status: int
    message: str


def ending_of(error: BaseException, *, expected: Errors = (), causes: Errors = ()) -> Ending | None:
    """The end of a run with an error that a line explains; None for a bug, which wants its traceback.

    A KeyboardInterrupt, a `UsageError` and the errors named end it; nurseries may have put them into groups.

    Args:
      expected: errors that are explained by their message, if nothing else was raised beside them.
      causes: errors that explain whatever was raised beside them.
    """
    errors = BaseExceptionGroup[BaseException]("", [error])
    if errors.subgroup(KeyboardInterrupt) is not None:
        return Ending(EXIT_INTERRUPTED, "interrupted")
    kinds: Errors = (UsageError, *expected)
    understood, others = errors.split(kinds)
    leaf: BaseException | None = errors.subgroup(causes) or (None if others else understood)
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    status = leaf.status if isinstance(leaf, UsageError) else 1
    return None if leaf is None else Ending(status, f"error: {one_line(leaf)}")


@contextmanager
def one_line_errors(prog: str, *, expected: Errors = (), causes: Errors = (), hint: str = "") -> Iterator[None]:
    """Turn the errors that `ending_of` knows into one line on standard error and the exit status for it.

    In the block SIGTERM, and the end of the terminal, do what Ctrl-C does: whoever ends a process from outside wants a
    report too, and a run that can be resumed.

    Args:
      hint: what follows "interrupted".

    Raises:
      SystemExit: for those errors. All others are raised as they are.
    """
    # Not in an `except*` clause: what that raises comes out in a group, with a traceback and status 1, if anything was
    # left to raise beside it, and before Python 3.11.4 always.
    before = {number: signal.signal(number, signal.default_int_handler) for number in ending_signals()[1:]}
    try:
        yield
    except BaseException as error:
        ending = ending_of(error, expected=expected, causes=causes)
        if ending is None:
            raise
        print(f"{prog}: {ending.message}{hint if ending.status == EXIT_INTERRUPTED else ''}", file=sys.stderr)
        sys.exit(ending.status)
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
