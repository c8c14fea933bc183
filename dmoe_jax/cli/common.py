"""What every subcommand shares: command lines read and written, one-line errors, setting up JAX."""

import contextlib
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
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import trio
import tyro

from dmoe_jax.cache_folder import cache_folder
from dmoe_jax.cli.flags import advice, as_words, flags_of, help_page, meant, without_idle
from dmoe_jax.cores import usable_cores
from dmoe_jax.freed_memory import keep_freed_memory
from dmoe_jax.xla_threads import xla_threads

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class UsageError(Exception):
    """A mistake of the user's; the message is the one line that is printed."""

    status = 2
    """Exit status of the command."""


class CommandFailed(UsageError):
    """The command could not do what it was rightly asked for; the message is the one line that is printed."""

    status = 1


@contextlib.contextmanager
def mistakes_in_one_line() -> Iterator[None]:
    """Turn what a wrong setting or a damaged file raises in the block into a `UsageError`, a full disk into a
    `CommandFailed`."""
    try:
        yield
    except ValueError as error:
        raise UsageError(one_line(error)) from error
    except OSError as error:
        raise CommandFailed(one_line(error)) from error


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
    exist the line names the one that was probably meant, or the command that has it, and the help page.
    """
    words, box = list(sys.argv[1:] if args is None else args), io.StringIO()
    config = (tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagCreatePairsOff)
    commands = _commands_of(command)
    name = words[0] if words and words[0] in commands else ""
    if name in commands:
        words = without_idle(words, flags_of(commands[name]))
    page = io.StringIO() if name in commands and {"--help", "-h"} & {*words} else None
    try:
        with contextlib.redirect_stderr(box), contextlib.redirect_stdout(page or sys.stdout), _unwrapped(page):
            return tyro.cli(command, prog=prog, description=description, args=words, config=config)
    except SystemExit as exit_:
        if not exit_.code:
            if page is not None:
                print(help_page(page.getvalue(), {flag.word: flag.group for flag in flags_of(commands[name])}), end="")
            raise
        known = {each: [flag.word for flag in flags_of(cls)] for each, cls in commands.items()}
        fail(_line_of_box(box.getvalue(), prog, words, known), status=2, prog=prog)
    except ValueError as error:  # a dataclass did not take its fields
        fail(str(error), status=2, prog=prog)


def _commands_of(command: Any) -> dict[str, type]:
    """The dataclasses that a command line may be read into, by the word that chooses one; "" for a lone one."""
    if isinstance(command, type):
        return {"": command}
    return {config.name: get_args(each)[0] for each in get_args(command) for config in each.__metadata__}


@contextlib.contextmanager
def _unwrapped(page: io.StringIO | None) -> Iterator[None]:
    """Have tyro wrap nothing in the block, unless the page is None."""
    before = os.environ.get("COLUMNS")
    if page is not None:
        os.environ["COLUMNS"] = "9999"
    try:
        yield
    finally:
        if page is not None:
            del os.environ["COLUMNS"]
            os.environ |= {} if before is None else {"COLUMNS": before}


def _line_of_box(box: str, prog: str, words: Sequence[str], known: Mapping[str, Sequence[str]]) -> str:
    """Tyro's error box as one line. Its first line is the title; it is drawn with lines or, in ASCII, with hyphens."""
    lines = [line.strip(" │╭╮╰╯─") for line in box.splitlines()[1:]]
    text = "\n".join(line if line.strip("-") else "" for line in lines).strip()
    mistake = " ".join(text.partition("\n\n")[0].split()).rstrip(".") or "unusable arguments"
    command = words[0] if "" not in known and words and not words[0].startswith("-") else ""
    page = f"{prog} {command}".strip()
    if not mistake.startswith("Unrecognized"):
        return f"{mistake}; see {page} --help"
    if command not in known:
        guess = meant(command, [*known])
        return f"{mistake}; {f'did you mean {guess}? See' if guess else 'see'} {prog} --help"
    unknown = [
        flag for word in words if (flag := word.partition("=")[0]).startswith("--") and flag not in known[command]
    ]
    given = re.findall(r"[^\s,]+", re.sub(r"Unrecognized[^:]*:|\(applied to [^)]*\)", "", mistake))
    advised = advice(unknown[0], command, known, prog) if unknown else ""
    more = f"{advised}{' See' if advised.endswith('?') else '; see'}" if advised else "see"
    return f"Unrecognized options: {', '.join(given)}; {more} {page} --help"


def changed(options: "DataclassInstance") -> dict[str, Any]:
    """The fields whose values are not the defaults; every field must have one."""
    default = type(options)()
    names = [each.name for each in fields(options)]
    return {name: getattr(options, name) for name in names if getattr(options, name) != getattr(default, name)}


def as_flags(values: Mapping[str, object]) -> list[str]:
    """Values by the names of their fields as words of a command line; see `as_words`."""
    return [word for name, value in values.items() for word in as_words(flag_of(name), value)]


def flag_of(name: str) -> str:
    """The flag of a field, which may be one of a nested dataclass: "calls.k_best" becomes "--k-best"."""
    return f"--{name.rpartition('.')[2].replace('_', '-')}"


def check_at_least(least: int, options: object, *names: str) -> None:
    """Raise `UsageError` for the first of these fields whose value is below `least`, or no number."""
    for name in names:
        if not getattr(options, name) >= least:
            raise UsageError(f"{flag_of(name)} must be at least {least}, got {getattr(options, name)}")


_MOST_SEED = 2**32 - 1
"""JAX makes a key of 32 bits of a seed."""


def check_seed(options: object, *names: str, more: int = 0) -> None:
    """Raise `UsageError` for the first of these fields that is no seed; None is left to its default.

    Args:
      more: is added to it later on, for the last of several processes.
    """
    for name in names:
        seed = getattr(options, name)
        if seed is not None and not 0 <= seed <= _MOST_SEED - more:
            raise UsageError(f"{flag_of(name)} must be from 0 to {_MOST_SEED - more}, got {seed}")


def check_positive(options: object, *names: str) -> None:
    """Raise `UsageError` for the first of these fields whose value is not above 0."""
    for name in names:
        if not getattr(options, name) > 0:
            raise UsageError(f"{flag_of(name)} must be positive, got {getattr(options, name)}")


def check_needs(needed: str, is_there: bool, options: "DataclassInstance", *names: str) -> None:
    """Raise `UsageError` for the first of these fields that is changed although what it is for is not there.

    Args:
      needed: the flags that these fields are for, as the user writes them.
      is_there: True if they are given.
      options: a dataclass; each of these fields has a default value.
    """
    defaults = {each.name: each.default for each in fields(options)}
    for name in names:
        value = getattr(options, name)
        if not is_there and value != defaults[name]:
            flag = flag_of(f"no_{name}" if value is False else name)
            raise UsageError(f"{flag} is for {needed}: without, {value!r} would have no effect")


def set_up_jax() -> None:
    """Have freed memory kept (`keep_freed_memory`) and XLA's results, so that a process started again compiles nothing.

    Compiled code is for one processor type, hence a folder for each machine. `DMOE_XLA_CACHE` names another place;
    empty turns the cache off, and so does a user without a home. Of a GPU's memory the process takes what it needs and
    no more: by itself JAX takes three quarters at once, and a second process finds none.
    `XLA_PYTHON_CLIENT_PREALLOCATE` says otherwise.
    """
    keep_freed_memory()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    caches = cache_folder()
    default = "" if caches is None else str(caches / f"xla-{platform.node()}")
    folder = os.environ.get("DMOE_XLA_CACHE", default)
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
