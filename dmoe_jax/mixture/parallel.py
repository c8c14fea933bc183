"""The local mixture over several devices: the experts of a layer spread over an axis of a mesh (expert parallelism).

With D devices on the axis, each holds E / D experts and B / D of the samples. A device sends each of its samples once
to every device that has an expert for it (an all-to-all), calls its own experts on those that came, and sends back the
weighted sum of their outputs (a second all-to-all). Gradients take the same ways back, and an expert's stay there.

Axes: B samples, K experts a sample, E experts in the grid, D devices, C = B / D samples of a device.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dmoe_jax.arrays import PyTree
from dmoe_jax.experts.base import Expert
from dmoe_jax.mixture.combine import add_rest, weighted_sum
from dmoe_jax.mixture.grouped import Keyed, call_experts
from dmoe_jax.mixture.local_update import num_stacked


@functools.partial(jax.tree_util.register_dataclass, data_fields=["params"], meta_fields=["mesh", "axis"])
@dataclass(frozen=True, kw_only=True)
class ShardedExperts:
    """Stacked parameters that are spread over an axis of a mesh; stands in for them in `local_mixture`.

    So a model's `local_forward` takes a tuple of these, and its gradient with respect to them is of these, too;
    `init_opt_states` and `update_experts` take one as it is.
    """

    params: PyTree
    """[E, ...], E a multiple of the devices on the axis."""
    mesh: Mesh
    """The devices."""
    axis: str
    """Name of the axis of the mesh; samples are spread over it, too."""


def shard_experts(params: PyTree, mesh: Mesh, axis: str) -> ShardedExperts:
    """Put stacked parameters onto the devices of an axis, E / D experts on each.

    Raises:
      ValueError: there is no such axis, or E is no multiple of its devices.
    """
    num_devices = _num_devices(mesh, axis)
    _check_divides("experts", num_stacked(params), num_devices, axis)
    spread = NamedSharding(mesh, PartitionSpec(axis))
    return ShardedExperts(params=jax.device_put(params, spread), mesh=mesh, axis=axis)


def parallel_mixture(
    expert: Expert,
    experts: ShardedExperts,
    grid_size: tuple[int, ...],
    cells: Int[Array, "batch k"],
    mask: Bool[Array, "batch k"],
    weights: Float[Array, "batch k"],
    inputs: tuple[Array, ...],
    keyed: Keyed,
) -> Float[Array, "batch ..."]:
    """`local_mixture` with the experts on several devices: the same numbers, up to rounding. Under jit or outside.

    Each device has room for all B samples, so that none is ever lost.

    Args:
      cells: flat numbers of the chosen experts.
      mask, weights, inputs: as of `local_mixture`.
      keyed: dropout keys, if there are any.

    Raises:
      ValueError: samples or experts are no multiple of the devices on the axis.
    """
    mesh, axis = experts.mesh, experts.axis
    num_devices, num_experts = _num_devices(mesh, axis), math.prod(grid_size)
    _check_divides("experts", num_experts, num_devices, axis)
    _check_divides("samples", cells.shape[0], num_devices, axis)
    on_device = functools.partial(_on_device, expert, axis, num_experts // num_devices)
    spread = PartitionSpec(axis)
    # The check of what varies over devices knows neither `custom_vjp` nor `cond` well enough.
    run = jax.shard_map(on_device, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=False)
    mixed: Array = run(experts.params, cells, mask, weights, inputs, keyed)
    return mixed


def _route(
    device: Int[Array, "samples k"], mask: Bool[Array, "samples k"], num_devices: int
) -> tuple[Int[Array, "devices samples"], Bool[Array, "devices samples k"]]:
    """(the sample of a device in each row of what it sends, the number of all where the row is empty; True for each
    expert of that sample that is on the device where the row goes)."""
    count = device.shape[0]
    goes = (device[..., None] == jnp.arange(num_devices)) & mask[..., None]  # [C, K, D]
    goes_once = goes.any(axis=1)
    row = jnp.where(goes_once, jnp.cumsum(goes_once, axis=0) - 1, count)
    to = jnp.arange(num_devices)
    sample = jnp.full((num_devices, count), count).at[to, row].set(jnp.arange(count)[:, None], mode="drop")
    is_there = jnp.moveaxis(goes, -1, 0)[to[:, None], jnp.minimum(sample, count - 1)]
    return sample, is_there & (sample < count)[..., None]


def _on_device(
    expert: Expert,
    axis: str,
    own_experts: int,
    params: PyTree,
    cells: Int[Array, "samples k"],
    mask: Bool[Array, "samples k"],
    weights: Float[Array, "samples k"],
    inputs: tuple[Array, ...],
    keyed: Keyed,
) -> Array:
    """One device's part: of its samples, and of its experts."""
    num_devices, (count, k) = jax.lax.axis_size(axis), cells.shape
    sample, is_there = _route(cells // own_experts, mask, num_devices)

    def send(part: Array) -> Array:
        """[D, C, ...] by destination -> [D * C, ...] by origin."""
        return jax.lax.all_to_all(part, axis, 0, 0, tiled=True).reshape(-1, *part.shape[2:])

    def rows(part: Array) -> Array:
        return part.at[sample].get(mode="fill", fill_value=0)

    chosen = send(jnp.where(is_there, rows(cells % own_experts), own_experts))
    weights_there = send(jnp.where(is_there, rows(weights), 0))
    inputs_there, keyed_there = jax.tree.map(lambda part: send(rows(part)), (inputs, keyed))
    outputs = call_experts(expert, params, chosen, inputs_there, keyed_there, likely_calls=count * k)
    sums = weighted_sum(weights_there, chosen < own_experts, outputs)
    back = send(sums.reshape(num_devices, count, *sums.shape[1:]))
    mixed = jnp.zeros((count, *sums.shape[1:]), sums.dtype).at[sample.reshape(-1)].add(back, mode="drop")
    return add_rest(jnp.where(mask, weights, 0), mixed, inputs[0])


def _num_devices(mesh: Mesh, axis: str) -> int:
    if axis not in mesh.shape:
        raise ValueError(f"the mesh has the axes {', '.join(mesh.axis_names)}, none is {axis!r}")
    return mesh.shape[axis]


def _check_divides(what: str, number: int, num_devices: int, axis: str) -> None:
    if number % num_devices:
        raise ValueError(f"{number} {what} are no multiple of the {num_devices} devices on axis {axis!r}")
