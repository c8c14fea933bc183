"""The load panel: a row for each layer, before and after the first lost node; a column for each expert."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle

from dmoe_jax.runs.style import FAINT, GREY, INK, KILLED, VALID, dress, natural_order, say_empty

_MAX_WRITTEN = 24
"""Columns up to which a cell's share is written into it; beyond that the numbers would touch."""

_MAX_TICKS = 18
"""Column names under the panel, at most."""

_MAX_FRAMED = 64
"""Columns up to which cells have borders; narrower ones get a bar instead of a frame."""

_MAX_COLUMNS, _MAX_ROWS = 512, 24
"""Cells drawn at most; a larger grid is cut, and the title says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRows:
    """Load of experts, ready to draw.

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


def load_rows(metrics: Sequence[Mapping[str, Any]]) -> LoadRows:
    """The last cumulative counts of a run; split at the first loss of a node, if there was one."""
    records = [record for record in metrics if record["kind"] == "experts" and record.get("load")]
    kill = next((r for r in metrics if r["kind"] == "event" and r.get("name") == "node_killed"), None)
    if not records:
        return LoadRows(labels=(), columns=(), counts=np.empty((0, 0)), killed=np.empty((0, 0), bool), is_cut=False)
    total: dict[str, int] = dict(records[-1]["load"])
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


def draw(axes: Axes, loads: LoadRows) -> None:
    """Darker cells did more of their layer's work; the experts of the lost node are marked in vermilion."""
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
    every = -(-len(loads.columns) // _MAX_TICKS)
    ticks = range(0, len(loads.columns), every)
    axes.set_xticks(ticks, [loads.columns[tick] for tick in ticks])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    _separate(axes, loads)
    if len(loads.columns) <= _MAX_WRITTEN:
        _write_shares(axes, shares, top)
    _mark_killed(axes, loads)


def _mark_killed(axes: Axes, loads: LoadRows) -> None:
    """Frame the lost experts' cells, or underline them where a frame would hide the cell."""
    is_framed = len(loads.columns) <= _MAX_FRAMED
    for row, column in np.argwhere(loads.killed):
        if is_framed:
            corner, width, height = (column - 0.46, row - 0.43), 0.92, 0.86
        else:
            corner, width, height = (column - 0.5, row + 0.25), 1.0, 0.2
        axes.add_patch(
            Rectangle(corner, width, height, fill=not is_framed, color=KILLED, linewidth=1.6 * is_framed, zorder=4)
        )
    if loads.killed.any():
        mark = "framed" if is_framed else "underlined"
        axes.set_title(f"{mark}: experts of the killed node", loc="right", fontsize=9, color=KILLED, pad=16)


def _write_shares(axes: Axes, shares: np.ma.MaskedArray, top: float) -> None:
    for (row, column), share in np.ndenumerate(shares):
        if not np.ma.is_masked(share):
            colour = "white" if share > 0.6 * top else INK if share > 0 else GREY
            text = "0" if share == 0 else f"{100 * share:.0f}%" if share >= 0.095 else f"{100 * share:.1f}%"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)


def _separate(axes: Axes, loads: LoadRows) -> None:
    if len(loads.columns) <= _MAX_FRAMED:
        for column in range(1, len(loads.columns)):
            axes.axvline(column - 0.5, color="white", linewidth=1.5, zorder=2)
    for row in range(1, len(loads.labels)):
        same = loads.labels[row].split()[0] == loads.labels[row - 1].split()[0]
        axes.axhline(row - 0.5, color="white" if same else FAINT, linewidth=1.5 if same else 5, zorder=3)


def _at_kill(
    records: Sequence[Mapping[str, Any]], kill: Mapping[str, Any] | None
) -> tuple[Mapping[str, int], set[str]]:
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
