"""Final loss over bytes sent, a point for each method and seed."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from dmoe_jax.runs.style import FAINT, GREY, dress
from experiments.panels import SERIES

TITLES: dict[str, str] = {
    "every_step": "averaging every step",
    "diloco": "DiLoCo",
    "streaming_diloco": "Streaming DiLoCo",
    "noloco": "NoLoCo",
    "sparta": "SPARTA",
    "sparse_gradients": "sparse gradients",
    "sparse_diloco": "sparse pseudo-gradients",
    "sparser_diloco": "sparser pseudo-gradients",
}
"""Names of the methods for readers."""

Record = Mapping[str, Any]
"""A line of metrics.jsonl: the result of one method with one seed."""

_WITHIN = 1.02


def traffic_figure(by_method: Mapping[str, Sequence[Record]]) -> Figure | None:
    """Draw it; None where nothing is finished."""
    if not by_method:
        return None
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    dress(axes, "validation loss (nats)", "bytes that leave a peer")
    axes.set_xscale("log")
    axes.grid(color=FAINT, linewidth=0.8)
    for number, (name, records) in enumerate(by_method.items()):
        marker = "o" if number < len(SERIES) else "s"
        x, y = [record["sent_nbytes"] for record in records], [record["loss"] for record in records]
        axes.plot(x, y, marker, color=SERIES[number % len(SERIES)], markersize=5, label=TITLES[name])
    if "every_step" in by_method:
        losses = [record["loss"] for record in by_method["every_step"]]
        bound = _WITHIN * sum(losses) / len(losses)
        axes.axhline(bound, color=GREY, linestyle="--", linewidth=1, label="averaging every step, and 2 %")
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
