"""Checks of flags that several commands share. Each raises `UsageError` for the first flag that fails it."""

from collections.abc import Iterable
from pathlib import Path

from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.flags import Flag, flag_of

_MOST_SEED = 2**32 - 1
"""JAX makes a key of 32 bits of a seed."""


def check_at_least(least: int, options: object, *names: str) -> None:
    """Check that these fields are numbers of at least `least`."""
    for name in names:
        if not getattr(options, name) >= least:
            raise UsageError(f"{flag_of(name)} must be at least {least}, got {getattr(options, name)}")


def check_positive(options: object, *names: str) -> None:
    """Check that these fields are above 0."""
    for name in names:
        if not getattr(options, name) > 0:
            raise UsageError(f"{flag_of(name)} must be positive, got {getattr(options, name)}")


def check_seed(options: object, *names: str, more: int = 0) -> None:
    """Check that these fields are seeds or None; `more` is added later on, for the last of several processes."""
    for name in names:
        seed = getattr(options, name)
        if seed is not None and not 0 <= seed <= _MOST_SEED - more:
            raise UsageError(f"{flag_of(name)} must be from 0 to {_MOST_SEED - more}, got {seed}")


def text_of(flag: str, path: Path) -> str:
    """The text in a file that a flag names. Raises UsageError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path}: {getattr(error, 'strerror', None) or error}") from error


def check_needs(needed: str, is_there: bool, flags: Iterable[Flag]) -> None:
    """Check that none of these flags is changed unless `needed`, the flags that they are for, is there."""
    for flag in flags:
        if not is_there and flag.is_changed:
            word = flag.word.replace("--", "--no-", 1) if flag.value is False else flag.word
            raise UsageError(f"{word} is for {needed}: without, {flag.value!r} would have no effect")


def check_no_effect(beside: str, flags: Iterable[Flag]) -> None:
    """Check that none of these flags is changed beside another one that takes its place."""
    for flag in flags:
        if flag.is_changed:
            raise UsageError(f"{flag.word} would have no effect beside {beside}")
