"""Plays the scenes, and says what they came to."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dmoe_jax.runs.report import ReportTable
from dmoe_jax.runs.style import FAINT, GREY, dress
from experiments.bench import Experiment, Run
from experiments.collaborative.albert_part import albert_figures, bars, draw_albert, measure_albert
from experiments.collaborative.processes import RealPeer, real_swarm
from experiments.collaborative.scenes import (
    Played,
    batch_figures,
    churn_figures,
    play_batches,
    play_churn,
    play_equal,
)
from experiments.collaborative.settings import CollaborativeSettings
from experiments.collaborative.shares import share_figures
from experiments.panels import series_style
from experiments.results import Bar, Result

BARS: Mapping[str, Sequence[Bar]] = {
    "equal": (
        Bar(name="equal_to_one_machine", bound=1e-5),
        Bar(name="next_step_s", bound=10),
    ),
    "batches": (
        Bar(name="batch_within_5_percent", bound=0.95, comparison=">="),
        Bar(name="most_idle", bound=0.1),
    ),
    "shares": (Bar(name="shares_over_optimum", bound=1.05),),
    "churn": (Bar(name="goodput", bound=0.9, comparison=">="), Bar(name="chains_apart", bound=0)),
    "real": (Bar(name="equal_over_tls", bound=1e-5), Bar(name="real_next_step_s", bound=10)),
}
"""Bars of each part but `albert`."""

_TARGETS = {"batches": 1024, "churn": 2048}

_REAL_PEERS = (
    *(RealPeer(name=f"trainer{n}", role="node", sample_s=each) for n, each in enumerate((0.01, 0.02, 0.04, 0.1))),
    RealPeer(name="client", role="client", sample_s=0.03),
    RealPeer(name="auxiliary", role="auxiliary"),
)
_REAL_TARGET = 1024
_REAL_TIMEOUT_S = 300.0


def measure(run: Run[CollaborativeSettings]) -> None:
    """Play the scenes that are asked for, one after the other."""
    settings = run.settings
    if "equal" in settings.parts:
        run.say("equal: five machines, one joins, one is killed while it averages")
        found, played = play_equal(steps=settings.steps, seed=settings.seed)
        log_steps(run, "equal", played)
        difference = float("nan") if found.unexplained or found.chains_apart else found.difference
        run.log("figures", part="equal", equal_to_one_machine=difference, next_step_s=max(played.recovered_s))
    if "batches" in settings.parts:
        run.say(f"batches: eight machines for {settings.virtual_s:.0f} s of virtual time")
        played = play_batches(virtual_s=settings.virtual_s, seed=settings.seed)
        log_steps(run, "batches", played)
        run.log("figures", part="batches", **batch_figures(played, _TARGETS["batches"]))
    if "shares" in settings.parts:
        run.log("figures", part="shares", **share_figures(seed=settings.seed))
    if "churn" in settings.parts:
        run.say(f"churn: a failure every {settings.failure_every_s:g} s among 16 machines")
        played = play_churn(virtual_s=settings.virtual_s, failure_every_s=settings.failure_every_s, seed=settings.seed)
        log_steps(run, "churn", played)
        run.log("figures", part="churn", **churn_figures(played))
    if "albert" in settings.parts:
        measure_albert(run)
    if "real" in settings.parts:
        run.log("figures", part="real", **measure_real(run))


def log_steps(run: Run[CollaborativeSettings], part: str, played: Played) -> None:
    """Every global step of a scene, and every failure."""
    for number, at, samples in played.steps():
        run.log("global_step", part=part, number=number, virtual_s=at, samples=samples)
    for life in played.lives:
        if life.ended is not None:
            run.log("failure", part=part, peer=life.name, virtual_s=life.ended)


def measure_real(run: Run[CollaborativeSettings]) -> dict[str, float]:
    """Processes over TLS, with a kill -9 of each kind at a quarter, a half and three quarters of the time."""
    took_s: list[float] = []
    with real_swarm(run.folder.path / "processes", target=_REAL_TARGET) as swarm:
        for peer in _REAL_PEERS:
            swarm.start(peer)
            run.say(f"started {peer.name}")
        swarm.wait_for_step(2, timeout_s=_REAL_TIMEOUT_S, say=run.say)
        began = time.monotonic()
        for part, name in enumerate(("trainer1", "client", "auxiliary"), 1):
            _let_pass(run, swarm, began + part / 4 * 60 * run.settings.real_minutes)
            step = swarm.step()
            swarm.kill(name)
            took_s.append(swarm.wait_for_step(step + 1, timeout_s=_REAL_TIMEOUT_S, say=run.say))
            run.say(f"killed {name} after step {step}; the next step came {took_s[-1]:.1f} s later")
            run.log("failure", part="real", peer=name, real_s=time.monotonic() - began)
            swarm.start(next(peer for peer in _REAL_PEERS if peer.name == name))
        _let_pass(run, swarm, began + 60 * run.settings.real_minutes)
        swarm.wait_for_step(swarm.step() + 2, timeout_s=_REAL_TIMEOUT_S, say=run.say)
        found, assisted, living = swarm.compare(), swarm.assisted(), [x for x in swarm.lives() if x.ended is None]
    for done in max((life.steps for life in living), key=len):
        run.log("global_step", part="real", number=done.number, samples=done.samples, peers=done.peers)
    return {
        "equal_over_tls": float("nan") if found.unexplained or found.chains_apart else found.difference,
        "real_next_step_s": max(took_s),
        "real_steps": found.steps,
        "real_steps_assisted": assisted,
    }


def _let_pass(run: Run[CollaborativeSettings], swarm: Any, until: float) -> None:
    while time.monotonic() < until:
        time.sleep(min(15.0, max(0.0, until - time.monotonic())))
        run.say(swarm.line())


def summarise(run: Run[CollaborativeSettings]) -> Result | None:
    """Return the figures and bars of the parts that were measured; None if there are none."""
    records = run.records("figures")
    by_part = {record["part"]: {k: v for k, v in record.items() if k not in ("kind", "part")} for record in records}
    if albert := albert_figures(run):
        by_part["albert"] = albert
    if not by_part:
        return None
    of_part = {**BARS, "albert": bars(run.settings.albert_sizes)}
    rows = [[part, name, value] for part, figures in by_part.items() for name, value in figures.items()]
    return Result(
        title="One large batch by machines that come and go",
        summary="Peers gather gradients until all together have the target; every peer makes the step of one machine.",
        figures={name: value for figures in by_part.values() for name, value in figures.items()},
        bars=[bar for part in by_part for bar in of_part[part]],
        tables=[ReportTable(title="All figures", head=("part", "figure", "value"), rows=rows)],
    )


def draw(run: Run[CollaborativeSettings], result: Result) -> Figure | None:
    """Steps over time with failures, and how near to its target each batch was; below, the curves of ALBERT."""
    del result
    steps = {part: [r for r in run.records("global_step") if r["part"] == part] for part in _TARGETS}
    steps = {part: records for part, records in steps.items() if records}
    has_albert = bool(run.records("albert_swarm"))
    rows = bool(steps) + has_albert
    if not rows:
        return None
    figure = Figure(figsize=(10, 3.4 * rows + 0.6 * has_albert), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False)
    if steps:
        _draw_steps(run, steps, *axes[0])
    if has_albert:
        draw_albert(run, *axes[-1])
    return figure


def _draw_steps(
    run: Run[CollaborativeSettings], steps: Mapping[str, list[dict[str, Any]]], over_time: Axes, over_steps: Axes
) -> None:
    dress(over_time, "Global steps", "virtual seconds; crosses are failures")
    dress(over_steps, "Samples of a step, over the target", "step")
    over_steps.axhspan(0.95, 1.05, color=FAINT)
    over_steps.axhline(1, color=GREY, linewidth=0.8)
    for place, (part, records) in enumerate(steps.items()):
        colour, _ = series_style(place)
        at, numbers = [r["virtual_s"] for r in records], [r["number"] for r in records]
        over_time.plot(at, numbers, color=colour, label=part)
        over_steps.plot(numbers[1:], [r["samples"] / _TARGETS[part] for r in records[1:]], color=colour, label=part)
        failures = [r["virtual_s"] for r in run.records("failure") if r["part"] == part]
        reached = [sum(each <= failed for each in at) for failed in failures]
        over_time.plot(failures, reached, "x", color=colour)
    for axes in (over_time, over_steps):
        axes.legend(frameon=False, fontsize=8)


EXPERIMENT = Experiment[CollaborativeSettings](
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Global steps over virtual time with failures marked, and the samples of each step over the target",
)
