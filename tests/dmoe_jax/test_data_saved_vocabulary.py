"""A run's vocabulary in its folder: it comes back as it was, another is refused, and a stranger's is read with care."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmoe_jax.data import load_vocabulary, saved_vocabulary
from dmoe_jax.data.files import DataError
from dmoe_jax.data.pieces import AnyVocabulary, PieceVocabulary
from dmoe_jax.data.saved_vocabulary import VOCABULARY, save_vocabulary
from dmoe_jax.data.tokenizers import load_tokenizer
from dmoe_jax.data.vocabulary import Vocabulary
from tests.dmoe_jax.tokenizer_files import FILES, TEXT

WORDS = Vocabulary(("the", "cat", "<eos>", "café", "\x1b[2J", "<unk>"))


def pieces(folder: Path, kind: str = "json") -> PieceVocabulary:
    """The vocabulary of `TEXT` in pieces; its tokenizer's file goes into a folder of its own."""
    (folder / "own").mkdir(exist_ok=True)
    tokenizer = load_tokenizer(str(FILES[kind](folder / "own")))
    return PieceVocabulary.build(tokenizer, tokenizer.encode(TEXT))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize("is_tokenised", [False, True])
def test_words_come_back(is_tokenised: bool, run: Path) -> None:
    """The words in order, and which texts they are for; nothing else lies in the folder."""
    save_vocabulary(run, Vocabulary(WORDS.words, is_tokenised))
    assert load_vocabulary(str(run)) == Vocabulary(WORDS.words, is_tokenised)
    assert [path.name for path in run.iterdir()] == [VOCABULARY]


@pytest.mark.parametrize("kind", [*FILES])
def test_pieces_come_back_with_their_tokenizer(kind: str, run: Path, tmp_path: Path) -> None:
    """From the folder alone: the file that the run was begun with may be gone."""
    vocabulary = pieces(tmp_path, kind)
    save_vocabulary(run, vocabulary)
    for path in (tmp_path / "own").iterdir():
        assert (run / path.name).read_bytes() == path.read_bytes()
        path.unlink()
    found = load_vocabulary(run)
    assert found.meaning == vocabulary.meaning
    assert found.words == vocabulary.words
    np.testing.assert_array_equal(found.encode_text(TEXT), vocabulary.encode_text(TEXT))


def test_one_that_is_there_stays_and_another_is_refused(run: Path, tmp_path: Path) -> None:
    """A run that goes on looks whether it is its own; one of an earlier version gets one."""
    save_vocabulary(run, WORDS)
    before = (run / VOCABULARY).stat()
    save_vocabulary(run, Vocabulary(WORDS.words))
    assert (run / VOCABULARY).stat() == before
    for other in (Vocabulary(WORDS.words[::-1]), pieces(tmp_path)):
        with pytest.raises(DataError, match=r"has vocabulary: 6 words, \w+; the text now has vocabulary: "):
            save_vocabulary(run, other)
    assert (run / VOCABULARY).stat() == before
    assert [path.name for path in run.iterdir()] == [VOCABULARY]


def _changed(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda record: record | changes


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("words", lambda record: [record], "expected a JSON object with a version"),
        ("words", _changed(version=2), "is of version 2, expected 1"),
        ("words", _changed(version=True), "expected a JSON object with a version"),
        ("words", _changed(kind="letters"), "expected the fields"),
        ("words", _changed(more=1), "expected the fields"),
        ("words", _changed(words=[]), "expected a list of words"),
        ("words", _changed(words="the"), "expected a list of words"),
        ("words", _changed(words=["the", 1]), "expected words, without spaces"),
        ("words", _changed(words=["the", "two words"]), "expected words, without spaces"),
        ("words", _changed(words=["the", ""]), "expected words, without spaces"),
        ("words", _changed(words=["the", "the"]), "'the' is repeated"),
        ("words", _changed(tokenised=1), "for tokenised true or false"),
        ("pieces", _changed(tokenizer="../own/tokenizer.json"), "expected the tokenizer tokenizer.json or"),
        ("pieces", _changed(tokenizer=["tokenizer.json"]), "expected the tokenizer tokenizer.json or"),
        ("pieces", _changed(tokenizer="tokenizer.model"), r"tokenizer\.model cannot be read: No such file"),
        ("pieces", _changed(sha256="0" * 64), r"tokenizer\.json is not the tokenizer that .* was written with"),
        ("pieces", _changed(order={}), "and a list as order"),
        ("pieces", _changed(order=[0, 1.5]), "expected an order of integers"),
        ("pieces", _changed(order=[0, -1]), "expected an order of integers"),
        ("pieces", _changed(order=[0, 1 << 31]), "expected an order of integers"),
        ("pieces", _changed(order=[0, 0]), "each of the tokenizer's 280 ids once, got 2"),
    ],
)
def test_what_is_no_vocabulary_is_one_sentence(
    kind: str, change: Callable[[dict[str, Any]], Any], message: str, run: Path, tmp_path: Path
) -> None:
    """Every field is looked at; the name of a file is one of two."""
    vocabulary: AnyVocabulary = WORDS if kind == "words" else pieces(tmp_path)
    save_vocabulary(run, vocabulary)
    record = json.loads((run / VOCABULARY).read_text())
    (run / VOCABULARY).write_text(json.dumps(change(record)))
    with pytest.raises(DataError, match=message):
        load_vocabulary(run)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b'{"version": 1', b"[" * 100_000, b"9" * 10_000])
def test_what_is_no_json_is_one_sentence(data: bytes, run: Path) -> None:
    """Nor does a deep nest or a long number do harm."""
    (run / VOCABULARY).write_bytes(data)
    with pytest.raises(DataError, match=rf"{VOCABULARY} is damaged: |expected a JSON object"):
        load_vocabulary(run)


def test_large_files_are_neither_read_nor_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that could not be read again is not written."""
    monkeypatch.setattr(saved_vocabulary, "MOST_BYTES", 50)
    with pytest.raises(DataError, match="vocabulary of 6 words is too large to be kept"):
        save_vocabulary(run, WORDS)
    assert [*run.iterdir()] == []
    (run / VOCABULARY).write_bytes(b" " * 51)
    with pytest.raises(DataError, match="expected at most 50 bytes, got more"):
        load_vocabulary(run)


def test_a_run_of_an_earlier_version_has_none(run: Path) -> None:
    """The message says so."""
    with pytest.raises(DataError, match=r"there is no .*vocabulary\.json: the run has no vocabulary, or was begun by"):
        load_vocabulary(run)


@pytest.mark.parametrize(
    ("is_tokenised", "text", "words"),
    [
        (False, "The cat\n\nthe CAT", ["the", "cat", "<eos>", "the", "cat"]),
        (False, "a café", ["<unk>", "café"]),
        (True, "the cat \n \nthe", ["the", "cat", "<eos>", "<eos>", "the"]),
        (True, "the cat <eos>", ["the", "cat", "<eos>"]),
        (True, "the cat <eos>\nThe", ["the", "cat", "<eos>", "<unk>"]),
    ],
)
def test_words_of_a_prompt(is_tokenised: bool, text: str, words: list[str]) -> None:
    """A text has `<eos>` where a line ends, and not where it only breaks off."""
    vocabulary = Vocabulary(WORDS.words, is_tokenised)
    ids = vocabulary.encode_text(text)
    assert [vocabulary.piece(number) for number in ids] == words
    back = vocabulary.decode(ids)
    assert back.split("\n") == [" ".join(line) for line in _lines(words)]
    if is_tokenised and "<unk>" not in words:
        np.testing.assert_array_equal(vocabulary.encode_text(back), ids)


def _lines(words: list[str]) -> list[list[str]]:
    lines: list[list[str]] = [[]]
    for word in words:
        lines = [*lines, []] if word == "<eos>" else [*lines[:-1], [*lines[-1], word]]
    return lines
