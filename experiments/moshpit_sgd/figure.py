"""Validation loss over virtual time: a panel for each model and number of peers, a line for each method."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dmoe_jax.runs.style import GREY, SERIES, dress
from experiments.moshpit_sgd.paper import TITLES, Record, by_swarm


def losses_figure(evaluations: Sequence[Record], results: Sequence[Record]) -> Figure | None:
    """Draw the losses; None where nothing was evaluated.

    Args:
      evaluations: records of one validation loss each.
      results: records of the methods that are finished, with their times.
    """
    swarms, finished = by_swarm(evaluations), by_swarm(results)
    if not swarms:
        return None
    models, sizes = (list(dict.fromkeys(names)) for names in zip(*swarms, strict=True))
    figure = Figure(figsize=(1.5 + 5 * len(sizes), 0.6 + 3.2 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), len(sizes), squeeze=False)
    for row, model in enumerate(models):
        for column, peers in enumerate(sizes):
            own = [each for each in evaluations if (each["model"], each["peers"]) == (model, peers)]
            _draw_panel(panels[row][column], own, finished.get((model, peers), {}))
            dress(panels[row][column], f"{model}, {peers} peers: validation loss (nats)", "virtual time (s)")
    return figure


def _draw_panel(axes: Axes, evaluations: Sequence[Record], results: Mapping[str, Record]) -> None:
    for method, colour in zip(("moshpit", "all_reduce", "pushsum", "gossip"), SERIES, strict=False):
        line = [record for record in evaluations if record["method"] == method]
        if not line:
            continue
        reached_s = results[method]["reached_s"] if method in results else None
        label = TITLES[method] + ("" if reached_s is None else f", {reached_s:.0f} s")
        axes.plot([r["virtual_s"] for r in line], [r["loss"] for r in line], color=colour, linewidth=1.4, label=label)
    for record in list(results.values())[:1]:
        axes.axhline(record["target"], color=GREY, linestyle="--", linewidth=1)
        losses = [record["loss"] for record in evaluations]
        # From the target to where training has begun in earnest: the first evaluations would flatten the rest.
        start = sorted(losses)[int(0.95 * len(losses))]
        axes.set_ylim(record["target"] - 0.1 * (start - record["target"]), start)
    axes.set_xlim(left=0)
    if evaluations:
        axes.legend(fontsize=8, frameon=False)
