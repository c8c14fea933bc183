"""Runs side by side, one or several seeds of each: curves, figures with their spread, a table, a report."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from rich.table import Table

from dmoe_jax.runs.figure import Metrics, columns
from dmoe_jax.runs.report import ReportTable, format_value
from dmoe_jax.runs.style import (
    FAINT,
    GREY,
    INK,
    LABEL_GAP,
    Label,
    baseline,
    cap,
    dress,
    end_labels,
    plain_log_ticks,
    say_empty,
    short,
)
from experiments.panels import series_style
from experiments.run_summary import (
    FIGURES,
    RunSummary,
    deviation,
    known,
    mean,
    perplexity_curve,
    summarise_run,
)

Runs = Mapping[str, Sequence[Metrics]]
"""Label -> the metrics of its runs, one for each seed. Labels are drawn in this order."""

FIGURE_TEXT = (
    "Validation perplexity over training tokens, every point on the same words: the mean over seeds, and a band from "
    "the least to the greatest; and the final figures of each, over all the text that was read in the end"
)

_TOP = 1.5
"""The perplexity axis ends at this many times the baseline once every curve is below: what is compared is the end."""

_MINUTES_FROM_S = 180.0
"""Times are in minutes once one is longer than this."""

_STRIPS: Mapping[str, tuple[str, str]] = {
    "perplexity": ("Perplexity", "validation, final"),
    "final_load_cv": ("Load cv", "at the end; 0: even"),
    "final_load_entropy": ("Load entropy", "at the end; 1: even"),
    "calls_lost": ("Calls lost", "share of all"),
    "wall_s": ("Time", "seconds"),
    "virtual_s": ("Virtual time", "seconds"),
}
"""Figure -> its title and unit. Of the two times only one is drawn."""

_COLUMNS: Mapping[str, str] = {
    "test_perplexity": "test perplexity",
    "final_load_cv": "final load cv",
    "final_load_entropy": "final load entropy",
    "final_dead_experts": "idle experts",
    "calls_lost": "calls lost",
    "staleness": "staleness",
    "virtual_s": "virtual time (s)",
    "wall_s": "wall time (s)",
    "tokens_per_s": "tokens/s",
}
_PRINTED = ("", "validation perplexity", "final load cv", "final load entropy", "idle experts", "calls lost")
"""Columns of the table that fit into 80 characters."""

_NOTE = (
    "Means over the runs; ± is the standard deviation of a sample. Perplexities are over all the text that was read in "
    "the end, which the curves are not: each of their points is over the same, fewer words. Load "
    "figures are of the last window that was measured: the coefficient of variation (0: even) and the normalised "
    "entropy (1: even), means over layers, and the experts of all layers that no sample was sent to. Calls lost are a "
    "share of all expert calls; staleness is the mean number of trunk updates between a step's reading and writing of "
    "the parameters."
)


def comparison_table(runs: Runs) -> ReportTable:
    """A row for each label; columns that no label has a figure for are left out.

    Raises:
      ValueError: there is no label, or a label without a run.
    """
    summaries = _summarise(runs)
    names = [name for name in _COLUMNS if any(known(seeds, name).size for seeds in summaries.values())]
    rows: list[list[object]] = []
    for label, seeds in summaries.items():
        values = known(seeds, "perplexity")
        spread = deviation(values)
        perplexity = format_value(float(values.mean())) if values.size else None
        if spread is not None:
            perplexity = f"{perplexity} ± {short(spread)}"
        rows.append([label, len(seeds), perplexity, *(mean(known(seeds, name)) for name in names)])
    head = ("", "runs", "validation perplexity", *(_COLUMNS[name] for name in names))
    return ReportTable(title="Side by side", head=head, rows=rows, note=_NOTE)


def comparison_headline(runs: Runs) -> dict[str, dict[str, Any]]:
    """Label -> means of the figures of its runs, and `perplexity_std`, for a headline in JSON; None if not known."""
    headline = {}
    for label, seeds in _summarise(runs).items():
        figures = {name: mean(known(seeds, name)) for name in FIGURES}
        headline[label] = {"runs": len(seeds), **figures, "perplexity_std": deviation(known(seeds, "perplexity"))}
    return headline


def terminal_table(table: ReportTable) -> Table:
    """Return the columns of a table of `comparison_table` that fit into a terminal; the report has all of them."""
    places = [place for place, name in enumerate(table.head) if name in _PRINTED]
    printed = Table(title=table.title, title_justify="left")
    for place in places:
        printed.add_column(table.head[place], no_wrap=place == 0)
    for row in table.rows:
        printed.add_row(*(format_value(row[place]) for place in places))
    return printed


def draw_comparison(runs: Runs, title: str | None = None) -> Figure:
    """Draw several runs: perplexity curves, and below them what each label came to.

    Args:
      title: a headline above the panels.

    Raises:
      ValueError: there is no label, or a label without a run.
    """
    summaries = _summarise(runs)
    names = [name for name in _strips(summaries) if any(known(seeds, name).size for seeds in summaries.values())]
    # A line of text for each label, beside the curves and in the strips; the strips' height has their titles in it.
    heights = [max(3.4, 0.24 * (len(runs) + 1)), 0.27 * len(runs) + 1.3][: 1 + bool(names)]
    layout = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.08)
    size = (10.5, sum(heights) + 1.2 + 0.35 * bool(title))
    figure = Figure(figsize=size, dpi=130, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    _curves(figure.add_subplot(grid[0]), runs, gap=min(LABEL_GAP, 0.24 / heights[0]))
    if names:
        # A grid of their own: long labels before the strips leave the curves their width.
        strips = grid[1].subgridspec(1, len(names))
        for number, name in enumerate(names):
            _strip(figure.add_subplot(strips[number]), summaries, name, is_first=number == 0)
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold", color=INK)
    return figure


def _summarise(runs: Runs) -> dict[str, list[RunSummary]]:
    if not runs or not all(runs.values()):
        raise ValueError(f"expected labels with a run or more each, got { ({name: len(runs[name]) for name in runs}) }")
    return {label: [summarise_run(metrics) for metrics in seeds] for label, seeds in runs.items()}


def _strips(summaries: Mapping[str, Sequence[RunSummary]]) -> list[str]:
    """Virtual time if all have it: a clock that some do not have compares nothing."""
    is_virtual = all(known(seeds, "virtual_s").size for seeds in summaries.values())
    return [name for name in _STRIPS if name != ("wall_s" if is_virtual else "virtual_s")]


def _curves(axes: Axes, runs: Runs, *, gap: float) -> None:
    """For each label the mean over its seeds, and a band from the least to the greatest."""
    band = "; bands: least to greatest seed" if any(len(seeds) > 1 for seeds in runs.values()) else ""
    dress(axes, "Validation perplexity (log scale)", f"training tokens{band}")
    labels: list[Label] = []
    last_tokens = 1.0
    for index, (label, seeds) in enumerate(runs.items()):
        tokens, perplexities = _common_curve([perplexity_curve(metrics) for metrics in seeds])
        if not tokens.size:
            continue
        colour, dashes = series_style(index)
        middle = perplexities.mean(axis=0)
        axes.plot(tokens, middle, color=colour, linestyle=dashes, linewidth=1.8, zorder=3)
        if middle.size == 1:  # a line of one point is invisible
            axes.plot(tokens, middle, "o", color=colour, markersize=4.5, zorder=3)
        if len(perplexities) > 1:
            low, high = perplexities.min(axis=0), perplexities.max(axis=0)
            axes.fill_between(tokens, low, high, color=colour, alpha=0.13, linewidth=0, zorder=2)
        labels.append((float(middle[-1]), f"{label} {format_value(float(middle[-1]))}", colour))
        last_tokens = max(last_tokens, float(tokens[-1]))
    if not labels:
        say_empty(axes, "no evaluation yet")
        return
    axes.set_yscale("log")
    axes.set_xlim(0, 1.01 * last_tokens)
    unigrams = [columns(metrics, "baseline", "unigram_perplexity")[0] for seeds in runs.values() for metrics in seeds]
    unigram = np.concatenate(unigrams)
    if unigram.size:
        labels.append(baseline(axes, float(unigram[-1]), "unigram"))
        cap(axes, labels, _TOP * float(unigram[-1]))
    plain_log_ticks(axes)
    unit, name = (1e6, "M") if last_tokens >= 2e6 else (1e3, "k") if last_tokens >= 2e3 else (1.0, "")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / unit:g}{name}" if value else "0"))
    end_labels(axes, labels, gap=gap)


def _common_curve(curves: Sequence[Mapping[float, tuple[float, float]]]) -> tuple[np.ndarray, np.ndarray]:
    """Mean tokens [points] and perplexities [seed, points] at the steps that all seeds with an evaluation have."""
    begun = [curve for curve in curves if curve]
    steps = sorted(set.intersection(*(set(curve) for curve in begun))) if begun else []
    points = np.array([[curve[step] for step in steps] for curve in begun]).reshape(len(begun), len(steps), 2)
    return points[..., 0].mean(axis=0) if steps else np.empty(0), points[..., 1]


def _strip(axes: Axes, summaries: Mapping[str, Sequence[RunSummary]], name: str, *, is_first: bool) -> None:
    """One figure, a row for each label: a ring for each seed, a dot at their mean, the mean in numbers."""
    title, unit = _STRIPS[name]
    dress(axes, title, unit)
    found = [known(seeds, name) for seeds in summaries.values()]
    if unit == "seconds" and np.concatenate(found).max() > _MINUTES_FROM_S:
        found = [values / 60 for values in found]
        axes.set_xlabel("minutes")
    for row, values in enumerate(found):
        if not values.size:
            axes.text(0.5, row, "–", transform=axes.get_yaxis_transform(), ha="center", va="center", color=GREY)
            continue
        colour, _ = series_style(row)
        centre = values.mean()
        if values.size > 1:
            axes.plot(values, np.full(values.size, row), "o", color=colour, markersize=5, mfc="none", alpha=0.7)
        axes.plot([centre], [row], "o", color=colour, markersize=6.5 if values.size == 1 else 4, zorder=4)
        text = f"{100 * centre:.1f}%" if name == "calls_lost" else short(centre)
        if name == "perplexity":  # what is compared differs in the fourth digit
            text = format_value(float(centre))
        axes.annotate(
            text,
            (1.0, row),
            xycoords=axes.get_yaxis_transform(),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
        )
    axes.set_yticks(range(len(summaries)), list(summaries) if is_first else [""] * len(summaries))
    axes.set_ylim(len(summaries) - 0.5, -0.5)
    axes.set_xlim(_limits(name, np.concatenate(found)))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3))
    if name == "calls_lost":
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)


def _limits(name: str, values: np.ndarray) -> tuple[float, float]:
    """Around all values; perplexities need no zero, everything else is read against its end of the scale."""
    low, high = float(values.min()), float(values.max())
    if name == "perplexity":
        margin = max(0.1 * (high - low), 0.005 * high)
        return low - margin, high + margin
    if name == "final_load_entropy":
        return max(0.0, low - 0.15 * (1 - low)) if low < 1 else 0.9, 1.0 + 0.05 * max(1 - low, 0.1)
    return -0.03 * max(high, 1e-3), 1.1 * max(high, 1e-3)
