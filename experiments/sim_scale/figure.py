"""Cost of the simulation beside its computing, and what the swarm of the scenario went through, in one figure."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dmoe_jax.runs.run_folder import read_metrics
from dmoe_jax.runs.style import FAINT, GREY, INK, KILLED, VALID, dress
from dmoe_net.transport.sim.events import Heal, HostDown, HostUp, NetworkEvent, Partition, SetHost
from experiments.bench import Run
from experiments.panels import draw_rounds
from experiments.sim_scale.scenario import SCHEDULE
from experiments.sim_scale.settings import ScaleSettings


def scale_figure(run: Run[ScaleSettings], *, ratio_bar: float, rate_bar: float) -> Figure:
    """Draw the time of a step, the messages a second, and the story of the scenario.

    Args:
      run: whose folder has the scenarios' metrics.
      ratio_bar: of the time of a step, as a multiple of its computing.
      rate_bar: of the messages a second.
    """
    figure = Figure(figsize=(12, 4), layout="constrained")
    cost, rate, story = figure.subplots(1, 3, width_ratios=(3, 3, 7))
    _draw_cost(cost, run.records("step"), ratio_bar)
    dress(cost, f"A step of {run.settings.trainers} trainers (s)", "measurement")
    rates = [record["messages_per_s"] for record in run.records("messages")]
    draw_rounds(rate, f"Messages/s, {run.settings.peers:,} peers", rates, bar=(rate_bar, f"bar {rate_bar:,.0f}"))
    _draw_story(story, [read_metrics(path) for path in sorted(run.folder.path.glob("scenario-*.jsonl"))])
    return figure


def _draw_cost(axes: Axes, steps: Sequence[Mapping[str, Any]], bar: float) -> None:
    """For each measurement the XLA calls alone, and beside them the same in the swarm."""
    for place, step in enumerate(steps, start=1):
        alone, swarm = step["compute_s"], step["wall_s"]
        labels = ("XLA calls alone", "in the swarm", f"bar {bar:g}x") if place == 1 else (None, None, None)
        axes.bar(place - 0.2, alone, color=GREY, width=0.36, label=labels[0])
        axes.bar(place + 0.2, swarm, color=VALID, width=0.36, label=labels[1])
        axes.text(place + 0.2, swarm, f"{swarm / alone:.2f}x", ha="center", va="bottom", fontsize=9, color=INK)
        # The bar is a multiple of each measurement's own computing.
        line: dict[str, Any] = {"color": KILLED, "linestyle": "--", "linewidth": 1.2, "label": labels[2]}
        axes.plot([place - 0.4, place + 0.4], [bar * alone] * 2, **line)
    axes.set_xticks(range(1, len(steps) + 1))
    # With room above for the legend.
    axes.set_ylim(0, 1.4 * max(max(bar * step["compute_s"], step["wall_s"]) for step in steps))
    axes.legend(fontsize=8, frameon=False, loc="upper left")


def _draw_story(axes: Axes, runs: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Steps of the scenario over virtual time, one line for each process: they coincide."""
    last_s = last_step = 1.0
    for number, records in enumerate(runs):
        steps = [record for record in records if record["kind"] == "step"]
        times = [0.0, *(record["virtual_s"] for record in steps)]
        style: dict[str, Any] = {"color": GREY, "linewidth": 6} if number == 0 else {"color": VALID, "linewidth": 1.4}
        axes.step(times, [0, *(record["step"] for record in steps)], where="post", **style)
        last_s, last_step = max(last_s, *times), max(last_step, float(len(steps)))
    axes.set_xlim(0, 1.03 * last_s)
    axes.set_ylim(0, 1.5 * last_step)
    cut_s: float | None = None
    for when_s, event in (entry for entry in SCHEDULE if entry[0] <= last_s):
        if isinstance(event, Heal) and cut_s is not None:
            axes.axvspan(cut_s, when_s, color=FAINT, zorder=0)
        cut_s = when_s if isinstance(event, Partition) else cut_s
        axes.axvline(when_s, color=KILLED, linestyle=":", linewidth=1)
        axes.text(when_s, 1.48 * last_step, f" {_name_of(event)}", rotation=90, va="top", fontsize=8, color=KILLED)
    dress(axes, f"Steps of the troubled swarm in {len(runs)} processes, a line each", "virtual time (s)")


def _name_of(event: NetworkEvent) -> str:
    match event:
        case SetHost(host=host):
            return f"{host} slow"
        case HostDown(host=host, silent=silent):
            return f"{host} {'unplugged' if silent else 'down'}"
        case HostUp(host=host):
            return f"{host} up"
        case Partition():
            return "partition"
        case Heal():
            return "healed"
    raise ValueError(f"the figure has no name for {event}")
