"""The expert that both sides serve: hivemind's `ffn`, about 8 d_model^2 parameters, in Flax.

    norm(x + Dense_d(gelu(Dense_4d(x))))

hivemind 1.1.12, `moe/server/layers/common.py`, `FeedforwardBlock`: GELU in its approximation by tanh, one LayerNorm
with epsilon 1e-12 behind the residual connection. (The feed-forward expert of `dmoe_jax.experts` has 24 d_model^2.)
"""

import jax
import numpy as np
import optax
from flax import linen as nn
from jaxtyping import Array, Float

from dmoe_jax.experts.adapters import expert_from_linen
from dmoe_jax.experts.base import Expert

PREFIX = "ffn"
"""Experts are `ffn.0`, `ffn.1` and so on."""

ADAM = optax.adam(1e-3)
"""Each expert's optimiser, with the step size that is the default of hivemind's benchmark. One object: compiled code is
found by it."""


class HivemindFeedforward(nn.Module):
    """One hidden layer of 4 d_model units, residual, normalised behind."""

    d_model: int

    @nn.compact
    def __call__(self, x: Float[Array, "batch d_model"]) -> Float[Array, "batch d_model"]:
        """The block's output, of the input's shape."""
        hidden = nn.gelu(nn.Dense(4 * self.d_model)(x), approximate=True)
        return nn.LayerNorm(epsilon=1e-12)(x + nn.Dense(self.d_model)(hidden))


def hivemind_ffn(d_model: int) -> Expert:
    """The expert of this width; equal widths give the same object."""
    example = jax.ShapeDtypeStruct((1, d_model), np.float32)
    return expert_from_linen(HivemindFeedforward(d_model), example, name="hivemind_ffn", check=False)
