"""A node's experts saved while it serves: each by itself, and only those that have learnt since.

A node that starts with the folder of an earlier one, or of several, takes its experts up where they were last saved.
What was learnt since is lost with a killed node; a node that is stopped saves once more.

The device is held for as long as it takes to copy one expert there and to look whether it is finite: 0.1 s for
1.2 GB on a CPU. (Into pages that the system has to clear first NumPy took twenty times as long; XLA takes larger
pages.) The rest, and the disk, go on beside the serving. Memory holds one copy of one expert at a time.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import trio

from dmoe_jax.checkpoints import CheckpointError
from dmoe_jax.device import Device
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.devices import PlacedDevice, placed
from dmoe_jax.node.expert_store import ExpertStore, is_sound
from dmoe_jax.types import PyTree

logger = logging.getLogger(__name__)


class ExpertSaver:
    """Saves and restores the experts of one node.

    Args:
      folder: where experts are, see `ExpertStore`; nodes may share it.
      backends: the experts by uid, restored in place. Looked at each time: experts may come and go.
      device: copies an expert's state between two batches, so that its checkpoint is of one moment; or several, one
        for each place in which experts live.

    Raises:
      CheckpointError: the folder is one of an earlier version.
    """

    def __init__(
        self, folder: Path, backends: Mapping[str, ExpertBackend], device: Device | Sequence[PlacedDevice]
    ) -> None:
        self._store = ExpertStore(folder)
        self._backends = backends
        self._devices = [each.device for each in placed(device)]
        self._saved: dict[str, int] = {}  # updates at the last checkpoint that this node knows of
        self._warm: set[int] = set()  # programs of the kinds of experts for which copying is compiled

    async def restore(self) -> dict[str, int]:
        """Take up all experts of which there are checkpoints; returns their updates. Not while they are served.

        Raises:
          CheckpointError: a checkpoint is of an expert of another shape or optimiser; it names the expert.
        """
        found = {uid: await self.restore_one(uid, backend) for uid, backend in tuple(self._backends.items())}
        return {uid: updates for uid, updates in found.items() if updates is not None}

    async def restore_one(self, uid: str, backend: ExpertBackend) -> int | None:
        """Have a backend that is not served yet take up this expert; returns its updates, None without a checkpoint.

        Raises:
          CheckpointError: as `restore`.
        """
        updates = await self._device_of(backend).aside(self._store.restore, uid, backend)
        if updates is not None:
            self._saved[uid] = updates
        return updates

    async def save(self) -> None:
        """Write the experts that have learnt something since the last checkpoint.

        If cancelled, the expert at hand is written or its last checkpoint stays.

        Raises:
          CheckpointError: some could not be written. All were tried.
        """
        failed: dict[str, Exception] = {}
        learnt = [(uid, backend) for uid, backend in self._backends.items() if self._has_learnt(uid, backend)]
        for uid, backend in learnt:
            device = self._device_of(backend)
            await self._warm_up(backend, device)
            updates, learnt_from, is_finite, state = await device.run(_snapshot, backend)
            if not is_finite:
                logger.warning("expert %s is not finite: it is not saved, its last good checkpoint stays", uid)
                continue
            try:
                await device.aside(self._store.save, uid, updates, state, learnt_from)
                self._saved[uid] = updates
            except (OSError, ValueError) as error:  # Orbax raises ValueError where a disk is full
                failed[uid] = error
            del state  # before the next one is copied
        if failed:
            uid, first = next(iter(failed.items()))
            text = f"{len(failed)} of {len(learnt)} experts could not be saved, among them {uid}: {first}"
            raise CheckpointError(text) from first

    async def run(self, period_s: float) -> None:
        """Save again and again. A full disk is reported and does not stop the node."""
        while True:
            await trio.sleep(period_s)
            try:
                await self.save()
            except CheckpointError as error:
                logger.warning("%s", error)

    async def _warm_up(self, backend: ExpertBackend, device: Device) -> None:
        """Compile the copying of an expert of this kind, beside the device. What spans processes is not copied."""
        if id(backend.programs) not in self._warm and not backend.spans_processes:
            await device.aside(_compile_copy, await device.run(_shapes, backend))
            self._warm.add(id(backend.programs))

    def _device_of(self, backend: ExpertBackend) -> Device:
        return self._devices[backend.place.number]

    def _has_learnt(self, uid: str, backend: ExpertBackend) -> bool:
        return backend.update_count != self._saved.get(uid, 0)


def _snapshot(backend: ExpertBackend) -> tuple[int, tuple[bytes, ...], bool, dict[str, PyTree]]:
    """Count, requests, soundness and copy of one moment: on the device's thread no batch can come between them."""
    state = backend.state
    if backend.spans_processes:  # gathered into arrays of its own
        sound = is_sound(state)
    else:
        sound, state = _copied(state)
    return backend.update_count, tuple(backend.learnt_from), bool(sound), state


@jax.jit
def _copied(state: dict[str, PyTree]) -> tuple[Any, dict[str, PyTree]]:
    return is_sound(state, jnp), jax.tree.map(jnp.copy, state)


def _shapes(backend: ExpertBackend) -> PyTree:
    """Shape, type and sharding of each array."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), backend.state
    )


def _compile_copy(shapes: PyTree) -> None:
    _copied(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), shapes))
