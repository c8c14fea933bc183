"""Checks of flags that several commands share."""

from collections.abc import Iterable

from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.flags import Flag, flag_of


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


def check_needs(needed: str, is_there: bool, flags: Iterable[Flag]) -> None:
    """Raise `UsageError` for the first of these flags that is changed although what it is for is not there.

    Args:
      needed: the flags that these are for, as the user writes them.
      is_there: True if they are given.
    """
    for flag in flags:
        if not is_there and flag.is_changed:
            word = flag.word.replace("--", "--no-", 1) if flag.value is False else flag.word
            raise UsageError(f"{word} is for {needed}: without, {flag.value!r} would have no effect")


def check_no_effect(beside: str, flags: Iterable[Flag]) -> None:
    """Raise `UsageError` for the first of these flags that is changed although another one takes its place."""
    for flag in flags:
        if flag.is_changed:
            raise UsageError(f"{flag.word} would have no effect beside {beside}")
