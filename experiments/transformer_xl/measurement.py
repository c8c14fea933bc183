"""Training the models on equal numbers of tokens, and comparing them."""

import json
import subprocess
import sys
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from dmoe_jax.cli.common import UsageError
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.training.saving import finished_headline
from experiments.bench import Experiment, Run
from experiments.comparison import FIGURE_TEXT, comparison_table, draw_comparison, terminal_table
from experiments.exits import run_until_signal
from experiments.results import Result
from experiments.transformer_xl.settings import NAME, TransformerXLSettings, as_flags
from experiments.transformer_xl.side_by_side import train_side_by_side
from experiments.transformer_xl.training import FAILURES, checked_router, open_corpus, open_folder, train_model

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
        checked_router(settings.router, settings.size)


def measure(run: Run[TransformerXLSettings]) -> None:
    """Train the models on this machine, each in its own folder.

    Raises:
      UsageError: for a corpus, folder, checkpoint or setting that will not do. KeyboardInterrupt, FloatingPointError,
        RouterError, NetError: as of `train_model`.
    """
    settings, out = run.settings, run.folder.path
    corpus = open_corpus(run)
    if settings.num_jobs > 1:
        run_until_signal(partial(train_side_by_side, settings, out, run.console), prog=NAME)
    else:
        for model in settings.models:
            train_model(settings, corpus, out / model, model=model, seed=settings.seed, router=settings.router)
    is_measured = settings.no_overhead or run.records("overhead")
    if settings.place == "local" and "dmoe" in settings.models and not is_measured:
        run.say("what the mixture costs beside a dense layer of its FLOPs")
        run.log("overhead", ratio=_overhead(run))


def _overhead(run: Run[TransformerXLSettings]) -> float | None:
    """What the mixture costs on this device, beside a dense layer of its FLOPs: another experiment, in a process."""
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
    """Compare the models that have begun; headlines are of those that are done."""
    settings, corpora = run.settings, run.records("corpus")
    if not corpora:
        return None
    done = {model: finished_headline(RunFolder(run.folder.path / model)) for model in settings.models}
    models = {model: {name: all_[name] for name in HEADLINE if name in all_} for model, all_ in done.items() if all_}
    headline: dict[str, Any] = {"size": settings.size, "where": settings.place, "corpus": corpora[-1]["name"]}
    headline |= {"router": settings.router} if "dmoe" in settings.models else {}
    for other in ("small", "base"):
        if "dmoe" in models and other in models:
            ours, theirs = (models[model]["validation_perplexity"] for model in ("dmoe", other))
            headline[f"dmoe_below_{other}"] = ours < theirs
    if overheads := run.records("overhead"):
        headline["moe_overhead"] = overheads[-1]["ratio"]
    figures = {
        f"{model} {name}": values[name]
        for model, values in models.items()
        for name in ("validation_perplexity", "test_perplexity", "parameters")
    }
    runs = _runs(run)
    tables = [comparison_table(runs)] if runs else []
    return Result(
        title=f"Transformer-XL on {corpora[-1]['name']}, {settings.size}, {settings.place}",
        figures={**headline, "models": models},
        shown={**headline, **figures},
        printed=[*map(terminal_table, tables), *(f"{name}: {value}" for name, value in headline.items())],
        summary=f"Corpus: {corpora[-1]['description']}.",
        tables=tables,
    )


def _runs(run: Run[TransformerXLSettings]) -> dict[str, list[list[dict[str, Any]]]]:
    """Model -> the metrics of its run, of those that have begun."""
    metrics = {model: RunFolder(run.folder.path / model).metrics() for model in run.settings.models}
    return {model: [records] for model, records in metrics.items() if records}


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
