"""Masked words and segment order: what a number names, what is masked how often, nothing that gives labels away."""

import numpy as np
import pytest

from experiments.collaborative.masked_text import MaskedBatch, MaskedText

NUM_WORDS = 4000
TEXT = np.arange(NUM_WORDS, dtype=np.int32)
"""Word i stands at place i only, so that a sample shows where its words come from."""
CLS, SEP, MASK = range(NUM_WORDS, NUM_WORDS + 3)


def unmasked(sample: MaskedBatch) -> list[int]:
    """The tokens with the masked words put back."""
    tokens = sample.tokens.copy()
    tokens[sample.positions] = sample.targets
    return tokens.tolist()


def test_a_sample_by_hand() -> None:
    """Seven words fill a sample of ten tokens: only order and mask are left to chance, and segments tell neither."""
    text, seen = MaskedText(TEXT[:7], vocab_size=NUM_WORDS + 3, seq_len=10), set()
    for number in range(20):
        sample = text.sample(number)
        words = [4, 5, 6, 0, 1, 2, 3] if sample.swapped else list(range(7))
        assert unmasked(sample) == [CLS, *words[:3], SEP, *words[3:], SEP]
        assert sample.segments.tolist() == [0] * 5 + [1] * 5
        seen.add(int(sample.swapped))
    assert seen == {0, 1}
    with pytest.raises(ValueError, match="from 5 to the 7 words of the text and 3, got 11"):
        MaskedText(TEXT[:7], vocab_size=NUM_WORDS + 3, seq_len=11)


def test_masking_statistics() -> None:
    """80 % of 30,000 masked words show [MASK], 10 % any word, 10 % themselves; no other word changes."""
    text = MaskedText(TEXT, vocab_size=NUM_WORDS + 3, seq_len=103, seed=5)
    batch = text.batch(range(2000))
    assert (np.diff(batch.positions) > 0).all()
    assert (batch.targets < CLS).all()
    for row in range(0, 2000, 50):
        sample = MaskedBatch(*(each[row] for each in batch))
        first, second = unmasked(sample)[1:51], unmasked(sample)[52:102]
        begin = min(first[0], second[0])
        halves = [list(range(begin, begin + 50)), list(range(begin + 50, begin + 100))]
        assert [first, second] == (halves[::-1] if sample.swapped else halves)
    shown = np.take_along_axis(batch.tokens, batch.positions, 1)
    # Standard deviations 0.0023 and 0.0017; kept has 0.1 / 4000 by chance from the random words.
    assert np.mean(shown == MASK) == pytest.approx(0.8, abs=0.01)
    assert np.mean(shown == batch.targets) == pytest.approx(0.1, abs=0.008)
    others = shown[(shown != MASK) & (shown != batch.targets)]
    assert others.max() < CLS
    # Uniform over the vocabulary: mean 2000, standard deviation of the mean of 3000 about 21.
    assert others.mean() == pytest.approx(2000, abs=100)
    # Uniform over the words of a sample: places 1 to 101 (one of them is [SEP]), mean 51, deviation 0.17.
    assert batch.positions.mean() == pytest.approx(51, abs=1)
