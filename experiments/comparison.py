"""Runs side by side, one or several seeds of each: a picture, figures with their spread, a table."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from rich.table import Table

from dmoe_jax.runs.figure import Metrics, columns
from dmoe_jax.runs.report import ReportTable, final_evaluation, format_value
from dmoe_jax.runs.style import FAINT, INK, Label, baseline, cap, dress, end_labels, plain_log_ticks, say_empty, short
from experiments.panels import series_style
from experiments.run_summary import RunSummary, mean, perplexity_curve, summarise_run

Runs = Mapping[str, Sequence[Metrics]]
"""Label -> the metrics of its runs, one for each seed. Labels are drawn in this order."""

FIGURE_TEXT = (
    "Validation perplexity over training tokens, every point on the same words: the mean over seeds, and a band from "
    "the least to the greatest; and the final perplexity of each seed, over the words that were read in the end"
)

_TOP = 1.5
"""The perplexity axis ends at this many times the baseline once every curve is below: what is compared is the end."""

_COLUMNS: Mapping[str, str] = {
    "test_perplexity": "test perplexity",
    "final_load_entropy": "final load entropy",
    "final_dead_experts": "idle experts",
    "calls_lost": "calls lost",
    "virtual_s": "virtual time (s)",
    "wall_s": "wall time (s)",
}

_NOTE = (
    "The load's normalised entropy (1: even), mean over layers, and the experts of all layers that no sample was sent "
    "to, are of the last window that was measured. Calls lost are a share of all expert calls."
)


def comparison_table(runs: Runs) -> ReportTable:
    """A row for each label; columns that no label has a figure for are left out.

    Raises:
      ValueError: there is no label, or a label without a run.
    """
    summaries = _summarise(runs)
    names = [name for name in _COLUMNS if any(_known(seeds, name).size for seeds in summaries.values())]
    rows: list[list[object]] = []
    for label, seeds in summaries.items():
        values = _known(seeds, "perplexity")
        spread = _deviation(values)
        perplexity = format_value(mean(values))
        text = None if not values.size else perplexity if spread is None else f"{perplexity} ± {short(spread)}"
        rows.append([label, len(seeds), text, *(mean(_known(seeds, name)) for name in names)])
    finals = (final_evaluation(metrics) for seeds in runs.values() for metrics in seeds)
    head = ("", "runs", "validation perplexity", *(_COLUMNS[name] for name in names))
    of_curve = next((f", each point of the curves over {found[1]}" for found in finals if found), "")
    over = f"Final perplexities are over {_words(summaries)} of the validation text{of_curve}."
    note = f"Means over the runs; ± is the standard deviation of a sample. {over} {_NOTE}"
    return ReportTable(title="Side by side", head=head, rows=rows, note=note)


def _words(summaries: Mapping[str, Sequence[RunSummary]]) -> str:
    """Words of the final evaluation in text."""
    counts = {run.evaluated_words for seeds in summaries.values() for run in seeds if run.evaluated_words}
    return f"{', '.join(map(format_value, sorted(counts)))} words" if counts else "the last words read"


def comparison_headline(runs: Runs) -> dict[str, dict[str, Any]]:
    """Label -> means of the figures of its runs, and `perplexity_std`, for a headline in JSON; None if not known."""
    headline = {}
    for label, seeds in _summarise(runs).items():
        figures = {field.name: mean(_known(seeds, field.name)) for field in fields(RunSummary)}
        headline[label] = {"runs": len(seeds), **figures, "perplexity_std": _deviation(_known(seeds, "perplexity"))}
    return headline


def terminal_table(table: ReportTable) -> Table:
    """As many columns of `comparison_table`, the first ones, as a terminal of 80 has room for."""
    printed = Table(*(name.replace(" ", "\n") for name in table.head[:6]), title=table.title, title_justify="left")
    for row in table.rows:
        printed.add_row(*map(format_value, row[:6]))
    return printed


def draw_comparison(runs: Runs, title: str | None = None) -> Figure:
    """Draw perplexity curves of several runs, and beside them what each label came to.

    Args:
      title: a headline above the panels.

    Raises:
      ValueError: there is no label, or a label without a run.
    """
    summaries = _summarise(runs)
    height = max(3.8, 0.27 * len(runs) + 1.3)  # a line of text for each label
    figure = Figure(figsize=(10.5, height), layout="constrained", facecolor="white")
    curves, finals = figure.subplots(1, 2, width_ratios=(3, 1))
    _draw_curves(curves, runs, gap=0.24 / height)
    dress(finals, "Final perplexity", f"over {_words(summaries)}")
    _draw_finals(finals, {label: _known(seeds, "perplexity") for label, seeds in summaries.items()})
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold", color=INK)
    return figure


def _summarise(runs: Runs) -> dict[str, list[RunSummary]]:
    if not runs or not all(runs.values()):
        raise ValueError(f"expected labels with a run or more each, got { ({name: len(runs[name]) for name in runs}) }")
    return {label: [summarise_run(metrics) for metrics in seeds] for label, seeds in runs.items()}


def _known(summaries: Sequence[RunSummary], figure: str) -> np.ndarray:
    """The values of one figure, of those runs that have it."""
    return np.array([value for run in summaries if (value := getattr(run, figure)) is not None], dtype=np.float64)


def _deviation(values: np.ndarray) -> float | None:
    """Standard deviation of a sample (n - 1); None for fewer than two values."""
    return float(values.std(ddof=1)) if values.size > 1 else None


def _draw_curves(axes: Axes, runs: Runs, *, gap: float) -> None:
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
        marker = "o" if middle.size == 1 else None  # a line of one point is invisible
        axes.plot(tokens, middle, color=colour, linestyle=dashes, linewidth=1.8, marker=marker, zorder=3)
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
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    end_labels(axes, labels, gap=gap)


def _common_curve(curves: Sequence[Mapping[float, tuple[float, float]]]) -> tuple[np.ndarray, np.ndarray]:
    """Mean tokens [points] and perplexities [seed, points] at the steps that all seeds with an evaluation have."""
    begun = [curve for curve in curves if curve]
    steps = sorted(set.intersection(*(set(curve) for curve in begun))) if begun else []
    points = np.array([[curve[step] for step in steps] for curve in begun]).reshape(len(begun), len(steps), 2)
    return points[..., 0].mean(axis=0) if steps else np.empty(0), points[..., 1]


def _draw_finals(axes: Axes, perplexities: Mapping[str, np.ndarray]) -> None:
    """A row for each label: a ring for each seed, a dot at their mean, and the mean in numbers."""
    for row, values in enumerate(perplexities.values()):
        colour, _ = series_style(row)
        axes.plot(values, np.full(values.size, row), "o", color=colour, mfc="none", alpha=0.7)
        if values.size:
            axes.plot([values.mean()], [row], "o", color=colour)
    names = [f"{label}\n{format_value(mean(values))}" for label, values in perplexities.items()]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
