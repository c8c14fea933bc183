"""Product-key gating, the router of Learning@home.

One linear map of the normalised input gives a score for every coordinate of every grid dimension; an expert's score
is the sum over its coordinates (section 3.2). A grid of 32 x 32 experts thus needs 64 scores. Unlike product-key
memory (Lample et al. 2019), every dimension sees the whole input instead of a part of a query.

`flat_top_k`, the usual gate with one score for each expert (Shazeer et al. 2017, eq. 2), is what product keys are to be
compared with: the same gate for a grid of one dimension, LayerNorm and initial scale included, so that between the two
nothing differs but the sum over dimensions.
"""

import math

from flax import linen as nn
from jaxtyping import Array, Float

from dmoe_jax.routing.base import Router, router_factory, top_k_router
from dmoe_jax.routing.flax_modules import router_from_linen

DEFAULT_INIT_SCALE = 0.1
"""Standard deviation of one score at initialisation: combine weights then start within some 10 % of uniform, yet the
order of the experts already differs from sample to sample, so that load spreads from the first step."""


class ProductKeyGate(nn.Module):
    """LayerNorm, then one Dense to a score for every coordinate of the grid; see `product_key`."""

    grid_size: tuple[int, ...]
    init_scale: float

    @nn.compact
    def __call__(self, x: Float[Array, "batch d_model"]) -> Float[Array, "batch scores"]:
        """Scores of every coordinate, [batch, sum(grid_size)]."""
        # Features of mean square 1 and a kernel of variance scale**2 / fan_in give scores of deviation scale.
        kernel_init = nn.initializers.variance_scaling(self.init_scale**2, "fan_in", "normal")
        return nn.Dense(sum(self.grid_size), kernel_init=kernel_init, name="keys")(nn.LayerNorm(name="norm")(x))


@router_factory
def product_key(grid_size: tuple[int, ...], *, init_scale: float = DEFAULT_INIT_SCALE) -> Router:
    """The router of Learning@home: product keys. An expert's score is the sum over its coordinates in the grid.

    Args:
      grid_size: extent of each dimension of the expert grid.
      init_scale: standard deviation of one score at initialisation, above 0.

    Raises:
      ValueError: if grid_size is not one or more positive integers, or init_scale is not positive.
    """
    if not init_scale > 0:
        raise ValueError(f"init_scale must be positive, got {init_scale!r}")
    return router_from_linen(lambda: ProductKeyGate(grid_size, init_scale), grid_size, name="product_key")


@router_factory
def flat_top_k(grid_size: tuple[int, ...], *, init_scale: float = DEFAULT_INIT_SCALE) -> Router:
    """The flat router. Arguments and errors are those of `product_key`."""
    gate = product_key((math.prod(grid_size),), init_scale=init_scale)
    return top_k_router("flat_top_k", grid_size, gate.init, gate.scores, flat=True)
