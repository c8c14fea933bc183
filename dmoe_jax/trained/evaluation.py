"""Perplexity of a text, as papers report it, and of its frequent and rare words by themselves."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from dmoe_jax.data.batches import evaluation_segments
from dmoe_jax.models.trunk import empty_memory
from dmoe_jax.trained.readers import Reader

ROWS = 16
"""Places from which a text is read side by side, as in the evaluations of `dmoe train`."""

_MOST_TOKENS = 4096
"""Tokens that are read with one call of each layer, at least a segment of each row."""

MOST_STATES = 1 << 18
"""Most states of a layer that are held at once: of each row those of a segment and its memory."""

RANKS = (100, 1_000, 10_000)
"""Bounds between words by how frequent they are in training: a word's id is its rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoss:
    """The loss of the targets whose ids lie in a range."""

    first: int
    """Smallest id; 0 is the most frequent word."""
    stop: int
    """Smallest id beyond the range."""
    tokens: int
    """Number of these targets in the text."""
    loss: float
    """Mean negative log-likelihood, nats; NaN without a target."""

    @property
    def perplexity(self) -> float:
        """exp(loss); NaN without a target."""
        return _exp(self.loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEvaluation:
    """Figures of a model that read a text."""

    loss: float
    """Mean negative log-likelihood of a token, nats."""
    tokens: int
    """Number of tokens that were predicted: all but the first."""
    by_rank: tuple[RankLoss, ...]
    """The same by how frequent a word is in training, most frequent first."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return _exp(self.loss)

    @property
    def bits(self) -> float:
        """Bits for each token: the loss to base 2."""
        return self.loss / math.log(2)


async def evaluate_text(
    reader: Reader,
    ids: Int[np.ndarray, " tokens"],
    *,
    rows: int = ROWS,
    on_batch: Callable[[int, int], None] = lambda done, batches: None,
) -> TextEvaluation:
    """Let a model read a text to its end, as in training but for chance, and compare what it expected.

    Each target counts once. A row begins without a memory, so that more rows cost a little of the figure.

    Args:
      rows: number of equal parts that are read side by side.
      on_batch: is told the number of batches that were read, and of all.

    Raises:
      ValueError: the text has no target, rows is not positive, or rows and memory are beyond `MOST_STATES`. NetError:
        the swarm cannot carry it.
    """
    decoder, config = reader.decoder, reader.decoder.config
    if rows < 1 or rows * (config.seq_len + config.mem_len) > MOST_STATES:
        raise ValueError(
            f"rows must be at least 1, and {MOST_STATES:,} states of a layer in all at most: of each row a segment of "
            f"{config.seq_len:,} and a memory of {config.mem_len:,}; got {rows:,} rows"
        )
    rows = min(rows, max(1, (ids.size - 1) // config.seq_len))
    length = config.seq_len * max(1, min(_MOST_TOKENS, ids.size) // (rows * config.seq_len))
    batches = list(evaluation_segments(ids, batch_size=rows, seq_len=length))
    places = evaluation_segments(np.arange(ids.size), batch_size=rows, seq_len=length)
    memory, nll = empty_memory(config, rows), np.zeros(ids.size)
    for number, (batch, place) in enumerate(zip(batches, places, strict=True), start=1):
        read = await reader.read_segments(memory, batch.tokens, np.full(rows, length, np.int32))
        memory = await reader.run(decoder.memory_after, memory, read.entered)
        losses = await reader.run(decoder.nll, reader.trunk, read.hidden, batch.targets)
        nll[place.targets[batch.mask]] = losses[batch.mask]
        on_batch(number, len(batches))
    return _figures(ids[1:], nll[1:], config.vocab_size)


def _figures(targets: Int[np.ndarray, " tokens"], nll: Float[np.ndarray, " tokens"], vocab_size: int) -> TextEvaluation:
    bounds = (0, *(rank for rank in RANKS if rank < vocab_size), vocab_size)
    ranges = []
    for first, stop in itertools.pairwise(bounds):
        own = nll[(targets >= first) & (targets < stop)]
        loss = float(own.mean()) if own.size else math.nan
        ranges.append(RankLoss(first=first, stop=stop, tokens=own.size, loss=loss))
    return TextEvaluation(loss=float(nll.mean()), tokens=targets.size, by_rank=tuple(ranges))


def _exp(loss: float) -> float:
    return math.inf if loss >= 700 else math.exp(loss)
