"""A text as samples for masked words and segment order, each with a number (Lan et al. 2020, sections 3.1 and 4.1).

    text = MaskedText(ids, vocab_size=1003, seq_len=32, seed=0)
    text.batch(range(16))                                       # always the same samples

Each has words in a row from a place of the text that is drawn by chance, in two parts, which change places in half of
the samples. As in BERT's (Devlin et al. 2019, appendix A.2) preparation of its data, 15 % of the words are to be
predicted: 80 % of them become [MASK], 10 % any word, 10 % stay what they are.

    tokens:    [CLS] first segment [SEP] second segment [SEP]      exactly seq_len, so there is no padding
    segments:    0         0         0         1          1

The first segment is as long in all samples, so that nothing but the words tells which part was first. All have as many
masked words, so that gradients of small batches, weighted by their samples, are that of one large batch. Unlike
ALBERT's, words are whole and are masked one by one, and parts do not end with a sentence.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32

NUM_SPECIAL = 3
"""Tokens beside the words, whose ids follow the last word's: [CLS], [SEP] and [MASK]."""

_MASKED_SHARE = 0.15
_TO_MASK, _TO_ANY = 0.8, 0.1
"""Shares of the words to be predicted that become [MASK], and that become any word."""


class MaskedBatch(NamedTuple):
    """Samples to read and what is to be told of them; of one sample, without the first axis.

    Attributes:
      tokens: what is read, masked.
      segments: 0 for the first segment with its [CLS] and [SEP], 1 for the second with its [SEP].
      positions: the places of the masked words, ascending.
      targets: the words that stood there.
      swapped: 1 where the second segment came before the first one in the text, else 0.
    """

    tokens: Int32[np.ndarray, "*batch seq"]
    segments: Int32[np.ndarray, "*batch seq"]
    positions: Int32[np.ndarray, "*batch masked"]
    targets: Int32[np.ndarray, "*batch masked"]
    swapped: Int32[np.ndarray, "*batch"]


class MaskedText:
    """The samples of a text, by number. The same arguments give the same samples.

    Args:
      ids: the text; it is kept, and must not change.
      vocab_size: of words and special tokens.
      seq_len: tokens of a sample, [CLS] and two [SEP] included; at least 5.
      seed: decides the places, the swaps and the masks.

    Raises:
      ValueError: seq_len is too small, or the text has fewer than seq_len - 3 words.
    """

    def __init__(self, ids: Int[np.ndarray, " words"], *, vocab_size: int, seq_len: int, seed: int = 0) -> None:
        if not 5 <= seq_len <= ids.size + 3:
            raise ValueError(f"seq_len must be from 5 to the {ids.size} words of the text and 3, got {seq_len}")
        self.cls, self.sep, self.mask = range(vocab_size - NUM_SPECIAL, vocab_size)
        self._ids, self._seed, self._num_words = ids, seed, seq_len - 3
        self._num_masked = max(1, round(_MASKED_SHARE * self._num_words))

    def sample(self, number: int) -> MaskedBatch:
        """Return the sample of this number, from 0 without end: its arrays have no axis for a batch."""
        rng = np.random.default_rng([self._seed, number])
        begin, swapped = rng.integers(self._ids.size - self._num_words + 1), rng.integers(2)
        words, length = self._ids[begin : begin + self._num_words], self._num_words // 2
        if swapped:
            words = np.roll(words, length)
        tokens = np.array([self.cls, *words[:length], self.sep, *words[length:], self.sep], np.int32)
        places = np.flatnonzero(tokens < self.cls)
        positions = np.sort(rng.choice(places, self._num_masked, replace=False))
        targets = tokens[positions]
        tokens[positions] = self._masked(targets, rng)
        return MaskedBatch(
            tokens=tokens,
            segments=(np.arange(tokens.size) >= length + 2).astype(np.int32),
            positions=positions.astype(np.int32),
            targets=targets,
            swapped=np.array(swapped, np.int32),
        )

    def batch(self, numbers: Iterable[int]) -> MaskedBatch:
        """Return the samples of these numbers, one or more, in this order."""
        return MaskedBatch(*map(np.stack, zip(*(self.sample(number) for number in numbers), strict=True)))

    def _masked(self, words: Int32[np.ndarray, " masked"], rng: np.random.Generator) -> Int[np.ndarray, " masked"]:
        """Return the tokens that are read in the place of words that are to be predicted."""
        chance = rng.random(words.size)
        others = rng.integers(self.cls, size=words.size)
        shown = np.where(chance < _TO_MASK + _TO_ANY, others, words)
        return np.where(chance < _TO_MASK, self.mask, shown)
