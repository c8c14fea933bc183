"""What every subcommand shares: reading the command line, one-line errors, setting up JAX."""

import contextlib
import ctypes
import io
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import tyro

_MALLOPT = {
    -8: 1,  # M_ARENA_MAX: one heap for all threads; those of other arenas cannot hold a large buffer
    -4: 0,  # M_MMAP_MAX: large buffers come from the heap, too
    -1: -1,  # M_TRIM_THRESHOLD: what is freed at its end stays, however much
    -2: 64 << 20,  # M_TOP_PAD: it grows by this many bytes at least
}
"""For glibc's `mallopt`, see malloc.h."""


class UsageError(Exception):
    """A mistake of the user's; the message is the one line that is printed."""


@contextlib.contextmanager
def mistakes_in_one_line() -> Iterator[None]:
    """Turn what a wrong setting, a damaged file or a full folder raises in the block into a `UsageError`."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UsageError(one_line(error)) from error


def parse_command_line(
    command: Any, *, prog: str, description: str | None = None, args: Sequence[str] | None, default: Any = None
) -> Any:
    """Read the command line into `command` (a dataclass, or a union of them) with tyro.

    A mistake ends the process with status 2 and one line instead of tyro's box.
    """
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                command,
                prog=prog,
                description=description,
                args=args,
                **({} if default is None else {"default": default}),
                config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagCreatePairsOff),
            )
    except SystemExit as exit_:
        if not exit_.code:
            raise
        fail(f"{_first_paragraph(errors.getvalue())}; see {prog} --help", status=2, prog=prog)
    except ValueError as error:  # a dataclass did not take its fields
        fail(str(error), status=2, prog=prog)


def _first_paragraph(box: str) -> str:
    """The text in tyro's error box up to its first rule, as one line."""
    words: list[str] = []
    for line in box.splitlines():
        text = line.strip("│╭╮╰╯ ")
        if text.startswith("──") and words:
            break
        if not line.startswith("╭") and not text.startswith("──"):
            words += text.split()
    return " ".join(words).rstrip(".") or "unusable arguments"


def one_line(error: BaseException) -> str:
    """The first line of an error's message; libraries follow it with advice that fills a screen."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def fail(message: str, *, status: int = 1, prog: str = "dmoe") -> NoReturn:
    """Print one line to standard error and exit."""
    print(f"{prog}: error: {message}", file=sys.stderr)
    sys.exit(status)


def keep_freed_memory() -> bool:
    """Have glibc keep memory that is freed for the next buffer, instead of giving it back to the system.

    XLA on a CPU allocates the temporary buffers of every call. Those of a training step have hundreds of megabytes,
    which glibc maps and unmaps: the system clears each of their pages in every step, a third of the time of a small
    model. The process keeps the most memory that it ever had. Only threads that start later share the one heap: call
    it early.

    Returns: whether it was done; not on other C libraries, nor where the environment already directs malloc
      (`MALLOC_ARENA_MAX` and the like, or `GLIBC_TUNABLES`).
    """
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
        return False
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(option, value) == 1 for option, value in _MALLOPT.items())


def set_up_jax() -> None:
    """Have freed memory kept (`keep_freed_memory`) and XLA's results, so that a process started again compiles nothing.

    Compiled code is for one processor type, hence a folder for each machine. `DMOE_XLA_CACHE` names another place;
    empty turns the cache off.
    """
    keep_freed_memory()
    import jax

    default = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dmoe_jax" / f"xla-{os.uname().nodename}"
    )
    folder = os.environ.get("DMOE_XLA_CACHE", str(default))
    if folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
