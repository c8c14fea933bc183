"""Routers: which experts a sample goes to, and how their outputs are weighed. See `dmoe_jax.routing.base`."""

from dmoe_jax.routing.base import Router, gather_logits, masked_softmax
from dmoe_jax.routing.linen_adapter import from_linen
from dmoe_jax.routing.nnx_adapter import from_nnx
from dmoe_jax.routing.product_key import product_key

__all__ = ["Router", "from_linen", "from_nnx", "gather_logits", "masked_softmax", "product_key"]
