"""A text of one's own: how it is cut, what its vocabulary is, its unigram baseline, and what will not do."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmoe_jax.data import DataError
from dmoe_jax.data.corpora import Corpus, load_corpus
from dmoe_jax.data.vocabulary import Vocabulary, unigram_perplexity
from dmoe_jax.data.words import EOS, UNK

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
        (LINE * 10, r"my\.txt is too short: its valid part has 4 tokens, expected at least 20"),
        ("", "its train part has 0 tokens"),
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


def _corpus(folder: Path, text: str) -> tuple[Corpus, list[str]]:
    """A text that is one file, and the words of its training part."""
    path = folder / "my.txt"
    path.write_bytes(text.encode())
    corpus = load_corpus(source=str(path))
    return corpus, [corpus.vocabulary.words[number] for number in corpus.train]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\ufeffThe cat\r\nsat \ufeffdown\r\n", ["the", "cat", "<eos>", "sat", "down", "<eos>"]),
        ("the cat\fsat\vdown\n", ["the", "cat", "sat", "down", "<eos>"]),
        ("the cat <eos> sat <eos>\n", ["the", "cat", "<eos>", "sat", "<eos>"]),
        ("नमस्ते दुनिया।\n", ["नमस्ते", "दुनिया", "।", "<eos>"]),
        ("cafe\u0301 Café\n", ["café", "café", "<eos>"]),
        ("x\u0304y a\u00adnd\n", ["x\u0304y", "and", "<eos>"]),
        ("今天 GPT4 好。\n", ["今", "天", "gpt", "4", "好", "。", "<eos>"]),
        ("กำลังดี ๑๒\n", ["ก", "ำ", "ลั", "ง", "ดี", "๑๒", "<eos>"]),
        ("don't use __init__ 3.5 l’été\n", ["don't", "use", "__init__", "3", ".", "5", "l’été", "<eos>"]),
        ('"A"\n\n>>> x==1\n', ['"', "a", '"', "<eos>", ">>>", "x", "==", "1", "<eos>"]),
    ],
)
def test_words_of_other_scripts_and_editors(text: str, words: list[str], tmp_path: Path) -> None:
    """Marks stay with their letters, scripts without spaces give a token a character; blank lines have no <eos>."""
    assert _corpus(tmp_path, text * 200)[1][: len(words)] == words


def test_a_tokenised_text_is_taken_as_it_is(tmp_path: Path) -> None:
    """As WikiText-2 is published: words between spaces, case kept, every line an <eos>, single words kept."""
    lines = " mr. <unk> is N years old and do n't @-@ Ask \n \n"
    corpus, words = _corpus(tmp_path, "unicorn <unk> \n" + lines * 60)
    assert words[:3] == ["unicorn", UNK, "<eos>"]
    assert words[3:15] == ["mr.", UNK, "is", "N", "years", "old", "and", "do", "n't", "@-@", "Ask", "<eos>"]
    assert words[15] == "<eos>"
    assert "unicorn" in corpus.vocabulary
    assert UNK in corpus.description


def test_a_text_that_only_mentions_unknown_words_is_cut_as_any_other(tmp_path: Path) -> None:
    """One <unk> in thousands of words stays one token, and the text is still made of lower-case words."""
    _, words = _corpus(tmp_path, "The token <unk> stands for rare words.\n" + LINE * 1000)
    assert words[:9] == ["the", UNK, UNK, UNK, UNK, UNK, UNK, ".", "<eos>"]


def test_many_unknown_words_are_said(tmp_path: Path) -> None:
    """A perplexity over a text that is mostly <unk> looks better than it is."""
    rare, _ = _corpus(tmp_path, " ".join(map("".join, itertools.product("abcdefghij", repeat=3))))
    assert "100% / 100% / 100% of them are <unk>" in rare.description
    assert "of them are" not in _corpus(tmp_path, LINE * 100)[0].description


texts = st.lists(st.sampled_from(["a", "b", "c", "dd", EOS, UNK]), min_size=1, max_size=40)


def test_ids_go_by_falling_frequency_and_ties_by_the_alphabet() -> None:
    """The most frequent word has id 0; words seen equally often stand in alphabetical order."""
    assert Vocabulary.build(["b", "c", "a", "c", EOS]).words == ("c", EOS, "a", "b")


def test_rare_words_become_unk_and_give_it_their_frequency() -> None:
    """With min_count 2, three single words make <unk> as frequent as a word seen three times."""
    vocabulary = Vocabulary.build(["a", "a", "b", "c", "d", "e", "e", "e", "e"], min_count=2)
    assert vocabulary.words == ("e", UNK, "a")
    np.testing.assert_array_equal(vocabulary.encode(["d", "never seen", "a"]), [1, 1, 2])
    with pytest.raises(DataError, match="'zebra' is not in the vocabulary of 2 words"):
        Vocabulary.build(["a", "b"]).encode(["a", "zebra"])  # and there is no <unk>


@settings(deadline=None, max_examples=100)
@given(texts)
def test_encoding_round_trips(words: list[str]) -> None:
    """Every word of the text that made the vocabulary comes back, and id order is frequency order."""
    vocabulary = Vocabulary.build(words)
    ids = vocabulary.encode(words)
    assert ids.dtype == np.int32
    assert [vocabulary.words[number] for number in ids] == words
    assert len(vocabulary) == len(set(words))
    counts = Counter(words)
    frequencies = [counts[word] for word in vocabulary.words]
    assert frequencies == sorted(frequencies, reverse=True)
    assert all(word in vocabulary for word in words)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_unigram_perplexity_by_hand() -> None:
    """p = (1/2, 1/4, 1/4); the text (0, 1) has perplexity (1/2 * 1/4) ** (-1/2) = sqrt(8). Word 2 is unseen in
    (0, 0, 1), and there alone counts are smoothed: add-one gives it 1 / (3 + 3)."""
    assert unigram_perplexity(ids(0, 0, 1, 2), ids(0, 1), 3) == pytest.approx(math.sqrt(8))
    assert unigram_perplexity(ids(0, 0, 1), ids(2), 3) == pytest.approx(6.0)
    assert unigram_perplexity(ids(0, 0, 1), ids(1), 3) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Vocabulary(("a", "b", "a")), "'a' is repeated"),
        (lambda: Vocabulary.build(["a"], min_count=0), "min_count must be a positive integer, got 0"),
        (lambda: unigram_perplexity(ids(0), ids(), 1), "eval_ids must hold at least one token"),
        (lambda: unigram_perplexity(ids(0, 2), ids(0), 2), "train_ids must be from 0 to 1, got 0 to 2"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
