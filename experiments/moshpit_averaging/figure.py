"""Variance over rounds, rounds beside the paper's, and random groups beside the theory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dmoe_jax.runs.run_folder import replaced_file
from dmoe_jax.runs.style import FAINT, GREY, INK, KILLED, SERIES, VALID, dress, end_labels
from experiments.moshpit_averaging.paper import BARRED, TARGETS, TITLES, MethodName
from experiments.moshpit_averaging.simulation import Mixing

if TYPE_CHECKING:
    from experiments.moshpit_averaging.reporting import Result

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


def averaging_figure(results: Sequence[Result], mixing: Mixing | None, path: Path) -> Path:
    """Draw figure.png: of one setting its curves, of several also a panel with a row for each.

    Args:
      results: at least one; of several the curves are those of the most peers with a probability of failure of 0.005.
      mixing: random groups beside the theory, of the last; None draws no such panel.
      path: where the picture goes.
    """
    several = len(results) > 1
    widths = [5.0, *([5.0] if several else []), *([2.6] if mixing is not None else [])]
    height = max(4.4, 1.4 + 0.24 * len(results))
    figure = Figure(figsize=(1.5 + 1.25 * sum(widths), height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0])
    _draw_curves(panels[0], _shown(results))
    if several:
        _draw_rows(panels[1], results)
    if mixing is not None:
        _draw_mixing(panels[-1], mixing, results[-1])
    with replaced_file(path) as temporary:
        figure.savefig(temporary, dpi=130)
    return path


def _shown(results: Sequence[Result]) -> Result:
    """Whose curves tell the most: methods differ where peers fail, but not so often that all do badly."""
    published = [result for result in results if result.setting.failure_rule == "exclude"] or list(results)
    return max(published, key=lambda result: (result.setting.num_peers, -abs(result.setting.failure - 0.005)))


def _draw_curves(axes: Axes, result: Result) -> None:
    """Mean variance after each round; rings where the paper's means of rounds lie."""
    labels = []
    last = 1
    for method, variances in result.variances.items():
        drawn = [max(value, _FLOOR) for value in variances[: _MOST_ROUNDS + 1]]
        end = next((place for place, value in enumerate(drawn) if value <= _FLOOR), len(drawn) - 1)
        last = max(last, end)
        axes.plot(range(end + 1), drawn[: end + 1], color=_COLOURS[method], linewidth=1.6)
        for target, theirs in zip(TARGETS.values(), result.paper.get(method, ()), strict=False):
            if theirs is not None and theirs <= _MOST_ROUNDS:
                axes.plot(theirs, target, "o", mfc="white", mec=_COLOURS[method], markersize=6, zorder=3)
        labels.append((drawn[end], TITLES[method], _COLOURS[method]))
    for target in TARGETS.values():
        axes.axhline(target, color=GREY, linewidth=0.9, linestyle=(0, (5, 3)), zorder=1)
    axes.set_yscale("log")
    axes.set_ylim(_FLOOR, 3)
    axes.set_xlim(0, max(4, last))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    dress(axes, f"Variance: {result.setting}", "round (rings: the paper's mean rounds to the dashed lines)")
    end_labels(axes, labels)


def _draw_rows(axes: Axes, results: Sequence[Result]) -> None:
    """Rounds to 1e-9 of Moshpit and random groups, ours as dots and the paper's as rings."""
    for place, result in enumerate(results):
        for offset, method in zip((-0.17, 0.17), BARRED, strict=True):
            colour, height = _COLOURS[method], place + offset
            axes.plot(result.rounds[method]["1e-9"], height, "o", color=colour, markersize=5, zorder=2)
            if method in result.paper:
                axes.plot(result.paper[method][0], height, "o", mfc="none", mec=colour, markersize=8, zorder=3)
    axes.set_yticks(range(len(results)), [str(result.setting) for result in results])
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(axis="x", color=FAINT, linewidth=0.8)
    dress(axes, "Rounds to a variance of 1e-9", "dots: here, rings: the paper's simulators")
    for number, name in enumerate(BARRED[::-1]):
        where: dict[str, Any] = {"transform": axes.transAxes, "ha": "right", "va": "top", "fontsize": 9}
        axes.text(0.98, 0.99 - 0.05 * number, TITLES[name], color=_COLOURS[name], **where)


def _draw_mixing(axes: Axes, mixing: Mixing, result: Result) -> None:
    """What rounds of random groups leave of the variance, and the formula."""
    rounds = range(len(mixing.kept))
    axes.plot(rounds, [mixing.factor**number for number in rounds], color=GREY, linewidth=1.4)
    axes.plot(rounds, mixing.kept, "o", color=_COLOURS["random_groups"], markersize=5)
    axes.set_yscale("log")
    axes.set_xticks(list(rounds))
    dress(axes, "Random groups", "round")
    axes.text(
        0.97, 0.97, f"line: ((r - 1)/N + r/N²)^t\nN = {result.setting.num_peers}, "
        f"r = {result.setting.num_peers // result.setting.grid.side}\ndots: mean of {mixing.runs} runs",
        transform=axes.transAxes, ha="right", va="top", fontsize=9, color=GREY,
    )  # fmt: skip
