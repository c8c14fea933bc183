"""A run for each router and seed, in a folder each, then table, figure and report of all."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dmoe_jax.routing import ROUTERS, RouterError
from dmoe_jax.runs.figure import Metrics
from dmoe_jax.runs.report import format_value
from dmoe_jax.runs.run_folder import CONFIG, flat
from dmoe_jax.training.prepared_run import finished_headline
from experiments.bench import FACTORS, Experiment, Run
from experiments.compare_routers.pairs import all_pairs, pairs_headline, ranking_table, sentences
from experiments.compare_routers.settings import QUICK_ROUTERS, SEARCH_STEPS, WITH_LOSS, CompareRoutersSettings
from experiments.comparison import FIGURE_TEXT, comparison_headline, comparison_table, draw_comparison, terminal_table
from experiments.results import Result
from experiments.run_summary import summarise_run
from experiments.transformer_xl.presets import sized_preset
from experiments.transformer_xl.settings import MAX_SEEDS, TrainingSettings, TransformerXLSettings
from experiments.transformer_xl.side_by_side import final_figures, run_folder, train_all
from experiments.transformer_xl.training import checked_router, open_corpus
from experiments.transformer_xl.trainings import Training, best_factors, search_results

Finished = dict[str, dict[int, Metrics]]
"""Router -> seed -> metrics of a run that was trained to its end."""

_VALUES = {"updates": "plan.steps", "warm_up_updates": "recipe.warmup_steps", "grid_size": "config.grid_size"}
"""Figure of the headline -> its place in the settings of a run."""


def load_routers(settings: CompareRoutersSettings) -> dict[str, str]:
    """Name in figures and folders -> how the router was asked for, each tried on a few samples.

    Raises:
      RouterError: naming the router. ValueError: two of them would share a name.
    """
    config = sized_preset(settings, "dmoe").config
    routers: dict[str, str] = {}
    for spec in settings.routers or (QUICK_ROUTERS if settings.quick else (*ROUTERS, WITH_LOSS)):
        try:
            name = checked_router(spec, config, settings.route).name
        except RouterError:
            if settings.routers or settings.route == "sequence":
                raise
            continue  # of all that are registered, one that is not for tokens
        label = re.sub(r"[^A-Za-z0-9_.+-]", "_", name)  # anybody's choice, and it names a folder
        other = routers.setdefault(label, spec)
        if other != spec:
            raise ValueError(f"routers {other} and {spec} are both called {label!r}: rename one of them")
    return routers


def trainings_of(run: Run[CompareRoutersSettings]) -> list[Training]:
    """The runs of the routers that the run folder names; none before it does."""
    searched = best_factors(search_results(_search_trainings(run))) if run.settings.search else None
    return _trainings(run, run.folder.path, run.settings.chosen_seeds, searched or {})


def _trainings(run: Run[CompareRoutersSettings], out: Path, seeds: Sequence[int], factors: Any) -> list[Training]:
    """All runs: every router with one seed before the next seed, so that what was interrupted can be compared."""
    settings, begun = run.settings, run.records("routers")
    shared = {field.name: getattr(settings, field.name) for field in fields(TrainingSettings)}
    found = []
    for seed, (label, spec) in itertools.product(seeds, (begun[-1]["routers"] if begun else {}).items()):
        own = {"model": ("dmoe",), "seeds": 1, "router": spec, "seed": seed, "out": out / f"{label}-seed{seed}"}
        own["step_size"] = settings.step_size * factors.get(label, 1.0)
        own_settings = TransformerXLSettings(**{**shared, **own})
        found.append(Training(label=label, settings=own_settings, may_fail=True, keeps_checkpoints=False))
    return found


def _search_trainings(run: Run[CompareRoutersSettings]) -> dict[tuple[str, float], Training]:
    """(router, factor of the preset's step sizes) -> its run, on a seed that no reported run has."""
    found: dict[tuple[str, float], Training] = {}
    for factor in FACTORS:
        out = run.folder.path / "search" / f"x{factor:g}"
        for each in _trainings(run, out, [MAX_SEEDS], dict.fromkeys(run.records("routers")[-1]["routers"], factor)):
            steps = min(each.settings.steps or SEARCH_STEPS, SEARCH_STEPS)
            found[each.label, factor] = replace(each, settings=replace(each.settings, steps=steps))
    return found


def measure(run: Run[CompareRoutersSettings]) -> None:
    """Train every router with every seed, in a run folder each. A run that fails does not stop the others.

    Raises:
      UsageError: for a corpus, folder, checkpoint or setting that will not do. KeyboardInterrupt.
    """
    corpus = open_corpus(run)
    run.log("routers", routers=load_routers(run.settings))
    if run.settings.search:
        train_all(run, corpus, list(_search_trainings(run).values()))
    train_all(run, corpus, trainings_of(run))


def finished(trainings: Sequence[Training]) -> Finished:
    """The runs that are finished; routers in the order of the trainings, whatever the seeds that are missing."""
    found: Finished = {training.label: {} for training in trainings}
    for training in trainings:
        if finished_headline(run_folder(training)) is not None:
            found[training.label][training.settings.seed] = run_folder(training).metrics()
    return {label: seeds for label, seeds in found.items() if seeds}


def _as_trained(trainings: Sequence[Training]) -> dict[str, Any]:
    """Values of the flags that were left to their defaults, from the first run that has begun."""
    for folder in map(run_folder, trainings):
        if (folder.path / CONFIG).exists():
            begun = flat(folder.config()["settings"])
            return {name: begun[key] for name, key in _VALUES.items() if key in begun}
    return {}


def _failures(trainings: list[Training], rows: Finished) -> dict[str, str]:
    """Name of a run that failed -> why."""
    failed = {}
    for training in trainings:
        if training.settings.seed not in rows.get(training.label, {}):
            events = [record for record in run_folder(training).metrics() if record["kind"] == "event"]
            if events and events[-1]["name"] == "failed":
                failed[run_folder(training).path.name] = events[-1]["detail"]
    return failed


def summarise(run: Run[CompareRoutersSettings]) -> Result | None:
    """Compare the runs that are finished."""
    settings, corpora, trainings = run.settings, run.records("corpus"), trainings_of(run)
    if not trainings:
        return None
    searched = search_results(_search_trainings(run)) if settings.search else {}
    rows = finished(trainings)
    failed = _failures(trainings, rows)
    merged = {label: list(seeds.values()) for label, seeds in rows.items()}
    perplexities: dict[str, dict[int, float]] = {}
    for label, seeds in rows.items():
        values = {seed: summarise_run(metrics).perplexity for seed, metrics in seeds.items()}
        perplexities[label] = {seed: value for seed, value in values.items() if value is not None}
    pairs = all_pairs(perplexities)
    says = sentences(perplexities, pairs)
    headline: dict[str, Any] = {
        "corpus": corpora[-1]["name"],
        "size": settings.size,
        "where": settings.place,
        **_as_trained(trainings),
        "runs": len(trainings),
        "runs_finished": sum(map(len, rows.values())),
        "failed": list(failed),
        "pairs_told_apart": sum(pair.is_told_apart for pair in pairs),
    }
    headline |= {"step_size_factors": best_factors(searched)} if searched else {}
    routers = comparison_headline(merged) if merged else {}
    if unigrams := [found["unigram_perplexity"] for found in routers.values() if found["unigram_perplexity"]]:
        says.append(f"A unigram model has the validation perplexity {format_value(unigrams[0])}.")
    side_by_side = comparison_table(merged) if merged else None
    return Result(
        title=f"Routers of a DMoE Transformer-XL on {corpora[-1]['name']}, {settings.size}, {settings.place}",
        figures={**headline, "routers": routers, "pairs": pairs_headline(pairs), "says": says},
        shown=headline,
        printed=[*([terminal_table(side_by_side)] if side_by_side else []), *says],
        summary=" ".join([f"Corpus: {corpora[-1]['description']}.", *says]),
        runs=final_figures(trainings),
        tables=[side_by_side, ranking_table(perplexities, pairs)] if side_by_side else [],
        failure=f"{len(failed)} runs failed: {'; '.join(map(': '.join, failed.items()))}" if failed else "",
    )


def draw(run: Run[CompareRoutersSettings], result: Result) -> Figure | None:
    """Draw the finished runs."""
    rows = finished(trainings_of(run))
    merged = {label: list(seeds.values()) for label, seeds in rows.items()}
    return draw_comparison(merged, result.title) if merged else None


EXPERIMENT = Experiment[CompareRoutersSettings](
    measure=measure, summarise=summarise, draw=draw, figure_text=FIGURE_TEXT, check=load_routers
)
