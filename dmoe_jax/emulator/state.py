"""The arrays of an emulated swarm, and of what its trainers read."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int32

from dmoe_jax.arrays import PyTree, all_finite, wide
from dmoe_jax.emulator.stages import LayerInput, Mixed
from dmoe_jax.model import Batch, Model, State
from dmoe_jax.routing.base import Scores


class Data(NamedTuple):
    """All batches of a run; leaves [trainers, steps, ...], with a leading axis of seeds where there are several.

    Attributes:
      batches: of the model. keys: chance of each step, from `Model.keys`; None for none.
    """

    batches: PyTree
    keys: PyTree = None


class Experts(NamedTuple):
    """All experts of one layer.

    Attributes:
      params, opt_state: with a leading axis of the grid's cells.
      updates, load: int32, updates of each, and samples that it was trained on.
      calls, staleness: the number of backward calls, and the sum of the updates between a call's forward and its own.
      rejected: updates that were not finite and left everything as it was.
    """

    params: PyTree
    opt_state: PyTree
    updates: Int32[jax.Array, " cells"]
    load: Int32[jax.Array, " cells"]
    staleness: Int32[jax.Array, ""]
    calls: Int32[jax.Array, ""]
    rejected: Int32[jax.Array, ""]


class Calls(NamedTuple):
    """The calls of a layer in one step of a trainer; further axes are samples and slots.

    Attributes:
      inputs: the experts' inputs.
      chosen: int32, the expert of each pair, by its cell. indices: int32 [..., dims], its coordinates.
      wanted, answered: bool, True if there is an expert in the slot, and if it has answered the forward call.
      outputs: its answer; zeros before. seen: int32, its updates then.
      output_grads: gradients of the outputs.
      input_grads: gradients of the differentiable inputs that have come back, summed.
    """

    inputs: tuple[Any, ...]
    chosen: Int32[jax.Array, "batch slots"]
    indices: Int32[jax.Array, "batch slots dims"]
    wanted: Bool[jax.Array, "batch slots"]
    answered: Bool[jax.Array, "batch slots"]
    outputs: Float[jax.Array, "batch slots ..."]
    seen: Int32[jax.Array, "batch slots"]
    output_grads: Float[jax.Array, "batch slots ..."]
    input_grads: tuple[Any, ...]


class Trainers(NamedTuple):
    """The arrays of all trainers; every leaf has a leading axis of them.

    Attributes:
      params: the trunk as it was read at the beginning of the step. read_at: int32, its updates then.
      state: what the step began with. next_state: what the next one begins with, if this one succeeds.
      row: int32, the number of the step's batch.
      calls, scores, mixed: of each layer: its calls, the router's scores, the mixture's result.
      mixed_grads, grads: gradients of `mixed` and of the trunk, as far as they are known.
      layer_grads: gradients, through the mixture itself, of the scores and of the experts' first inputs.
      loss: of the report. total: what is differentiated.
    """

    params: PyTree
    read_at: Int32[jax.Array, " trainers"]
    state: PyTree
    next_state: PyTree
    row: Int32[jax.Array, " trainers"]
    calls: tuple[Calls, ...]
    scores: tuple[Scores, ...]
    mixed: tuple[Mixed, ...]
    mixed_grads: tuple[Mixed, ...]
    layer_grads: tuple[LayerInput, ...]
    grads: PyTree
    loss: Float[jax.Array, " trainers"]
    total: Float[jax.Array, " trainers"]


class Totals(NamedTuple):
    """Figures of the trunk's updates.

    Attributes:
      losses: [updates], the reported loss of each, nats; NaN before it.
      staleness: int32 [updates], trunk updates between a step's reading and its writing.
      rejected: updates that were not finite and left everything as it was.
    """

    losses: Float[jax.Array, " updates"]
    staleness: Int32[jax.Array, " updates"]
    rejected: Int32[jax.Array, ""]


class SwarmState(NamedTuple):
    """A swarm between two events.

    Attributes:
      step: int32, updates of the trunk. params, opt_state: the trunk.
      experts: of each layer. trainers: all of them. totals: figures of the updates.
    """

    step: Int32[jax.Array, ""]
    params: PyTree
    opt_state: PyTree
    experts: tuple[Experts, ...]
    trainers: Trainers
    totals: Totals

    @property
    def expert_params(self) -> tuple[PyTree, ...]:
        """Parameters of each layer's experts, stacked."""
        return tuple(layer.params for layer in self.experts)

    @property
    def calls(self) -> Int32[jax.Array, "*seeds"]:
        """Backward calls that experts have learned from."""
        return sum((layer.calls for layer in self.experts), jnp.int32(0))

    @property
    def expert_staleness(self) -> Float[jax.Array, "*seeds"]:
        """Mean over these calls of the updates that their expert made between their forward and their backward."""
        return sum((layer.staleness for layer in self.experts), jnp.int32(0)) / jnp.maximum(self.calls, 1)

    @property
    def rejected(self) -> Int32[jax.Array, "*seeds"]:
        """Updates, of trunk or experts, that were not finite and left everything as it was."""
        return sum((layer.rejected for layer in self.experts), jnp.asarray(self.totals.rejected))


def take_batches(model: Model[Batch, State], streams: Sequence[Iterable[Batch]], *, steps: int, seed: int = 0) -> Data:
    """The next batches of each trainer, with the chance that a `Trainer` with this seed would give them.

    Args:
      model: for its keys, with this seed.
      streams: one for each trainer; their batches are of one shape.
      steps: number of each; a little more than updates by trainers, as some trainers are faster than others.

    Raises:
      ValueError: a stream ends before.
    """
    batches, keys = [], []
    for trainer, stream in enumerate(streams):
        own = list(itertools.islice(stream, steps))
        if len(own) < steps:
            raise ValueError(f"expected {steps} batches for trainer {trainer}, got {len(own)}")
        batches.append(_stacked(own))
        keys.append(_stacked([model.keys(one, seed=seed, trainer=trainer, step=step) for step, one in enumerate(own)]))
    return Data(_stacked(batches), _stacked(keys))


def stack_seeds(data: Sequence[Data]) -> Data:
    """The data of several seeds, with a leading axis of them."""
    return Data(*_stacked([tuple(one) for one in data]))


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def at(tree: PyTree, place: Any) -> Any:
    """The tree of one place of the leading axis."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False), tree)


def put(tree: PyTree, place: Any, value: PyTree) -> Any:
    """The tree with one place of the leading axis replaced; the place is one that there is."""
    return jax.tree.map(lambda leaf, own: jax.lax.dynamic_update_index_in_dim(leaf, own, place, 0), tree, value)


def is_finite(before: PyTree, after: PyTree) -> Any:
    """True if the largest magnitude of what was finite before is finite: one pass, where a node makes two."""

    def magnitude(old: Any, new: Any) -> Any:
        return wide(jnp.max(jnp.where(jnp.isfinite(old), jnp.abs(new), 0), initial=0))

    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return all_finite([magnitude(old, new) for old, new in pairs if jnp.issubdtype(new.dtype, jnp.inexact)])
