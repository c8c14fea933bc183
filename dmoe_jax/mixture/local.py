"""The mixture of experts on one machine: stacked parameters, everything inside one `jit`.

It is the fast mode for research on a single device and the oracle for the mixture over the network: with no delay and
no failures both give the same loss, input gradients and expert updates.

Experts are *stacked*: each leaf of the parameters has a leading axis of flat expert indices, row-major over the grid.
Axes: B batch, K experts a sample, E experts in the grid, I dimensions of the grid.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from dmoe_jax.arrays import PyTree
from dmoe_jax.experts.base import Expert, init_by_uid
from dmoe_jax.mixture.combine import combine_outputs
from dmoe_jax.mixture.grouped import call_experts
from dmoe_jax.routing.base import cell_numbers

_DRAWN_AT_ONCE = 1 << 22
"""Numbers of a layer's experts up to which they are drawn by one operation, which compiles faster."""
_CACHED = 1 << 17
"""Numbers that are drawn together where there are more: some steps of the drawing hold several times as many."""


def init_experts(key: PRNGKeyArray, expert: Expert, prefix: str, grid_size: tuple[int, ...]) -> PyTree:
    """Stacked parameters of a whole grid; each cell holds what a node that serves its uid makes from the same key, see
    `init_by_uid`."""
    cells = jnp.stack(jnp.meshgrid(*(jnp.arange(size) for size in grid_size), indexing="ij"), axis=-1)
    coordinates = cells.reshape(-1, len(grid_size))

    def init_cell(cell: Int[Array, " dims"]) -> PyTree:
        return init_by_uid(key, expert, prefix, tuple(cell))

    of_one = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(init_cell, coordinates[0])))
    if of_one * len(coordinates) <= _DRAWN_AT_ONCE:
        return jax.vmap(init_cell)(coordinates)
    # Drawing goes through its numbers dozens of times: a third of the time where a cache holds them.
    return jax.lax.map(init_cell, coordinates, batch_size=max(1, _CACHED // of_one))


def expert_load(
    indices: Int[Array, "batch k dims"], mask: Bool[Array, "batch k"], grid_size: tuple[int, ...]
) -> Int[Array, " num_experts"]:
    """Number of samples that each expert serves."""
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

    Learning@home section 3.2, where weights sum to 1 and only the f remain. See `combine_outputs` for the rest. A
    masked expert has no influence, on the value or on a gradient.

    Args:
      expert: the network that all experts share.
      params: stacked parameters, [E, ...]; or `WithDeltas`, for gradients of the chosen alone.
      grid_size: extents of the grid, E their product.
      indices: coordinates of the chosen experts; those under a False of the mask must be valid, too.
      mask: True for each of the chosen experts that takes part.
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

    chosen = jnp.where(mask, cell_numbers(indices, grid_size), math.prod(grid_size))
    outputs = call_experts(expert, params, chosen, inputs, keyed)
    return combine_outputs(weights, mask, outputs, inputs[0])
