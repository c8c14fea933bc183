"""All curves of the figure over all seeds, in the emulator."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from dmoe_jax.data import DataError
from dmoe_jax.runs.report import ReportTable
from dmoe_jax.runs.style import GREY, dress
from experiments.bench import Experiment, Run
from experiments.emulation.problems import DEFAULT, PLAIN
from experiments.emulation.trials import Trial, seeds_of, train_missing, trained
from experiments.mnist_convergence.settings import MnistSettings
from experiments.panels import SERIES
from experiments.processes import HelperFailed
from experiments.results import Bar, Result

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
_DASHES = {AUTHORS: "-.", FRESH: "--", REMEDIED: ":"}


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


def key_of(figure: str, variant: str) -> str:
    """The key of a figure of these mixtures, such as "least_margin_fresh_experts"."""
    return "_".join([figure, *variant.replace(",", "").split()])


def bars_of(variant: str) -> tuple[Bar, ...]:
    """256 experts are above the dense model at 1000 ms at every tenth of the run, by more than both standard
    deviations; and failures cost at most 0.01 of final accuracy."""
    least = Bar(name=key_of("least_margin", variant), bound=0.0, comparison=">=")
    return least, Bar(name=key_of("failures_cost", variant), bound=0.01)


def all_trials(settings: MnistSettings) -> list[Trial]:
    """Return the trials that the settings ask for; the seeds of a curve stand together."""

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
    return seeds_of(curves, first=settings.seed, count=settings.seeds)


def measure(run: Run[MnistSettings]) -> None:
    """Train what has no record yet, and log each; the largest mixtures one at a time, for their memory."""
    trials = all_trials(run.settings)
    large = [trial for trial in trials if trial.sizes.get("grid_size") == _GRIDS[4096]]
    train_missing(run, [trial for trial in trials if trial not in large], num_jobs=run.settings.jobs)
    train_missing(run, large, num_jobs=1)


def accuracies(run: Run[MnistSettings]) -> dict[str, np.ndarray]:
    """Curve -> float [seeds, points] of accuracies. Curves and seeds are in the settings' order, whoever was first."""
    found = trained(run)
    curves: dict[str, list[list[float]]] = {}
    for trial in all_trials(run.settings):
        if (record := found.get((trial.problem, trial.label), {}).get(trial.seed)) is not None:
            curves.setdefault(trial.label, []).append([point["accuracy"] for point in record["points"]])
    return {label: np.array(values) for label, values in curves.items()}


def margins(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """By how much the mean of ours is above that of theirs at each point, beyond both standard deviations."""
    spread = sum(values.std(axis=0, ddof=1) if len(values) > 1 else 0.0 for values in (ours, theirs))
    return np.asarray(ours.mean(axis=0) - theirs.mean(axis=0) - spread)


def difference(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """(the difference of the means of two samples of seeds, its standard error; NaN for single seeds)."""
    both = (ours, theirs)
    error = sum(values.var(ddof=1) / len(values) for values in both) ** 0.5 if min(map(len, both)) > 1 else np.nan
    return float(ours.mean() - theirs.mean()), float(error)


def summarise(run: Run[MnistSettings]) -> Result | None:
    """Compute means and spreads of each curve; None where none is finished."""
    curves = accuracies(run)
    if not curves:
        return None
    figures: dict[str, Any] = {"curves": len(curves), "seeds": min(len(values) for values in curves.values())}
    dense, remedied = curves.get(label_of(None, SLOW)), curves.get(label_of(None, SLOW, REMEDIED))
    for variant in ("", FRESH, AUTHORS, REMEDIED):
        ours, lost = curves.get(label_of(256, SLOW, variant)), curves.get(label_of(256, FAILING, variant))
        if ours is None:
            continue
        if (theirs := remedied if variant == REMEDIED else dense) is not None:
            figures[key_of("least_margin", variant)] = float(margins(ours, theirs).min())
        if variant == REMEDIED and dense is not None:
            figures["least_margin_remedies_over_plain_dense"] = float(margins(ours, dense).min())
        if lost is not None:
            cost, error = difference(ours[:, -1], lost[:, -1])
            figures |= {key_of("failures_cost", variant): cost, key_of("failures_cost_error", variant): error}
    for label, values in curves.items():
        key = label.replace(" %", "").replace(", ", "_").replace(" ", "_")
        figures[f"accuracy_{key}"] = float(values[:, -1].mean())
    return Result(
        title="Learning MNIST under latency",
        summary="Accuracy on test images. A batch takes 100 ms with 16 trainers, or 1000 ms with 64; mean over the "
        "seeds, +- their standard deviation.",
        figures=figures,
        # The paper's figure is of the authors' program; a run without it is judged by what it has.
        bars=bars_of(AUTHORS if label_of(256, FAILING, AUTHORS) in curves else ""),
        tables=[_table(curves, _steps(run))],
    )


def _steps(run: Run[MnistSettings]) -> list[int]:
    return [point["step"] for point in run.records("trial")[0]["points"]]


def _table(curves: Mapping[str, np.ndarray], steps: list[int]) -> ReportTable:
    shown = [0, (len(steps) - 1) // 2, len(steps) - 1]

    def cell(values: np.ndarray) -> str:
        spread = f" +- {values.std(ddof=1):.3f}" if len(values) > 1 else ""
        return f"{values.mean():.3f}{spread}"

    return ReportTable(
        title="Accuracy",
        head=("curve", "seeds", *(f"{steps[place]} updates" for place in shown)),
        rows=[(label, len(values), *(cell(values[:, place]) for place in shown)) for label, values in curves.items()],
    )


def draw(run: Run[MnistSettings], result: Result) -> Figure:
    """Draw a panel for each network: accuracy over updates, the mean and the range of the seeds."""
    del result
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
            axes.plot(steps, known.mean(axis=0), dash, color=colour, linewidth=1.6, label=name)
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
