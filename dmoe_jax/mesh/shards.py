"""Arrays on the devices of several processes (`jax.distributed`): the pieces that this process has, and back.

A process holds some shards of each array, and others may hold the same ones. It takes part with them in two ways:

- *held* pieces are all distinct shards of this process. A copied state travels so: whoever takes it needs nothing else.
- *owned* pieces are the shards that are this process's to average: each shard has one owner, so that all pieces of all
  processes are the model, each number once. What comes back goes to those that hold the same shard inside the replica,
  by XLA: copies that were averaged apart could part for good.

Of arrays that are this process's own, whatever their sharding, the one piece is the whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dmoe_jax.arrays import PyTree, kept_like
from dmoe_jax.machine.remembered import remembered
from dmoe_net.types import Array

Place = tuple[tuple[int, int], ...]
"""First number and end of a shard along each dimension."""


def spans_processes(leaf: Any) -> bool:
    """True for an array of which other processes hold a part, or a copy."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def tree_spans_processes(tree: PyTree) -> bool:
    """True if other processes hold parts of the tree."""
    return any(map(spans_processes, jax.tree.leaves(tree)))


def check_on_all_processes(tree: PyTree) -> None:
    """Raise ValueError if some of the processes of `jax.distributed` have no part of a tree that spans several."""
    spanning = [leaf for leaf in jax.tree.leaves(tree) if spans_processes(leaf)]
    there = {device.process_index for leaf in spanning for device in leaf.sharding.device_set}
    count = jax.process_count()
    if len(there) < count:
        raise ValueError(
            f"the model lies on {len(there)} of the {count} processes of jax.distributed: a replica has all of them"
        )


def held_pieces(leaf: Any) -> list[Any]:
    """The distinct shards that this process holds: arrays of one device each."""
    if not spans_processes(leaf):
        return [leaf]
    found = _shards_here(leaf)
    return [found[place] for place in sorted(found)]


def with_pieces(own: Any, pieces: Iterator[Any]) -> Any:
    """An array like `own` in buffers of its own, from as many of the pieces, `sent` or `stored`, as `held_pieces` gave
    of it."""
    if not spans_processes(own):
        return kept_like(own, next(pieces))
    indices = own.sharding.addressable_devices_indices_map(own.shape)
    places = {device: _place(index, own.shape) for device, index in indices.items()}
    numbers = {place: next(pieces) for place in sorted(set(places.values()))}
    local = {shard.device: shard.data for shard in own.addressable_shards}
    parts = [kept_like(local[device], numbers[place]) for device, place in places.items()]
    return jax.make_array_from_single_device_arrays(own.shape, own.sharding, parts)


def placed_like(array: Any, own: Any) -> Any:
    """The array laid out as another of its shape. Where that spans processes, all call this at the same time."""
    if not isinstance(own, jax.Array) or not own.committed:
        return array
    if isinstance(array, jax.Array) and array.sharding.is_equivalent_to(own.sharding, own.ndim):
        return array
    return jax.device_put(array, own.sharding)


@dataclass(frozen=True, kw_only=True)
class OwnedLeaf:
    """The shards of one array, and which of their holders owns them.

    The axes of the mesh over which the array is not split count its copies; one copy is that of the owners.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding
    copy: int
    """Number of the owners' copy."""

    @classmethod
    def of(cls, leaf: jax.Array, held: dict[int, int]) -> "OwnedLeaf":
        """The array's shards, of the copy with which processes own the most alike.

        Args:
          held: process -> numbers that it owns already; is added to.
        """
        sharding = leaf.sharding
        if not isinstance(sharding, NamedSharding):
            raise ValueError(f"an array over several processes must have a NamedSharding, got {sharding}")
        choices = []
        for copy in range(_num_copies(sharding)):
            found = cls(shape=leaf.shape, dtype=leaf.dtype, sharding=sharding, copy=copy)
            after = dict(held)
            for process, place in found.owners:
                after[process] = after.get(process, 0) + _size(place)
            choices.append((max(after.values()), copy, after, found))
        _, _, after, best = min(choices, key=lambda choice: choice[:2])
        held.update(after)
        return best

    @cached_property
    def _grid(self) -> dict[jax.Device, tuple[int, Place]]:
        """Device -> (its copy, its shard's place)."""
        free = _free_axes(self.sharding)
        mesh = self.sharding.mesh
        order = [*free, *(name for name in mesh.axis_names if name not in free)]
        devices = np.transpose(mesh.devices, [mesh.axis_names.index(name) for name in order])
        rows = devices.reshape(_num_copies(self.sharding), -1)
        indices = self.sharding.devices_indices_map(self.shape)
        return {device: (copy, _place(indices[device], self.shape)) for copy, row in enumerate(rows) for device in row}

    @cached_property
    def owners(self) -> list[tuple[int, Place]]:
        """(process, place) of each shard, in the order of places."""
        pairs = {(place, device.process_index) for device, (copy, place) in self._grid.items() if copy == self.copy}
        return [(process, place) for place, process in sorted(pairs)]

    @cached_property
    def own(self) -> list[Place]:
        """Shards that this process owns, in order."""
        return [place for process, place in self.owners if process == jax.process_index()]

    @property
    def sizes(self) -> list[int]:
        """Numbers in each of them."""
        return list(map(_size, self.own))

    @property
    def size(self) -> int:
        """Numbers that this process owns."""
        return sum(self.sizes)

    @cached_property
    def is_handed_on(self) -> bool:
        """True if another process than the owner holds a copy of a shard."""
        holders: dict[Place, set[int]] = {}
        for device, (_, place) in self._grid.items():
            holders.setdefault(place, set()).add(device.process_index)
        return any(len(processes) > 1 for processes in holders.values())

    def pieces(self, leaf: jax.Array) -> list[Array]:
        """The owned shards as flat arrays on the host, from an array of this sharding."""
        found = _shards_here(leaf)
        return [np.asarray(found[place]).reshape(-1) for place in self.own]

    def local(self, pieces: Sequence[Array]) -> jax.Array:
        """The array of which this process has its part: stacked copies, zeros in all but the owners', if shards are
        handed on, else the array itself."""
        numbers = dict(zip(self.own, pieces, strict=True))
        parts = []
        for device, (copy, place) in self._grid.items():
            if device.process_index != jax.process_index():
                continue
            shape = tuple(end - start for start, end in place)
            is_own = place in numbers and (copy == self.copy or not self.is_handed_on)
            array = numbers[place].reshape(shape).astype(self.dtype) if is_own else np.zeros(shape, self.dtype)
            parts.append(jax.device_put(array[np.newaxis] if self.is_handed_on else array, device))
        shape = (_num_copies(self.sharding), *self.shape) if self.is_handed_on else self.shape
        return jax.make_array_from_single_device_arrays(shape, self._stacked, parts)

    @property
    def _stacked(self) -> NamedSharding:
        if not self.is_handed_on:
            return self.sharding
        return NamedSharding(self.sharding.mesh, PartitionSpec(_free_axes(self.sharding), *self.sharding.spec))


def handed_on(leaves: Sequence[OwnedLeaf], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays of `OwnedLeaf.local`, each shard with all who hold it. All processes call this at the same time."""
    wanted = [place for place, leaf in enumerate(leaves) if leaf.is_handed_on]
    shardings = tuple(leaves[place].sharding for place in wanted)
    done = list(arrays)
    if wanted:
        summed = _summing(shardings)([arrays[place] for place in wanted])
        for place, array in zip(wanted, summed, strict=True):
            done[place] = array
    return done


@remembered(16)
def _summing(shardings: tuple[NamedSharding, ...]) -> Any:
    """The program that adds up stacked copies, of which all but one are zeros."""

    def total(stacked: list[jax.Array]) -> list[jax.Array]:
        return [jnp.sum(each, axis=0, dtype=each.dtype) for each in stacked]

    return jax.jit(total, out_shardings=list(shardings))


def _shards_here(leaf: jax.Array) -> dict[Place, jax.Array]:
    return {_place(shard.index, leaf.shape): shard.data for shard in reversed(leaf.addressable_shards)}


def _place(index: tuple[slice, ...], shape: tuple[int, ...]) -> Place:
    return tuple(slice_.indices(size)[:2] for slice_, size in zip(index, shape, strict=True))


def _size(place: Place) -> int:
    return int(np.prod([end - start for start, end in place], dtype=np.int64))


def _free_axes(sharding: NamedSharding) -> tuple[str, ...]:
    """Axes of the mesh over which an array is not split."""
    used: set[str] = set()
    for entry in sharding.spec:
        if entry is not None:
            used |= {entry} if isinstance(entry, str) else set(entry)
    return tuple(name for name in sharding.mesh.axis_names if name not in used)


def _num_copies(sharding: NamedSharding) -> int:
    return int(np.prod([sharding.mesh.shape[name] for name in _free_axes(sharding)], dtype=np.int64))
