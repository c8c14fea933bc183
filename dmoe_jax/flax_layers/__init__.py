"""Remote mixtures as layers of ordinary Flax models, under `jit` and `grad`.

    with connect("PEER") as swarm:
        layer = swarm.mixture("ffn", expert, router)          # a BlockingMixture
        y = layer.linen()(x)                                  # one line in a Linen module
        self.experts = layer.nnx(rngs=rngs)                   # one line in an NNX module; then self.experts(x)

A training loop that somebody has already then trains remote experts. `dmoe_jax.flax_layers.host_call` says how it is
done, and what it cannot do.
"""

from dmoe_jax.flax_layers.host_call import CallSlots, Portal
from dmoe_jax.flax_layers.layers import AuxiliaryLoss, BlockingMixture, LinenMixture, NnxMixture

__all__ = [
    "AuxiliaryLoss",
    "BlockingMixture",
    "CallSlots",
    "LinenMixture",
    "NnxMixture",
    "Portal",
]
