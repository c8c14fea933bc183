"""A trained model as safetensors, for other tools: one file, or a folder with a file for each expert.

Names and facts are those of `export_files`, to which `imported` is the way back.
"""

import dataclasses
import errno
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dmoe_jax.arrays import PyTree
from dmoe_jax.checkpoints import names_of, read_arrays
from dmoe_jax.directory.grid import all_uids
from dmoe_jax.machine.disk import CheckpointError, errors_name
from dmoe_jax.runs.run_folder import RunFolder, replaced_file
from dmoe_jax.trained.export_files import (
    DTYPES,
    KNOWN,
    SUFFIX,
    TRUNK_FILE,
    ExportFacts,
    expert_metadata,
    vocabulary_folder,
)
from dmoe_jax.trained.saved_model import Checkpoint, SavedModel, step_of
from dmoe_jax.trained.saved_run import SavedRun
from dmoe_net.meaning import is_meaning

Arrays = dict[str, Any]
"""Arrays by the names that they have in a file; or their shapes and types."""


def words_of_checkpoint(run: SavedRun, checkpoint: Checkpoint = "last") -> int:
    """Number of words of the vocabulary of a run's model, by its embedding. Raises CheckpointError."""
    _, arrays = read_arrays(
        run.checkpoints,
        lambda names: names[0] in ("trunk", "params") and names[-2:] == ("embed", "table") and "opt_state" not in names,
        step_of(run, checkpoint),
    )
    if not arrays:
        raise CheckpointError(f"the checkpoint in {run.checkpoints} has no word vectors: it is of another model")
    return len(next(iter(arrays.values())))


def facts_of(run: SavedRun, model: SavedModel) -> ExportFacts:
    """The facts of a run's model for its export."""
    told = [record for record in RunFolder(run.path).metrics() if record["kind"] == "task"]
    meaning = told[0].get("meaning") if told else ""
    return ExportFacts(
        sizes=dataclasses.asdict(model.config),
        router=run.router,
        step=model.step,
        meaning=meaning if isinstance(meaning, str) and is_meaning(meaning) else "",
        corpus=run.corpus,
    )


def named_arrays(tree: PyTree, *prefix: str) -> Arrays:
    """The arrays of a tree by their names, joined by dots. Raises ValueError if two have the same."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = {".".join((*prefix, *names_of(path))): leaf for path, leaf in leaves}
    if len(arrays) != len(leaves):
        raise ValueError(f"parameters of {'.'.join(prefix)} have names that differ in their dots alone")
    return arrays


def write_export(model: SavedModel, facts: ExportFacts, out: Path, *, split: bool, vocabulary: Path) -> Arrays:
    """Write a model, whole or not at all; return the arrays of the trunk's file.

    Args:
      out: the file; with `split` the folder, in which each expert that is known has a file of its own. Not there yet.
      vocabulary: folder from which the files of its vocabulary are copied, if it has them.

    Raises:
      ValueError: an array has a type or a name that safetensors does not know. OSError: it cannot be written.
      ModuleNotFoundError: safetensors is missing, an extra.
    """
    trunk = {**named_arrays(model.trunk, "trunk"), KNOWN: model.known}
    out.parent.mkdir(parents=True, exist_ok=True)
    if split:
        with _made_folder(out) as folder:
            for uid, params in _each_expert(model):
                _write(folder / f"{uid}{SUFFIX}", named_arrays(params), expert_metadata(uid))
            _copy_vocabulary(vocabulary, folder)
            _write(folder / TRUNK_FILE, trunk, facts.metadata())
        return trunk
    for layer, name in enumerate(model.layers):
        if model.known[layer].any():
            trunk |= named_arrays(model.experts[layer], "experts", name)
    with replaced_file(out) as temporary:
        _write(temporary, trunk, facts.metadata())
        if _files_of_vocabulary(vocabulary):
            with _made_folder(vocabulary_folder(out)) as folder:
                _copy_vocabulary(vocabulary, folder)
    return trunk


def _each_expert(model: SavedModel) -> Iterator[tuple[str, PyTree]]:
    for layer, name in enumerate(model.layers):
        for number, uid in enumerate(all_uids(name, model.config.grid_size)):
            if model.known[(layer, *uid.coordinates)]:
                yield str(uid), jax.tree.map(lambda leaf, at=number: leaf[at], model.experts[layer])


def _write(file: Path, arrays: Mapping[str, Any], metadata: dict[str, str]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    # In C order, since bytes are written as they lie in memory.
    ordered = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    if odd := [name for name, array in ordered.items() if array.dtype not in DTYPES.values()]:
        raise ValueError(f"safetensors has no type for {ordered[odd[0]].dtype}, that of {odd[0]}")
    file.touch()
    mode = file.stat().st_mode
    try:
        save_file(ordered, file, metadata=metadata)
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(file)) from error
    file.chmod(mode)  # it has left the user alone the right to read it


@contextmanager
def _made_folder(path: Path) -> Iterator[Path]:
    """A folder to write into that is moved to its path after the body; if that raises, nothing is left."""
    with errors_name(path, path.with_name(f".{path.name}.")):
        unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            (unfinished / path.name).mkdir()
            yield unfinished / path.name
            (unfinished / path.name).rename(path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _files_of_vocabulary(folder: Path) -> list[Path]:
    """A run's vocabulary and, where it has one, its tokenizer."""
    found = sorted(path for path in folder.glob("tokenizer.*") if path.is_file())
    return [folder / "vocabulary.json", *found] if (folder / "vocabulary.json").is_file() else []


def _copy_vocabulary(source: Path, folder: Path) -> None:
    for path in _files_of_vocabulary(source):
        shutil.copyfile(path, folder / path.name)
