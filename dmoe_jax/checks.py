"""Checks of sizes and rates that several settings share. Nothing here imports JAX: command lines read settings too."""

from numbers import Integral


def check_positive(**sizes: object) -> None:
    """Raise ValueError, naming the field and the value, unless every size is a positive integer."""
    for field, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{field} must be a positive integer, got {value!r}")


def check_rates(**rates: object) -> None:
    """Raise ValueError, naming the field and the value, unless every rate is in [0, 1)."""
    for field, rate in rates.items():
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
            raise ValueError(f"{field} must be a probability of at least 0 and below 1, got {rate!r}")
