"""The pictures of `dmoe inspect`. Drawn without `pyplot`, so nothing global is touched and no display is needed."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from dmoe_jax.inspection.panels import Panel
from dmoe_jax.inspection.statistics import Lift
from dmoe_jax.runs.style import GREY, INK, KILLED, VALID, dress

MAX_ROWS, MAX_LAYERS = 32, 6
"""Experts in a picture, those that are asked most; and layers that have one, evenly spaced."""

_LIMIT = 2.0
"""Binary logarithm of the lifts that have colours of their own, from a quarter to four."""

_LARGEST_ERROR = 1 / 3
"""Lifts with a larger standard error have no colour, unless they are told apart from 1 all the same."""

_LIFTS = LinearSegmentedColormap.from_list("lift", [KILLED, "#ffffff", VALID])
_NOTHING = "#d9d9d9"
"""Where there is nothing to compare."""


def shown_layers(count: int) -> list[int]:
    """The layers that are drawn, of so many."""
    return sorted({int(layer) for layer in np.linspace(0, count - 1, min(count, MAX_LAYERS)).round()})


def words_picture(layer: str, panels: Sequence[Panel], places: Sequence[str], shares: np.ndarray) -> Figure:
    """A row for each expert of a layer, a column for each class.

    Args:
      panels: two over the same classes, and perhaps a third.
      places: of each expert in the grid.
      shares: of the calls, of each expert.
    """
    rows = np.sort(np.argsort(-shares, kind="stable")[:MAX_ROWS])
    cut = f" (the {len(rows)} most asked of {len(shares)})" if len(rows) < len(shares) else ""
    figure = Figure(figsize=(10.5, 3.0 + 0.5 * len(rows)), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 2, width_ratios=[len(panels[0].names), 7])
    (axes, bars), (below, corner) = grid
    dress(bars, "share of all calls", "")
    bars.barh(range(len(rows)), shares[rows], color=VALID, height=0.7)
    bars.set_ylim(len(rows) - 0.5, -0.5)
    bars.set_xticks([])
    bars.spines[:].set_visible(False)
    bars.tick_params(length=0)
    for place, row in enumerate(rows):
        bars.text(shares[row], place, f" {_percent(shares[row])}", va="center", fontsize=8, color=GREY)
    bars.set_xlim(0, 1.3 * max(shares.max(), 1e-9))
    corner.set_visible(len(panels) > 2)
    for drawn, panel in zip((axes, below, corner), panels, strict=False):
        dress(drawn, panel.title, "")
        _draw_lift(drawn, Lift(*(part[rows] for part in panel.lift)), panel.names, panel.breaks)
    axes.set_xticklabels([])
    for drawn in grid.flat:
        drawn.set_yticks(range(len(rows)), [places[row] for row in rows], fontsize=8)
    title = f"{layer}: which experts are chosen for what{cut}"
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    bar = figure.colorbar(axes.images[0], ax=list(grid.flat), shrink=0.7, aspect=25, pad=0.02)
    bar.set_ticks([-2, -1, 0, 1, 2], labels=["≤ ¼", "½", "1", "2", "≥ 4"])
    bar.set_label("times as often as for all; grey: too few to tell", fontsize=9, color=GREY)
    bar.ax.tick_params(labelsize=8, colors=GREY)
    bar.outline.set_visible(False)
    return figure


def _draw_lift(axes: Axes, lifted: Lift, names: Sequence[str], breaks: Sequence[int]) -> None:
    """Colours for the lifts that are known well enough, numbers for those that are told apart from 1."""
    with np.errstate(divide="ignore"):
        drawn = np.clip(np.log2(lifted.value), -_LIMIT, _LIMIT)
    drawn = np.where(lifted.is_apart | (lifted.error <= _LARGEST_ERROR), drawn, np.nan)
    axes.set_facecolor(_NOTHING)
    shown = np.ma.masked_invalid(drawn)
    axes.imshow(shown, aspect="auto", cmap=_LIFTS, vmin=-_LIMIT, vmax=_LIMIT, interpolation="nearest")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
    for column in breaks:
        axes.axvline(column - 0.5, color=GREY, linewidth=1.2)
    for row, column in np.argwhere(lifted.is_apart):
        value = lifted.value[row, column]
        colour = "white" if abs(drawn[row, column]) > 1.2 else INK
        text = f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
        axes.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)


def _percent(share: float) -> str:
    return "0" if share == 0 else f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"
