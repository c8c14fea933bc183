"""Experts on disk, each by itself, so that any node can take up any of them.

An expert of 1,200 updates is the checkpoint FOLDER/UID/1200: parameters, optimiser state, and facts. Several nodes may
share a folder. Where two have served one expert apart from each other, the one of more updates counts.

An expert that is not finite is worth nothing: one that is there all the same is not taken up. It is set aside, as is
one that cannot be read: what is learnt after it has lower numbers.
"""

import functools
import logging
import os
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax.checkpoints import CheckpointFiles, Checkpoints, numbers_in
from dmoe_jax.disk import CheckpointError, hold_folder
from dmoe_jax.grid import parse_uid
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.types import PyTree
from net.meaning import contradiction

logger = logging.getLogger(__name__)

_NICENESS = 15
"""Of threads that write: a thirtieth of the processor time of those that compute, or what these leave."""
_LARGE_BYTES = 16 << 20
"""Of an expert that is written by such a thread. To write a small one is mostly Python: a thread that holds the
interpreter and gets no processor would have the whole node wait."""


class ExpertStore:
    """A folder of experts. All methods block.

    Args:
      folder: made if it is not there.
      keep: how many checkpoints of an expert are kept: its newest.

    Raises:
      CheckpointError: the folder holds checkpoints of all experts of a node together, as versions before this one wrote
        them.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = folder.absolute()
        if numbers := numbers_in(self.folder):
            raise CheckpointError(
                f"{self.folder} holds checkpoints of an earlier version, among them {numbers[-1]}; experts now have "
                "a folder each, so give another folder"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._keep = keep
        self._files = CheckpointFiles()
        self._checkpoints: dict[str, Checkpoints] = {}
        self._held = ExitStack()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="dmoe-writer", initializer=_give_way)

    def save(
        self,
        uid: str,
        updates: int,
        state: dict[str, PyTree],
        learnt_from: Iterable[bytes] = (),
        *,
        meaning: str = "",
        gives_way: bool = False,
    ) -> None:
        """Write an expert unless it was written with so many updates already, and forget its oldest checkpoints.

        Args:
          uid: which expert.
          updates: optimiser steps that it has taken.
          state, learnt_from: see `ExpertBackend`; sound, and in arrays that nobody changes meanwhile.
          meaning: see `Expert.meaning`.
          gives_way: to threads that compute, if it is large, and so takes longer.

        Raises:
          CheckpointError: it cannot be written.
        """
        facts = {"updates": updates, "learnt_from": [name.hex() for name in learnt_from], "meaning": meaning}
        saving = functools.partial(self._of(uid).save, updates, state, facts)
        if gives_way and sum(leaf.nbytes for leaf in jax.tree.leaves(state)) >= _LARGE_BYTES:
            self._writer.submit(saving).result()
        else:
            saving()

    def restore(self, uid: str, backend: ExpertBackend) -> int | None:
        """Have a backend take up the newest checkpoint of an expert that can be used; returns its updates, None if
        there is none. Newer ones are set aside.

        Raises:
          CheckpointError: the checkpoint is of an expert of another shape, meaning or optimiser.
        """
        had_any = bool(numbers_in(self.folder / uid))
        found = self._of(uid).restore_or_begin(backend.state)
        if found is None:
            if had_any:
                logger.warning("no checkpoint of expert %s can be used: it starts afresh", uid)
            return None
        updates, state, facts = found
        _check_meaning(facts.get("meaning", ""), backend, f"checkpoint {updates} of expert {uid}")
        backend.load(state, update_count=updates, learnt_from=map(bytes.fromhex, facts.get("learnt_from", ())))
        return updates

    def hold(self, uids: Iterable[str]) -> None:
        """Keep other processes from saving these experts here, until `close`.

        Raises:
          FolderInUse: one does. OSError: the folder cannot be written to.
        """
        for uid in uids:
            self._held.enter_context(hold_folder(self.folder / uid, "saving of the expert"))

    def _of(self, uid: str) -> Checkpoints:
        if uid not in self._checkpoints:
            self._checkpoints[uid] = Checkpoints(
                self.folder / uid, keep=self._keep, files=self._files, is_sound=is_sound
            )
        return self._checkpoints[uid]

    def close(self) -> None:
        """Let others save here, and free Orbax's threads."""
        self._held.close()
        self._writer.shutdown()
        self._files.close()


def _check_meaning(then: str, backend: ExpertBackend, where: str) -> None:
    """Raise CheckpointError if a checkpoint's numbers mean something else than the backend's; "" fits all."""
    if facts := contradiction(then, backend.expert.meaning):
        raise CheckpointError(f"{where} is of an expert that computes otherwise: {facts[0]}, expected {facts[1]}")


def _give_way() -> None:
    """Let other threads of this process come first, before this one and those that it starts: whoever computes on all
    cores would wait for the half that has to wait for a writer. Elsewhere priorities are of whole processes."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def saved_uids(folder: Path) -> tuple[str, ...]:
    """The uids of the experts that a folder of an `ExpertStore` holds checkpoints of, sorted."""
    return tuple(sorted(path.name for path in folder.glob("*.*") if _is_uid(path.name) and numbers_in(path)))


def is_sound(state: dict[str, PyTree], xp: Any = np) -> Any:
    """Whether an expert's parameters are finite, and its optimiser's state, which may start at infinity, is not NaN.

    Args:
      xp: NumPy, or `jax.numpy` to look under `jit`.
    """

    def inexact(part: str) -> list[Any]:
        return [
            leaf for leaf in map(xp.asarray, jax.tree.leaves(state[part])) if jnp.issubdtype(leaf.dtype, jnp.inexact)
        ]

    finite = [xp.isfinite(leaf).all() for leaf in inexact("params")]
    return xp.stack([*finite, *(~xp.isnan(leaf).any() for leaf in inexact("opt_state")), xp.asarray(True)]).all()


def _is_uid(name: str) -> bool:
    try:
        parse_uid(name)
    except ValueError:
        return False
    return True
