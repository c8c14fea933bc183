"""All rows over all seeds, in the emulator."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from dmoe_jax.data import DataError
from dmoe_jax.runs.report import ReportTable
from dmoe_jax.runs.style import GREY, INK, KILLED, VALID, dress
from experiments.bench import Experiment, Run
from experiments.emulation.trials import Trial, run_trials
from experiments.intervals import t_interval
from experiments.processes import HelperFailed
from experiments.results import Bar, Result
from experiments.staleness.rows import (
    DEFAULT,
    MANY_ONE,
    ONE,
    ONE_DEFAULT,
    PLAIN,
    SWARM_DEFAULT,
    SWARM_PLAIN,
    all_trials,
    many_default,
    many_plain,
)
from experiments.staleness.settings import StalenessSettings

BARS = (
    Bar(name="mnist_default_lost_share", bound=0.5),
    Bar(name="mnist_one_trainer_difference", bound=0.0),
)
"""The default loses at most half of what plain asynchrony loses against one trainer, and changes nothing for one."""

_SWARM_BAR = Bar(name="mnist_swarm_lost_share", bound=0.5)

Values = Mapping[tuple[str, str], Mapping[int, float]]
"""(problem, row) -> seed -> mean training loss over the last eighth of the updates, nats."""


def measure(run: Run[StalenessSettings]) -> None:
    """Train what has no record yet, and log each."""
    have = {(each["problem"], each["label"], each["seed"]) for each in run.records("trial")}
    trials = [trial for trial in all_trials(run.settings) if (trial.problem, trial.label, trial.seed) not in have]
    total = len(trials)
    done = 0

    def note(trial: Trial, answer: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        run.log("trial", problem=trial.problem, label=trial.label, seed=trial.seed, **answer)
        run.say(
            f"{done}/{total}  {trial.problem}, {trial.label}, seed {trial.seed}: {answer['points'][-1]['loss']:.3f}"
        )

    run_trials(trials, num_jobs=run.settings.jobs, on_done=note)


def last_losses(run: Run[StalenessSettings]) -> Values:
    """The losses at the end of every training."""
    values: dict[tuple[str, str], dict[int, float]] = {}
    for each in run.records("trial"):
        values.setdefault((each["problem"], each["label"]), {})[each["seed"]] = each["points"][-1]["loss"]
    return values


def lost_shares(values: Values, problem: str, label: str, plain: str = PLAIN, one: str = ONE) -> list[float]:
    """Return what a row loses against one trainer, over what plain asynchrony loses, for each seed that all have."""
    rows = [values.get((problem, name), {}) for name in (label, one, plain)]
    seeds = sorted(rows[0].keys() & rows[1].keys() & rows[2].keys())
    return [(rows[0][s] - rows[1][s]) / (rows[2][s] - rows[1][s]) for s in seeds]


def summarise(run: Run[StalenessSettings]) -> Result | None:
    """Compute means and intervals of each row; None where no row is finished."""
    values = last_losses(run)
    if not values:
        return None
    figures: dict[str, Any] = {"updates": run.settings.updates, "trainers": run.settings.trainers}
    tables = []
    for problem in dict.fromkeys(problem for problem, _ in values):
        name = problem.replace("-", "_")
        if shares := lost_shares(values, problem, DEFAULT):
            figures[f"{name}_default_lost_share"] = (share := t_interval(shares)).mean
            figures[f"{name}_default_lost_share_interval"] = share.ends
        if shares := lost_shares(values, problem, SWARM_DEFAULT, SWARM_PLAIN):
            figures[f"{name}_swarm_lost_share"] = (share := t_interval(shares)).mean
            figures[f"{name}_swarm_lost_share_interval"] = share.ends
        many = many_plain(run.settings), MANY_ONE
        if shares := lost_shares(values, problem, many_default(run.settings), *many):
            figures[f"{name}_many_lost_share"] = (share := t_interval(shares)).mean
            figures[f"{name}_many_lost_share_interval"] = share.ends
        ones = [values.get((problem, label), {}) for label in (ONE, ONE_DEFAULT)]
        if both := ones[0].keys() & ones[1].keys():
            figures[f"{name}_one_trainer_difference"] = max(abs(ones[0][s] - ones[1][s]) for s in both)
        tables.append(_table(run, values, problem))
    bars: list[Bar] = []
    bars += BARS if any(problem == "mnist" for problem, _ in values) else ()
    bars += [_SWARM_BAR] if run.settings.swarm else []
    if run.settings.only:  # chosen rows are judged by what they can answer
        bars = [bar for bar in bars if bar.name in figures]
    return Result(
        title="What asynchrony costs a mixture of experts, and what wins it back",
        summary=f"Training loss over the last eighth of the run, {run.settings.trainers} trainers unless the row says "
        "otherwise. The last column is what a row loses against one trainer, over what plain asynchrony loses.",
        figures=figures,
        bars=bars,
        tables=tables,
    )


def _table(run: Run[StalenessSettings], values: Values, problem: str) -> ReportTable:
    staleness: dict[str, list[float]] = {}
    accuracy: dict[str, list[float]] = {}
    for each in run.records("trial"):
        if each["problem"] != problem:
            continue
        if each.get("expert_staleness") is not None:
            staleness.setdefault(each["label"], []).append(each["expert_staleness"])
        if "accuracy" in each["points"][-1]:
            accuracy.setdefault(each["label"], []).append(each["points"][-1]["accuracy"])
    rows = []
    for (own, label), by_seed in values.items():
        if own != problem:
            continue
        loss = t_interval(list(by_seed.values()))
        # As many updates as one trainer with as many.
        is_many = label.startswith(many_plain(run.settings))
        plain, one = (many_plain(run.settings), MANY_ONE) if is_many else (PLAIN, ONE)
        shares = lost_shares(values, problem, label, plain, one)
        share = t_interval(shares) if shares else None
        rows.append(
            (
                label,
                loss.num_values,
                loss.mean,
                "" if loss.ends is None else f"{loss.ends[0]:.3f} to {loss.ends[1]:.3f}",
                t_interval(accuracy[label]).mean if label in accuracy else "",
                t_interval(staleness[label]).mean if label in staleness else "",
                "" if label in (ONE, MANY_ONE) else _difference(by_seed, values.get((problem, one), {})),
                "" if share is None else f"{share.mean:.2f}",
            )
        )
    return ReportTable(
        title="MNIST" if problem == "mnist" else "Transformer-XL on WikiText-2",
        head=("row", "seeds", "loss", "95 % interval", "accuracy", "staleness of experts", "minus one's", "lost"),
        rows=rows,
        note="Losses in nats. What a row has more than one trainer after as many updates: paired by seed, with a 95 % "
        "interval. Accuracy of the parameters after the last update, which moves by some 0.1 from one "
        "evaluation to the next.",
    )


def _difference(losses: Mapping[int, float], others: Mapping[int, float]) -> str:
    """The mean over the seeds that both have, with its interval; empty where there are none."""
    differences = [losses[seed] - others[seed] for seed in sorted(losses.keys() & others.keys())]
    if not differences:
        return ""
    difference = t_interval(differences)
    between = "" if difference.ends is None else f" ({difference.ends[0]:+.3f} to {difference.ends[1]:+.3f})"
    return f"{difference.mean:+.3f}{between}"


def draw(run: Run[StalenessSettings], result: Result) -> Figure:
    """Draw the seeds' losses and their mean, a line for each row."""
    del result
    values = last_losses(run)
    problems = list(dict.fromkeys(problem for problem, _ in values))
    heights = [sum(own == problem for own, _ in values) for problem in problems]
    figure = Figure(figsize=(8.0, 1.0 + 0.32 * sum(heights)), layout="constrained")
    all_axes = figure.subplots(len(problems), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, problem in zip(all_axes, problems, strict=True):
        labels = [label for own, label in values if own == problem]
        for place, label in enumerate(labels):
            losses = list(values[problem, label].values())
            colour = KILLED if label == PLAIN else VALID if label == DEFAULT else GREY
            axes.plot(losses, [place] * len(losses), "o", color=colour, markersize=4, alpha=0.6)
            axes.plot([t_interval(losses).mean] * 2, [place - 0.3, place + 0.3], color=INK, linewidth=1.5)
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        title = "MNIST" if problem == "mnist" else "Transformer-XL on WikiText-2"
        dress(axes, title, "training loss at the end, nats: each seed, and the mean")
    return figure


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Training loss at the end of each row, one dot for each seed",
    check=all_trials,
    expected=(HelperFailed, DataError),
)
