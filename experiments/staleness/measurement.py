"""Rows with ever more of what asynchrony brings, and with remedies; all over all seeds, in the emulator.

The bars are of rows that have each its best step sizes.
"""

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
from experiments.emulation.settings import FIRST_SEARCH_SEED
from experiments.emulation.trials import Trial, final_figures, seeds_of, train_missing, trained
from experiments.intervals import paired_difference, t_interval
from experiments.processes import HelperFailed
from experiments.results import Bar, Result
from experiments.staleness.settings import StalenessSettings
from experiments.step_sizes import Side, best_factors, scaled, scaled_label, search, search_table

ONE, ONE_DEFAULT, PLAIN = "one trainer", "one trainer, default", "stale trunk and experts"
DEFAULT = "default: scaled by (1 + s)^-1/2, stale gradients without first moment"
MANY, MANY_DEFAULT, MANY_ONE = "256 trainers", "256 trainers, default", "one trainer, as many updates"
SWARM, SWARM_DEFAULT = "simulated swarm", "simulated swarm, default"
NO_MOMENT = "no first moment at all"

SEARCHED = (ONE, PLAIN, NO_MOMENT, DEFAULT)
"""Rows whose step sizes are searched."""

BEST: Mapping[Side, float] = {("mnist", PLAIN): 1 / 8, ("mnist", NO_MOMENT): 1 / 4, ("transformer-xl", DEFAULT): 4.0}
"""Best step sizes, of MNIST by an older version on another machine (three seeds); 1 for other rows. `--search` finds
them anew."""

NAMES = {"mnist": "MNIST", "transformer-xl": "Transformer-XL on WikiText-2"}

BARS = (Bar(name="mnist_default_lost_share", bound=0.5), Bar(name="mnist_one_trainer_difference", bound=0.0))
"""With each its best step sizes, the default loses at most half of what plain asynchrony loses against one trainer; and
with the same step sizes it changes nothing for one."""

Losses = Mapping[str, Mapping[int, float]]
"""Row -> seed -> mean training loss over the last eighth of the updates, nats."""


def all_trials(settings: StalenessSettings, best: Mapping[Side, float] = BEST) -> list[Trial]:
    """Return the trials that the settings ask for; the seeds of a row stand together.

    Args:
      best: factors of the step sizes of rows that were searched.

    Raises:
      ValueError: no row has a text in its name that the settings ask for.
    """
    rows = [row for problem in _problems(settings) for row in rows_of(problem, settings)]
    tuned = [scaled(row, best.get((row.problem, row.label), 1.0)) for row in rows if row.label in SEARCHED]
    rows = list({(row.problem, row.label): row for row in [*rows, *tuned]}.values())
    labels = list(dict.fromkeys(row.label for row in rows))
    chosen = set(() if settings.only else labels)
    for text in settings.only:
        found = [label for label in labels if label == text] or [label for label in labels if text in label]
        if not found:
            raise ValueError(f"--only: no row has {text!r} in its name; there are {'; '.join(labels)}")
        chosen.update(found)
    count = min(settings.seeds, 2) if settings.quick else settings.seeds
    return seeds_of([row for row in rows if row.label in chosen], first=settings.seed, count=count)


def _problems(settings: StalenessSettings) -> Sequence[str]:
    return ("mnist",) if settings.quick else settings.problem


def _sides(settings: StalenessSettings, problem: str) -> list[Trial]:
    return [row for row in rows_of(problem, settings) if row.label in SEARCHED]


def _best(run: Run[StalenessSettings]) -> dict[Side, float]:
    sides = [side for problem in _problems(run.settings) for side in _sides(run.settings, problem)]
    return best_factors(run, sides, BEST, figure="loss", least=True)


def rows_of(problem: str, settings: StalenessSettings) -> list[Trial]:
    """Return the rows of a problem, each with the step sizes of one trainer."""
    default, updates, is_mnist = Remedy(), settings.updates, problem == "mnist"
    sizes: dict[str, Any] = {"d_model": 32, "grid_size": (8, 8), "num_evaluated": 2000}
    if not is_mnist:  # half as many words a step as in figure 6, since most of a step is the optimiser's
        sizes, updates = {"seq_len": 64, "num_evaluated": 8192}, 2 * updates
    one, many = {"num_trainers": 1}, {"num_trainers": 256, "num_updates": 2 * updates}
    rows: dict[str, dict[str, Any]] = {
        ONE: one,
        ONE_DEFAULT: {**one, "remedy": default},
        PLAIN: {},
        NO_MOMENT: {"remedy": replace(NO_REMEDY, momentum=0.0)},
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
            rows["both scaled by (1 + s)^-1/2"] = {"remedy": Remedy(yields=False)}
        else:
            factor = BEST[problem, DEFAULT]
            rows[scaled_label(MANY_DEFAULT, factor)] = {**many, "remedy": Remedy(step_size=factor)}
    if settings.swarm and is_mnist:
        rows |= {SWARM: {"in_swarm": True}, SWARM_DEFAULT: {"in_swarm": True, "remedy": default}}
    plain: dict[str, Any] = {"num_trainers": 64, "num_updates": updates, "remedy": NO_REMEDY}
    return [
        Trial(label=label, problem=problem, sizes=sizes, num_points=8, **plain | changes)
        for label, changes in rows.items()
    ]


def measure(run: Run[StalenessSettings]) -> None:
    """Train what has no record yet, and log each; before that, search if that is asked."""
    settings = run.settings
    if settings.search:
        for problem in _problems(settings):
            search(run, _sides(settings, problem))
    train_missing(run, all_trials(settings, _best(run)))


def last_losses(run: Run[StalenessSettings]) -> Mapping[str, Losses]:
    """Problem -> the losses at the end of every training."""
    losses: dict[str, dict[str, dict[int, float]]] = {}
    for (problem, label), seeds in trained(run).items():
        own = {seed: record["points"][-1]["loss"] for seed, record in seeds.items() if seed < FIRST_SEARCH_SEED}
        if own:
            losses.setdefault(problem, {})[label] = own
    return losses


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
        name, best = problem.replace("-", "_"), _best(run)
        one, plain, without, default = (scaled_label(row, best.get((problem, row), 1.0)) for row in SEARCHED)
        for part, label, worst, base in (
            ("default", default, plain, one),
            ("no_moment", without, plain, one),
            ("untuned_default", DEFAULT, PLAIN, ONE),
            ("swarm", SWARM_DEFAULT, SWARM, ONE),
            ("many", MANY_DEFAULT, MANY, MANY_ONE),
        ):
            if shares := lost_shares(losses, label, worst, base):
                figures[f"{name}_{part}_lost_share"] = (share := t_interval(shares)).mean
                figures[f"{name}_{part}_lost_share_interval"] = share.ends
        for part, other in (("plain", plain), ("no_moment", without)):
            if more := paired_difference(losses.get(default, {}), losses.get(other, {})):
                figures[f"{name}_default_minus_{part}"] = more.mean
                figures[f"{name}_default_minus_{part}_interval"] = more.ends
        ones = [losses.get(label, {}) for label in (ONE, ONE_DEFAULT)]
        if both := ones[0].keys() & ones[1].keys():
            figures[f"{name}_one_trainer_difference"] = max(abs(ones[0][seed] - ones[1][seed]) for seed in both)
    bars = BARS if "mnist" in found else ()
    tables = [_table(run, problem, losses) for problem, losses in found.items()]
    tables += [table for problem in found if (table := search_table(run, _sides(settings, problem), "loss"))]
    return Result(
        title="What asynchrony costs a mixture of experts, and what wins it back",
        summary="Training loss over the last eighth of the run, 64 trainers unless the row says otherwise. The last "
        "column is what a row loses against one trainer, over what plain asynchrony loses; figures without `untuned`, "
        "`swarm` and `many` in their names are of rows that have each the best of 1/32 to 4 times the step sizes.",
        figures=figures,
        runs=final_figures(run),
        # Chosen rows are judged by what they can answer.
        bars=[bar for bar in bars if not settings.only or bar.name in figures],
        tables=tables,
    )


def _table(run: Run[StalenessSettings], problem: str, losses: Losses) -> ReportTable:
    rows: list[Sequence[object]] = []
    for label, own in losses.items():
        records = trained(run)[problem, label]
        points = [records[seed]["points"][-1] for seed in own]
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


def draw(run: Run[StalenessSettings], _: Result) -> Figure:
    """Draw the seeds' losses and their mean, a line for each row."""
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
