"""A text as samples for masked words and sentence order, each with a number (Lan et al. 2020, sections 3.1 and 4.1).

    text = MaskedText(corpus.train, corpus.vocabulary, seq_len=128, seed=0)
    text.sample(17)                                             # always the same sample
    text.batch(range(16))

Theory of operation. The text is cut once into *chunks*: sentences in a row, at least two, that together fill a sample,
none across the end of an article. An *epoch* is all chunks in an order of its own. Sample number i is chunk
`i % num_chunks` of epoch `i // num_chunks`, and what is done to it is drawn anew for every number, as in BERT's
(Devlin et al. 2019, appendix A.2) preparation of its data:

    tokens:    [CLS] first segment [SEP] second segment [SEP]      exactly seq_len, so there is no padding
    segments:    0         0         0         1          1

- the chunk is split between two of its sentences, and in half of the samples its two parts change places;
- the longer part then loses words, each at its front or its back, until the sample has its length. This comes after the
  swap, so that nothing but the words tells which part was first;
- `num_masked` of the words are to be predicted: 80 % of them become [MASK], 10 % any word, 10 % stay what they are.

Every sample has the same number of masked words, BERT's `max_predictions_per_seq`. A loss that is a mean over samples
is then a mean over words too, and gradients of small batches, weighted by their samples, are that of one large batch.

Where we depart from ALBERT: words are whole and are masked one by one, not in n-grams; no sample is shorter than the
others; masks differ from epoch to epoch.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from dmoe_jax.checks import check_positive
from dmoe_jax.data.vocabulary import EOS, Vocabulary

NUM_SPECIAL = 3
"""Tokens beside the words of the vocabulary: [CLS], [SEP] and [MASK], whose ids follow the last word's."""

MASKED_SHARE = 0.15
"""Share of the words of a sample that are to be predicted, unless another number is asked for."""

_TO_MASK, _TO_ANY = 0.8, 0.1
"""Shares of the words to be predicted that become [MASK], and that become any word."""

_SENTENCE_ENDS = (".", "!", "?", "。", "！", "？", "।", "؟", EOS)

# What a draw is for: the first word of its spawn key.
_ORDER, _SAMPLE = 0, 1


class SpecialIds(NamedTuple):
    """Ids of the tokens that are no words."""

    cls: int
    sep: int
    mask: int


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


def special_ids(vocabulary: Vocabulary) -> SpecialIds:
    """The ids behind those of the words; a model needs len(vocabulary) + NUM_SPECIAL rows."""
    first = len(vocabulary)
    return SpecialIds(cls=first, sep=first + 1, mask=first + 2)


def sentence_ends(ids: Int[np.ndarray, " words"], vocabulary: Vocabulary) -> Int[np.ndarray, " sentences"]:
    """Behind the last word of each sentence, ascending; the last one is the text's length.

    A sentence ends with a full stop, an exclamation or question mark (Chinese, Hindi and Arabic ones too) or the end of
    a line, or with several of them in a row. (An abbreviation's full stop ends one too: the text does not tell them
    apart.)
    """
    ends_one = np.isin(ids, [vocabulary.words.index(word) for word in _SENTENCE_ENDS if word in vocabulary])
    goes_on = np.append(ends_one[1:], False)
    return np.union1d(np.flatnonzero(ends_one & ~goes_on) + 1, [ids.size])


class MaskedText:
    """The samples of a text, by number. Reading one changes nothing; the same arguments give the same samples.

    Peers that give the same seed share one numbering: different numbers of an epoch are of different parts of the text.
    Peers with different seeds draw independently of each other.
    """

    def __init__(
        self,
        ids: Int[np.ndarray, " words"],
        vocabulary: Vocabulary,
        *,
        seq_len: int,
        num_masked: int | None = None,
        article_starts: Int[np.ndarray, " articles"] | Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        """Cut the text into chunks; the words are not copied.

        Args:
          ids: the text; it is kept, and must not change.
          vocabulary: the words behind the ids.
          seq_len: tokens of a sample, [CLS] and two [SEP] included; at least 5.
          num_masked: words of each sample to be predicted; None: 15 % of its seq_len - 3 words, at least one.
          article_starts: where articles begin, so that no sample has a part in two of them (for WikiText:
            `dmoe_jax.inspection.word_classes.article_starts`); the text begins one in any case.
          seed: decides the order of each epoch, the splits, the swaps and the masks; not negative.

        Raises:
          ValueError: a value is outside what is said here, or an id is outside the vocabulary, or no article has two
            sentences with seq_len - 3 words together.
        """
        check_positive(seq_len=seq_len)
        num_words = seq_len - 3
        if num_words < 2:
            raise ValueError(f"seq_len must be at least 5: [CLS], a word, [SEP], a word, [SEP]; got {seq_len}")
        num_masked = max(1, round(MASKED_SHARE * num_words)) if num_masked is None else num_masked
        check_positive(num_masked=num_masked)
        if num_masked > num_words:
            raise ValueError(f"num_masked must be at most the {num_words} words of a sample, got {num_masked}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        if ids.size and not 0 <= ids.min() <= ids.max() < len(vocabulary):
            raise ValueError(f"ids must be from 0 to {len(vocabulary) - 1}, got {ids.min()} to {ids.max()}")
        starts = np.union1d([0], np.asarray(article_starts, np.int64))
        if starts[0] < 0 or starts[-1] >= max(1, ids.size):
            raise ValueError(f"article_starts must be from 0 to {ids.size - 1}, got {starts[0]} to {starts[-1]}")
        ends = np.union1d(sentence_ends(ids, vocabulary), starts[1:])
        self._chunks = _cut(ends, np.append(starts[1:], ids.size), num_words)
        if not self._chunks:
            raise ValueError(
                f"the text must have two sentences in a row with {num_words} words together (seq_len - 3), within one "
                f"article; got {ids.size} words in {ends.size} sentences and {starts.size} articles"
            )
        self._ids, self._ends, self._seed = ids, ends, seed
        self._num_words, self._num_masked = num_words, num_masked
        self._special = special_ids(vocabulary)

    @property
    def num_chunks(self) -> int:
        """Samples in an epoch."""
        return len(self._chunks)

    @property
    def vocab_size(self) -> int:
        """Ids that a sample may hold: the words and the special tokens."""
        return self._special.mask + 1

    def sample(self, number: int) -> MaskedBatch:
        """The sample of this number, from 0 without end: its arrays have no axis for a batch.

        Raises:
          ValueError: the number is negative.
        """
        if number < 0:
            raise ValueError(f"the number of a sample must not be negative, got {number}")
        epoch, place = divmod(number, self.num_chunks)
        first, last = self._chunks[_epoch_order(self._seed, epoch, self.num_chunks)[place]]
        rng = _stream(self._seed, _SAMPLE, number)
        boundary = int(self._ends[rng.randint(first, last)])
        begin, end = 0 if first == 0 else int(self._ends[first - 1]), int(self._ends[last])
        parts, swapped = [(begin, boundary), (boundary, end)], rng.randint(2)
        left, right = _truncate(parts[swapped], parts[1 - swapped], self._num_words, rng)
        tokens = np.concatenate(
            [
                [self._special.cls],
                self._ids[slice(*left)],
                [self._special.sep],
                self._ids[slice(*right)],
                [self._special.sep],
            ]
        ).astype(np.int32)
        second = 2 + left[1] - left[0]  # behind [CLS], the first segment and its [SEP]
        positions = 1 + np.sort(rng.choice(self._num_words, self._num_masked, replace=False))
        positions += positions >= second - 1  # the words of the second segment stand behind a [SEP]
        targets = tokens[positions]
        tokens[positions] = self._masked(targets, rng)
        return MaskedBatch(
            tokens=tokens,
            segments=(np.arange(tokens.size) >= second).astype(np.int32),
            positions=positions.astype(np.int32),
            targets=targets,
            swapped=np.array(swapped, np.int32),
        )

    def batch(self, numbers: Iterable[int]) -> MaskedBatch:
        """The samples of these numbers, in this order.

        Raises:
          ValueError: there is none, or one is negative.
        """
        samples = [self.sample(number) for number in numbers]
        if not samples:
            raise ValueError("a batch must have at least one sample, got no number")
        return MaskedBatch(*map(np.stack, zip(*samples, strict=True)))

    def _masked(self, words: Int32[np.ndarray, " masked"], rng: np.random.RandomState) -> Int[np.ndarray, " masked"]:
        """Return the tokens that are read in the place of words that are to be predicted."""
        chance = rng.random_sample(words.size)
        others = rng.randint(self._special.cls, size=words.size)
        shown = np.where(chance < _TO_MASK + _TO_ANY, others, words)
        return np.where(chance < _TO_MASK, self._special.mask, shown)


def _stream(seed: int, purpose: int, number: int) -> np.random.RandomState:
    """A stream of chance of its own. `RandomState` because NumPy has promised that its methods will draw the same in
    every version: peers must agree on what a number means."""
    return np.random.RandomState(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(purpose, number))))


@functools.lru_cache(maxsize=16)
def _epoch_order(seed: int, epoch: int, num_chunks: int) -> Int[np.ndarray, " chunks"]:
    order = _stream(seed, _ORDER, epoch).permutation(num_chunks)
    order.flags.writeable = False
    return order


def _cut(
    ends: Int[np.ndarray, " sentences"], article_ends: Int[np.ndarray, " articles"], num_words: int
) -> list[tuple[int, int]]:
    """Chunks one behind the other: the numbers of their first and last sentence.

    Each takes as many sentences as it needs for num_words, at least two. What is left of an article behind its last
    chunk is left out.
    """
    chunks = []
    begin = first = 0
    for article_end in article_ends:
        while True:
            last = max(first + 1, int(np.searchsorted(ends, begin + num_words)))
            if last >= ends.size or ends[last] > article_end:
                break
            chunks.append((first, last))
            begin, first = int(ends[last]), last + 1
        begin, first = int(article_end), int(np.searchsorted(ends, article_end)) + 1
    return chunks


def _truncate(
    left: tuple[int, int], right: tuple[int, int], num_words: int, rng: np.random.RandomState
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Two ranges of the text with num_words together: the longer one loses words, then both in turn.

    Each word is lost at the front or at the back of its segment, by chance: as BERT does, one after the other.
    """
    lengths = left[1] - left[0], right[1] - right[0]
    kept = min(lengths[0], max(num_words - lengths[1], -(-num_words // 2)))
    cut = []
    for (begin, end), keep in ((left, kept), (right, num_words - kept)):
        lost_in_front = int(rng.binomial(end - begin - keep, 0.5))
        cut.append((begin + lost_in_front, begin + lost_in_front + keep))
    return cut[0], cut[1]
