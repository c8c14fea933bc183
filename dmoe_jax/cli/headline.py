"""The figures that a run ends with, for the terminal: of `dmoe demo` and `dmoe up`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def show_headline(console: Console, folder: Path, headline: dict[str, Any] | None = None, *, title: str) -> None:
    """Print the figures that the run in a folder ended with, and where its report is; nothing if it has none.

    Args:
      headline: the figures; None: as the folder has them.
    """
    from dmoe_jax.runs.run_folder import METRICS, read_metrics

    if headline is None:
        metrics = read_metrics(folder / METRICS) if (folder / METRICS).exists() else []
        if not any(record["kind"] == "headline" for record in metrics):
            return
        headline = headline_of(metrics)
    console.print(headline_table(headline, title))
    console.print(f"run folder: {folder} (figure.png, report.md, metrics.jsonl, config.json)")


def headline_of(metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a run's end, and how calls fared after a node was killed, from its metrics."""
    final = [record for record in metrics if record["kind"] == "headline"][-1]
    headline = {name: value for name, value in final.items() if name != "kind"}
    kills = [record for record in metrics if record["kind"] == "event" and record["name"] == "node_killed"]
    if kills:
        calls = [record for record in metrics if record["kind"] == "calls"]
        before = [record for record in calls if record["step"] <= kills[0]["step"]]
        at_kill = before[-1] if before else {"ok": 0, "failed": 0}
        ok, failed = calls[-1]["ok"] - at_kill["ok"], calls[-1]["failed"] - at_kill["failed"]
        headline |= {
            "killed_at_step": kills[0]["step"],
            "calls_after_kill": ok + failed,
            "failed_calls_after_kill": failed,
            "failed_share_after_kill": failed / max(1, ok + failed),
        }
    return headline


def headline_table(headline: dict[str, Any], title: str) -> Table:
    """The headline figures for the terminal."""
    table = Table(title=f"{title} over a local swarm", show_header=False, title_justify="left")
    for name, value in headline.items():
        if isinstance(value, dict):
            value = ", ".join(f"{reason} {count}" for reason, count in value.items()) or "none"
        table.add_row(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
    return table
