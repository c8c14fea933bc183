"""A remote mixture as a Flax Linen layer."""

from flax import linen as nn
from jaxtyping import Array, Float, Int32

from dmoe_jax.flax_layers.host_call import HostCall


class LinenMixture(nn.Module):
    """A layer of remote experts. Made by `BlockingMixture.linen`.

    Its parameters are the router's ("gate") and a scalar that stays zero ("anchor", see `host_call`); the experts' own
    live at their nodes, which update them in every backward pass. Experts learn whenever the layer is differentiated.
    A router that draws takes its noise from the rng stream "router"; without one nothing is random.

    The router's auxiliary loss is sown into the collection "losses":

        y, sown = model.apply({"params": params}, x, mutable=["losses"])
        loss = ... + sum(jax.tree.leaves(sown["losses"]))

    Attributes:
      call: the mixture.
    """

    call: HostCall

    @nn.compact
    def __call__(
        self,
        *inputs: Array,
        features: Float[Array, "batch features"] | None = None,
        ids: Int32[Array, " batch"] | None = None,
    ) -> Array:
        """Mix the experts' outputs for a batch of samples; no expert is called while the model is initialised.

        Args:
          inputs: the experts' inputs, [batch, ...].
          features: what the router looks at; None: the first input.
          ids: what each sample is, for routers that hash.
        """
        features = inputs[0] if features is None else features
        gate = self.param("gate", self.call.mixture.router.init, features.shape[-1])
        anchor = self.param("anchor", nn.initializers.zeros, ())
        if self.is_initializing():
            return self.call.without_network(*inputs)
        key = self.make_rng("router") if self.has_rng("router") else None
        mixed, penalty = self.call(gate, anchor, features, *inputs, key=key, ids=ids)
        self.sow("losses", "aux_loss", penalty)
        return mixed
