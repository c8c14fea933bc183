"""The devices of a node: for each place in which experts live, what runs their batches there."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from dmoe_jax.device import AllDevices, Device, InlineDevice, ThreadDevice
from dmoe_jax.node.placement import DEFAULT_PLACE, Place
from dmoe_jax.node.sharding import MeshShape, ShardingRule, layouts_on, parse_devices, shard_largest_dimension
from dmoe_jax.own_devices import own_cpu_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedDevice:
    """A place and what works there."""

    place: Place
    """Where experts live."""
    device: Device
    """Runs their batches, one after the other, and beside other places."""


def placed(device: Device | Sequence[PlacedDevice]) -> tuple[PlacedDevice, ...]:
    """The devices of a node; a single one is at JAX's default place."""
    if isinstance(device, Sequence):
        return tuple(device)
    return (PlacedDevice(place=DEFAULT_PLACE, device=device),)


def all_of(devices: Sequence[PlacedDevice]) -> Device:
    """All of them as one, for work that concerns every expert."""
    return devices[0].device if len(devices) == 1 else AllDevices([each.device for each in devices])


def node_devices(
    device: Device,
    devices: str | int | Sequence[PlacedDevice] | None,
    mesh: MeshShape | str | None,
    rule: ShardingRule = shard_largest_dimension,
) -> tuple[PlacedDevice, ...]:
    """The devices that `Swarm.serve` was asked for.

    Args:
      device: the process's own; it works at the first place if that is where JAX puts what it is told nothing of.
      devices: numbers among the local JAX devices (see `parse_devices`), or how many of them, from the first; None:
        as many as a mesh takes. Beside a loop of somebody's own they are devices that only experts use
        (`dmoe_jax.own_devices`). In virtual time a number is one of simulated devices. Devices that are placed already
        are taken as they are.
      mesh: the shape of the mesh that each expert lies on; None: an expert lives on one device.
      rule: how arrays are split over a mesh.

    Raises:
      ValueError: devices or mesh are written otherwise, or there are not so many devices.
    """
    if devices is not None and not isinstance(devices, str | int):
        if mesh is not None:
            raise ValueError(f"the mesh {mesh} would have no effect beside devices that are placed already")
        return tuple(devices)
    shape = MeshShape.parse(mesh) if isinstance(mesh, str) else mesh
    apart = own_cpu_devices() if _runs_beside_loop(device) else ()
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
    for number, layout in enumerate(layouts_on(chosen, shape, rule)):
        own = device if local[0] in layout.devices and not apart else device.another()
        found.append(PlacedDevice(place=Place(number=number, layout=layout), device=own))
    return tuple(found)


def _runs_beside_loop(device: Device) -> bool:
    """True if the experts need devices of their own: on a CPU, beside a loop that uses JAX's."""
    return isinstance(device, ThreadDevice) and device.beside_loop and jax.default_backend() == "cpu"


def _numbers(devices: str | int | None, mesh: MeshShape | None, num_local: int) -> tuple[int, ...]:
    if isinstance(devices, str):
        return parse_devices(devices, num_local)
    wanted = devices or (mesh or MeshShape()).num_devices
    if wanted > num_local:
        what = f"{wanted} devices" if devices else f"a mesh {mesh} takes {wanted} devices"
        raise ValueError(f"{what}, but there {'is' if num_local == 1 else 'are'} {num_local}")
    return tuple(range(wanted))
