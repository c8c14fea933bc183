"""The look of our figures: few lines, text beside what it names, colours of Okabe and Ito (2008)."""

import re
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

INK = "#222222"
GREY = "#6b6b6b"
FAINT = "#e4e4e4"
VALID = "#0072B2"
"""Blue: what the run is about."""
TRAIN = "#E69F00"
"""Orange: training."""
KILLED = "#D55E00"
"""Vermilion: what was lost."""

Label = tuple[float, str, str]
"""Text beside an axes: the value that it names, the text, its colour."""

LABEL_GAP = 0.075
"""Least distance of two labels beside an axes, as part of its height: one line of 9 point text beside two inches."""


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


def end_labels(axes: Axes, labels: Sequence[Label], *, gap: float = LABEL_GAP) -> None:
    """Write (value, text, colour) beside the axes, whose limits are set, each as near to its value as `gap` allows."""
    if not labels:
        return
    ordered = sorted(labels, key=lambda label: label[0])
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [float(to_axes.transform((0.0, value))[1]) for value, _, _ in ordered]
    for height, (_, text, colour) in zip(spread(heights, gap, 0.0, 1.0), ordered, strict=True):
        axes.text(1.012, height, text, transform=axes.transAxes, va="center", fontsize=9, color=colour)


def baseline(axes: Axes, value: float, name: str) -> Label:
    """A dashed line across the axes; returns its label."""
    axes.axhline(value, color=GREY, linewidth=1.1, linestyle=(0, (5, 3)), zorder=1)
    return value, f"{name} {short(value)}", GREY


def cap(axes: Axes, labels: Sequence[Label], top: float) -> None:
    """End the axes at `top`, unless something that has a label would be cut off."""
    if max(value for value, _, _ in labels) <= top:
        axes.set_ylim(top=min(axes.get_ylim()[1], top))


def plain_log_ticks(axes: Axes) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, written out; more of them on a short axis."""
    low, high = axes.get_ylim()
    subs = (1.0, 2.0, 5.0) if high / low > 30 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    # Between two such ticks a log axis is as good as linear.
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=subs) if high / low > 2 else MaxNLocator(nbins=5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", which="minor", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, steps=[1, 2, 5, 10], integer=True))
    axes.grid(axis="y", color=FAINT, linewidth=0.8)


def natural_order(name: str) -> list[tuple[str, int]]:
    """Sorting key under which layer10 follows layer9."""
    return [(letters, int(digits or -1)) for letters, digits in re.findall(r"([^0-9]*)([0-9]*)", name)]


def short(value: float) -> str:
    """Three significant digits, whole numbers from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move sorted heights for neighbours to be `gap` apart and all between the bounds, if there is room for that."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + gap if moved else low))
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], high)
        high = moved[index] - gap
    return moved
