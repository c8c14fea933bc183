"""Experts on disk, each by itself, so that any node can take up any of them.

An expert of 1,200 updates is the checkpoint FOLDER/UID/1200: parameters, optimiser state, and facts. Several nodes may
share a folder. Where two have served one expert apart from each other, the one of more updates counts.

An expert that is not finite is worth nothing: one that is there all the same is not taken up.
"""

import logging
import os
import shutil
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax.checkpoints import CheckpointError, CheckpointFiles
from dmoe_jax.grid import parse_uid
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.types import PyTree
from net.meaning import differing

logger = logging.getLogger(__name__)

_NICENESS = 15
"""Of threads that write: a thirtieth of the processor time of those that compute, or what these leave."""
_LARGE_BYTES = 16 << 20
"""Of an expert that is written by such a thread. To write a small one is mostly Python: a thread that holds the
interpreter and gets no processor would have the whole node wait."""
_TRASH = ".old-"
"""Begins the name of a checkpoint that is about to be deleted."""


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
        if numbers := _numbered(self.folder):
            raise CheckpointError(
                f"{self.folder} holds checkpoints of an earlier version, among them {numbers[-1]}; experts now have "
                "a folder each, so give another folder"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._keep = keep
        self._files = CheckpointFiles()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="dmoe-writer", initializer=_give_way)

    def newest(self, uid: str) -> int | None:
        """The updates of an expert's newest checkpoint; None if there is none."""
        return max(_numbered(self.folder / uid), default=None)

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
        """
        own = self.folder / uid
        if updates not in _numbered(own):
            facts = {"updates": updates, "learnt_from": [name.hex() for name in learnt_from], "meaning": meaning}
            if gives_way and sum(leaf.nbytes for leaf in jax.tree.leaves(state)) >= _LARGE_BYTES:
                self._writer.submit(self._files.write, own / str(updates), state, facts).result()
            else:
                self._files.write(own / str(updates), state, facts)
        self._prune(own, updates)

    def restore(self, uid: str, backend: ExpertBackend) -> int | None:
        """Have a backend take up the newest sound checkpoint of an expert; returns its updates, None if there is none.

        Raises:
          CheckpointError: the checkpoint is of an expert of another shape, meaning or optimiser.
        """
        tried: set[int] = set()
        # Listed again each time: another node that shares the folder may save, and delete the oldest, meanwhile.
        while left := [number for number in _numbered(self.folder / uid) if number not in tried]:
            updates = left[-1]
            tried.add(updates)
            try:
                state, facts = self._files.read(self.folder / uid / str(updates), backend.state)
                _check_meaning(facts.get("meaning", ""), backend, f"checkpoint {updates} of expert {uid}")
            except CheckpointError:
                raise
            except (OSError, ValueError, KeyError) as error:
                logger.warning(
                    "checkpoint %d of expert %s cannot be read, an older one is tried: %s", updates, uid, error
                )
                continue
            if is_sound(state):
                names = map(bytes.fromhex, facts.get("learnt_from", ()))
                backend.load(state, update_count=updates, learnt_from=names)
                return updates
            logger.warning("expert %s is not finite in its checkpoint %d; an older one is tried", uid, updates)
        if tried:
            logger.warning("no checkpoint of expert %s can be used: it starts afresh", uid)
        return None

    def _prune(self, own: Path, updates: int) -> None:
        """Delete an expert's oldest checkpoints, and what a writer that was killed has left unfinished."""
        for old in _numbered(own)[: -self._keep]:
            trash = own / f"{_TRASH}{old}"
            # Renamed first, so that nobody reads half of it.
            (own / str(old)).rename(trash)
            shutil.rmtree(trash, ignore_errors=True)
        for path in own.iterdir():
            number, dot, _ = path.name.removeprefix(_TRASH).partition(".")
            is_leftover = bool(dot) or path.name.startswith(_TRASH)
            if is_leftover and number.isdigit() and int(number) < updates:
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Free Orbax's threads."""
        self._writer.shutdown()
        self._files.close()


def _check_meaning(then: str, backend: ExpertBackend, where: str) -> None:
    """Raise CheckpointError if a checkpoint's numbers mean something else than the backend's; "" fits all."""
    now = backend.expert.meaning
    if then and now and then != now:
        was, is_now = differing(then, now)
        raise CheckpointError(f"{where} is of an expert that computes otherwise: {was}, expected {is_now}")


def _give_way() -> None:
    """Let other threads of this process come first, before this one and those that it starts: whoever computes on all
    cores would wait for the half that has to wait for a writer. Elsewhere priorities are of whole processes."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def saved_uids(folder: Path) -> tuple[str, ...]:
    """The uids of the experts that a folder of an `ExpertStore` holds checkpoints of, sorted."""
    return tuple(sorted(path.name for path in folder.glob("*.*") if _is_uid(path.name) and _numbered(path)))


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


def _numbered(folder: Path) -> list[int]:
    """The numbers that name folders in it, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit() and path.is_dir())
