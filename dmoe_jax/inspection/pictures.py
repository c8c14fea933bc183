"""The pictures of `dmoe inspect`: from a reading to the words that each layer's experts are chosen for.

Drawn without `pyplot`, so nothing global is touched and no display is needed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from dmoe_jax.data.pieces import AnyVocabulary
from dmoe_jax.inspection.reading import Reading
from dmoe_jax.inspection.statistics import Lift, lift, one_hot
from dmoe_jax.inspection.word_classes import kinds, places_in_article, present
from dmoe_jax.runs.style import GREY, INK, KILLED, VALID, dress

_FIRST, _BEFORE = "first word", "the word before"
_TITLES = {False: ("words of the segment", _FIRST), True: ("the word itself", _BEFORE)}
"""Titles of the panels of words, where segments are routed and where single words are."""

MAX_ROWS, MAX_LAYERS = 32, 6
"""Number of experts in a picture, those that are asked most; and of layers that have one, evenly spaced."""

_LIMIT = 2.0
"""Binary logarithm of the lifts that have colours of their own, from a quarter to four."""

_LARGEST_ERROR = 1 / 3
"""Lifts with a larger standard error have no colour, unless they are told apart from 1 all the same."""

_LIFTS = LinearSegmentedColormap.from_list("lift", [KILLED, "#ffffff", VALID])
_NOTHING = "#d9d9d9"
"""Colour of cells where there is nothing to compare."""


class Panel(NamedTuple):
    """Lifts of the experts (rows) and classes (columns) of something, which `title` names."""

    title: str
    names: tuple[str, ...]
    lift: Lift


def panels(
    reading: Reading, layer: int, *, num_experts: int, vocabulary: AnyVocabulary, article_starts: np.ndarray
) -> list[Panel]:
    """Panels of a layer: two of kinds of words, and one of places in the article if there are `article_starts`."""
    members = np.asarray(one_hot(reading.chosen[layer], num_experts).any(axis=2))
    every = kinds(vocabulary)
    words = present(every._replace(of=np.where(reading.words >= 0, every.of[reading.words], -1)))
    found = []
    for title in _TITLES[reading.routes_words]:
        counts = one_hot(_part(title, words.of), len(words.names)).sum(axis=2)
        found.append(Panel(title, words.names, lift(members, counts)))
    begins = np.where(reading.words[..., 0] >= 0, reading.places, -1)
    places = present(places_in_article(begins, article_starts, reading.seq_len))
    if places.names:
        found.append(Panel("place in the article", places.names, lift(members, one_hot(places.of, len(places.names)))))
    return found


def _part(title: str, of: np.ndarray) -> np.ndarray:
    if title == _FIRST:
        return of[..., :1]
    if title == _BEFORE:
        return np.concatenate([np.full_like(of[:, :1], -1), of[:, :-1]], axis=1)
    return of


def shown_layers(count: int) -> list[int]:
    """Numbers of the layers that are drawn."""
    return sorted({int(layer) for layer in np.linspace(0, count - 1, min(count, MAX_LAYERS)).round()})


def words_picture(layer: str, panels: Sequence[Panel], places: Sequence[str], shares: np.ndarray) -> Figure:
    """The panels of a layer, two over the same classes and perhaps a third, and each expert's share of the calls."""
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
        _draw_lift(drawn, Lift(*(part[rows] for part in panel.lift)), panel.names)
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


def _draw_lift(axes: Axes, lifted: Lift, names: Sequence[str]) -> None:
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
    for row, column in np.argwhere(lifted.is_apart):
        value = lifted.value[row, column]
        colour = "white" if abs(drawn[row, column]) > 1.2 else INK
        text = f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
        axes.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)


def _percent(share: float) -> str:
    return "0" if share == 0 else f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"
