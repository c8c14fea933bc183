"""A run for each router and seed, in a folder each, then one table, figure and report of all."""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from dmoe_jax.cli.common import mistakes_in_one_line, one_line
from dmoe_jax.data.corpora import Corpus, load_corpus
from dmoe_jax.routing.base import Router, RouterError
from dmoe_jax.routing.check import check_router
from dmoe_jax.routing.registry import ROUTERS, make_router
from dmoe_jax.runs.report import ReportTable, format_value
from dmoe_jax.runs.run_folder import FIGURE, RunFolder
from dmoe_jax.trainer import first_leaf
from dmoe_jax.training.saving import finished_headline, prepare_run
from experiments.bench import Experiment, Run
from experiments.compare_routers.settings import (
    QUICK_EVAL_TOKENS,
    QUICK_PAUSES,
    QUICK_ROUTERS,
    QUICK_STEPS,
    CompareRoutersSettings,
)
from experiments.comparison import comparison_figure, comparison_headline, comparison_table, write_comparison_report
from experiments.results import Result
from experiments.transformer_xl.presets import PRESETS
from experiments.transformer_xl.setup import Setup
from experiments.transformer_xl.stretches import Setting
from experiments.transformer_xl.training import make_plan, train_in_folder
from net.errors import NetError

_PRINTED = ("", "validation perplexity", "final load cv", "final load entropy", "idle experts", "calls lost")
"""Columns of the table that fit into 80 characters; the report has them all."""

_FAILURES = (FloatingPointError, RouterError, NetError)
"""What may go wrong with a run."""


def check(settings: CompareRoutersSettings) -> None:
    """Try all routers before anything is trained or written. Raises as `load_routers`."""
    load_routers(settings)


def load_routers(settings: CompareRoutersSettings) -> dict[str, tuple[str, Router]]:
    """Label -> (how it was asked for, the router), each tried on a few samples.

    Raises:
      RouterError: naming the router. ValueError: two of them would share a label or a folder.
    """
    preset = PRESETS["dmoe", settings.size]
    routers: dict[str, tuple[str, Router]] = {}
    folders: dict[str, str] = {}
    for spec in settings.routers or (QUICK_ROUTERS if settings.quick else tuple(ROUTERS)):
        router = make_router(spec, preset.grid_size)
        check_router(router, preset.grid_size, preset.d_model)
        other = folders.setdefault(run_name(router.name, 0), spec)
        if other != spec:
            raise ValueError(f"routers {other} and {spec} are both called {router.name!r}: rename one of them")
        routers[router.name] = spec, router
    return routers


def run_name(label: str, seed: int) -> str:
    """Folder of a run; what may not stand in a path is replaced, a router's name being anybody's choice."""
    return f"{re.sub(r'[^A-Za-z0-9_.+-]', '_', label)}-seed{seed}"


def open_folder(settings: CompareRoutersSettings, name: str) -> RunFolder:
    """Open the folder of all runs. Raises ValueError and OSError as `prepare_run`."""
    fields = {key: value for key, value in asdict(settings).items() if key not in ("out", "resume", "json")}
    fields |= {"experiment": name, "seeds": settings.chosen_seeds}
    may_differ = ("routers", "seeds")
    return prepare_run(settings.out, fields, name=name, resume=settings.resume, may_differ=may_differ).begin()


def measure(run: Run[CompareRoutersSettings]) -> None:
    """Train every router with every seed, in a run folder each.

    All routers are trained with the first seed before the second one begins, so that a comparison that was interrupted
    has something to compare. A run that fails is written down and does not stop the others.

    Raises:
      UsageError: for a corpus, folder, checkpoint or setting that will not do. KeyboardInterrupt.
    """
    with mistakes_in_one_line():
        routers = load_routers(run.settings)
        corpus = load_corpus(source=run.settings.data)
    run.log("corpus", name=corpus.name, description=corpus.description)
    run.log("routers", labels=list(routers))
    run.say(f"corpus: {corpus.description}")
    run.say(f"run folder: {run.folder.path}")
    runs = [(label, seed) for seed in run.settings.chosen_seeds for label in routers]
    for number, (label, seed) in enumerate(runs, start=1):
        run.say(f"run {number} of {len(runs)}: {label}, seed {seed}")
        spec, router = routers[label]
        try:
            _train(run, corpus, router, spec, seed)
        except Exception as error:
            expected, others = BaseExceptionGroup("", [error]).split(_FAILURES)
            if expected is None or others is not None:
                raise
            name, detail = run_name(label, seed), one_line(first_leaf(expected))
            run.log("event", name="run_failed", run=name, detail=f"{name}: {detail}")
            run.say(f"{name} failed: {detail}")


def _train(run: Run[CompareRoutersSettings], corpus: Corpus, router: Router, spec: str, seed: int) -> None:
    """Train one run in its own folder, or go on with it, to its end."""
    settings, preset, place = run.settings, PRESETS["dmoe", run.settings.size], run.settings.place
    steps = settings.steps or (preset.steps if place == "local" else preset.simulated_steps)
    eval_tokens, eval_every, final_eval_tokens = settings.eval_tokens, settings.eval_every, 0
    if settings.quick:
        steps = min(steps, QUICK_STEPS[place])
        eval_every = eval_every or max(1, steps // QUICK_PAUSES)
        eval_tokens = final_eval_tokens = min(eval_tokens or QUICK_EVAL_TOKENS, QUICK_EVAL_TOKENS)
    with mistakes_in_one_line():
        setup = Setup(preset=preset, corpus=corpus, steps=steps, seed=seed, router=router, name=router.name)
        setting = Setting(num_trainers=settings.trainers, delay_s=settings.delay_s, failure_rate=settings.failure_rate)
        plan = make_plan(
            preset, steps=steps, eval_every=eval_every, eval_tokens=eval_tokens, final_eval_tokens=final_eval_tokens
        )
    train_in_folder(
        setup,
        plan,
        run.folder.path / run_name(router.name, seed),
        where=place,
        router=spec,
        batch_size=settings.batch_size,
        setting=setting,
        resume=settings.resume,
    )


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
        printed=[_printed(comparison_table(runs))] if runs else [],
        summary=f"Corpus: {corpora[-1]['description']}.",
        failure=f"{len(failed)} runs failed: {', '.join(failed)}" if failed else "",
    )


def _printed(table: ReportTable) -> Table:
    """For the terminal."""
    places: Sequence[int] = [place for place, name in enumerate(table.head) if name in _PRINTED]
    printed = Table(title=table.title, title_justify="left")
    for place in places:
        printed.add_column(table.head[place], no_wrap=place == 0)
    for row in table.rows:
        printed.add_row(*(format_value(row[place]) for place in places))
    return printed


def write_report(run: Run[CompareRoutersSettings], result: Result) -> None:
    """Draw the figure of the finished runs and write the report."""
    if runs := _finished(run):
        comparison_figure(runs, run.folder.path / FIGURE, title=result.title)
        shown = result.headline if result.shown is None else result.shown
        write_comparison_report(run.folder, runs, shown, title=result.title, summary=result.summary)
    run.log("headline", **result.headline)


EXPERIMENT = Experiment[CompareRoutersSettings](
    measure=measure, summarise=summarise, check=check, open_folder=open_folder, write_report=write_report
)
