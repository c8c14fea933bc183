"""Result of a run: figures, the bars that they must reach, and how both are shown."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table

from dmoe_jax.runs.report import ReportTable, format_value, write_report
from dmoe_jax.runs.run_folder import RunFolder

MISSED_BARS = "missed_bars"
"""Key of the headline: the names of the bars that were missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Bound that the figure of this name must reach in the headline."""

    name: str
    bound: float
    comparison: Literal["<=", ">="] = "<="

    def is_met_by(self, value: float | None) -> bool:
        """True if `value` is on the right side of the bar, or on it. A figure that is not known misses it."""
        if value is None or math.isnan(value):
            return False
        return value <= self.bound if self.comparison == "<=" else value >= self.bound

    def __str__(self) -> str:
        return f"{self.comparison} {self.bound:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of a run, complete or as far as it got."""

    title: str
    """First line of the report and of the table in the terminal."""
    figures: Mapping[str, Any]
    """The headline by name. Where there are `name_min` and `name_max`, they are shown beside `name`."""
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
    failure: str = ""
    """Failure of a run that came to its end all the same, in one line: the exit status is 1. Empty: none."""

    def meets(self, bar: Bar) -> bool:
        """True if the figure meets its bar."""
        return bar.is_met_by(self.figures.get(bar.name))

    @property
    def missed_bars(self) -> list[str]:
        """Names of the bars that were missed, then those that the experiment names itself."""
        return [*(bar.name for bar in self.bars if not self.meets(bar)), *(self.missed or ())]

    @property
    def headline(self) -> dict[str, Any]:
        """The figures, and the missed bars if there are any bars."""
        has_bars = bool(self.bars) or self.missed is not None
        return {**self.figures, **({MISSED_BARS: self.missed_bars} if has_bars else {})}


def result_table(result: Result) -> Table:
    """Set the figures in a table for a terminal, each with its bar; green meets the bar, red misses it."""
    bars = {bar.name: bar for bar in result.bars}
    table = Table("figure", "value", *(["bar"] if bars else []), title=result.title, title_justify="left")
    for name, value in _rows(result):
        bar = bars.get(name)
        colour = None if bar is None else "green" if result.meets(bar) else "red"
        table.add_row(name.replace("_", " "), value, *([str(bar or "")] if bars else []), style=colour)
    return table


def write_result(folder: RunFolder, result: Result, *, figure_text: str) -> None:
    """Write report.md: the figures, the bars beside them, the picture, settings, how to do it again."""
    tables = list(result.tables)
    if bars := result.bars:
        rows = [(bar.name.replace("_", " "), result.figures.get(bar.name), str(bar), result.meets(bar)) for bar in bars]
        tables.insert(0, ReportTable(title="Bars", head=("figure", "value", "bar", "met"), rows=rows))
    write_report(
        folder,
        dict(_rows(result)),
        title=result.title,
        summary=result.summary,
        figure_text=figure_text,
        tables=tables,
    )


def _rows(result: Result) -> list[tuple[str, str]]:
    """The figures as (name, text), least and greatest in the line of what they belong to."""
    figures = dict(result.headline if result.shown is None else result.shown)
    rows = []
    for name in list(figures):
        if name not in figures:  # the least or the greatest of one before it
            continue
        text = "none" if name == MISSED_BARS and not figures[name] else format_value(figures[name])
        if figures.keys() >= {f"{name}_min", f"{name}_max"}:
            text += f" ({format_value(figures.pop(f'{name}_min'))} to {format_value(figures.pop(f'{name}_max'))})"
        rows.append((name, text))
    return rows
