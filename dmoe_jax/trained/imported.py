"""The way back from an export: the model, a trunk for trainers to begin with, and experts for nodes to begin with."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from dmoe_jax.arrays import PyTree
from dmoe_jax.checkpoints import CheckpointFiles, numbers_in
from dmoe_jax.directory.grid import all_uids, layer_prefix
from dmoe_jax.experts.base import Expert
from dmoe_jax.layer_config import LayerConfig
from dmoe_jax.machine.disk import CheckpointError
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.transformer_xl import init_experts, trunk_shapes
from dmoe_jax.routing.check import check_router
from dmoe_jax.routing.registry import make_router
from dmoe_jax.trained.export_files import (
    KNOWN,
    SUFFIX,
    ExportFacts,
    StoredArray,
    read_array,
    read_facts,
    read_header,
    trunk_file,
)
from dmoe_jax.trained.exporting import Arrays, named_arrays
from dmoe_jax.trained.saved_model import SavedModel, check_types, config_of
from dmoe_jax.training.prepared_run import check_code, is_code
from dmoe_net.meaning import contradiction

_SAME = ("vocab_size", "num_layers", "cutoffs", "route", "grid_size", "d_model")
"""Sizes in which a model and an export must agree, for a trunk of the one to serve the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Export:
    """An export whose sizes are known to be no larger than its files; nothing else of it is read."""

    path: Path
    file: Path
    """The file of the trunk, and of the experts unless each has its own."""
    arrays: Mapping[str, StoredArray]
    """Those of this file."""
    facts: ExportFacts
    config: TransformerXLConfig
    known: np.ndarray
    experts: tuple[PyTree, ...]
    """Shapes and types of each layer's experts, stacked."""

    @property
    def is_split(self) -> bool:
        return self.file != self.path

    def numbers(self, layer: int) -> Iterator[tuple[int, str]]:
        """Number and uid of each expert of a layer that is known."""
        for number, uid in enumerate(all_uids(layer_prefix(layer), self.config.grid_size)):
            if self.known[(layer, *uid.coordinates)]:
                yield number, str(uid)


def read_export(path: Path, *, router: str | None = None, trust: bool = False) -> SavedModel:
    """The model in an export, as `load_model` has it of a run. The files may be a stranger's.

    Args:
      router: name of its router again, if that is out of a file: none is run only because the export names it.
      trust: true if the file that the export names may be run.

    Raises:
      ValueError: it is no whole export, its arrays are not those of its configuration, or its router is another one.
      OSError: it cannot be read.
    """
    export = _open(path)
    if router is not None and not is_code(export.facts.router) and router != export.facts.router:
        raise ValueError(f"the router of the model in {path} is {export.facts.router}, not {router}")
    spec, config = router or export.facts.router, export.config
    if not trust:
        check_code(path, [spec], named=[router or ""])
    made = make_router(spec, config.grid_size)
    trunk = trunk_shapes(config, made)
    held = {name: each for name, each in export.arrays.items() if not name.startswith("experts.")}
    _check_arrays(held, named_arrays(trunk, "trunk"), export.file)
    # Not before: it makes parameters as large as the configuration says.
    check_router(made, config.grid_size, config.d_model, in_order=config.routes_tokens)
    _check_experts(export)
    return SavedModel(
        config=config,
        router=made,
        step=export.facts.step,
        trunk=_read_tree(export.file, export.arrays, trunk, "trunk"),
        experts=tuple(_read_layer(export, layer) for layer in range(config.num_layers)),
        known=export.known,
    )


def read_trunk_for(
    path: Path, config: TransformerXLConfig, *, router: str, words: str, trust: bool = False
) -> dict[str, PyTree]:
    """The trunk of an export for a model of this configuration to begin with.

    Args:
      router: name of the model's router.
      words: meaning of the model's words.
      trust: as of `read_export`.

    Raises:
      ValueError: as of `read_export`, or the export is of another model, or of other words.
    """
    export = _open(path)
    if differ := contradiction(export.facts.meaning, words):
        theirs = f"{differ[0]} of the text {export.facts.corpus!r}"
        raise ValueError(f"the words of the model in {path} are others: {theirs}, expected {differ[1]}")
    for name in _SAME:
        theirs, ours = getattr(export.config, name), getattr(config, name)
        if theirs != ours:
            raise ValueError(f"the model in {path} has {name} {theirs}, expected {ours}")
    heads, expected = export.config.layer.num_heads, config.layer.num_heads
    if config.routes_tokens and heads != expected:
        raise ValueError(f"the attention of the model in {path} has {heads} heads, expected {expected}")
    trunk: dict[str, PyTree] = read_export(path, router=router, trust=trust).trunk
    return trunk


def begin_experts(
    path: Path,
    folder: Path,
    uids: Collection[str],
    expert: Expert,
    optimizer: optax.GradientTransformation | None,
) -> int:
    """Write experts of an export as checkpoints of a node, which then begins with them; return their number.

    Experts of which the folder has a checkpoint are left as they are, and so are those that the export does not have.

    Args:
      folder: the node's, as for an `ExpertSaver`.
      uids: experts that the node may serve.
      expert, optimizer: the node's; the optimiser's state begins afresh.

    Raises:
      ValueError: as of `read_export`; the export has none of the experts, or they are not this `expert`.
      CheckpointError: one cannot be written.
    """
    wanted = {uid for uid in uids if not numbers_in(folder / uid)}
    if not wanted:
        return 0
    export = _open(path)
    _check_experts(export)
    found = {
        uid: (layer, number)
        for layer in range(export.config.num_layers)
        for number, uid in export.numbers(layer)
        if uid in wanted
    }
    if not found:
        raise ValueError(f"{path} has none of the experts {', '.join(sorted(wanted)[:3])} ...")
    like = jax.eval_shape(expert.init, jax.random.key(0))
    _check_arrays(named_arrays(_one_of(export.experts[0])), named_arrays(like), path)
    facts = {"updates": 0, "learnt_from": [], "meaning": export.config.expert().meaning}
    files = CheckpointFiles()
    try:
        for uid, (layer, number) in found.items():
            params = _read_one(export, layer, number, uid)
            state = {"params": params, "opt_state": () if optimizer is None else optimizer.init(params)}
            try:
                files.write(folder / uid / "0", state, facts)
            except CheckpointError:
                if not numbers_in(folder / uid):  # else another node that shares the folder was quicker
                    raise
    finally:
        files.close()
    return len(found)


def _open(path: Path) -> _Export:
    file = trunk_file(path)
    facts, (arrays, _) = read_facts(path), read_header(file)
    config = _checked_config(facts.sizes, arrays, file)
    known = read_array(file, arrays[KNOWN]).view(np.uint8) != 0
    try:
        experts = jax.eval_shape(partial(init_experts, config=config), jax.random.key(0))
    except (TypeError, OverflowError) as error:  # beyond JAX's own limits
        raise ValueError(f"{file} has no configuration of a model: {error}") from error
    return _Export(path=path, file=file, arrays=arrays, facts=facts, config=config, known=known, experts=experts)


def _checked_config(sizes: Mapping[str, Any], arrays: Mapping[str, StoredArray], file: Path) -> TransformerXLConfig:
    """The configuration, whose vocabulary, width, layers and grid are no larger than the file has room for."""
    table, known = arrays.get("trunk.embed.table"), arrays.get(KNOWN)
    try:
        layer = sizes["layer"]
        check_types(sizes, TransformerXLConfig)
        check_types(layer, LayerConfig)
        shapes = ((sizes["vocab_size"], layer["d_model"]), (sizes["num_layers"], *sizes["grid_size"]))
        if table is None or known is None or (table.shape, known.shape) != shapes or not math.prod(known.shape):
            raise ValueError(f"trunk.embed.table and {KNOWN} must have the shapes {shapes[0]} and {shapes[1]}")
        if known.dtype != np.bool_:
            raise ValueError(f"{KNOWN} has type {known.dtype}, expected bool")
        return config_of(sizes, sizes["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} has no configuration of a model: {error}") from error


def _check_experts(export: _Export) -> None:
    """Check that the trunk's file has the experts that it should have, and nothing else of that name."""
    held = {name: each for name, each in export.arrays.items() if name.startswith("experts.")}
    wanted: Arrays = {KNOWN: export.arrays[KNOWN]}
    for layer, like in enumerate(export.experts):
        if export.known[layer].any() and not export.is_split:
            wanted |= named_arrays(like, "experts", layer_prefix(layer))
    _check_arrays(held, wanted, export.file)


def _check_arrays(held: Mapping[str, Any], wanted: Mapping[str, Any], file: Path) -> None:
    """Check that a file has the arrays that are wanted, and no others."""
    found, expected = (
        {name: f"{np.dtype(each.dtype)}{list(each.shape)}" for name, each in arrays.items()}
        for arrays in (held, wanted)
    )
    if differing := sorted({name for name, _ in found.items() ^ expected.items()}):
        name = differing[0]
        parts = f"{name!r:.80} is {found.get(name, 'absent')}, expected {expected.get(name, 'nothing of that name')}"
        raise ValueError(f"{file} is of another model: {parts}")


def _read_tree(file: Path, arrays: Mapping[str, StoredArray], like: PyTree, *prefix: str) -> PyTree:
    names = iter(named_arrays(like, *prefix))  # in the order of the leaves
    return jax.tree.map(lambda leaf: read_array(file, arrays[next(names)]), like)


def _read_layer(export: _Export, layer: int) -> PyTree:
    """A layer's experts, stacked; zeros for those that are not known."""
    like = export.experts[layer]
    if not export.known[layer].any():
        # Zeros that take no memory: no array of the file says that these sizes are honest.
        return jax.tree.map(lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), like)
    if not export.is_split:
        return _read_tree(export.file, export.arrays, like, "experts", layer_prefix(layer))
    stacked = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
    for number, uid in export.numbers(layer):
        one = _read_one(export, layer, number, uid)
        for whole, part in zip(jax.tree.leaves(stacked), jax.tree.leaves(one), strict=True):
            whole[number] = part
    return stacked


def _read_one(export: _Export, layer: int, number: int, uid: str) -> PyTree:
    """The parameters of one expert, which is known."""
    one = _one_of(export.experts[layer])
    if export.is_split:
        file = export.path / f"{uid}{SUFFIX}"
        arrays, _ = read_header(file, uid=uid)
        _check_arrays(arrays, named_arrays(one), file)
        return _read_tree(file, arrays, one)
    prefix = ("experts", layer_prefix(layer))
    return _read_tree(export.file, _rows(export.arrays, named_arrays(one, *prefix), number), one, *prefix)


def _rows(arrays: Mapping[str, StoredArray], names: Iterable[str], number: int) -> dict[str, StoredArray]:
    """The row of this number of each of these arrays, as an array of its own."""
    rows = {}
    for name in names:
        whole = arrays[name]
        begin = whole.begin + number * whole.dtype.itemsize * math.prod(whole.shape[1:])
        rows[name] = dataclasses.replace(whole, shape=whole.shape[1:], begin=begin)
    return rows


def _one_of(stacked: PyTree) -> PyTree:
    """Shapes and types of one expert of a stack."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked)
