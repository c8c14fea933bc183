"""The next word, drawn from its distribution.

Restrictions follow one another: temperature, then `top_k`, then `top_p` (Holtzman et al. 2020) of what is left.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from dmoe_jax.trained.settings import Sampling


def row_keys(seed: int, rows: range) -> UInt32[np.ndarray, "rows 2"]:
    """Key data of each row, whatever other rows there are."""
    return np.stack([np.random.SeedSequence(seed, spawn_key=(row,)).generate_state(2, np.uint32) for row in rows])


LogProbs = Float[Array, "rows vocab"] | Float[np.ndarray, "rows vocab"]
"""Log-probabilities of all words, or what is left of them."""


class Draw(NamedTuple):
    """Settings of a draw as numbers, so that one program serves all of them: see `Sampling`."""

    temperature: Any
    top_k: Any
    top_p: Any

    @classmethod
    def of(cls, sampling: Sampling) -> "Draw":
        """The settings as numbers; a `top_k` beyond the vocabulary is none."""
        return cls(
            np.float32(sampling.temperature), np.int32(min(sampling.top_k, 2**31 - 1)), np.float32(sampling.top_p)
        )


def sample(draw: Draw, log_probs: LogProbs, keys: Any, step: Any) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """Draw a word of each row; traced.

    Args:
      log_probs: normalised, nats.
      keys: of `row_keys`, uint32 [rows, 2].
      step: int32, number of the word, so that each has chance of its own.

    Returns: (the words; their log-probabilities under the model, before any restriction).
    """
    likeliest = jnp.argmax(log_probs, axis=-1)

    def drawn() -> Array:
        heat = jnp.where(draw.temperature > 0, draw.temperature, 1)
        logits = log_probs / heat
        # Sorting takes longer than all else: only where it is wanted.
        is_free = (draw.top_k == 0) & (draw.top_p >= 1)
        allowed = jax.lax.cond(is_free, lambda: logits, lambda: restricted(logits, top_k=draw.top_k, top_p=draw.top_p))
        own = jax.vmap(lambda key: jax.random.fold_in(jax.random.wrap_key_data(key), step))(keys)
        return jax.vmap(jax.random.categorical)(own, allowed)

    words = jax.lax.cond(draw.temperature == 0, lambda: likeliest, drawn)
    return words, jnp.take_along_axis(log_probs, words[:, None], axis=-1)[:, 0]


def restricted(logits: LogProbs, *, top_k: Any, top_p: Any) -> Float[Array, "rows vocab"]:
    """The logits, -inf for words that may not be drawn; at least one of each row may be.

    Args:
      top_k: number of the likeliest words that may be drawn, and of those as likely as the last of them; 0: all.
      top_p: share of the probability that the likeliest of these must reach together; 1: all of them.
    """
    logits = jnp.asarray(logits)
    vocab = logits.shape[-1]
    falling = -jnp.sort(-logits, axis=-1)
    count = jnp.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    among = jnp.arange(vocab) < count
    # Words as likely as the last of them are among them.
    among |= falling >= jnp.take_along_axis(falling, jnp.full((len(logits), 1), count - 1), axis=-1)
    probabilities = jax.nn.softmax(jnp.where(among, falling, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    enough = jnp.where(top_p < 1, jnp.sum((before < top_p) & among, axis=-1), jnp.sum(among, axis=-1))
    least = jnp.take_along_axis(falling, jnp.maximum(enough, 1)[:, None] - 1, axis=-1)
    return jnp.where(logits < least, -jnp.inf, logits)
