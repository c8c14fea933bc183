"""A remote mixture for programs without trio, what `connect(...).mixture(...)` gives, and its layers for Linen and NNX.

The parameters of a layer are the router's (`gate`) and a scalar that stays zero (`anchor`, see `host_call`). The
experts' own live at their nodes, which update them in every backward pass: experts learn whenever a layer is
differentiated.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jaxtyping import Array

from dmoe_jax.flax_layers.host_call import CallSlots, HostCall, Portal
from dmoe_jax.mixture.remote import RemoteMixture
from dmoe_jax.routing.base import Features, Ids


class LinenMixture(nn.Module):
    """A layer of remote experts for Linen. Made by `BlockingMixture.linen`.

    A router that draws takes its noise from the rng stream "router"; without one nothing is random. The router's
    auxiliary loss is sown into the collection "losses":

        y, sown = model.apply({"params": params}, x, mutable=["losses"])
        loss = ... + sum(jax.tree.leaves(sown["losses"]))

    Attributes:
      call: the mixture.
    """

    call: HostCall

    @nn.compact
    def __call__(self, *inputs: Array, features: Features | None = None, ids: Ids | None = None) -> Array:
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


class AuxiliaryLoss(nnx.Variable):
    """The router's auxiliary loss in a layer's last call, a scalar."""


class NnxMixture(nnx.Module):
    """A layer of remote experts for NNX. Made by `BlockingMixture.nnx`.

    A router that draws takes its noise from `rngs.router`, if the layer was made with that stream and is in training:
    `model.eval()` and `model.train()` set `deterministic`, as they do for `nnx.Dropout`. The router's auxiliary loss of
    the last call is `layer.aux_loss`, for a loss function to add:

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
        self.deterministic = False
        """True if the router draws nothing; set by `eval()` and `train()` of the module and of those that hold it."""

    def __call__(self, *inputs: Array, features: Features | None = None, ids: Ids | None = None) -> Array:
        """Mix the experts' outputs for a batch of samples; arguments as of `LinenMixture`."""
        gate = jax.tree.map(lambda leaf: leaf[...], self.gate, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        key = None if self.rngs is None or self.deterministic else self.rngs.router()
        features = inputs[0] if features is None else features
        mixed, penalty = self.call(gate, self.anchor[...], features, *inputs, key=key, ids=ids)
        self.aux_loss[...] = penalty
        return mixed


class BlockingMixture:
    """A remote mixture and the portal into the thread where it lives.

    Args:
      mixture: the mixture. portal: leads into the thread of its swarm.
      slots: bounds how many calls wait at once; None: those of the process.
    """

    def __init__(self, mixture: RemoteMixture, portal: Portal, *, slots: CallSlots | None = None) -> None:
        self.remote = mixture
        """The mixture, whose functions must be awaited in the portal's thread."""
        self.call = HostCall(mixture, portal, slots=slots)
        """The layer as a plain function of arrays, for models without Flax."""
        self._portal = portal

    def check(self, *, timeout_s: float = 60.0, say: Callable[[str], None] = lambda _: None) -> int:
        """Wait until the layer has an expert that answers; see `RemoteMixture.check`."""

        async def check() -> int:
            return await self.remote.check(timeout_s=timeout_s, say=say)

        return self._portal.run(check)

    def linen(self, *, name: str | None = None) -> LinenMixture:
        """The mixture as a layer for a Linen module: `y = mixture.linen()(x)` in a compact `__call__`."""
        return LinenMixture(self.call, name=name)

    def nnx(self, *, rngs: nnx.Rngs, features: int | None = None) -> NnxMixture:
        """The mixture as a layer for an NNX module: `self.experts = mixture.nnx(rngs=rngs)` in its `__init__`.

        Args:
          rngs: for the router's parameters.
          features: width of what the router looks at; None: that of the experts' first input.
        Raises:
          ValueError: without `features`, where the first input is no vector.
        """
        first = self.remote.expert.inputs[0]
        if features is None and len(first.shape) != 1:
            raise ValueError(
                f"the router's width must be given as features: input {first.name} has shape {first.shape}"
            )
        return NnxMixture(self.call, first.shape[0] if features is None else features, rngs=rngs)
