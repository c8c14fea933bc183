"""How our figures look: few lines, text beside what it names, colours that survive colour blindness.

Colours are from Okabe and Ito's palette (2008), which stays apart under the common kinds of colour blindness.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

INK = "#222222"
GREY = "#6b6b6b"
FAINT = "#e4e4e4"
VALID = "#0072B2"
"""Blue: what the run is about."""
TRAIN = "#E69F00"
"""Orange: training."""
KILLED = "#D55E00"
"""Vermilion: what was lost."""

_LABEL_GAP = 0.075
"""Least distance of two labels beside an axes, as part of its height: one line of 9 point text."""


def dress(axes: Axes, title: str, x_label: str) -> None:
    """Title at the left with room for a line of labels under it, no box, quiet ticks."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=16)
    axes.set_xlabel(x_label, fontsize=9, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(labelsize=9, colors=GREY)
    axes.set_axisbelow(True)


def say_empty(axes: Axes, text: str) -> None:
    """Replace the panel by a sentence on why it is empty."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel("")
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=10, color=GREY)


def end_labels(axes: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
    """Write (value, text, colour) beside the axes, each as near to its value's height as room allows."""
    if not labels:
        return
    ordered = sorted(labels, key=lambda label: label[0])
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [float(to_axes.transform((0.0, value))[1]) for value, _, _ in ordered]
    for height, (_, text, colour) in zip(spread(heights, _LABEL_GAP), ordered, strict=True):
        axes.text(1.012, height, text, transform=axes.transAxes, va="center", fontsize=9, color=colour)


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move sorted heights as little as needed (least squares) for neighbours to be `gap` apart.

    Subtracting i * gap turns "at least gap apart" into "not falling", which pooling adjacent violators solves.
    """
    pools: list[tuple[float, int]] = []
    for index, height in enumerate(heights):
        total, count = height - index * gap, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            pool_total, pool_count = pools.pop()
            total, count = total + pool_total, count + pool_count
        pools.append((total, count))
    levels = np.concatenate([np.full(count, total / count) for total, count in pools]) if pools else np.empty(0)
    return [float(level) + index * gap for index, level in enumerate(levels)]
