"""Words as integers, and the simplest model of them: the unigram baseline."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import SupportsIndex

import numpy as np
from jaxtyping import Int, Int32

from dmoe_jax.checks import check_positive
from dmoe_jax.data.files import DataError
from dmoe_jax.data.words import UNK, cut_words, join_words


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The words that a model knows; a word's id is its place in `words`.

    Ids go by falling frequency, ties by the alphabet, so that they do not depend on the order of the text's articles.

    Attributes:
      is_tokenised: True if texts are made into words already, to be split at spaces; see `data.words`.
    """

    words: tuple[str, ...]
    is_tokenised: bool = False
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ids", {word: index for index, word in enumerate(self.words)})
        if len(self._ids) != len(self.words):
            repeated = next(word for word, count in Counter(self.words).items() if count > 1)
            raise ValueError(f"the words of a vocabulary must differ, {repeated!r} is repeated")

    @property
    def meaning(self) -> str:
        """Meaning of the ids, as one fact to compare."""
        digest = hashlib.sha256("\n".join(self.words).encode()).hexdigest()[:16]
        return f"vocabulary: {len(self):,} words, {digest}"

    @classmethod
    def build(cls, words: Iterable[str], *, min_count: int = 1, is_tokenised: bool = False) -> "Vocabulary":
        """The vocabulary of a training text.

        Args:
          words: the text, `<eos>` included.
          min_count: words seen fewer times are left out; `<unk>` takes their place and their frequency.
          is_tokenised: True if the text was made into words by others.
        """
        check_positive(min_count=min_count)
        counts = Counter(words)
        rare = [word for word, count in counts.items() if count < min_count and word != UNK]
        if rare:
            counts[UNK] += sum(counts.pop(word) for word in rare)
        return cls(tuple(sorted(counts, key=lambda word: (-counts[word], word))), is_tokenised)

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._ids

    def encode(self, words: Sequence[str]) -> Int32[np.ndarray, " tokens"]:
        """The ids of `words`. A word outside the vocabulary becomes `<unk>`.

        Raises:
          DataError: naming the first such word, when the vocabulary has no `<unk>`.
        """
        unk = self._ids.get(UNK)
        if unk is None:
            stranger = next((word for word in words if word not in self._ids), None)
            if stranger is not None:
                raise DataError(f"{stranger!r} is not in the vocabulary of {len(self)} words, which has no {UNK}")
        get = self._ids.get
        return np.fromiter((get(word, unk) for word in words), dtype=np.int32, count=len(words))

    def encode_text(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """The ids of a text's words, with `<eos>` where a line ends; a last line without a line feed has none.

        Raises:
          DataError: as of `encode`.
        """
        return self.encode(cut_words(text, is_tokenised=self.is_tokenised))

    def decode(self, ids: Sequence[int] | Int[np.ndarray, " tokens"]) -> str:
        """The words of these ids with spaces between them, and a line feed for each `<eos>`."""
        return join_words(self.words[number] for number in ids)

    def piece(self, number: SupportsIndex) -> str:
        """The word of one id."""
        return self.words[number]


def unigram_perplexity(
    train_ids: Int[np.ndarray, " train"], eval_ids: Int[np.ndarray, " eval"], vocab_size: int
) -> float:
    """Perplexity, on one text, of the model that knows nothing but the word frequencies of the training text.

    p(w) = count_train(w) / N_train (maximum likelihood); perplexity = exp(-mean over the evaluation text of log p(w)).
    If the evaluation text has a word that the training text lacks, that would be infinite; then, and only then, every
    count is raised by one (Laplace): p(w) = (count_train(w) + 1) / (N_train + vocab_size). On WikiText-2 it is 965.09
    on validation and 911.71 on test, `<eos>` counted. A model above it has learnt nothing that depends on context.

    Raises:
      ValueError: an empty text, or an id outside the vocabulary.
    """
    for name, ids in (("train_ids", train_ids), ("eval_ids", eval_ids)):
        if ids.size == 0:
            raise ValueError(f"{name} must hold at least one token, got none")
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError(f"{name} must be from 0 to {vocab_size - 1}, got {ids.min()} to {ids.max()}")
    train_counts = np.bincount(train_ids, minlength=vocab_size).astype(np.float64)
    eval_counts = np.bincount(eval_ids, minlength=vocab_size)
    seen = eval_counts > 0
    if np.any(train_counts[seen] == 0):
        train_counts += 1
    log_probs = np.log(train_counts[seen] / train_counts.sum())
    return float(np.exp(-np.sum(eval_counts[seen] * log_probs) / eval_ids.size))
