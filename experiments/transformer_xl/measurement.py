"""Training the models on equal numbers of tokens, and comparing them, at equal tokens and at equal FLOPs."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from dmoe_jax.runs.report import ReportTable, format_value
from experiments.bench import Experiment, Run
from experiments.comparison import FIGURE_TEXT, Runs, comparison_table, draw_comparison
from experiments.intervals import paired_difference, t_interval
from experiments.results import Bar, Finals, Result
from experiments.transformer_xl import trainings
from experiments.transformer_xl.flops import equal_flops, forward_flops
from experiments.transformer_xl.presets import chosen_preset, model_config, sized_preset
from experiments.transformer_xl.settings import TransformerXLSettings
from experiments.transformer_xl.side_by_side import final_figures, run_folder, train_all
from experiments.transformer_xl.training import FAILURES, checked_router, open_corpus


def check(settings: TransformerXLSettings) -> None:
    """Try the router before anything is trained or written, if one of the models has any."""
    if "dmoe" in settings.models:
        checked_router(settings.router, sized_preset(settings, "dmoe").config, settings.route)


def measure(run: Run[TransformerXLSettings]) -> None:
    """Train the models, each with each seed in its own folder; before that, search if that is asked.

    Raises:
      UsageError: for a corpus, folder, checkpoint or setting that will not do. KeyboardInterrupt, FloatingPointError,
        RouterError, NetError: as of `carry_out`.
    """
    settings, out, factors = run.settings, run.folder.path, None
    corpus = open_corpus(run)
    for model in settings.models:
        config = model_config(sized_preset(settings, model), len(corpus.vocabulary), settings)
        run.log("flops", model=model, forward_per_token=forward_flops(config, corpus))
    if settings.search:
        tried = trainings.search_trainings(settings, out)
        train_all(run, corpus, list(tried.values()))
        factors = trainings.best_factors(trainings.search_results(tried)) or {}
        run.say("best of the search: " + ", ".join(f"{label} x{factor:g}" for label, factor in factors.items()))
    compared = trainings.compared_trainings(settings, out, factors)
    train_all(run, corpus, compared)


def summarise(run: Run[TransformerXLSettings]) -> Result | None:
    """Compare the models that have begun; final figures are of the runs that are done."""
    settings, corpora, out = run.settings, run.records("corpus"), run.folder.path
    if not corpora:
        return None
    finished, runs = _read(run)
    models = {label: mean_headline(list(seeds.values())) for label, seeds in finished.items()}
    searched = trainings.search_results(trainings.search_trainings(settings, out)) if settings.search else {}
    headline: dict[str, Any] = {"size": settings.size, "where": settings.place, "corpus": corpora[-1]["name"]}
    headline |= {"router": settings.router, "route": settings.route} if "dmoe" in settings.models else {}
    headline["runs"] = len(trainings.compared_trainings(settings, out))
    headline["runs_finished"] = sum(map(len, finished.values()))
    headline |= {"step_size_factors": trainings.best_factors(searched)} if searched else {}
    headline |= verdicts(finished)
    names = ("validation_perplexity", "test_perplexity")
    shown = {f"{label} {name}": figures.get(name) for label, figures in models.items() for name in names}
    forward = {record["model"]: record["forward_per_token"] for record in run.records("flops")}
    return Result(
        title=f"Transformer-XL on {corpora[-1]['name']}, {settings.size}, {settings.place}",
        figures={**headline, "models": models},
        shown={**headline, **shown},
        summary=f"Corpus: {corpora[-1]['description']}.",
        runs=finished,
        tables=[models_table(settings, finished, runs, forward, searched), comparison_table(runs)] if runs else (),
    )


def _read(run: Run[TransformerXLSettings]) -> tuple[Finals, dict[str, list[Any]]]:
    """The runs that were trained to their end, and the metrics of all that have begun, by label."""
    compared, runs = trainings.compared_trainings(run.settings, run.folder.path), dict[str, list[Any]]()
    for training in compared:
        if metrics := run_folder(training).metrics():
            runs.setdefault(training.label, []).append(metrics)
    return final_figures(compared), runs


def _perplexities(finished: Finals, label: str, split: str = "validation") -> dict[int, float]:
    """Seed -> final perplexity over a whole text."""
    name = f"{split}_perplexity"
    return {seed: all_[name] for seed, all_ in finished.get(label, {}).items() if all_.get(name) is not None}


def verdicts(finished: Finals) -> dict[str, Any]:
    """The mean of dmoe minus each of the others in validation perplexity, paired by seed, its 95 % interval, and
    the verdict on dmoe ending below: met or missed where the interval leaves out 0, else not decided."""
    ours, found = _perplexities(finished, "dmoe"), dict[str, Any]()
    for other in finished:
        difference = None if other == "dmoe" else paired_difference(ours, _perplexities(finished, other))
        if difference is not None:
            found[f"dmoe_minus_{other}"] = difference.mean
            found[f"dmoe_minus_{other}_interval"] = difference.ends
            bar = Bar(name=f"dmoe_minus_{other}", bound=0.0)
            found[f"dmoe_below_{other}"] = (
                bar.verdict(difference.mean, difference.ends) if difference.ends else "not decided"
            )
    return found


def mean_headline(headlines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The means of a label's figures over its seeds, and the intervals of its perplexities."""
    means: dict[str, Any] = {"seeds": len(headlines)}
    for name, first in headlines[0].items():
        if name not in ("seed", "complete") and isinstance(first, int | float):
            interval = t_interval([each[name] for each in headlines if each.get(name) is not None])
            means[name] = interval.mean
            if name in ("validation_perplexity", "test_perplexity"):
                means[f"{name}_interval"] = interval.ends
    return means


def models_table(
    settings: TransformerXLSettings,
    finished: Finals,
    runs: Runs,
    forward: Mapping[str, float],
    searched: trainings.Searched,
) -> ReportTable:
    """A row for each label: final perplexities, at equal FLOPs too, and step sizes.

    Args:
      runs: metrics of those that have begun.
      forward: model -> FLOPs of a forward pass for a word.
      searched: empty without a search.
    """
    models, rows = trainings.labels(settings), list[list[object]]()
    flops = {label: forward[models[label]] for label in runs}
    budget, at_budget = equal_flops(runs, flops)
    factors = trainings.best_factors(searched) or {}
    for label in runs:
        valid, test = (_perplexities(finished, label, split) for split in ("validation", "test"))
        by_seed = ", ".join(f"{seed}: {format_value(value)}" for seed, value in valid.items())
        at_equal = [value for value in at_budget[label] if value is not None]
        changes = {"step_size": settings.step_size * factors.get(label, 1.0), **trainings.INGREDIENTS.get(label, {})}
        preset = chosen_preset(replace(settings, **changes), models[label])
        rates = f"{preset.recipe.learning_rate:g}"
        rates += f", experts {preset.expert_recipe.learning_rate:g}" if preset.config.is_mixture else ""
        rates += f"; {_told(searched[label])}" if searched else ""
        row = [label, _with_interval(valid.values()), by_seed, _with_interval(test.values())]
        rows.append([*row, flops[label] / 1e6, _with_interval(at_equal), rates])
    note = (
        "Final perplexities are over the whole texts, in brackets 95 % intervals. FLOPs are those of a forward pass "
        "for a word, in matrix products; a training step counts as three. Perplexities at equal FLOPs, "
        f"{budget / 1e12:.4g} TFLOPs of training, as many as the cheapest run had, are read off the curves, over their "
        "words: the schedules of the dearer models were not at their end by then, and runs planned for that length "
        "would probably end lower. Step sizes are those of a dense model or the trunk; a search has a seed of its own."
    )
    head = ("", "validation perplexity", "by seed", "test perplexity", "MFLOPs", "at equal FLOPs", "step sizes")
    return ReportTable(title="Final perplexities", head=head, rows=rows, note=note)


def _told(found: Mapping[float, float | None]) -> str:
    """All that was tried for a label, and a warning where the best is at the edge of it."""
    words = {None: "not ended", math.inf: "failed"}
    text = ", ".join(f"x{factor:g}: {words.get(value) or format_value(value)}" for factor, value in found.items())
    values = {factor: math.inf if value is None else value for factor, value in found.items()}
    best = min(values, key=values.__getitem__)
    return text + (" (the best is at the edge of what was tried)" if best in (min(found), max(found)) else "")


def _with_interval(values: Collection[float]) -> str | None:
    """The mean with its interval; None for no values."""
    return str(t_interval([*values])) if values else None


def draw(run: Run[TransformerXLSettings], result: Result) -> Figure | None:
    """Draw all models that have begun."""
    _, runs = _read(run)
    return draw_comparison(runs, result.title) if runs else None


EXPERIMENT = Experiment[TransformerXLSettings](
    measure=measure, summarise=summarise, draw=draw, figure_text=FIGURE_TEXT, check=check, expected=FAILURES
)
