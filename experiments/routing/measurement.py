"""A swarm one of whose nodes becomes ten times slower for a while, in virtual time.

The code is that of a real swarm: nodes that publish their load, trainers that time their calls. Only the network and
the devices are simulated. Counted is the share of the calls that goes to the slow node's experts.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from dmoe_jax import CallStatistics, Router, product_key
from dmoe_jax.machine.device import CostModel, InlineDevice
from dmoe_jax.routing import balanced
from dmoe_jax.runs.style import GREY, KILLED, TRAIN, VALID, dress
from dmoe_jax.trainer import StepRecord
from dmoe_net.transport.sim import run as run_in_virtual_time
from experiments.bench import Experiment, Run
from experiments.emulation.problems import mnist
from experiments.emulation.swarm import Scenery, train_in_scenery
from experiments.results import Bar, Result, finals_of
from experiments.routing.settings import BALANCED, PLAIN, RoutingSettings

BARS = (Bar(name="slow_share", bound=0.5), Bar(name="recovered_share", bound=0.75, comparison=">="))
"""The slow node's calls over those of the mean of the others: in the last quarter of the first hundred updates after it
became slow, and in the last hundred of the run."""

SLOW = "node1"
"""The host that becomes slow; of each layer it serves the experts 1, 1 + nodes, and so on."""
SLOWDOWN = 10.0
"""Factor by which its work takes longer then."""
NUM_NODES = 8

_SECONDS = 0.02
"""Virtual seconds that a batch costs a node's device, and that every message takes."""
_GRID = (4, 4)

Shares = Mapping[str, np.ndarray]
"""Router -> [seeds, windows]."""


class Scene(NamedTuple):
    """One run.

    Attributes:
      num_updates: of the trunk. slow_from, slow_until: the updates between which one node is slow.
      num_trainers: trainers of batch 4, each a process of its own but for the trunk.
      window: updates in each of which calls are counted.
    """

    num_updates: int = 600
    slow_from: int = 200
    slow_until: int = 400
    num_trainers: int = 8
    window: int = 25


SCENE = Scene()


def slow_node_shares(router: Router, scene: Scene, *, seed: int) -> np.ndarray:
    """The slow node's rows of every window over the mean of the other nodes' rows, [windows]."""
    problem = mnist(d_model=16, grid_size=_GRID, num_layers=2, router=router, num_evaluated=16)
    emulator = problem.emulator(scene.num_trainers)
    step, totals = 0, [np.zeros(NUM_NODES)]

    def device(host: str) -> InlineDevice:
        ordinary, slow = (CostModel(call_s=_SECONDS, slowdown=factor) for factor in (1.0, SLOWDOWN))

        def cost(name: str, batch: int) -> float:
            is_slow = host == SLOW and scene.slow_from <= step < scene.slow_until
            return (slow if is_slow else ordinary)(name, batch)

        return InlineDevice(cost)

    def note(record: StepRecord, counted: Sequence[CallStatistics]) -> None:
        nonlocal step
        step = record.step
        if step % scene.window == 0:
            rows = np.zeros(NUM_NODES)
            for uid, load in (asked for statistics in counted for asked in statistics.asked.items()):
                _, row, column = uid.split(".")
                rows[(_GRID[1] * int(row) + int(column)) % NUM_NODES] += load
            totals.append(rows)

    scenery = Scenery(delay_s=_SECONDS, nodes={"num_nodes": NUM_NODES, "device": device})
    train = partial(train_in_scenery, num_updates=scene.num_updates, seed=seed, note=note)
    run_in_virtual_time(train, problem, emulator, scenery, seed=seed)
    grown = np.diff(totals, axis=0)
    slow = int(SLOW.removeprefix("node"))
    return grown[:, slow] / np.delete(grown, slow, axis=1).mean(axis=1)


def measure(run: Run[RoutingSettings]) -> None:
    """Train the swarm with each router and seed; a resumed run does what is missing."""
    settings = run.settings
    routers = {PLAIN: product_key(_GRID), BALANCED: balanced(product_key(_GRID))}
    done = {(record["router"], record["seed"]) for record in run.records("slow_node")}
    for seed in range(settings.seed, settings.seed + (1 if settings.quick else settings.seeds)):
        for name, router in routers.items():
            if (name, seed) not in done:
                run.say(f"{name}, seed {seed}: {SCENE.num_updates} updates, one node slow from {SCENE.slow_from} on")
                shares = slow_node_shares(router, SCENE, seed=seed)
                run.log("slow_node", router=name, seed=seed, shares=shares.tolist())


def _measured(run: Run[RoutingSettings]) -> Shares:
    """Return the shares that have been measured so far; none before the balanced router has any."""
    found: dict[str, list[list[float]]] = {}
    for record in run.records("slow_node"):
        found.setdefault(record["router"], []).append(record["shares"])
    return {name: np.array(shares) for name, shares in found.items()} if BALANCED in found else {}


def _part_shares(shares: np.ndarray) -> dict[str, np.ndarray]:
    """The mean shares, [...], before the node is slow, while it is, and after, of shares [..., windows]."""
    window = SCENE.window
    parts = {
        "before_share": slice(SCENE.slow_from // window // 2, SCENE.slow_from // window),
        "slow_share": slice((SCENE.slow_from + 75) // window, (SCENE.slow_from + 100) // window),
        "recovered_share": slice((SCENE.num_updates - 100) // window, SCENE.num_updates // window),
    }
    return {name: shares[..., windows].mean(axis=-1) for name, windows in parts.items()}


def draw(run: Run[RoutingSettings], _: Result) -> Figure:
    """Draw the slow node's share over the updates, a line for each seed."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(SCENE.slow_from, SCENE.slow_until, color=KILLED, alpha=0.1, linewidth=0)
    axes.axhline(1.0, color=GREY, linewidth=0.8)
    for (name, shares), colour in zip(sorted(_measured(run).items()), (TRAIN, VALID), strict=False):
        ends = SCENE.window * (1 + np.arange(shares.shape[1]))
        for number, line in enumerate(shares):
            axes.plot(ends, line, color=colour, linewidth=1.3, label=None if number else name)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("calls, over the mean of the other nodes", fontsize=9, color=GREY)
    axes.legend(frameon=False, fontsize=8)
    dress(axes, f"Calls to a node {SLOWDOWN:g} times slower in the shaded part", "updates of the trunk")
    return figure


def summarise(run: Run[RoutingSettings]) -> Result | None:
    """Return the shares of the balanced router, under their bare names, and of the plain one; None before any."""
    if not (found := _measured(run)):
        return None
    figures: dict[str, Any] = {"seeds": len(found[BALANCED])}
    for name, shares in found.items():
        suffix = "" if name == BALANCED else f"_{name}"
        for part, means in _part_shares(shares).items():
            key = f"{part}{suffix}"
            figures |= {key: float(means.mean()), f"{key}_min": means.min(), f"{key}_max": means.max()}
    runs = ({**record, **_part_shares(np.array(record["shares"]))} for record in run.records("slow_node"))
    return Result(
        title="What balance does",
        summary=f"Calls to a node that is {SLOWDOWN:g} times slower from update {SCENE.slow_from} to "
        f"{SCENE.slow_until}, over those of the mean of the others.",
        figures=figures,
        runs=finals_of(runs, "router"),
        bars=BARS,
    )


EXPERIMENT = Experiment[RoutingSettings](
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Calls to the slow node over the mean of the others, over the updates",
)
