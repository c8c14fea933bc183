"""Each ratio as a bar with its rounds, beside the bar that it must not exceed; and memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture

from dmoe_jax.runs.run_folder import replaced_file
from dmoe_jax.runs.style import GREY, INK, KILLED, VALID, dress
from experiments.allreduce_speed.ratios import FIGURES, MEMORY_BAR
from experiments.transport_speed.ratios import ratios_of_rounds

_TITLES = ("Time, encrypted", "Time, plain")


def speed_figure(slices: Sequence[Mapping[str, Any]], path: Path, *, memory_ratio: float) -> Path:
    """Draw figure.png.

    Args:
      slices: records of the kind "slice".
      path: where the picture goes.
      memory_ratio: a member's peak memory over the vector.
    """
    picture = Picture(figsize=(6.6, 3.4), layout="constrained")
    FigureCanvasAgg(picture)
    panels = picture.subplots(1, 3)
    for axes, title, figure in zip(panels[:2], _TITLES, FIGURES, strict=True):
        _draw(axes, title, ratios_of_rounds(figure, slices), figure.bar)
    _draw(panels[2], "Memory", [memory_ratio], MEMORY_BAR)
    panels[0].set_ylabel("all-reduce over blocking sockets", fontsize=9, color=GREY)
    panels[2].set_ylabel("over the vector", fontsize=9, color=GREY)
    with replaced_file(path) as temporary:
        picture.savefig(temporary, dpi=130)
    return path


def _draw(axes: Axes, title: str, values: Sequence[float], bar: float) -> None:
    axes.bar(0, median(values), color=VALID, width=0.6)
    axes.plot([0] * len(values), values, "o", color=INK, markersize=2.5, alpha=0.6)
    axes.text(0, median(values), f" {median(values):.2f}", fontsize=9, color=INK, va="bottom")
    axes.axhline(bar, color=KILLED, linestyle="--", linewidth=1.2)
    axes.text(-0.58, bar, f"at most {bar:g}", fontsize=8, color=KILLED, va="bottom")
    axes.set_xticks([])
    axes.set_xlim(-0.6, 0.6)
    axes.set_ylim(0, 1.15 * max(bar, *values))
    dress(axes, title, "")
