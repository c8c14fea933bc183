"""Words, ids and the unigram baseline."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmoe_jax.data import DataError
from dmoe_jax.data.vocabulary import EOS, UNK, Vocabulary, unigram_perplexity

texts = st.lists(st.sampled_from(["a", "b", "c", "dd", EOS, UNK]), min_size=1, max_size=40)


def test_ids_go_by_falling_frequency_and_ties_by_the_alphabet() -> None:
    """The most frequent word has id 0; words seen equally often stand in alphabetical order."""
    assert Vocabulary.build(["b", "c", "a", "c", EOS]).words == ("c", EOS, "a", "b")


def test_rare_words_become_unk_and_give_it_their_frequency() -> None:
    """With min_count 2, three single words make <unk> as frequent as a word seen three times."""
    vocabulary = Vocabulary.build(["a", "a", "b", "c", "d", "e", "e", "e", "e"], min_count=2)
    assert vocabulary.words == ("e", UNK, "a")
    np.testing.assert_array_equal(vocabulary.encode(["d", "never seen", "a"]), [1, 1, 2])


def test_a_stranger_needs_unk() -> None:
    """Without <unk> a word outside the vocabulary is an error that names it."""
    with pytest.raises(DataError, match="'zebra' is not in the vocabulary of 2 words"):
        Vocabulary.build(["a", "b"]).encode(["a", "zebra"])


def test_wrong_arguments_are_named() -> None:
    """Repeated words and a min_count of zero are refused."""
    with pytest.raises(ValueError, match="'a' is repeated"):
        Vocabulary(("a", "b", "a"))
    with pytest.raises(ValueError, match="min_count must be a positive integer, got 0"):
        Vocabulary.build(["a"], min_count=0)


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
    """p = (1/2, 1/4, 1/4); the text (0, 1) has perplexity (1/2 * 1/4) ** (-1/2) = sqrt(8)."""
    assert unigram_perplexity(ids(0, 0, 1, 2), ids(0, 1), 3) == pytest.approx(math.sqrt(8))


def test_unigram_perplexity_smooths_only_for_unseen_words() -> None:
    """Word 2 is unseen in (0, 0, 1): add-one gives it 1 / (3 + 3)."""
    assert unigram_perplexity(ids(0, 0, 1), ids(2), 3) == pytest.approx(6.0)
    assert unigram_perplexity(ids(0, 0, 1), ids(1), 3) == pytest.approx(3.0)


def test_unigram_perplexity_checks_its_arguments() -> None:
    """An empty text has no perplexity, and ids must fit the vocabulary."""
    with pytest.raises(ValueError, match="eval_ids must hold at least one token"):
        unigram_perplexity(ids(0), ids(), 1)
    with pytest.raises(ValueError, match="train_ids must be from 0 to 1, got 0 to 2"):
        unigram_perplexity(ids(0, 2), ids(0), 2)
