"""Words that the processes of one replica exchange between programs, so that a failure of one is a failure of all.

Where arrays lie on the devices of several processes (`jax.distributed`), all of these run the same programs in the same
order: if one left a program out, the others would wait for it for ever. So errors that may strike one process alone,
such as calls that are not answered, or Ctrl-C, are kept until a place that all processes come to. There each tells its
own error, XLA brings the words of all to all, and all raise alike. Nothing of this is a call over the network.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import numpy as np
import trio
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dmoe_jax.arrays import PyTree
from dmoe_jax.machine.remembered import remembered
from dmoe_jax.mesh.layout import mesh_of
from dmoe_jax.mesh.shards import tree_spans_processes
from dmoe_net.averaging.replica import ReplicaLost
from dmoe_net.types import Array

T = TypeVar("T")
Kinds = Sequence[type[Exception]]
"""Errors that processes raise alike, the gravest first. For any other the others raise `ReplicaLost`."""

_WORD_BYTES = 256
_CHECKSUM, _TEXT = slice(1, 5), slice(5, _WORD_BYTES)
_FINE, _LOST = 0, 1
"""First byte of a word without an error, and with one of no known kind; the kinds follow."""


def stopped() -> ReplicaLost | None:
    """The error that the others shall have if this task has been cancelled; None if it has not."""
    return ReplicaLost("it was stopped") if trio.current_effective_deadline() <= trio.current_time() else None


def word_of(failure: Exception | None, kinds: Kinds, *, checksum: int = 0) -> Array:
    """A process's word: uint8 [256].

    Args:
      failure: its error; None: all is well.
      checksum: a number below 2^32 that should be the same in all processes.
    """
    word = np.zeros(_WORD_BYTES, np.uint8)
    word[_CHECKSUM] = np.frombuffer(checksum.to_bytes(4, "little"), np.uint8)
    if failure is not None:
        known: list[type[Exception]] = [ReplicaLost, *kinds]
        word[0] = next((code for code, kind in enumerate(known, _LOST) if isinstance(failure, kind)), _LOST)
        is_known = word[0] != _LOST or isinstance(failure, ReplicaLost)
        text = (str(failure) if is_known else f"{type(failure).__name__}: {failure}").encode()[: _WORD_BYTES - 5]
        word[_TEXT][: len(text)] = np.frombuffer(text, np.uint8)
    return word


def raise_alike(words: Array, kinds: Kinds, failure: Exception | None) -> None:
    """Raise the gravest error that a process told, of the same kind in all of them; nothing if all is well.

    Args:
      words: uint8 [processes, 256].
      failure: this process's own error, which it raises itself if it is of this kind.

    Raises:
      ReplicaLost: a process was stopped, or has failed for good; there its error. ValueError: checksums differ. Others:
        of `kinds`.
    """
    codes = words[:, 0]
    if not codes.any():
        if (words[:, _CHECKSUM] != words[0, _CHECKSUM]).any():
            raise ValueError("the processes of this replica have read different batches: give all the same ones")
        return
    process = int(np.argmin(np.where(codes == _FINE, 255, codes)))
    if failure is not None and word_of(failure, kinds)[0] == codes[process]:
        raise failure
    text = bytes(words[process, _TEXT]).rstrip(b"\0").decode(errors="replace")
    raise [ReplicaLost, *kinds][codes[process] - _LOST](f"process {process} of this replica: {text}")


def from_each(mesh: Mesh, numbers: Array) -> jax.Array:
    """The numbers of each process, a copy for each of its devices: [devices of the mesh, ...]. All call it alike."""
    shape = (mesh.devices.size, *numbers.shape)
    parts = [jax.device_put(numbers[np.newaxis], device) for device in mesh.local_devices]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, PartitionSpec(mesh.axis_names)), parts)


def first_devices(mesh: Mesh) -> list[int]:
    """Place in the mesh of the first device of each process, in the order of processes."""
    processes = [device.process_index for device in mesh.devices.flat]
    return [processes.index(process) for process in sorted({*processes})]


def of_each(mesh: Mesh, gathered: Any) -> Array:
    """The numbers of `from_each`, once they are with all devices, as [processes, ...] on the host."""
    return np.asarray(gathered)[first_devices(mesh)]


def from_first(mesh: Mesh, numbers: Array) -> Array:
    """The numbers of process 0 on the host of each process, which bring arrays of this shape. All call it alike."""
    return np.asarray(_of_first(mesh)(from_each(mesh, numbers)))


@contextmanager
def losses_named() -> Iterator[None]:
    """Turn the error of a program that another process has left into `ReplicaLost`."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        why = str(error).partition("\n")[0]
        raise ReplicaLost(f"a process of this replica is gone: {why}") from error


class StepsAlike:
    """Keeps the steps of one loop in each process of a replica alike."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._scope = trio.CancelScope()

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step, which is not cancelled halfway. Raises ReplicaLost if a process is gone."""
        with trio.CancelScope(shield=True) as self._scope, losses_named():
            yield

    async def agreed(self, take: Callable[[], T], kinds: Kinds) -> T:
        """Return what `take` gives, once all processes have it; it must be the same batch for all.

        Raises:
          ReplicaLost: another process was stopped, or has failed. Others: as `take` raises them in a process.
        """
        self._scope.shield = False
        failure: Exception | None = stopped()
        self._scope.shield = True
        is_stopped, taken = failure is not None, None
        if failure is None:
            try:
                taken = take()
            except Exception as error:
                failure = error
        words = from_each(self._mesh, word_of(failure, kinds, checksum=_checksum(taken)))
        gathered = await trio.to_thread.run_sync(of_each, self._mesh, _gathering(self._mesh)(words))
        if is_stopped:
            self._scope.shield = False
            await trio.lowlevel.checkpoint()
        raise_alike(gathered, kinds, failure)
        return taken  # type: ignore[return-value]  # all have one


def steps_alike(params: PyTree) -> StepsAlike | None:
    """Keeps steps of these parameters alike; None if they are this process's own."""
    mesh = mesh_of(params) if tree_spans_processes(params) else None
    return None if mesh is None else StepsAlike(mesh)


def _checksum(tree: PyTree) -> int:
    """A number that arrays on the host decide."""
    found = 0
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iufb":
            found = zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).data, found)
    return found


@remembered(16)
def _of_first(mesh: Mesh) -> Any:
    (place, *_), everywhere = first_devices(mesh), NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda each: each[place], out_shardings=everywhere)


@remembered(16)
def _gathering(mesh: Mesh) -> Any:
    return jax.jit(lambda words: words, out_shardings=NamedSharding(mesh, PartitionSpec()))
