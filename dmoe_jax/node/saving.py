"""A node's experts saved while it serves: each by itself, and only those that have learnt since.

A node that starts with the folder of an earlier one, or of several, takes its experts up where they were last saved.
What was learnt since is lost with a killed node; a node that is stopped saves once more.

The device is held for as long as copying one expert takes; the rest, and the disk, go on beside the serving. Memory
holds one copy of one expert at a time.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import trio

from dmoe_jax.checkpoints import CheckpointError, host_copy
from dmoe_jax.device import Device
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.devices import PlacedDevice, placed
from dmoe_jax.node.expert_store import ExpertStore
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
            updates, learnt_from, state = await device.run(_snapshot, backend)
            try:
                if await device.aside(self._store.save, uid, updates, state, learnt_from):
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

    def _device_of(self, backend: ExpertBackend) -> Device:
        return self._devices[backend.place.number]

    def _has_learnt(self, uid: str, backend: ExpertBackend) -> bool:
        return backend.update_count != self._saved.get(uid, 0)


def _snapshot(backend: ExpertBackend) -> tuple[int, tuple[bytes, ...], dict[str, PyTree]]:
    """Count, requests and copy of one moment: on the device's thread no batch can come between them."""
    return backend.update_count, tuple(backend.learnt_from), host_copy(backend.state)
