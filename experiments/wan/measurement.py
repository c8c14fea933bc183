"""All parts in turn, and one report of those that were measured.

A record of a part has "values", of the figure that is called "name", and where its panel shows them: the "line" and its
"x"; the rest is for the report's table.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dmoe_jax.runs.report import ReportTable
from dmoe_jax.runs.style import GREY, KILLED, dress
from experiments.bench import Experiment, Run
from experiments.collaborative.all_reduces import WrongResult
from experiments.panels import series_style
from experiments.results import Bar, Result, finals_of
from experiments.wan import parts
from experiments.wan.settings import PartName, WanSettings

MEASURES: Mapping[PartName, Callable[[Run[WanSettings]], None]] = {
    "allreduce": parts.measure_all_reduces,
    "state": parts.measure_downloads,
    "churn": parts.measure_churn,
    "kill": parts.measure_kills,
    "tokens": parts.measure_tokens,
}
_at_least = partial(Bar, comparison=">=")
BARS: Mapping[str, Sequence[Bar]] = {
    "allreduce": (_at_least(name="wan_share_10g_100ms", bound=0.8), _at_least(name="wan_share_1g_100ms", bound=0.9)),
    "state": (_at_least(name="state_share", bound=0.8), _at_least(name="donors_gain", bound=3.0)),
    "churn": (_at_least(name="churn_goodput_4", bound=0.9),),
    "kill": (Bar(name="kill_next_step_s_max", bound=10),),
}
PANELS = {
    "allreduce": ("All-reduce among four", "round trip (ms)", "share of the line"),
    "churn": ("Goodput under churn (bar: at 4)", "failures a minute among 16", "samples in steps, share of computed"),
    "kill": ("Killed while averaging: until the next step", "round trip (ms)", "virtual seconds"),
    "tokens": ("Traffic", "parameters of the model", "bytes a token, all lines together"),
}
"""Titles, and names of the axes, of the parts that have a panel."""


def measure(run: Run[WanSettings]) -> None:
    """Run the chosen parts."""
    for name, measure_part in MEASURES.items():
        if name in run.settings.parts:
            measure_part(run)


def summarise(run: Run[WanSettings]) -> Result | None:
    """Compute the figures from what there is, with a table of each part's records; None before the first record.

    A figure is the mean of its values, with the least and the greatest.
    """
    figures: dict[str, Any] = {}
    tables: list[ReportTable] = []
    for part in MEASURES:
        if not (records := run.records(part)):
            continue
        by_name: dict[str, list[float]] = {}
        for record in records:
            by_name.setdefault(record["name"], []).extend(record["values"])
        for name, values in by_name.items():
            figures[name] = mean(values)
            if len(values) > 1:
                figures[f"{name}_min"], figures[f"{name}_max"] = min(values), max(values)
        head = [field for field in records[0] if field != "kind"]
        rows = [[record[field] for field in head] for record in records]
        tables.append(ReportTable(title=part, head=[field.replace("_", " ") for field in head], rows=rows))
    bars = [bar for part in run.settings.parts for bar in BARS.get(part, ())]
    churns = ({**record, "goodput": record["values"][0]} for record in run.records("churn"))
    title, runs = "Training over wide-area lines", finals_of(churns, "name")
    return Result(title=title, figures=figures, bars=bars, tables=tables, runs=runs) if figures else None


def draw(run: Run[WanSettings], _: Result) -> Figure | None:
    """Draw a panel for each part that was measured and has one."""
    panels = [(part, records) for part in PANELS if (records := run.records(part))]
    if not panels:
        return None
    columns, rows = min(2, len(panels)), (len(panels) + 1) // 2
    figure = Figure(figsize=(5.5 * columns if columns > 1 else 7, 4 * rows), layout="constrained")
    for number, (part, records) in enumerate(panels, start=1):
        _draw(figure.add_subplot(rows, columns, number), part, records)
    return figure


def _draw(axes: Axes, part: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Dots for all values, and lines through the means at each x."""
    by_line: dict[str, dict[float, list[float]]] = {}
    for record in records:
        by_line.setdefault(record["line"], {}).setdefault(record["x"], []).extend(record["values"])
    for index, (line, by_x) in enumerate(by_line.items()):
        color, dashes = series_style(index)
        for x, values in by_x.items():
            axes.plot([x] * len(values), values, "o", color=color, ms=3)
        axes.plot(list(by_x), [mean(values) for values in by_x.values()], color=color, linestyle=dashes, label=line)
    for bar in BARS.get(part, ()):
        axes.axhline(bar.bound, color=KILLED, linestyle=":", linewidth=1)
    if part == "tokens":
        axes.loglog()
    else:
        axes.set_ylim(bottom=0)
    title, x_label, y_label = PANELS[part]
    axes.set_ylabel(y_label, fontsize=9, color=GREY)
    axes.legend(fontsize=8, frameon=False)
    dress(axes, title, x_label)


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="A panel for each part: shares of the line, goodput under churn, times after a kill, bytes a token",
    expected=(WrongResult,),
)
