"""Result of a run: figures, the bars that they must reach, how both are shown, and a table of the runs compared."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.table import Table

from dmoe_jax.runs.report import ReportTable, format_value, write_report
from dmoe_jax.runs.run_folder import RunFolder

MISSED_BARS, OPEN_BARS = "missed_bars", "bars_not_decided"
"""Keys of the headline: names of the bars that were missed, and of those that an interval crosses."""

Verdict = Literal["met", "missed", "not decided"]

Finals = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""Label of a setting -> seed -> the final figures of that run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Bound that the figure of this name must reach in the headline."""

    name: str
    bound: float
    comparison: Literal["<=", ">="] = "<="

    def verdict(self, value: float | None, ends: Sequence[float] | None = None) -> Verdict:
        """Say if a figure meets the bar; a figure that is not known misses it.

        Args:
          ends: of the figure's interval; a bar that lies between them is not decided.
        """
        if value is None or math.isnan(value):
            return "missed"
        if ends is not None and ends[0] < self.bound < ends[1]:
            return "not decided"
        return "met" if (value <= self.bound if self.comparison == "<=" else value >= self.bound) else "missed"

    def __str__(self) -> str:
        return f"{self.comparison} {self.bound:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of a run, complete or as far as it got."""

    title: str
    """First line of the report and of the table in the terminal."""
    figures: Mapping[str, Any]
    """The headline by name. `name_interval`, or `name_min` and `name_max`, are shown beside `name`."""
    bars: Sequence[Bar] = ()
    """Bars that some of the figures must reach. A bar whose figure is missing is missed."""
    missed: Sequence[str] | None = None
    """More bars that were missed, in words of the experiment's own. None: it has no others."""
    shown: Mapping[str, Any] | None = None
    """Figures for readers, where the headline is not fit to be read. Default: the headline."""
    printed: Sequence[Any] | None = None
    """Output for the terminal, as Rich renders it. Default: a table of the figures."""
    summary: str = ""
    """A paragraph for the report, below its title."""
    tables: Sequence[ReportTable] = ()
    """Tables for the report, below its figure."""
    runs: Finals = field(default_factory=dict)
    """Runs of a comparison, for results.csv. Empty: the experiment compares no settings by seeds, or has no run yet."""
    failure: str = ""
    """Failure of a run that came to its end all the same, in one line: the exit status is 1. Empty: none."""

    def verdict(self, bar: Bar) -> Verdict:
        """Judge a bar's figure by its interval, or its least and greatest, where it has them."""
        figures, name = self.figures, bar.name
        ends = figures.get(f"{name}_interval")
        if ends is None and figures.keys() >= {f"{name}_min", f"{name}_max"}:
            ends = figures[f"{name}_min"], figures[f"{name}_max"]
        return bar.verdict(figures.get(name), ends)

    @property
    def missed_bars(self) -> list[str]:
        """Names of the bars that were missed, then those that the experiment names itself."""
        return [*(bar.name for bar in self.bars if self.verdict(bar) == "missed"), *(self.missed or ())]

    @property
    def headline(self) -> dict[str, Any]:
        """The figures, and the bars that were missed or not decided if there are any bars."""
        headline = dict(self.figures)
        if self.bars or self.missed is not None:
            headline[MISSED_BARS] = self.missed_bars
        if undecided := [bar.name for bar in self.bars if self.verdict(bar) == "not decided"]:
            headline[OPEN_BARS] = undecided
        return headline


_COLOURS: Mapping[Verdict, str] = {"met": "green", "missed": "red", "not decided": "yellow"}


def result_table(result: Result) -> Table:
    """Set the figures in a table for a terminal, each with its bar; green met, red missed, yellow not decided."""
    bars = {bar.name: bar for bar in result.bars}
    table = Table("figure", "value", *(["bar"] if bars else []), title=result.title, title_justify="left")
    for name, value in _rows(result):
        bar = bars.get(name)
        colour = None if bar is None else _COLOURS[result.verdict(bar)]
        table.add_row(name.replace("_", " "), value, *([str(bar or "")] if bars else []), style=colour)
    return table


def write_result(folder: RunFolder, result: Result, *, figure_text: str) -> None:
    """Write report.md: the figures, the bars beside them, the picture, settings, how to do it again."""
    tables = list(result.tables)
    if bars := result.bars:
        found = result.figures
        rows = [(bar.name.replace("_", " "), found.get(bar.name), str(bar), result.verdict(bar)) for bar in bars]
        tables.insert(0, ReportTable(title="Bars", head=("figure", "value", "bar", "verdict"), rows=rows))
    texts = {"title": result.title, "summary": result.summary, "figure_text": figure_text}
    write_report(folder, dict(_rows(result)), tables=tables, **texts)


def finals_of(records: Iterable[Mapping[str, Any]], *names: str) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Final figures in records of one run each, which have a "seed"; labels are the values of the fields `names`."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for record in records:
        found.setdefault(", ".join(str(record[name]) for name in names), {})[record["seed"]] = record
    return found


def _rows(result: Result) -> list[tuple[str, str]]:
    """The figures as (name, text), an interval, or least and greatest, in the line of what they belong to."""
    figures = dict(result.headline if result.shown is None else result.shown)
    rows = []
    for name in list(figures):
        if name not in figures:  # shown beside one before it
            continue
        text = "none" if name == MISSED_BARS and not figures[name] else format_value(figures[name])
        ends = figures.pop(f"{name}_interval", None)
        if figures.keys() >= {f"{name}_min", f"{name}_max"}:
            ends = figures.pop(f"{name}_min"), figures.pop(f"{name}_max")
        if ends is not None:
            text += f" ({format_value(ends[0])} to {format_value(ends[1])})"
        rows.append((name, text))
    return rows
