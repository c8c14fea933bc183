"""A run in one picture: does it learn, who does the work, how fast, and what did a lost node cost?

Panels under one title: perplexity against steps with the unigram baseline; load of each expert; how even it was over
the steps, in runs that measured it; throughput; failed calls. A panel without data says so. Drawn without `pyplot`, so
nothing global is touched and no display is needed.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, PercentFormatter

from dmoe_jax.runs import balance_panels, load_map
from dmoe_jax.runs.run_folder import replaced_file
from dmoe_jax.runs.style import (
    GREY,
    INK,
    KILLED,
    TRAIN,
    VALID,
    Label,
    baseline,
    cap,
    dress,
    end_labels,
    plain_log_ticks,
    say_empty,
    short,
)

BASELINE_TARGET = 0.75
"""Part of the unigram perplexity for a second dashed line: below it a model clearly uses context."""

_MAX_BINS = 60
"""Bins of throughput: finer ones would show the noise of single steps."""

_TOP = 4.0
"""The perplexity axis ends at this many times the baseline once every curve is below: the first steps, at the size of
the vocabulary, would squeeze everything else."""

_BALANCE_HEIGHT = 2.3
"""Inches that the balance panels add to the figure."""

_STEPS_PER_BIN = 8
"""Training steps that a bin of throughput holds on average, at least."""

Metrics = Sequence[Mapping[str, Any]]


def training_figure(metrics: Metrics, path: Path, *, title: str | None = None) -> Path:
    """Draw a run's figure as PNG.

    Args:
      metrics: the run's records, in the kinds listed in `dmoe_jax.runs`; any may be missing.
      path: where the PNG goes, at once.
      title: a headline above the panels.

    Returns:
      `path`.
    """
    figure = draw_run(metrics, title)
    with replaced_file(path) as temporary:
        figure.savefig(temporary)
    return path


def draw_run(metrics: Metrics, title: str | None = None) -> Figure:
    """The figure that `training_figure` saves."""
    kills = _kills(metrics)
    loads, lines = load_map.load_rows(metrics), balance_panels.balance_lines(metrics)
    layout = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.10)
    load_height = max(1.5, 0.27 * len(loads.labels) + 0.5)
    height = 9.2 + max(0.0, load_height - 1.7) + _BALANCE_HEIGHT * bool(lines.layers)
    figure = Figure(figsize=(10, height), dpi=130, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    heights = [3.2, load_height, 2.1]
    if lines.layers:
        heights.insert(2, 1.7)
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    _perplexity(figure.add_subplot(grid[0, :]), metrics, kills)
    load_map.draw(figure.add_subplot(grid[1, :]), loads)
    if lines.layers:
        balance_panels.draw(figure.add_subplot(grid[2, 0]), figure.add_subplot(grid[2, 1]), lines)
    unit, seconds = _time_unit(metrics)
    _throughput(figure.add_subplot(grid[-1, 0]), metrics, kills, unit, seconds)
    _failures(figure.add_subplot(grid[-1, 1]), metrics, kills, unit, seconds)
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold", color=INK)
    return figure


def columns(metrics: Metrics, kind: str, *fields: str) -> list[np.ndarray]:
    """The fields of all records of a kind, a float array each; records that lack one of them are left out."""
    rows = [
        [record[field] for field in fields]
        for record in metrics
        if record["kind"] == kind and all(isinstance(record.get(field), int | float) for field in fields)
    ]
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(fields))
    return list(table.T)


def new_calls(metrics: Metrics) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Calls between each two records of the cumulative counts: (times, from 0 on; answered; failed), one time more."""
    times, ok, failed = columns(metrics, "calls", "time_s", "ok", "failed")
    order = np.argsort(times, kind="stable")
    times, ok, failed = (np.concatenate([[0.0], values[order]]) for values in (times, ok, failed))
    # A count that falls means that a run was resumed; that interval counts for nothing.
    return times, np.maximum(np.diff(ok), 0), np.maximum(np.diff(failed), 0)


def _kills(metrics: Metrics) -> list[Mapping[str, Any]]:
    return [record for record in metrics if record["kind"] == "event" and record.get("name") == "node_killed"]


def _perplexity(axes: Axes, metrics: Metrics, kills: Sequence[Mapping[str, Any]]) -> None:
    """Validation perplexity, a running mean of the training perplexity, and the unigram baseline."""
    dress(axes, "Perplexity (log scale)", "trunk updates")
    labels: list[Label] = []
    steps, losses = columns(metrics, "train", "step", "loss")
    if steps.size:
        window = max(1, steps.size // 25)
        smooth = np.exp(np.minimum(_running_mean(losses, window), 50.0))
        marker = "o" if steps.size == 1 else None  # a line of one point is invisible
        axes.plot(steps, smooth, color=TRAIN, linewidth=1.3, marker=marker, markersize=4.5, zorder=2)
        labels.append((smooth[-1], f"training {short(smooth[-1])}", TRAIN))
    valid = [record for record in metrics if record.get("split", "valid") == "valid"]
    eval_steps, perplexities = columns(valid, "eval", "step", "perplexity")
    if eval_steps.size:
        axes.plot(eval_steps, perplexities, color=VALID, linewidth=2.2, marker="o", markersize=4.5, zorder=4)
        labels.append((perplexities[-1], f"validation {short(perplexities[-1])}", VALID))
    if not steps.size and not eval_steps.size:
        say_empty(axes, "no training step and no evaluation yet")
        return
    axes.set_yscale("log")
    axes.set_xlim(0, 1.01 * max([*steps, *eval_steps, 1]))
    (baselines,) = columns(metrics, "baseline", "unigram_perplexity")
    if baselines.size:
        unigram = float(baselines[-1])
        names = {1.0: "unigram", BASELINE_TARGET: f"{BASELINE_TARGET} × unigram"}
        labels += [baseline(axes, factor * unigram, name) for factor, name in names.items()]
        cap(axes, labels, _TOP * unigram)
    plain_log_ticks(axes)
    end_labels(axes, labels)
    _mark_kills(axes, kills, "step", 1.0, lambda kill: f"{_first_word(kill)} killed at step {kill['step']:,}")


def _throughput(axes: Axes, metrics: Metrics, kills: Sequence[Mapping[str, Any]], unit: str, seconds: float) -> None:
    """Training tokens a second, all trainers together, in equal bins of time."""
    dress(axes, "Training tokens per second", unit)
    times, tokens = columns(metrics, "train", "time_s", "tokens")
    if times.size < 2 or times.max() <= 0:
        say_empty(axes, "fewer than two training steps yet")
        return
    num_bins = int(np.clip(times.size // _STEPS_PER_BIN, 1, _MAX_BINS))
    edges = np.linspace(0, times.max(), num_bins + 1)
    rates = np.histogram(times, edges, weights=tokens)[0] / np.diff(edges)
    axes.stairs(rates, edges / seconds, color=VALID, fill=True, alpha=0.16)
    axes.stairs(rates, edges / seconds, color=VALID, linewidth=1.6, baseline=None)
    axes.set_xlim(0, times.max() / seconds)
    axes.set_ylim(0, 1.15 * max(rates.max(), 1e-9))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}"))
    _mark_kills(axes, kills, "time_s", seconds, lambda kill: "killed")


def _failures(axes: Axes, metrics: Metrics, kills: Sequence[Mapping[str, Any]], unit: str, seconds: float) -> None:
    """Share of the remote calls that failed, between each two records of the cumulative counts."""
    dress(axes, "Failed expert calls", unit)
    times, new_ok, new_failed = new_calls(metrics)
    if times[-1] <= 0:
        say_empty(axes, "no remote call counted yet")
        return
    share = new_failed / np.maximum(new_ok + new_failed, 1)
    axes.stairs(share, times / seconds, color=KILLED, fill=True, alpha=0.18)
    axes.stairs(share, times / seconds, color=KILLED, linewidth=1.6, baseline=None)
    axes.set_xlim(0, times.max() / seconds)
    axes.set_ylim(0, max(0.05, min(1.0, 1.25 * share.max())))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    total = new_ok.sum() + new_failed.sum()
    axes.set_title(f"{new_failed.sum():,.0f} of {total:,.0f} calls", loc="right", fontsize=9, color=GREY, pad=16)
    _mark_kills(axes, kills, "time_s", seconds, lambda kill: "killed")


def _mark_kills(
    axes: Axes,
    kills: Sequence[Mapping[str, Any]],
    field: str,
    scale: float,
    label: Callable[[Mapping[str, Any]], str],
) -> None:
    """A vertical line for each kill, with a label above the axes unless the one before is too near."""
    low, high = axes.get_xlim()
    labelled_at = -np.inf
    for kill in kills:
        if not all(isinstance(kill.get(name), int | float) for name in (field, "step")):
            continue
        place = kill[field] / scale
        if not low <= place <= high:
            continue
        axes.axvline(place, color=KILLED, linewidth=1.3, zorder=3)
        part = (place - low) / (high - low)
        if part - labelled_at < 0.3:
            continue
        labelled_at = part
        side = "left" if part < 0.2 else "right" if part > 0.8 else "center"
        axes.annotate(
            label(kill),
            (place, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha=side,
            fontsize=9,
            color=KILLED,
        )


def _first_word(kill: Mapping[str, Any]) -> str:
    """The node's name, which opens the event's detail; "a node" if there is none."""
    return (str(kill.get("detail") or "").split() or ["a node"])[0]


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values at each place, of those that there are at the first places."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, values.size + 1)
    starts = np.maximum(ends - window, 0)
    means: np.ndarray = (sums[ends] - sums[starts]) / (ends - starts)
    return means


def _time_unit(metrics: Metrics) -> tuple[str, float]:
    """("minutes", 60) or ("seconds", 1), by the length of the run."""
    last = max((record["time_s"] for record in metrics if isinstance(record.get("time_s"), int | float)), default=0)
    return ("minutes", 60.0) if last > 180 else ("seconds", 1.0)
