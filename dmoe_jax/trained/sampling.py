"""The next word, drawn from its distribution.

Restrictions follow one another: temperature, then `top_k`, then `top_p` (Holtzman et al. 2020) of what is left.
"""

import functools
from typing import Any

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


def sample(
    sampling: Sampling, log_probs: LogProbs, keys: Any, step: Any
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """Draw a word of each row.

    Args:
      log_probs: normalised, nats.
      keys: of `row_keys`, uint32 [rows, 2].
      step: int32, number of the word, so that each has chance of its own.

    Returns: (the words; their log-probabilities under the model, before any restriction).
    """
    return _sample(sampling.temperature, sampling.top_k, sampling.top_p, log_probs, keys, step)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _sample(temperature: float, top_k: int, top_p: float, log_probs: Any, keys: Any, step: Any) -> tuple[Array, Array]:
    if temperature == 0:
        words = jnp.argmax(log_probs, axis=-1)
    else:
        allowed = restricted(log_probs / temperature, top_k=top_k, top_p=top_p)
        own = jax.vmap(lambda key: jax.random.fold_in(jax.random.wrap_key_data(key), step))(keys)
        words = jax.vmap(jax.random.categorical)(own, allowed)
    return words, jnp.take_along_axis(log_probs, words[:, None], axis=-1)[:, 0]


def restricted(logits: LogProbs, *, top_k: int, top_p: float) -> Float[Array, "rows vocab"]:
    """The logits, -inf for words that may not be drawn; at least one of each row may be.

    Args:
      top_k: number of the likeliest words that may be drawn, and of those as likely as the last of them; 0: all.
      top_p: share of the probability that the likeliest of these must reach together; 1: all of them.
    """
    logits = jnp.asarray(logits)
    if 0 < top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if top_p < 1:
        falling = -jnp.sort(-logits, axis=-1)
        probabilities = jax.nn.softmax(falling, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        count = jnp.maximum(jnp.sum(before < top_p, axis=-1, keepdims=True), 1)
        least = jnp.take_along_axis(falling, count - 1, axis=-1)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits
