"""A run for each router, condition and seed, in a folder each, then tables, figure and report of all."""

import math
import time
from dataclasses import replace
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from dmoe_jax.data.corpora import Corpus
from dmoe_jax.routing.base import RouterError
from dmoe_jax.routing.registry import ROUTERS
from dmoe_jax.runs.endings import mistakes_in_one_line, one_line
from dmoe_jax.runs.report import ReportTable
from dmoe_jax.trainer import first_leaf
from dmoe_jax.training.prepared_run import finished_headline
from experiments.bench import Experiment, Run
from experiments.compare_routers.budget import BudgetPlan, Cost, plan_runs
from experiments.compare_routers.pairs import all_pairs, pairs_headline, pairs_table, ranking_table, sentences
from experiments.compare_routers.pieces import time_pieces
from experiments.compare_routers.settings import NAME, QUICK_ROUTERS, WITH_LOSS, CompareRoutersSettings
from experiments.compare_routers.trainings import RouterRun, router_runs, run_name
from experiments.comparison import (
    FIGURE_TEXT,
    comparison_headline,
    comparison_table,
    draw_comparison,
    terminal_table,
)
from experiments.exits import run_until_signal
from experiments.results import Result
from experiments.run_summary import summarise_run
from experiments.transformer_xl.presets import sized_preset
from experiments.transformer_xl.settings import QUICK_PAUSES
from experiments.transformer_xl.side_by_side import run_folder, train_side_by_side
from experiments.transformer_xl.training import FAILURES, carry_out, checked_router, make_plan, open_corpus, open_folder

Seeds = dict[int, list[dict[str, Any]]]
"""Seed -> metrics of a run that was trained to its end."""


def load_routers(settings: CompareRoutersSettings) -> dict[str, str]:
    """Label -> how the router was asked for, each tried on a few samples.

    Raises:
      RouterError: naming the router. ValueError: two of them would share a label or a folder.
    """
    config = sized_preset(settings, "dmoe").config
    routers: dict[str, str] = {}
    folders: dict[str, str] = {}
    for spec in settings.routers or (QUICK_ROUTERS if settings.quick else (*ROUTERS, WITH_LOSS)):
        try:
            label = checked_router(spec, config, settings.route).name
        except RouterError:
            if settings.routers or settings.route == "sequence":
                raise
            continue  # of all that are registered, one that is not for tokens
        other = folders.setdefault(run_name(label, 0), spec)
        if other != spec:
            raise ValueError(f"routers {other} and {spec} are both called {label!r}: rename one of them")
        routers[label] = spec
    return routers


def measure(run: Run[CompareRoutersSettings]) -> None:
    """Train every router under every condition with every seed, in a run folder each.

    All routers are trained with the first seed before the second one begins, so that a comparison that was interrupted
    has something to compare. A run that fails is written down and does not stop the others.

    Raises:
      UsageError: for a corpus, folder, checkpoint or setting that will not do. KeyboardInterrupt.
    """
    settings = run.settings
    routers, corpus = load_routers(settings), open_corpus(run)
    if settings.budget is not None and not run.records("plan"):
        run.log("plan", **_plan(run, routers, corpus).record())
    run.log("routers", labels=list(routers))
    runs = _runs(run, routers)
    if settings.budget is not None:
        plan = BudgetPlan.of_record(run.records("plan")[-1])
        run.say(f"the budget's plan: seeds {' '.join(map(str, plan.seeds))}, {plan.steps} updates of each run")
    num_jobs = min(settings.num_jobs, len(runs))
    if num_jobs > 1:
        _train_side_by_side(run, runs, corpus, num_jobs)
        return
    for number, each in enumerate(runs, start=1):
        training = each.training
        run.say(f"run {number} of {len(runs)}: {training.label}, seed {training.settings.seed}")
        try:
            carry_out(replace(training, may_fail=False), corpus)
        except Exception as error:
            expected, others = BaseExceptionGroup("", [error]).split(FAILURES)
            if expected is None or others is not None:
                raise
            _note_failure(run, each, one_line(first_leaf(expected)))


def _train_side_by_side(run: Run[CompareRoutersSettings], runs: list[RouterRun], corpus: Corpus, num_jobs: int) -> None:
    """Train in several processes at once, those that are to be trained still."""
    waiting = [each for each in runs if finished_headline(run_folder(each.training)) is None]
    for each in runs:
        if each not in waiting:
            carry_out(each.training, corpus)  # sees that it was trained under these settings, and leaves it as it is
    trainings = [each.training for each in waiting]
    run.say(f"{len(trainings)} of {len(runs)} runs are to be trained, {num_jobs} at a time")
    side_by_side = partial(train_side_by_side, trainings, run.console, num_jobs=num_jobs)
    run_until_signal(side_by_side, prog=NAME)
    for each in waiting:
        if finished_headline(run_folder(each.training)) is None:
            events = [record for record in run_folder(each.training).metrics() if record.get("name") == "failed"]
            _note_failure(run, each, events[-1]["detail"] if events else "it ended early")


def _note_failure(run: Run[CompareRoutersSettings], each: RouterRun, detail: str) -> None:
    name = run_folder(each.training).path.name
    run.log("event", name="run_failed", run=name, detail=f"{name}: {detail}")
    run.say(f"{name} failed: {detail}")


def _plan(run: Run[CompareRoutersSettings], routers: dict[str, str], corpus: Corpus) -> BudgetPlan:
    """Time a piece of each router, and choose seeds and updates.

    Raises:
      UsageError: too little fits.
    """
    settings, began = run.settings, time.monotonic()
    # Under the settings as they are: calls that fail are computed all the same, and nodes wait in virtual time.
    alone = router_runs(replace(settings, failures=(), slow_nodes=()), routers, run.folder.path, seeds=(0,))

    def note(router: str, cost: Cost) -> None:
        run.say(f"{router}: {cost.start_s:.1f} s to compile, {1e3 * cost.update_s:.0f} ms an update")

    pieces = {each.router: each.training for each in alone}
    costs = time_pieces(pieces, data=settings.data, num_jobs=settings.num_jobs, note=note)
    preset = sized_preset(settings, "dmoe")
    whole = make_plan(router_runs(settings, routers, run.folder.path, seeds=(0,))[0].training.settings, preset)
    num_pauses = math.ceil(whole.steps / whole.eval_every) if settings.eval_every else preset.pauses
    sizes = [corpus.valid.size, corpus.test.size]
    num_words = sum(min(whole.final_eval_items or size, size) for size in sizes)
    num_words += (QUICK_PAUSES if settings.quick else num_pauses) * min(whole.eval_items or sizes[0], sizes[0])
    with mistakes_in_one_line():
        return plan_runs(
            list(costs.values()) * len(settings.conditions),
            budget_s=settings.budget_s,
            spent_s=time.monotonic() - began,
            num_words=num_words,
            num_jobs=settings.num_jobs,
            most_steps=whole.steps,
            seeds=settings.seeds,
            steps=settings.steps,
        )


def _runs(run: Run[CompareRoutersSettings], routers: dict[str, str]) -> list[RouterRun]:
    """All runs, as the plan has them if there is one."""
    settings, plans = run.settings, run.records("plan")
    plan = BudgetPlan.of_record(plans[-1]) if plans and settings.budget is not None else None
    seeds, steps = (settings.chosen_seeds, None) if plan is None else (plan.seeds, plan.steps)
    return router_runs(settings, routers, run.folder.path, seeds=seeds, steps=steps)


def _finished(run: Run[CompareRoutersSettings]) -> dict[str, dict[str, Seeds]]:
    """Condition -> label -> its runs that were trained to their end, without those that have none."""
    begun, found = run.records("routers"), dict[str, dict[str, Seeds]]()
    labels = begun[-1]["labels"] if begun else []
    for each in _runs(run, dict.fromkeys(labels, "product_key")):
        if finished_headline(run_folder(each.training)) is not None:
            rows = found.setdefault(each.condition.name, {})
            rows.setdefault(each.training.label, {})[each.training.settings.seed] = run_folder(each.training).metrics()
    # In the order of the command line, whatever the seeds that are finished.
    order = [condition.label(label) for condition in run.settings.conditions for label in labels]
    return {name: {label: rows[label] for label in order if label in rows} for name, rows in found.items()}


def _failed(run: Run[CompareRoutersSettings]) -> list[str]:
    """Names of the runs that failed since the comparison was taken up last."""
    records = run.folder.metrics()
    begun = max((place for place, record in enumerate(records) if record["kind"] == "routers"), default=0)
    return [record["run"] for record in records[begun:] if record.get("name") == "run_failed"]


def _compare(name: str, rows: dict[str, Seeds]) -> tuple[dict[str, Any], list[ReportTable]]:
    """(figures, tables) of one condition."""
    perplexities: dict[str, dict[int, float]] = {}
    entropies = {}
    for label, seeds in rows.items():
        summaries = {seed: summarise_run(metrics) for seed, metrics in seeds.items()}
        perplexities[label] = {
            seed: summary.perplexity for seed, summary in summaries.items() if summary.perplexity is not None
        }
        known = [each.final_load_entropy for each in summaries.values() if each.final_load_entropy is not None]
        entropies[label] = sum(known) / len(known) if known else None
    pairs, at = all_pairs(perplexities), f": {name}" if name else ""
    figures: dict[str, Any] = {
        "routers": comparison_headline({label: list(seeds.values()) for label, seeds in rows.items()}),
        "pairs": pairs_headline(pairs),
        "pairs_told_apart": sum(pair.is_told_apart for pair in pairs),
        "says": sentences(perplexities, entropies),
    }
    tables = [ranking_table(perplexities, pairs, f"In order{at}")]
    tables += [pairs_table(pairs, f"Every pair{at}")] if pairs else []
    return figures, tables


def summarise(run: Run[CompareRoutersSettings]) -> Result | None:
    """Compare the runs that are finished."""
    settings, corpora, begun = run.settings, run.records("corpus"), run.records("routers")
    if not begun:
        return None
    finished, failed = _finished(run), _failed(run)
    all_runs = _runs(run, dict.fromkeys(begun[-1]["labels"], "product_key"))
    headline: dict[str, Any] = {
        "corpus": corpora[-1]["name"],
        "size": settings.size,
        "where": settings.place,
        "runs": len(all_runs),
        "runs_finished": sum(len(seeds) for rows in finished.values() for seeds in rows.values()),
        "failed": failed,
    }
    if plans := run.records("plan"):
        headline |= {"planned_seeds": len(plans[-1]["seeds"]), "planned_steps": plans[-1]["steps"]}
    conditions: dict[str, dict[str, Any]] = {}
    tables: list[ReportTable] = []
    says: list[str] = []
    for name, rows in finished.items():
        conditions[name], own = _compare(name, rows)
        tables, said = [*tables, *own], conditions[name]["says"]
        says += [f"Under {name}: {said[0]}", *said[1:]] if name and said else said
    merged = {label: list(seeds.values()) for rows in finished.values() for label, seeds in rows.items()}
    if merged:
        tables.insert(0, comparison_table(merged))
    base = conditions.pop("", {"routers": {}, "pairs": [], "pairs_told_apart": 0, "says": []})
    if known := {label: value for label, row in base["routers"].items() if (value := row["perplexity"]) is not None}:
        best = min(known, key=known.__getitem__)
        headline |= {"best_router": best, "best_validation_perplexity": known[best]}
    headline["pairs_told_apart"] = base["pairs_told_apart"]
    return Result(
        title=f"Routers of a DMoE Transformer-XL on {corpora[-1]['name']}, {settings.size}, {settings.place}",
        figures={**headline, **base, "conditions": conditions},
        shown=headline,
        printed=[*([terminal_table(tables[0])] if merged else []), *says],
        summary=" ".join([f"Corpus: {corpora[-1]['description']}.", *says]),
        tables=tables,
        failure=f"{len(failed)} runs failed: {', '.join(failed)}" if failed else "",
    )


def draw(run: Run[CompareRoutersSettings], result: Result) -> Figure | None:
    """Draw the finished runs under the settings as they are."""
    rows = _finished(run).get("")
    return (
        draw_comparison({label: list(seeds.values()) for label, seeds in rows.items()}, result.title) if rows else None
    )


EXPERIMENT = Experiment[CompareRoutersSettings](
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text=FIGURE_TEXT,
    check=load_routers,
    open_folder=open_folder,
)
