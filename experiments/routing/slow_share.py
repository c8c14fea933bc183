"""The slow node's share of the calls, window by window, with product keys as they are and balanced."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from dmoe_jax.routing import Router, balanced, product_key
from dmoe_jax.runs.style import GREY, KILLED, TRAIN, VALID, dress
from experiments.bench import Run
from experiments.results import Bar
from experiments.routing.settings import RoutingSettings
from experiments.routing.slow_node import Scene, slow_node_shares

BARS = (Bar(name="slow_share", bound=0.5), Bar(name="recovered_share", bound=0.75, comparison=">="))
"""The slow node's calls over those of the mean of the others: in the last quarter of the first hundred updates after it
became slow, and in the last hundred of the run."""

Shares = Mapping[str, np.ndarray]
"""Router -> [seeds, windows]."""


def scene_of(settings: RoutingSettings) -> Scene:
    """The scene that the settings ask for."""
    return Scene(slowdown=settings.slowdown, num_trainers=settings.trainers)


def measure_slow_node(run: Run[RoutingSettings]) -> None:
    """Train the swarm with each router and seed; a resumed run does what is missing."""
    settings, scene = run.settings, scene_of(run.settings)
    routers: dict[str, Router] = {
        "product_key": product_key(scene.grid_size),
        "balanced": balanced(product_key(scene.grid_size), settings.speed),
    }
    done = {(record["router"], record["seed"]) for record in run.records("slow_node")}
    for seed in settings.slow_node_seeds:
        for name, router in routers.items():
            if (name, seed) in done:
                continue
            run.say(f"{name}, seed {seed}: {scene.num_updates} updates, one node slow from {scene.slow_from} on")
            shares = slow_node_shares(router, scene, seed=seed)
            run.log("slow_node", router=name, seed=seed, shares=shares.tolist())


def slow_shares(run: Run[RoutingSettings]) -> Shares:
    """Return the shares that have been measured so far."""
    found: dict[str, list[list[float]]] = {}
    for record in run.records("slow_node"):
        found.setdefault(record["router"], []).append(record["shares"])
    return {name: np.array(shares) for name, shares in found.items()}


def slow_figures(found: Shares, scene: Scene) -> dict[str, Any]:
    """The shares before the node is slow, while it is, and after, of the balanced router under their bare names."""
    window = scene.window
    parts = {
        "before": slice(scene.slow_from // window // 2, scene.slow_from // window),
        "slow": slice((scene.slow_from + 75) // window, (scene.slow_from + 100) // window),
        "recovered": slice((scene.num_updates - 100) // window, scene.num_updates // window),
    }
    figures: dict[str, float] = {}
    for name, shares in found.items():
        suffix = "" if name == "balanced" else f"_{name}"
        for part, windows in parts.items():
            means = shares[:, windows].mean(axis=1)
            figures[f"{part}_share{suffix}"] = float(means.mean())
            figures[f"{part}_share{suffix}_min"], figures[f"{part}_share{suffix}_max"] = means.min(), means.max()
    return {"seeds": len(found["balanced"]), **figures}


def draw_slow_node(axes: Axes, found: Shares, scene: Scene) -> None:
    """Draw the share over the updates, a line for each seed."""
    axes.axvspan(scene.slow_from, scene.slow_until, color=KILLED, alpha=0.1, linewidth=0)
    axes.axhline(1.0, color=GREY, linewidth=0.8)
    for (name, shares), colour in zip(sorted(found.items()), (TRAIN, VALID), strict=False):
        ends = scene.window * (1 + np.arange(shares.shape[1]))
        for number, line in enumerate(shares):
            axes.plot(ends, line, color=colour, linewidth=1.3, label=None if number else name)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("calls, over the mean of the other nodes", fontsize=9, color=GREY)
    axes.legend(frameon=False, fontsize=8)
    dress(axes, f"Calls to a node {scene.slowdown:g} times slower in the shaded part", "updates of the trunk")
