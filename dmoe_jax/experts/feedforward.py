"""The feed-forward expert of Learning@home (section 4.1 and the authors' code).

    x + Dense_d(relu(norm(Dense_4d(relu(norm(Dense_4d(x)))))))

About 24 d_model^2 parameters: 25 M at the paper's width of 1024.
"""

import functools

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
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Float[Array, "batch d_model"]) -> Float[Array, "batch d_model"]:
        """The block's output, of the input's shape."""
        width = self.expansion * self.d_model
        dense = functools.partial(nn.Dense, param_dtype=self.dtype)
        hidden = nn.relu(nn.LayerNorm(param_dtype=self.dtype)(dense(width)(x)))
        hidden = nn.relu(nn.LayerNorm(param_dtype=self.dtype)(dense(width)(hidden)))
        return x + dense(self.d_model)(hidden)


def feedforward(*, d_model: int, expansion: int = 4, dtype: str = "float32") -> Expert:
    """The feed-forward expert; equal configurations return the same object.

    Args:
      d_model: width of the input and output.
      expansion: hidden width as a multiple of d_model; 4 in the paper.
      dtype: of parameters, inputs and output: "float32", or "float64" where JAX has it enabled.

    Raises:
      ValueError: if a size is not a positive integer, or the type is another one or not enabled.
    """
    check_positive(d_model=d_model, expansion=expansion)
    if dtype not in ("float32", "float64"):
        raise ValueError(f"dtype must be 'float32' or 'float64', got {dtype!r}")
    # JAX would make float32 of it, and warn.
    if jax.dtypes.canonicalize_dtype(dtype) != np.dtype(dtype):
        raise ValueError(f"dtype {dtype!r} needs JAX's 64-bit types: jax.config.update('jax_enable_x64', True)")
    example = jax.ShapeDtypeStruct((1, d_model), np.dtype(dtype))
    return expert_from_linen(FeedforwardBlock(d_model, expansion, dtype), example, name="feedforward", check=False)
