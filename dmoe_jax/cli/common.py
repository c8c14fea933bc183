"""What every subcommand shares: reading the command line, one-line errors, setting up JAX."""

import contextlib
import ctypes
import difflib
import io
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import tyro

from dmoe_jax.grid import check_prefix

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

    A mistake ends the process with status 2 and one line instead of tyro's box. For a flag or command that does not
    exist the line names the one that was probably meant, and the help page that lists them.
    """
    words = list(sys.argv[1:] if args is None else args)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return _read(command, prog, description, words, default)
    except SystemExit as exit_:
        if not exit_.code:
            raise
        page, names = _help_page(command, prog, words)
        message = f"{_first_paragraph(errors.getvalue())}{_suggestion(words, names)} {page} --help"
        fail(message, status=2, prog=prog)
    except ValueError as error:  # a dataclass did not take its fields
        fail(str(error), status=2, prog=prog)


def _read(command: Any, prog: str, description: str | None, words: list[str], default: Any = None) -> Any:
    given = {} if default is None else {"default": default}
    config = (tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagCreatePairsOff)
    return tyro.cli(command, prog=prog, description=description, args=words, config=config, **given)


def _first_paragraph(box: str) -> str:
    """The text in tyro's error box between its title and the next rule, as one line.

    Tyro draws the box with lines or, on a terminal without UTF-8, with hyphens; other versions may print none.
    """
    lines = [line.strip("│|╭╮╰╯ ") for line in box.splitlines()]
    texts = [(line, not line.strip("─-=")) for line in lines]
    # The title stands in the upper rule, or above a rule of its own.
    if box.startswith("╭") or (len(texts) > 1 and texts[1][1]):
        texts = texts[1:]
    words: list[str] = []
    for text, is_rule in texts:
        if is_rule and words:
            break
        if not is_rule:
            words += text.split()
    return " ".join(words).rstrip(".") or "unusable arguments"


def _help_page(command: Any, prog: str, words: list[str]) -> tuple[str, list[str]]:
    """The help page that fits a command line, and the flags or commands that it lists."""
    for path in ([words[:1]] if words and not words[0].startswith("-") else []) + [[]]:
        text = io.StringIO()
        try:
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
                _read(command, prog, None, [*path, "--help"])
        except SystemExit as exit_:
            usage = re.search(r"usage: (.*?)(?: \[|$)", text.getvalue(), re.MULTILINE)
            # An unknown subcommand, too, gets a page of help: that of the whole program.
            if not exit_.code and usage is not None and usage[1].split() == [*prog.split(), *path]:
                commands = re.search(r"\{([\w,-]+)\}", text.getvalue().partition("\n")[0])
                flags = re.findall(r"^\W*(--[a-z][\w-]*)", text.getvalue(), re.MULTILINE)
                return usage[1], flags + (commands[1].split(",") if commands and not path else [])
    return prog, []


def _suggestion(words: list[str], names: list[str]) -> str:
    """What to do about a mistake: use the known name that is most like an unknown word, or see the help page."""
    for index, word in enumerate(word.partition("=")[0] for word in words):
        if word not in names and (word.startswith("--") or index == 0):
            for close in difflib.get_close_matches(word, names, n=1, cutoff=0.75):
                return f"; did you mean {close}? See"
    return "; see"


def check_swarm_name(name: str) -> None:
    """Check what --swarm was given.

    Raises:
      UsageError: no swarm can be called so.
    """
    try:
        check_prefix(name)
    except ValueError as error:
        raise UsageError(f"--swarm must be 1 to 64 letters, digits, '_' or '-', got {name!r}") from error


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

    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    default = caches / "dmoe_jax" / f"xla-{platform.node()}"
    folder = os.environ.get("DMOE_XLA_CACHE", str(default))
    if folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
