"""Lines of a command for its user: one that nobody can read, or that finds no room, ends nothing.

Standard output may be missing, a pipe whose reader has gone, or a file on a full disk. `standard_streams` forgives that
of whoever writes there: `say`, rich, logging, a user's own file. The exit status shows that not everything was said.
"""

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_UNREAD_STATUS = 128 + 13
"""Exit status as of a process that SIGPIPE ended: whoever read our output has gone, as `head` does."""


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that a terminal obeys, but for tabs and line feeds."""


def shown(text: str, *, one_line: bool = False) -> str:
    """A text for a terminal: names and words may be a stranger's, and hold what would command it."""
    clean = _CONTROL.sub("\ufffd", text)
    return clean.replace("\n", "\ufffd") if one_line else clean


def say(text: object) -> bool:
    """Print a line to standard output at once; False if it could not be written."""
    print(text, flush=True)
    return why_unheard() is None


def why_unheard() -> OSError | None:
    """Error of the last line to standard output; None if that was written, or if there is no standard output."""
    error: OSError | None = getattr(sys.stdout, "error", None)
    return error


class _Forgiving:
    """A text stream, if there is any, that keeps the error of a write that failed in place of raising it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.error: OSError | None = None  # of the last line
        self._has_written = False  # since that

    def write(self, text: str) -> int:
        if self._stream is not None:
            with self._noting():
                try:
                    self._stream.write(text)
                except UnicodeEncodeError:
                    encoding = self._stream.encoding
                    self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
                self._has_written = self._has_written or bool(text)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            with self._noting():
                self._stream.flush()
                if self._has_written and not isinstance(self.error, BrokenPipeError):
                    self.error = None  # a disk that was full has room again

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error, self._has_written = error, False
        except ValueError as error:  # closed
            self.error, self._has_written = OSError(errno.EBADF, str(error)), False

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        if self._stream is None and name == "fileno":
            raise OSError(errno.EBADF, "there is no stream")
        return getattr(self._stream, name)

    def give_up(self) -> None:
        """Let what was not written go: Python flushes it once more as it ends, and complains."""
        if self.error is not None and self._stream is not None:
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


@contextmanager
def standard_streams() -> Iterator[None]:
    """Have no write to standard output or error raise in the block. If not all was said, SystemExit takes the place of
    status 0: 141 for a pipe that nobody reads, else 1 after one line."""
    for number in range(3):
        # What is opened later, such as a socket, must not get the number of a stream that is missing.
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr
    out, error = _Forgiving(sys.stdout), _Forgiving(sys.stderr)
    sys.stdout, sys.stderr = out, error
    status: object = 0
    try:
        yield
    except SystemExit as exit_:
        status = exit_.code
        raise
    except BaseException:
        status = 1
        raise
    finally:
        out.flush()
        if out.error is not None and not status:
            if not isinstance(out.error, BrokenPipeError):
                print(f"error: standard output cannot be written: {out.error.strerror}", file=error)
            status = _UNREAD_STATUS if isinstance(out.error, BrokenPipeError) else 1
        else:
            status = None
        error.flush()
        sys.stdout, sys.stderr = before
        out.give_up()
        error.give_up()
        if status:
            sys.exit(status)
