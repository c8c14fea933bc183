"""The pieces of a tokenizer as a vocabulary: its own ids, numbered anew by how often the training text has them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import SupportsIndex

import numpy as np
from jaxtyping import Int, Int32

from dmoe_jax.data.files import DataError
from dmoe_jax.data.tokenizers import Tokenizer
from dmoe_jax.data.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PieceVocabulary:
    """All pieces of a tokenizer. A text has the same pieces whatever it was trained on; their ids follow the training.

    Attributes:
      tokenizer: cuts texts into pieces, by ids of its own.
      order: the tokenizer's id of each piece, by falling frequency in the training text, ties by that id; pieces that
        it does not have are last.
    """

    tokenizer: Tokenizer
    order: Int32[np.ndarray, " vocab"]
    words: tuple[str, ...] = field(init=False, repr=False)
    """The pieces by their ids, as the tokenizer's table has them: "▁the", or "Ġthe" for one with a space before it."""
    _numbers: Int32[np.ndarray, " own"] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not np.array_equal(np.sort(self.order), self.tokenizer.own_ids):
            raise ValueError(
                f"the order must have each of the tokenizer's {self.tokenizer.own_ids.size:,} ids once, "
                f"got {self.order.size:,} ids"
            )
        numbers = np.full(self.order.max() + 1, -1, np.int32)
        numbers[self.order] = np.arange(self.order.size)
        object.__setattr__(self, "_numbers", numbers)
        object.__setattr__(self, "words", tuple(map(self.tokenizer.piece, self.order.tolist())))

    @classmethod
    def build(cls, tokenizer: Tokenizer, train: Int32[np.ndarray, " train"]) -> "PieceVocabulary":
        """The vocabulary of a training text, given by the tokenizer's own ids."""
        own = tokenizer.own_ids
        counts = np.bincount(train, minlength=int(own.max()) + 1)[own]
        return cls(tokenizer=tokenizer, order=own[np.argsort(-counts, kind="stable")])

    @property
    def meaning(self) -> str:
        """Meaning of the ids, as one fact to compare: the tokenizer's file and the order."""
        digest = hashlib.sha256(self.tokenizer.sha256.encode() + self.order.astype("<i4").tobytes()).hexdigest()[:16]
        return f"vocabulary: {len(self):,} pieces, {digest}"

    def __len__(self) -> int:
        return self.order.size

    def numbered(self, own_ids: Int32[np.ndarray, " tokens"]) -> Int32[np.ndarray, " tokens"]:
        """The ids of pieces that are given by the tokenizer's own. Raises DataError if one is none of its pieces."""
        is_known = (own_ids >= 0) & (own_ids < self._numbers.size)
        ids = np.where(is_known, self._numbers[np.where(is_known, own_ids, 0)], -1).astype(np.int32)
        if (unknown := own_ids[ids < 0]).size:
            raise DataError(f"the tokenizer gave the id {unknown[0]}, which is none of its {len(self):,} pieces")
        return ids

    def encode_text(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """The ids of a text's pieces. Raises DataError if the tokenizer cannot say it."""
        return self.numbered(self.tokenizer.encode(text))

    def decode(self, ids: Sequence[int] | Int[np.ndarray, " tokens"]) -> str:
        """The text of some pieces, as far as the tokenizer keeps texts: some drop line feeds or capitals."""
        return self.tokenizer.decode(self.order[np.asarray(ids, np.int64)].tolist())

    def piece(self, number: SupportsIndex) -> str:
        """The piece of one id."""
        return self.words[number]


AnyVocabulary = Vocabulary | PieceVocabulary
"""Text as ids and back: `len`, `encode_text`, `decode`, `piece`, `words` and `meaning`; ids go by falling frequency."""
