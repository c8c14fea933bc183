"""A model reads a text, as it does to be evaluated, and it is noted which experts each of its layers chose.

The words are not predicted: what is left out is most of the work. A layer can be followed as far as the experts of all
layers before it are at hand; without any, the first layer's choices still are, for they depend on the trunk alone.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax.data.batches import Batch, evaluation_segments
from dmoe_jax.inspection.saved_model import SavedModel
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.layers import dmoe_layer
from dmoe_jax.models.transformer_xl import attention_segment, by_sequence, expert_inputs, router_ids, segments
from dmoe_jax.models.trunk import Memory, empty_memory, forget, next_memory
from dmoe_jax.remembered import remembered
from dmoe_jax.routing.base import Router, cell_numbers, combine_weights
from dmoe_jax.types import PyTree

BLOCKS = 32
"""Places from which a text is read side by side."""

OUTPUT_ROWS = 8
"""Segments, or as many words as these have, that all experts of a layer are given, to compare their outputs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading:
    """What was read and which experts were chosen. Blocks are places of the text, samples what is routed, in order:
    segments, or single words.

    Attributes:
      seq_len: words of a segment.
      words: int32 [blocks, samples, words of a sample]; -1 beyond the end of a block.
      places: [blocks, samples], where in the text each sample begins.
      chosen: of each layer that could be followed, int32 [blocks, samples, slots]: numbers of the experts, -1 for none.
      first: of each such layer, [blocks, samples]: the expert of the highest weight, -1 for none.
      outputs: of each layer whose experts are at hand, [E, n], what all its experts return for the same samples,
        flattened; NaN for an expert that is not there.
    """

    seq_len: int
    words: np.ndarray
    places: np.ndarray
    chosen: tuple[np.ndarray, ...]
    first: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]

    @property
    def routes_words(self) -> bool:
        """Whether each word has experts of its own."""
        return self.words.shape[2] == 1 < self.seq_len


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerChoice:
    """What one layer chose for one batch.

    Attributes:
      cells: int [samples, slots], numbers of the experts. mask: bool [samples, slots], which slots hold one.
      weights: [samples, slots], of the chosen.
      inputs: the experts' inputs.
    """

    cells: Any
    mask: Any
    weights: Any
    inputs: Sequence[Any]


def cut(ids: np.ndarray, seq_len: int, max_words: int) -> Iterator[tuple[Batch, np.ndarray]]:
    """Batches of a text, which is read from evenly spaced places, and where in it each of their rows begins.

    Args:
      ids: the text.
      seq_len: words of a segment.
      max_words: about so many are read; 0 for all.

    Raises:
      ValueError: a text without two words.
    """
    blocks = int(np.clip((ids.size - 1) // seq_len, 1, BLOCKS))
    sizes = {"batch_size": blocks, "seq_len": seq_len}
    num_batches = math.ceil(min(max_words or ids.size, ids.size) / (blocks * seq_len))
    places = (batch.tokens[:, 0] for batch in evaluation_segments(np.arange(ids.size), **sizes))
    return itertools.islice(zip(evaluation_segments(ids, **sizes), places, strict=True), num_batches)


def read_locally(model: SavedModel, batches: Iterable[tuple[Batch, np.ndarray]]) -> Reading:
    """Let the model read, with the experts that were saved with it."""
    depth = model.config.num_layers if model.experts else 1
    read = _read_program(model.config, model.router, depth)
    alive = model.known if model.experts and not model.known.all() else None
    memory = empty_memory(model.config, 0)
    notes = Notes()
    for batch, places in batches:
        if len(memory[0].mask) != len(places):
            memory = empty_memory(model.config, len(places))
        layers, memory = read(model.trunk, model.experts, alive, batch, memory)
        notes.add(batch, places, [LayerChoice(cells=c, mask=m, weights=w, inputs=i) for c, m, w, i in layers])
    respond = _response_program(model.config)
    outputs = [
        np.where(known.reshape(-1, 1), np.asarray(respond(experts, inputs)), np.nan)
        for experts, known, inputs in zip(model.experts, model.known, notes.inputs, strict=False)
    ]
    return notes.reading(outputs)


class Notes:
    """Gathers what was chosen, batch after batch."""

    def __init__(self) -> None:
        self._batches: list[tuple[np.ndarray, np.ndarray]] = []
        self._layers: list[list[tuple[np.ndarray, np.ndarray]]] = []
        self.inputs: list[list[np.ndarray]] = []
        """Of each layer its experts' inputs, of some samples of the last batch of which no word is beyond the end."""
        self._seq_len = 0

    def add(self, batch: Batch, places: np.ndarray, layers: Sequence[LayerChoice]) -> None:
        """Note the choices for a batch, whose samples are its rows or all words of its rows."""
        rows, seq_len = batch.tokens.shape
        per_row = len(layers[0].mask) // rows
        words = np.where(batch.mask, batch.tokens, -1).reshape(rows, per_row, -1)
        self._batches.append((words, places[:, None] + np.arange(0, seq_len, words.shape[2])))
        is_read = words[..., 0] >= 0
        self._layers.append([_cells(layer, is_read) for layer in layers])
        if batch.mask.all() or not self.inputs:
            chosen = np.linspace(0, rows * per_row - 1, min(OUTPUT_ROWS, rows) * per_row).astype(int)
            self.inputs = [[np.asarray(array)[chosen] for array in layer.inputs] for layer in layers]
        self._seq_len = seq_len

    def reading(self, outputs: Sequence[np.ndarray]) -> Reading:
        """All that was noted."""
        words, places = (np.concatenate(parts, axis=1) for parts in zip(*self._batches, strict=True))
        layers = [
            [np.concatenate(parts, axis=1) for parts in zip(*batches, strict=True)]
            for batches in zip(*self._layers, strict=True)
        ]
        return Reading(
            seq_len=self._seq_len,
            words=words,
            places=places,
            chosen=tuple(chosen for chosen, _ in layers),
            first=tuple(first for _, first in layers),
            outputs=tuple(outputs),
        )


def _cells(layer: LayerChoice, is_read: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(chosen, first) of a batch, [rows, samples of a row, ...]; -1 where there is no expert, or nothing is read."""
    mask = np.asarray(layer.mask).reshape(*is_read.shape, -1) & is_read[..., None]
    chosen = np.where(mask, np.asarray(layer.cells).reshape(mask.shape), -1).astype(np.int32)
    best = np.where(mask, np.asarray(layer.weights).reshape(mask.shape), -np.inf).argmax(axis=2)
    return chosen, np.take_along_axis(chosen, best[..., None], axis=2)[..., 0]


@remembered()
def _read_program(config: TransformerXLConfig, router: Router, depth: int) -> Callable[..., tuple[Any, Memory]]:
    """The compiled (trunk, experts, alive, batch, memory) -> (choices of the first `depth` layers, next memory).

    A choice is (cells, mask, weights, the experts' inputs).
    """
    parts, expert = segments(config, router), config.expert()

    def read(trunk: PyTree, experts: Any, alive: Any, batch: Batch, memory: Memory) -> tuple[Any, Memory]:
        tokens = jnp.asarray(batch.tokens)
        memory = forget(memory, jnp.asarray(batch.is_first))
        hidden, layers, memories = parts.embed(trunk["embed"], tokens), [], []
        for layer in range(depth):
            memories.append(next_memory(memory[layer], by_sequence(hidden, len(tokens))))
            if config.routes_tokens:
                hidden = attention_segment(config)(trunk["attention"][layer], hidden, memory[layer])
            scores = parts.gate(trunk["gates"][layer], hidden, memory[layer], router_ids(config, tokens))
            inputs = tuple(map(jnp.asarray, expert_inputs(config, hidden, memory[layer])))
            living = None if alive is None else alive[layer]
            if experts:
                hidden, aux = dmoe_layer(expert, experts[layer], router, config.k_best, scores, living, *inputs)
                indices, mask, weights = aux.indices, aux.mask, aux.weights
            else:
                indices, mask = router.select(scores, config.k_best, living)
                weights = combine_weights(router, scores, indices, mask)
            layers.append((cell_numbers(indices, config.grid_size), mask, weights, inputs))
        return layers, (*memories, *memory[depth:])

    return jax.jit(read)


@remembered()
def _response_program(config: TransformerXLConfig) -> Callable[..., jax.Array]:
    """The compiled (stacked experts, inputs) -> [E, n], what each expert returns, flattened."""
    expert = config.expert()

    def respond(experts: PyTree, inputs: Sequence[Any]) -> jax.Array:
        # One after the other: all at once would multiply the memory of a layer by its experts.
        return jax.lax.map(lambda own: expert.apply(own, *inputs).reshape(-1), experts)

    return jax.jit(respond)
