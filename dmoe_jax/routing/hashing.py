"""Pseudo-random numbers from integers, inside `jit`: the same on every machine, in every process, for ever.

The mixing function is the finaliser of MurmurHash3 (Appleby 2011), a bijection of 32 bits of which each input bit
flips each output bit with a probability near one half.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

_STEP = 0x9E3779B9  # 2**32 / golden ratio: without it words of zero would hash to zero
_BITS = 24  # of a float32's significand: more would round up to 1.0


def hash_words(*words: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """One hash from a sequence of words, which broadcast against each other; their order matters."""
    state = jnp.uint32(0)
    for word in words:
        state = _mix((state + jnp.uint32(_STEP)) ^ word)
    return state


def hash_rows(x: Float[Array, "batch features"]) -> UInt32[Array, " batch"]:
    """One hash for each row, of its bits as float32: rows that differ anywhere have different hashes, but for a chance
    of 2**-32."""
    # Adding zero makes -0.0 and 0.0 one number.
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32) + jnp.float32(0), jnp.uint32)
    position = jnp.arange(x.shape[-1], dtype=jnp.uint32)
    return jnp.sum(hash_words(position, bits), axis=-1, dtype=jnp.uint32)


def unit_interval(hashed: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """float32 in [0, 1) from the upper bits of a hash."""
    return (hashed >> (32 - _BITS)).astype(jnp.float32) * jnp.float32(math.ldexp(1, -_BITS))


def _mix(h: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
