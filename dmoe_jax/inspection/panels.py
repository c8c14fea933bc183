"""From a reading to figures: what each layer's experts are chosen for."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dmoe_jax.data.vocabulary import Vocabulary
from dmoe_jax.inspection.reading import Reading
from dmoe_jax.inspection.statistics import Lift, lift, one_hot
from dmoe_jax.inspection.word_classes import bands, kinds, places_in_article, present

_FIRST, _BEFORE = "first word", "the word before"
_TITLES = {False: ("words of the segment", _FIRST), True: ("the word itself", _BEFORE)}
"""What has classes of words, where segments are routed and where single words are."""

_MAX_NAMED = 6
"""Number of a panel's cells that the figures name."""


class Panel(NamedTuple):
    """Experts by the classes of something.

    Attributes:
      title: the thing that has the classes.
      names: of the classes.
      lift: of each expert and class.
      breaks: columns before which another partition begins.
    """

    title: str
    names: tuple[str, ...]
    lift: Lift
    breaks: tuple[int, ...] = ()

    def strongest(self, places: Sequence[str]) -> list[dict[str, Any]]:
        """The cells that are furthest from a lift of 1, of those that are told apart from it; `places` are the names
        of the experts."""
        value, error, is_apart = self.lift
        cells = [(int(expert), int(number)) for expert, number in np.argwhere(is_apart)]
        cells = sorted(cells, key=lambda cell: -abs(np.log2(max(float(value[cell]), 2.0**-10))))[:_MAX_NAMED]
        return [
            {
                "expert": places[cell[0]],
                "class": self.names[cell[1]],
                "lift": float(value[cell]),
                "error": float(error[cell]),
            }
            for cell in cells
        ]


def panels(
    reading: Reading, layer: int, *, num_experts: int, vocabulary: Vocabulary, article_starts: np.ndarray
) -> list[Panel]:
    """What the experts of a layer are chosen for; no place in the article in a text without `article_starts`."""
    members = np.asarray(one_hot(reading.chosen[layer], num_experts).any(axis=2))
    partitions = [
        present(each._replace(of=np.where(reading.words >= 0, each.of[reading.words], -1)))
        for each in (kinds(vocabulary), bands(len(vocabulary)))
    ]
    names = tuple(name for each in partitions for name in each.names)
    found = []
    for title in _TITLES[reading.routes_words]:
        lifts = [lift(members, one_hot(_part(title, each.of), len(each.names)).sum(axis=2)) for each in partitions]
        joined = Lift(*(np.concatenate(parts, axis=1) for parts in zip(*lifts, strict=True)))
        found.append(Panel(title, names, joined, breaks=(len(partitions[0].names),)))
    begins = np.where(reading.words[..., 0] >= 0, reading.places, -1)
    places = present(places_in_article(begins, article_starts, reading.seq_len))
    if places.names:
        found.append(Panel("place in the article", places.names, lift(members, one_hot(places.of, len(places.names)))))
    return found


def _part(title: str, of: np.ndarray) -> np.ndarray:
    if title == _FIRST:
        return of[..., :1]
    if title == _BEFORE:
        return np.concatenate([np.full_like(of[:, :1], -1), of[:, :-1]], axis=1)
    return of
