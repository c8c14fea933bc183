"""Places for a node's experts, and the devices that work there.

An expert keeps the *place* in which it began: a device, or a mesh of several (`dmoe_jax.mesh`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from dmoe_jax.machine.device import AllDevices, Device, InlineDevice, ThreadDevice
from dmoe_jax.machine.own_devices import own_cpu_devices
from dmoe_jax.mesh.layout import Layout, MeshShape, chosen_devices


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
    found = []
    for number, layout in enumerate(layouts_on(chosen_devices(devices, shape, local), shape)):
        own = device if local[0] in layout.devices and not apart else device.another()
        found.append(PlacedDevice(place=Place(number=number, layout=layout), device=own))
    return tuple(found)
