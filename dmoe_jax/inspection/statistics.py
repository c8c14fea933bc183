"""The figures behind the pictures: arrays in, arrays out.

A text is read in several places, the *blocks*: neighbouring segments of one block are alike, segments of two are as
good as independent. So errors come from leaving out one block at a time (the jackknife).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from dmoe_jax.runs.style import natural_order

APART_ERRORS = 3.0
"""Standard errors that a lift must be from 1 to be told apart from it."""

_LEAST_EXPECTED = 5.0
"""Samples that a cell would have by chance, at least, for its lift to have an error that can be relied upon."""

_LEAST_BLOCKS = 4
"""Blocks in which an expert and a class must occur, at least, for the same."""

_IDLE_SHARE = 0.1
"""Part of an even share below which an expert is idle."""


class Lift(NamedTuple):
    """Lift of experts and classes: how much more often they meet than if they had nothing to do with each other.

    Attributes:
      value: P(expert, class) / (P(expert) P(class)); NaN where one of them never occurs.
      error: its standard error: the jackknife's, or that of choices made by the toss of a coin if that is larger.
        Infinite where there would be fewer than five samples by chance.
      is_apart: true where the lift is told apart from 1.
    """

    value: Float[np.ndarray, "experts classes"]
    error: Float[np.ndarray, "experts classes"]
    is_apart: Bool[np.ndarray, "experts classes"]


def one_hot(labels: Int[np.ndarray, "*shape"], size: int) -> Bool[np.ndarray, "*shape size"]:
    """Each label as a row with one true place; -1 as a row without."""
    return np.asarray(labels[..., None] == np.arange(size))


def lift(members: Shaped[np.ndarray, "b s e"], classes: Shaped[np.ndarray, "b s c"]) -> Lift:
    """The lift of every expert and class, over samples that may have several of each: `members` counts a sample's calls
    of each expert, `classes` its words of each class; a sample without any class does not count."""
    members, classes = members.astype(np.float64), classes.astype(np.float64)
    counts = np.einsum("bse,bsc->bec", members, classes)
    total, blocks = counts.sum(axis=0), len(counts)
    with np.errstate(divide="ignore", invalid="ignore"):
        value, without = _lift(total), _lift(total - counts)
        error = np.sqrt((blocks - 1) / blocks * ((without - without.mean(axis=0)) ** 2).sum(axis=0))
        # Where an expert has all samples of a rare class, leaving out a block changes nothing.
        error = np.maximum(error, _error_by_chance(members, classes))
        is_apart = np.abs(value - 1) > APART_ERRORS * error
    seen_experts, seen_classes = (counts.sum(axis=axis) > 0 for axis in (2, 1))
    is_apart &= (seen_experts.sum(axis=0) >= _LEAST_BLOCKS)[:, None] & (seen_classes.sum(axis=0) >= _LEAST_BLOCKS)
    counted = (classes > 0).any(axis=2)
    expected = np.outer(members[counted].sum(axis=0), (classes > 0).sum(axis=(0, 1))) / max(1, counted.sum())
    is_known = expected >= _LEAST_EXPECTED
    return Lift(value, np.where(is_known, error, np.inf), is_apart & is_known)


def _lift(counts: np.ndarray) -> np.ndarray:
    experts, classes = (counts.sum(axis=axis, keepdims=True) for axis in (-1, -2))
    lifted: np.ndarray = counts * counts.sum(axis=(-2, -1), keepdims=True) / (experts * classes)
    return lifted


def _error_by_chance(members: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """The standard error of a lift, to first order, if each sample chose each expert by the toss of a coin."""
    weights = classes.sum(axis=2)
    counted = weights > 0
    probability = members[counted].sum(axis=0) / max(1, counted.sum())
    of_class = classes.sum(axis=(0, 1))
    # A sample counts as far as its classes differ from those of all.
    surplus = classes - weights[..., None] * (of_class / of_class.sum())
    deviation = np.sqrt((surplus**2).sum(axis=(0, 1))) / of_class
    return np.asarray(np.sqrt((1 - probability) / probability)[:, None] * deviation)


def load_over_training(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Float[np.ndarray, "w e"]]:
    """Each expert's share of its layer's load in each window of a run, by layer, from the records of kind "balance".
    Windows without any sample are left out, and of two records of a step the last counts."""
    table: dict[str, dict[float, Sequence[int]]] = {}
    for record in metrics:
        if record["kind"] == "balance" and sum(record.get("histogram") or ()):
            table.setdefault(str(record["layer"]), {})[record["step"]] = record["histogram"]
    counts = {
        layer: np.array([table[layer][step] for step in sorted(table[layer])], np.float64)
        for layer in sorted(table, key=natural_order)
    }
    return {layer: each / each.sum(axis=1, keepdims=True) for layer, each in counts.items()}


def turnover(shares: Float[np.ndarray, "w e"]) -> dict[str, int]:
    """Numbers of experts that came into use and fell idle between two windows, and that are in use in the last one."""
    in_use = shares > _IDLE_SHARE / shares.shape[1]
    return {
        "windows": len(in_use),
        "in_use_at_the_end": int(in_use[-1].sum()),
        "born": int((in_use[1:] & ~in_use[:-1]).sum()),
        "died": int((~in_use[1:] & in_use[:-1]).sum()),
    }
