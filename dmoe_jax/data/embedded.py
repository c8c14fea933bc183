"""A small English corpus that every CPython carries: the help texts of `pydoc_data.topics`.

About 85,000 words on the Python language itself: enough to watch a small model learn from context, and no more. The
text differs between Python versions, and so do its perplexities; compare them within one version only.
"""

import importlib
import platform
import re
from collections.abc import Mapping

from dmoe_jax.data.errors import DataError
from dmoe_jax.data.vocabulary import EOS

MIN_COUNT = 2
"""Words seen only once in train become `<unk>`, so that a model meets `<unk>` in training at all."""

TRAIN_FRACTION, VALID_FRACTION = 0.8, 0.1

_WORD = re.compile(r"[^\W\d]+(?:['’][^\W\d]+)?|\d+|([^\w\s])\1*")
"""A word or identifier (with an inner apostrophe), a number, or a run of one punctuation mark (`>>>`)."""


def describe() -> str:
    """What the text is, with the version that fixes it."""
    return f"pydoc_data.topics of {platform.python_implementation()} {platform.python_version()}"


def read_splits() -> tuple[list[str], list[str], list[str]]:
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


def tokenise(text: str) -> list[str]:
    """Lower-case words, numbers and punctuation, with `<eos>` after each line that is not blank."""
    words = []
    for line in text.lower().splitlines():
        found = [match.group() for match in _WORD.finditer(line)]
        if found:
            words += [*found, EOS]
    return words


def split_articles(articles: list[list[str]]) -> tuple[list[str], list[str], list[str]]:
    """Give each article to the part in which its middle word falls; parts are contiguous."""
    total = sum(len(article) for article in articles)
    train: list[str] = []
    valid: list[str] = []
    test: list[str] = []
    before = 0
    for article in articles:
        middle = before + len(article) / 2
        if middle < TRAIN_FRACTION * total:
            train += article
        elif middle < (TRAIN_FRACTION + VALID_FRACTION) * total:
            valid += article
        else:
            test += article
        before += len(article)
    return train, valid, test
