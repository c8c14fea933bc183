"""What the finished runs of a comparison came to: headline, figure, table and report."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dmoe_jax.runs.comparison import (
    comparison_figure,
    comparison_headline,
    comparison_table,
    write_comparison_report,
)
from rich.console import Console
from rich.table import Table

from dmoe_jax.data.corpora import Corpus
from dmoe_jax.runs.report import ReportTable, format_value
from dmoe_jax.runs.run_folder import FIGURE, RunFolder
from experiments.transformer_xl.resuming import finished_headline

_PRINTED = ("", "validation perplexity", "final load cv", "final load entropy", "idle experts", "calls lost")


def run_name(label: str, seed: int) -> str:
    """Folder of a run; what may not stand in a path is replaced, a router's name being anybody's choice."""
    return f"{re.sub(r'[^A-Za-z0-9_.+-]', '_', label)}-seed{seed}"


def report(
    folder: RunFolder,
    corpus: Corpus,
    *,
    size: str,
    where: str,
    labels: Sequence[str],
    seeds: Sequence[int],
    failed: Sequence[str],
) -> tuple[dict[str, Any], ReportTable | None]:
    """Draw the figure and write the report of the runs that are finished.

    Args:
      folder: of the comparison, with the runs' folders in it.
      corpus: the text.
      size, where: of the model, and where it trained.
      labels: all routers. seeds: all seeds.
      failed: names of the runs that failed.

    Returns:
      The headline, and the table of all labels; None without a finished run.
    """
    finished = {label: _finished(folder.path, label, seeds) for label in labels}
    runs = {label: metrics for label, metrics in finished.items() if metrics}
    figures = comparison_headline(runs) if runs else {}
    headline: dict[str, Any] = {
        "corpus": corpus.name,
        "size": size,
        "where": where,
        "runs": len(labels) * len(seeds),
        "runs_finished": sum(map(len, runs.values())),
        "failed": list(failed),
    }
    table = None
    if runs:
        # A perplexity beyond what a float holds is not in the metrics.
        best = min(figures, key=lambda label: figures[label]["perplexity"] or math.inf)
        headline |= {"best_router": best, "best_validation_perplexity": figures[best]["perplexity"]}
        title = f"Routers of a DMoE Transformer-XL on {corpus.name}, {size}, {where}"
        comparison_figure(runs, folder.path / FIGURE, title=title)
        table = comparison_table(runs)
        write_comparison_report(folder, runs, headline, title=title, summary=f"Corpus: {corpus.description}.")
    headline["routers"] = figures
    folder.log("headline", **headline)
    return headline, table


def print_table(table: ReportTable, console: Console) -> None:
    """For the terminal: the columns that fit into 80 characters; the report has them all."""
    places = [place for place, name in enumerate(table.head) if name in _PRINTED]
    printed = Table(title=table.title, title_justify="left")
    for place in places:
        printed.add_column(table.head[place], no_wrap=place == 0)
    for row in table.rows:
        printed.add_row(*(format_value(row[place]) for place in places))
    console.print(printed)


def _finished(parent: Path, label: str, seeds: Sequence[int]) -> list[list[dict[str, Any]]]:
    """Metrics of the router's runs that were trained to their end."""
    folders = [RunFolder(parent / run_name(label, seed)) for seed in seeds]
    return [folder.metrics() for folder in folders if finished_headline(folder) is not None]
