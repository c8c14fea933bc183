"""The flags of a command as its dataclasses have them: their names, groups and values, a help page, and guesses."""

import dataclasses
import difflib
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import tyro

_TITLES = {"language": "model", "calls": "calls of experts", "run_length": "run", "expert": "layer"}
"""Name of the field that holds a group of flags -> the group's title on the help page, if that is another."""

_INLINE = {
    *("budget", "code", "copies", "folder", "hand", "kind", "learning", "meeting", "outer", "recipe", "report"),
    *("saving", "serving", "sparse", "swarm"),
}
"""Fields whose flags stand among those of the group that has the field."""

_LAST_TITLES = ("averaging", "listening", "network", "metrics", "devices")
"""Groups that most users never need, at the end of the page."""

_WIDEST_PAGE = 100


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a command."""

    word: str
    """As it is typed: "--k-best"."""
    field: str
    """Name of its field: "k_best"."""
    hint: Any
    """Type of the field."""
    path: tuple[str, ...]
    """Fields that lead to its group of flags."""
    value: Any
    """Its value; the default where only the class is known."""
    default: Any

    @property
    def key(self) -> str:
        """Name in files, as of `key_of`."""
        return key_of(self.word)

    @property
    def is_changed(self) -> bool:
        """True if it is not as it is by default."""
        return bool(self.value != self.default)

    @property
    def group(self) -> str:
        """Title of its group on a help page."""
        return _TITLES.get(self.path[-1], self.path[-1].replace("_", " ")) if self.path else "options"


_D = TypeVar("_D", bound=type)


def named_flags(*only: str, prefix: str = "", **names: str) -> Callable[[_D], _D]:
    """Decorator of a dataclass whose fields, inherited ones too, are flags of a command by other names than their own.

    Args:
      only: the fields that are flags, the others keep their defaults; none: all are.
      prefix: goes before the name of each.
      names: field -> name of its flag.
    """

    def give(cls: _D) -> _D:
        hints = get_type_hints(cls, include_extras=True)
        for name in (each.name for each in dataclasses.fields(cls)):
            if only and name not in only:
                # By a name that no flag has: it counts for tyro, though nobody can give it.
                hidden = tyro.conf.arg(name=f"{cls.__name__}.{name}")
                cls.__annotations__[name] = tyro.conf.Fixed[tyro.conf.Suppress[Annotated[hints[name], hidden]]]  # type: ignore[misc, valid-type]
            elif prefix or name in names:
                word = prefix + names.get(name, name)
                cls.__annotations__[name] = Annotated[hints[name], tyro.conf.arg(name=word)]
        return cls

    return give


def flags_of(options: Any, path: tuple[str, ...] = ()) -> Iterator[Flag]:
    """Every flag of a dataclass or of an instance of one, those of the dataclasses in its fields too."""
    cls = options if isinstance(options, type) else type(options)
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint, marks = hints[field.name], getattr(hints[field.name], "__metadata__", ())
        inner = get_args(hint)[0] if marks else hint
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = default if options is cls else getattr(options, field.name)
        if dataclasses.is_dataclass(inner):
            yield from flags_of(
                inner if options is cls else value, path if field.name in _INLINE else (*path, field.name)
            )
        elif not _NO_FLAGS & {id(mark) for mark in marks}:
            # Of several names the last counts, as for tyro.
            name = ([field.name] + [mark.name for mark in marks if getattr(mark, "name", None)])[-1]
            yield Flag(flag_of(name), field.name, inner, path, value, default)


_NO_FLAGS = {
    id(mark)
    for each in (tyro.conf.Fixed[int], tyro.conf.Positional[int])
    for mark in each.__metadata__  # type: ignore[attr-defined]
}


def settings_of(options: Any, *, without: Collection[str] = ()) -> dict[str, Any]:
    """The values of all flags but some by their keys, each group's in a map of its own, for config.json."""
    settings: dict[str, Any] = {}
    for flag in flags_of(options):
        if flag.word not in without:
            group = settings
            for name in flag.path:
                group = group.setdefault(name, {})
            group[flag.key] = flag.value
    return settings


def by_flags(message: str, flags: Iterable[Flag]) -> str:
    """A message about fields as one about their flags: "k_min must not exceed k_best" has --k-min and --k-best then.
    Fields whose name is an ordinary word are recognised only where the message begins."""
    words = {flag.field: flag.word for flag in flags}
    return re.sub(
        r"(?<![\w.-])[a-z]\w*",
        lambda found: words.get(found[0], found[0]) if "_" in found[0] or not found.start() else found[0],
        message,
    )


def as_words(word: str, value: object) -> list[str]:
    """A flag and its value as words of a command line: `--grid-size 4 4`, `--resume`, `--no-average-by-samples`. A
    value that begins with a hyphen, which alone would be read as a flag, is in one word with its own."""
    if isinstance(value, bool):
        return [word if value else f"--no-{word.removeprefix('--')}"]
    if not isinstance(value, list | tuple) and str(value).startswith("-"):
        return [f"{word}={value}"]
    return [word, *map(str, value if isinstance(value, list | tuple) else (value,))]


def as_flags(values: Mapping[str, object]) -> list[str]:
    """Values by the names of their flags as words of a command line; see `as_words`."""
    return [word for name, value in values.items() for word in as_words(flag_of(name), value)]


def flag_of(name: str) -> str:
    """The flag of a key, which may be one of a nested map: "calls.k_best" becomes "--k-best"."""
    return f"--{name.rpartition('.')[2].replace('_', '-')}"


def key_of(word: str) -> str:
    """The key of a flag: "--k-best" becomes "k_best"."""
    return word.removeprefix("--").replace("-", "_")


def words_of(options: Any, *, without: Collection[str] = ()) -> list[str]:
    """The flags that are not as they are by default, as words of a command line."""
    changed = [flag for flag in flags_of(options) if flag.is_changed and flag.word not in without]
    return [word for flag in changed for word in as_words(flag.word, flag.value)]


def without_idle(words: Sequence[str], flags: Iterable[Flag]) -> list[str]:
    """The words without flags that switch on what is on by default, such as `--save-experts`, and without any
    `--no-save-experts` before them, which they undo."""
    kept = list(words)
    for flag in flags:
        if flag.default is True and flag.word in kept:
            last = len(kept) - kept[::-1].index(flag.word)
            opposite = as_words(flag.word, False)
            kept = [each for each in kept[:last] if each != flag.word and each not in opposite] + kept[last:]
    return kept


def help_page(page: str, groups: Mapping[str, str]) -> str:
    """Tyro's help page of one command, in which it wrapped nothing, with its flags under the titles of their groups."""
    head, *lines = re.split(r"\n(?= options *\n| positional arguments *\n)", page, maxsplit=1)
    entries: list[list[str]] = []
    for line in "\n".join(lines).splitlines():
        if re.match(r"  \S", line):
            entries.append([*re.split(r"  +", line.strip(), maxsplit=1)])
        elif re.match(r"    +\S", line) and entries:
            entries[-1].append(line.strip())
    width = min(_WIDEST_PAGE, shutil.get_terminal_size().columns)
    shown: dict[str, list[str]] = {}
    for invocation, *about in entries:
        flag = re.split(r"[ ,]", invocation)[0]
        group = groups.get(flag, groups.get(flag.replace("--no-", "--", 1), "options"))
        text = re.sub(r" \(default: (None|False|True|)\)$", "", " ".join(about))
        lines = textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)
        shown.setdefault(group, []).extend([f"  {invocation.replace('{None}|', '')}", *lines])
    paragraphs = [textwrap.fill(" ".join(each.split()), width) for each in head.strip().split("\n\n")]
    ordered = [*(each for each in shown if each not in _LAST_TITLES), *(each for each in _LAST_TITLES if each in shown)]
    return "\n\n".join([*paragraphs, *("\n".join([f"{group}:", *shown[group]]) for group in ordered)]) + "\n"


def meant(word: str, choices: Sequence[str]) -> str | None:
    """The choice that was probably meant: one that is written nearly so, or whose initials these are; None: none."""
    initials = {"--" + "".join(part[:1] for part in each[2:].split("-")): each for each in choices}
    near = difflib.get_close_matches(word, [each for each in choices if each != word], n=1)
    return initials.get(word) or (near[0] if near else None)


def advice(word: str, command: str, flags: Mapping[str, Sequence[str]], prog: str) -> str:
    """Advice on a flag `word` that a command does not have, by the `flags` of every command; empty if there is none."""
    if having := [name for name, words in flags.items() if word in words]:
        several = " and ".join(f"{prog} {name}" for name in having)
        handed = next((name for name in ("train", "node") if command == "up" and name in having), None)
        how = f": dmoe up --{handed}-flags='{word} ...' hands it on" if handed else ""
        return f"{word} is a flag of {several}{how}"
    guess = meant(word, flags.get(command, ()))
    return "" if guess is None else f"did you mean {guess}?"
