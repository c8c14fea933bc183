"""Masked words and sentence order: what a number names, what is masked how often, nothing that gives labels away."""

import itertools
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmoe_jax.data.corpora import load_corpus
from dmoe_jax.data.vocabulary import EOS, Vocabulary
from dmoe_jax.inspection.word_classes import article_starts
from experiments.collaborative.masked_text import (
    NUM_SPECIAL,
    MaskedBatch,
    MaskedText,
    sentence_ends,
    special_ids,
)

NUM_PLACES = 4000
PLACES = Vocabulary((".", *(f"w{place}" for place in range(1, NUM_PLACES))))
"""Word `w7`, id 7, stands at place 6 only, so that a sample shows where its words come from; id 0 is the full stop."""
SPECIAL = special_ids(PLACES)


def text_of_places(sentence_lengths: list[int]) -> np.ndarray:
    """Word i + 1 at place i, but a full stop at the end of each sentence."""
    ids = np.arange(1, 1 + sum(sentence_lengths), dtype=np.int32)
    ids[np.cumsum(sentence_lengths) - 1] = 0
    return ids


LENGTHS = np.random.default_rng(0).integers(2, 12, 500).tolist()
TEXT = text_of_places(LENGTHS)


def unmasked(sample: MaskedBatch) -> np.ndarray:
    """The tokens with the masked words put back."""
    tokens = sample.tokens.copy()
    tokens[sample.positions] = sample.targets
    return tokens


def parts_of(sample: MaskedBatch) -> tuple[np.ndarray, np.ndarray]:
    """The words of the two segments, masked words put back."""
    tokens = unmasked(sample)
    return tokens[sample.segments == 0][1:-1], tokens[sample.segments == 1][:-1]


def places_of(words: np.ndarray) -> tuple[int, int]:
    """The range of the text that these words are, by the first among them that stands at one place only."""
    known = np.flatnonzero(words)
    begin = int(words[known[0]] - 1 - known[0])
    return begin, begin + words.size


def test_sentences_end_at_full_stops_and_lines() -> None:
    """Several ends in a row are one end; what no end follows is the last sentence."""
    vocabulary = Vocabulary((".", EOS, "?", "a", "b"))
    words = f"a b . {EOS} {EOS} b ? a a {EOS} b".split()
    np.testing.assert_array_equal(sentence_ends(vocabulary.encode(words), vocabulary), [5, 7, 10, 11])
    words = ["a", "."]
    np.testing.assert_array_equal(sentence_ends(vocabulary.encode(words), vocabulary), [2])


def test_a_sample_by_hand() -> None:
    """Two sentences of three and four words fill a sample of ten tokens: only order and mask are left to chance."""
    text = MaskedText(text_of_places([3, 4]), PLACES, seq_len=10, num_masked=2)
    assert text.num_chunks == 1
    seen = set()
    for number in range(20):
        sample = text.sample(number)
        cls, sep, _ = SPECIAL
        expected = [cls, 4, 5, 6, 0, sep, 1, 2, 0, sep] if sample.swapped else [cls, 1, 2, 0, sep, 4, 5, 6, 0, sep]
        np.testing.assert_array_equal(unmasked(sample), expected)
        np.testing.assert_array_equal(
            sample.segments, [0] * (6 if sample.swapped else 5) + [1] * (4 if sample.swapped else 5)
        )
        assert np.isin(sample.positions, np.flatnonzero(np.array(expected) < SPECIAL.cls)).all()
        seen.add(int(sample.swapped))
    assert seen == {0, 1}


def test_shapes_and_types() -> None:
    """Every sample has the same shapes, with 15 % of its words masked; a batch has them stacked."""
    text = MaskedText(TEXT, PLACES, seq_len=43)
    batch = text.batch(range(5))
    assert [each.shape for each in batch] == [(5, 43), (5, 43), (5, 6), (5, 6), (5,)]
    assert {each.dtype for each in batch} == {np.dtype(np.int32)}
    assert text.vocab_size == len(PLACES) + NUM_SPECIAL
    for row in range(5):
        for ours, theirs in zip(text.sample(row), batch, strict=True):
            np.testing.assert_array_equal(ours, theirs[row])


def test_labels_say_which_segment_came_first() -> None:
    """The segments are two parts of one chunk that do not overlap; the label is 1 where the second one is earlier."""
    text = MaskedText(TEXT, PLACES, seq_len=33, seed=3)
    swapped = []
    for number in range(400):
        sample = text.sample(number)
        left, right = map(places_of, parts_of(sample))
        earlier, later = sorted((left, right))
        assert earlier[1] <= later[0]
        assert sample.swapped == (right < left)
        swapped.append(int(sample.swapped))
    # Binomial(400, 1/2): standard deviation 10.
    assert 160 < sum(swapped) < 240


def test_lengths_do_not_give_the_order_away() -> None:
    """Words are cut off after the swap: how long a segment is and how it ends says nothing of the order.

    All sentences have seven words and a sample has 29, five sentences: a chunk is five sentences whose two parts have
    7 k and 35 - 7 k words. So every statistic of a segment must be distributed alike for both labels.
    """
    text = MaskedText(text_of_places([7] * 571), PLACES, seq_len=32, seed=1)
    lengths: dict[int, list[int]] = {0: [], 1: []}
    full_stops: dict[int, list[bool]] = {0: [], 1: []}
    for number in range(2000):
        sample = text.sample(number)
        first, second = parts_of(sample)
        assert first.size + second.size == 29
        lengths[int(sample.swapped)].append(first.size)
        full_stops[int(sample.swapped)].append(bool(first[-1] == 0))
    # Lengths of 7, 14, 15 and 22 with a quarter each: standard deviation 5.3, of a difference of means of 1000 0.24.
    assert abs(np.mean(lengths[0]) - np.mean(lengths[1])) < 1.0
    assert set(lengths[0]) == set(lengths[1]) == {7, 14, 15, 22}
    # Shares of about 1000 each: standard deviation of the difference at most 0.022.
    assert abs(np.mean(full_stops[0]) - np.mean(full_stops[1])) < 0.09


def test_masking_statistics() -> None:
    """Of 30,000 masked words 80 % show [MASK], 10 % any word, 10 % themselves; no other word changes."""
    text = MaskedText(TEXT, PLACES, seq_len=103, num_masked=15, seed=5)
    shown, targets, where = [], [], []
    for number in range(2000):
        sample = text.sample(number)
        assert (np.diff(sample.positions) > 0).all()
        assert (sample.targets < SPECIAL.cls).all()
        shown.append(sample.tokens[sample.positions])
        targets.append(sample.targets)
        where.append(sample.positions)
        # What is not masked is the text: special tokens at their places, words in the order of the text.
        boundary = int(np.flatnonzero(sample.segments)[0])
        np.testing.assert_array_equal(np.flatnonzero(unmasked(sample) >= SPECIAL.cls), [0, boundary - 1, 102])
        for part in parts_of(sample):
            begin, end = places_of(part)
            np.testing.assert_array_equal(part, TEXT[begin:end])
    all_shown, all_targets = np.concatenate(shown), np.concatenate(targets)
    masked, kept = np.mean(all_shown == SPECIAL.mask), np.mean(all_shown == all_targets)
    # Standard deviations 0.0023 and 0.0017; kept has 0.1 / 4000 by chance from the random words.
    assert masked == pytest.approx(0.8, abs=0.01)
    assert kept == pytest.approx(0.1, abs=0.008)
    others = all_shown[(all_shown != SPECIAL.mask) & (all_shown != all_targets)]
    assert others.size / all_shown.size == pytest.approx(0.1, abs=0.008)
    assert others.max() < SPECIAL.cls
    # Uniform over the vocabulary: mean 2000, standard deviation of the mean of 3000 about 21.
    assert others.mean() == pytest.approx(2000, abs=100)
    # Uniform over the words of a sample: places 1 to 101 (one of them is [SEP]), mean about 51, deviation 0.17.
    assert np.concatenate(where).mean() == pytest.approx(51, abs=1)


def test_a_number_names_its_sample() -> None:
    """A sample depends on the seed and its number alone, in whatever order and by whatever object it is read."""
    text, again = (MaskedText(TEXT, PLACES, seq_len=23, seed=7) for _ in range(2))
    forwards = [text.sample(number) for number in range(2 * text.num_chunks)]
    for number in reversed(range(2 * text.num_chunks)):
        for ours, theirs in zip(forwards[number], again.sample(number), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    other = MaskedText(TEXT, PLACES, seq_len=23, seed=8)
    assert sum(np.array_equal(other.sample(n).tokens, forwards[n].tokens) for n in range(50)) == 0


def test_the_numbering_is_a_promise() -> None:
    """Sample 5 of seed 0, for good: peers with other versions of this code or of NumPy must mean the same.

    Golden: taken from the first version. Whoever changes it splits collaborations that are under way.
    """
    sample = MaskedText(text_of_places([4] * 30), PLACES, seq_len=11, num_masked=2).sample(5)
    assert sample.tokens.tolist() == [4000, 117, 118, 119, 0, 4001, 113, 114, 4002, 4002, 4001]
    assert (sample.positions.tolist(), sample.targets.tolist(), int(sample.swapped)) == ([8, 9], [115, 0], 1)


def test_an_epoch_reads_every_chunk_once() -> None:
    """The samples of an epoch are disjoint parts of the text; the next epoch has them in another order."""
    text = MaskedText(TEXT, PLACES, seq_len=23)
    epochs = []
    for epoch in range(2):
        starts = []
        read: list[int] = []
        for number in range(epoch * text.num_chunks, (epoch + 1) * text.num_chunks):
            ranges = [range(*places_of(part)) for part in parts_of(text.sample(number))]
            read += itertools.chain(*ranges)
            starts.append(min(ranges, key=lambda each: each.start).start)
        assert len(read) == len(set(read)) == 20 * text.num_chunks
        epochs.append(starts)
    # A chunk is cut anew in each epoch, so its place is known to a few words only: compare ranks.
    first, second = (np.argsort(np.argsort(starts)) for starts in epochs)
    assert np.mean(first == second) < 0.1
    # Little is left out: chunks have 20 words and up to one sentence, of 2 to 11 words, more.
    assert text.num_chunks > TEXT.size / 32


def test_no_sample_reaches_into_another_article() -> None:
    """Chunks end where articles do, also where an article begins in the middle of a sentence."""
    starts = [0, 333, 800, 801, 1500, 2222]
    text = MaskedText(TEXT, PLACES, seq_len=23, article_starts=starts)
    for number in range(text.num_chunks):
        ranges = [places_of(part) for part in parts_of(text.sample(number))]
        assert (
            len({int(np.searchsorted(starts, place, side="right")) for r in ranges for place in (r[0], r[1] - 1)}) == 1
        )
    without = MaskedText(TEXT, PLACES, seq_len=23)
    assert without.num_chunks - 5 <= text.num_chunks <= without.num_chunks


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=40),
    seq_len=st.integers(5, 40),
    number=st.integers(0, 10**9),
    seed=st.integers(0, 2**40),
)
def test_any_text_that_is_long_enough(lengths: list[int], seq_len: int, number: int, seed: int) -> None:
    """Samples of odd texts have their length, two segments that are not empty, and words of the text alone."""
    ids = text_of_places(lengths)
    if ids.size < seq_len - 3 or len(sentence_ends(ids, PLACES)) < 2:
        with pytest.raises(ValueError, match="two sentences in a row"):
            MaskedText(ids, PLACES, seq_len=seq_len, seed=seed)
        return
    text = MaskedText(ids, PLACES, seq_len=seq_len, seed=seed)
    sample = text.sample(number)
    assert sample.tokens.size == seq_len
    first, second = parts_of(sample)
    assert first.size > 0
    assert second.size > 0
    strings = [bytes(part.astype(np.int32)) for part in (first, second)]
    assert all(string in bytes(ids) for string in strings)


def test_wrong_arguments_are_refused() -> None:
    """Each with the value and what was expected."""
    for options, message in (
        ({"seq_len": 4}, "seq_len must be at least 5.*got 4"),
        ({"seq_len": 23, "num_masked": 21}, "at most the 20 words of a sample, got 21"),
        ({"seq_len": 23, "num_masked": 0}, "num_masked must be a positive integer, got 0"),
        ({"seq_len": 23, "seed": -1}, "seed must not be negative, got -1"),
        ({"seq_len": 23, "article_starts": [TEXT.size]}, f"article_starts must be from 0 to {TEXT.size - 1}"),
        ({"seq_len": TEXT.size + 4}, "must have two sentences in a row with .* words together"),
    ):
        with pytest.raises(ValueError, match=message):
            MaskedText(TEXT, PLACES, **options)
    with pytest.raises(ValueError, match="ids must be from 0 to 3999, got 0 to 4000"):
        MaskedText(np.array([0, 4000]), PLACES, seq_len=5)
    text = MaskedText(TEXT, PLACES, seq_len=23)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        text.sample(-1)
    with pytest.raises(ValueError, match="at least one sample"):
        text.batch([])


@pytest.mark.skipif("DMOE_DATA" not in os.environ, reason="DMOE_DATA is not set")
def test_wikitext_2() -> None:
    """The validation text of 217,646 words: 60 articles, whose samples of 64 tokens hold most of the words."""
    corpus = load_corpus(source="wikitext-2")
    starts = article_starts(corpus.valid, corpus.vocabulary)
    text = MaskedText(corpus.valid, corpus.vocabulary, seq_len=64, article_starts=starts)
    assert starts.size == 60
    assert text.vocab_size == 33_281
    assert 0.75 < text.num_chunks * 61 / corpus.valid.size < 1
    batch = text.batch(range(64))
    cls, sep, _ = special_ids(corpus.vocabulary)
    assert (batch.tokens[:, 0] == cls).all()
    assert (np.sum(batch.tokens == sep, axis=1) == 2).all()
    assert batch.targets.shape == (64, 9)
