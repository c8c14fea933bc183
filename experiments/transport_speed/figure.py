"""Each figure as a bar with its rounds, beside the bar that it must reach."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture

from dmoe_jax.runs.run_folder import replaced_file
from dmoe_jax.runs.style import GREY, INK, KILLED, VALID, dress
from experiments.transport_speed.ratios import FIGURES, Figure, ratios_of_rounds

_PANELS = (
    ("Small calls", {"small_calls_ratio": "over TLS"}),
    ("Tensors over TLS", {"tls_ratio": "sending", "tls_receive_ratio": "receiving"}),
    ("Tensors, plain", {"plain_ratio": "sending", "plain_receive_ratio": "receiving"}),
    ("Small-call p99 under load", {"head_of_line_ratio": "sending", "head_of_line_receive_ratio": "receiving"}),
)


def speed_figure(slices: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw figure.png.

    Args:
      slices: records of the kind "slice".
      path: where the picture goes.
    """
    picture = Picture(figsize=(10.5, 3.6), layout="constrained")
    FigureCanvasAgg(picture)
    by_name = {figure.name: figure for figure in FIGURES}
    panels = picture.subplots(1, len(_PANELS), width_ratios=[1 + len(labels) for _, labels in _PANELS])
    for axes, (title, labels) in zip(panels, _PANELS, strict=True):
        _draw(axes, title, [(by_name[name], label) for name, label in labels.items()], slices)
    panels[0].set_ylabel("ours over the baseline", fontsize=9, color=GREY)
    panels[-1].set_ylabel("loaded over idle", fontsize=9, color=GREY)
    with replaced_file(path) as temporary:
        picture.savefig(temporary, dpi=130)
    return path


def _draw(axes: Axes, title: str, figures: Sequence[tuple[Figure, str]], slices: Sequence[Mapping[str, Any]]) -> None:
    greatest = figures[0][0].bar
    for place, (figure, _) in enumerate(figures):
        ratios = ratios_of_rounds(figure, slices)
        axes.bar(place, median(ratios), color=VALID, width=0.6)
        axes.plot([place] * len(ratios), ratios, "o", color=INK, markersize=2.5, alpha=0.6)
        axes.text(place, median(ratios), f" {median(ratios):.2f}", fontsize=9, color=INK, va="bottom")
        greatest = max(greatest, *ratios)
    bar, is_upper_bound = figures[0][0].bar, figures[0][0].is_upper_bound
    axes.axhline(bar, color=KILLED, linestyle="--", linewidth=1.2)
    side = "at most" if is_upper_bound else "at least"
    axes.text(
        0.99,
        bar,
        f"{side} {bar:g}",
        transform=axes.get_yaxis_transform(),
        fontsize=8,
        color=KILLED,
        ha="right",
        va="bottom",
    )
    axes.set_xticks(range(len(figures)), [label for _, label in figures])
    axes.set_xlim(-0.6, len(figures) - 0.4)
    axes.set_ylim(0, 1.15 * greatest)
    dress(axes, title, "")
