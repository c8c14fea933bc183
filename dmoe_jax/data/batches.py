"""A long text cut into batches of short segments, in reading order.

Row r of batch k+1 continues row r of batch k, so that a model's memory of the row is what came just before
(Transformer-XL, Dai et al. 2019). The text's whole segments are laid on a circle, on which the rows of all trainers
start evenly spaced and walk for ever. Hence trainers read disjoint parts, until a row comes to its neighbour's start,
and each of them sees the whole text in time; and the state of a stream is the number of batches read.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from dmoe_jax.checks import check_positive


class Batch(NamedTuple):
    """One segment for each row, and the words to predict.

    Attributes:
      tokens: the words read.
      targets: the word after each of them.
      mask: true where the target counts; false only on the padding of an evaluation's last batches.
      is_first: true where the row does not continue the previous batch: its memory must be dropped.
    """

    tokens: Int32[np.ndarray, "batch seq"]
    targets: Int32[np.ndarray, "batch seq"]
    mask: Bool[np.ndarray, "batch seq"]
    is_first: Bool[np.ndarray, " batch"]


class SegmentStream:
    """Training batches of one trainer, without end. Iterate, or read any batch by its number with `at`.

    The same arguments give the same batches. To resume, save `position` and pass it back.
    """

    def __init__(
        self,
        ids: Int[np.ndarray, " tokens"],
        *,
        batch_size: int,
        seq_len: int,
        shard: int = 0,
        num_shards: int = 1,
        seed: int | None = None,
        position: int = 0,
    ) -> None:
        """Lay the rows of a trainer on the text.

        Args:
          ids: the training text.
          batch_size, seq_len: rows of this trainer, and tokens in a row of one batch.
          shard: number of this trainer, from 0.
          num_shards: number of trainers that share the text, all with the same batch_size, seq_len and seed.
          seed: turns the circle by a random number of segments; None starts row 0 at the beginning of the text.
          position: number of batches already read.

        Raises:
          ValueError: a count that is not positive, a shard that is not one of them, or a text with fewer whole
            segments than there are rows.
        """
        check_positive(batch_size=batch_size, seq_len=seq_len, num_shards=num_shards)
        if not 0 <= shard < num_shards:
            raise ValueError(f"shard must be from 0 to {num_shards - 1}, got {shard}")
        num_segments, num_rows = (ids.size - 1) // seq_len, batch_size * num_shards
        if num_segments < num_rows:
            raise ValueError(
                f"the text must have a whole segment for each of {num_shards} x {batch_size} rows, that is "
                f"{num_rows * seq_len + 1} tokens, got {ids.size}"
            )
        turn = 0 if seed is None else random.Random(seed).randrange(num_segments)
        rows = np.arange(shard * batch_size, (shard + 1) * batch_size, dtype=np.int64)
        self._starts = turn + rows * num_segments // num_rows
        self._ids = ids
        self._seq_len = seq_len
        self._num_segments = num_segments
        self.batch_size = batch_size
        """Rows of this trainer."""
        self.seek(position)

    @property
    def position(self) -> int:
        """Number of batches read so far."""
        return self._position

    def seek(self, position: int) -> None:
        """Make batch `position` the next one."""
        if position < 0:
            raise ValueError(f"position must not be negative, got {position}")
        self._position = position

    def at(self, position: int) -> Batch:
        """Return batch number `position`, from 0, whatever was read so far."""
        if position < 0:
            raise ValueError(f"position must not be negative, got {position}")
        segments = (self._starts + position) % self._num_segments
        places = segments[:, None] * self._seq_len + np.arange(self._seq_len)
        return Batch(
            tokens=self._ids[places].astype(np.int32),
            targets=self._ids[places + 1].astype(np.int32),
            mask=np.ones(places.shape, dtype=np.bool_),
            is_first=(segments == 0) | (position == 0),
        )

    def __iter__(self) -> "SegmentStream":
        return self

    def __next__(self) -> Batch:
        batch = self.at(self._position)
        self._position += 1
        return batch


def evaluation_segments(ids: Int[np.ndarray, " tokens"], *, batch_size: int, seq_len: int) -> Iterator[Batch]:
    """Batches that hold every target of a text exactly once, under a mask.

    The targets ids[1:] are cut into `batch_size` equal rows, read side by side as in training. Every batch has the
    same shape; places past a row's end repeat its last word and are masked.

    Args:
      ids: [tokens], the text.
      batch_size, seq_len: rows, and tokens in a row of one batch.

    Returns: batches; `is_first` is true for all rows of the first one and for no other.

    Raises:
      ValueError: at once, for a count that is not positive or a text without a target.
    """
    if ids.size < 2:
        raise ValueError(f"a text to evaluate must have at least 2 tokens, got {ids.size}")
    check_positive(batch_size=batch_size, seq_len=seq_len)
    num_targets = ids.size - 1
    row_len = -(-num_targets // batch_size)
    starts = np.arange(batch_size, dtype=np.int64)[:, None] * row_len

    def batch_from(offset: int) -> Batch:
        columns = offset + np.arange(seq_len)
        places = starts + columns
        mask = (columns < row_len) & (places < num_targets)
        places = np.minimum(places, np.minimum(starts + row_len, num_targets) - 1)
        return Batch(
            tokens=ids[places].astype(np.int32),
            targets=ids[places + 1].astype(np.int32),
            mask=mask,
            is_first=np.full(batch_size, offset == 0),
        )

    # Not a generator, so that wrong arguments fail at the call.
    return map(batch_from, range(0, row_len, seq_len))
