"""A run in one picture: does it learn, who does the work, how fast, and what did a lost node cost?

A panel without data says so. Drawn without `pyplot`, so nothing global is touched and no display is needed.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from dmoe_jax.runs.report import final_evaluation
from dmoe_jax.runs.run_folder import replaced_file
from dmoe_jax.runs.style import (
    FAINT,
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
    natural_order,
    plain_log_ticks,
    say_empty,
    short,
)

BASELINE_TARGET = 0.75
"""Part of the unigram perplexity for a second dashed line: below it a model clearly uses context."""

_TOP = 4.0
"""The perplexity axis ends at this many times the baseline once every curve is below: the first steps, at the size of
the vocabulary, would squeeze everything else."""

_MAX_COLUMNS, _MAX_ROWS = 512, 24
"""Cells of the load drawn at most; a larger grid is cut, and the title says so."""

_MAX_WRITTEN, _MAX_FRAMED, _MAX_TICKS = 24, 64, 18
"""Columns of the load up to which shares are written into cells, up to which cells have borders, and with a name."""

_MAX_BINS, _STEPS_PER_BIN = 60, 8
"""Bins of throughput at most, and training steps in each on average, at least."""

_MAX_SHARES = 40
"""Intervals of the panel of failed calls: in single seconds a few failures would be a bar code."""

_MAX_REASONS = 2
"""Reasons of failed calls that have room in their panel; the report names all."""

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
    loads = load_rows(metrics)
    windows, entropies = columns(metrics, "balance", "step", "entropy")
    load_height = max(1.5, 0.27 * len(loads.labels) + 0.5)
    heights = [3.2, load_height, *([1.2] if windows.size else []), 2.1]
    size = (10, 7.5 + max(1.7, load_height) + 1.8 * bool(windows.size))
    layout = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.10)
    figure = Figure(figsize=size, dpi=130, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    _learning(figure.add_subplot(grid[0, :]), metrics, kills)
    _load(figure.add_subplot(grid[1, :]), loads)
    if windows.size:
        _balance(figure.add_subplot(grid[2, :]), windows, entropies)
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


class LoadRows(NamedTuple):
    """Load of experts.

    Attributes:
      labels: name of each row, "layer0" or, in a run that lost a node, "layer0 before" and "layer0 after".
      columns: grid coordinates of each column ("1.3"), in order.
      counts: [row, column], samples; NaN where there is no such expert.
      killed: [row, column], true where the expert was on the lost node; in rows after its loss, or all rows.
      is_cut: true if layers or experts were left out.
    """

    labels: tuple[str, ...]
    columns: tuple[str, ...]
    counts: np.ndarray
    killed: np.ndarray
    is_cut: bool


def load_rows(metrics: Metrics) -> LoadRows:
    """The last cumulative counts of a run; split at the first loss of a node, if there was one."""
    records = [record for record in metrics if record["kind"] == "experts" and record.get("load")]
    kill = next((r for r in metrics if r["kind"] == "event" and r.get("name") == "node_killed"), None)
    if not records:
        return LoadRows((), (), np.empty((0, 0)), np.empty((0, 0), bool), is_cut=False)
    total: Mapping[str, int] = records[-1]["load"]
    before, lost = _at_kill(records, kill)
    uids = {*total, *before, *lost}
    all_layers, all_columns = (sorted({uid.partition(".")[part] for uid in uids}, key=natural_order) for part in (0, 2))
    periods: list[tuple[str, Mapping[str, int]]] = [("", total)]
    if before:
        after = {uid: max(total.get(uid, 0) - before.get(uid, 0), 0) for uid in uids}
        periods = [(" before", before), (" after", after)]
    layers, columns = all_layers[: _MAX_ROWS // len(periods)], all_columns[:_MAX_COLUMNS]
    rows = [(layer, suffix, counts) for layer in layers for suffix, counts in periods]
    grid = np.full((len(rows), len(columns)), np.nan)
    killed = np.zeros(grid.shape, dtype=bool)
    for row, (layer, suffix, counts) in enumerate(rows):
        for column, name in enumerate(columns):
            uid = f"{layer}.{name}" if name else layer
            if uid in uids:
                grid[row, column] = counts.get(uid, 0)
                killed[row, column] = uid in lost and suffix != " before"
    return LoadRows(
        labels=tuple(layer + suffix for layer, suffix, _ in rows),
        columns=tuple(columns),
        counts=grid,
        killed=killed,
        is_cut=len(layers) < len(all_layers) or len(columns) < len(all_columns),
    )


def _at_kill(records: Metrics, kill: Mapping[str, Any] | None) -> tuple[Mapping[str, int], set[str]]:
    """The counts when the node was killed ({} if not known) and the experts that it served."""
    step = None if kill is None else kill.get("step")
    if kill is None or step is None:
        return {}, set()
    earlier = [record for record in records if record.get("step", 0) <= step]
    served = (earlier[-1] if earlier else records[0]).get("peer") or {}
    names = {str(kill["peer"])} if kill.get("peer") else set(str(kill.get("detail") or "").split())
    lost = {uid for uid, peer in served.items() if str(peer) in names}
    # Without a later record there is no "after" to tell apart.
    return (earlier[-1]["load"] if earlier and earlier[-1] is not records[-1] else {}), lost


def _learning(axes: Axes, metrics: Metrics, kills: Metrics) -> None:
    is_text = any("perplexity" in record or "unigram_perplexity" in record for record in metrics)
    dress(axes, "Perplexity (log scale)" if is_text else "Loss", "trunk updates")
    labels: list[Label] = []
    steps, losses = columns(metrics, "train", "step", "loss")
    if steps.size:
        smooth = _running_mean(losses, max(1, steps.size // 25))
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


def _load(axes: Axes, loads: LoadRows) -> None:
    """Darker cells did more of their layer's work; the experts of the lost node are framed."""
    title = "Load of each expert, as a share of its layer" + (" (first ones only)" if loads.is_cut else "")
    dress(axes, title, "expert's place in the grid")
    if not loads.labels:
        say_empty(axes, "no load of experts recorded yet")
        return
    sums = np.nansum(loads.counts, axis=1, keepdims=True)
    shares = np.ma.masked_invalid(loads.counts / np.maximum(sums, 1))
    top = max(float(shares.max()), 1e-9)
    blues = LinearSegmentedColormap.from_list("load", ["#f4f8fb", VALID])
    axes.imshow(shares, aspect="auto", cmap=blues, vmin=0, vmax=top, interpolation="nearest")
    axes.set_yticks(range(len(loads.labels)), loads.labels)
    ticks = range(0, len(loads.columns), -(-len(loads.columns) // _MAX_TICKS))
    axes.set_xticks(ticks, [loads.columns[tick] for tick in ticks])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for column in range(1, len(loads.columns) if len(loads.columns) <= _MAX_FRAMED else 1):
        axes.axvline(column - 0.5, color="white", linewidth=1.5, zorder=2)
    for row in range(1, len(loads.labels)):
        same = loads.labels[row].split()[0] == loads.labels[row - 1].split()[0]
        axes.axhline(row - 0.5, color="white" if same else FAINT, linewidth=1.5 if same else 5, zorder=3)
    for (row, column), share in np.ndenumerate(shares):
        if len(loads.columns) <= _MAX_WRITTEN and not np.ma.is_masked(share):
            colour = "white" if share > 0.6 * top else INK if share > 0 else GREY
            text = "0" if share == 0 else f"{100 * share:.0f}%" if share >= 0.095 else f"{100 * share:.1f}%"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    for row, column in np.argwhere(loads.killed):
        frame = Rectangle((column - 0.46, row - 0.43), 0.92, 0.86, fill=False, color=KILLED, linewidth=1.6, zorder=4)
        axes.add_patch(frame)
    if loads.killed.any():
        text = "framed: experts of the killed node"
        axes.set_title(text, loc="right", fontsize=9, color=KILLED, pad=16)


def _balance(axes: Axes, steps: np.ndarray, entropies: np.ndarray) -> None:
    """A dot for each layer and window, a line through their means."""
    dress(axes, "Entropy of the load (1: even)", "trunk updates")
    axes.set_xlim(0, 1.01 * max(steps.max(), 1.0))
    axes.set_ylim(0, 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, steps=[1, 2, 5, 10], integer=True))
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    ends, window = np.unique(steps, return_inverse=True)
    means = np.bincount(window, entropies) / np.bincount(window)
    axes.plot(steps, entropies, ".", color=VALID, alpha=0.35)
    axes.plot(ends, means, color=VALID, linewidth=2.2)
    end_labels(axes, [(float(means[-1]), f"mean {means[-1]:.2f}", VALID)])


def _throughput(axes: Axes, metrics: Metrics, kills: Metrics, unit: str, seconds: float) -> None:
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


def _failures(axes: Axes, metrics: Metrics, kills: Metrics, unit: str, seconds: float) -> None:
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
    kills: Metrics,
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
        above: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "xytext": (0, 3), "textcoords": "offset points"}
        axes.annotate(label(kill), (place, 1.0), ha=side, fontsize=9, color=KILLED, **above)


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values at each place, of those that there are at the first places."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, values.size + 1)
    starts = np.maximum(ends - window, 0)
    means: np.ndarray = (sums[ends] - sums[starts]) / (ends - starts)
    return means
