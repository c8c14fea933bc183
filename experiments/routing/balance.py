"""Cost and benefit of balance: routers with and without it, under one case after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter

from dmoe_jax.runs.figure import Metrics
from dmoe_jax.runs.report import ReportTable
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.runs.style import FAINT, GREY, dress, end_labels
from dmoe_jax.training.prepared_run import finished_headline
from experiments.bench import Run
from experiments.intervals import Interval, t_interval
from experiments.panels import series_style
from experiments.results import Bar
from experiments.routing.cases import BALANCED, CASES, FIRST, LOSSES, PLAIN, case_trainings, folder_of
from experiments.routing.settings import RoutingSettings
from experiments.run_summary import balance_lines, perplexity_curve, summarise_run
from experiments.transformer_xl.side_by_side import train_all
from experiments.transformer_xl.training import open_corpus

BARS = (
    Bar(name="load_entropy", bound=0.95, comparison=">="),
    Bar(name="idle_experts", bound=0),
    Bar(name="perplexity_cost_low", bound=0),
    Bar(name="over_balancing_loss", bound=0),
)
"""Bars of the balanced router in the first case: entropy of its load over the second half of the runs; experts
without a call in the last tenth; the lower end of the 95 % interval of what balance costs in perplexity, in per
cent, so that above 0 it costs more than the spread of the seeds; and its perplexity over that with a balancing
loss, at the weight whose load is nearest to its own, in per cent."""

LONG = "long"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run.

    Attributes:
      perplexity: validation, at the end.
      entropy: of the load over the second half of the run, mean over windows and layers.
      idle: experts of all layers without a sample in the last window.
      metrics: of the run.
    """

    perplexity: float
    entropy: float
    idle: float
    metrics: Metrics


Outcomes = Mapping[str, Mapping[str, Mapping[int, Outcome]]]
"""Case -> router -> seed -> a finished run."""


def measure_balance(run: Run[RoutingSettings]) -> None:
    """Train the chosen cases, in a run folder for each run.

    Raises:
      UsageError: for a corpus, folder, checkpoint or setting that will not do. KeyboardInterrupt.
    """
    settings, corpus = run.settings, open_corpus(run)
    for name in settings.chosen_cases:
        run.say(f"case {name}: {CASES[name].text}")
        trainings = case_trainings(
            name,
            run.folder.path,
            words=settings.chosen_words,
            seeds=settings.balance_seeds,
            data=settings.data,
            resume=settings.resume,
        )
        train_all(run, corpus, trainings, num_jobs=settings.num_jobs)


def outcomes(run: Run[RoutingSettings]) -> Outcomes:
    """The finished runs."""
    found: dict[str, dict[str, dict[int, Outcome]]] = {}
    for name, case in CASES.items():
        for router in case.routers:
            for seed in run.settings.balance_seeds:
                folder = RunFolder(folder_of(run.folder.path, name, router, seed))
                if folder.path.is_dir() and finished_headline(folder) is not None:
                    found.setdefault(name, {}).setdefault(router, {})[seed] = _outcome(folder.metrics())
    return found


def _outcome(metrics: Metrics) -> Outcome:
    summary, entropy = summarise_run(metrics), balance_lines(metrics).entropy
    assert summary.perplexity is not None
    assert summary.final_dead_experts is not None
    later = entropy[:, entropy.shape[1] // 2 :]
    return Outcome(
        perplexity=summary.perplexity,
        entropy=float(np.nanmean(later)),
        idle=summary.final_dead_experts,
        metrics=metrics,
    )


def cost(routers: Mapping[str, Mapping[int, Outcome]], router: str, than: str = PLAIN) -> Interval | None:
    """Return the excess of a router's perplexity over another's, in per cent, paired by seed."""
    ours, theirs = routers.get(router, {}), routers.get(than, {})
    seeds = sorted(ours.keys() & theirs.keys())
    return t_interval([100 * (ours[s].perplexity / theirs[s].perplexity - 1) for s in seeds]) if seeds else None


def balance_figures(found: Outcomes) -> dict[str, Any]:
    """The figures of the first case, and every case's below its name."""
    cases = {
        name: {
            router: {
                "perplexity": _mean(seeds, "perplexity"),
                "load_entropy": _mean(seeds, "entropy"),
                "idle_experts": _mean(seeds, "idle"),
                "seeds": len(seeds),
                **_interval_figures(cost(routers, router)),
            }
            for router, seeds in routers.items()
        }
        for name, routers in found.items()
    }
    first, figures = found.get(FIRST, {}), dict[str, Any]()
    if BALANCED in first:
        figures |= {
            "load_entropy": _mean(first[BALANCED], "entropy"),
            "idle_experts": max(each.idle for each in first[BALANCED].values()),
            **_interval_figures(cost(first, BALANCED)),
        }
        losses = {router: _mean(first[router], "entropy") for router in LOSSES if router in first}
        if losses:
            nearest = min(losses, key=lambda router: abs(losses[router] - figures["load_entropy"]))
            against = cost(first, BALANCED, nearest)
            assert against is not None
            figures |= {"over_balancing_loss": against.mean, "nearest_balancing_loss": nearest}
            figures["nearest_load_entropy"] = losses[nearest]
    return {**figures, "cases": cases}


def _interval_figures(interval: Interval | None) -> dict[str, float]:
    if interval is None:
        return {}
    low_and_high = ("perplexity_cost_low", "perplexity_cost_high")
    return {"perplexity_cost": interval.mean, **dict(zip(low_and_high, interval.ends or (), strict=False))}


def _mean(seeds: Mapping[int, Outcome], figure: str) -> float:
    return float(np.mean([getattr(each, figure) for each in seeds.values()]))


def balance_table(found: Outcomes) -> ReportTable:
    """A row for each case and router."""
    rows: list[list[object]] = []
    for name, routers in found.items():
        for router, seeds in routers.items():
            interval = cost(routers, router)
            above = None
            if interval is not None and router != PLAIN:
                above = f"{interval.mean:+.1f} %"
                if interval.ends is not None:
                    above += " ({:+.1f} to {:+.1f})".format(*interval.ends)
            means = [_mean(seeds, figure) for figure in ("entropy", "idle")]
            rows.append([f"{name}: {CASES[name].text}", router, len(seeds), _mean(seeds, "perplexity"), above, *means])
    return ReportTable(
        title="What balance costs",
        head=("case", "router", "seeds", "validation perplexity", f"above {PLAIN}", "load entropy", "idle experts"),
        rows=rows,
        note="Differences are paired by seed, with 95 % intervals in brackets. The load's entropy (1: even) is over "
        "the second half of each run; those experts of both layers are idle that no sample went to in its last tenth.",
    )


def draw_cases(cost_axes: Axes, entropy_axes: Axes, found: Outcomes) -> None:
    """A row for each case: what the balanced router costs, with its interval, and how even the load is."""
    names = [name for name, routers in found.items() if {PLAIN, BALANCED} <= routers.keys()]
    dress(cost_axes, f"Perplexity above that of {PLAIN}", f"{BALANCED}: per cent; 95 % intervals of the seeds")
    dress(entropy_axes, "Entropy of the load (1: even)", "second half of the run")
    cost_axes.axvline(0, color=GREY, linewidth=0.8)
    for row, name in enumerate(names):
        interval = cost(found[name], BALANCED)
        assert interval is not None
        colour, _ = series_style(0)
        if interval.ends is not None:
            cost_axes.plot(interval.ends, [row, row], color=colour, linewidth=1.6)
        cost_axes.plot([interval.mean], [row], "o", color=colour, markersize=6)
        for place, router in enumerate((BALANCED, PLAIN)):
            seeds = found[name][router].values()
            colour, _ = series_style(place)
            label = router if row == 0 else None
            entropy_axes.plot([each.entropy for each in seeds], [row] * len(seeds), "o", color=colour, label=label)
    for axes in (cost_axes, entropy_axes):
        axes.set_yticks(range(len(names)), [CASES[name].text for name in names] if axes is cost_axes else [])
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
    entropy_axes.set_xlim(right=1.02)
    entropy_axes.legend(frameon=False, fontsize=8, loc="lower left")


def draw_length(cost_axes: Axes, entropy_axes: Axes, routers: Mapping[str, Mapping[int, Outcome]]) -> None:
    """Both over the words of training, of the long runs."""
    dress(cost_axes, "Validation perplexity", "million words of training")
    dress(entropy_axes, "Entropy of the load (1: even)", "million words of training")
    labels = []
    for place, router in enumerate(name for name in (BALANCED, PLAIN) if name in routers):
        seeds = routers[router]
        colour, dash = series_style(place)
        for each in seeds.values():
            words, perplexities = _million_words(each.metrics)
            lines = balance_lines(each.metrics)
            cost_axes.plot(words, perplexities, color=colour, linestyle=dash, linewidth=1.4)
            per_step = words[-1] / lines.steps[-1]
            entropy_axes.plot(per_step * lines.steps, np.nanmean(lines.entropy, axis=0), color=colour, linestyle=dash)
        labels.append((perplexities[-1], router, colour))
    cost_axes.set_yscale("log")
    for axis_part in (cost_axes.yaxis.set_major_formatter, cost_axes.yaxis.set_minor_formatter):
        axis_part(ScalarFormatter())
    entropy_axes.set_ylim(top=1.02)
    end_labels(cost_axes, labels)


def _million_words(metrics: Metrics) -> tuple[np.ndarray, Sequence[float]]:
    points = perplexity_curve(metrics).values()
    return np.array([words for words, _ in points]) / 1e6, [perplexity for _, perplexity in points]
