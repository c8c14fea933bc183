"""A node's experts on disk, saved while it serves: each by itself, and only those that have learnt since.

An expert of 1,200 updates is the checkpoint FOLDER/UID/1200: parameters, optimiser state, and facts. A node that starts
with the folder of an earlier one, or of several, takes its experts up where they were last saved. What was learnt since
is lost with a killed node; a node that is stopped saves once more. Several nodes may share a folder. Where two have
served one expert apart from each other, the one of more updates counts. An expert that is not finite is neither saved
nor taken up.
"""

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import trio

from dmoe_jax.arrays import PyTree, copied
from dmoe_jax.checkpoints import CheckpointFiles, Checkpoints, numbers_in
from dmoe_jax.directory.grid import parse_uid
from dmoe_jax.machine.device import Device
from dmoe_jax.machine.disk import CheckpointError, check_local, hold_folder
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.programs import Programs, compiled_alone
from dmoe_jax.node.sharding import PlacedDevice, placed
from dmoe_net.meaning import contradiction

logger = logging.getLogger(__name__)

Copy = Callable[[PyTree], PyTree]
"""Returns a state in arrays that the next update leaves alone: on a CPU NumPy's, into room that was made before; on
another device that device's own, which are fetched beside the serving."""

_PAGE_BYTES = 4096
"""The smallest page of any system that this runs on, or a part of it."""
_PIECE_BYTES = 16 << 20
"""Cleared in one go; arrays with less are not worth the trouble."""
_NICENESS = 15
"""Gives threads that write a thirtieth of the processor time of those that compute, or what these leave."""
_LARGE_BYTES = 16 << 20
"""Least size of an expert that such a thread writes. To write a small one is mostly Python: a thread that holds the
interpreter and gets no processor would have the whole node wait."""
_KEPT = 2
"""Newest checkpoints of an expert that are kept."""


class ExpertSaver:
    """Saves and restores the experts of one node.

    The device is held for as long as it takes to copy one expert: 0.15 s for 1.2 GB on a CPU. Whether the expert is
    finite, and the disk, are looked after beside the serving. Memory holds one copy of one expert at a time.

    Args:
      folder: where experts are, made if it is not there; nodes may share it.
      backends: the experts by uid, restored in place. Looked at each time: experts may come and go.
      device: copies an expert's state between two batches, so that its checkpoint is of one moment; or several, one
        for each place in which experts live.

    Raises:
      CheckpointError: the folder holds checkpoints of all experts of a node together, as earlier versions wrote them.
      ValueError: it is not on this machine.
    """

    def __init__(
        self, folder: Path, backends: Mapping[str, ExpertBackend], device: Device | Sequence[PlacedDevice]
    ) -> None:
        check_local(folder, "checkpoints of experts")
        self._folder = folder.absolute()
        if numbers := numbers_in(self._folder):
            raise CheckpointError(
                f"{self._folder} holds checkpoints of an earlier version, among them {numbers[-1]}; experts now have "
                "a folder each, so give another folder"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        self._backends = backends
        self._devices = [each.device for each in placed(device)]
        self._files = CheckpointFiles()
        self._checkpoints: dict[str, Checkpoints] = {}
        self._held = ExitStack()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="dmoe-writer", initializer=_give_way)
        self._saved: dict[str, int] = {}  # updates at the last checkpoint that this node knows of
        self._copies: dict[int, tuple[Programs, PyTree, Copy]] = {}  # shapes of room on the host, and what copies

    async def restore(self, *, alone: bool = False) -> dict[str, int]:
        """Take up all experts of which there are checkpoints; return their updates. Not while they are served. `alone`
        keeps other processes from saving these experts in the folder, until `close`.

        Raises:
          CheckpointError: a checkpoint is of an expert of another shape, meaning or optimiser; it names the expert.
          FolderInUse: another process saves one of them; it says which. OSError: the folder cannot be written to.
        """
        try:
            for uid in self._backends if alone else ():
                self._held.enter_context(hold_folder(self._folder / uid, "saving of the expert"))
            found = {uid: await self.restore_one(uid, backend) for uid, backend in tuple(self._backends.items())}
        except BaseException:
            self.close()
            raise
        return {uid: updates for uid, updates in found.items() if updates is not None}

    def close(self) -> None:
        """Let others save the experts, and free the writers' threads. Blocks while an expert is written."""
        self._held.close()
        self._writer.shutdown()
        self._files.close()

    async def restore_one(self, uid: str, backend: ExpertBackend) -> int | None:
        """Have a backend that is not served yet take up the newest checkpoint of this expert that can be used; return
        its updates, None if there is none. Newer ones are set aside. Raises CheckpointError as `restore`."""
        updates = await self._devices[backend.place.number].aside(self._take_up, uid, backend)
        if updates is not None:
            self._saved[uid] = updates
        return updates

    async def save(self, *, gives_way: bool = False) -> None:
        """Write the experts that have learnt something since the last checkpoint. If this `gives_way` to threads that
        compute, it takes longer. If cancelled, the expert at hand is written or its last checkpoint stays.
        Raises CheckpointError if some could not be written; all were tried."""
        failed: dict[str, CheckpointError] = {}
        backends = self._backends.items()
        learnt = [(uid, backend) for uid, backend in backends if backend.update_count != self._saved.get(uid, 0)]
        for uid, backend in learnt:
            device = self._devices[backend.place.number]
            copy = await self._copying(backend, device)
            updates, learnt_from, state = await device.run(_snapshot, backend, copy)
            del copy
            if not await device.aside(is_sound, state):
                logger.warning("expert %s is not finite: it is not saved, its last good checkpoint stays", uid)
                continue
            facts = {
                "updates": updates,
                "learnt_from": [name.hex() for name in learnt_from],
                "meaning": backend.expert.meaning,
            }
            try:
                await device.aside(self._write, uid, updates, state, facts, gives_way)
                self._saved[uid] = updates
            except CheckpointError as error:
                failed[uid] = error
            del state  # before the next one is copied
        if failed:
            uid, first = next(iter(failed.items()))
            text = f"{len(failed)} of {len(learnt)} experts could not be saved, among them {uid}: {first}"
            raise CheckpointError(text) from first

    async def run(self, period_s: float) -> None:
        """Save again and again, so that what lies on the disk is no older than a period, if a save takes no longer than
        those before it did.

        A save writes what was so when it began, and until the next one has ended that is the newest there is: so the
        time that a save takes counts twice. A save that takes over a third of the period is followed by a rest as long
        as itself, and a warning says how old checkpoints become. A full disk is reported, once until there is room
        again, and does not stop the node.
        """
        took_s, warned_s = period_s / 4, period_s  # the first one half a period from now
        fails = False
        while True:
            rest_s = max(period_s - 2 * took_s, took_s)
            if (age_s := 2 * took_s + rest_s) > 1.1 * warned_s:
                warned_s = age_s
                logger.warning(
                    "saving the experts took %.3g s: their checkpoints become up to %.3g s old, not %.3g as asked",
                    *(took_s, age_s, period_s),
                )
            await trio.sleep(rest_s)
            began = trio.current_time()
            try:
                await self.save(gives_way=True)
            except CheckpointError as error:
                if not fails:
                    logger.warning("%s; the node goes on, and tries again every %.3g s", error, period_s)
                fails = True
            else:
                if fails:
                    logger.warning("the experts are saved again")
                fails = False
            # The longest of late: one that found nothing to write says nothing of the next one.
            took_s = max(trio.current_time() - began, 0.8 * took_s)

    def _take_up(self, uid: str, backend: ExpertBackend) -> int | None:
        had_any = bool(numbers_in(self._folder / uid))
        found = self._checkpoints_of(uid).restore_or_begin(backend.state)
        if found is None:
            if had_any:
                logger.warning("no checkpoint of expert %s can be used: it starts afresh", uid)
            return None
        updates, state, facts = found
        if differ := contradiction(facts.get("meaning", ""), backend.expert.meaning):  # "" fits all
            what = f"checkpoint {updates} of expert {uid} is of an expert that computes otherwise"
            raise CheckpointError(f"{what}: {differ[0]}, expected {differ[1]}")
        backend.load(state, update_count=updates, learnt_from=map(bytes.fromhex, facts.get("learnt_from", ())))
        return updates

    def _write(self, uid: str, updates: int, state: PyTree, facts: Mapping[str, Any], gives_way: bool) -> None:
        saving = functools.partial(self._checkpoints_of(uid).save, updates, state, facts)
        if gives_way and sum(leaf.nbytes for leaf in jax.tree.leaves(state)) >= _LARGE_BYTES:
            self._writer.submit(saving).result()
        else:
            saving()

    def _checkpoints_of(self, uid: str) -> Checkpoints:
        if uid not in self._checkpoints:
            folder = self._folder / uid
            self._checkpoints[uid] = Checkpoints(folder, keep=_KEPT, files=self._files, is_sound=is_sound)
        return self._checkpoints[uid]

    async def _copying(self, backend: ExpertBackend, device: Device) -> Copy:
        """Make ready, beside the device, all that can be to copy an expert, and return what does it."""
        programs = backend.programs
        if id(programs) not in self._copies:
            shapes, is_on_host = await device.run(_kind_of, backend)
            is_fetched = shapes is not None and not is_on_host
            copy: Copy = await device.aside(compiled_alone, copied, (shapes,)) if is_fetched else lambda state: state
            self._copies[id(programs)] = programs, shapes if is_on_host else None, copy
        _, room_shapes, copy = self._copies[id(programs)]
        if room_shapes is None:
            return copy
        return functools.partial(_filled, await _room_for(room_shapes, device))


def saved_uids(folder: Path) -> tuple[str, ...]:
    """The uids of the experts that a folder of an `ExpertSaver` holds checkpoints of, sorted."""
    return tuple(sorted(path.name for path in folder.glob("*.*") if _is_uid(path.name) and numbers_in(path)))


def _is_uid(name: str) -> bool:
    try:
        parse_uid(name)
    except ValueError:
        return False
    return True


def is_sound(state: dict[str, PyTree]) -> bool:
    """True if an expert's parameters are finite, and its optimiser's state, which may start at infinity, is not NaN."""

    def inexact(part: str) -> list[np.ndarray]:
        leaves = map(np.asarray, jax.tree.leaves(state[part]))
        return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    are_finite = all(np.isfinite(leaf).all() for leaf in inexact("params"))
    return are_finite and not any(np.isnan(leaf).any() for leaf in inexact("opt_state"))


def _give_way() -> None:
    """Let other threads of this process come first, before this one and those that it starts: whoever computes on all
    cores would wait for the half that has to wait for a writer. Elsewhere priorities are of whole processes."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _kind_of(backend: ExpertBackend) -> tuple[PyTree, bool]:
    """(shape, type and sharding of each array, True if all lie in the host's memory); (None, False) where the state is
    gathered from several processes, into arrays of its own."""
    if backend.place.layout is not None and backend.place.layout.spans_processes:
        return None, False
    state = backend.state
    leaves = jax.tree.leaves(state)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    return shapes, all(device.platform == "cpu" for leaf in leaves for device in leaf.devices())


async def _room_for(shapes: PyTree, device: Device) -> PyTree:
    """Host arrays of these shapes and types, whose pages the system has cleared already: a copy into others would take
    up to twenty times as long.

    It clears them piece by piece, and as long as a piece took it rests: who computes meanwhile needs pages, too, and
    where the memory is new to a virtual machine, clearing it would hold all of its processors.
    """
    room = jax.tree.map(lambda shape: np.empty(shape.shape, shape.dtype), shapes)
    for array in jax.tree.leaves(room):
        octets = array.reshape(-1).view(np.uint8)
        for start in range(0, octets.size if octets.size >= _PIECE_BYTES else 0, _PIECE_BYTES):
            began = trio.current_time()
            await device.aside(_touch, octets[start : start + _PIECE_BYTES])
            await trio.sleep(trio.current_time() - began)
    return room


def _touch(octets: np.ndarray) -> None:
    octets[::_PAGE_BYTES] = 0


def _filled(room: PyTree, state: PyTree) -> PyTree:
    jax.tree.map(np.copyto, room, jax.tree.map(np.asarray, state))
    return room


def _snapshot(backend: ExpertBackend, copy: Copy) -> tuple[int, tuple[bytes, ...], dict[str, PyTree]]:
    """Count, requests and copy of one moment: on the device's thread no batch can come between them."""
    return backend.update_count, tuple(backend.learnt_from), copy(backend.state)
