"""The curves of the figure, as trials."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from experiments.emulation.trials import Trial
from experiments.mnist_convergence.settings import MnistSettings

NUM_POINTS = 10
REMEDIED = "remedies"
"""In a curve's name: its optimisers know of staleness, as is our default."""
FRESH = "fresh experts"
"""In a curve's name: all calls of a step are computed at its end, so that experts are never stale, as in the authors'
program."""
AUTHORS = f"frozen gate, {FRESH}"
"""In a curve's name: the authors' program."""
PLAIN = {"trunk_power": 0.0, "expert_power": 0.0, "yields": False}
"""The paper's optimisers do nothing about staleness."""

_GRIDS = {64: (4, 4), 256: (8, 8), 4096: (32, 32)}
"""Grid of each of the four layers, by the experts in all of them."""
_WIDTHS = {"laptop": 64, "paper": 512}
_UPDATES = {"laptop": 250, "paper": 20_480}


@dataclass(frozen=True, slots=True)
class Network:
    """A column of the figure: who is far away, and how far.

    Attributes:
      label: its name. batch_s: mean seconds of a batch. num_trainers: who bear it. failure_rate: share of lost calls.
    """

    label: str
    batch_s: float
    num_trainers: int
    failure_rate: float = 0.0


NETWORKS = (
    Network("100 ms", 0.1, 16),
    Network("1000 ms", 1.0, 64),
    Network("1000 ms, 10 % failures", 1.0, 64, 0.1),
)
"""As the paper's text has them: who waits ten times longer needs more trainers for as many batches a second."""


def label_of(experts: int | None, network: Network, variant: str = "") -> str:
    """The name of a curve; `experts` is None for the dense model, `variant` such as "frozen gate"."""
    model = "dense" if experts is None else f"{experts} experts"
    return f"{model}{variant and ', ' + variant}, {network.label}"


def memory_of(trial: Trial) -> float:
    """Bytes that a training of a mixture takes on a CPU, as measured: two thirds more than its experts' states."""
    if trial.problem != "mnist":
        return 0.0
    params_of_expert = 24 * trial.sizes["d_model"] ** 2
    return 1.65 * 4 * math.prod(trial.sizes["grid_size"]) * params_of_expert * 4 * 4


def all_trials(settings: MnistSettings) -> list[Trial]:
    """Return the trials that the settings ask for; the seeds of a curve stand together."""
    updates, seeds = settings.updates or _UPDATES[settings.size], settings.seeds
    width, evaluated = _WIDTHS[settings.size], 10_000 if settings.size == "paper" else 1000
    common: dict[str, Any] = {"seed": 0, "num_updates": updates, "num_points": NUM_POINTS}

    def trial(network: Network, label: str, **own: Any) -> Trial:
        return Trial(
            label=label,
            num_trainers=network.num_trainers,
            num_places=max(other.num_trainers for other in NETWORKS),
            delay_s=network.batch_s / 8,  # four layers, there and back
            failure_rate=network.failure_rate,
            **common,
            **own,
        )

    def dense(network: Network, variant: str = "", **own: Any) -> Trial:
        sizes = {"d_model": 2 * width, "num_evaluated": evaluated}
        return trial(network, label_of(None, network, variant), problem="mnist-dense", sizes=sizes, **own)

    def mixture(count: int, network: Network, variant: str = "", **own: Any) -> Trial:
        batch_size = 8 if count == 4096 and settings.size == "paper" else 4
        sizes = {"d_model": width, "grid_size": _GRIDS[count], "batch_size": batch_size, "num_evaluated": evaluated}
        return trial(network, label_of(count, network, variant), problem="mnist", sizes=sizes, **own)

    fast, slow, failing = NETWORKS
    fresh: dict[str, Any] = {"remedy": PLAIN, "fresh_experts": True}
    if settings.quick:
        curves = [dense(slow, remedy=PLAIN), mixture(256, slow, remedy=PLAIN)]
        curves += [mixture(256, network, AUTHORS, gate="frozen", **fresh) for network in (slow, failing)]
    else:
        curves = [dense(network, remedy=PLAIN) for network in (fast, slow)]
        for count in settings.experts:
            if settings.gate != "frozen":
                curves += [mixture(count, network, remedy=PLAIN) for network in NETWORKS]
            if settings.gate != "trained":
                curves += [mixture(count, network, AUTHORS, gate="frozen", **fresh) for network in NETWORKS]
    if settings.extras:
        curves.append(dense(slow, REMEDIED, remedy={}))
        if 256 in settings.experts:
            if settings.gate != "frozen":
                curves += [mixture(256, network, FRESH, **fresh) for network in (slow, failing)]
            curves += [mixture(256, network, REMEDIED, remedy={}) for network in (slow, failing)]
    return [
        dataclasses.replace(curve, seed=seed)
        for curve in curves
        for seed in range(settings.seed, settings.seed + seeds)
    ]
