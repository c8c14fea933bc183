"""The pictures of `dmoe inspect`. Drawn without `pyplot`, so nothing global is touched and no display is needed."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from dmoe_jax.inspection.analysis import LayerLoad, Likeness, Panel
from dmoe_jax.inspection.statistics import Lift, turnover
from dmoe_jax.runs.style import GREY, INK, KILLED, VALID, dress

MAX_ROWS = 32
"""Experts that a picture names; of more, those that are asked most."""

MAX_LAYERS = 6
"""Layers in one picture; of more, evenly spaced ones."""

_FACTOR = 4.0
"""Lifts from a quarter to four have colours of their own."""

_LARGEST_ERROR = 1 / 3
"""Lifts with a larger standard error have no colour, unless they are told apart from 1 all the same."""

_LIFTS = LinearSegmentedColormap.from_list("lift", [KILLED, "#ffffff", VALID])
_SHARES = LinearSegmentedColormap.from_list("share", ["#f4f8fb", VALID])
_NOTHING = "#d9d9d9"
"""Where there is nothing to compare."""


def shown_layers(count: int) -> list[int]:
    """Which of so many layers are drawn."""
    return sorted({int(layer) for layer in np.linspace(0, count - 1, min(count, MAX_LAYERS)).round()})


def most_asked(shares: np.ndarray) -> np.ndarray:
    """The experts that are drawn, by number, in order."""
    return np.sort(np.argsort(-shares, kind="stable")[:MAX_ROWS])


def words_picture(layer: str, panels: Sequence[Panel], places: Sequence[str], shares: np.ndarray) -> Figure:
    """A row for each expert of a layer, a column for each class.

    Args:
      panels: two over the same classes, and perhaps a third.
      places: of each expert in the grid.
      shares: of the calls, of each expert.
    """
    rows = most_asked(shares)
    cut = f" (the {len(rows)} most asked of {len(shares)})" if len(rows) < len(shares) else ""
    figure = _figure(10.5, 3.0 + 0.5 * len(rows))
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
    _title(figure, f"{layer}: which experts are chosen for what{cut}")
    _lift_bar(figure, axes, list(grid.flat), "times as often as for all")
    return figure


def load_picture(loads: Sequence[LayerLoad], places: Sequence[str], *, killed_at: Sequence[float] = ()) -> Figure:
    """A row for each expert, a column for each window of the training.

    Args:
      places: of each expert in the grid.
      killed_at: trunk updates at which a node was lost.
    """
    shown = [loads[index] for index in shown_layers(len(loads))]
    heights = [max(1.2, 0.2 * min(MAX_ROWS, load.shares.shape[1])) for load in shown]
    figure = _figure(10.0, sum(heights) + 1.15 * len(shown) + 0.6)
    all_axes = figure.subplots(len(shown), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, load in zip(all_axes, shown, strict=True):
        _draw_load(axes, load, places, killed_at)
    _title(figure, f"Who does the work while it is learnt{_of_layers(len(shown), len(loads))}")
    return figure


def _draw_load(axes: Axes, load: LayerLoad, places: Sequence[str], killed_at: Sequence[float]) -> None:
    rows = most_asked(load.shares.mean(axis=0))
    dress(axes, f"{load.layer}: share of each expert", "trunk updates")
    shares, found = load.shares[:, rows], turnover(load.shares)
    top = max(float(shares.max()), 1e-9)
    mesh = axes.pcolormesh(load.edges, np.arange(len(rows) + 1) - 0.5, shares.T, cmap=_SHARES, vmin=0, vmax=top)
    mesh.set_edgecolor("face")
    middles = (load.edges[1:] + load.edges[:-1]) / 2
    for changes, marker in ((found.born, "o"), (found.died, "x")):
        windows, experts = np.nonzero(changes[:, rows])
        axes.plot(middles[windows], experts, marker, color=KILLED, markersize=4.5, markerfacecolor="none", zorder=4)
    for step in killed_at:
        axes.axvline(step, color=KILLED, linewidth=1.2, zorder=3)
        axes.text(step, -0.6, "node lost", ha="center", va="bottom", fontsize=8, color=KILLED)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [places[row] for row in rows])
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
    axes.spines[:].set_visible(False)
    for row, share in enumerate(shares[-1]):
        axes.text(
            1.008, row, _percent(share), transform=axes.get_yaxis_transform(), va="center", fontsize=8, color=GREY
        )
    born, died, in_use = int(found.born.sum()), int(found.died.sum()), int(found.in_use[-1].sum())
    text = f"in use at the end {in_use} of {load.shares.shape[1]}; ○ {born} came into use, × {died} fell idle"
    axes.set_title(text, loc="right", fontsize=9, color=KILLED if died else GREY, pad=16)


def layers_picture(
    layers: Sequence[str], agreement: np.ndarray, pairs: Sequence[tuple[int, int, Lift]], places: Sequence[str]
) -> Figure:
    """What layers tell of each other: all of them in a matrix, and some pairs expert by expert.

    Args:
      agreement: [layers, layers], see `analysis.agreement`.
      pairs: (layer, other layer, lift of their experts).
      places: of each expert in the grid.
    """
    size = max(2.2, 0.42 * len(layers))
    each = max(2.6, 0.24 * min(MAX_ROWS, len(places)))
    figure = _figure(1.6 + size + (each + 1.3) * len(pairs), 1.9 + max(size, each))
    all_axes = figure.subplots(1, 1 + len(pairs), width_ratios=[size, *[each] * len(pairs)], squeeze=False)[0]
    axes = all_axes[0]
    dress(axes, "Share of a row's choice\nthat a column tells", "")
    drawn = agreement.copy()
    np.fill_diagonal(drawn, np.nan)
    top = max(0.1, float(np.nanmax(drawn, initial=0.0)))
    _matrix(axes, np.clip(drawn, 0, 1), _SHARES, 0.0, top)
    axes.set_xticks(range(len(layers)), layers, rotation=90, fontsize=8)
    axes.set_yticks(range(len(layers)), layers, fontsize=8)
    for (row, column), value in np.ndenumerate(agreement):
        if row != column:
            text = "–" if not np.isfinite(value) else f"{value:.2f}"
            colour = "white" if np.isfinite(value) and value > 0.6 * top else INK
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    for axes, (left, right, lifted) in zip(all_axes[1:], pairs, strict=True):
        dress(axes, f"{layers[left]} and {layers[right]}", f"expert of {layers[right]}")
        rows, columns = (most_asked(np.isfinite(lifted.value).any(axis=axis).astype(float)) for axis in (1, 0))
        part = Lift(*(values[np.ix_(rows, columns)] for values in lifted))
        _draw_lift(axes, part, [places[column] for column in columns])
        axes.set_yticks(range(len(rows)), [places[row] for row in rows], fontsize=8)
        axes.set_ylabel(f"expert of {layers[left]}", fontsize=9, color=GREY)
    _title(figure, "Do layers agree?")
    if pairs:
        _lift_bar(figure, all_axes[-1], [all_axes[-1]], "times as often together as by chance")
    return figure


def likeness_picture(likenesses: Sequence[tuple[str, Sequence[Likeness]]], places: Sequence[str]) -> Figure:
    """A row of matrices for each layer: how alike its experts are in each respect.

    Args:
      likenesses: layer and its matrices.
      places: of each expert in the grid.
    """
    shown = [likenesses[index] for index in shown_layers(len(likenesses))]
    columns = max(len(each) for _, each in shown)
    side = max(2.4, 0.24 * min(MAX_ROWS, len(places)))
    figure = _figure(1.6 + (side + 0.9) * columns, 0.8 + (side + 0.9) * len(shown))
    all_axes = figure.subplots(len(shown), columns, squeeze=False)
    limit = max(0.1, *(_largest(each.cosine) for _, found in shown for each in found))
    for row, (layer, found) in zip(all_axes, shown, strict=True):
        for axes, each in zip(row, found, strict=False):
            dress(axes, f"{layer}: {each.title}", "")
            drawn = each.cosine.copy()
            np.fill_diagonal(drawn, np.nan)
            image = _matrix(axes, drawn, _LIFTS, -limit, limit)
            axes.set_title(f"spread {each.spread:.2g}", loc="right", fontsize=9, color=GREY, pad=4)
            every = -(-len(each.experts) // MAX_ROWS)
            ticks = range(0, len(each.experts), every)
            names = [places[each.experts[tick]] for tick in ticks]
            axes.set_yticks(ticks, names)
            axes.set_xticks(ticks, names, rotation=90)
            axes.tick_params(labelsize=8)
        for axes in row[len(found) :]:
            axes.set_visible(False)
    bar = figure.colorbar(image, ax=all_axes, shrink=0.6, aspect=30, pad=0.02)
    bar.set_label("cosine, their mean subtracted", fontsize=9, color=GREY)
    bar.ax.tick_params(labelsize=8, colors=GREY)
    bar.outline.set_visible(False)
    _title(figure, f"How alike are the experts?{_of_layers(len(shown), len(likenesses))}")
    return figure


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _title(figure: Figure, text: str) -> None:
    figure.suptitle(text, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)


def _matrix(axes: Axes, values: np.ndarray, colours: LinearSegmentedColormap, low: float, high: float) -> AxesImage:
    axes.set_facecolor("white" if colours is _SHARES else _NOTHING)
    image = axes.imshow(
        np.ma.masked_invalid(values), aspect="auto", cmap=colours, vmin=low, vmax=high, interpolation="nearest"
    )
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return image


def _draw_lift(axes: Axes, lifted: Lift, names: Sequence[str], breaks: Sequence[int] = ()) -> None:
    """Colours for the lifts that are known well enough, numbers for those that are told apart from 1."""
    with np.errstate(divide="ignore"):
        drawn = np.clip(np.log2(lifted.value), -np.log2(_FACTOR), np.log2(_FACTOR))
    drawn = np.where(lifted.is_apart | (lifted.error <= _LARGEST_ERROR), drawn, np.nan)
    _matrix(axes, drawn, _LIFTS, -np.log2(_FACTOR), np.log2(_FACTOR))
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
    for column in breaks:
        axes.axvline(column - 0.5, color=GREY, linewidth=1.2)
    for row, column in np.argwhere(lifted.is_apart):
        value = lifted.value[row, column]
        colour = "white" if abs(drawn[row, column]) > 1.2 else INK
        text = f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
        axes.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)


def _lift_bar(figure: Figure, axes: Axes, beside: Sequence[Axes], text: str) -> None:
    """The colours of the lifts in an axes."""
    bar = figure.colorbar(axes.images[0], ax=beside, shrink=0.7, aspect=25, pad=0.02)
    bar.set_ticks([-2, -1, 0, 1, 2], labels=["≤ ¼", "½", "1", "2", "≥ 4"])
    bar.set_label(f"{text}; grey: too few to tell", fontsize=9, color=GREY)
    bar.ax.tick_params(labelsize=8, colors=GREY)
    bar.outline.set_visible(False)


def _largest(cosine: np.ndarray) -> float:
    """The largest magnitude off the diagonal."""
    off = cosine[~np.eye(len(cosine), dtype=bool)]
    return float(np.nanmax(np.abs(off), initial=0.0))


def _percent(share: float) -> str:
    return "0" if share == 0 else f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


def _of_layers(shown: int, there: int) -> str:
    return f" ({shown} of {there} layers)" if shown < there else ""
