"""Checks of flags that several commands share."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.flags import flag_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def changed(options: "DataclassInstance") -> dict[str, Any]:
    """The fields whose values are not the defaults; every field must have one."""
    default = type(options)()
    names = [each.name for each in fields(options)]
    return {name: getattr(options, name) for name in names if getattr(options, name) != getattr(default, name)}


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
