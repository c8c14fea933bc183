"""Sources of flags: the command line, then DMOE_<FLAG> in the environment, then a file that --config names.

The file is TOML, or the config.json of a run's folder. Its keys are flags without their hyphens, `learning_rate = 0.1`,
in tables of any name or none. Whatever the sources give becomes words of the command line, so that a value is read and
checked in one way wherever it stands.
"""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import tyro

from dmoe_jax.machine.environment import NO_FLAGS, PREFIX
from dmoe_jax.runs.command_line import parse_command_line
from dmoe_jax.runs.endings import UsageError, mistakes_in_one_line, one_line
from dmoe_jax.runs.flags import Flag, as_words, flags_of, key_of, meant, words_of
from dmoe_jax.runs.run_folder import flat, plain
from dmoe_jax.training.prepared_run import check_code

C = TypeVar("C")

_TEXT = "Flags from a file, TOML or a run's config.json, where neither the command line nor DMOE_<FLAG> gives them."

ConfigFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help=_TEXT)]
"""A file of flags, as each command takes it."""

_OF_ITS_PROCESS = ("join", "json", "exit_on_stdin_eof")
"""Settings in a run's config.json that another process does not take from it."""

_ANSWERS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Flags of all sources as words of a command line."""

    typed: Sequence[str]
    """Words of the command line itself."""
    environment: Sequence[str] = ()
    config: Sequence[str] = ()
    file: Path | None = None
    """File that the config is from."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Flag that was not typed -> where it stands: "DMOE_STEPS", "run.toml: steps"."""

    @property
    def words(self) -> list[str]:
        """All of them; no flag is there twice unless it was typed so."""
        return [*self.typed, *self.environment, *self.config]

    @property
    def named(self) -> list[str]:
        """Words that are this user's own, which a file may not be."""
        return [*self.typed, *self.environment]

    def check_code(self, *, is_trusted: bool, can_trust: bool) -> None:
        """Raise ValueError if code would be run only because the file names it."""
        if self.file is not None and not is_trusted:
            otherwise = ", or give --trust-run" if can_trust else ""
            check_code(self.file, self.config, named=self.named, otherwise=otherwise)

    def resumed(self, command: type[C], saved: Sequence[str], out: Path, *, prog: str, is_trusted: bool) -> C:
        """The command with the flags of the run in `out`, and with these. Raises UsageError if code would be run only
        because the run's folder names it."""
        found: C = parse_command_line(command, prog=prog, args=[*saved, *self.words], origins=self.origins)
        if not is_trusted:
            with mistakes_in_one_line():
                check_code(out, words_of(found), named=self.named)
        return found


def gather(command: type, typed: Sequence[str], environ: Mapping[str, str], *, name: str) -> Given:
    """The flags of a command from all sources; `typed` are the words behind its name. Raises UsageError naming what is
    no flag in a source, or a value of another type."""
    flags = {flag.key: flag for flag in flags_of(command)}
    given = {key_of(word.partition("=")[0].replace("--no-", "--", 1)) for word in typed if word.startswith("--")}
    origins: dict[str, str] = {}
    environment = []
    for key, flag in flags.items():
        variable = f"{PREFIX}{key.upper()}"
        if key not in given and variable not in NO_FLAGS and (text := environ.get(variable)):
            environment += _words(flag, _of_text(flag, text, variable), variable)
            origins[flag.word] = variable
    path = _config_path([*typed, *environment])
    config = []
    for key, value in () if path is None else _entries(path, getattr(command, "default_settings", dict)).items():
        if key not in flags or key == "config":
            guess = meant(key, [*flags])
            hint = f"; did you mean {guess}?" if guess else ""
            raise UsageError(f"{path}: dmoe {name} has no setting {key}{hint}")
        flag = flags[key]
        if key not in given and flag.word not in origins:
            words = _words(flag, value, f"{path}: {key}")
            config += words
            origins |= {flag.word: f"{path}: {key}"} if words else {}
    return Given(typed=typed, environment=environment, config=config, file=path, origins=origins)


def settings_of_run(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run by the keys of their flags. As in JSON, which has no infinity, None stands for it."""
    by_key = {name.rpartition(".")[2]: value for name, value in flat(plain(settings)).items()}
    return {key: value for key, value in by_key.items() if key not in _OF_ITS_PROCESS}


def changed(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Settings whose value is not that of `defaults`; those that are none there are kept."""
    return {key: value for key, value in settings.items() if key not in defaults or value != defaults[key]}


def _config_path(words: Sequence[str]) -> Path | None:
    found = ""
    for index, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag == "--config":
            found = value or next(iter(words[index + 1 :]), "")
    return Path(found) if found else None


def _entries(path: Path, defaults: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The settings in a file by the keys of their flags; of a run's config those that are not as by default."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return changed(settings_of_run(json.loads(text)["settings"]), defaults())
        return {key.rpartition(".")[2]: value for key, value in flat(tomllib.loads(text)).items()}
    except OSError as error:
        raise UsageError(f"--config: cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"--config: {path} is no file of flags: {one_line(error)}") from error


def _of_text(flag: Flag, text: str, variable: str) -> Any:
    if flag.hint is not bool:
        return text.split() if _is_several(flag) else text
    if text.lower() not in _ANSWERS:
        raise UsageError(f"{variable} must be true or false, got {text!r}")
    return _ANSWERS[text.lower()]


def _words(flag: Flag, value: Any, origin: str) -> list[str]:
    """A flag and its value as words, none for what it has by default; raises UsageError for another type of value."""
    if value is None:  # as config.json says of what is not set, or infinite
        return [] if flag.default is None else [flag.word, "inf"]
    if isinstance(value, bool) != (flag.hint is bool):
        raise UsageError(f"{origin} must {'be true or false' if flag.hint is bool else 'have a value'}, got {value!r}")
    if isinstance(value, list) and not _is_several(flag):
        raise UsageError(f"{origin} must be one value, got {value!r}")
    return [] if value is flag.default else as_words(flag.word, value)


def _is_several(flag: Flag) -> bool:
    """True if a flag takes several values."""
    return any(get_origin(each) is tuple for each in (flag.hint, *get_args(flag.hint)))
