"""The model of a run out of its checkpoints: the trunk, and the experts where they were saved.

A trainer's checkpoint over a swarm has the trunk alone, and each node saves its own experts; models that were trained
on one device, simulated or emulated have all in one place.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_type_hints

import jax
import numpy as np

from dmoe_jax.arrays import PyTree
from dmoe_jax.checkpoints import names_of, numbers_in, read_arrays
from dmoe_jax.data.corpora import Corpus, has_name, load_corpus
from dmoe_jax.data.pieces import PieceVocabulary
from dmoe_jax.data.saved_vocabulary import VOCABULARY, load_vocabulary
from dmoe_jax.directory.grid import all_uids, layer_prefix
from dmoe_jax.layer_config import LayerConfig
from dmoe_jax.machine.disk import CheckpointError
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.transformer_xl import init_experts, trunk_shapes
from dmoe_jax.node.saving import saved_uids
from dmoe_jax.routing.base import Router
from dmoe_jax.routing.check import check_router
from dmoe_jax.routing.registry import make_router
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.trained.saved_run import SHARED_FOLDER, SavedRun, saved_experts
from dmoe_jax.training.prepared_run import best_step, check_meaning_of_run

_TRUNKS = (("trunk", "params"), ("params",), ("trunk",))
"""Places of the trunk: in a simulated swarm; in a swarm, or an emulated one; on one device."""

_MOST_LAYERS, MOST_LENGTH = 1 << 12, 1 << 20
"""Layers, and words of a segment or a memory, of the largest model that is read: its sizes may be a stranger's."""

Checkpoint = Literal["last", "best"] | int
"""A checkpoint of a run: its newest one, the one whose evaluation on the way had the least loss, or that of a step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedModel:
    """A model as a run left it.

    Attributes:
      step: number of trunk updates that it has taken.
      trunk: parameters of everything but the experts.
      experts: parameters of each layer's experts, stacked; zeros for those that were not saved.
      known: bool [layers, *grid], true for experts that were saved.
      is_checkpoint: true if it is one of several checkpoints of a run.
    """

    config: TransformerXLConfig
    router: Router
    step: int
    trunk: PyTree
    experts: tuple[PyTree, ...]
    known: np.ndarray
    is_checkpoint: bool = False

    @property
    def depth(self) -> int:
        """Layers whose choices can be followed: what a layer reads depends on the experts before it."""
        return self.config.num_layers if self.known.any() else 1

    @property
    def num_experts(self) -> int:
        """Number of experts of a layer."""
        return math.prod(self.config.grid_size)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers."""
        return tuple(map(layer_prefix, range(self.config.num_layers)))

    @property
    def places(self) -> tuple[str, ...]:
        """Place in the grid of each expert of a layer: "0.3"."""
        return tuple(str(uid).partition(".")[2] for uid in all_uids("layer", self.config.grid_size))


def open_corpus(run: SavedRun) -> Corpus:
    """The text that a run was trained on. Raises ValueError if it cannot be had, or is another one."""
    if run.data == run.corpus and not has_name(run.data) and not Path(run.data).exists():
        raise ValueError(f"the run was trained on a text of your own, {run.corpus!r}; say where it is with --data")
    # Words are those of the text, which shows whether it is the same; pieces are the tokenizer's, whatever the text.
    vocabulary = load_vocabulary(run.path) if (run.path / VOCABULARY).exists() else None
    pieces = vocabulary if isinstance(vocabulary, PieceVocabulary) else None
    corpus = load_corpus(source=run.data, vocabulary=pieces)
    if run.corpus not in (corpus.name, "auto"):
        raise ValueError(f"the run was trained on {run.corpus!r}; --data {run.data} is {corpus.name!r}")
    check_meaning_of_run(run.path, corpus.vocabulary.meaning)
    return corpus


def load_model(
    run: SavedRun, vocab_size: int, nodes: Iterable[Path] = (), checkpoint: Checkpoint = "last"
) -> SavedModel:
    """The model as a checkpoint of the run has it.

    Args:
      vocab_size: number of words of the text that it was trained on.
      nodes: checkpoint folders of the nodes that served its experts; none: those that lie beside the run. The experts
        are those that the nodes saved last, whatever the checkpoint of the trunk.
      checkpoint: of those that are kept, which are few.

    Raises:
      ValueError: there is no such checkpoint, or it is of another model; a node's folder has none, or the settings do
        not fit each other.
    """
    config = config_of(run.sizes, vocab_size)
    router = make_router(run.router, config.grid_size)
    step, arrays = read_arrays(
        run.checkpoints,
        lambda names: names[0] in ("trunk", "params", "experts") and "opt_state" not in names,
        step_of(run, checkpoint),
    )
    check_router(router, config.grid_size, config.d_model, in_order=config.routes_tokens)
    like = trunk_shapes(config, router)
    trunk = next((found for place in _TRUNKS if (found := _tree(arrays, place, like)) is not None), None)
    if trunk is None:
        raise CheckpointError(f"checkpoint {step} in {run.checkpoints} is not of the model that config.json describes")
    shapes = jax.eval_shape(partial(init_experts, config=config), jax.random.key(0))
    experts = tuple(
        next((tree for end in (("params",), ()) if (tree := _tree(arrays, ("experts", str(layer), *end), like))), None)
        for layer, like in enumerate(shapes)
    )
    known = np.full((config.num_layers, *config.grid_size), all(layer is not None for layer in experts))
    if not known.all():
        experts = _from_nodes(nodes or _beside(run.path), shapes, known)
    return SavedModel(
        config=config, router=router, step=step, trunk=trunk, experts=experts, known=known, is_checkpoint=True
    )


def step_of(run: SavedRun, checkpoint: Checkpoint) -> int | None:
    """The step of a checkpoint; None for the newest that can be read. Raises CheckpointError if none was evaluated."""
    if checkpoint != "best":
        return None if checkpoint == "last" else checkpoint
    best = best_step(RunFolder(run.path).metrics(), numbers_in(run.checkpoints))
    if best is None:
        raise CheckpointError(f"no checkpoint in {run.checkpoints} was evaluated, so that none is known as the best")
    return best


def check_types(sizes: Mapping[str, Any], kind: type) -> None:
    """Check that fields which are whole numbers, several of them, or true or false have such values, and none beyond
    all reason."""
    for name, hint in get_type_hints(kind).items():
        if name not in sizes:
            continue
        value = sizes[name]
        values = value if hint == tuple[int, ...] and isinstance(value, list | tuple) else [value]
        is_number = hint in (int, tuple[int, ...]) or (hint == int | None and value is not None)
        if is_number and not all(type(each) is int and 0 <= each < 1 << 31 for each in values):
            raise TypeError(f"{name} is {value!r:.80}")
        if hint is bool and type(value) is not bool:
            raise TypeError(f"{name} is {value!r:.80}")


def config_of(sizes: Mapping[str, Any], vocab_size: int) -> TransformerXLConfig:
    """The model's configuration from its fields by name. Raises ValueError if they do not fit each other."""
    if sizes.get("vocab_size", vocab_size) != vocab_size:
        raise ValueError(f"the run's vocabulary has {sizes['vocab_size']} words, that of the text {vocab_size}")
    try:
        check_types(sizes, TransformerXLConfig)
        check_types(sizes["layer"], LayerConfig)
        cutoffs = tuple(cutoff for cutoff in sizes["cutoffs"] if cutoff < vocab_size)
        changes = {"vocab_size": vocab_size, "cutoffs": cutoffs, "grid_size": tuple(sizes["grid_size"])}
        config = TransformerXLConfig(**{**sizes, **changes, "layer": LayerConfig(**sizes["layer"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"the sizes were made by another version, or are damaged: {error!r:.200}") from error
    if config.num_layers > _MOST_LAYERS or max(config.seq_len, config.mem_len) > MOST_LENGTH:
        lengths = f"segments of {config.seq_len} words and a memory of {config.mem_len}"
        raise ValueError(f"a model of {config.num_layers} layers, {lengths} is beyond all reason")
    return config


def _beside(run: Path) -> list[Path]:
    folders = [saved_experts(run), run.parent / "nodes"]
    # A node that was killed before it saved for the first time has an empty folder.
    own = ([*sorted(folder.glob("node[0-9]*")), folder / SHARED_FOLDER] for folder in folders)
    checkpoints = ([each for each in some if saved_uids(each)] for some in own)
    return next((found for found in checkpoints if found), [])


def _tree(arrays: Mapping[tuple[str, ...], np.ndarray], place: tuple[str, ...], like: PyTree) -> PyTree | None:
    """The tree of these shapes that lies at a place; None if there is no such tree."""

    def find(path: Any, leaf: Any) -> np.ndarray | None:
        empty = np.zeros(leaf.shape, leaf.dtype) if 0 in leaf.shape else None
        found = arrays.get((*place, *names_of(path)), empty)
        return found if found is not None and found.shape == leaf.shape else None

    tree = jax.tree_util.tree_map_with_path(find, like)
    is_whole = len(jax.tree.leaves(tree)) == len(jax.tree.leaves(like))
    return tree if is_whole else None


def _from_nodes(folders: Iterable[Path], shapes: tuple[PyTree, ...], known: np.ndarray) -> tuple[PyTree, ...]:
    """The experts that nodes saved, stacked; notes in `known` which they are."""
    stacked = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    for folder in folders:
        held = saved_uids(folder)
        if not held:
            raise CheckpointError(f"there is no checkpoint of an expert in {folder}")
        for layer, params in enumerate(stacked):
            for number, uid in enumerate(all_uids(layer_prefix(layer), known.shape[1:])):
                if str(uid) not in held:
                    continue
                step, arrays = read_arrays(folder / str(uid), lambda names: names[:1] == ("params",))
                one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params)
                own = _tree(arrays, ("params",), one)
                if own is None:
                    raise CheckpointError(
                        f"checkpoint {step} in {folder}: {uid} has other shapes than the run's experts"
                    )
                for whole, part in zip(jax.tree.leaves(params), jax.tree.leaves(own), strict=True):
                    whole[number] = part
                known[(layer, *uid.coordinates)] = True
    return tuple(stacked)
