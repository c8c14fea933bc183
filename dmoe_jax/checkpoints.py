"""Checkpoints on disk: a pytree of arrays and a few facts beside it, written whole or not at all (Orbax).

Orbax writes into a temporary folder and renames it, so that a process killed in the middle leaves the previous
checkpoint as the latest. `Checkpoints` are those of a run, numbered, of which the newest few are kept;
`CheckpointFiles` writes and reads single ones.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dmoe_jax.arrays import stored
from dmoe_jax.types import PyTree

_STATE = "state"
_FACTS = "facts"


class CheckpointError(ValueError):
    """A folder holds no checkpoint, or one of another model. The message names the folder."""


class Checkpoints:
    """Checkpoints in one folder, numbered by step.

    All methods block; call them in a worker thread where that matters.

    Args:
      folder: made if it is not there.
      keep: how many of the newest are kept.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        # Here, for it takes a second, and a node that saves nothing starts without.
        import orbax.checkpoint as ocp

        self._folder = folder.absolute()
        self._args = ocp.args
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self._folder, options=options, item_names=(_STATE, _FACTS))

    def latest_step(self) -> int | None:
        """Number of the newest checkpoint, None if there is none."""
        step = self._manager.latest_step()
        return None if step is None else int(step)

    def save(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        """Write a checkpoint unless there is one of this step already.

        Args:
          step: its number.
          state: arrays that nobody changes or donates meanwhile; see `dmoe_jax.arrays.host_copy`.
          facts: what JSON can hold.
        """
        if step in self._manager.all_steps():
            return
        stored, record = _to_store(state, facts)
        items = {_STATE: self._args.StandardSave(stored), _FACTS: self._args.JsonSave(record)}
        self._manager.save(step, args=self._args.Composite(**items))

    def restore_latest(self, like: PyTree) -> tuple[int, PyTree, dict[str, Any]]:
        """The newest checkpoint as (step, state, facts).

        Args:
          like: a tree of arrays of the structure, shapes and dtypes that are expected.

        Raises:
          CheckpointError: there is none, or its structure, shapes or dtypes are others.
        """
        step = self.latest_step()
        if step is None:
            raise CheckpointError(f"there is no checkpoint in {self._folder}")
        saved = self._manager.restore(step, args=self._args.Composite(**{_FACTS: self._args.JsonRestore()}))[_FACTS]
        like = jax.tree.map(stored, like)
        shapes = _to_restore(like, saved, f"checkpoint {step} in {self._folder}")
        args = self._args.Composite(**{_STATE: self._args.StandardRestore(shapes)})
        return step, _refilled(like, self._manager.restore(step, args=args)[_STATE]), saved["facts"]

    def close(self) -> None:
        """Free Orbax's threads."""
        self._manager.close()


class CheckpointFiles:
    """Single checkpoints, each at a path of its own: what is at a path is whole. All methods block.

    Numbers are stored as they are: those that were learnt hardly shrink, and compressing them takes three times as
    long.
    """

    def __init__(self) -> None:
        import orbax.checkpoint as ocp

        self._args = ocp.args
        # Of a node of several processes one writes, what is whole there; Orbax would have it wait for the others.
        alone = {"primary_host": jax.process_index(), "active_processes": {jax.process_index()}}
        here = ocp.options.MultiprocessingOptions(**alone, barrier_sync_key_prefix="alone")
        items = {
            _STATE: ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=here),
            _FACTS: ocp.JsonCheckpointHandler(multiprocessing_options=here),
        }
        composite = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(multiprocessing_options=here), **items
        )
        self._checkpointer = ocp.Checkpointer(composite, multiprocessing_options=here)

    def write(self, path: Path, state: PyTree, facts: Mapping[str, Any]) -> None:
        """Write a checkpoint; like `Checkpoints.save`.

        Raises:
          ValueError: there is something at the path already.
        """
        stored, record = _to_store(state, facts)
        items = {_STATE: self._args.PyTreeSave(stored), _FACTS: self._args.JsonSave(record)}
        self._checkpointer.save(path.absolute(), args=self._args.Composite(**items))

    def read(self, path: Path, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """The checkpoint at a path as (state in NumPy arrays, facts).

        Args:
          like: a tree of arrays of the structure, shapes and dtypes that are expected.

        Raises:
          CheckpointError: its structure, shapes or dtypes are others.
          OSError or ValueError: it cannot be read.
        """
        import orbax.checkpoint as ocp

        path = path.absolute()
        facts_alone = self._args.Composite(**{_FACTS: self._args.JsonRestore()})
        saved = self._checkpointer.restore(path, args=facts_alone)[_FACTS]
        like = jax.tree.map(stored, like)
        shapes = _to_restore(like, saved, f"checkpoint {path}")
        as_numpy = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
        args = self._args.Composite(**{_STATE: self._args.PyTreeRestore(shapes, restore_args=as_numpy)})
        return _refilled(like, self._checkpointer.restore(path, args=args)[_STATE]), saved["facts"]

    def close(self) -> None:
        """Free Orbax's threads."""
        self._checkpointer.close()


def read_arrays(
    folder: Path, is_wanted: Callable[[tuple[str, ...]], bool]
) -> tuple[int, dict[tuple[str, ...], np.ndarray]]:
    """Some arrays of the newest checkpoint, for readers that do not know all of its structure. Writes nothing.

    Args:
      folder: where the checkpoints are.
      is_wanted: told the names on the way to an array, such as ("params", "gates", "0", "kernel"); what it does not
        want is not read from the disk.

    Returns: (its number, the arrays by those names); arrays without elements are left out.

    Raises:
      CheckpointError: there is none.
    """
    import orbax.checkpoint as ocp

    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint in {folder}")
    handlers = {_STATE: ocp.PyTreeCheckpointHandler(), _FACTS: ocp.JsonCheckpointHandler()}
    options = ocp.CheckpointManagerOptions(create=False)
    manager = ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handlers)
    try:
        step = manager.latest_step()
        if step is None:
            raise CheckpointError(f"there is no checkpoint in {folder}")
        held = manager.item_metadata(step)[_STATE]
        # An empty array of the right type stands for one that is read.
        wanted = jax.tree_util.tree_map_with_path(
            lambda path, leaf: np.zeros((), leaf.dtype) if is_wanted(names_of(path)) else ocp.PLACEHOLDER,
            getattr(held, "tree", held),
        )
        as_numpy = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
        args = ocp.args.Composite(**{_STATE: ocp.args.PyTreeRestore(wanted, restore_args=as_numpy)})
        state = manager.restore(step, args=args)[_STATE]
    finally:
        manager.close()
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return int(step), {names_of(path): leaf for path, leaf in leaves if leaf is not ocp.PLACEHOLDER}


def names_of(path: Any) -> tuple[str, ...]:
    """The names on the way to a leaf, whether its tree is of dicts, sequences or named tuples."""
    return tuple(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def _to_store(state: PyTree, facts: Mapping[str, Any]) -> tuple[PyTree, dict[str, Any]]:
    """What is written: the arrays, and the facts with a list of the arrays.

    NumPy scalars (step counts) become arrays of rank 0: Orbax stores arrays alone, and none without elements.
    """
    arrays = jax.tree.map(lambda leaf: np.asarray(stored(leaf)), state)
    return jax.tree.map(_if_any, arrays), {"facts": dict(facts), "arrays": _inventory(arrays)}


def _if_any(leaf: Any) -> Any:
    return leaf if leaf.size else None


def _to_restore(like: PyTree, saved: Mapping[str, Any], where: str) -> PyTree:
    """The shapes to ask Orbax for, which would cut or pad an array to the shape asked for: so the lists are compared.

    Raises:
      CheckpointError: the checkpoint holds others.
    """
    wanted, held = _inventory(like), saved["arrays"]
    if wanted != held:
        differing = sorted(name for name in {*wanted, *held} if wanted.get(name) != held.get(name))[0]
        raise CheckpointError(
            f"{where} is of another model: {differing} is "
            f"{held.get(differing, 'absent')}, expected {wanted.get(differing, 'nothing of that name')}"
        )
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if leaf.size else None, like)


def _refilled(like: PyTree, stored: PyTree) -> PyTree:
    """The tree that was stored, with its arrays without elements."""
    leaves = iter(jax.tree.leaves(stored))
    return jax.tree.map(lambda leaf: next(leaves) if leaf.size else np.zeros(leaf.shape, leaf.dtype), like)


def _inventory(tree: PyTree) -> dict[str, str]:
    """Dtype and shape of each array by its path in the tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): f"{np.dtype(leaf.dtype)}{list(leaf.shape)}" for path, leaf in leaves}
