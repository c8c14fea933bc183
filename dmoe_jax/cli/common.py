"""What every subcommand shares: command lines read and written, one-line errors, setting up JAX."""

import contextlib
import difflib
import gc
import inspect
import io
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import trio
import tyro

from dmoe_jax.cores import usable_cores
from dmoe_jax.freed_memory import keep_freed_memory
from dmoe_jax.xla_threads import xla_threads

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class UsageError(Exception):
    """A mistake of the user's; the message is the one line that is printed."""


@contextlib.contextmanager
def mistakes_in_one_line() -> Iterator[None]:
    """Turn what a wrong setting, a damaged file or a full folder raises in the block into a `UsageError`."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UsageError(one_line(error)) from error


def one_line(error: BaseException) -> str:
    """The first line of an error's message; libraries follow it with advice that fills a screen."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def fail(message: str, *, status: int = 1, prog: str = "dmoe") -> NoReturn:
    """Print one line to standard error and exit."""
    print(f"{prog}: error: {message}", file=sys.stderr)
    sys.exit(status)


def parse_command_line(command: Any, *, prog: str, description: str | None = None, args: Sequence[str] | None) -> Any:
    """Read the command line (None: this process's) into `command`, a dataclass or a union of them, with tyro.

    A mistake ends the process with status 2 and one line instead of tyro's box. For a flag or command that does not
    exist the line names the one that was probably meant, and the help page that lists them.
    """
    words, box = list(sys.argv[1:] if args is None else args), io.StringIO()
    config = (tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagCreatePairsOff)
    try:
        with contextlib.redirect_stderr(box):
            try:
                return tyro.cli(command, prog=prog, description=description, args=words, config=config)
            finally:
                sys.stdout.flush()  # here, and not when Python ends, it may fail
    except BrokenPipeError:
        _end_unread()
    except SystemExit as exit_:
        if not exit_.code:
            raise
        has_commands = not isinstance(command, type) and bool(words) and not words[0].startswith("-")
        fail(_line_of_box(box.getvalue(), prog, words[0] if has_commands else ""), status=2, prog=prog)
    except ValueError as error:  # a dataclass did not take its fields
        fail(str(error), status=2, prog=prog)


def _end_unread() -> NoReturn:
    """Whoever was to read our output has gone, as `head` does: end as a process that the signal for it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more
    sys.exit(128 + 13)


def _line_of_box(box: str, prog: str, command: str) -> str:
    """Tyro's error box as one line. Its first line is the title; it is drawn with lines or, in ASCII, with hyphens."""
    lines = [line.strip(" │╭╮╰╯─") for line in box.splitlines()[1:]]
    text = "\n".join(line if line.strip("-") else "" for line in lines).strip()
    mistake = " ".join(text.partition("\n\n")[0].split()).rstrip(".") or "unusable arguments"
    commands = re.search(r"Available subcommands: ([\w,\s-]+?)(\n\n|$)", text)
    if commands is not None:
        meant = difflib.get_close_matches(command, re.split(r",\s+", commands[1]), n=1)
    else:
        meant = re.findall(r"Perhaps you meant:\s+(--[\w-]+)", text)
        prog = f"{prog} {command}".strip()
    return f"{mistake}; {f'did you mean {meant[0]}? See' if meant else 'see'} {prog} --help"


def changed(options: "DataclassInstance") -> dict[str, Any]:
    """The fields whose values are not the defaults; every field must have one."""
    default = type(options)()
    names = [each.name for each in fields(options)]
    return {name: getattr(options, name) for name in names if getattr(options, name) != getattr(default, name)}


def as_flags(values: Mapping[str, object]) -> list[str]:
    """Values by the names of their fields as words of a command line.

    `{"grid_size": (4, 4), "resume": True, "average_by_samples": False}` becomes
    `--grid-size 4 4 --resume --no-average-by-samples`.
    """
    words = []
    for name, value in values.items():
        words.append(flag_of(name, "no-" if value is False else ""))
        if not isinstance(value, bool):
            words += [str(item) for item in (value if isinstance(value, list | tuple) else (value,))]
    return words


def flag_of(name: str, prefix: str = "") -> str:
    """The flag of a field, which may be one of a nested dataclass: "calls.k_best" becomes "--k-best"."""
    return f"--{prefix}{name.rpartition('.')[2].replace('_', '-')}"


def check_at_least(least: int, options: object, *names: str) -> None:
    """Raise `UsageError` for the first of these fields whose value is below `least`, or no number."""
    for name in names:
        if not getattr(options, name) >= least:
            raise UsageError(f"{flag_of(name)} must be at least {least}, got {getattr(options, name)}")


def check_positive(options: object, *names: str) -> None:
    """Raise `UsageError` for the first of these fields whose value is not above 0."""
    for name in names:
        if not getattr(options, name) > 0:
            raise UsageError(f"{flag_of(name)} must be positive, got {getattr(options, name)}")


def check_needs(needed: str, is_there: bool, options: "DataclassInstance", *names: str) -> None:
    """Raise `UsageError` for the first of these fields that is not as by default, unless what it is for is there.

    Args:
      needed: the flags that it is for, as the user writes them.
      options: a dataclass; each of these fields has a default value.
    """
    defaults = {each.name: each.default for each in fields(options)}
    for name in names:
        value = getattr(options, name)
        if not is_there and value != defaults[name]:
            flag = flag_of(name, "no-" if value is False else "")
            raise UsageError(f"{flag} is for {needed}: without, {value!r} would have no effect")


def set_up_jax() -> None:
    """Have freed memory kept (`keep_freed_memory`) and XLA's results, so that a process started again compiles nothing.

    Compiled code is for one processor type, hence a folder for each machine. `DMOE_XLA_CACHE` names another place;
    empty turns the cache off. Of a GPU's memory the process takes what it needs and no more: by itself JAX takes three
    quarters at once, and a second process finds none. `XLA_PYTHON_CLIENT_PREALLOCATE` says otherwise.
    """
    keep_freed_memory()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    default = caches / "dmoe_jax" / f"xla-{platform.node()}"
    folder = os.environ.get("DMOE_XLA_CACHE", str(default))
    if folder:
        if (threads := xla_threads()) != usable_cores():
            # Programs are divided among so many, which the names of JAX's files do not say.
            folder = str(Path(folder) / f"threads-{threads}")
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    keep_interrupts_out_of_collections()


def keep_interrupts_out_of_collections() -> None:
    """Have trio deliver a Ctrl-C that comes during a garbage collection when that is over.

    JAX has Python call it then, and what is raised in such a call is lost: the program would go on as if nobody had
    pressed anything.
    """
    for callback in gc.callbacks:
        if inspect.isfunction(callback):
            trio.lowlevel.enable_ki_protection(callback)
