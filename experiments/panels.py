"""Panels that several experiments draw: figures beside the bar that they must reach."""

from collections.abc import Sequence
from statistics import median

from matplotlib.axes import Axes

from dmoe_jax.runs.style import GREY, INK, KILLED, VALID, dress, end_labels
from experiments.results import Bar


def draw_ratios(axes: Axes, title: str, columns: Sequence[tuple[str, Sequence[float]]], bar: Bar) -> None:
    """Draw the median of each column, its rounds as dots, and the bar that all of them must reach.

    Args:
      axes: where.
      title: of the panel.
      columns: of each the text below it, and its ratios round by round.
      bar: of all columns.
    """
    for place, (_, ratios) in enumerate(columns):
        axes.bar(place, median(ratios), color=VALID, width=0.6)
        axes.plot([place] * len(ratios), ratios, "o", color=INK, markersize=2.5, alpha=0.6)
        axes.text(place, median(ratios), f" {median(ratios):.2f}", fontsize=9, color=INK, va="bottom")
    axes.axhline(bar.bound, color=KILLED, linestyle="--", linewidth=1.2)
    side = "at most" if bar.comparison == "<=" else "at least"
    in_panel = axes.get_yaxis_transform()
    axes.annotate(
        f"{side} {bar.bound:g}",
        (0.99, bar.bound),
        (0, 2),
        xycoords=in_panel,
        textcoords="offset points",
        fontsize=8,
        color=KILLED,
        ha="right",
        va="bottom",
        # It may lie upon a column.
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )
    ticks = [(place, text) for place, (text, _) in enumerate(columns) if text]
    axes.set_xticks([place for place, _ in ticks], [text for _, text in ticks])
    axes.set_xlim(-0.6, len(columns) - 0.4)
    axes.set_ylim(0, 1.15 * max(bar.bound, *(ratio for _, ratios in columns for ratio in ratios)))
    dress(axes, title, "")


def draw_rounds(
    axes: Axes, title: str, values: Sequence[float], *, reference: tuple[float, str], bar: tuple[float, str]
) -> None:
    """Draw a bar for each round, and two lines across: what to compare with, and what must be reached.

    Args:
      axes: where.
      title: of the panel, with the unit of the values.
      values: of each round.
      reference, bar: value and text of the lines.
    """
    numbers = range(1, len(values) + 1)
    axes.bar(numbers, values, color=VALID, width=0.6)
    labels = [(*reference, GREY), (*bar, KILLED)]
    for value, _, colour in labels:
        axes.axhline(value, color=colour, linestyle="--", linewidth=1.2)
    axes.set_xticks(list(numbers))
    axes.set_ylim(0, 1.15 * max(reference[0], bar[0], *values))
    dress(axes, title, "round")
    end_labels(axes, labels)
