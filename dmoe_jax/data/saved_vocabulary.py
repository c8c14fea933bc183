"""A run's vocabulary in its folder, so that the run can be used where its text is not.

`vocabulary.json` has the words in order; or, of a tokenizer, the order of its pieces, with the tokenizer's file beside
it. A run's folder may be a stranger's: files are bounded, everything in them is checked, and nothing of them is run.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dmoe_jax.data.files import DataError, read_bounded
from dmoe_jax.data.pieces import AnyVocabulary, PieceVocabulary
from dmoe_jax.data.tokenizers import JSON_FILE, MAX_BYTES, MODEL_FILE, open_tokenizer
from dmoe_jax.data.vocabulary import Vocabulary
from dmoe_jax.runs.run_folder import replaced_file

VOCABULARY = "vocabulary.json"
"""Name of the file."""

_VERSION = 1
MOST_BYTES = 32 << 20
"""Size of the file at most: some two million words."""

_WORDS, _PIECES = {"version", "kind", "tokenised", "words"}, {"version", "kind", "tokenizer", "sha256", "order"}


def save_vocabulary(folder: Path, vocabulary: AnyVocabulary) -> None:
    """Write a vocabulary into a run's folder, unless it is there.

    Raises:
      DataError: there is another, or one that cannot be read, or this one is too large. OSError: it cannot be written.
    """
    if (folder / VOCABULARY).exists():
        if (there := load_vocabulary(folder)).meaning != vocabulary.meaning:
            raise DataError(f"{folder / VOCABULARY} has {there.meaning}; the text now has {vocabulary.meaning}")
        return
    data, tokenizer = packed_vocabulary(vocabulary)
    if isinstance(vocabulary, PieceVocabulary):  # first: who finds the other file finds this one too
        with replaced_file(folder / vocabulary.tokenizer.file_name) as temporary:
            temporary.write_bytes(tokenizer)
    with replaced_file(folder / VOCABULARY) as temporary:
        temporary.write_bytes(data)


def packed_vocabulary(vocabulary: AnyVocabulary) -> tuple[bytes, bytes]:
    """The contents of the vocabulary's file, and of its tokenizer's; empty for words. Raises DataError if it is too
    large to be kept."""
    if isinstance(vocabulary, Vocabulary):
        fields, beside = {"kind": "words", "tokenised": vocabulary.is_tokenised, "words": vocabulary.words}, b""
    else:
        own, order = vocabulary.tokenizer, vocabulary.order.tolist()
        fields = {"kind": "pieces", "tokenizer": own.file_name, "sha256": own.sha256, "order": order}
        beside = own.data
    data = json.dumps({"version": _VERSION, **fields}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    if len(data) > MOST_BYTES:
        raise DataError(f"the vocabulary of {len(vocabulary):,} words is too large to be kept: {len(data):,} bytes")
    return data, beside


def load_vocabulary(run: Path | str) -> AnyVocabulary:
    """The vocabulary of a run, out of its folder.

    Raises:
      DataError: there is none, as in runs of earlier versions; it is damaged; or it needs a package that is missing.
    """
    path = Path(run) / VOCABULARY
    if not path.is_file():
        raise DataError(f"there is no {path}: the run has no vocabulary, or was begun by an earlier version")
    data = read_bounded(path, MOST_BYTES)
    return vocabulary_untrusted(data, lambda name: read_bounded(path.with_name(name), MAX_BYTES), where=str(path))


def vocabulary_untrusted(data: bytes, tokenizer: Callable[[str], bytes], *, where: str) -> AnyVocabulary:
    """The vocabulary in the contents of a file.

    Args:
      data: of the vocabulary's file. tokenizer: returns those of the tokenizer's file of a name, if it is wanted.
      where: names the file in errors.

    Raises:
      DataError: as of `load_vocabulary`.
    """
    if len(data) > MOST_BYTES:
        raise DataError(f"{where} has {len(data):,} bytes, expected at most {MOST_BYTES:,}")
    try:
        record = json.loads(data.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is damaged: {error}") from error
    if not isinstance(record, dict) or type(record.get("version")) is not int:
        raise DataError(f"{where}: expected a JSON object with a version")
    if record["version"] != _VERSION:
        raise DataError(f"{where} is of version {record['version']}, expected {_VERSION}")
    if record.get("kind") == "words" and record.keys() == _WORDS:
        return _words(record, where)
    if record.get("kind") == "pieces" and record.keys() == _PIECES:
        return _pieces(record, tokenizer, where)
    raise DataError(f"{where}: expected the fields {sorted(_WORDS)} of words or {sorted(_PIECES)} of pieces")


def _words(record: dict[str, Any], where: str) -> Vocabulary:
    words, is_tokenised = record["words"], record["tokenised"]
    if type(is_tokenised) is not bool or type(words) is not list or not words:
        raise DataError(f"{where}: expected a list of words, and for tokenised true or false")
    if not all(type(word) is str and word and len(word.split()) == 1 for word in words):
        raise DataError(f"{where}: expected words, without spaces")
    try:
        return Vocabulary(tuple(words), is_tokenised)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


def _pieces(record: dict[str, Any], tokenizer: Callable[[str], bytes], where: str) -> PieceVocabulary:
    name, order = record["tokenizer"], record["order"]
    if name not in (JSON_FILE, MODEL_FILE) or type(order) is not list:
        raise DataError(f"{where}: expected the tokenizer {JSON_FILE} or {MODEL_FILE}, and a list as order")
    if not all(type(each) is int and 0 <= each < 1 << 31 for each in order):
        raise DataError(f"{where}: expected an order of integers that are not negative")
    data = tokenizer(name)
    if hashlib.sha256(data).hexdigest() != record["sha256"]:
        raise DataError(f"{name} is not the tokenizer that {where} was written with")
    opened = open_tokenizer(data, f"{name} of {where}")
    try:
        return PieceVocabulary(tokenizer=opened, order=np.array(order, np.int32))
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
