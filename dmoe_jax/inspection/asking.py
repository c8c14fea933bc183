"""The same reading with the experts of a swarm that is alive: they answer, and do not learn."""

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax.data.batches import Batch
from dmoe_jax.device import to_host
from dmoe_jax.inspection.reading import LayerChoice, Notes, Reading
from dmoe_jax.inspection.saved_model import SavedModel
from dmoe_jax.mixture.remote import Choice, RemoteMixture, mix_segment
from dmoe_jax.models.transformer_xl import attention_segment, by_sequence, expert_inputs, router_ids, segments
from dmoe_jax.models.trunk import empty_memory, forget, next_memory
from dmoe_jax.routing.base import combine_weights
from dmoe_jax.swarm import Swarm


async def read_in_swarm(model: SavedModel, swarm: Swarm, batches: Iterable[tuple[Batch, np.ndarray]]) -> Reading:
    """Let the trunk of a run read, with the experts that the swarm has now.

    Raises:
      NetError: a layer has no living expert. ExpertMismatch: it has experts of other shapes.
    """
    config, parts = model.config, segments(model.config, model.router)
    mixtures = [
        swarm.mixture(prefix, config.expert(), model.router, k_best=config.k_best, grace_s=10.0)
        for prefix in model.layers
    ]
    for mixture in mixtures:
        await mixture.check()
    embed, gate, remember = jax.jit(parts.embed), jax.jit(parts.gate), jax.jit(next_memory)
    attend, mix = jax.jit(attention_segment(config)), jax.jit(mix_segment(model.router))
    memory, notes = empty_memory(config, 0), Notes()
    for batch, places in batches:
        if len(memory[0].mask) != len(places):
            memory = empty_memory(config, len(places))
        memory = forget(memory, jnp.asarray(batch.is_first))
        hidden, memories, layers = embed(model.trunk["embed"], batch.tokens), [], []
        for layer, mixture in enumerate(mixtures):
            memories.append(remember(memory[layer], by_sequence(hidden, len(places))))
            if config.routes_tokens:
                hidden = attend(model.trunk["attention"][layer], hidden, memory[layer])
            scores = gate(model.trunk["gates"][layer], hidden, memory[layer], router_ids(config, batch.tokens))
            choice = await mixture.choose(await to_host(swarm.device, scores))
            inputs = await to_host(swarm.device, expert_inputs(config, hidden, memory[layer]))
            outputs, answered, _ = await mixture.forward(choice, inputs)
            hidden, _ = mix(scores, choice.indices, answered, outputs, hidden, choice.traffic)
            where = jnp.asarray(choice.indices), jnp.asarray(answered)
            layers.append(
                LayerChoice(
                    cells=np.ravel_multi_index(np.moveaxis(choice.indices, -1, 0), config.grid_size, mode="clip"),
                    mask=_asked(choice),
                    weights=combine_weights(model.router, scores, *where),
                    inputs=inputs,
                )
            )
        memory = tuple(memories)
        notes.add(batch, places, layers)
    responses = [await _responses(*layer) for layer in zip(mixtures, notes.inputs, strict=True)]
    return notes.reading(responses)


def _asked(choice: Choice) -> np.ndarray:
    """Which slots hold an expert, bool [batch, slots]."""
    asked = np.zeros(choice.indices.shape[:2], bool)
    for call in choice.calls:
        asked[call.rows, call.slots] = True
    return asked


async def _responses(mixture: RemoteMixture, inputs: list[np.ndarray]) -> np.ndarray:
    """What each expert of a layer returns for the same inputs, [E, n]; NaN for those that are not alive."""
    alive = np.asarray(await mixture.alive())
    rows = len(inputs[0])
    found = np.full((alive.size, rows * math.prod(mixture.expert.output.shape)), np.nan, np.float32)
    for number, coordinates in enumerate(np.ndindex(alive.shape)):
        if not alive[coordinates]:
            continue
        indices = np.tile(np.array(coordinates, np.int32), (rows, 1, 1))
        choice = await mixture.choose_selected(indices, np.ones((rows, 1), bool), alive)
        outputs, answered, _ = await mixture.forward(choice, inputs)
        if answered.all():
            found[number] = outputs.reshape(-1)
    return found
