"""The feed-forward expert of Learning@home (section 4.1 and the authors' code).

    x + Dense_d(relu(norm(Dense_4d(relu(norm(Dense_4d(x)))))))

About 24 d_model^2 parameters: 25 M at the paper's width of 1024.
"""

import jax
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float

from dmoe_jax.checks import check_positive
from dmoe_jax.experts.adapters import expert_from_linen
from dmoe_jax.experts.base import Expert


class FeedforwardBlock(nn.Module):
    """Two normalised hidden layers of `expansion * d_model` units around a residual connection."""

    d_model: int
    expansion: int

    @nn.compact
    def __call__(self, x: Float[Array, "batch d_model"]) -> Float[Array, "batch d_model"]:
        """The block's output, of the input's shape."""
        width = self.expansion * self.d_model
        hidden = nn.relu(nn.LayerNorm()(nn.Dense(width)(x)))
        hidden = nn.relu(nn.LayerNorm()(nn.Dense(width)(hidden)))
        return x + nn.Dense(self.d_model)(hidden)


def feedforward(*, d_model: int, expansion: int = 4) -> Expert:
    """The feed-forward expert; equal configurations return the same object.

    Args:
      d_model: width of the input and output.
      expansion: hidden width as a multiple of d_model; 4 in the paper.

    Raises:
      ValueError: if a size is not a positive integer.
    """
    check_positive(d_model=d_model, expansion=expansion)
    example = jax.ShapeDtypeStruct((1, d_model), np.float32)
    return expert_from_linen(FeedforwardBlock(d_model, expansion), example, name="feedforward", check=False)
