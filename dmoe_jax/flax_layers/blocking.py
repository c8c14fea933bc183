"""A remote mixture for programs without trio: what `connect(...).mixture(...)` gives."""

from collections.abc import Callable

from flax import nnx

from dmoe_jax.flax_layers.host_call import CallSlots, HostCall, Portal
from dmoe_jax.flax_layers.linen import LinenMixture
from dmoe_jax.flax_layers.nnx import NnxMixture
from dmoe_jax.mixture.remote import RemoteMixture

__all__ = ["BlockingMixture", "Portal"]


class BlockingMixture:
    """A remote mixture and the portal into the thread where it lives.

    Args:
      mixture: the mixture. portal: leads into the thread of its swarm.
      slots: bounds how many calls wait at once; None: those of the process, see `make_room`.
    """

    def __init__(self, mixture: RemoteMixture, portal: Portal, *, slots: CallSlots | None = None) -> None:
        self.call = HostCall(mixture, portal, slots=slots)
        """The layer as a plain function of arrays, for models without Flax."""
        self._portal = portal

    @property
    def remote(self) -> RemoteMixture:
        """The mixture, whose functions must be awaited in the portal's thread."""
        return self.call.mixture

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
