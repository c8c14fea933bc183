"""A remote mixture as a Flax NNX layer."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from dmoe_jax.flax_layers.host_call import HostCall


class AuxiliaryLoss(nnx.Variable):
    """The router's auxiliary loss in a layer's last call, a scalar."""


class NnxMixture(nnx.Module):
    """A layer of remote experts. Made by `BlockingMixture.nnx`.

    Its parameters are the router's (`gate`) and a scalar that stays zero (`anchor`, see `host_call`); the experts' own
    live at their nodes, which update them in every backward pass. Experts learn whenever the layer is differentiated.
    A router that draws takes its noise from `rngs.router`, if the layer was made with that stream.

    The router's auxiliary loss of the last call is `layer.aux_loss`, for a loss function to add:

        loss = ... + model.experts.aux_loss[...]
        loss = ... + sum(jax.tree.leaves(nnx.state(model, AuxiliaryLoss)))      # of all layers

    Args:
      call: the mixture.
      features: width of what the router looks at.
      rngs: for the router's parameters, and for its noise.
    """

    def __init__(self, call: HostCall, features: int, *, rngs: nnx.Rngs) -> None:
        self.call = call
        self.gate = nnx.data(jax.tree.map(nnx.Param, call.mixture.router.init(rngs.params(), features)))
        self.anchor = nnx.Param(jnp.zeros(()))
        self.aux_loss = AuxiliaryLoss(jnp.zeros(()))
        self.rngs = rngs.fork() if "router" in rngs else None

    def __call__(
        self,
        *inputs: Array,
        features: Float[Array, "batch features"] | None = None,
        ids: Int32[Array, " batch"] | None = None,
    ) -> Array:
        """Mix the experts' outputs for a batch of samples.

        Args:
          inputs: the experts' inputs, [batch, ...].
          features: what the router looks at; None: the first input.
          ids: what each sample is, for routers that hash.
        """
        gate = jax.tree.map(lambda leaf: leaf[...], self.gate, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        key = None if self.rngs is None else self.rngs.router()
        features = inputs[0] if features is None else features
        mixed, penalty = self.call(gate, self.anchor[...], features, *inputs, key=key, ids=ids)
        self.aux_loss[...] = penalty
        return mixed
