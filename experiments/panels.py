"""Colours and dashes of things side by side."""

from typing import Any

from dmoe_jax.runs.style import INK, KILLED, TRAIN, VALID

SERIES = (VALID, KILLED, "#009E73", "#CC79A7", TRAIN, "#56B4E9", INK)
"""Colours of things side by side."""
DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
"""Once the colours are used up they come again in these dashes."""


def series_style(index: int) -> tuple[str, Any]:
    """Colour and dashes of the line with this number, different for the first 28."""
    return SERIES[index % len(SERIES)], DASHES[index // len(SERIES) % len(DASHES)]
