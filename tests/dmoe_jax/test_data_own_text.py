"""A text of one's own: how it is cut, what its vocabulary is, and one sentence for what will not do."""

from pathlib import Path

import pytest

from dmoe_jax.data import DataError
from dmoe_jax.data.corpora import load_corpus
from dmoe_jax.data.vocabulary import UNK

LINE = "The cat sat on the mat.\n"
"""Seven words and the end of the line."""


def test_the_end_of_a_file_is_held_out(tmp_path: Path) -> None:
    """Nine tenths for training, then halves; ids by falling frequency; a word seen once is unknown."""
    path = tmp_path / "my.txt"
    path.write_text(LINE * 99 + "one unicorn sat on the mat .\n")
    corpus = load_corpus(source=str(path))
    assert (corpus.name, corpus.train.size, corpus.valid.size, corpus.test.size) == ("my.txt", 720, 40, 40)
    assert corpus.vocabulary.words[0] == "the"
    assert {"cat", "mat", ".", "<eos>"} <= set(corpus.vocabulary.words)
    assert "unicorn" not in corpus.vocabulary
    words = corpus.vocabulary.words
    assert [words[number] for number in corpus.test[-8:]] == [UNK, UNK, "sat", "on", "the", "mat", ".", "<eos>"]
    assert str(path) in corpus.description


def test_a_folder_has_a_file_for_each_part(tmp_path: Path) -> None:
    """The vocabulary is that of the training text."""
    for split, text in (("train", LINE * 10), ("valid", "the dog sat .\n" * 5), ("test", LINE * 3)):
        (tmp_path / f"{split}.txt").write_text(text)
    corpus = load_corpus(source=str(tmp_path))
    assert (corpus.train.size, corpus.valid.size, corpus.test.size) == (80, 25, 24)
    assert [corpus.vocabulary.words[number] for number in corpus.valid[:3]] == ["the", UNK, "sat"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LINE * 10, r"my\.txt is too short: its valid part has 4 words, expected at least 20"),
        ("", "its train part has 0 words"),
        (b"\xff\xfe\x00", "expected UTF-8 text"),
        (None, r"there is no such file or folder; expected one, or auto, wikitext-2, embedded"),
    ],
)
def test_what_will_not_do_is_one_sentence(content: str | bytes | None, message: str, tmp_path: Path) -> None:
    """The message names the file."""
    path = tmp_path / "my.txt"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        load_corpus(source=str(path))


def test_a_folder_without_its_files_is_refused(tmp_path: Path) -> None:
    """The first one that is missing."""
    with pytest.raises(DataError, match=r"train\.txt cannot be read: No such file"):
        load_corpus(source=str(tmp_path))
