"""The part `albert`: trains, says what the curves come to, and draws them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from dmoe_jax.runs.style import GREY, dress
from experiments.bench import Run
from experiments.collaborative.albert_baselines import (
    all_reduce_step_s,
    curve_with,
    one_machine_losses,
    one_machine_step_s,
    parameter_server_step_s,
)
from experiments.collaborative.albert_swarm import Curve, Point, Together, machines, train_together
from experiments.collaborative.albert_task import AlbertTask, TaskSize, albert_task
from experiments.collaborative.settings import CollaborativeSettings
from experiments.collaborative.world import PeerSpec, compare_with_one_machine
from experiments.intervals import t_interval
from experiments.panels import series_style
from experiments.results import Bar

ONE = "one machine"
TOGETHER = "together"
ALL_REDUCE = "all-reduce"
SERVER = "parameter server"

_MORE_STEPS = 2
"""Steps of the swarms beyond those of the one machine: they may need one more to come to its loss."""

_REPLAYED = 10
"""Steps that are repeated by one process with the very same samples, at most; not the last step, of which not all
members are known."""

_SHORTER = {50: 10}
"""Steps of swarms whose messages are too many for all of them."""


def bars(peers: Sequence[int]) -> tuple[Bar, ...]:
    """Return the bars: the swarm makes the steps of one machine, and makes them sooner than any baseline.

    The loss falls by two and a half nats in 16 steps; 0.1 is what less than one of them changes.
    """
    faster = [f"albert_over_{name}_{n}" for n in peers for name in ("all_reduce", "parameter_server")]
    return (
        Bar(name="albert_same_samples", bound=1e-4),
        Bar(name="albert_same_loss", bound=0.1),
        Bar(name="albert_chains_apart", bound=0),
        *(Bar(name=name, bound=1.0, comparison=">=") for name in faster),
    )


def measure_albert(run: Run[CollaborativeSettings], size: TaskSize = TaskSize()) -> None:  # noqa: B008 (frozen)
    """Train the one machine and every swarm; log the loss after each step, and facts about each swarm."""
    settings = run.settings
    smallest, seeds = min(settings.albert_sizes), settings.albert_seed_range
    tasks = {seed: albert_task(size, seed=seed) for seed in seeds}
    for seed, task in tasks.items():
        run.say(f"albert: one machine, seed {seed}")
        losses = one_machine_losses(task, steps=settings.albert_steps)
        specs = machines(smallest, num_params=task.num_params)
        alone = curve_with(losses, step_s=one_machine_step_s(specs, target=size.target), target=size.target)
        log_curve(run, alone, ONE, peers=1, seed=seed)
    for peers in settings.albert_sizes:
        for seed in seeds if peers == smallest else seeds[:1]:
            _measure_swarm(run, tasks[seed], peers, seed=seed, replays=peers == smallest and seed == seeds[0])


def _measure_swarm(run: Run[CollaborativeSettings], task: AlbertTask, peers: int, *, seed: int, replays: bool) -> None:
    specs = machines(peers, num_params=task.num_params)
    steps = min(run.settings.albert_steps, _SHORTER.get(peers, run.settings.albert_steps))
    run.say(f"albert: {peers} peers, seed {seed}")
    played = train_together(task, specs, steps=steps + _MORE_STEPS, keep=replays, seed=seed)
    log_curve(run, played.curve, TOGETHER, peers=peers, seed=seed)
    run.log("albert_swarm", peers=peers, seed=seed, steps=steps, **_facts(task, specs, played, replays=replays))


def _facts(task: AlbertTask, specs: Sequence[PeerSpec], played: Together, *, replays: bool) -> dict[str, Any]:
    """Return facts about one swarm: how it went, and the seconds of a step of each baseline with its machines."""
    target, num_params = task.size.target, task.num_params
    facts = {
        "computed_per_s": sum(1 / spec.sample_s for spec in specs),
        "all_reduce_step_s": all_reduce_step_s(specs, target=target, num_params=num_params),
        "parameter_server_step_s": parameter_server_step_s(specs, target=target, num_params=num_params),
        "target": target,
        "goodput": played.goodput,
        "failures": len(played.failed_at),
        "chains_apart": played.chains_apart,
    }
    if replays:
        found = compare_with_one_machine(played.problem, played.lives, min(_REPLAYED, played.curve.last.step - 1))
        facts["same_samples"] = math.nan if found.unexplained else found.difference
    return facts


def log_curve(run: Run[CollaborativeSettings], curve: Curve, name: str, *, peers: int, seed: int) -> None:
    """A record for each point."""
    for point in curve.points:
        run.log(
            "albert_point",
            curve=name,
            peers=peers,
            seed=seed,
            step=point.step,
            virtual_s=point.virtual_s,
            samples=point.samples,
            loss=point.loss,
        )


def curves_of(points: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int, int], Curve]:
    """(name, peers, seed) -> curve, from the records that `log_curve` wrote."""
    found: dict[tuple[str, int, int], list[Point]] = {}
    for record in points:
        fields = {name: record[name] for name in ("step", "virtual_s", "samples", "loss")}
        found.setdefault((record["curve"], record["peers"], record["seed"]), []).append(Point(**fields))
    return {key: Curve(points=tuple(each)) for key, each in found.items()}


def _with_baselines(run: Run[CollaborativeSettings]) -> tuple[dict[tuple[str, int, int], Curve], list[dict[str, Any]]]:
    """All curves, those of the baselines too, and the facts of the swarms."""
    curves, swarms = curves_of(run.records("albert_point")), run.records("albert_swarm")
    for swarm in swarms:
        peers, seed = swarm["peers"], swarm["seed"]
        losses = {each.step: each.loss for each in curves[ONE, 1, seed].points if each.step <= swarm["steps"]}
        for name, field in ((ALL_REDUCE, "all_reduce_step_s"), (SERVER, "parameter_server_step_s")):
            curves[name, peers, seed] = curve_with(losses, step_s=swarm[field], target=swarm["target"])
    return curves, swarms


def albert_figures(run: Run[CollaborativeSettings]) -> dict[str, float]:
    """Return the figures that the records amount to; empty if no swarm was measured.

    Of n peers: `albert_speedup_n`, `albert_over_all_reduce_n`, `albert_over_parameter_server_n`: how many times as long
    one machine, or the baseline, takes to the loss that one machine has after its steps. `albert_samples_per_s_n`, and
    `albert_computed_share_n`, that rate over the rate of all peers that compute without a pause. `albert_gap_n`: the
    largest difference of the losses of swarm and one machine after equal steps; of the smallest swarm, with several
    seeds, `albert_same_loss` is its mean, with the ends of its 95 % interval.
    """
    curves, swarms = _with_baselines(run)
    if not swarms:
        return {}
    first_seed = min(swarm["seed"] for swarm in swarms)
    smallest = min(swarm["peers"] for swarm in swarms)
    figures: dict[str, float] = {}
    for swarm in swarms:
        if swarm["seed"] == first_seed:
            figures |= _figures_of(swarm, curves)
    gaps = [
        curves[TOGETHER, smallest, each["seed"]].largest_gap(curves[ONE, 1, each["seed"]])
        for each in swarms
        if each["peers"] == smallest
    ]
    interval = t_interval(gaps)
    figures["albert_same_loss"] = interval.mean
    if interval.ends is not None:
        figures["albert_same_loss_min"], figures["albert_same_loss_max"] = interval.ends
    figures["albert_same_samples"] = max(each.get("same_samples", 0.0) for each in swarms)
    figures["albert_chains_apart"] = sum(each["chains_apart"] for each in swarms)
    return figures


def _figures_of(swarm: Mapping[str, Any], curves: Mapping[tuple[str, int, int], Curve]) -> dict[str, float]:
    peers, seed = swarm["peers"], swarm["seed"]
    together, alone = curves[TOGETHER, peers, seed], curves[ONE, 1, seed]
    loss = alone.loss_after(swarm["steps"])
    took_s = together.seconds_to(loss)
    others = {"all_reduce": curves[ALL_REDUCE, peers, seed], "parameter_server": curves[SERVER, peers, seed]}
    found = {
        "speedup": alone.seconds_to(loss) / took_s,
        **{f"over_{name}": curve.seconds_to(loss) / took_s for name, curve in others.items()},
        "samples_per_s": together.samples_per_s,
        "computed_share": together.samples_per_s / swarm["computed_per_s"],
        "gap": together.largest_gap(alone),
        "goodput": swarm["goodput"],
        "failures": swarm["failures"],
    }
    return {f"albert_{name}_{peers}": value for name, value in found.items()}


def draw_albert(run: Run[CollaborativeSettings], over_time: Axes, over_peers: Axes) -> None:
    """Loss over virtual time, and samples a second over the number of peers."""
    curves, swarms = _with_baselines(run)
    seed = min(swarm["seed"] for swarm in swarms)
    of_seed = sorted((swarm for swarm in swarms if swarm["seed"] == seed), key=lambda each: int(each["peers"]))
    dress(over_time, "ALBERT's loss on held-out text, nats", "virtual seconds")
    dress(over_peers, "Samples a second", "peers")
    alone = curves[ONE, 1, seed]
    over_time.plot(*_line(alone), color=GREY, label=ONE)
    dashes = {TOGETHER: "-", ALL_REDUCE: "--", SERVER: ":"}
    for place, swarm in enumerate(of_seed):
        colour, _ = series_style(place)
        for name, dash in dashes.items():
            curve = curves[name, swarm["peers"], seed]
            over_time.plot(*_line(curve), dash, color=colour, label=f"{swarm['peers']} peers, {name}")
    over_time.set_xscale("log")
    over_time.legend(frameon=False, fontsize=7)
    peers = [swarm["peers"] for swarm in of_seed]
    over_peers.plot(
        peers, [swarm["computed_per_s"] for swarm in of_seed], color=GREY, label="computing without a pause"
    )
    for place, (name, dash) in enumerate(dashes.items()):
        rates = [curves[name, each, seed].samples_per_s for each in peers]
        over_peers.plot(peers, rates, dash, marker="o", color=series_style(place)[0], label=name)
    over_peers.axhline(alone.samples_per_s, color=GREY, linewidth=0.8, linestyle=":")
    over_peers.set_xscale("log")
    over_peers.set_yscale("log")
    over_peers.set_xticks(peers, [str(each) for each in peers])
    over_peers.minorticks_off()
    over_peers.legend(frameon=False, fontsize=8)


def _line(curve: Curve) -> tuple[list[float], list[float]]:
    return [each.virtual_s for each in curve.points], [each.loss for each in curve.points]
