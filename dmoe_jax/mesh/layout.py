"""Arrays that lie on several devices together: an expert's, or a trainer's trunk.

A mesh has two axes. Over `model` each array of the parameters and the optimiser's state is split by a rule, one array
at a time; over `data` the rows of a batch are. XLA works out from these what is exchanged between devices. A single
device is the mesh of one.

A trunk's parameters may also lie as their owner laid them out, each with any `NamedSharding`. What follows from them is
made here: the place of an optimiser's state (`init_like`, `shardings_like`), and that of a batch (`rows_like`).
"""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from dmoe_jax.arrays import PyTree, as_params, copied, stored

DATA, MODEL = "data", "model"


ShardingRule = Callable[[str, jax.ShapeDtypeStruct, "MeshShape"], PartitionSpec]
"""(name of an array such as "params/Dense_0/kernel", its shape and type, the mesh) -> which axis splits what."""


def shard_largest_dimension(name: str, array: jax.ShapeDtypeStruct, mesh: "MeshShape") -> PartitionSpec:
    """Split the largest dimension that the axis `model` divides, the first of equal ones; an array without one is whole
    on every device."""
    del name
    sizes = [size if size >= mesh.model and size % mesh.model == 0 else 0 for size in array.shape]
    if mesh.model == 1 or not any(sizes):
        return PartitionSpec()
    dimension = sizes.index(max(sizes))
    return PartitionSpec(*[None] * dimension, MODEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Devices along each axis of a mesh, and the rule by which arrays lie on it."""

    data: int = 1
    """Parts into which the rows of a batch are split."""
    model: int = 1
    """Parts into which parameters and optimiser state are split."""
    rule: ShardingRule = shard_largest_dimension
    """Says of each array how it is split."""

    def __post_init__(self) -> None:
        if self.data < 1 or self.model < 1:
            raise ValueError(f"the axes of a mesh have at least one device each, got {self}")

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """Read "data=2,model=4"; an axis that is not named has one device. Raises ValueError if it is written
        otherwise."""
        sizes: dict[str, int] = {}
        for part in text.split(","):
            axis, _, size = part.strip().partition("=")
            if axis not in (DATA, MODEL) or axis in sizes or not re.fullmatch(r"-?[0-9]+", size):
                raise ValueError(f"expected a mesh such as data=2,model=4, of the axes data and model, got {text!r}")
            sizes[axis] = int(size)
        return cls(data=sizes.get(DATA, 1), model=sizes.get(MODEL, 1))

    @property
    def num_devices(self) -> int:
        return self.data * self.model

    def __str__(self) -> str:
        return f"data={self.data},model={self.model}"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The devices that hold parameters together, as many as the mesh has, and how they share them. Equal ones share
    compiled programs."""

    devices: tuple[jax.Device, ...]
    """Devices of the mesh, those of one row of `data` side by side."""
    mesh_shape: MeshShape = MeshShape()
    """Devices along each axis, and how arrays are split over them."""

    def __post_init__(self) -> None:
        if len(self.devices) != self.mesh_shape.num_devices:
            needed = self.mesh_shape.num_devices
            raise ValueError(f"the mesh {self.mesh_shape} takes {needed} devices, got {len(self.devices)}")

    @property
    def name(self) -> str:
        """The devices in a few letters, such as "cpu:3" or "gpu:0-3"."""
        ids = [device.id for device in self.devices]
        listed = ",".join(map(str, ids))
        if len(ids) > 1 and ids == list(range(ids[0], ids[0] + len(ids))):
            listed = f"{ids[0]}-{ids[-1]}"
        return f"{self.devices[0].platform}:{listed}"

    @functools.cached_property
    def spans_processes(self) -> bool:
        """True if some of the devices belong to other processes, which must then run the same programs."""
        return any(device.process_index != device.client.process_index() for device in self.devices)

    @functools.cached_property
    def everywhere(self) -> Sharding:
        """Sharding of an array that is whole on every device."""
        return self._sharding(PartitionSpec())

    @functools.cached_property
    def rows(self) -> Sharding:
        """Sharding of an array whose first axis counts the rows of a batch."""
        return self._sharding(PartitionSpec(DATA))

    @property
    def results(self) -> Sharding:
        """Sharding of a result with a row for each row of the batch: what this process reads must be with it."""
        return self.everywhere if self.spans_processes else self.rows

    def state_shardings(self, state: PyTree) -> PyTree:
        """The sharding of each array of a state, or of its shapes, by the rule. Raises ValueError, naming the array, if
        the rule's answer does not fit."""

        def of(path: tuple[Any, ...], leaf: Any) -> Sharding:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            spec = self.mesh_shape.rule(name, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.mesh_shape)
            try:
                sharding = self._sharding(spec)
                sharding.shard_shape(leaf.shape)
            except Exception as error:  # JAX has several for a specification that does not fit
                given = f"the sharding rule gives {spec} for {name} of shape {leaf.shape}"
                raise ValueError(f"{given}, which does not fit the mesh {self.mesh_shape}") from error
            return sharding

        return jax.tree_util.tree_map_with_path(of, state)

    def for_program(self, tree: PyTree) -> PyTree:
        """Host arrays as the arguments of a program that takes their rows split as in `rows`; a number is `everywhere`.
        Where the devices are this process's own the program itself distributes them."""
        if not self.spans_processes:
            return tree
        return jax.tree.map(lambda leaf: put(leaf, self.rows if np.ndim(leaf) else self.everywhere), tree)

    def shape_for_program(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """The shape of what `for_program` makes of an array, for compiling without it."""
        sharding = (self.rows if shape else self.everywhere) if self.spans_processes else None
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def _sharding(self, spec: PartitionSpec) -> Sharding:
        if len(self.devices) == 1:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, spec)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices as JAX has them."""
        grid = np.array(self.devices).reshape(self.mesh_shape.data, self.mesh_shape.model)
        return Mesh(grid, (DATA, MODEL))


def put(leaf: Any, sharding: Sharding) -> jax.Array:
    """A copy of an array laid out so; of an array on the host no device holds more than its part. Where devices belong
    to other processes, these call it with the same array at the same time."""
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding, may_alias=False)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.jit(jnp.copy, out_shardings=sharding)(leaf)
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def to_host(leaf: Any) -> Any:
    """An array, wherever its parts are, whole on the host. Processes that share it call this at the same time."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.is_fully_replicated:
        mesh = leaf.sharding.mesh  # type: ignore[attr-defined]
        leaf = jax.jit(_same, out_shardings=NamedSharding(mesh, PartitionSpec()))(leaf)
    return np.asarray(leaf)


def whole_on_host(tree: PyTree) -> PyTree:
    """The tree in NumPy arrays of its own, as `stored`. Processes that share it call this at the same time; their
    devices hold one whole array after the other."""
    return jax.tree.map(lambda leaf: np.array(to_host(stored(leaf))), tree)


def _same(tree: PyTree) -> PyTree:
    return tree


def parse_devices(text: str, num_devices: int, *, hint: str = "") -> tuple[int, ...]:
    """Numbers of devices, of so many: "0-7", "0,2,5", "0-3,6" or "all".

    Raises:
      ValueError: it is written otherwise, names one twice, or one that is not there; then with the hint at its end.
    """
    if text == "all":
        return tuple(range(num_devices))
    numbers: list[int] = []
    for part in text.split(","):
        if not (found := re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part.strip())):
            raise ValueError(f"expected devices such as 0-7, 0,2,5 or all, got {text!r}")
        first, last = int(found[1]), int(found[2] or found[1])
        if last >= num_devices:
            there = f"the last of {num_devices} is {num_devices - 1}"
            raise ValueError(f"devices {text!r} name number {last}, but {there}{hint}")
        numbers += range(first, last + 1)
        if last < first or len(set(numbers)) != len(numbers):
            raise ValueError(f"expected each device once, and of a range the smaller first, got {text!r}")
    return tuple(numbers)


_MORE_OF_A_CPU = " (XLA_FLAGS=--xla_force_host_platform_device_count=N makes N devices of a CPU)"


def chosen_devices(
    devices: str | int | None, mesh: MeshShape | None, available: Sequence[jax.Device]
) -> tuple[jax.Device, ...]:
    """The devices that were asked for: their numbers among those available (see `parse_devices`); or how many, from the
    first; None: as many as the mesh takes. Raises ValueError if they are not there."""
    have, hint = len(available), _MORE_OF_A_CPU if available[0].platform == "cpu" else ""
    if isinstance(devices, str):
        return tuple(available[number] for number in parse_devices(devices, have, hint=hint))
    wanted = devices or (mesh or MeshShape()).num_devices
    if wanted > have:
        what = f"{wanted} devices" if devices else f"a mesh {mesh} takes {wanted} devices"
        raise ValueError(f"{what}, but there {'is' if have == 1 else 'are'} {have}{hint}")
    return tuple(available[:wanted])


MeshLike = str | MeshShape | Mesh
"""A mesh as callers name it: "data=2,model=4", a shape, or a mesh of JAX whose axes are `data` and `model`."""


def layout_of(mesh: MeshLike) -> Layout:
    """The layout of parameters on a mesh: if it is no mesh of JAX, on this process's first devices, or on those of all
    processes where it takes more than this one has.

    Raises:
      ValueError: it is written otherwise, takes more devices than there are, or has another axis.
    """
    if not isinstance(mesh, Mesh):
        shape = MeshShape.parse(mesh) if isinstance(mesh, str) else mesh
        local = jax.local_devices()
        available = local if shape.num_devices <= len(local) else jax.devices()
        return Layout(devices=chosen_devices(None, shape, available), mesh_shape=shape)
    sizes = dict(mesh.shape)
    if unknown := [axis for axis in sizes if axis not in (DATA, MODEL)]:
        raise ValueError(
            f"a mesh to lay parameters out on has the axes data and model, got {unknown[0]!r}; with other axes give "
            "parameters that lie on it already"
        )
    grid = mesh.devices.T if mesh.axis_names[0] == MODEL else mesh.devices
    shape = MeshShape(data=sizes.get(DATA, 1), model=sizes.get(MODEL, 1))
    return Layout(devices=tuple(grid.flat), mesh_shape=shape)


def sharding_of(leaf: Any) -> Sharding | None:
    """The sharding of an array that lies on several devices; None for any other."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or leaf.sharding.num_devices == 1:
        return None
    return leaf.sharding


def mesh_of(tree: PyTree) -> Mesh | None:
    """The mesh on which arrays of a tree lie, that of the first; None: each is on one device, or on the host.

    Raises:
      ValueError: the sharding of one on several devices has no mesh.
    """
    for leaf in jax.tree.leaves(tree):
        sharding = sharding_of(leaf)
        if sharding is not None:
            if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
                raise ValueError(f"parameters on several devices have a NamedSharding each, got {sharding}")
            return sharding.mesh
    return None


def laid_out(params: PyTree, mesh: MeshLike | None) -> PyTree:
    """Parameters on a mesh; None: as they lie. If some are on several devices, the others are then whole on each.

    Raises:
      ValueError: as of `layout_of`, a leaf is no array of numbers, or the mesh's rule does not fit one.
    """
    if mesh is None:
        own = mesh_of(params)
        if own is None:
            return params
        whole = NamedSharding(own, PartitionSpec())
        return jax.tree.map(lambda leaf: leaf if sharding_of(leaf) is not None else put(leaf, whole), params)
    # Arrays go to their devices part by part: no device need hold one whole.
    if not all(isinstance(leaf, np.ndarray | jax.Array) for leaf in jax.tree.leaves(params)):
        params = as_params(params)
    return jax.tree.map(put, params, layout_of(mesh).state_shardings(params))


def shardings_like(state: PyTree, params: PyTree) -> PyTree:
    """The sharding of each array of an optimiser's state, or of its shapes, whose parameters lie on a mesh: that of the
    parameter of its name and shape, or else of its shape; what has no parameter's shape is whole on every device."""
    mesh = mesh_of(params)
    assert mesh is not None
    whole = NamedSharding(mesh, PartitionSpec())
    named = dict(jax.tree_util.tree_leaves_with_path(params))
    by_shape = {leaf.shape: leaf.sharding for leaf in reversed(named.values())}

    def of(path: tuple[Any, ...], leaf: Any) -> Sharding:
        shape = np.shape(leaf)
        for start in range(len(path) + 1):
            own = named.get(path[start:])
            if own is not None and own.shape == shape:
                found: Sharding = own.sharding
                return found
        return by_shape.get(shape, whole)

    return jax.tree_util.tree_map_with_path(of, state)


def init_like(init: Callable[[PyTree], PyTree], params: PyTree) -> PyTree:
    """The state that `init` makes of parameters, in arrays of its own, where `shardings_like` has them; no device holds
    more than its part meanwhile."""
    if mesh_of(params) is None:
        return copied(init(params))
    shardings = shardings_like(jax.eval_shape(init, params), params)
    return jax.jit(lambda params: copied(init(params)), out_shardings=shardings)(params)


def sharding_of_rows(mesh: Mesh, number: int) -> NamedSharding:
    """The sharding of so many rows: over the axis `data` if they are a multiple of its devices, else whole on each."""
    parts = dict(mesh.shape).get(DATA, 1)
    return NamedSharding(mesh, PartitionSpec(DATA) if parts > 1 and number % parts == 0 else PartitionSpec())


_Tree = TypeVar("_Tree")


def rows_like(params: PyTree) -> Callable[[_Tree], _Tree]:
    """A function that puts a batch where parameters lie: rows over the axis `data` where their number is a multiple of
    its devices, else whole on each. What lies on several devices stays, and so does all if the parameters do not."""
    mesh = mesh_of(params)
    if mesh is None:
        return lambda batch: batch

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray | jax.Array) or leaf.dtype.kind in "OSUMm" or sharding_of(leaf) is not None:
            return leaf
        return put(leaf, sharding_of_rows(mesh, leaf.shape[0]) if leaf.ndim else NamedSharding(mesh, PartitionSpec()))

    return lambda batch: jax.tree.map(placed, batch)
