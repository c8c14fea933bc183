"""The end of a mixture: the weighted sum of the experts' outputs, and what the weights leave over of the input.

Axes: B batch, K experts a sample.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

ROUNDING = 1e-5
"""Weights that sum to 1 within this, or within the rounding of their type, leave nothing over."""


def combine_outputs(
    weights: Float[Array, "batch k"], mask: Bool[Array, "batch k"], outputs: Array, x: Array
) -> Float[Array, "batch ..."]:
    """sum_k weights_k outputs_k + (1 - sum_k weights_k) x, where outputs have the shape and dtype of x.

    Experts whose output is like their first input carry their own residual connection: what the weights leave over
    passes x through, which is what an expert with nothing to add would return, and a sample without any expert passes
    unchanged. Where an expert returns something else, what the weights leave over adds nothing: a sample without any
    expert gives zeros.

    Args:
      weights: combine weights, 0 where the mask is False; at most 1 in sum.
      mask: True for each output that there is. The others have no influence.
      outputs: [batch, k, ...], of the experts.
      x: [batch, ...], their first input.
    """
    cell = (...,) + (None,) * (outputs.ndim - 2)
    mixed = jnp.sum(weights[cell].astype(outputs.dtype) * jnp.where(mask[cell], outputs, 0), axis=1)
    if mixed.shape[1:] != x.shape[1:] or mixed.dtype != x.dtype:
        return mixed
    # Weights that sum to 1 up to rounding leave nothing over: an exact 0 keeps x (and its gradient) out of the mixture.
    left = 1 - jnp.sum(weights, axis=1)
    left = jnp.where(left > max(ROUNDING, float(jnp.finfo(weights.dtype).eps)), left, 0)[
        (...,) + (None,) * (mixed.ndim - 1)
    ]
    return mixed + left.astype(mixed.dtype) * x
