"""All curves over all seeds, in the emulator."""

import os
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dmoe_jax.data import DataError
from dmoe_jax.runs.report import ReportTable
from dmoe_jax.runs.style import GREY, dress
from experiments.bench import Experiment, Run
from experiments.emulation.trials import Trial, run_trials
from experiments.intervals import t_interval
from experiments.mnist_convergence.curves import AUTHORS, FRESH, NETWORKS, REMEDIED, all_trials, label_of, memory_of
from experiments.mnist_convergence.settings import MnistSettings
from experiments.panels import SERIES
from experiments.processes import HelperFailed
from experiments.results import Bar, Result


def key_of(figure: str, variant: str) -> str:
    """The key of a figure of these mixtures, such as "least_margin_fresh_experts"."""
    return "_".join([figure, *variant.replace(",", "").split()])


def bars_of(variant: str) -> tuple[Bar, ...]:
    """256 experts are above the dense model at 1000 ms at every tenth of the run, by more than both standard
    deviations; and failures cost at most 0.01 of final accuracy."""
    least = Bar(name=key_of("least_margin", variant), bound=0.0, comparison=">=")
    return least, Bar(name=key_of("failures_cost", variant), bound=0.01)


PAPER = {
    ("dense, 1000 ms", 1024): 0.10,
    ("dense, 1000 ms", 2048): 0.27,
    ("dense, 1000 ms", 10_240): 0.73,
    ("dense, 1000 ms", 20_480): 0.926,
    (f"256 experts, {AUTHORS}, 1000 ms", 1024): 0.52,
    (f"256 experts, {AUTHORS}, 1000 ms", 2048): 0.76,
    (f"256 experts, {AUTHORS}, 1000 ms", 10_240): 0.93,
    (f"256 experts, {AUTHORS}, 1000 ms", 20_480): 0.942,
    (f"4096 experts, {AUTHORS}, 1000 ms, 10 % failures", 1024): 0.47,
    (f"4096 experts, {AUTHORS}, 1000 ms, 10 % failures", 2048): 0.69,
    (f"4096 experts, {AUTHORS}, 1000 ms, 10 % failures", 10_240): 0.94,
    (f"4096 experts, {AUTHORS}, 1000 ms, 10 % failures", 20_480): 0.953,
}
"""(curve, updates) -> accuracy in the authors' stored notebooks, one run each, read off their figures (+- 0.01)."""


_DASHES = {AUTHORS: "-.", FRESH: "--", REMEDIED: ":"}


def measure(run: Run[MnistSettings]) -> None:
    """Train what has no record yet, and log each."""
    have = {(each["label"], each["seed"]) for each in run.records("trial")}
    trials = [trial for trial in all_trials(run.settings) if (trial.label, trial.seed) not in have]
    done, total = 0, len(trials)

    def note(trial: Trial, answer: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        run.log("trial", label=trial.label, seed=trial.seed, **answer)
        run.say(f"{done}/{total}  {trial.label}, seed {trial.seed}: accuracy {answer['points'][-1]['accuracy']:.3f}")

    # First those that fit beside each other, so that the machine's cores are used as long as its memory allows.
    for jobs in range(run.settings.jobs, 0, -1):
        fitting = [trial for trial in trials if jobs == 1 or _fit(trial, jobs)]
        if not fitting:
            continue
        if jobs < run.settings.jobs:
            run.say(f"{fitting[0].label}: {jobs} at a time, as each takes {memory_of(fitting[0]) / 1e9:.0f} GB")
        run_trials(fitting, num_jobs=jobs, on_done=note)
        trials = [trial for trial in trials if trial not in fitting]


def _fit(trial: Trial, jobs: int) -> bool:
    """Return True if so many trainings like this one fit into this machine's memory at once."""
    if not hasattr(os, "sysconf"):
        return True
    return jobs * memory_of(trial) < 0.9 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def accuracies(run: Run[MnistSettings]) -> dict[str, np.ndarray]:
    """Curve -> float [seeds, points] of accuracies. Curves and seeds are in the settings' order, whoever was first."""
    trained = {(each["label"], each["seed"]): each["points"] for each in run.records("trial")}
    planned = [(trial.label, trial.seed) for trial in all_trials(run.settings)]
    curves: dict[str, list[list[float]]] = {}
    for label, seed in sorted(trained, key=lambda key: planned.index(key) if key in planned else len(planned)):
        curves.setdefault(label, []).append([point["accuracy"] for point in trained[label, seed]])
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
    _, slow, failing = NETWORKS
    figures: dict[str, Any] = {"curves": len(curves), "seeds": min(len(values) for values in curves.values())}
    dense, remedied = curves.get(label_of(None, slow)), curves.get(label_of(None, slow, REMEDIED))
    for variant in ("", FRESH, AUTHORS, REMEDIED):
        ours, lost = curves.get(label_of(256, slow, variant)), curves.get(label_of(256, failing, variant))
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
    steps = [point["step"] for point in run.records("trial")[0]["points"]]
    return Result(
        title="Learning MNIST under latency",
        summary="Accuracy on test images. A batch takes 100 ms with 16 trainers, or 1000 ms with 64; mean over the "
        "seeds, +- their standard deviation.",
        figures=figures,
        # The paper's figure is of the authors' program; a run without it is judged by what it has.
        bars=bars_of(AUTHORS if label_of(256, failing, AUTHORS) in curves else ""),
        tables=[_table(curves, steps), _beside_paper(curves, steps)],
    )


def _table(curves: dict[str, np.ndarray], steps: list[int]) -> ReportTable:
    shown = [0, (len(steps) - 1) // 2, len(steps) - 1]

    def cell(values: np.ndarray) -> str:
        spread = f" +- {values.std(ddof=1):.3f}" if len(values) > 1 else ""
        return f"{values.mean():.3f}{spread}"

    return ReportTable(
        title="Accuracy",
        head=("curve", "seeds", *(f"{steps[place]} updates" for place in shown)),
        rows=[(label, len(values), *(cell(values[:, place]) for place in shown)) for label, values in curves.items()],
    )


def _beside_paper(curves: dict[str, np.ndarray], steps: list[int]) -> ReportTable:
    rows = []
    for (label, updates), theirs in PAPER.items():
        near = min(range(len(steps)), key=lambda place: abs(steps[place] - updates))
        is_near = abs(steps[near] - updates) <= 0.1 * updates and label in curves
        ours = t_interval(curves[label][:, near].tolist()).mean if is_near else "not reached"
        rows.append((label, updates, ours if label in curves else "not trained", theirs))
    return ReportTable(
        title="Beside the authors' stored runs",
        head=("curve", "updates", "ours", "theirs"),
        rows=rows,
        note="Theirs: D = 512 (dense 1,024), one run each, read off the figures stored in their notebooks, +- 0.01. "
        "Their experts do not feel the delay, only the trunk does.",
    )


def draw(run: Run[MnistSettings], result: Result) -> Figure:
    """Draw a panel for each network: accuracy over updates, the mean and the range of the seeds."""
    del result
    curves = accuracies(run)
    steps = [0, *(point["step"] for point in run.records("trial")[0]["points"])]
    figure = Figure(figsize=(11.0, 4.4), layout="constrained")
    all_axes = figure.subplots(1, len(NETWORKS), sharey=True)
    models = {label.split(",")[0]: None for label in curves}
    colours = dict(zip(models, SERIES, strict=False))
    for axes, network in zip(all_axes, NETWORKS, strict=True):
        for label, values in curves.items():
            if not label.endswith(f", {network.label}"):
                continue
            model = label.split(",")[0]
            dash = next((dash for part, dash in _DASHES.items() if part in label), "-")
            start = np.full((len(values), 1), 0.1)
            all_values = np.concatenate([start, values], axis=1)
            name = label.removesuffix(f", {network.label}")
            axes.plot(steps, all_values.mean(axis=0), dash, color=colours[model], linewidth=1.6, label=name)
            if len(values) > 1:
                axes.fill_between(
                    steps, all_values.min(axis=0), all_values.max(axis=0), color=colours[model], alpha=0.12, linewidth=0
                )
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
