"""The mixture of experts on one machine: stacked parameters, everything inside one `jit`.

It is the fast mode for research on a single device and the oracle for the mixture over the network: with no delay and
no failures both give the same loss, input gradients and expert updates. In particular an expert's gradient is the
sum, over the samples that chose it, of the gradient of the loss.

Experts are *stacked*: each leaf of the parameters has a leading axis of flat expert indices, row-major over the grid.
Axes: B batch, K experts a sample, E experts in the grid, I dimensions of the grid.
"""

import math
from typing import cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from dmoe_jax.experts.base import Expert, init_by_uid
from dmoe_jax.routing.base import cell_numbers
from dmoe_jax.types import PyTree

BLOCK_ROWS = 4
"""Samples that share a gathered copy of their expert's parameters, at least: more pad more, half a block for each
expert. Where the experts have many samples each, a block has more, up to a quarter of an even share."""

ROUNDING = 1e-5
"""Weights that sum to 1 within this leave nothing over."""


def init_experts(key: PRNGKeyArray, expert: Expert, prefix: str, grid_size: tuple[int, ...]) -> PyTree:
    """Stacked parameters of a whole grid; each cell holds what a node that serves its uid makes from the same key.

    See `dmoe_jax.experts.base.init_by_uid`.
    """
    cells = jnp.stack(jnp.meshgrid(*(jnp.arange(size) for size in grid_size), indexing="ij"), axis=-1)
    coordinates = cells.reshape(-1, len(grid_size))
    return jax.vmap(lambda cell: init_by_uid(key, expert, prefix, tuple(cell)))(coordinates)


def init_opt_states(optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Stacked optimiser states. Each expert has its own step count, which `optimizer.init(params)` would share."""
    return jax.vmap(optimizer.init)(params)


def expert_load(
    indices: Int[Array, "batch k dims"], mask: Bool[Array, "batch k"], grid_size: tuple[int, ...]
) -> Int[Array, " num_experts"]:
    """How many samples each expert serves."""
    flat = cell_numbers(indices, grid_size)
    return jnp.zeros(math.prod(grid_size), jnp.int32).at[flat].add(mask.astype(jnp.int32))


def local_mixture(
    expert: Expert,
    params: PyTree,
    grid_size: tuple[int, ...],
    indices: Int[Array, "batch k dims"],
    mask: Bool[Array, "batch k"],
    weights: Float[Array, "batch k"],
    *inputs: Array,
    dropout_keys: UInt32[Array, "batch 2"] | None = None,
) -> Float[Array, "batch ..."]:
    """sum_k weights[b, k] * f_{indices[b, k]}(inputs[b]), and what the weights leave over of the first input.

    Learning@home section 3.2, where weights sum to 1 and only the f remain. See `combine_outputs` for the rest. What a
    masked expert would have computed has no influence, on the value or on a gradient.

    The parameters of the chosen experts are gathered, once for every few samples that go to the same one: right for
    any expert, but memory grows with the batch and not with the number of experts.

    Args:
      expert: the network that all experts share.
      params: stacked parameters, [E, ...].
      grid_size: extents of the grid, E their product.
      indices: coordinates of the chosen experts; those under a False of the mask must be valid, too.
      mask: which of the chosen experts take part.
      weights: combine weights, 0 where the mask is False.
      inputs: the expert's inputs, batch first.
      dropout_keys: in training, for experts that take a key: key data for each sample, the same for all of its experts.

    Raises:
      ValueError: if the inputs are not those of the expert, or it takes no keys.
    """
    if len(inputs) != len(expert.inputs):
        names = ", ".join(spec.name for spec in expert.inputs)
        raise ValueError(f"expert {expert.name!r} takes {len(expert.inputs)} inputs ({names}), got {len(inputs)}")
    if dropout_keys is not None and not expert.takes_key:
        raise ValueError(f"expert {expert.name!r} takes no dropout keys")
    keyed = {} if dropout_keys is None else {"keys": dropout_keys}

    outputs = _outputs(expert, params, math.prod(grid_size), cell_numbers(indices, grid_size), inputs, keyed)
    return combine_outputs(weights, mask, outputs, inputs[0])


def _outputs(
    expert: Expert,
    params: PyTree,
    num_experts: int,
    chosen: Int[Array, "batch k"],
    inputs: tuple[Array, ...],
    keyed: dict[str, Array],
) -> Array:
    """What the chosen experts make of each sample, [batch, k, ...].

    The B K pairs of a sample and an expert are sorted by expert and cut into blocks of `BLOCK_ROWS` pairs of one
    expert, the last block of each expert padded. A block gathers its expert's parameters once and is one call of
    `apply`.
    """
    batch, k = chosen.shape
    pairs = batch * k
    # With few pairs for each expert, padding would cost more than gathering.
    share = pairs // (4 * num_experts)
    rows = max(BLOCK_ROWS, 1 << (share.bit_length() - 1)) if share else 1
    num_blocks = (pairs + num_experts * (rows - 1)) // rows  # as many as there can be, whatever was chosen
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    expert_of_pair = chosen.reshape(-1)[order]
    counts = jnp.zeros(num_experts, jnp.int32).at[expert_of_pair].add(1)
    blocks = -(-counts // rows)
    place = jnp.arange(pairs) - (jnp.cumsum(counts) - counts)[expert_of_pair]
    block = (jnp.cumsum(blocks) - blocks)[expert_of_pair] + place // rows
    slot = place % rows
    # What pads is a pair that exists: nobody looks at its output, but an expert that nobody chose may hold anything.
    sample_of = jnp.full((num_blocks, rows), order[0] // k).at[block, slot].set(order // k)
    expert_of = jnp.full(num_blocks, expert_of_pair[0]).at[block].set(expert_of_pair)
    own = jax.tree.map(lambda leaf: leaf[expert_of], params)
    there, keys_there = jax.tree.map(lambda part: part[sample_of], (inputs, keyed))
    outputs: Array = jax.vmap(lambda own, there, keys: expert.apply(own, *there, **keys))(own, there, keys_there)
    back = jnp.zeros((2, pairs), block.dtype).at[:, order].set(jnp.stack([block, slot]))
    return outputs[back[0], back[1]].reshape(batch, k, *outputs.shape[2:])


def combine_outputs(
    weights: Float[Array, "batch k"], mask: Bool[Array, "batch k"], outputs: Array, x: Array
) -> Float[Array, "batch ..."]:
    """sum_k weights_k outputs_k + (1 - sum_k weights_k) x, where outputs have the shape and dtype of x.

    Experts whose output is like their first input carry their own residual connection: what the weights leave over
    passes x through, which is what an expert with nothing to add would return, and a sample without any expert passes
    unchanged. Where an expert returns something else, what the weights leave over adds nothing: such a sample gives
    zeros. It is the last step of `local_mixture` and of the remote mixture.

    Args:
      weights: combine weights, 0 where the mask is False; at most 1 in sum.
      mask: which outputs there are. What stands in the others has no influence.
      outputs: [batch, k, ...], of the experts.
      x: [batch, ...], their first input.
    """
    cell = (...,) + (None,) * (outputs.ndim - 2)
    mixed = jnp.sum(weights[cell].astype(outputs.dtype) * jnp.where(mask[cell], outputs, 0), axis=1)
    if outputs.shape[2:] != x.shape[1:] or outputs.dtype != x.dtype:
        return mixed
    # Weights that sum to 1 up to rounding leave nothing over: an exact 0 keeps x (and its gradient) out of the mixture.
    left = 1 - jnp.sum(weights, axis=1)
    left = jnp.where(left > ROUNDING, left, 0)[(...,) + (None,) * (mixed.ndim - 1)]
    return mixed + left.astype(mixed.dtype) * x


def update_experts(
    optimizer: optax.GradientTransformation,
    params: PyTree,
    opt_state: PyTree,
    grads: PyTree,
    used: Bool[Array, " num_experts"],
) -> tuple[PyTree, PyTree]:
    """One optimiser step for each expert that took part, as its node would take it.

    The step is vmapped over the experts: clipping by global norm, step counts and trust ratios stay each expert's
    own. Experts that took no part keep their parameters and state to the bit (with momentum or weight decay, a zero
    gradient would still move them).

    Args:
      optimizer: applied to each expert separately.
      params: stacked parameters.
      opt_state: stacked states, from `init_opt_states`.
      grads: stacked gradients.
      used: which experts take the step.

    Returns: (params, opt_state).
    """

    def step(params: PyTree, opt_state: PyTree, grads: PyTree, used: Bool[Array, ""]) -> tuple[PyTree, PyTree]:
        updates, new_state = optimizer.update(grads, opt_state, params)
        new = (optax.apply_updates(params, updates), new_state)
        kept = jax.tree.map(lambda after, before: jnp.where(used, after, before), new, (params, opt_state))
        return cast(tuple[PyTree, PyTree], kept)

    return jax.vmap(step)(params, opt_state, grads, used)
