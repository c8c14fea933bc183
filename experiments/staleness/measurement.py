"""Rows with ever more of what asynchrony brings, and with remedies; all over all seeds, in the emulator."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from dmoe_jax.data import DataError
from dmoe_jax.runs.report import ReportTable
from dmoe_jax.runs.style import GREY, INK, KILLED, VALID, dress
from experiments.bench import Experiment, Run
from experiments.emulation.problems import PLAIN as NO_REMEDY
from experiments.emulation.problems import Remedy
from experiments.emulation.trials import Trial, seeds_of, train_missing, trained
from experiments.intervals import paired_difference, t_interval
from experiments.processes import HelperFailed
from experiments.results import Bar, Result
from experiments.staleness.settings import StalenessSettings

ONE, ONE_DEFAULT, PLAIN = "one trainer", "one trainer, default", "stale trunk and experts"
DEFAULT = "default: scaled by (1 + s)^-1/2, stale gradients without first moment"
MANY, MANY_DEFAULT, MANY_ONE = "256 trainers", "256 trainers, default", "one trainer, as many updates"
SWARM, SWARM_DEFAULT = "simulated swarm", "simulated swarm, default"
TIMES_4 = ", step sizes times 4"
"""For Transformer-XL: what the preset of asynchronous trainers has, since the default divides every stale update."""

NAMES = {"mnist": "MNIST", "transformer-xl": "Transformer-XL on WikiText-2"}

BARS = (
    Bar(name="mnist_default_lost_share", bound=0.5),
    Bar(name="mnist_one_trainer_difference", bound=0.0),
)
"""The default loses at most half of what plain asynchrony loses against one trainer, and changes nothing for one."""
_SWARM_BAR = Bar(name="mnist_swarm_lost_share", bound=0.5)

Losses = Mapping[str, Mapping[int, float]]
"""Row -> seed -> mean training loss over the last eighth of the updates, nats."""


def all_trials(settings: StalenessSettings) -> list[Trial]:
    """Return the trials that the settings ask for; the seeds of a row stand together.

    Raises:
      ValueError: no row has a text in its name that the settings ask for.
    """
    problems = ("mnist",) if settings.quick else settings.problem
    rows = [row for problem in problems for row in _rows(problem, settings)]
    labels = list(dict.fromkeys(row.label for row in rows))
    chosen = set(() if settings.only else labels)
    for text in settings.only:
        found = [label for label in labels if label == text] or [label for label in labels if text in label]
        if not found:
            raise ValueError(f"--only: no row has {text!r} in its name; there are {'; '.join(labels)}")
        chosen.update(found)
    count = min(settings.seeds, 2) if settings.quick else settings.seeds
    return seeds_of([row for row in rows if row.label in chosen], first=settings.seed, count=count)


def _rows(problem: str, settings: StalenessSettings) -> list[Trial]:
    default, updates, is_mnist = Remedy(), settings.updates, problem == "mnist"
    sizes: dict[str, Any] = {"d_model": 32, "grid_size": (8, 8), "num_evaluated": 2000}
    if not is_mnist:  # half as many words a step as in figure 6, since most of a step is the optimiser's
        sizes, updates = {"seq_len": 64, "num_evaluated": 8192}, 2 * updates
    one, many = {"num_trainers": 1}, {"num_trainers": 256, "num_updates": 2 * updates}
    rows: dict[str, dict[str, Any]] = {
        ONE: one,
        ONE_DEFAULT: {**one, "remedy": default},
        PLAIN: {},
        DEFAULT: {"remedy": default},
    }
    if not settings.quick:
        rows |= {
            "stale trunk": {"fresh_experts": True},
            "10 % failures": {"failure_rate": 0.1},
            "10 % failures, default": {"failure_rate": 0.1, "remedy": default},
            MANY: many,
            MANY_DEFAULT: {**many, "remedy": default},
            MANY_ONE: {**many, **one},
        }
        if is_mnist:
            rows |= {
                "both scaled by (1 + s)^-1/2": {"remedy": Remedy(yields=False)},
                "no first moment at all": {"remedy": replace(NO_REMEDY, momentum=0.0)},
                "step sizes divided by 4, no first moment at all": {
                    "remedy": replace(NO_REMEDY, momentum=0.0, step_size=0.25)
                },
            }
        else:
            larger, larger_default = {"remedy": replace(NO_REMEDY, step_size=4.0)}, {"remedy": Remedy(step_size=4.0)}
            rows |= {
                ONE + TIMES_4: {**one, **larger},
                PLAIN + TIMES_4: larger,
                "default" + TIMES_4: larger_default,
                MANY_DEFAULT + TIMES_4: {**many, **larger_default},
            }
    if settings.swarm and is_mnist:
        rows |= {SWARM: {"in_swarm": True}, SWARM_DEFAULT: {"in_swarm": True, "remedy": default}}
    plain: dict[str, Any] = {"num_trainers": 64, "num_updates": updates, "remedy": NO_REMEDY}
    return [
        Trial(label=label, problem=problem, sizes=sizes, num_points=8, **plain | changes)
        for label, changes in rows.items()
    ]


def measure(run: Run[StalenessSettings]) -> None:
    """Train what has no record yet, and log each."""
    train_missing(run, all_trials(run.settings), num_jobs=run.settings.jobs)


def last_losses(run: Run[StalenessSettings]) -> dict[str, Losses]:
    """Problem -> the losses at the end of every training."""
    losses: dict[str, dict[str, dict[int, float]]] = {}
    for (problem, label), seeds in trained(run).items():
        own = {seed: record["points"][-1]["loss"] for seed, record in seeds.items()}
        losses.setdefault(problem, {})[label] = own
    return dict(losses)


def lost_shares(losses: Losses, label: str, plain: str = PLAIN, one: str = ONE) -> list[float]:
    """Return what a row loses against one trainer, over what plain asynchrony loses, for each seed that all have."""
    ours, ones, theirs = (losses.get(name, {}) for name in (label, one, plain))
    seeds = sorted(ours.keys() & ones.keys() & theirs.keys())
    return [(ours[seed] - ones[seed]) / (theirs[seed] - ones[seed]) for seed in seeds]


def summarise(run: Run[StalenessSettings]) -> Result | None:
    """Compute means and intervals of each row; None where no row is finished."""
    settings, found = run.settings, last_losses(run)
    if not found:
        return None
    figures: dict[str, Any] = {"updates": settings.updates}
    for problem, losses in found.items():
        name = problem.replace("-", "_")
        for part, label, plain, one in (
            ("default", DEFAULT, PLAIN, ONE),
            ("swarm", SWARM_DEFAULT, SWARM, ONE),
            ("many", MANY_DEFAULT, MANY, MANY_ONE),
        ):
            if shares := lost_shares(losses, label, plain, one):
                figures[f"{name}_{part}_lost_share"] = (share := t_interval(shares)).mean
                figures[f"{name}_{part}_lost_share_interval"] = share.ends
        ones = [losses.get(label, {}) for label in (ONE, ONE_DEFAULT)]
        if both := ones[0].keys() & ones[1].keys():
            figures[f"{name}_one_trainer_difference"] = max(abs(ones[0][seed] - ones[1][seed]) for seed in both)
    bars = [*(BARS if "mnist" in found else ()), *([_SWARM_BAR] if settings.swarm else [])]
    return Result(
        title="What asynchrony costs a mixture of experts, and what wins it back",
        summary="Training loss over the last eighth of the run, 64 trainers unless the row says otherwise. The last "
        "column is what a row loses against one trainer, over what plain asynchrony loses.",
        figures=figures,
        # Chosen rows are judged by what they can answer.
        bars=[bar for bar in bars if not settings.only or bar.name in figures],
        tables=[_table(run, problem, losses) for problem, losses in found.items()],
    )


def _table(run: Run[StalenessSettings], problem: str, losses: Losses) -> ReportTable:
    rows: list[Sequence[object]] = []
    for label, own in losses.items():
        points = [record["points"][-1] for record in trained(run)[problem, label].values()]
        accuracies = [point["accuracy"] for point in points if "accuracy" in point]
        # As many updates as one trainer with as many.
        plain, one = (MANY, MANY_ONE) if label.startswith(MANY) else (PLAIN, ONE)
        more = None if label in (ONE, MANY_ONE) else paired_difference(own, losses.get(one, {}))
        loss, shares = t_interval(list(own.values())), lost_shares(losses, label, plain, one)
        rows.append(
            (
                label,
                loss.num_values,
                loss.mean,
                _ends(loss.ends, ".3f"),
                t_interval(accuracies).mean if accuracies else "",
                "" if more is None else f"{more.mean:+.3f} {_ends(more.ends, '+.3f')}".strip(),
                f"{t_interval(shares).mean:.2f}" if shares else "",
            )
        )
    return ReportTable(
        title=NAMES[problem],
        head=("row", "seeds", "loss", "95 % interval", "accuracy", "minus one's", "lost"),
        rows=rows,
        note="Losses in nats. What a row has more than one trainer after as many updates: paired by seed, with a 95 % "
        "interval. Accuracy of the parameters after the last update, which moves by some 0.1 from one "
        "evaluation to the next.",
    )


def _ends(ends: tuple[float, float] | None, form: str) -> str:
    return "" if ends is None else f"({ends[0]:{form}} to {ends[1]:{form}})"


def draw(run: Run[StalenessSettings], result: Result) -> Figure:
    """Draw the seeds' losses and their mean, a line for each row."""
    del result
    found = last_losses(run)
    heights = [len(losses) for losses in found.values()]
    figure = Figure(figsize=(8.0, 1.0 + 0.32 * sum(heights)), layout="constrained")
    all_axes = figure.subplots(len(found), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (problem, losses) in zip(all_axes, found.items(), strict=True):
        for place, (label, own) in enumerate(losses.items()):
            values = list(own.values())
            colour = KILLED if label == PLAIN else VALID if label == DEFAULT else GREY
            axes.plot(values, [place] * len(values), "o", color=colour, markersize=4, alpha=0.6)
            axes.plot([t_interval(values).mean] * 2, [place - 0.3, place + 0.3], color=INK, linewidth=1.5)
        axes.set_yticks(range(len(losses)), list(losses))
        axes.invert_yaxis()
        dress(axes, NAMES[problem], "training loss at the end, nats: each seed, and the mean")
    return figure


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Training loss at the end of each row, one dot for each seed",
    check=all_trials,
    expected=(HelperFailed, DataError),
)
