"""Headline, figure and report of what was trained."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

from dmoe_jax.runs.report import ReportTable, format_value, write_report
from dmoe_jax.runs.run_folder import FIGURE, RunFolder, replaced_file
from dmoe_jax.runs.style import GREY, SERIES, dress
from experiments.moshpit_sgd.time_model import TimeModel

if TYPE_CHECKING:
    from experiments.moshpit_sgd.run import MoshpitSgdSettings

NAMES = {"all_reduce": "All-Reduce", "gossip": "gossip", "pushsum": "PushSum (SGP)", "moshpit": "Moshpit"}
PAPER_RESNET, PAPER_ALBERT = 1.3, 1.5
"""SGP over Moshpit for ResNet-50, All-Reduce over Moshpit for ALBERT (Ryabinin et al., 2021)."""

Record = Mapping[str, Any]


def report(folder: RunFolder, settings: "MoshpitSgdSettings", times: TimeModel, console: Console) -> dict[str, Any]:
    """Write figure.png and report.md of the methods that are finished, and print the headline."""
    records = folder.metrics()
    results = [record for record in records if record["kind"] == "result"]
    headline = make_headline(results)
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    if evaluations:
        draw(evaluations, results, folder.path / FIGURE)
    write_report(
        folder,
        headline,
        title="Time to a target loss among unequal peers that come and go",
        summary=f"Virtual seconds to a validation loss; peers average every {settings.local_steps} of their steps.",
        figure_text="Validation loss over virtual time, a line for each method",
        tables=[_result_table(results), _constants_table(times)],
    )
    for name, value in headline.items():
        console.print(f"{name.replace('_', ' ')}: {format_value(value)}", highlight=False)
    console.print(f"run folder: {folder.path}", highlight=False, soft_wrap=True)
    return headline


def make_headline(results: Sequence[Record]) -> dict[str, Any]:
    """Times to the target and their ratios to Moshpit's, by model and number of peers."""
    headline: dict[str, Any] = {}
    missed = []
    for (model, peers), methods in _by_swarm(results).items():
        reached = {method: record["reached_s"] for method, record in methods.items()}
        for method, reached_s in reached.items():
            headline[f"{model}_{peers}_{method}_s"] = reached_s
        moshpit_s = reached.get("moshpit")
        for method in ("all_reduce", "pushsum"):
            if method in reached and "moshpit" in reached:
                is_known = reached[method] is not None and moshpit_s is not None
                headline[f"{model}_{peers}_{method}_over_moshpit"] = reached[method] / moshpit_s if is_known else None
        if {"all_reduce", "moshpit"} <= set(reached):
            all_reduce_s = float("inf") if reached["all_reduce"] is None else reached["all_reduce"]
            if moshpit_s is None or moshpit_s >= all_reduce_s:
                missed.append(f"{model}_{peers}_all_reduce_over_moshpit")
    paper = {"paper_pushsum_over_moshpit_resnet": PAPER_RESNET, "paper_all_reduce_over_moshpit_albert": PAPER_ALBERT}
    return headline | paper | {"missed_bars": missed}


def draw(evaluations: Sequence[Record], results: Sequence[Record], path: Path) -> None:
    """A panel for each model and number of peers."""
    swarms: dict[tuple[str, int], list[Record]] = {}
    for record in evaluations:
        swarms.setdefault((record["model"], record["peers"]), []).append(record)
    models = list(dict.fromkeys(model for model, _ in swarms))
    sizes = list(dict.fromkeys(peers for _, peers in swarms))
    figure = Figure(figsize=(1.5 + 5 * len(sizes), 0.6 + 3.2 * len(models)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(models), len(sizes), squeeze=False)
    finished = _by_swarm(results)
    for row, model in enumerate(models):
        for column, peers in enumerate(sizes):
            records = swarms.get((model, peers), [])
            _draw_panel(panels[row][column], records, finished.get((model, peers), {}))
            dress(panels[row][column], f"{model}, {peers} peers: validation loss (nats)", "virtual time (s)")
    with replaced_file(path) as temporary:
        figure.savefig(temporary, dpi=130)


def _draw_panel(axes: Axes, evaluations: Sequence[Record], results: Mapping[str, Record]) -> None:
    for method, colour in zip(("moshpit", "all_reduce", "pushsum", "gossip"), SERIES, strict=False):
        line = [record for record in evaluations if record["method"] == method]
        if not line:
            continue
        reached_s = results[method]["reached_s"] if method in results else None
        label = NAMES[method] + ("" if reached_s is None else f", {reached_s:.0f} s")
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


def _result_table(results: Sequence[Record]) -> ReportTable:
    rows = []
    for (model, peers), methods in _by_swarm(results).items():
        base = methods.get("moshpit", {}).get("reached_s")
        for method, record in methods.items():
            reached_s = record["reached_s"]
            ratio = reached_s / base if reached_s and base else None
            counts = [record[name] for name in ("stretches", "averaged_peers", "repeated", "departures")]
            rows.append((model, peers, NAMES[method], record["target"], reached_s, ratio, *counts))
    return ReportTable(
        title="Time to the target",
        head=(
            "model",
            "peers",
            "method",
            "target",
            "virtual s",
            "over Moshpit",
            "stretches",
            "averaged",
            "hit",
            "left",
        ),
        rows=rows,
        note=f"The paper: SGP over Moshpit {PAPER_RESNET} for ResNet-50, All-Reduce over Moshpit {PAPER_ALBERT} for "
        "ALBERT. Stretches of local steps, and peers that then averaged; all-reduces that were hit by a departure; "
        "departures.",
    )


def _constants_table(times: TimeModel) -> ReportTable:
    fields = TimeModel.__dataclass_fields__
    return ReportTable(
        title="The clock", head=("constant", "value"), rows=[(name, getattr(times, name)) for name in fields]
    )


def _by_swarm(results: Sequence[Record]) -> dict[tuple[str, int], dict[str, Record]]:
    """Results by (model, peers), then by method."""
    swarms: dict[tuple[str, int], dict[str, Record]] = {}
    for record in results:
        swarms.setdefault((record["model"], record["peers"]), {})[record["method"]] = record
    return swarms
