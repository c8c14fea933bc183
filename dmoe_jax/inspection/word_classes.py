"""Classes of words that the vocabulary alone decides, and of places in the articles of a text."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from dmoe_jax.data.pieces import AnyVocabulary
from dmoe_jax.data.words import EOS, UNK

FREQUENT = 100
"""Number of most frequent words of which the lower-case ones are a kind of their own: articles, prepositions, ..."""

_HEADING = "="
"""WikiText sets one of it around an article's title, more around those of sections."""

_SPACES = "Ġ▁"
"""Signs of a space before a tokenizer's piece: of byte-level pairs, and of SentencePiece."""

_SIGNS = {EOS: "end of line", UNK: UNK, _HEADING: "heading sign ="}
_ENDINGS = {ending: f"word in -{ending}" for ending in ("ing", "ed", "ly", "s")}
_FREQUENT = f"frequent word (of {FREQUENT})"
_KINDS = (*_SIGNS.values(), "punctuation", "number", "Capitalised", _FREQUENT, *_ENDINGS.values(), "other word")
_PLACES = (1, 2, 4, 8, 16)
"""Last segments of the classes of places in an article."""


class Classes(NamedTuple):
    """A partition of words or of places: the names of the classes, and the number of each one's class, -1 for none."""

    names: tuple[str, ...]
    of: Int[np.ndarray, "..."]


def kinds(vocabulary: AnyVocabulary) -> Classes:
    """Kinds of words by their letters: punctuation, numbers, capitalised words, endings."""
    words = [word.lstrip(_SPACES) or word for word in vocabulary.words]
    found = [_KINDS.index(_kind(word, index)) for index, word in enumerate(words)]
    return Classes(_KINDS, np.array(found, np.int32))


def _kind(word: str, index: int) -> str:
    if word in _SIGNS:
        return _SIGNS[word]
    if not any(letter.isalnum() for letter in word):
        return "punctuation"
    if any(letter.isdigit() for letter in word):
        return "number"
    if word[0].isupper():
        return "Capitalised"
    if index < FREQUENT:
        return _FREQUENT
    ending = next((ending for ending in _ENDINGS if word.endswith(ending)), None)
    return "other word" if ending is None or len(word) < len(ending) + 3 else _ENDINGS[ending]


def places_in_article(places: Int[np.ndarray, "..."], starts: Int[np.ndarray, " articles"], seq_len: int) -> Classes:
    """Classes of segments of `seq_len` words by their number in their article; -1 before the first article. `places`
    are the beginnings of the segments in the text, and `starts` those of the articles."""
    before = np.searchsorted(starts, places, side="right") - 1
    distance = places - starts[np.maximum(before, 0)] if starts.size else np.zeros_like(places)
    lows = [1, *(last + 1 for last in _PLACES)]
    ends = [f"{low}" if low == last else f"{low}–{last}" for low, last in zip(lows, _PLACES, strict=False)]
    of = np.searchsorted(np.array(_PLACES), distance // seq_len + 1, side="left")
    names = tuple(f"segment {each}" for each in (*ends, f"{lows[-1]}+"))
    return Classes(names, np.where(before >= 0, of, -1).astype(np.int32))


def article_starts(ids: Int[np.ndarray, " tokens"], vocabulary: AnyVocabulary) -> Int[np.ndarray, " articles"]:
    """Beginnings of the articles of a text in WikiText's form, lines `= Title =`; none in texts of other forms."""
    words = vocabulary.words
    if _HEADING not in words or EOS not in words:
        return np.zeros(0, np.int64)
    heading, end = words.index(_HEADING), words.index(EOS)
    ends = np.flatnonzero(ids == end)
    first, last = np.concatenate([[0], ends[:-1] + 1]), ends - 1
    # Four words at least: sign, word, sign; and one sign only, since two open a section's heading.
    is_long = last - first >= 2
    first, last = first[is_long], last[is_long]
    is_title = (ids[first] == heading) & (ids[last] == heading)
    is_title &= (ids[first + 1] != heading) & (ids[last - 1] != heading)
    return np.asarray(first[is_title])


def present(classes: Classes) -> Classes:
    """The classes that occur, renumbered."""
    used = np.unique(classes.of[classes.of >= 0])
    numbers = np.full(len(classes.names) + 1, -1, np.int32)  # one more, for -1
    numbers[used] = np.arange(used.size)
    return Classes(tuple(classes.names[number] for number in used), numbers[classes.of])
