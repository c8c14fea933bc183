"""A gate with one score for each expert: the usual top-k router of mixtures of experts (Shazeer et al. 2017, eq. 2).

What product keys are to be compared with. It is the product-key gate of a grid of one dimension, LayerNorm and initial
scale included, so that between the two nothing differs but the sum over dimensions.
"""

import math

from dmoe_jax.routing.base import Router, router_factory, top_k_router
from dmoe_jax.routing.product_key import DEFAULT_INIT_SCALE, product_key


@router_factory
def flat_top_k(grid_size: tuple[int, ...], *, init_scale: float = DEFAULT_INIT_SCALE) -> Router:
    """The flat router. Arguments and errors are those of `product_key`."""
    gate = product_key((math.prod(grid_size),), init_scale=init_scale)
    return top_k_router("flat_top_k", grid_size, gate.init, gate.scores, flat=True)
