"""Plays the scenes, trains the ALBERTs, and says what they came to."""

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dmoe_jax.runs.report import ReportTable
from dmoe_jax.runs.style import GREY, dress
from experiments.bench import Experiment, Run
from experiments.collaborative.albert import albert_task
from experiments.collaborative.albert_swarm import averaging_s, baseline_step_s, machines, train_together
from experiments.collaborative.real import play_real
from experiments.collaborative.scenes import CHURN, batch_figures, churn_figures, play_equal, play_swarm, unequal
from experiments.collaborative.settings import CollaborativeSettings
from experiments.collaborative.world import compare_with_one_machine
from experiments.intervals import t_interval
from experiments.panels import series_style
from experiments.results import Bar, Result, finals_of

_EQUAL_STEPS, _VIRTUAL_S, _FAILURE_EVERY_S = 20, 240.0, 15.0
"""Global steps of `equal`; length of `batches` and `churn`, and mean time between two failures, virtual seconds."""

_STEPS, _LARGE_SWARM, _STEPS_OF_LARGE = 16, 50, 10
"""Global steps of ALBERT; fewer in swarms whose messages are too many for all of them."""

_MORE_STEPS = 2
"""Steps of the swarms beyond those of the one machine: they may need one more to come to its loss."""

_REPLAYED = 10
"""Steps that are repeated by one process with the very same samples, at most; not the last step, of which not all
members are known."""


def bars_of(part: str, peers: Sequence[int]) -> Sequence[Bar]:
    """Return the bars of a part; in `albert` a swarm of each size makes the steps of one machine, sooner than any
    baseline. The loss falls by two and a half nats in 16 steps; 0.1 is what less than one of them changes.
    """
    faster = [f"albert_over_{name}_{n}" for n in peers for name in ("all_reduce", "parameter_server")]
    bars = {
        "equal": [Bar(name="equal_to_one_machine", bound=1e-5), Bar(name="next_step_s", bound=10)],
        "batches": [Bar(name="batch_within_5_percent", bound=0.95, comparison=">="), Bar(name="most_idle", bound=0.1)],
        "churn": [Bar(name="goodput", bound=0.9, comparison=">="), Bar(name="chains_apart", bound=0)],
        "albert": [
            Bar(name="albert_same_samples", bound=1e-4),
            Bar(name="albert_same_loss", bound=0.1),
            Bar(name="albert_chains_apart", bound=0),
            *(Bar(name=name, bound=1.0, comparison=">=") for name in faster),
        ],
        "real": [Bar(name="equal_over_tls", bound=1e-5), Bar(name="real_next_step_s", bound=10)],
    }
    return bars[part]


def measure(run: Run[CollaborativeSettings]) -> None:
    """Measure the parts that are asked for, one after the other."""
    settings = run.settings
    for part in settings.parts:
        run.say(f"part {part}")
        if part == "equal":
            found, played = play_equal(steps=_EQUAL_STEPS, seed=settings.seed)
            difference = math.nan if found.unexplained or found.chains_apart else found.difference
            run.log("figures", part=part, equal_to_one_machine=difference, next_step_s=max(played.recovered_s))
        elif part == "batches":
            specs = unequal(8, slowest_s=0.5)
            played = play_swarm(specs, target=1024, virtual_s=_VIRTUAL_S, seed=settings.seed)
            run.log("figures", part=part, **batch_figures(played))
        elif part == "churn":
            played = play_swarm(**CHURN, virtual_s=_VIRTUAL_S, failure_every_s=_FAILURE_EVERY_S, seed=settings.seed)
            within = batch_figures(played)["batch_within_5_percent"]
            run.log("figures", part=part, **churn_figures(played), churn_within_5_percent=within)
        elif part == "albert":
            _measure_albert(run)
        else:
            folder = run.folder.path / "processes"
            run.log("figures", part=part, **play_real(folder, minutes=settings.real_minutes, told=run.say))


def _measure_albert(run: Run[CollaborativeSettings]) -> None:
    """Train the one machine and every swarm; log the loss after each step, and facts about each swarm."""
    swarms = run.settings.albert_swarms
    tasks = {seed: albert_task(seed=seed) for seed in sorted({seed for _, seed in swarms})}
    for seed, task in tasks.items():
        run.say(f"albert: one machine, seed {seed}")
        losses = [task.loss(params) for params in islice(task.one_machine(), _STEPS)]
        run.log("albert_alone", seed=seed, losses=losses)
    for peers, seed in swarms:
        run.say(f"albert: {peers} peers, seed {seed}")
        task, is_first = tasks[seed], (peers, seed) == swarms[0]
        steps = _STEPS if peers < _LARGE_SWARM else _STEPS_OF_LARGE
        specs = machines(peers, num_params=task.num_params)
        points, played, problem = train_together(task, specs, steps=steps + _MORE_STEPS, keep=is_first, seed=seed)
        if is_first:
            found = compare_with_one_machine(problem, played.lives, min(_REPLAYED, len(points) - 1))
            difference = math.nan if found.unexplained else found.difference
            run.log("figures", part="albert", albert_same_samples=difference)
        run.log(
            "albert_swarm",
            peers=peers,
            seed=seed,
            steps=steps,
            seconds=[seconds for seconds, _ in points],
            losses=[loss for _, loss in points],
            step_s=baseline_step_s(specs, target=task.target, num_params=task.num_params),
            chains_apart=played.chains_apart,
        )
    num_params = tasks[run.settings.seed].num_params
    specs = machines(24, num_params=num_params)
    gain = averaging_s(specs, num_params) / averaging_s(specs, num_params, by_speed=True)
    run.log("figures", part="albert", albert_shares_gain=gain)


def seconds_to(loss: float, seconds: Sequence[float], losses: Sequence[float]) -> float:
    """Return the time at which the losses are first as low as this, on straight lines between them; NaN if never."""
    return float(np.interp(-loss, -np.minimum.accumulate(losses), seconds, right=math.nan))


def albert_figures(run: Run[CollaborativeSettings]) -> dict[str, float]:
    """Return the figures that the records of `albert` amount to; empty if no swarm was measured.

    Of n peers: `albert_speedup_n`, `albert_over_all_reduce_n`, `albert_over_parameter_server_n`: how many times as long
    one machine, or the baseline, takes to the loss that one machine has after its steps. `albert_same_loss`: the
    largest difference of the losses of swarm and one machine after equal steps, of the smallest swarm: the mean over
    its seeds, with the ends of its 95 % interval.
    """
    swarms = run.records("albert_swarm")
    if not swarms:
        return {}
    alone = {record["seed"]: record["losses"] for record in run.records("albert_alone")}
    names = {"one_machine": "speedup", "all_reduce": "over_all_reduce", "parameter_server": "over_parameter_server"}
    figures: dict[str, Any] = {}
    gaps: list[float] = []
    for swarm in swarms:
        own, peers, others = swarm["losses"], swarm["peers"], alone[swarm["seed"]][: swarm["steps"]]
        if swarm["seed"] == run.settings.seed:
            took_s = seconds_to(others[-1], swarm["seconds"], own)
            num_steps = seconds_to(others[-1], range(1, len(others) + 1), others)
            for baseline, name in names.items():
                figures[f"albert_{name}_{peers}"] = num_steps * swarm["step_s"][baseline] / took_s
        if peers == swarms[0]["peers"]:
            gaps.append(max(abs(loss - other) for loss, other in zip(own, others, strict=False)))
    interval = t_interval(gaps)
    figures |= {"albert_same_loss": interval.mean, "albert_same_loss_interval": interval.ends}
    figures["albert_chains_apart"] = sum(swarm["chains_apart"] for swarm in swarms)
    return figures


def summarise(run: Run[CollaborativeSettings]) -> Result | None:
    """Return the figures and bars of the parts that were measured; None if there are none."""
    by_part: dict[str, dict[str, float]] = {"albert": albert_figures(run)} if run.records("albert_swarm") else {}
    for record in run.records("figures"):
        figures = {name: value for name, value in record.items() if name not in ("kind", "part")}
        by_part[record["part"]] = by_part.get(record["part"], {}) | figures
    if not by_part:
        return None
    peers = [peers for peers, seed in run.settings.albert_swarms if seed == run.settings.seed]
    swarms = ({**each, "loss": each["losses"][-1]} for each in run.records("albert_swarm"))
    rows = [[part, name, value] for part, figures in by_part.items() for name, value in figures.items()]
    return Result(
        title="One large batch by machines that come and go",
        summary="Peers gather gradients until all together have the target; every peer makes the step of one machine.",
        figures={name: value for figures in by_part.values() for name, value in figures.items()},
        bars=[bar for part in by_part for bar in bars_of(part, peers)],
        runs=finals_of(swarms, "peers"),
        tables=[ReportTable(title="All figures", head=("part", "figure", "value"), rows=rows)],
    )


def draw(run: Run[CollaborativeSettings], _: Result) -> Figure | None:
    """Draw ALBERT's loss over virtual time, of the swarms and the baselines."""
    swarms = [swarm for swarm in run.records("albert_swarm") if swarm["seed"] == run.settings.seed]
    if not swarms:
        return None
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    dress(axes, "ALBERT's loss on held-out text, nats", "virtual seconds")
    losses = next(each["losses"] for each in run.records("albert_alone") if each["seed"] == run.settings.seed)

    def plot_steps(step_s: float, num_steps: int, **look: Any) -> None:
        axes.plot([number * step_s for number in range(1, num_steps + 1)], losses[:num_steps], **look)

    plot_steps(swarms[0]["step_s"]["one_machine"], len(losses), color=GREY, label="one machine")
    for place, swarm in enumerate(swarms):
        (colour, _), peers, step_s = series_style(place), swarm["peers"], swarm["step_s"]
        axes.plot(swarm["seconds"], swarm["losses"], color=colour, label=f"{peers} peers, together")
        for name, dash in (("all_reduce", "--"), ("parameter_server", ":")):
            label = f"{peers} peers, {name.replace('_', ' ')}"
            plot_steps(step_s[name], swarm["steps"], linestyle=dash, color=colour, label=label)
    axes.set_xscale("log")
    axes.legend(frameon=False, fontsize=7)
    return figure


EXPERIMENT = Experiment[CollaborativeSettings](
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="ALBERT's loss over virtual time, of swarms, one machine, all-reduce and a parameter server",
)
