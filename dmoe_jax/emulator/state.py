"""The arrays of an emulated swarm."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int32

from dmoe_jax.emulator.stages import LayerInput, Mixed
from dmoe_jax.routing.base import Scores
from dmoe_jax.types import PyTree


class Experts(NamedTuple):
    """All experts of all layers; every leaf has a leading axis of layer * cells + cell.

    Attributes:
      params: parameters.
      opt_state: states of their optimisers.
      updates: int32, updates of each.
    """

    params: PyTree
    opt_state: PyTree
    updates: Int32[jax.Array, " experts"]


class Calls(NamedTuple):
    """The calls of one step of a trainer, for each layer; further axes are samples and slots.

    Attributes:
      inputs: the experts' inputs.
      chosen: int32, the expert of each pair, counted over all layers.
      indices: int32 [..., dims], its coordinates.
      wanted: bool, whether there is an expert in the slot.
      answered: bool, whether it has answered the forward call.
      outputs: what it answered; zeros before.
      seen: int32, how many updates it had then.
      output_grads: gradients of the outputs.
      input_grads: gradients of the differentiable inputs that have come back, summed.
    """

    inputs: tuple[Any, ...]
    chosen: Int32[jax.Array, "layers batch slots"]
    indices: Int32[jax.Array, "layers batch slots dims"]
    wanted: Bool[jax.Array, "layers batch slots"]
    answered: Bool[jax.Array, "layers batch slots"]
    outputs: Float[jax.Array, "layers batch slots ..."]
    seen: Int32[jax.Array, "layers batch slots"]
    output_grads: Float[jax.Array, "layers batch slots ..."]
    input_grads: tuple[Any, ...]


class Trainers(NamedTuple):
    """What each trainer holds; every leaf has a leading axis of trainers.

    Attributes:
      params: the trunk as it was read at the beginning of the step. read_at: int32, its updates then.
      state: what the step began with. next_state: what the next one begins with, if this one succeeds.
      row: int32, which of its batches the step has.
      calls: of the step.
      scores: the routers', one of each layer.
      mixed: what the mixtures returned, one of each layer. mixed_grads: its gradient, as far as it is known.
      layer_grads: gradients, through the mixture itself, of the scores and of the experts' first inputs.
      grads: gradients of the trunk, as far as they are known.
      loss: what the step reports. total: what is differentiated.
    """

    params: PyTree
    read_at: Int32[jax.Array, " trainers"]
    state: PyTree
    next_state: PyTree
    row: Int32[jax.Array, " trainers"]
    calls: Calls
    scores: tuple[Scores, ...]
    mixed: tuple[Mixed, ...]
    mixed_grads: tuple[Mixed, ...]
    layer_grads: tuple[LayerInput, ...]
    grads: PyTree
    loss: Float[jax.Array, " trainers"]
    total: Float[jax.Array, " trainers"]


class Totals(NamedTuple):
    """What is counted, in all.

    Attributes:
      losses: [updates], the reported loss of each trunk update, nats; NaN before it.
      trunk_staleness: int32 [updates], trunk updates between a step's reading and its writing.
      expert_staleness: sum over backward calls of updates between a call's forward and its backward.
      calls: their number.
      load: int32 [experts], samples that each expert was trained on.
      rejected: updates, of trunk or experts, that were not finite and left everything as it was.
    """

    losses: Float[jax.Array, " updates"]
    trunk_staleness: Int32[jax.Array, " updates"]
    expert_staleness: Int32[jax.Array, ""]
    calls: Int32[jax.Array, ""]
    load: Int32[jax.Array, " experts"]
    rejected: Int32[jax.Array, ""]


class SwarmState(NamedTuple):
    """A swarm between two events.

    Attributes:
      step: int32, updates of the trunk.
      params, opt_state: the trunk.
      experts, trainers: all of them.
      totals: what was counted.
    """

    step: Int32[jax.Array, ""]
    params: PyTree
    opt_state: PyTree
    experts: Experts
    trainers: Trainers
    totals: Totals


class Events(NamedTuple):
    """An `EventOrder`'s arrays, or one event."""

    kind: Any
    trainer: Any
    layer: Any
    pair: Any
    expert: Any
    answered: Any
    computed: Any


def at(tree: PyTree, place: Any) -> Any:
    """The tree of one place of the leading axes."""
    return jax.tree.map(lambda leaf: leaf[place], tree)


def put(tree: PyTree, place: Any, value: PyTree) -> Any:
    """The tree with one place of the leading axes replaced."""
    return jax.tree.map(lambda leaf, own: leaf.at[place].set(own), tree, value)


def is_finite(before: PyTree, after: PyTree) -> Any:
    """Whether the sum of the magnitudes of what was finite before is a number: one pass, where a node makes two."""

    def magnitude(old: Any, new: Any) -> Any:
        return jnp.sum(jnp.where(jnp.isfinite(old), jnp.abs(new), 0), dtype=jnp.float32)

    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return jnp.isfinite(sum(magnitude(old, new) for old, new in pairs if jnp.issubdtype(new.dtype, jnp.inexact)))
