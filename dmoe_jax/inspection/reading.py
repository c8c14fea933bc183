"""A model reads a text, as it does to be evaluated, and it is noted which experts each of its layers chose.

A layer can be followed as far as the experts of all layers before it are at hand; without any, the first layer's
choices still are, for they depend on the trunk alone.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dmoe_jax.arrays import PyTree
from dmoe_jax.autodiff import Recording, Value
from dmoe_jax.data.batches import Batch, evaluation_segments
from dmoe_jax.machine.device import to_host
from dmoe_jax.machine.remembered import remembered
from dmoe_jax.mixture.remote import RemoteMixture, mix_segment
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.layers import Mixture
from dmoe_jax.models.transformer_xl import TransformerXL, local_forward
from dmoe_jax.models.trunk import Memory, empty_memory
from dmoe_jax.routing.base import Router, cell_numbers
from dmoe_jax.swarm.swarm import Swarm
from dmoe_jax.trained.saved_model import SavedModel

BLOCKS = 32
"""Places from which a text is read side by side."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading:
    """The text that was read, and the experts that were chosen. It is read at several places, the blocks; a sample is
    routed as one, a segment or a single word.

    Attributes:
      words: int32 [blocks, samples, words of a sample]; -1 beyond the end of a block.
      places: [blocks, samples], places in the text where the samples begin.
      chosen: numbers of the experts, -1 for none: int32 [blocks, samples, slots] of each layer that could be followed.
      experts: says from which experts the layers could choose.
    """

    seq_len: int
    words: np.ndarray
    places: np.ndarray
    chosen: tuple[np.ndarray, ...]
    experts: str

    @property
    def routes_words(self) -> bool:
        """True if each word has experts of its own."""
        return self.words.shape[2] == 1 < self.seq_len


def cut(ids: np.ndarray, seq_len: int, max_words: int) -> Iterator[tuple[Batch, np.ndarray]]:
    """Batches of about `max_words` words (0: all) of a text, read from evenly spaced places, and where in it each of
    their rows begins. Raises ValueError for a text without two words."""
    blocks = int(np.clip((ids.size - 1) // seq_len, 1, BLOCKS))
    sizes = {"batch_size": blocks, "seq_len": seq_len}
    num_batches = math.ceil(min(max_words or ids.size, ids.size) / (blocks * seq_len))
    places = (batch.tokens[:, 0] for batch in evaluation_segments(np.arange(ids.size), **sizes))
    return itertools.islice(zip(evaluation_segments(ids, **sizes), places, strict=True), num_batches)


def read_locally(model: SavedModel, batches: Iterable[tuple[Batch, np.ndarray]]) -> Reading:
    """Let the model read, with the experts that were saved with it."""
    read = _read_program(model.config, model.router, model.depth)
    known, is_whole = int(model.known.sum()), model.known.all()
    alive = model.known if known and not is_whole else None
    memory: Memory | None = None
    batches, chosen = list(batches), []
    for batch, places in batches:
        memory = empty_memory(model.config, len(places)) if memory is None else memory
        layers, memory = read(model.trunk, model.experts, alive, batch, memory)
        chosen.append([np.where(mask, cells, -1) for cells, mask in layers])
    is_told = alive is not None
    experts = f"the {known} of {model.known.size} that were saved" if is_told else "all, as if none had ever been lost"
    return _reading(batches, chosen, experts)


@remembered()
def _read_program(config: TransformerXLConfig, router: Router, depth: int) -> Callable[..., tuple[Any, Memory]]:
    """The compiled (trunk, experts, alive, batch, memory) -> ((cells, mask) of `depth` layers, next memory)."""

    def read(trunk: PyTree, experts: Any, alive: Any, batch: Batch, memory: Memory) -> tuple[Any, Memory]:
        _, aux = local_forward(trunk, experts, config, router, batch, memory, alive=alive)
        layers = [(cell_numbers(layer.indices, config.grid_size), layer.mask) for layer in aux.layers[:depth]]
        return layers, (*aux.memory[:depth], *memory[depth:])

    return jax.jit(read)


async def read_in_swarm(model: SavedModel, swarm: Swarm, batches: Iterable[tuple[Batch, np.ndarray]]) -> Reading:
    """Let the trunk of a run read, with the experts that a swarm has now: they answer, and do not learn. Raises
    NetError if a layer has no living expert, ExpertMismatch if it has experts of other shapes."""
    config, noted = model.config, list[np.ndarray]()
    mixtures = [
        swarm.mixture(prefix, config.expert(), model.router, k_best=config.k_best, grace_s=10.0)
        for prefix in model.layers
    ]
    for mixture in mixtures:
        await mixture.check()
    noting = [_noting(mixture, swarm, noted) for mixture in mixtures]
    batches = list(batches)
    await TransformerXL(config, model.router, noting).evaluate(model.trunk, [batch for batch, _ in batches])
    chosen = [noted[first : first + len(mixtures)] for first in range(0, len(noted), len(mixtures))]
    return _reading(batches, chosen, "those of a swarm that is alive")


def _noting(mixture: RemoteMixture, swarm: Swarm, noted: list[np.ndarray]) -> Mixture:
    """The mixture, which appends the number of each expert that it asks, [samples, slots]; -1 for none."""
    mix, grid_size = mix_segment(mixture.router), mixture.router.grid_size

    async def call(run: Recording, scores: Any, *inputs: Any) -> tuple[Value, Value]:
        values = jax.tree.map(lambda each: each.value if isinstance(each, Value) else each, (scores, inputs))
        on_host, inputs_on_host = await to_host(swarm.device, values)
        choice = await mixture.choose(on_host)
        cells = np.full(choice.indices.shape[:2], -1)
        for asked in choice.calls:
            at = asked.rows, asked.slots
            cells[at] = np.ravel_multi_index(tuple(choice.indices[at].T), grid_size)
        noted.append(cells)
        outputs, answered, _ = await mixture.forward(choice, inputs_on_host)
        return run(mix, scores, choice.indices, answered, outputs, inputs[0], choice.traffic)

    return call


def _reading(
    batches: Sequence[tuple[Batch, np.ndarray]], chosen: Sequence[Sequence[np.ndarray]], experts: str
) -> Reading:
    """The whole reading; `chosen` has for each batch, for each layer, the experts of all samples, [samples, slots]."""
    words, places, layers = [], [], []
    for (batch, begins), cells in zip(batches, chosen, strict=True):
        rows, seq_len = batch.tokens.shape
        per_row = len(cells[0]) // rows
        read = np.where(batch.mask, batch.tokens, -1).reshape(rows, per_row, -1)
        words.append(read)
        places.append(begins[:, None] + np.arange(0, seq_len, read.shape[2]))
        layers.append([np.where(read[..., :1] >= 0, each.reshape(rows, per_row, -1), -1) for each in cells])
    return Reading(
        seq_len=seq_len,
        words=np.concatenate(words, axis=1),
        places=np.concatenate(places, axis=1),
        chosen=tuple(np.concatenate(of_layer, axis=1) for of_layer in zip(*layers, strict=True)),
        experts=experts,
    )
