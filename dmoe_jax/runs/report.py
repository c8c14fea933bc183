"""A run's report: one Markdown page that a reader without the code can follow, next to the figure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmoe_jax.runs.run_folder import FIGURE, METRICS, REPORT, RunFolder, flat

MAX_EVENTS = 50
"""Events in the report; a run of days has thousands, and metrics.jsonl has them all."""


_LOSSES = (
    "calls_failed",
    "samples_without_experts",
    "steps_lost",
    "averages_missed",
    "averages_rejected",
    "averaging_peers_lost",
    "samples_lost",
)
"""Figures of a headline that count what went wrong: each above 0 is worth a line beside the events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """A table for a report: a heading, the names of its columns, rows of as many cells, and a paragraph under it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    note: str = ""

    def __post_init__(self) -> None:
        if wrong := [row for row in self.rows if len(row) != len(self.head)]:
            raise ValueError(f"expected rows of {len(self.head)} cells, {', '.join(self.head)}, got {wrong[0]}")


def write_report(
    run_folder: RunFolder,
    headline: Mapping[str, object],
    *,
    title: str = "Training run",
    summary: str = "",
    command: str | None = None,
    figure_text: str = "Perplexity, load of the experts, throughput and failed calls of this run",
    tables: Sequence[ReportTable] = (),
) -> Path:
    """Write report.md and return its path: headline, figure, tables, what happened, settings, how to repeat the run.

    Args:
      headline: the figures that the run is about, by name; underscores are shown as spaces.
      command: command that gives this run again; None: the command line that made the folder.
      figure_text: describes the figure for those who cannot see it.
    """
    config = run_folder.config()
    parts = [f"# {title}"]
    if summary:
        parts.append(summary)
    figures = [(_words(name), value) for name, value in headline.items()]
    metrics = run_folder.metrics()
    parts += ["## Headline", markdown_table(("figure", "value"), figures)]
    if final := final_evaluation(metrics):
        parts.append(f"The {final[0]}. Each point of the curve is over {final[1]}.")
    if (run_folder.path / FIGURE).exists():
        parts.append(f"![{figure_text}]({FIGURE})")
    for table in tables:
        parts += [f"## {table.title}", markdown_table(table.head, table.rows), *([table.note] if table.note else [])]
    parts += ["## What happened", _events(metrics, headline)]
    settings = [(f"`{name}`", value) for name, value in flat(config.get("settings", {})).items()]
    parts += ["## Settings", markdown_table(("setting", "value"), settings)]
    parts += ["## How to reproduce", f"```sh\n{command or config.get('command', '')}\n```", _environment(config)]
    return run_folder.write_text(REPORT, "\n\n".join(parts) + "\n")


def format_value(value: object) -> str:
    """A value for a reader: four significant digits, thousands apart, a dash for what is not known."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:,.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {format_value(item)}" for name, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(format_value(item) for item in value)
    return str(value)


def spoken(unit: str, meaning: str = "") -> str:
    """The unit of an evaluation, for people; the meaning of a model's numbers tells a text's pieces from its words."""
    return unit_of(meaning) if unit == "tokens" else unit


def unit_of(meaning: str) -> str:
    """The unit of a text whose vocabulary has this meaning: words, or pieces of a tokenizer."""
    return "pieces" if re.match(r"vocabulary: [\d,]+ pieces,", meaning) else "words"


def final_evaluation(metrics: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """The result of a run's final evaluation, and the size of those of its curve; None if that is the same. Such as
    ("final perplexity, over 16,384 words: 73.5", "8,192 words")."""
    task: Mapping[str, Any] = next((record for record in metrics if record["kind"] == "task"), {"unit": "samples"})
    unit = spoken(task["unit"], str(task.get("meaning")))

    def last(kind: str) -> Mapping[str, Any]:
        found = (record for record in reversed(metrics) if record["kind"] == kind and record.get("split") == "valid")
        return next(found, {})

    point, final = last("eval"), last("final_eval")
    if not final.get("items") or not point.get("items") or point["items"] == final["items"]:
        return None
    name = "perplexity" if "perplexity" in final else "loss"
    over, of_curve = (f"{record['items']:,} {unit}" for record in (final, point))
    return f"final {name}, over {over}: {format_value(final[name])}", of_curve


def _events(metrics: Sequence[Mapping[str, Any]], headline: Mapping[str, object]) -> str:
    events = [record for record in metrics if record["kind"] == "event"]
    lost = [(name, headline[name]) for name in _LOSSES if headline.get(name)]
    lost += [(name, count) for name, count in headline.items() if name.startswith("failed: ") and count]
    if not events and not lost:
        return "Nothing out of the ordinary."
    rows: list[tuple[object, ...]] = [
        (None, None, _words(name), _detail(name, count, headline)) for name, count in lost
    ]
    for record in events[:MAX_EVENTS]:
        seconds = record.get("time_s")
        clock = None if seconds is None else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
        rows.append((record.get("step"), clock, _words(str(record.get("name"))), record.get("detail", "")))
    table = markdown_table(("step", "time", "event", "detail"), rows)
    left = len(events) - MAX_EVENTS
    return f"{table}\n\nand {left:,} more in {METRICS}." if left > 0 else table


def _detail(name: str, count: object, headline: Mapping[str, object]) -> str:
    if name != "calls_failed" or not isinstance(count, int) or not isinstance(ok := headline.get("calls_ok"), int):
        return f"{format_value(count)} in all"
    why = headline.get("failures")
    reasons = f": {format_value(why)}" if why else ""
    return f"{count:,} of {count + ok:,}{reasons}"


def _environment(config: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in config.get("versions", {}).items())
    machine = config.get("platform", {})
    place = f"{machine.get('system', 'an unknown system')} with {machine.get('cpu_count') or 'unknown'} CPU cores"
    commit = f", commit {config['commit']}" if config.get("commit") else ""
    return f"Made on {place}, started {config.get('started')}: {versions}{commit}."


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; cells that would break it are escaped."""

    def cell(value: object) -> str:
        return " ".join(format_value(value).replace("|", "\\|").split())

    lines = [head, ["---"] * len(head), *(map(cell, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _words(name: str) -> str:
    return name.replace("_", " ")
