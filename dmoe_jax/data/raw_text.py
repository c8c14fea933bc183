"""Texts as they were found: an English corpus that every CPython carries, and texts of a user's own.

The embedded corpus is the help texts of `pydoc_data.topics`: about 85,000 words on the Python language itself, enough
to watch a small model learn from context. It differs between Python versions, and so do its perplexities.
"""

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dmoe_jax.data.files import DataError
from dmoe_jax.data.words import UNK, tokenise

HELD_OUT = 0.1
"""Share of a text in one part, at its end, that is not trained on: half of it for validation, half for test."""

_TRAIN_FRACTION, _VALID_FRACTION = 0.8, 0.1
"""Shares of the embedded corpus; the rest is for test."""

_TOKENISED = 1e-3
"""Share of `<unk>` from which on a text counts as made into words already: WikiText-103 has four times that."""

_INVISIBLE = {0xFEFF: None, 0xAD: None, 0x200B: " "}
"""Byte order marks, soft hyphens, and spaces without width, which part words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text, not yet made into tokens.

    Attributes:
      name, origin: short name, and beginning of a sentence about it, for people.
      parts: train, valid and test; or one text, of which the end is held out. Lines end in a line feed, the last too.
      is_tokenised: True if words of it are `<unk>` and it is to be split at spaces, at word level.
      is_own: True for a text of a user's own, which may be too short.
    """

    name: str
    origin: str
    parts: Sequence[str]
    is_tokenised: bool
    is_own: bool = False


def read_embedded() -> list[str]:
    """Train, valid and test: whole articles in alphabetical order, about 80, 10 and 10 % of all words.

    Raises:
      DataError: this Python was built without `pydoc_data.topics`.
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError) as error:
        raise DataError(f"this Python has no pydoc_data.topics, which is the embedded corpus: {error}") from error
    return split_articles(articles_of(topics))


def articles_of(topics: Mapping[str, str]) -> list[str]:
    """The articles, sorted by title.

    A paragraph that an earlier article had is left out: the help texts quote each other at length, and a validation
    text that stands word for word in train would measure memory.
    """
    seen: set[str] = set()
    articles = []
    for title in sorted(topics):
        paragraphs = []
        for paragraph in re.split(r"\n\s*\n", topics[title]):
            key = " ".join(paragraph.split())
            if key not in seen:
                seen.add(key)
                paragraphs.append(ended(paragraph))
        articles.append("\n".join(paragraphs))
    return articles


def split_articles(articles: Sequence[str]) -> list[str]:
    """Give each article to the part in which its middle word falls; parts are contiguous."""
    lengths = [len(tokenise(article)) for article in articles]
    parts: list[list[str]] = [[], [], []]
    before = 0
    for article, length in zip(articles, lengths, strict=True):
        share = (before + length / 2) / sum(lengths)
        parts[0 if share < _TRAIN_FRACTION else 1 if share < _TRAIN_FRACTION + _VALID_FRACTION else 2].append(article)
        before += length
    return ["\n".join(part) for part in parts]


def read_own_text(path: Path) -> Text:
    """Read a user's text: a file, or a folder with train.txt, valid.txt and test.txt; UTF-8.

    Raises:
      DataError: there is no such file or folder, or it is no UTF-8 text.
    """
    files = [path / f"{split}.txt" for split in ("train", "valid", "test")] if path.is_dir() else [path]
    return own_text(path.name, f"your own text {path}", [_read(file) for file in files])


def own_text(name: str, origin: str, parts: Sequence[str]) -> Text:
    """A user's text, tokenised already if one word in a thousand of its training part is `<unk>`."""
    given = parts[0].split()
    is_tokenised = given.count(UNK) > _TOKENISED * len(given)
    parts = [ended(part.translate(_INVISIBLE)) for part in parts]
    return Text(name=name, origin=origin, parts=parts, is_tokenised=is_tokenised, is_own=True)


def ended(text: str) -> str:
    """The text with a line feed behind its last line, unless that has one or there is no line."""
    return text if not text or text.endswith("\n") else f"{text}\n"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected UTF-8 text: {error}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
