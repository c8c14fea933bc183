"""LayerNorm without gain and bias, for routers whose next step is a linear map that can learn both."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def layer_norm(x: Float[Array, "*batch features"], epsilon: float = 1e-6) -> Float[Array, "*batch features"]:
    """Each row with mean 0 and variance 1, in float32: scores are where rounding decides who is chosen."""
    x = x.astype(jnp.float32)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + epsilon)
