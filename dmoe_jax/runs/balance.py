"""How evenly a layer's experts were used between two readings of the cumulative load.

Two figures for the same thing, because each is blind to something. The coefficient of variation grows with single
overloaded experts, up to sqrt(experts - 1) when one does everything; the entropy, divided by that of a perfectly even
load, tells how many experts share the work: 1 for all of them alike, log(m) / log(n) for m of n, 0 for one alone.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How one layer's experts were used over some samples: the fields of a "balance" record.

    Attributes:
      histogram: samples sent to each expert, in the order of the layer's uids.
      cv: coefficient of variation, standard deviation / mean, over all experts; None without a sample.
      entropy: of the load as a distribution over experts, divided by log(experts); None without a sample.
      dead: experts without any sample.
      share_lost: failed calls / all calls; None without a call, as in a local mixture.
    """

    histogram: tuple[int, ...]
    cv: float | None
    entropy: float | None
    dead: int
    share_lost: float | None


def balance(
    load: Mapping[str, int],
    uids: Sequence[str],
    *,
    before: Mapping[str, int] | None = None,
    ok: int = 0,
    failed: int = 0,
) -> Balance:
    """The balance of one layer.

    Args:
      load: cumulative samples of each expert; who was never called may be missing.
      uids: every expert of the layer. Others in `load` do not count here.
      before: `load` where the window begins; None for the beginning of the run.
      ok: calls that were answered in the window, of this layer or of all, as the caller counts them.
      failed: calls that were not.

    Raises:
      ValueError: there is no uid, or a count is negative or fell since `before`.
    """
    if not uids:
        raise ValueError("expected the uids of a layer's experts, got none")
    if ok < 0 or failed < 0:
        raise ValueError(f"expected counts of calls of at least 0, got ok={ok}, failed={failed}")
    window = {uid: int(load.get(uid, 0)) - int((before or {}).get(uid, 0)) for uid in uids}
    for uid, samples in window.items():
        if samples < 0:
            raise ValueError(f"expected a cumulative load that does not fall, that of {uid} fell by {-samples}")
    histogram = np.array(list(window.values()), dtype=np.float64)
    return Balance(
        histogram=tuple(window.values()),
        cv=_cv(histogram),
        entropy=_normalised_entropy(histogram),
        dead=int((histogram == 0).sum()),
        share_lost=failed / (ok + failed) if ok + failed else None,
    )


def layer_balances(
    load: Mapping[str, int],
    layers: Mapping[str, Sequence[str]],
    *,
    before: Mapping[str, int] | None = None,
    ok: int = 0,
    failed: int = 0,
) -> dict[str, Balance]:
    """The balance of each layer of a model.

    Args:
      load, before, ok, failed: see `balance`; the calls are those of all layers, so every layer has their share.
      layers: layer -> uids of its experts.

    Raises:
      ValueError: as `balance`, or the load names an expert that the model does not have.
    """
    strangers = load.keys() - {uid for uids in layers.values() for uid in uids}
    if strangers:
        raise ValueError(f"the layers {', '.join(layers)} have no expert {min(strangers)!r}")
    return {layer: balance(load, uids, before=before, ok=ok, failed=failed) for layer, uids in layers.items()}


def mean_balance(balances: Iterable[Balance]) -> dict[str, Any]:
    """The layers in one: mean cv and entropy, dead experts of all, mean share of lost calls; for a headline."""
    layers = list(balances)
    return {
        "load_cv": _mean(layer.cv for layer in layers),
        "load_entropy": _mean(layer.entropy for layer in layers),
        "dead_experts": sum(layer.dead for layer in layers),
        "share_lost": _mean(layer.share_lost for layer in layers),
    }


def _cv(histogram: np.ndarray) -> float | None:
    return float(histogram.std() / histogram.mean()) if histogram.sum() else None


def _normalised_entropy(histogram: np.ndarray) -> float | None:
    if not histogram.sum():
        return None
    if histogram.size == 1:
        return 1.0  # a single expert shares everything evenly with nobody
    shares = histogram[histogram > 0] / histogram.sum()
    entropy = -(shares * np.log(shares)).sum() / math.log(histogram.size)
    return min(1.0, float(entropy)) + 0.0  # rounding must not pass 1, nor a lone expert have -0.0


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
