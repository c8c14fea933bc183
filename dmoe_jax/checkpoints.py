"""Checkpoints on disk: a pytree of arrays and a few facts beside it, written whole or not at all (Orbax).

A checkpoint is written under another name, with the sizes and checksums of its files, and moved into place: a process
killed in the middle leaves the previous one as the latest. `CheckpointFiles` writes and reads single ones,
`Checkpoints` keeps the newest of a run or an expert. Whatever goes wrong, in Orbax too, is a `CheckpointError`.
"""

import errno
import json
import logging
import shutil
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dmoe_jax.arrays import PyTree, stored
from dmoe_jax.machine.disk import TRASH, UNFINISHED, CheckpointError, check_room

logger = logging.getLogger(__name__)

Arrays = dict[tuple[str, ...], np.ndarray]
"""Arrays by the names on the way to them, such as ("params", "gates", "0", "kernel")."""

_STATE = "state"
_FACTS = "facts"
_CHECKSUMS = "checksums.json"
"""File with path in the checkpoint -> [bytes, CRC-32] of each file that is read."""
_NOT_READ = {_CHECKSUMS, "commit_success.txt", "_CHECKPOINT_METADATA"}
"""Files that no array and no fact depends on."""
_SET_ASIDE = "set-aside-"
"""Begins the name of a checkpoint that cannot be used and is kept for whoever wants to look at it."""

_NOT_DAMAGED = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors of the system that do not mean that a file is damaged."""


class _Unusable(CheckpointError):
    """A checkpoint is damaged, or its numbers are not finite: an older one may be used."""


class CheckpointFiles:
    """Single checkpoints, each whole, at a path of its own. All methods block."""

    def __init__(self) -> None:
        # Here, for it takes a second, and a node that saves nothing starts without.
        import orbax.checkpoint as ocp

        logging.getLogger("absl").addFilter(_is_news)
        self._ocp = ocp
        # Of a node of several processes one writes, what is whole there; Orbax would have it wait for the others.
        alone = {"primary_host": jax.process_index(), "active_processes": {jax.process_index()}}
        here = ocp.options.MultiprocessingOptions(**alone, barrier_sync_key_prefix="alone")
        items = {
            # Not compressed: numbers that were learnt hardly shrink, and it takes three times as long.
            _STATE: ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=here),
            _FACTS: ocp.JsonCheckpointHandler(multiprocessing_options=here),
        }
        composite = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(multiprocessing_options=here), **items
        )
        self._checkpointer = ocp.Checkpointer(composite, multiprocessing_options=here)

    def write(self, path: Path, state: PyTree, facts: Mapping[str, Any]) -> None:
        """Write arrays that nobody changes or donates meanwhile (see `host_copy`), and facts that JSON can hold.

        Raises:
          CheckpointError: there is something at the path already, or it cannot be written; then nothing is there.
        """
        path = path.absolute()
        with _one_error(f"checkpoint {path} cannot be written", CheckpointError):
            if path.exists():
                raise CheckpointError(f"{path} is there already")
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = Path(tempfile.mkdtemp(prefix=f"{UNFINISHED}{path.name}.", dir=path.parent))
            try:
                # NumPy scalars (step counts) become arrays of rank 0: Orbax stores arrays alone, none without elements.
                arrays = jax.tree.map(lambda leaf: np.asarray(stored(leaf)), state)
                to_write = jax.tree.map(lambda leaf: leaf if leaf.size else None, arrays)
                # Tried first: Orbax leaves threads and long texts behind where a disk is full.
                check_room(unfinished, sum(leaf.nbytes for leaf in jax.tree.leaves(to_write)) + (64 << 10))
                args = self._ocp.args
                record = {"facts": dict(facts), "arrays": _inventory(arrays)}
                items = {_STATE: args.PyTreeSave(to_write), _FACTS: args.JsonSave(record)}
                self._checkpointer.save(unfinished / path.name, args=args.Composite(**items))
                checksums = json.dumps(dict(_checksums(unfinished / path.name)))
                (unfinished / path.name / _CHECKSUMS).write_text(checksums, encoding="utf-8")
                (unfinished / path.name).rename(path)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)

    def read(self, path: Path, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """The checkpoint at a path as (state in NumPy arrays, facts); `like` has the structure, shapes and dtypes.

        Raises:
          CheckpointError: it cannot be read, or its structure, shapes or dtypes are others.
        """
        path = path.absolute()
        with _reading(path):
            args = self._ocp.args
            facts_alone = args.Composite(**{_FACTS: args.JsonRestore()})
            saved = self._checkpointer.restore(path, args=facts_alone)[_FACTS]
            like = jax.tree.map(stored, like)
            _check_arrays(like, saved["arrays"], f"checkpoint {path}")
            shapes = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if leaf.size else None, like
            )
            leaves = iter(jax.tree.leaves(self._restored(path, shapes)))
            # With its arrays without elements, which were not stored.
            state = jax.tree.map(lambda leaf: next(leaves) if leaf.size else np.zeros(leaf.shape, leaf.dtype), like)
            return state, saved["facts"]

    def read_arrays(self, path: Path, is_wanted: Callable[[tuple[str, ...]], bool]) -> Arrays:
        """The arrays of the checkpoint at a path whose names are wanted, without those that have no elements."""
        path, placeholder = path.absolute(), self._ocp.PLACEHOLDER
        with _reading(path):
            held = self._checkpointer.metadata(path).item_metadata[_STATE]
            # An empty array of the right type stands for one that is read.
            wanted = jax.tree_util.tree_map_with_path(
                lambda at, leaf: np.zeros((), leaf.dtype) if is_wanted(names_of(at)) else placeholder,
                getattr(held, "tree", held),
            )
            leaves = jax.tree_util.tree_leaves_with_path(self._restored(path, wanted))
            return {names_of(at): leaf for at, leaf in leaves if leaf is not placeholder}

    def _restored(self, path: Path, shapes: PyTree) -> PyTree:
        args = self._ocp.args
        as_numpy = jax.tree.map(lambda leaf: self._ocp.RestoreArgs(restore_type=np.ndarray), shapes)
        items = {_STATE: args.PyTreeRestore(shapes, restore_args=as_numpy)}
        return self._checkpointer.restore(path, args=args.Composite(**items))[_STATE]

    def close(self) -> None:
        """Free Orbax's threads."""
        self._checkpointer.close()


class Checkpoints:
    """Checkpoints in one folder, numbered by step. All methods block.

    The newest is the one with the highest number that can be used. Those above it, which cannot, are moved aside when
    it is restored: else they would stand before everything that is learnt from then on.

    Args:
      keep: number of the newest that are kept.
      is_sound: returns False for a state that is worth nothing, such as one that is not finite.
      also_kept: takes the numbers of all checkpoints and returns those that stay beside the newest.
      say: told of each checkpoint that cannot be used, once.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        files: CheckpointFiles | None = None,
        is_sound: Callable[[PyTree], Any] = lambda state: True,
        also_kept: Callable[[Collection[int]], Collection[int]] = lambda numbers: (),
        say: Callable[[str], object] = logger.warning,
    ) -> None:
        self._folder = folder.absolute()
        self._keep, self._is_sound, self._also_kept, self._say = keep, is_sound, also_kept, say
        self._owns_files = files is None
        self._files = CheckpointFiles() if files is None else files
        self._usable: set[int] = set()  # those that were read or written here

    def latest_step(self) -> int | None:
        """Number of the newest checkpoint, usable or not; None if there is none."""
        return max(numbers_in(self._folder), default=None)

    def save(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        """Write a checkpoint unless there is a usable one of this step, and delete the oldest. Raises as `write`."""
        path = self._folder / str(step)
        if path.exists() and step not in self._usable:
            try:
                self._read(step, state)
            except CheckpointError as error:
                self._set_aside({step: str(error)}, "written anew")
        if not path.exists():
            self._files.write(path, state, facts)
        self._usable.add(step)
        self._prune(step)

    def restore_latest(self, like: PyTree) -> tuple[int, PyTree, dict[str, Any]]:
        """The newest checkpoint that can be used, as (step, state, facts); `like` as of `CheckpointFiles.read`.

        Raises:
          CheckpointError: there is none, or it is of another model. Nothing is moved then.
        """
        found, unusable = self._newest(like)
        if found is None:
            why = f"no checkpoint in {self._folder} can be used: {'; '.join(unusable.values())}"
            raise CheckpointError(why if unusable else f"there is no checkpoint in {self._folder}")
        self._set_aside(unusable, f"checkpoint {found[0]} is taken")
        return found

    def restore_or_begin(self, like: PyTree) -> tuple[int, PyTree, dict[str, Any]] | None:
        """Do as `restore_latest`, or set all aside that cannot be used and return None, for a fresh start."""
        found, unusable = self._newest(like)
        self._set_aside(unusable, "there is no other" if found is None else f"checkpoint {found[0]} is taken")
        return found

    def close(self) -> None:
        """Free Orbax's threads."""
        if self._owns_files:
            self._files.close()

    def _newest(self, like: PyTree) -> tuple[tuple[int, PyTree, dict[str, Any]] | None, dict[int, str]]:
        """The newest that can be used, and the reasons, by number, why those above it cannot."""
        unusable: dict[int, str] = {}
        # Listed again each time: another node that shares the folder may save, and delete the oldest, meanwhile.
        while left := [step for step in numbers_in(self._folder) if step not in unusable]:
            try:
                state, facts = self._read(left[-1], like)
            except _Unusable as error:
                unusable[left[-1]] = str(error)
                continue
            self._usable.add(left[-1])
            return (left[-1], state, facts), unusable
        return None, unusable

    def _read(self, step: int, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
        state, facts = self._files.read(self._folder / str(step), like)
        if not self._is_sound(state):
            raise _Unusable(f"checkpoint {self._folder / str(step)} is not finite")
        return state, facts

    def _set_aside(self, unusable: Mapping[int, str], instead: str) -> None:
        """Rename checkpoints that cannot be used, and say so."""
        for step, why in unusable.items():
            kept = self._folder / f"{_SET_ASIDE}{step}"
            number = 1
            while kept.exists():
                number += 1
                kept = self._folder / f"{_SET_ASIDE}{step}-{number}"
            try:
                (self._folder / str(step)).rename(kept)
            except FileNotFoundError:  # its node has deleted it meanwhile, since it was old
                continue
            except OSError as error:
                self._say(f"{why}; it cannot be moved away ({error.strerror}); {instead}")
                continue
            self._say(f"{why}; it is kept as {kept.name}; {instead}")

    def _prune(self, saved: int) -> None:
        """Delete the oldest, and what a writer that was killed has left unfinished."""
        numbers = numbers_in(self._folder)
        # Kept are also the newest up to the one just saved: higher ones may be another node's.
        newest, own = numbers[-self._keep :], [number for number in numbers if number <= saved][-self._keep :]
        for old in {*numbers} - {*newest, *own, *self._also_kept(numbers)}:
            trash = self._folder / f"{TRASH}{old}"
            with suppress(OSError):  # another node that shares the folder was quicker
                # Renamed first, so that nobody reads half of it.
                (self._folder / str(old)).rename(trash)
            shutil.rmtree(trash, ignore_errors=True)
        for path in self._folder.iterdir():
            name = path.name.removeprefix(TRASH).removeprefix(UNFINISHED)
            number, dot, _ = name.partition(".")
            is_leftover = bool(dot) or name != path.name
            if is_leftover and number.isdigit() and int(number) < saved:
                shutil.rmtree(path, ignore_errors=True)


def numbers_in(folder: Path) -> list[int]:
    """The numbers that name checkpoints in a folder, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit() and path.is_dir())


def read_arrays(
    folder: Path, is_wanted: Callable[[tuple[str, ...]], bool], step: int | None = None
) -> tuple[int, Arrays]:
    """The number of a checkpoint in a folder and some of its arrays: of the one with this number, or of the newest that
    can be read. Writes nothing. Raises CheckpointError if there is none."""
    held = numbers_in(folder)
    if step is not None and step not in held:
        there = ", ".join(map(str, held)) or "none"
        raise CheckpointError(f"there is no checkpoint {step} in {folder.absolute()}; those that are there: {there}")
    files = CheckpointFiles()
    why: list[str] = []
    try:
        for number in reversed(held) if step is None else (step,):
            try:
                arrays = files.read_arrays(folder / str(number), is_wanted)
            except _Unusable as error:
                why.append(str(error))
                continue
            for each in why:
                logger.warning("%s; checkpoint %d is read instead", each, number)
            return number, arrays
        raise CheckpointError("; ".join(why) or f"there is no checkpoint in {folder.absolute()}")
    finally:
        files.close()


@contextmanager
def _one_error(text: str, kind: Callable[[str], CheckpointError]) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # Orbax, TensorStore and the system each have their own
        # A file that cannot be written lies beside the checkpoint, which is named already.
        why = getattr(error, "strerror", None) if kind is CheckpointError else None
        reason = why or str(error).strip().partition("\n")[0] or type(error).__name__
        not_damaged = isinstance(error, MemoryError) or getattr(error, "errno", None) in _NOT_DAMAGED
        raise (CheckpointError if not_damaged else kind)(f"{text}: {reason[:300]}") from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    with _one_error(f"checkpoint {path} cannot be read", _Unusable):
        # Those of earlier versions have no checksums.
        if (path / _CHECKSUMS).exists():
            wanted = json.loads((path / _CHECKSUMS).read_text(encoding="utf-8"))
            held = dict(_checksums(path))
            if damaged := sorted(name for name, sums in wanted.items() if held.get(name) != sums):
                raise _Unusable(f"checkpoint {path} cannot be read: {damaged[0]} is damaged or gone")
        yield


def _checksums(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Path in the folder, [bytes, CRC-32], of each file that is read."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in _NOT_READ:
            size, checksum = 0, 0
            with path.open("rb") as file:
                while piece := file.read(1 << 22):
                    size, checksum = size + len(piece), zlib.crc32(piece, checksum)
            yield path.relative_to(folder).as_posix(), [size, checksum]


def _is_news(record: logging.LogRecord) -> bool:
    """False for what Orbax's threads log of an error that it raises as well."""
    return "_SignalingThread.run() raised" not in record.getMessage()


def names_of(path: Any) -> tuple[str, ...]:
    """The names on the way to a leaf, whether its tree is of dicts, sequences or named tuples."""
    return tuple(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def _check_arrays(like: PyTree, held: Mapping[str, str], where: str) -> None:
    """Compare the lists of arrays: Orbax would cut or pad an array to the shape that is asked for."""
    wanted = _inventory(like)
    if wanted != held:
        differing = sorted(name for name in {*wanted, *held} if wanted.get(name) != held.get(name))[0]
        raise CheckpointError(
            f"{where} is of another model: {differing} is "
            f"{held.get(differing, 'absent')}, expected {wanted.get(differing, 'nothing of that name')}"
        )


def _inventory(tree: PyTree) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): f"{np.dtype(leaf.dtype)}{list(leaf.shape)}" for path, leaf in leaves}
