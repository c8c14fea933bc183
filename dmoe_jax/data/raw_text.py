"""Raw text: an English corpus that every CPython carries, and texts of a user's own.

The embedded corpus is the help texts of `pydoc_data.topics`: about 85,000 words on the Python language itself, enough
to watch a small model learn from context. It differs between Python versions, and so do its perplexities.

A text of one's own that holds `<unk>` has been made into words by others, as WikiText-2 has been: it is taken as it
is, so that perplexities can be compared with published ones.
"""

import importlib
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path

from dmoe_jax.data.files import DataError
from dmoe_jax.data.vocabulary import EOS, UNK
from dmoe_jax.data.wikitext2 import Parts, split_words

MIN_COUNT = 2
"""Words seen only once in train become `<unk>`, so that a model meets `<unk>` in training at all."""

HELD_OUT = 0.1
"""Share of a single file, at its end, that is not trained on: half of it for validation, half for test."""

_TRAIN_FRACTION, _VALID_FRACTION = 0.8, 0.1
"""Shares of the embedded corpus; the rest is for test."""

_MIN_WORDS = 20
"""Words that each part of a user's text has at least; a perplexity over fewer says nothing."""

_TOKENISED = 1e-3
"""Share of `<unk>` from which on a text counts as made into words already: WikiText-103 has four times that."""

_UNSPACED = (
    "\u0e01-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
"""Characters of scripts that put no spaces between words: Thai, Lao, Burmese, Khmer, Japanese and Chinese. Each is a
token by itself, with the marks that belong to it."""

_JOINERS = "\u200c\u200d"
"""Inside words of Persian and of Indian languages."""

_INVISIBLE = {0xFEFF: None, 0xAD: None, 0x200B: " "}
"""Byte order marks, soft hyphens, and spaces without width, which part words."""


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
    """The words of each article, articles sorted by title.

    A paragraph that an earlier article had is left out: the help texts quote each other at length, and a validation
    text that stands word for word in train would measure memory.
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


def read_own_text(path: Path) -> tuple[Parts, bool]:
    """Read a text, and say whether it was tokenised already: of such a text one word in a thousand is `<unk>`.

    Args:
      path: a text file, of which the end is held out, or a folder with train.txt, valid.txt and test.txt; UTF-8.

    Raises:
      DataError: there is no such file or folder, it is no UTF-8 text, or a part of it is too short.
    """
    files = [path / f"{split}.txt" for split in ("train", "valid", "test")] if path.is_dir() else [path]
    texts = [_read(file) for file in files]
    given = texts[0].split()
    is_tokenised = given.count(UNK) > _TOKENISED * len(given)
    train, *held_out = (_split(text) if is_tokenised else tokenise(text) for text in texts)
    if not held_out:
        end, middle = (int(len(train) * (1 - share)) for share in (HELD_OUT, HELD_OUT / 2))
        train, held_out = train[:end], [train[end:middle], train[middle:]]
    valid, test = held_out
    for name, part in (("train", train), ("valid", valid), ("test", test)):
        if len(part) < _MIN_WORDS:
            raise DataError(
                f"{path} is too short: its {name} part has {len(part)} words, expected at least {_MIN_WORDS}"
                + ("" if path.is_dir() else f" (the last {HELD_OUT:.0%} of a file are held out)")
            )
    return (train, valid, test), is_tokenised


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").translate(_INVISIBLE)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected UTF-8 text: {error}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _split(text: str) -> list[str]:
    """The words of a tokenised text, those between spaces; a line that ends in `<eos>` gets no second one."""
    return split_words(re.sub(rf"{EOS}[ \t]*$", "", text, flags=re.MULTILINE).encode())


def tokenise(text: str) -> list[str]:
    """Lower-case words, numbers and punctuation, with `<eos>` after each line that is not blank.

    Letters and the marks on them are composed (Unicode's form NFC), so that it does not matter how they were typed.
    """
    text = unicodedata.normalize("NFC", text.lower())
    pattern = _pattern(text)
    words: list[str] = []
    for line in text.split("\n"):
        found = [match.group() for match in pattern.finditer(line)]
        if found:
            words += found if found[-1] == EOS else [*found, EOS]
    return words


def _pattern(text: str) -> re.Pattern[str]:
    """One token: `<unk>` or `<eos>`; a character of a script without spaces; a word or identifier (with an inner
    apostrophe); a number; or a run of one punctuation mark (`>>>`)."""
    # Marks that are composed with no letter. `re` knows no class of them, and their list is long.
    marks = "".join(sorted(char for char in set(text) if unicodedata.category(char).startswith("M"))) + _JOINERS
    word = rf"(?:[^\W\d{_UNSPACED}]+[{marks}]*)+"
    return re.compile(rf"{UNK}|{EOS}|(?!\d)[{_UNSPACED}][{marks}]*|{word}(?:['’]{word})?|\d+|([^\w\s])\1*")
