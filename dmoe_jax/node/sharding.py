"""Places for a node's experts, and the devices that work there.

An expert keeps the *place* in which it began: a device, or a mesh of several. A mesh has two axes. Over `model` each
array of the parameters and the optimiser's state is split by a rule, one array at a time; over `data` the rows of a
batch are. XLA works out from these what is exchanged between devices. A single device is the mesh of one.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from dmoe_jax.arrays import PyTree
from dmoe_jax.machine.device import AllDevices, Device, InlineDevice, ThreadDevice
from dmoe_jax.machine.own_devices import own_cpu_devices

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
        """Devices of the whole mesh."""
        return self.data * self.model

    def __str__(self) -> str:
        return f"data={self.data},model={self.model}"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The devices that hold an expert together, as many as the mesh has, and how they share it. Equal ones share
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
        return NamedSharding(self._mesh, spec)

    @functools.cached_property
    def _mesh(self) -> Mesh:
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
        leaf = jax.jit(lambda array: array, out_shardings=NamedSharding(mesh, PartitionSpec()))(leaf)
    return np.asarray(leaf)


def parse_devices(text: str, num_devices: int) -> tuple[int, ...]:
    """Numbers of devices, of so many: "0-7", "0,2,5", "0-3,6" or "all". Raises ValueError if it is written otherwise,
    names one twice, or one that is not there."""
    if text == "all":
        return tuple(range(num_devices))
    numbers: list[int] = []
    for part in text.split(","):
        if not (found := re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part.strip())):
            raise ValueError(f"expected devices such as 0-7, 0,2,5 or all, got {text!r}")
        first, last = int(found[1]), int(found[2] or found[1])
        if last >= num_devices:
            raise ValueError(f"devices {text!r} name number {last}, but the last of {num_devices} is {num_devices - 1}")
        numbers += range(first, last + 1)
        if last < first or len(set(numbers)) != len(numbers):
            raise ValueError(f"expected each device once, and of a range the smaller first, got {text!r}")
    return tuple(numbers)


def layouts_on(devices: Sequence[jax.Device], mesh: MeshShape | None) -> tuple[Layout, ...]:
    """One layout for each device, or with a mesh as many meshes side by side as the devices make up. Raises ValueError
    if the devices are no multiple of those of a mesh."""
    shape = mesh or MeshShape()
    count = shape.num_devices
    if len(devices) % count or not devices:
        have = f"{len(devices)} {'was' if len(devices) == 1 else 'were'} given"
        raise ValueError(f"a mesh {shape} takes {count} devices, or a multiple for several side by side, but {have}")
    parts = [tuple(devices[start : start + count]) for start in range(0, len(devices), count)]
    return tuple(Layout(devices=part, mesh_shape=shape) for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One of the places of a node."""

    number: int = 0
    """Its position among them."""
    layout: Layout | None = None
    """Layout of an expert there; None: JAX decides, which puts it on its default device."""
    led: Callable[[str, Any], Any] | None = None
    """(uid, its `ExpertPrograms`) -> programs like them. If other processes hold parts of the experts, too, these have
    them do the same (`dmoe_jax.node.lockstep`)."""

    @property
    def name(self) -> str:
        """Name in metrics: its devices, or else its number."""
        return str(self.number) if self.layout is None else self.layout.name


DEFAULT_PLACE = Place()


def bytes_by_place(held: Iterable[tuple[Place, int]], num_places: int) -> list[int]:
    """Bytes that each place holds, given the place and the bytes of each expert."""
    loads = [0] * num_places
    for place, nbytes in held:
        loads[place.number] += nbytes
    return loads


def spread(nbytes: Mapping[str, int], places: Sequence[Place]) -> dict[str, Place]:
    """A place for each expert, in the order of `nbytes`, its bytes by uid: the largest is placed first, each where the
    fewest bytes are, of equal places the first."""
    held = [0] * len(places)
    chosen: dict[str, Place] = {}
    for uid in sorted(nbytes, key=lambda uid: -nbytes[uid]):
        least = min(range(len(places)), key=held.__getitem__)
        held[least] += nbytes[uid]
        chosen[uid] = places[least]
    return {uid: chosen[uid] for uid in nbytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedDevice:
    """A place and what works there."""

    place: Place
    device: Device
    """Runs the batches of its experts, one after the other, and beside other places."""


def placed(device: Device | Sequence[PlacedDevice]) -> tuple[PlacedDevice, ...]:
    """The devices of a node; a single one is at JAX's default place."""
    if isinstance(device, Sequence):
        return tuple(device)
    return (PlacedDevice(place=DEFAULT_PLACE, device=device),)


def all_of(devices: Sequence[PlacedDevice]) -> Device:
    """All of them as one, for work that concerns every expert."""
    return devices[0].device if len(devices) == 1 else AllDevices([each.device for each in devices])


def node_devices(
    device: Device, devices: str | int | Sequence[PlacedDevice] | None, mesh: MeshShape | str | None
) -> tuple[PlacedDevice, ...]:
    """The devices that `Swarm.serve` was asked for.

    Args:
      device: the process's own; it works at the first place if that is where JAX puts what it is told nothing of.
      devices: numbers among the local JAX devices (see `parse_devices`), or how many of them, from the first; None:
        as many as a mesh takes. Beside a loop of somebody's own they are devices that only experts use
        (`machine.own_devices`), in virtual time simulated ones. Devices that are placed already are taken as they are.
      mesh: the shape of the mesh that each expert lies on; None: an expert lives on one device.

    Raises:
      ValueError: devices or mesh are written otherwise, or there are not so many devices.
    """
    if devices is not None and not isinstance(devices, str | int):
        if mesh is not None:
            raise ValueError(f"the mesh {mesh} would have no effect beside devices that are placed already")
        return tuple(devices)
    shape = MeshShape.parse(mesh) if isinstance(mesh, str) else mesh
    beside_loop = isinstance(device, ThreadDevice) and device.beside_loop and jax.default_backend() == "cpu"
    apart = own_cpu_devices() if beside_loop else ()
    if devices is None and shape is None:
        if not apart:
            return (PlacedDevice(place=DEFAULT_PLACE, device=device),)
        devices = 1
    if isinstance(devices, int) and devices < 1:
        raise ValueError(f"devices must be at least 1, got {devices}")
    if isinstance(device, InlineDevice) and isinstance(devices, int) and shape is None:
        places = [Place(number=number) for number in range(devices)]
        return tuple(PlacedDevice(place=place, device=device.another() if place.number else device) for place in places)
    local = apart or jax.local_devices()
    chosen = [local[number] for number in _numbers(devices, shape, len(local))]
    found = []
    for number, layout in enumerate(layouts_on(chosen, shape)):
        own = device if local[0] in layout.devices and not apart else device.another()
        found.append(PlacedDevice(place=Place(number=number, layout=layout), device=own))
    return tuple(found)


def _numbers(devices: str | int | None, mesh: MeshShape | None, num_local: int) -> tuple[int, ...]:
    if isinstance(devices, str):
        return parse_devices(devices, num_local)
    wanted = devices or (mesh or MeshShape()).num_devices
    if wanted > num_local:
        what = f"{wanted} devices" if devices else f"a mesh {mesh} takes {wanted} devices"
        raise ValueError(f"{what}, but there {'is' if num_local == 1 else 'are'} {num_local}")
    return tuple(range(wanted))
