"""Training the models on equal numbers of tokens, and comparing them."""

import json
import subprocess
import sys
from typing import Any

from matplotlib.figure import Figure

from dmoe_jax.data.corpora import Corpus
from dmoe_jax.runs.endings import UsageError
from dmoe_jax.training.prepared_run import finished_headline
from experiments.bench import Experiment, Run
from experiments.comparison import FIGURE_TEXT, comparison_table, draw_comparison, terminal_table
from experiments.results import Result
from experiments.transformer_xl.flops import forward_flops
from experiments.transformer_xl.presets import model_config, sized_preset
from experiments.transformer_xl.search import best_factors, has_ended, search_results, step_size_table, tried
from experiments.transformer_xl.settings import TransformerXLSettings, as_flags
from experiments.transformer_xl.side_by_side import run_folder, train_all
from experiments.transformer_xl.training import FAILURES, checked_router, open_corpus, open_folder
from experiments.transformer_xl.trainings import compared_trainings, labels, search_trainings
from experiments.transformer_xl.verdict import (
    difference_table,
    final_table,
    flops_table,
    merged_headline,
    verdicts,
)

HEADLINE = (
    "validation_perplexity",
    "test_perplexity",
    "unigram_perplexity",
    "steps",
    "training_tokens",
    "tokens_per_s",
    "parameters",
    "training_s",
    "virtual_s",
    "mean_trunk_staleness",
    "failed_call_share",
    "failures",
    "steps_lost",
    "averages_done",
    "averages_missed",
    "load_cv",
    "load_entropy",
    "dead_experts",
    "complete",
)
"""Figures of each model in the headline of all, as far as it has them."""


def check(settings: TransformerXLSettings) -> None:
    """Try the router before anything is trained or written, if one of the models has any."""
    if "dmoe" in settings.models:
        checked_router(settings.router, sized_preset(settings, "dmoe").config, settings.route)


def measure(run: Run[TransformerXLSettings]) -> None:
    """Train the models on this machine, each with each seed in its own folder; before that, search if that is asked.

    Raises:
      UsageError: for a corpus, folder, checkpoint or setting that will not do. KeyboardInterrupt, FloatingPointError,
        RouterError, NetError: as of `train_model`.
    """
    settings, out = run.settings, run.folder.path
    corpus = open_corpus(run)
    for model in settings.models:
        config = model_config(sized_preset(settings, model), len(corpus.vocabulary), route=settings.route)
        run.log("flops", model=model, forward_per_token=forward_flops(config, corpus))
    factors = None
    if settings.search:
        factors = _search(run, corpus)
        run.say("best of the search: " + ", ".join(f"{model} x{factor:g}" for model, factor in factors.items()))
    train_all(run, corpus, compared_trainings(settings, out, factors), num_jobs=settings.num_jobs)
    # The dense layer that it is measured beside is as wide as several whole layers.
    no_overhead = settings.no_overhead or settings.route == "token"
    is_measured = no_overhead or run.records("overhead")
    if settings.place == "local" and "dmoe" in settings.models and not is_measured:
        run.say("what the mixture costs beside a dense layer of its FLOPs")
        run.log("overhead", ratio=_overhead(run))


def _search(run: Run[TransformerXLSettings], corpus: Corpus) -> dict[str, float]:
    """Train with one step size after the other until no label's best is at the edge."""
    settings, out = run.settings, run.folder.path
    searched, trained = search_results(settings, out), set[float]()
    while not has_ended(searched):
        factors = [factor for factor in tried(searched) if factor not in trained]
        train_all(run, corpus, list(search_trainings(settings, out, factors).values()), num_jobs=settings.num_jobs)
        trained.update(factors)
        searched = search_results(settings, out)
    best = best_factors(searched)
    assert best is not None
    return best


def _overhead(run: Run[TransformerXLSettings]) -> float | None:
    """Measure the mixture's cost on this device beside a dense layer of its FLOPs: another experiment, in a process."""
    settings = run.settings
    flags = {name: getattr(settings, name) for name in ("size", "router", "seed", "batch_size", "bf16")}
    flags |= {"rounds": 3 if settings.quick else 7, "steps_per_round": 3 if settings.quick else 10}
    flags |= {"out": run.folder.path / "overhead", "json": True}
    command = [sys.executable, "-m", "experiments.moe_overhead", *as_flags(flags)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UsageError(f"experiments.moe_overhead ended with status {done.returncode}")
    ratio: float | None = json.loads(done.stdout.splitlines()[-1]).get("moe_overhead")
    return ratio


def summarise(run: Run[TransformerXLSettings]) -> Result | None:
    """Compare the models that have begun; final figures are of the runs that are done."""
    settings, corpora, out = run.settings, run.records("corpus"), run.folder.path
    if not corpora:
        return None
    finished, runs = _finished(run), _runs(run)
    models = {label: merged_headline(list(seeds.values()), HEADLINE) for label, seeds in finished.items()}
    headline: dict[str, Any] = {"size": settings.size, "where": settings.place, "corpus": corpora[-1]["name"]}
    headline |= {"router": settings.router, "route": settings.route} if "dmoe" in settings.models else {}
    headline |= {"runs": len(compared_trainings(settings, out)), "runs_finished": sum(map(len, finished.values()))}
    searched = search_results(settings, out) if settings.search else {}
    headline |= {"step_size_factors": best_factors(searched)} if searched else {}
    headline |= verdicts(finished)
    if overheads := run.records("overhead"):
        headline["moe_overhead"] = overheads[-1]["ratio"]
    figures = {
        f"{model} {name}": values[name]
        for model, values in models.items()
        for name in ("validation_perplexity", "test_perplexity", "parameters")
        if name in values
    }
    tables = [final_table(finished), difference_table(finished)] if finished else []
    tables += [step_size_table(settings, searched)]
    tables += [flops_table(runs, _forward_flops(run)), comparison_table(runs)] if runs else []
    goes_on = "" if headline["runs"] == headline["runs_finished"] else f"--resume --out {out} goes on"
    return Result(
        title=f"Transformer-XL on {corpora[-1]['name']}, {settings.size}, {settings.place}",
        figures={**headline, "models": models},
        shown={**headline, **figures},
        printed=[
            *([terminal_table(comparison_table(runs))] if runs else []),
            *(f"{name}: {value}" for name, value in headline.items()),
            *filter(None, [goes_on]),
        ],
        summary=f"Corpus: {corpora[-1]['description']}.",
        tables=[table for table in tables if table is not None],
    )


def _finished(run: Run[TransformerXLSettings]) -> dict[str, dict[int, dict[str, Any]]]:
    """Label -> seed -> the headline of its run, of those that were trained to their end."""
    finished: dict[str, dict[int, dict[str, Any]]] = {}
    for training in compared_trainings(run.settings, run.folder.path):
        if (headline := finished_headline(run_folder(training))) is not None:
            finished.setdefault(training.label, {})[training.settings.seed] = headline
    return finished


def _forward_flops(run: Run[TransformerXLSettings]) -> dict[str, float]:
    """Label -> FLOPs of a forward pass for a word."""
    counted = {record["model"]: record["forward_per_token"] for record in run.records("flops")}
    return {label: counted[model] for label, model in labels(run.settings).items()}


def _runs(run: Run[TransformerXLSettings]) -> dict[str, list[list[dict[str, Any]]]]:
    """Label -> the metrics of its runs, of those that have begun."""
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for training in compared_trainings(run.settings, run.folder.path):
        if metrics := run_folder(training).metrics():
            found.setdefault(training.label, []).append(metrics)
    return {label: found[label] for label in labels(run.settings) if label in found}


def draw(run: Run[TransformerXLSettings], result: Result) -> Figure | None:
    """Draw all models that have begun."""
    runs = _runs(run)
    return draw_comparison(runs, result.title) if runs else None


EXPERIMENT = Experiment[TransformerXLSettings](
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text=FIGURE_TEXT,
    check=check,
    open_folder=open_folder,
    expected=FAILURES,
)
