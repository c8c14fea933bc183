"""From a reading to figures: what each layer's experts are chosen for, how layers agree, how alike experts are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dmoe_jax.data.vocabulary import Vocabulary
from dmoe_jax.inspection.reading import Reading
from dmoe_jax.inspection.saved_model import SavedModel
from dmoe_jax.inspection.statistics import Lift, centred_cosine, lift, one_hot, spread, told
from dmoe_jax.inspection.word_classes import Classes, bands, kinds, places_in_article, present
from dmoe_jax.runs.style import natural_order

_FIRST, _BEFORE = "first word", "the word before"
_TITLES = {False: ("words of the segment", _FIRST), True: ("the word itself", _BEFORE)}
"""What has classes of words, where segments are routed and where single words are."""

_MAX_NAMED = 6
"""Of a panel's cells that the figures name."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Panel:
    """Experts by the classes of something.

    Attributes:
      title: what has the classes.
      names: of the classes.
      lift: of each expert and class.
      breaks: before which columns another partition begins.
    """

    title: str
    names: tuple[str, ...]
    lift: Lift
    breaks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Likeness:
    """How alike the experts of a layer are in something.

    Attributes:
      title: in what.
      cosine: [n, n], of the n experts that are at hand, after their mean is subtracted.
      experts: which these are, by number.
      spread: how far they are from their mean, relative to it.
    """

    title: str
    cosine: np.ndarray
    experts: np.ndarray
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerLoad:
    """The load of a layer in each window of the training.

    Attributes:
      layer: its name.
      edges: [windows + 1], trunk updates where windows begin and end.
      shares: [windows, E], of the layer's samples.
    """

    layer: str
    edges: np.ndarray
    shares: np.ndarray


def call_shares(chosen: np.ndarray, num_experts: int) -> np.ndarray:
    """Each expert's share of the calls, [E]."""
    counts = np.bincount(chosen[chosen >= 0], minlength=num_experts)
    return counts / max(1, counts.sum())


def panels(
    reading: Reading, layer: int, *, num_experts: int, vocabulary: Vocabulary, article_starts: np.ndarray
) -> list[Panel]:
    """What the experts of a layer are chosen for.

    Args:
      article_starts: where in the text articles begin; without any there is no panel of the place in the article.
    """
    members = _members(reading, layer, num_experts)
    partitions = [
        present(Classes(each.names, np.where(reading.words >= 0, each.of[reading.words], -1)))
        for each in (kinds(vocabulary), bands(len(vocabulary)))
    ]
    names = tuple(name for each in partitions for name in each.names)
    found = []
    for title in _TITLES[reading.routes_words]:
        labels = [_part(title, each.of) for each in partitions]
        sizes = [len(each.names) for each in partitions]
        lifts = [lift(members, one_hot(of, size).sum(axis=2)) for of, size in zip(labels, sizes, strict=True)]
        found.append(Panel(title=title, names=names, lift=_joined(lifts), breaks=(len(partitions[0].names),)))
    places = present(_places(reading, article_starts))
    if places.names:
        found_lift = lift(members, one_hot(places.of, len(places.names)))
        found.append(Panel(title="place in the article", names=places.names, lift=found_lift))
    return found


def _part(title: str, of: np.ndarray) -> np.ndarray:
    """The classes of those words that a panel is about, [blocks, samples, words]."""
    if title == _FIRST:
        return of[..., :1]
    if title == _BEFORE:
        return np.concatenate([np.full_like(of[:, :1], -1), of[:, :-1]], axis=1)
    return of


def _joined(lifts: Sequence[Lift]) -> Lift:
    return Lift(*(np.concatenate(parts, axis=1) for parts in zip(*lifts, strict=True)))


def _places(reading: Reading, article_starts: np.ndarray) -> Classes:
    places = np.where(reading.words[..., 0] >= 0, reading.places, -1)
    return places_in_article(places, article_starts, reading.seq_len)


def explained(reading: Reading, layer: int, *, vocabulary: Vocabulary, article_starts: np.ndarray) -> dict[str, float]:
    """What decides the expert of the highest weight: shares of its entropy, see `told`."""
    first_words = reading.words[..., 0]
    of_word = np.where(first_words >= 0, kinds(vocabulary).of[first_words], -1)
    name = "kind_of_word" if reading.routes_words else "kind_of_first_word"
    found = {name: told(reading.first[layer], of_word)}
    if article_starts.size:
        found["place_in_article"] = told(reading.first[layer], _places(reading, article_starts).of)
    return found


def agreement(reading: Reading) -> np.ndarray:
    """[layers, layers]: which share of layer i's uncertainty about its first expert is gone once layer j's is known."""
    return np.array([[told(left, right) for right in reading.first] for left in reading.first])


def pairs_of_layers(reading: Reading, left: int, right: int, num_experts: int) -> Lift:
    """How much more often an expert of one layer and one of another have the same sample than by chance."""
    return lift(_members(reading, left, num_experts), _members(reading, right, num_experts))


def _members(reading: Reading, layer: int, num_experts: int) -> np.ndarray:
    """Whether each sample was sent to each expert of a layer, [blocks, samples, E]."""
    return np.asarray(one_hot(reading.chosen[layer], num_experts).any(axis=2))


def likeness(title: str, vectors: np.ndarray) -> Likeness | None:
    """How alike the rows are that hold numbers; None if these are fewer than two."""
    experts = np.flatnonzero(np.isfinite(vectors).all(axis=1))
    if experts.size < 2:
        return None
    own = vectors[experts].astype(np.float64)
    return Likeness(title=title, cosine=centred_cosine(own), experts=experts, spread=spread(own))


def parameters(model: SavedModel, layer: int) -> np.ndarray:
    """[E, n], all parameters of each expert of a layer in one row; NaN for experts that were not saved."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(model.experts[layer])]
    rows = np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)
    return np.where(model.known[layer].reshape(-1, 1), rows, np.nan)


def load_over_training(metrics: Sequence[Mapping[str, Any]]) -> list[LayerLoad]:
    """The "balance" records of a run, one entry a layer; windows without any sample are left out."""
    table: dict[str, dict[float, list[int]]] = {}
    for record in metrics:
        if record["kind"] == "balance" and sum(record.get("histogram") or ()):
            table.setdefault(str(record["layer"]), {})[record["step"]] = record["histogram"]
    found = []
    for layer in sorted(table, key=natural_order):
        steps = sorted(table[layer])
        counts = np.array([table[layer][step] for step in steps], np.float64)
        shares = counts / counts.sum(axis=1, keepdims=True)
        found.append(LayerLoad(layer=layer, edges=np.array([0, *steps], np.float64), shares=shares))
    return found


def strongest(panel: Panel, places: Sequence[str]) -> list[dict[str, Any]]:
    """The cells of a panel that are furthest from a lift of 1, of those that are told apart from it."""
    value, error, is_apart = panel.lift
    cells = sorted(np.argwhere(is_apart).tolist(), key=lambda cell: -abs(np.log2(max(value[tuple(cell)], 2.0**-10))))
    return [
        {
            "expert": places[expert],
            "class": panel.names[number],
            "lift": float(value[expert, number]),
            "error": float(error[expert, number]),
        }
        for expert, number in cells[:_MAX_NAMED]
    ]
