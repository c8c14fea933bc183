"""Panels that several experiments draw: figures beside the bar that they must reach."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dmoe_jax.runs.style import GREY, INK, KILLED, TRAIN, VALID, dress, end_labels, short
from experiments.results import Bar

SERIES = (VALID, KILLED, "#009E73", "#CC79A7", TRAIN, "#56B4E9", INK)
"""Colours of things side by side."""
DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
"""Once the colours are used up they come again in these dashes."""


def series_style(index: int) -> tuple[str, Any]:
    """Colour and dashes of the line with this number, different for the first 28."""
    return SERIES[index % len(SERIES)], DASHES[index // len(SERIES) % len(DASHES)]


def ratio_figure(
    panels: Sequence[tuple[str, Mapping[str, Sequence[float]], Bar]], *, first_label: str, last_label: str
) -> Figure:
    """Draw a panel for each bar: the medians of the ratios that must reach it, with their rounds as dots.

    Args:
      panels: of each its title, the ratios round by round by the text below their column, and the bar.
      first_label, last_label: what the ratios of the first panels and of the last one are.
    """
    widths = [2 + len(columns) for _, columns, _ in panels]
    figure = Figure(figsize=(0.5 + sum(widths), 3.5), layout="constrained")
    all_axes = figure.subplots(1, len(panels), width_ratios=widths, squeeze=False)[0]
    for axes, (title, columns, bar) in zip(all_axes, panels, strict=True):
        _draw_ratios(axes, columns, bar)
        dress(axes, title, "")
    all_axes[0].set_ylabel(first_label, fontsize=9, color=GREY)
    all_axes[-1].set_ylabel(last_label, fontsize=9, color=GREY)
    return figure


def _draw_ratios(axes: Axes, columns: Mapping[str, Sequence[float]], bar: Bar) -> None:
    for place, ratios in enumerate(columns.values()):
        axes.bar(place, median(ratios), color=VALID, width=0.6)
        axes.plot([place] * len(ratios), ratios, "o", color=INK, markersize=2.5, alpha=0.6)
        text = short(median(ratios))
        axes.text(place, median(ratios) / 2, text, fontsize=9, color="white", ha="center", va="center")
    axes.axhline(bar.bound, color=KILLED, linestyle="--", linewidth=1.2)
    axes.set_xticks(range(len(columns)), list(columns))
    axes.set_xlim(-0.6, len(columns) - 0.4)
    axes.set_ylim(0, 1.15 * max(bar.bound, *(ratio for ratios in columns.values() for ratio in ratios)))
    end_labels(axes, [(bar.bound, f"{'at most' if bar.comparison == '<=' else 'at least'} {bar.bound:g}", KILLED)])
