"""A node's experts on disk: parameters, optimiser state and update counts, saved while it serves.

A node that starts with the folder of an earlier one takes its experts up where they were last saved. What was learnt
since is lost with a killed node; a node that is stopped saves once more.

An expert that is not finite is worth nothing. No checkpoint is written while there is one, so that the last good one
stays; and one that an older checkpoint holds is not taken up, but starts afresh. Both are warned of by name.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import trio

from dmoe_jax.checkpoints import Checkpoints, host_copy
from dmoe_jax.device import Device
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.types import PyTree

logger = logging.getLogger(__name__)


class ExpertSaver:
    """Saves and restores the experts of one node.

    Args:
      folder: where checkpoints are; made if it is not there.
      backends: the experts by uid; restored in place.
      device: copies their state between two batches, so that a checkpoint is of one moment.
    """

    def __init__(self, folder: Path, backends: Mapping[str, ExpertBackend], device: Device) -> None:
        self._checkpoints = Checkpoints(folder)
        self._backends = dict(backends)
        self._device = device
        self._saved_updates = -1

    def restore(self) -> int | None:
        """Load the latest checkpoint, if there is one; returns the updates that its experts had taken in all.

        An expert that is not finite starts afresh, with a warning that names it.

        Raises:
          CheckpointError: it holds other experts, or experts of another shape.
        """
        if self._checkpoints.latest_step() is None:
            return None
        _, state, facts = self._checkpoints.restore_latest(self._state())
        for uid, backend in self._backends.items():
            if _is_sound(state[uid]):
                backend.load(state[uid], update_count=facts["updates"][uid])
            else:
                logger.warning("expert %s is not finite in its checkpoint; it starts afresh", uid)
        return self._total_updates()

    async def save(self) -> None:
        """Write a checkpoint unless nothing was learnt since the last. If cancelled, it is written or absent."""
        if self._total_updates() == self._saved_updates:
            return
        updates, state = await self._device.run(self._snapshot)
        if broken := [uid for uid in state if not _is_sound(state[uid])]:
            logger.warning("the last good checkpoint stays, nothing is saved: not finite: %s", ", ".join(broken))
            return
        # Numbered by updates: they only grow, through restarts too.
        total = sum(updates.values())
        await trio.to_thread.run_sync(self._checkpoints.save, total, state, {"updates": updates})
        self._saved_updates = total

    async def run(self, period_s: float) -> None:
        """Save again and again. A full disk is reported and does not stop the node."""
        while True:
            await trio.sleep(period_s)
            try:
                await self.save()
            except (OSError, ValueError) as error:  # Orbax raises ValueError where a disk is full
                logger.warning("could not save the experts: %s", error)

    def _snapshot(self) -> tuple[dict[str, int], dict[str, PyTree]]:
        """Counts and copies of one moment: on the device's thread no batch can come between them."""
        return {uid: backend.update_count for uid, backend in self._backends.items()}, host_copy(self._state())

    def _state(self) -> dict[str, PyTree]:
        return {uid: backend.state for uid, backend in self._backends.items()}

    def _total_updates(self) -> int:
        return sum(backend.update_count for backend in self._backends.values())


def _is_sound(state: dict[str, PyTree]) -> bool:
    """Whether an expert's parameters are finite, and its optimiser's state, which may start at infinity, is not NaN."""

    def inexact(part: str) -> list[np.ndarray]:
        leaves = map(np.asarray, jax.tree.leaves(state[part]))
        return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    finite = all(np.isfinite(leaf).all() for leaf in inexact("params"))
    return finite and not any(np.isnan(leaf).any() for leaf in inexact("opt_state"))
