"""The balance panels: how unevenly each layer's experts were used, over the steps of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from dmoe_jax.runs.style import FAINT, GREY, VALID, Label, dress, end_labels, natural_order

_MAX_NAMED = 4
"""Layers up to which each line has its name beside it; more names would hide which line is the mean."""

_LABEL_GAP = 0.125
"""Least distance of two labels, as part of the height of these low panels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceLines:
    """Balance over steps, ready to draw.

    Attributes:
      layers: names, in order.
      steps: [windows], trunk updates at the end of each window.
      cv, entropy: [layer, window]; NaN where a layer has no figure.
      dead: experts of all layers without a sample in their layer's last window.
      experts: all that there are.
    """

    layers: tuple[str, ...]
    steps: np.ndarray
    cv: np.ndarray
    entropy: np.ndarray
    dead: int
    experts: int


def balance_lines(metrics: Sequence[Mapping[str, Any]]) -> BalanceLines:
    """The "balance" records of a run; without layers if it has none. Of two for a layer and step the last counts."""
    table: dict[str, dict[float, Mapping[str, Any]]] = {}
    for record in metrics:
        if record["kind"] == "balance" and isinstance(record.get("step"), int | float) and record.get("layer"):
            table.setdefault(str(record["layer"]), {})[record["step"]] = record
    layers = tuple(sorted(table, key=natural_order))
    steps = sorted({step for windows in table.values() for step in windows})
    last = [windows[max(windows)] for windows in table.values()]

    def figures(field: str) -> np.ndarray:
        values = [[table[layer].get(step, {}).get(field) for step in steps] for layer in layers]
        return np.array(values, dtype=np.float64).reshape(len(layers), len(steps))  # None becomes NaN

    return BalanceLines(
        layers=layers,
        steps=np.array(steps, dtype=np.float64),
        cv=figures("cv"),
        entropy=figures("entropy"),
        dead=sum(record.get("dead") or 0 for record in last),
        experts=sum(len(record.get("histogram") or ()) for record in last),
    )


def draw(cv_axes: Axes, entropy_axes: Axes, lines: BalanceLines) -> None:
    """Each layer a thin line, their mean a thick one: coefficient of variation, and normalised entropy."""
    dress(cv_axes, "Load cv (0: even)", "trunk updates")
    dress(entropy_axes, "Load entropy (1: even)", "trunk updates")
    if lines.experts:
        text = f"{lines.dead:,} of {lines.experts:,} experts idle"
        cv_axes.set_title(text, loc="right", fontsize=9, color=GREY, pad=16)
    highest = np.nanmax(lines.cv, initial=0.1)
    for axes, values, top in ((cv_axes, lines.cv, 1.1 * highest), (entropy_axes, lines.entropy, 1.03)):
        axes.set_xlim(0, 1.01 * max(*lines.steps, 1.0))
        axes.set_ylim(0, top)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10], integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        _draw_layers(axes, lines, values)


def _draw_layers(axes: Axes, lines: BalanceLines, values: np.ndarray) -> None:
    labels: list[Label] = []
    if len(lines.layers) > 1:
        for layer, line in zip(lines.layers, values, strict=True):
            is_known = ~np.isnan(line)
            axes.plot(lines.steps[is_known], line[is_known], color=VALID, linewidth=0.8, alpha=0.35, zorder=2)
            if is_known.any() and len(lines.layers) <= _MAX_NAMED:
                labels.append((float(line[is_known][-1]), layer, GREY))
    is_known = ~np.isnan(values).all(axis=0)
    if is_known.any():
        mean = np.nanmean(values[:, is_known], axis=0)
        marker = "o" if mean.size == 1 else None  # a line of one point is invisible
        axes.plot(lines.steps[is_known], mean, color=VALID, linewidth=2.2, marker=marker, markersize=4.5, zorder=3)
        name = "mean" if len(lines.layers) > 1 else lines.layers[0]
        labels.append((float(mean[-1]), f"{name} {mean[-1]:.2f}", VALID))
    end_labels(axes, labels, gap=_LABEL_GAP)
