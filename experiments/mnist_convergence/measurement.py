"""All curves of the figure over all seeds, in the emulator.

The bars are of a mixture and a dense model that have each its best step sizes.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from dmoe_jax.data import DataError
from dmoe_jax.runs.report import ReportTable
from dmoe_jax.runs.style import GREY, dress
from experiments.bench import Experiment, Run
from experiments.emulation.problems import DEFAULT, PLAIN
from experiments.emulation.trials import Trial, final_figures, seeds_of, train_missing, trained
from experiments.intervals import paired_difference
from experiments.mnist_convergence.settings import MnistSettings
from experiments.panels import SERIES
from experiments.processes import HelperFailed
from experiments.results import Bar, Result
from experiments.step_sizes import Side, best_factors, scaled, scaled_label, search, search_table

WIDTH = 64
"""Width of an expert; 512 in the paper. The dense model is twice as wide."""
REMEDIED = "remedies"
"""In a curve's name: its optimisers know of staleness, as is our default."""
FRESH = "fresh experts"
"""In a curve's name: all calls of a step are computed at its end, so that experts are never stale, as in the authors'
program."""
AUTHORS = f"frozen gate, {FRESH}"
"""In a curve's name: the authors' program."""

_GRIDS = {64: (4, 4), 256: (8, 8), 4096: (32, 32)}
"""Grid of each of the four layers, by the experts in all of them."""
_DASHES = {"step sizes": (0, (3, 1, 1, 1, 1, 1)), AUTHORS: "-.", FRESH: "--", REMEDIED: ":"}


class Network(NamedTuple):
    """A column of the figure: who is far away, and how far.

    Attributes:
      label: its name. batch_s: mean seconds of a batch. num_trainers: who bear it. failure_rate: share of lost calls.
    """

    label: str
    batch_s: float
    num_trainers: int
    failure_rate: float = 0.0


NETWORKS = FAST, SLOW, FAILING = (
    Network("100 ms", 0.1, 16),
    Network("1000 ms", 1.0, 64),
    Network("1000 ms, 10 % failures", 1.0, 64, 0.1),
)
"""As the paper's text has them: who waits ten times longer needs more trainers for as many batches a second."""


def label_of(experts: int | None, network: Network, variant: str = "") -> str:
    """The name of a curve; `experts` is None for the dense model, `variant` such as "frozen gate"."""
    model = "dense" if experts is None else f"{experts} experts"
    return f"{model}{variant and ', ' + variant}, {network.label}"


SEARCHED = {
    label_of(None, SLOW): 1 / 32,
    label_of(256, SLOW, AUTHORS): 1 / 4,
    label_of(None, SLOW, REMEDIED): 1.0,
    label_of(256, SLOW, REMEDIED): 1.0,
}
"""Curve whose step sizes are searched -> the best factor known: dense by `--search`, authors' by an older version, the
last two, with `--extras`, not searched yet."""

BARS = (Bar(name="lead", bound=0.0, comparison=">="), Bar(name="failures_cost", bound=0.01))
"""With each its best step sizes, 256 experts of the authors' program end above the dense model at 1000 ms; and failures
cost at most 0.01 of final accuracy."""


def all_trials(settings: MnistSettings, best: Mapping[Side, float]) -> list[Trial]:
    """Return the trials that the settings ask for; the seeds of a curve stand together.

    Args:
      best: factors of the step sizes of curves that were searched.
    """
    curves = _curves(settings)
    tuned = [scaled(curve, best[curve.problem, curve.label]) for curve in curves if curve.label in SEARCHED]
    curves = list({curve.label: curve for curve in [*curves, *tuned]}.values())
    return seeds_of(curves, first=settings.seed, count=settings.seeds)


def _curves(settings: MnistSettings) -> list[Trial]:
    def curve(count: int | None, network: Network, variant: str = "") -> Trial:
        sizes = {"d_model": 2 * WIDTH} if count is None else {"d_model": WIDTH, "grid_size": _GRIDS[count]}
        return Trial(
            label=label_of(count, network, variant),
            problem="mnist-dense" if count is None else "mnist",
            sizes={**sizes, "num_evaluated": 1000},
            frozen_gate=variant == AUTHORS,
            fresh_experts=FRESH in variant,
            remedy=DEFAULT if variant == REMEDIED else PLAIN,
            num_trainers=network.num_trainers,
            num_updates=settings.updates,
            # A dense model's step waits there and back, that of a mixture in each of four layers.
            delay_s=network.batch_s / (2 if count is None else 8),
            failure_rate=network.failure_rate,
        )

    if settings.quick:
        curves = [curve(None, SLOW), curve(256, SLOW), curve(256, SLOW, AUTHORS), curve(256, FAILING, AUTHORS)]
    else:
        curves = [curve(None, FAST), curve(None, SLOW)]
        for count in settings.experts:
            curves += [curve(count, network, variant) for variant in ("", AUTHORS) for network in NETWORKS]
    if settings.extras:
        curves.append(curve(None, SLOW, REMEDIED))
        if 256 in settings.experts:
            curves += [curve(256, network, variant) for variant in (FRESH, REMEDIED) for network in (SLOW, FAILING)]
    return curves


def _sides(settings: MnistSettings) -> list[Trial]:
    return [curve for curve in _curves(settings) if curve.label in SEARCHED]


def _best(run: Run[MnistSettings]) -> dict[Side, float]:
    sides = _sides(run.settings)
    known = {(side.problem, side.label): SEARCHED[side.label] for side in sides}
    return best_factors(run, sides, known, figure="accuracy", least=False)


def measure(run: Run[MnistSettings]) -> None:
    """Train what has no record yet, and log each; the largest mixtures one at a time, for their memory."""
    if run.settings.search:
        search(run, _sides(run.settings))
    trials = all_trials(run.settings, _best(run))
    large = [trial for trial in trials if trial.sizes.get("grid_size") == _GRIDS[4096]]
    train_missing(run, [trial for trial in trials if trial not in large])
    train_missing(run, large, num_jobs=1 if run.settings.on == "here" else None)


def accuracies(run: Run[MnistSettings]) -> dict[str, np.ndarray]:
    """Curve -> float [seeds, points] of accuracies. Curves and seeds are in the settings' order, whoever was first."""
    found = trained(run)
    curves: dict[str, list[list[float]]] = {}
    for trial in all_trials(run.settings, _best(run)):
        if (record := found.get((trial.problem, trial.label), {}).get(trial.seed)) is not None:
            curves.setdefault(trial.label, []).append([point["accuracy"] for point in record["points"]])
    return {label: np.array(values) for label, values in curves.items()}


def summarise(run: Run[MnistSettings]) -> Result | None:
    """Compute means and intervals of each curve; None where none is finished."""
    curves, best = accuracies(run), {label: factor for (_, label), factor in _best(run).items()}
    if not curves:
        return None
    figures: dict[str, Any] = {"curves": len(curves), "seeds": min(len(values) for values in curves.values())}

    def tuned(count: int | None, variant: str = "") -> str:
        label = label_of(count, SLOW, variant)
        return scaled_label(label, best.get(label, 1.0))

    # The paper's figure is of the authors' program; a run without it is judged by what it has.
    variants = {"": AUTHORS, "trained_keys": "", "fresh_experts": FRESH, "remedies": REMEDIED}
    compared = {"lead": (tuned(256, AUTHORS), tuned(None)), "lead_remedies": (tuned(256, REMEDIED), tuned(None))}
    for name, variant in variants.items():
        end = name and f"_{name}"
        compared[f"lead_untuned{end}"] = label_of(256, SLOW, variant), label_of(None, SLOW)
        compared[f"failures_cost{end}"] = label_of(256, SLOW, variant), label_of(256, FAILING, variant)
    compared["lead_remedies_on_both_sides"] = tuned(256, REMEDIED), tuned(None, REMEDIED)
    for name, (ours, theirs) in compared.items():
        if ours in curves and theirs in curves:
            ends = [dict(enumerate(curves[label][:, -1])) for label in (ours, theirs)]
            if (more := paired_difference(*ends)) is not None:
                figures |= {name: more.mean, f"{name}_interval": more.ends}
    for label, values in curves.items():
        key = label.replace(" %", "").replace("/", "_").replace(", ", "_").replace(" ", "_")
        figures[f"accuracy_{key}"] = float(values[:, -1].mean())
    table = search_table(run, _sides(run.settings), "accuracy")
    return Result(
        title="Learning MNIST under latency",
        summary="Accuracy on test images. A batch takes 100 ms with 16 trainers, or 1000 ms with 64; mean over the "
        "seeds, +- their standard deviation. Differences are of final accuracies, paired by seed; those without "
        "`untuned` in their names are of models that have each the best of 1/32 to 4 times the step sizes.",
        figures=figures,
        runs=final_figures(run),
        bars=BARS if run.settings.quick or 256 in run.settings.experts else (),
        tables=[_table(curves, _steps(run)), *([table] if table else [])],
    )


def _steps(run: Run[MnistSettings]) -> list[int]:
    return [point["step"] for point in run.records("trial")[0]["points"]]


def _table(curves: Mapping[str, np.ndarray], steps: list[int]) -> ReportTable:
    shown = [0, (len(steps) - 1) // 2, len(steps) - 1]

    def cell(values: np.ndarray) -> str:
        spread = f" +- {values.std(ddof=1):.3f}" if len(values) > 1 else ""
        return f"{values.mean():.3f}{spread}"

    return ReportTable(
        title="Accuracy, mean +- standard deviation over the seeds",
        head=("curve", "seeds", *(f"{steps[place]} updates" for place in shown)),
        rows=[(label, len(values), *(cell(values[:, place]) for place in shown)) for label, values in curves.items()],
    )


def draw(run: Run[MnistSettings], _: Result) -> Figure:
    """Draw a panel for each network: accuracy over updates, the mean and the range of the seeds."""
    curves, steps = accuracies(run), [0, *_steps(run)]
    figure = Figure(figsize=(11.0, 4.4), layout="constrained")
    all_axes = figure.subplots(1, len(NETWORKS), sharey=True)
    models = dict.fromkeys(label.split(",")[0] for label in curves)
    colours = dict(zip(models, SERIES, strict=False))
    for axes, network in zip(all_axes, NETWORKS, strict=True):
        for label, values in curves.items():
            name = label.removesuffix(f", {network.label}")
            if name == label:
                continue
            colour = colours[label.split(",")[0]]
            dash = next((dash for part, dash in _DASHES.items() if part in label), "-")
            known = np.concatenate([np.full((len(values), 1), 0.1), values], axis=1)
            axes.plot(steps, known.mean(axis=0), linestyle=dash, color=colour, linewidth=1.6, label=name)
            axes.fill_between(steps, known.min(axis=0), known.max(axis=0), color=colour, alpha=0.12, linewidth=0)
        dress(axes, f"{network.label}, {network.num_trainers} trainers", "updates of the trunk")
        axes.set_ylim(0, 1)
    names = {line.get_label(): line for axes in all_axes for line in axes.lines}
    figure.legend(
        names.values(), names.keys(), frameon=False, fontsize=8, ncols=4, loc="outside lower center", handlelength=3
    )
    all_axes[0].set_ylabel("accuracy on test images: mean, least and greatest", fontsize=9, color=GREY)
    return figure


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Accuracy over updates for each model, one panel for each network",
    expected=(HelperFailed, DataError),
)
