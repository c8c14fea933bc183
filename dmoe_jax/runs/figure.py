"""A run in one picture: does it learn, who does the work, how fast, and what did a lost node cost?

Panels under one title: perplexity against steps with the unigram baseline, or the loss of a model of anything else;
load of each expert; how even it was over the steps, in runs that measured it; throughput; failed calls. A panel without
data says so. Drawn without `pyplot`, so nothing global is touched and no display is needed.
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
from dmoe_jax.runs.report import final_evaluation
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

_MAX_REASONS = 2
"""Reasons of failed calls that have room above their panel; the report names all."""

_MAX_SHARES = 40
"""Intervals of the panel of failed calls: in single seconds a few failures would be a bar code."""

Metrics = Sequence[Mapping[str, Any]]


def training_figure(metrics: Metrics, path: Path, *, title: str | None = None) -> Path:
    """Draw the figure of a run's records, see `dmoe_jax.runs`, as a PNG at a path, which is returned."""
    figure = draw_run(metrics, title)
    with replaced_file(path) as temporary:
        figure.savefig(temporary)
    return path


def draw_run(metrics: Metrics, title: str | None = None) -> Figure:
    """The figure that `training_figure` saves."""
    kills = [record for record in metrics if record["kind"] == "event" and record.get("name") == "node_killed"]
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
    _learning(figure.add_subplot(grid[0, :]), metrics, kills)
    load_map.draw(figure.add_subplot(grid[1, :]), loads)
    if lines.layers:
        balance_panels.draw(figure.add_subplot(grid[2, 0]), figure.add_subplot(grid[2, 1]), lines)
    last = max((record["time_s"] for record in metrics if isinstance(record.get("time_s"), int | float)), default=0)
    unit, seconds = ("minutes", 60.0) if last > 180 else ("seconds", 1.0)
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


def _learning(axes: Axes, metrics: Metrics, kills: Sequence[Mapping[str, Any]]) -> None:
    is_text = any("perplexity" in record or "unigram_perplexity" in record for record in metrics)
    dress(axes, "Perplexity (log scale)" if is_text else "Loss", "trunk updates")
    labels: list[Label] = []
    steps, losses = columns(metrics, "train", "step", "loss")
    if steps.size:
        window = max(1, steps.size // 25)
        smooth = _running_mean(losses, window)
        smooth = np.exp(np.minimum(smooth, 50.0)) if is_text else smooth
        marker = "o" if steps.size == 1 else None  # a line of one point is invisible
        axes.plot(steps, smooth, color=TRAIN, linewidth=1.3, marker=marker, markersize=4.5, zorder=2)
        labels.append((smooth[-1], f"training {short(smooth[-1])}", TRAIN))
    valid = [record for record in metrics if record["kind"] == "eval" and record.get("split", "valid") == "valid"]
    eval_steps, values = columns(valid, "eval", "step", "perplexity" if is_text else "loss")
    if eval_steps.size:
        axes.plot(eval_steps, values, color=VALID, linewidth=2.2, marker="o", markersize=4.5, zorder=4)
        labels.append((values[-1], f"validation {short(values[-1])}", VALID))
        notes = [f"validation accuracy {valid[-1]['accuracy']:.1%}"] if valid[-1].get("accuracy") is not None else []
        notes += [found[0]] if (found := final_evaluation(metrics)) else []
        axes.set_title(", ".join(notes), loc="right", fontsize=9, color=VALID, pad=16)
    if not steps.size and not eval_steps.size:
        say_empty(axes, "no training step and no evaluation yet")
        return
    axes.set_xlim(0, 1.01 * max([*steps, *eval_steps, 1]))
    if is_text:
        axes.set_yscale("log")
        labels += _baselines(axes, metrics, labels)
        plain_log_ticks(axes)
    else:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    end_labels(axes, labels)

    def label(kill: Mapping[str, Any]) -> str:
        # The node's name opens the event's detail.
        node = (str(kill.get("detail") or "").split() or ["a node"])[0]
        return f"{node} killed at step {kill['step']:,}"

    _mark_kills(axes, kills, "step", 1.0, label)


def _baselines(axes: Axes, metrics: Metrics, labels: Sequence[Label]) -> list[Label]:
    (unigrams,) = columns(metrics, "baseline", "unigram_perplexity")
    if not unigrams.size:
        return []
    unigram = float(unigrams[-1])
    names = {1.0: "unigram", BASELINE_TARGET: f"{BASELINE_TARGET} × unigram"}
    added = [baseline(axes, factor * unigram, name) for factor, name in names.items()]
    cap(axes, [*labels, *added], _TOP * unigram)
    return added


def _throughput(axes: Axes, metrics: Metrics, kills: Sequence[Mapping[str, Any]], unit: str, seconds: float) -> None:
    counted = next((record.get("unit") for record in metrics if record["kind"] == "task"), None) or "tokens"
    dress(axes, f"Training {counted} per second", unit)
    times, items = columns(metrics, "train", "time_s", "items")
    if times.size < 2 or times.max() <= 0:
        say_empty(axes, "fewer than two training steps yet")
        return
    num_bins = int(np.clip(times.size // _STEPS_PER_BIN, 1, _MAX_BINS))
    edges = np.linspace(0, times.max(), num_bins + 1)
    rates = np.histogram(times, edges, weights=items)[0] / np.diff(edges)
    _stairs(axes, rates, edges / seconds, VALID)
    axes.set_ylim(0, 1.15 * max(rates.max(), 1e-9))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}"))
    _mark_kills(axes, kills, "time_s", seconds)


def _failures(axes: Axes, metrics: Metrics, kills: Sequence[Mapping[str, Any]], unit: str, seconds: float) -> None:
    dress(axes, "Failed expert calls", unit)
    times, new_ok, new_failed = new_calls(metrics)
    if times[-1] <= 0:
        say_empty(axes, "no remote call counted yet")
        return
    # The same counts in fewer intervals.
    starts = np.arange(0, new_ok.size, -(-new_ok.size // _MAX_SHARES))
    times = np.append(times[:-1][starts], times[-1])
    new_ok, new_failed = np.add.reduceat(new_ok, starts), np.add.reduceat(new_failed, starts)
    share = new_failed / np.maximum(new_ok + new_failed, 1)
    _stairs(axes, share, times / seconds, KILLED)
    axes.set_ylim(0, max(0.05, min(1.0, 1.25 * share.max())))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    total = new_ok.sum() + new_failed.sum()
    reasons = next((record.get("failures") for record in reversed(metrics) if record["kind"] == "calls"), None) or {}
    named = sorted(reasons.items(), key=lambda item: -item[1])[:_MAX_REASONS]
    axes.set_title(f"{new_failed.sum():,.0f} of {total:,.0f} calls", loc="right", fontsize=9, color=GREY, pad=16)
    # Inside the axes, where it cannot run into the title.
    why = "\n".join(f"{count:,} {reason}" for reason, count in named)
    axes.text(0.99, 0.96, why, transform=axes.transAxes, ha="right", va="top", fontsize=8, color=GREY)
    _mark_kills(axes, kills, "time_s", seconds)


def _stairs(axes: Axes, values: np.ndarray, edges: np.ndarray, colour: str) -> None:
    axes.stairs(values, edges, color=colour, fill=True, alpha=0.17)
    axes.stairs(values, edges, color=colour, linewidth=1.6, baseline=None)
    axes.set_xlim(0, edges[-1])


def _mark_kills(
    axes: Axes,
    kills: Sequence[Mapping[str, Any]],
    field: str,
    scale: float,
    label: Callable[[Mapping[str, Any]], str] = lambda kill: "killed",
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


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values at each place, of those that there are at the first places."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, values.size + 1)
    starts = np.maximum(ends - window, 0)
    means: np.ndarray = (sums[ends] - sums[starts]) / (ends - starts)
    return means
