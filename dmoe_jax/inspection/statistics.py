"""The figures behind the pictures: arrays in, arrays out.

A text is read in several places at once. These places are the *blocks*: neighbouring segments of one place are alike,
segments of two places are as good as independent. So errors come from leaving out one block at a time (the jackknife),
and what two variables share by chance from pairing each block of the one with another block of the other.

Axes: B blocks, S samples of a block, E (or F) experts of a layer, C classes, W windows of the training.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

APART_ERRORS = 3.0
"""Standard errors that a lift must be from 1 to be told apart from it: so few because a picture has a hundred cells."""

_LEAST_EXPECTED = 5.0
"""Samples that a cell would have by chance, at least, for its lift to have an error that can be relied upon."""

_LEAST_BLOCKS = 4
"""Blocks in which an expert and a class must occur for the same; with fewer there is no error to speak of."""

IDLE_SHARE = 0.1
"""An expert with less than this part of an even share is idle."""


class Lift(NamedTuple):
    """How much more often experts and classes meet than if they had nothing to do with each other.

    Attributes:
      value: [E, C], P(expert, class) / (P(expert) P(class)); NaN where one of them never occurs.
      error: its standard error: the jackknife's, or that of choices made by the toss of a coin if that is larger.
        Infinite where there would be fewer than five samples by chance.
      is_apart: where the lift is told apart from 1.
    """

    value: Float[np.ndarray, "experts classes"]
    error: Float[np.ndarray, "experts classes"]
    is_apart: Bool[np.ndarray, "experts classes"]


class Turnover(NamedTuple):
    """Which experts came into use and fell out of it between two windows.

    Attributes:
      in_use: [W, E], more than a tenth of an even share.
      born, died: [W, E], where this changed; false in the first window.
    """

    in_use: Bool[np.ndarray, "windows experts"]
    born: Bool[np.ndarray, "windows experts"]
    died: Bool[np.ndarray, "windows experts"]


def one_hot(labels: Int[np.ndarray, "*shape"], size: int) -> Bool[np.ndarray, "*shape size"]:
    """Each label as a row with one true place; -1 as a row without."""
    return np.asarray(labels[..., None] == np.arange(size))


def lift(members: Shaped[np.ndarray, "b s e"], classes: Shaped[np.ndarray, "b s c"]) -> Lift:
    """The lift of every expert and class, over samples that may have several of each.

    Args:
      members: how often, or whether, each sample was sent to each expert.
      classes: how often, or whether, each sample has each class; a sample without any does not count.
    """
    members, classes = members.astype(np.float64), classes.astype(np.float64)
    counts = np.einsum("bse,bsc->bec", members, classes)
    total, blocks = counts.sum(axis=0), len(counts)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = _lift(total)
        without = _lift(total - counts)
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


def _lift(counts: Float[np.ndarray, "... e c"]) -> Float[np.ndarray, "... e c"]:
    experts, classes = (counts.sum(axis=axis, keepdims=True) for axis in (-1, -2))
    lifted: np.ndarray = counts * counts.sum(axis=(-2, -1), keepdims=True) / (experts * classes)
    return lifted


def _error_by_chance(
    members: Float[np.ndarray, "b s e"], classes: Float[np.ndarray, "b s c"]
) -> Float[np.ndarray, "e c"]:
    """The standard error of a lift, to first order, if each sample chose each expert by the toss of a coin."""
    weights = classes.sum(axis=2)
    counted = weights > 0
    probability = members[counted].sum(axis=0) / max(1, counted.sum())
    of_class = classes.sum(axis=(0, 1))
    # A sample counts as far as its classes differ from those of all.
    surplus = classes - weights[..., None] * (of_class / of_class.sum())
    deviation = np.sqrt((surplus**2).sum(axis=(0, 1))) / of_class
    return np.asarray(np.sqrt((1 - probability) / probability)[:, None] * deviation)


def told(left: Int[np.ndarray, "b s"], right: Int[np.ndarray, "b s"]) -> float:
    """Which share of the uncertainty about `left` is gone once `right` is known, corrected for chance.

    (I - I_0) / (H(left) - I_0), with the mutual information I and its mean I_0 where the samples of one block are
    paired with those of another. So 0 means that they tell no more than a sample of another text would, 1 that
    `right` decides `left`.

    Args:
      left, right: labels from 0; samples that have -1 in one of them do not count.

    Returns: NaN if `left` is always the same, or there is one block only.
    """
    observed, entropy = _information(left, right)
    shifted = [_information(left, np.roll(right, shift, axis=0))[0] for shift in range(1, len(right))]
    if not shifted:
        return float("nan")
    by_chance = float(np.mean(shifted))
    room = entropy - by_chance
    return (observed - by_chance) / room if room > 1e-9 else float("nan")


def _information(left: Int[np.ndarray, "b s"], right: Int[np.ndarray, "b s"]) -> tuple[float, float]:
    """Mutual information and the entropy of `left`, nats."""
    counts = (left >= 0) & (right >= 0)
    rows, columns = left[counts], right[counts]
    if not rows.size:
        return 0.0, 0.0
    table = np.zeros((rows.max() + 1, columns.max() + 1))
    np.add.at(table, (rows, columns), 1.0)
    table /= table.sum()
    each, other = table.sum(axis=1), table.sum(axis=0)
    used = table > 0
    information = float((table[used] * np.log(table[used] / np.outer(each, other)[used])).sum())
    return information, float(-(each[each > 0] * np.log(each[each > 0])).sum())


def centred_cosine(vectors: Float[np.ndarray, "e n"]) -> Float[np.ndarray, "e e"]:
    """The cosine between any two rows after their mean row is subtracted: what they share is no likeness.

    For E unrelated rows it is about -1 / (E - 1). NaN for a row that is the mean itself.
    """
    centred = vectors - vectors.mean(axis=0)
    norms = np.linalg.norm(centred, axis=1)
    norms = np.where(norms > 1e-12 * max(1e-300, float(np.abs(vectors).max(initial=0))), norms, np.nan)
    cosine: np.ndarray = (centred @ centred.T) / np.outer(norms, norms)
    return cosine


def spread(vectors: Float[np.ndarray, "e n"]) -> float:
    """How far rows are from their mean, in root mean square, relative to the mean's length; infinite if that is 0."""
    mean = vectors.mean(axis=0)
    distance = float(np.sqrt(((vectors - mean) ** 2).sum(axis=1).mean()))
    length = float(np.linalg.norm(mean))
    return distance / length if length > 0 else float("inf") if distance > 0 else 0.0


def turnover(shares: Float[np.ndarray, "w e"]) -> Turnover:
    """Who came into use and who fell out of it, from each expert's share of its layer's load in each window."""
    in_use = shares > IDLE_SHARE / shares.shape[1]
    born, died = np.zeros_like(in_use), np.zeros_like(in_use)
    born[1:] = in_use[1:] & ~in_use[:-1]
    died[1:] = ~in_use[1:] & in_use[:-1]
    return Turnover(in_use, born, died)
