"""Raw English text: a corpus that every CPython carries, and texts of a user's own.

The embedded corpus is the help texts of `pydoc_data.topics`: about 85,000 words on the Python language itself, enough
to watch a small model learn from context, and no more. It differs between Python versions, and so do its perplexities;
compare them within one version only.

A user's own text is one file, of which the end is held out, or a folder with a file for each part.
"""

import importlib
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from dmoe_jax.data import DataError
from dmoe_jax.data.vocabulary import EOS

MIN_COUNT = 2
"""Words seen only once in train become `<unk>`, so that a model meets `<unk>` in training at all."""

HELD_OUT = 0.1
"""Share of a single file, at its end, that is not trained on: half of it for validation, half for test."""

_TRAIN_FRACTION, _VALID_FRACTION = 0.8, 0.1
"""Shares of the embedded corpus; the rest is for test."""

_MIN_WORDS = 20
"""The fewest in each part of a user's text; a perplexity over fewer says nothing."""

_WORD = re.compile(r"[^\W\d]+(?:['’][^\W\d]+)?|\d+|([^\w\s])\1*")
"""A word or identifier (with an inner apostrophe), a number, or a run of one punctuation mark (`>>>`)."""

Parts = tuple[list[str], list[str], list[str]]
"""The words of train, valid and test."""


def describe_embedded() -> str:
    """What the text is, with the version that fixes it."""
    return f"pydoc_data.topics of {platform.python_implementation()} {platform.python_version()}"


def read_embedded() -> Parts:
    """The words of train, valid and test: whole articles in alphabetical order, about 80, 10 and 10 % of all.

    Raises:
      DataError: this Python was built without `pydoc_data.topics`.
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError) as error:
        raise DataError(f"this Python has no pydoc_data.topics, which is the embedded corpus: {error}") from error
    return split_articles(articles_of(topics))


def articles_of(topics: Mapping[str, str]) -> list[list[str]]:
    """The words of each article, articles sorted by title, `<eos>` after each line that has words.

    A paragraph that an earlier article already had is left out: the help texts quote each other at length, and a
    validation text that stands word for word in train would measure memory.
    """
    seen: set[str] = set()
    articles = []
    for title in sorted(topics):
        words: list[str] = []
        for paragraph in re.split(r"\n\s*\n", topics[title]):
            key = " ".join(paragraph.split())
            if key not in seen:
                seen.add(key)
                words += tokenise(paragraph)
        articles.append(words)
    return articles


def split_articles(articles: list[list[str]]) -> Parts:
    """Give each article to the part in which its middle word falls; parts are contiguous."""
    total = sum(len(article) for article in articles)
    train: list[str] = []
    valid: list[str] = []
    test: list[str] = []
    before = 0
    for article in articles:
        share = (before + len(article) / 2) / total
        part = train if share < _TRAIN_FRACTION else valid if share < _TRAIN_FRACTION + _VALID_FRACTION else test
        part += article
        before += len(article)
    return train, valid, test


def read_own_text(path: Path) -> Parts:
    """Read a text: lower-case words, numbers and punctuation, `<eos>` after each line that is not blank.

    Args:
      path: a text file, or a folder with train.txt, valid.txt and test.txt; UTF-8.

    Raises:
      DataError: there is no such file or folder, it is no UTF-8 text, or a part of it is too short.
    """
    if path.is_dir():
        train, valid, test = (_words(path / f"{split}.txt") for split in ("train", "valid", "test"))
    else:
        text = _words(path)
        end, middle = (int(len(text) * (1 - share)) for share in (HELD_OUT, HELD_OUT / 2))
        train, valid, test = text[:end], text[end:middle], text[middle:]
    for name, part in (("train", train), ("valid", valid), ("test", test)):
        if len(part) < _MIN_WORDS:
            raise DataError(
                f"{path} is too short: its {name} part has {len(part)} words, expected at least {_MIN_WORDS}"
                + ("" if path.is_dir() else f" (the last {HELD_OUT:.0%} of a file are held out)")
            )
    return train, valid, test


def _words(path: Path) -> list[str]:
    try:
        return tokenise(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected UTF-8 text: {error}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def tokenise(text: str) -> list[str]:
    """Lower-case words, numbers and punctuation, with `<eos>` after each line that is not blank."""
    words = []
    for line in text.lower().splitlines():
        found = [match.group() for match in _WORD.finditer(line)]
        if found:
            words += [*found, EOS]
    return words
