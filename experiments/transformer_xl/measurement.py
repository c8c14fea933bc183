"""Training the models on equal numbers of tokens, and comparing them."""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from dmoe_jax.cli.common import UsageError, mistakes_in_one_line
from dmoe_jax.data.corpora import load_corpus
from dmoe_jax.routing.base import RouterError
from dmoe_jax.runs.report import format_value
from dmoe_jax.runs.run_folder import FIGURE, RunFolder
from dmoe_jax.training.saving import finished_headline
from experiments.bench import Experiment, Run
from experiments.comparison import comparison_figure, write_comparison_report
from experiments.results import Result
from experiments.transformer_xl.settings import TransformerXLSettings
from experiments.transformer_xl.side_by_side import train_side_by_side
from experiments.transformer_xl.training import check, open_folder, train_model
from net.errors import NetError

_HEADLINE = (
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
    "steps_lost",
    "load_cv",
    "load_entropy",
    "dead_experts",
    "complete",
)
"""Figures of each model in the headline of all."""


def measure(run: Run[TransformerXLSettings]) -> None:
    """Train the models on this machine, each in its own folder.

    Raises:
      UsageError: for a corpus, folder, checkpoint or setting that will not do. KeyboardInterrupt, FloatingPointError,
        RouterError, NetError: as of `train_model`.
    """
    settings = run.settings
    with mistakes_in_one_line():
        corpus = load_corpus(source=settings.data)
    run.log("corpus", name=corpus.name, description=corpus.description)
    run.say(f"corpus: {corpus.description}")
    run.say(f"run folder: {run.folder.path}")
    if settings.num_jobs > 1:
        train_side_by_side(settings, run.folder.path, console=run.console)
    else:
        for model in settings.models:
            train_model(settings, model, corpus, run.folder.path / model)
    if (
        settings.place == "local"
        and "dmoe" in settings.models
        and not settings.no_overhead
        and not run.records("overhead")
    ):
        run.say("what the mixture costs beside a dense layer of its FLOPs")
        run.log("overhead", ratio=_overhead(run))


def _overhead(run: Run[TransformerXLSettings]) -> float | None:
    """What the mixture costs on this device, beside a dense layer of its FLOPs: another experiment, in a process."""
    settings = run.settings
    rounds, steps = (3, 3) if settings.quick else (7, 10)
    flags: list[object] = ["--size", settings.size, "--router", settings.router, "--seed", settings.seed]
    flags += ["--rounds", rounds]
    flags += ["--steps-per-round", steps, "--out", run.folder.path / "overhead", "--json"]
    flags += ["--batch-size", settings.batch_size] if settings.batch_size else []
    flags += ["--bf16"] if settings.bf16 else []
    command = [sys.executable, "-m", "experiments.moe_overhead", *map(str, flags)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UsageError(f"experiments.moe_overhead ended with status {done.returncode}")
    ratio: float | None = json.loads(done.stdout.splitlines()[-1]).get("moe_overhead")
    return ratio


def summarise(run: Run[TransformerXLSettings]) -> Result | None:
    """Compare the models that have begun; headlines are of those that are done."""
    settings = run.settings
    corpora = run.records("corpus")
    if not corpora:
        return None
    headlines = {model: done for model, folder in _folders(run).items() if (done := finished_headline(folder))}
    models = {
        model: {name: figures[name] for name in _HEADLINE if name in figures} for model, figures in headlines.items()
    }
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
    return Result(
        title=f"Transformer-XL on {corpora[-1]['name']}, {settings.size}, {settings.place}",
        figures={**headline, "models": models},
        shown={**headline, **figures},
        printed=[_table(models), *(f"{name}: {value}" for name, value in headline.items())],
        summary=f"Corpus: {corpora[-1]['description']}.",
    )


def _folders(run: Run[TransformerXLSettings]) -> dict[str, RunFolder]:
    """Model -> its folder, of those that have begun."""
    paths = {model: run.folder.path / model for model in run.settings.models}
    return {model: RunFolder(path) for model, path in paths.items() if path.is_dir()}


def _table(models: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(*("", *models), title="Transformer-XL", title_justify="left")
    for name in _HEADLINE:
        if any(name in figures for figures in models.values()):
            table.add_row(name.replace("_", " "), *(format_value(figures.get(name)) for figures in models.values()))
    return table


def write_report(run: Run[TransformerXLSettings], result: Result) -> None:
    """Draw the figure of all models that have begun, and write the report."""
    runs = {model: [records] for model, folder in _folders(run).items() if (records := folder.metrics())}
    if runs:
        comparison_figure(runs, run.folder.path / FIGURE, title=result.title)
        shown = result.headline if result.shown is None else result.shown
        write_comparison_report(run.folder, runs, shown, title=result.title, summary=result.summary)
    run.log("headline", **result.headline)


EXPERIMENT = Experiment[TransformerXLSettings](
    measure=measure,
    summarise=summarise,
    check=check,
    open_folder=open_folder,
    write_report=write_report,
    expected=(FloatingPointError, RouterError, NetError),
)
