"""A run for each router and seed, in a folder each, then one table, figure and report of all."""

import math
import re
from typing import Any

from matplotlib.figure import Figure

from dmoe_jax.cli.common import one_line
from dmoe_jax.routing.base import RouterError
from dmoe_jax.routing.registry import ROUTERS
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.trainer import first_leaf
from dmoe_jax.training.saving import finished_headline
from experiments.bench import Experiment, Run
from experiments.compare_routers.settings import QUICK_ROUTERS, CompareRoutersSettings
from experiments.comparison import (
    FIGURE_TEXT,
    comparison_headline,
    comparison_table,
    draw_comparison,
    terminal_table,
)
from experiments.results import Result
from experiments.transformer_xl.training import FAILURES, checked_router, open_corpus, open_folder, train_model


def load_routers(settings: CompareRoutersSettings) -> dict[str, str]:
    """Label -> how the router was asked for, each tried on a few samples.

    Raises:
      RouterError: naming the router. ValueError: two of them would share a label or a folder.
    """
    routers: dict[str, str] = {}
    folders: dict[str, str] = {}
    for spec in settings.routers or (QUICK_ROUTERS if settings.quick else tuple(ROUTERS)):
        try:
            label = checked_router(spec, settings.size, settings.route).name
        except RouterError:
            if settings.routers or settings.route == "sequence":
                raise
            continue  # of all that are registered, one that is not for tokens
        other = folders.setdefault(run_name(label, 0), spec)
        if other != spec:
            raise ValueError(f"routers {other} and {spec} are both called {label!r}: rename one of them")
        routers[label] = spec
    return routers


def run_name(label: str, seed: int) -> str:
    """Folder of a run; what may not stand in a path is replaced, a router's name being anybody's choice."""
    return f"{re.sub(r'[^A-Za-z0-9_.+-]', '_', label)}-seed{seed}"


def measure(run: Run[CompareRoutersSettings]) -> None:
    """Train every router with every seed, in a run folder each.

    All routers are trained with the first seed before the second one begins, so that a comparison that was interrupted
    has something to compare. A run that fails is written down and does not stop the others.

    Raises:
      UsageError: for a corpus, folder, checkpoint or setting that will not do. KeyboardInterrupt.
    """
    settings = run.settings
    routers, corpus = load_routers(settings), open_corpus(run)
    run.log("routers", labels=list(routers))
    runs = [(label, seed) for seed in settings.chosen_seeds for label in routers]
    for number, (label, seed) in enumerate(runs, start=1):
        run.say(f"run {number} of {len(runs)}: {label}, seed {seed}")
        name = run_name(label, seed)
        try:
            train_model(
                *(settings, corpus, run.folder.path / name), model="dmoe", seed=seed, router=routers[label], name=label
            )
        except Exception as error:
            expected, others = BaseExceptionGroup("", [error]).split(FAILURES)
            if expected is None or others is not None:
                raise
            detail = one_line(first_leaf(expected))
            run.log("event", name="run_failed", run=name, detail=f"{name}: {detail}")
            run.say(f"{name} failed: {detail}")


def _finished(run: Run[CompareRoutersSettings]) -> dict[str, list[list[dict[str, Any]]]]:
    """Label -> metrics of the router's runs that were trained to their end, without labels that have none."""
    begun = run.records("routers")
    found = {}
    for label in begun[-1]["labels"] if begun else ():
        folders = [RunFolder(run.folder.path / run_name(label, seed)) for seed in run.settings.chosen_seeds]
        if metrics := [folder.metrics() for folder in folders if finished_headline(folder) is not None]:
            found[label] = metrics
    return found


def _failed(run: Run[CompareRoutersSettings]) -> list[str]:
    """Names of the runs that failed since the comparison was taken up last."""
    records = run.folder.metrics()
    begun = max((place for place, record in enumerate(records) if record["kind"] == "routers"), default=0)
    return [record["run"] for record in records[begun:] if record.get("name") == "run_failed"]


def summarise(run: Run[CompareRoutersSettings]) -> Result | None:
    """Compare the runs that are finished."""
    settings, corpora, begun = run.settings, run.records("corpus"), run.records("routers")
    if not begun:
        return None
    runs, failed = _finished(run), _failed(run)
    figures = comparison_headline(runs) if runs else {}
    tables = [comparison_table(runs)] if runs else []
    headline: dict[str, Any] = {
        "corpus": corpora[-1]["name"],
        "size": settings.size,
        "where": settings.place,
        "runs": len(begun[-1]["labels"]) * len(settings.chosen_seeds),
        "runs_finished": sum(map(len, runs.values())),
        "failed": failed,
    }
    if runs:
        # A perplexity beyond what a float holds is not in the metrics.
        best = min(figures, key=lambda label: figures[label]["perplexity"] or math.inf)
        headline |= {"best_router": best, "best_validation_perplexity": figures[best]["perplexity"]}
    return Result(
        title=f"Routers of a DMoE Transformer-XL on {corpora[-1]['name']}, {settings.size}, {settings.place}",
        figures={**headline, "routers": figures},
        shown=headline,
        printed=[*map(terminal_table, tables)],
        summary=f"Corpus: {corpora[-1]['description']}.",
        tables=tables,
        failure=f"{len(failed)} runs failed: {', '.join(failed)}" if failed else "",
    )


def draw(run: Run[CompareRoutersSettings], result: Result) -> Figure | None:
    """Draw the finished runs."""
    runs = _finished(run)
    return draw_comparison(runs, result.title) if runs else None


EXPERIMENT = Experiment[CompareRoutersSettings](
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text=FIGURE_TEXT,
    check=load_routers,
    open_folder=open_folder,
)
