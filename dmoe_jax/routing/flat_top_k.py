"""A gate with one score for each expert: the usual top-k router of mixtures of experts (Shazeer et al. 2017, eq. 2).

What product keys are to be compared with. It is the product-key gate of a grid of one dimension, LayerNorm and initial
scale included, so that between the two nothing differs but the sum over dimensions.
"""

import functools
import math

from dmoe_jax.routing.base import Router, check_grid_size, top_k_router
from dmoe_jax.routing.product_key import DEFAULT_INIT_SCALE, product_key


def flat_top_k(grid_size: tuple[int, ...], *, init_scale: float = DEFAULT_INIT_SCALE) -> Router:
    """The flat router; equal arguments return the same object, and so share compiled code.

    Args:
      grid_size: extent of each dimension of the expert grid.
      init_scale: standard deviation of one score at initialisation, above 0.

    Raises:
      ValueError: if grid_size is not one or more positive integers, or init_scale is not positive.
    """
    grid_size = check_grid_size(grid_size)
    return _flat_top_k(grid_size, product_key((math.prod(grid_size),), init_scale=init_scale))


@functools.cache
def _flat_top_k(grid_size: tuple[int, ...], gate: Router) -> Router:
    return top_k_router("flat_top_k", grid_size, gate.init, gate.scores, flat=True)
