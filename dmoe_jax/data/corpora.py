"""Texts in three parts: WikiText-2, a corpus that needs no network, or one of a user's own.

Perplexities of different texts cannot be compared, so every corpus carries a sentence about its origin.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from dmoe_jax.data import raw_text, wikitext2
from dmoe_jax.data.files import DataError, NotAtHand, find_data
from dmoe_jax.data.vocabulary import UNK, Vocabulary

SOURCES = ("auto", "wikitext-2", "embedded")
"""Texts that have a name: WikiText-2 if it can be had and else the embedded one, or one of the two only."""

_MANY_UNKNOWN = 0.1
"""Share of `<unk>` in a part that is worth a word; WikiText-2's parts have from 3 to 6 %."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """A text in three parts, as read-only ids.

    Attributes:
      name: "wikitext-2", "embedded", or the name of a file.
      description: one line for people: which text, from where, why this one, how many tokens.
      vocabulary: the words behind the ids.
    """

    name: str
    description: str
    train: Int32[np.ndarray, " train"]
    valid: Int32[np.ndarray, " valid"]
    test: Int32[np.ndarray, " test"]
    vocabulary: Vocabulary


def check_source(source: str) -> None:
    """Check that a text can be meant: one of `SOURCES`, or the path of a text of one's own.

    Raises:
      DataError: there is no file or folder of this name.
    """
    if source not in SOURCES and not Path(source).exists():
        raise DataError(f"--data {source}: there is no such file or folder; expected one, or {', '.join(SOURCES)}")


def load_corpus(*, source: str = "auto") -> Corpus:
    """Load a corpus. Blocks for about a second; for a download, at most about `files.TOTAL_TIMEOUT_S`.

    WikiText-2 is looked for as `find_data` says, in a folder `wikitext-2`; with `source="auto"` the embedded corpus is
    the last resort.

    Args:
      source: one of `SOURCES`, or the path of a text of one's own; see `raw_text`.

    Raises:
      DataError: `$DMOE_DATA` is set but its WikiText-2 is missing or damaged (unless source is "embedded");
        or the text asked for cannot be had. The message says what was tried.
    """
    if source not in SOURCES:
        return _own_corpus(Path(source))
    if source == "embedded":
        return _embedded_corpus("it was asked for")
    try:
        words, origin = find_data("wikitext-2", wikitext2.read_folder, wikitext2.download, wikitext2.BASE_URL)
    except NotAtHand as error:
        if source == "auto":
            return _embedded_corpus(str(error))
        raise DataError(
            f"WikiText-2 cannot be had: {error}. Set DMOE_DATA to a folder that holds "
            "wikitext-2/train.txt.gz, valid.txt.gz and test.txt.gz"
        ) from error
    return _encode("wikitext-2", f"WikiText-2 from {origin}", Vocabulary.build(words[0]), *words)


def _embedded_corpus(why: str) -> Corpus:
    train, valid, test = raw_text.read_embedded()
    vocabulary = Vocabulary.build(train, min_count=raw_text.MIN_COUNT)
    text = f"pydoc_data.topics of {platform.python_implementation()} {platform.python_version()}"
    return _encode("embedded", f"embedded corpus ({text}), because {why}", vocabulary, train, valid, test)


def _own_corpus(path: Path) -> Corpus:
    check_source(str(path))
    (train, valid, test), is_tokenised = raw_text.read_own_text(path)
    vocabulary = Vocabulary.build(train, min_count=1 if is_tokenised else raw_text.MIN_COUNT)
    if UNK not in vocabulary:
        vocabulary = Vocabulary((*vocabulary.words, UNK))
    as_it_is = f", taken word for word since it has {UNK}" if is_tokenised else ""
    return _encode(path.name, f"your own text {path}{as_it_is}", vocabulary, train, valid, test)


def _encode(name: str, origin: str, vocabulary: Vocabulary, *words: Sequence[str]) -> Corpus:
    """A corpus of these words; its ids are read-only, for all trainers of a process share it."""
    train, valid, test = parts = [vocabulary.encode(part) for part in words]
    for part in parts:
        part.flags.writeable = False
    counts = " / ".join(f"{part.size:,}" for part in parts)
    description = f"{origin}: {counts} tokens (train / valid / test), vocabulary {len(vocabulary):,}"
    unknown = [float(np.mean(part == vocabulary.words.index(UNK))) for part in parts]
    if max(unknown) > _MANY_UNKNOWN:
        shares = " / ".join(f"{share:.0%}" for share in unknown)
        description += f"; {shares} of them are {UNK}: a low perplexity says little"
    return Corpus(name=name, description=description, train=train, valid=valid, test=test, vocabulary=vocabulary)
