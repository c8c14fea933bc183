"""What the simulation costs beside its computing, and what the swarm of the scenario went through."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dmoe_jax.runs.run_folder import read_metrics, replaced_file
from dmoe_jax.runs.style import GREY, KILLED, VALID, dress

EVENTS = {
    "SetHost": "slow peer",
    "HostDown": "node down",
    "Partition": "partition",
    "Heal": "heal",
    "HostUp": "node up",
}


def scale_figure(headline: Mapping[str, Any], records: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw figure.png.

    Args:
      headline: the figures of the run.
      records: its metrics.
      path: where the picture goes; the scenario's metrics lie beside it.
    """
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    cost, rate, story = figure.subplots(1, 3, width_ratios=(1, 1, 2))
    bars = [headline["trainers_compute_s"], headline["trainers_wall_s"]]
    cost.bar(["XLA alone", "swarm"], bars, color=[GREY, VALID], width=0.6)
    cost.axhline(3.0 * bars[0], color=KILLED, linestyle="--", linewidth=1.2)
    cost.set_ylim(0, 3.4 * bars[0])
    dress(cost, f"A step of 64 trainers (s): {headline['trainers_ratio']:.2f}x", "")
    rates = [record["messages_per_s"] for record in records if record["kind"] == "messages"]
    rate.bar(range(1, len(rates) + 1), rates, color=VALID, width=0.6)
    rate.axhline(5000.0, color=KILLED, linestyle="--", linewidth=1.2)
    rate.set_xticks(range(1, len(rates) + 1))
    rate.set_ylim(0, 1.2 * max(5000.0, *rates))
    dress(rate, f"Messages/s, {headline['peers']} peers", "run")
    _draw_story(story, path.parent)
    with replaced_file(path) as temporary:
        figure.savefig(temporary, dpi=130)
    return path


def _draw_story(axes: Any, folder: Path) -> None:
    """Steps of the scenario over virtual time, one line for each process: they coincide."""
    from experiments.sim_scale.scenario import SCHEDULE

    for number, metrics in enumerate(sorted(folder.glob("scenario-*.jsonl"))):
        records = [record for record in read_metrics(metrics) if record["kind"] == "step"]
        times = [record["virtual_s"] for record in records]
        style = {"color": GREY, "linewidth": 5} if number == 0 else {"color": VALID, "linewidth": 1.4}
        axes.step(times, [record["step"] for record in records], where="post", **style)
    for when_s, event in SCHEDULE:
        if when_s <= axes.get_xlim()[1]:
            axes.axvline(when_s, color=KILLED, linestyle=":", linewidth=1)
            label = EVENTS[type(event).__name__]
            axes.text(when_s, axes.get_ylim()[1], f" {label}", rotation=90, va="top", fontsize=7, color=KILLED)
    dress(axes, "Steps of the troubled swarm, each process one line", "virtual time (s)")
