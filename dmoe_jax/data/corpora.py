"""Texts in three parts: WikiText-2, a corpus that needs no network, or one of a user's own.

Perplexities of different texts cannot be compared, nor those of different tokens, so every corpus carries a sentence
about its origin and its tokens.
"""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from dmoe_jax.data import raw_text, tables, wikitext2
from dmoe_jax.data.files import DataError, NotAtHand, find_data
from dmoe_jax.data.pieces import AnyVocabulary, PieceVocabulary
from dmoe_jax.data.raw_text import HELD_OUT, Text
from dmoe_jax.data.tokenizers import load_tokenizer
from dmoe_jax.data.vocabulary import Vocabulary
from dmoe_jax.data.words import UNK, cut_words

SOURCES = ("auto", "wikitext-2", "embedded")
"""Texts that have a name: WikiText-2 if it can be had and else the embedded one, or one of the two only."""

MIN_COUNT = 2
"""Words seen only once in train become `<unk>`, so that a model meets `<unk>` in training at all."""

_MIN_TOKENS = 20
"""Words or pieces that each part of a user's text has at least; a perplexity over fewer says nothing."""

_MANY_UNKNOWN = 0.1
"""Share of `<unk>` in a part that is worth a word; WikiText-2's parts have from 3 to 6 %."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """A text in three parts, as read-only ids.

    Attributes:
      name: "wikitext-2", "embedded", or the name of a file or data set.
      description: one line for people: which text, from where, why this one, how many tokens, and of which kind.
      vocabulary: the words or pieces behind the ids.
    """

    name: str
    description: str
    train: Int32[np.ndarray, " train"]
    valid: Int32[np.ndarray, " valid"]
    test: Int32[np.ndarray, " test"]
    vocabulary: AnyVocabulary


def has_name(source: str) -> bool:
    """True for a text that is known by its name everywhere, and is no path: one of `SOURCES`, or one on the hub."""
    return source in SOURCES or source.startswith(tables.HUB)


def check_source(source: str) -> None:
    """Check that a text can be meant: one of `SOURCES`, a data set on the hub, or the path of a text of one's own.

    Raises:
      DataError: there is no file or folder of this name, or a package is missing.
    """
    if source.startswith(tables.HUB) or tables.is_saved_table(Path(source)):
        tables.check_table(source)
    elif source not in SOURCES and not Path(source).exists():
        raise DataError(
            f"--data {source}: there is no such file or folder; expected one, or {', '.join(SOURCES)}, or "
            f"{tables.HUB}NAME"
        )


def load_corpus(
    *, source: str = "auto", tokenizer: str | None = None, vocabulary: AnyVocabulary | None = None
) -> Corpus:
    """Load a corpus. Blocks for about a second; for a download, at most about `files.TOTAL_TIMEOUT_S`.

    WikiText-2 is looked for as `find_data` says, in a folder `wikitext-2`; with `source="auto"` the embedded corpus is
    the last resort.

    Args:
      source: one of `SOURCES`; or the path of a text of one's own, see `raw_text`; or a data set, see `tables`.
      tokenizer: file, folder or name of a tokenizer, whose pieces are the tokens; None: words.
      vocabulary: the vocabulary of another text, of a trained model, in which this one is to be said; None: its own.

    Raises:
      DataError: `$DMOE_DATA` is set but its WikiText-2 is missing or damaged (unless source is "embedded");
        or the text or the tokenizer asked for cannot be had. The message says what was tried.
    """
    if tokenizer is not None and vocabulary is not None:
        raise ValueError(f"a vocabulary has a tokenizer or needs none, got also the tokenizer {tokenizer!r}")
    text = _find(source)
    if vocabulary is not None:
        return _corpus(text, vocabulary, _parts(text, vocabulary.encode_text))
    if tokenizer is not None:
        pieces = load_tokenizer(tokenizer)
        own_ids = _parts(text, pieces.encode)
        found = PieceVocabulary.build(pieces, own_ids[0])
        text = replace(text, origin=f"{text.origin}, in pieces of the tokenizer {tokenizer}")
        return _corpus(text, found, list(map(found.numbered, own_ids)))
    words = _parts(text, partial(cut_words, is_tokenised=text.is_tokenised))
    least = 1 if text.is_tokenised else MIN_COUNT
    known = Vocabulary.build(words[0], min_count=least, is_tokenised=text.is_tokenised)
    if UNK not in known:
        known = Vocabulary((*known.words, UNK), text.is_tokenised)
    if text.is_own and text.is_tokenised:
        text = replace(text, origin=f"{text.origin}, taken word for word since it has {UNK}")
    return _corpus(text, known, list(map(known.encode, words)))


def _find(source: str) -> Text:
    if source.startswith(tables.HUB) or tables.is_saved_table(Path(source)):
        return tables.read_table(source)
    if source not in SOURCES:
        check_source(source)
        return raw_text.read_own_text(Path(source))
    if source == "embedded":
        return _embedded("it was asked for")
    try:
        parts, origin = find_data("wikitext-2", wikitext2.read_folder, wikitext2.download, wikitext2.BASE_URL)
    except NotAtHand as error:
        if source == "auto":
            return _embedded(str(error))
        raise DataError(
            f"WikiText-2 cannot be had: {error}. Set DMOE_DATA to a folder that holds "
            "wikitext-2/train.txt.gz, valid.txt.gz and test.txt.gz"
        ) from error
    return Text(name="wikitext-2", origin=f"WikiText-2 from {origin}", parts=parts, is_tokenised=True)


def _embedded(why: str) -> Text:
    text = f"pydoc_data.topics of {platform.python_implementation()} {platform.python_version()}"
    origin = f"embedded corpus ({text}), because {why}"
    return Text(name="embedded", origin=origin, parts=raw_text.read_embedded(), is_tokenised=False)


def _parts(text: Text, cut: Callable[[str], Any]) -> list[Any]:
    """The tokens of train, valid and test, cut by a function of a text; of a text in one part the end is held out."""
    parts = list(map(cut, text.parts))
    is_whole = len(parts) == 1
    if is_whole:
        (tokens,) = parts
        end, middle = (int(len(tokens) * (1 - share)) for share in (HELD_OUT, HELD_OUT / 2))
        parts = [tokens[:end], tokens[end:middle], tokens[middle:]]
    for name, part in zip(("train", "valid", "test"), parts, strict=True):
        if text.is_own and len(part) < _MIN_TOKENS:
            raise DataError(
                f"{text.origin} is too short: its {name} part has {len(part)} tokens, expected at least {_MIN_TOKENS}"
                + (f" (the last {HELD_OUT:.0%} of a text in one part are held out)" if is_whole else "")
            )
    return parts


def _corpus(text: Text, vocabulary: AnyVocabulary, parts: Sequence[np.ndarray]) -> Corpus:
    """A corpus of these ids; they are read-only, for all trainers of a process share them."""
    train, valid, test = parts = [np.array(part) for part in parts]
    for part in parts:
        part.flags.writeable = False
    counts = " / ".join(f"{part.size:,}" for part in parts)
    description = f"{text.origin}: {counts} tokens (train / valid / test), vocabulary {len(vocabulary):,}"
    if isinstance(vocabulary, PieceVocabulary):
        description += "; perplexities are for each piece: compare those of other tokens by bits for each byte"
    unknown = [0.0]
    if UNK in vocabulary.words:
        unknown = [float(np.mean(part == vocabulary.words.index(UNK))) for part in parts]
    if max(unknown) > _MANY_UNKNOWN:
        shares = " / ".join(f"{share:.0%}" for share in unknown)
        description += f"; {shares} of them are {UNK}: a low perplexity says little"
    return Corpus(name=text.name, description=description, train=train, valid=valid, test=test, vocabulary=vocabulary)
