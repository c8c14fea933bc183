"""Validation loss over virtual time: a panel for each model and number of peers, a line for each method."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dmoe_jax.runs.style import GREY, dress
from experiments.moshpit_sgd.settings import MethodName
from experiments.panels import SERIES

TITLES: dict[MethodName, str] = {
    "moshpit": "Moshpit",
    "all_reduce": "All-Reduce",
    "pushsum": "PushSum (SGP)",
    "gossip": "gossip",
}
"""Names of the methods for readers, in the order of their colours."""

Record = Mapping[str, Any]
"""A line of metrics.jsonl: an evaluation, or the result of one method."""

Swarms = dict[tuple[str, int], dict[str, list[Record]]]


def by_swarm(records: Sequence[Record]) -> Swarms:
    """Sort records by (model, peers) and then by method."""
    swarms: Swarms = {}
    for record in records:
        swarms.setdefault((record["model"], record["peers"]), {}).setdefault(record["method"], []).append(record)
    return swarms


def losses_figure(evaluations: Swarms, results: Swarms) -> Figure | None:
    """Draw the losses; None where nothing was evaluated.

    Args:
      evaluations: one validation loss each.
      results: of the methods that are finished, with their times.
    """
    if not evaluations:
        return None
    models, sizes = (list(dict.fromkeys(names)) for names in zip(*evaluations, strict=True))
    figure = Figure(figsize=(1.5 + 5 * len(sizes), 0.6 + 3.2 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), len(sizes), squeeze=False)
    for row, model in enumerate(models):
        for column, peers in enumerate(sizes):
            axes, swarm = panels[row][column], (model, peers)
            _draw_panel(axes, evaluations.get(swarm, {}), results.get(swarm, {}))
            dress(axes, f"{model}, {peers} peers: validation loss (nats)", "virtual time (s)")
    return figure


def _draw_panel(axes: Axes, lines: Mapping[str, Sequence[Record]], results: Mapping[str, Sequence[Record]]) -> None:
    for (method, title), colour in zip(TITLES.items(), SERIES, strict=False):
        if method in lines:
            reached_s = results[method][-1]["reached_s"] if method in results else None
            label = title if reached_s is None else f"{title}, {reached_s:.0f} s"
            points = [(record["virtual_s"], record["loss"]) for record in lines[method]]
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.4, label=label)
    if results:
        target = next(iter(results.values()))[-1]["target"]
        axes.axhline(target, color=GREY, linestyle="--", linewidth=1)
        # From the target to where training has begun in earnest: the first evaluations would flatten the rest.
        losses = sorted(record["loss"] for line in lines.values() for record in line)
        start = losses[int(0.95 * len(losses))]
        axes.set_ylim(target - 0.1 * (start - target), start)
    axes.set_xlim(left=0)
    if lines:
        axes.legend(fontsize=8, frameon=False)
