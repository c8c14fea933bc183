"""A command line read into dataclasses: a mistake gets one line, and a help page its groups."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_args

import tyro

from dmoe_jax.runs.endings import fail
from dmoe_jax.runs.flags import advice, by_flags, flags_of, help_page, meant, without_idle


def parse_command_line(
    command: Any,
    *,
    prog: str,
    description: str | None = None,
    args: Sequence[str] | None,
    origins: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Read the command line (None: this process's) into `command`, a dataclass or a union of them, with tyro.

    A mistake ends the process with status 2 and one line instead of tyro's box. For a flag or command that does not
    exist the line names the one that was probably meant, or the command that has it, and the help page.

    Args:
      origins: flag that was not typed -> where it stands, which a line about it begins with.
    """
    words, box = list(sys.argv[1:] if args is None else args), io.StringIO()
    config = (tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.EnumChoicesFromValues)
    commands = commands_of(command)
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
        fail(_blamed(_line_of_box(box.getvalue(), prog, words, known), origins), status=2, prog=prog)
    except ValueError as error:  # a dataclass did not take its fields
        fail(_blamed(by_flags(str(error), flags_of(commands[name])), origins), status=2, prog=prog)


def commands_of(command: Any) -> dict[str, type]:
    """The dataclasses that a command line may be read into, by the word that chooses one; "" for a lone one."""
    if isinstance(command, type):
        return {"": command}
    return {config.name: get_args(each)[0] for each in get_args(command) for config in each.__metadata__}


def _blamed(line: str, origins: Mapping[str, str]) -> str:
    found = next((origins[word] for word in re.findall(r"--[\w-]+", line) if word in origins), None)
    return line if found is None else f"{found}: {line}"


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
