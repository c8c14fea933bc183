"""Parts of all models: DMoE layers in one jit, what is reported of them, and mixtures by layer."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from dmoe_jax.arrays import PyTree
from dmoe_jax.autodiff import Value
from dmoe_jax.directory.grid import layer_prefix
from dmoe_jax.experts.base import Expert
from dmoe_jax.mixture.local import expert_load, init_experts, local_mixture
from dmoe_jax.routing.base import Router, Scores, Traffic, combine_weights, router_loss

Mixture = Callable[..., Awaitable[tuple[Value, Value]]]
"""A DMoE layer that must be awaited: async (run, scores, *inputs) -> (mixed, the router's auxiliary loss), on the tape;
`dmoe_jax.mixture.remote.RemoteMixture` is one."""


@runtime_checkable
class MixtureMaker(Protocol):
    """A maker of remote mixtures: `dmoe_jax.Swarm`."""

    def mixture(self, *args: Any, **options: Any) -> Any:
        """A `Mixture` from (prefix, expert, router) and settings; see `Swarm.mixture`."""
        ...


class LayerAux(NamedTuple):
    """A DMoE layer's choices and their weights.

    Attributes:
      indices: int32 [batch, slots, dims], the chosen experts.
      mask: bool [batch, slots], False for slots without an expert.
      weights: [batch, slots], the combine weights.
      load: int32 [num_experts], samples that each expert served, by flat index.
      aux_loss: scalar, the router's auxiliary loss.
    """

    indices: Int32[Array, "batch slots dims"]
    mask: Bool[Array, "batch slots"]
    weights: Float[Array, "batch slots"]
    load: Int32[Array, " num_experts"]
    aux_loss: Float[Array, ""]


class ForwardAux(NamedTuple):
    """Results of a forward pass beside its loss.

    Attributes:
      nll: mean negative log-likelihood, nats; the loss without auxiliary losses.
      layers: one `LayerAux` for each DMoE layer.
      memory: the memory for the next segment; () for a model without one.
      token_nll: [batch, seq], nats, of each target; None for a model without tokens.
    """

    nll: Float[Array, ""]
    layers: tuple[LayerAux, ...]
    memory: tuple[Any, ...] = ()
    token_nll: Float[Array, "batch seq"] | None = None


class Segments(NamedTuple):
    """The functions of a model's trunk between its mixtures: pure, stable objects, jitted one by one.

    Attributes:
      embed: parameters and a batch's inputs -> hidden states.
      gate: parameters, hidden states and what else is routed by -> a router's scores.
      loss_head: parameters, the last hidden states and targets -> mean loss, nats (and metrics, if there are any).
    """

    embed: Callable[..., Float[Array, "batch ..."]]
    gate: Callable[..., Scores]
    loss_head: Callable[..., PyTree]


def dmoe_layer(
    expert: Expert,
    params: PyTree,
    router: Router,
    k_best: int,
    scores: Scores,
    alive: Bool[Array, "..."] | None,
    *inputs: Array,
) -> tuple[Float[Array, "batch ..."], LayerAux]:
    """Select, call and mix the experts of one layer, on this machine.

    Args:
      expert: the network that all experts share. params: its stacked parameters.
      router: selects and combines. k_best: experts for each sample. scores: the router's, of each sample.
      alive: bool of the grid's shape, or None for all.
      inputs: the expert's inputs.
    """
    indices, mask = router.select(scores, k_best, alive)
    weights = combine_weights(router, scores, indices, mask)
    output = local_mixture(expert, params, router.grid_size, indices, mask, weights, *inputs)
    load = expert_load(indices, mask, router.grid_size)
    traffic = Traffic(mask, None if alive is None else alive.astype(weights.dtype))
    return output, LayerAux(indices, mask, weights, load, router_loss(router, scores, indices, mask, traffic))


def total_loss(nll: Float[Array, ""], aux_losses: Sequence[Float[Array, ""]]) -> Float[Array, ""]:
    """The loss to train on: mean negative log-likelihood plus the auxiliary losses of the routers."""
    return sum(aux_losses, start=nll)


def init_layers(key: PRNGKeyArray, expert: Expert, grid_size: tuple[int, ...], num_layers: int) -> tuple[PyTree, ...]:
    """Stacked expert parameters of each layer: the experts `layer0.…`, `layer1.…` and so on of this key."""
    return tuple(init_experts(key, expert, layer_prefix(i), grid_size) for i in range(num_layers))


def layer_mixtures(
    swarm: MixtureMaker, expert: Expert, router: Router, num_layers: int, **options: Any
) -> list[Mixture]:
    """A remote mixture for each layer of a model: of the experts `layer0.…`, `layer1.…` and so on."""
    return [swarm.mixture(layer_prefix(layer), expert, router, **options) for layer in range(num_layers)]
