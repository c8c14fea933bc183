"""Use of a run's experts: a record for each layer and window of steps, the last of them for the headline.

The coefficient of variation grows with single overloaded experts, up to sqrt(experts - 1) when one does everything. The
entropy, divided by that of a perfectly even load, tells how many experts share the work: 1 for all of them alike,
log(m) / log(n) for m of n, 0 for one alone.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dmoe_jax.arrays import PyTree
from dmoe_jax.routing.balancing import bias_range
from dmoe_jax.training.engine import Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Use of one layer's experts over some samples: the fields of a "balance" record."""

    histogram: tuple[int, ...]
    """Samples sent to each expert, in the order of the layer's uids."""
    cv: float | None
    """Standard deviation / mean of the load, over all experts; None without a sample."""
    entropy: float | None
    """Entropy of the load as a distribution over experts, divided by log(experts); None without a sample."""
    dead: int
    """Experts without any sample."""
    share_lost: float | None
    """Failed calls / all calls, of all layers; None without a call, as in a local mixture."""


def balance(uids: Sequence[str], totals: Totals, before: Totals) -> Balance:
    """The balance of one layer's experts since `before`, `Totals()` for the beginning of the run."""
    window = tuple(totals.load.get(uid, 0) - before.load.get(uid, 0) for uid in uids)
    ok, failed = totals.calls_ok - before.calls_ok, totals.calls_failed - before.calls_failed
    histogram = np.array(window, dtype=np.float64)
    is_used = bool(histogram.any())
    return Balance(
        histogram=window,
        cv=float(histogram.std() / histogram.mean()) if is_used else None,
        entropy=_normalised_entropy(histogram) if is_used else None,
        dead=window.count(0),
        share_lost=failed / (ok + failed) if ok + failed else None,
    )


def mean_balance(layers: Iterable[Balance]) -> dict[str, Any]:
    """The layers in one, for a headline: mean cv and entropy, dead experts of all, mean share of lost calls."""

    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    layers = list(layers)
    return {
        "load_cv": mean(layer.cv for layer in layers),
        "load_entropy": mean(layer.entropy for layer in layers),
        "dead_experts": sum(layer.dead for layer in layers),
        "share_lost": mean(layer.share_lost for layer in layers),
    }


def trunk_bias_range(state: PyTree) -> float | None:
    """`bias_range` of the trunk in an engine's state; its optimiser's may have been given away to the next update."""
    names = ("params", "trunk")
    values = [state.get(name) if isinstance(state, Mapping) else getattr(state, name, None) for name in names]
    return bias_range(values)


class BalanceLog:
    """Writes "experts" records of the cumulative load, and "balance" records over the samples since the last ones."""

    def __init__(self, write: Callable[..., None], layers: Mapping[str, tuple[str, ...]], totals: Totals) -> None:
        self._write = write
        self._layers = layers
        self._before = totals
        self._last: list[Balance] = []

    def log_load(self, totals: Totals) -> None:
        """Write the load of all experts since the run began, and their nodes; nothing for a dense model."""
        if self._layers:
            self._write("experts", load=totals.load, peer=totals.peers)

    def log(self, totals: Totals) -> None:
        """Write the load, and the balance of each layer; nothing if no sample was sent since the last time."""
        if totals.load == self._before.load:
            return
        self.log_load(totals)
        self._last = [balance(uids, totals, self._before) for uids in self._layers.values()]
        for layer, found in zip(self._layers, self._last, strict=True):
            self._write("balance", layer=layer, **asdict(found))
        self._before = totals

    def headline(self, totals: Totals, state: PyTree) -> dict[str, Any]:
        """`mean_balance` of the last window, where a collapse shows, and the `bias_range` of balanced routers."""
        if not self._layers:
            return {}
        found = mean_balance(self._last or [balance(uids, totals, Totals()) for uids in self._layers.values()])
        largest = trunk_bias_range(state)
        return found if largest is None else {**found, "bias_range": largest}


def _normalised_entropy(histogram: np.ndarray) -> float:
    if histogram.size == 1:
        return 1.0  # a single expert shares everything evenly with nobody
    shares = histogram[histogram > 0] / histogram.sum()
    entropy = -(shares * np.log(shares)).sum() / math.log(histogram.size)
    return min(1.0, float(entropy)) + 0.0  # rounding must not pass 1, nor a lone expert have -0.0
