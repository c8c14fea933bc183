"""Variance over rounds, rounds beside the paper's, and random groups beside the theory."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dmoe_jax.runs.style import FAINT, GREY, INK, KILLED, VALID, dress, end_labels
from experiments.moshpit_averaging.paper import BARRED, TARGETS, TITLES, MethodName, Mixing, Row
from experiments.panels import SERIES

_FLOOR = 1e-12
"""Least variance drawn: below the targets, and above what float32 rounds away."""
_MOST_ROUNDS = 20
"""Rounds drawn: by then Moshpit and random groups are done, and gossip and PushSum never would be."""
_COLOURS: dict[MethodName, str] = {
    "moshpit": VALID,
    "random_groups": KILLED,
    "push_sum": SERIES[2],
    "push_sum_weighted": SERIES[5],
    "gossip": SERIES[3],
    "all_reduce": INK,
}


def averaging_figure(rows: Sequence[Row], mixing: Mixing | None) -> Figure:
    """Draw the curves of one row; of several rows also a panel with a line for each.

    Args:
      rows: at least one; of several the curves are those of the most peers with a probability of failure of 0.005.
      mixing: random groups beside the theory; None draws no such panel.
    """
    several = len(rows) > 1
    widths = [5.0, *([5.0] if several else []), *([2.6] if mixing is not None else [])]
    height = max(4.4, 1.4 + 0.24 * len(rows))
    figure = Figure(figsize=(1.5 + 1.25 * sum(widths), height), layout="constrained")
    panels = list(figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0])
    _draw_curves(panels[0], _shown(rows))
    if several:
        _draw_rows(panels[1], rows)
    if mixing is not None:
        _draw_mixing(panels[-1], mixing)
    return figure


def _shown(rows: Sequence[Row]) -> Row:
    """Whose curves tell the most: methods differ where peers fail, but not so often that all do badly."""
    published = [row for row in rows if row.setting.failure_rule == "exclude"] or list(rows)
    return max(published, key=lambda row: (row.setting.num_peers, -abs(row.setting.failure - 0.005)))


def _draw_curves(axes: Axes, row: Row) -> None:
    """Mean variance after each round; rings where the paper's means of rounds lie."""
    labels = []
    last = 1
    for method, variances in row.variances.items():
        drawn = [max(value, _FLOOR) for value in variances[: _MOST_ROUNDS + 1]]
        end = next((place for place, value in enumerate(drawn) if value <= _FLOOR), len(drawn) - 1)
        last = max(last, end)
        axes.plot(range(end + 1), drawn[: end + 1], color=_COLOURS[method], linewidth=1.6)
        for target, theirs in zip(TARGETS.values(), row.paper.get(method, ()), strict=False):
            if theirs is not None and theirs <= _MOST_ROUNDS:
                axes.plot(theirs, target, "o", mfc="white", mec=_COLOURS[method], markersize=6, zorder=3)
        labels.append((drawn[end], TITLES[method], _COLOURS[method]))
    for target in TARGETS.values():
        axes.axhline(target, color=GREY, linewidth=0.9, linestyle=(0, (5, 3)), zorder=1)
    axes.set_yscale("log")
    axes.set_ylim(_FLOOR, 3)
    axes.set_xlim(0, max(4, last))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    dress(axes, f"Variance: {row.setting}", "round (rings: the paper's mean rounds to the dashed lines)")
    end_labels(axes, labels)


def _draw_rows(axes: Axes, rows: Sequence[Row]) -> None:
    """Rounds to 1e-9 of Moshpit and random groups, ours as dots and the paper's as rings."""
    for place, row in enumerate(rows):
        for offset, method in zip((-0.17, 0.17), BARRED, strict=True):
            colour, height = _COLOURS[method], place + offset
            axes.plot(row.rounds[method]["1e-9"], height, "o", color=colour, markersize=5, zorder=2)
            if method in row.paper:
                axes.plot(row.paper[method][0], height, "o", mfc="none", mec=colour, markersize=8, zorder=3)
    axes.set_yticks(range(len(rows)), [str(row.setting) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(axis="x", color=FAINT, linewidth=0.8)
    dress(axes, "Rounds to a variance of 1e-9", "dots: here, rings: the paper's simulators")
    for number, name in enumerate(BARRED[::-1]):
        where: dict[str, Any] = {"transform": axes.transAxes, "ha": "left", "va": "top", "fontsize": 9}
        axes.text(0.02, 0.99 - 0.05 * number, TITLES[name], color=_COLOURS[name], **where)


def _draw_mixing(axes: Axes, mixing: Mixing) -> None:
    """Draw the share of the variance that rounds of random groups leave, and the formula's."""
    rounds = range(len(mixing.kept))
    axes.plot(rounds, [mixing.factor**number for number in rounds], color=GREY, linewidth=1.4)
    axes.plot(rounds, mixing.kept, "o", color=_COLOURS["random_groups"], markersize=5)
    axes.set_yscale("log")
    axes.set_xticks(list(rounds))
    dress(axes, "Random groups", "round")
    text = f"line: ((r - 1)/N + r/N²)^t\nN = {mixing.num_peers}, r = {mixing.num_peers // mixing.group_size}\n"
    where: dict[str, Any] = {"transform": axes.transAxes, "ha": "right", "va": "top", "fontsize": 9}
    axes.text(0.97, 0.97, f"{text}dots: mean of {mixing.runs} runs", color=GREY, **where)
