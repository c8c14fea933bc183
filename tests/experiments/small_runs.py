"""Models and a text small enough for tests of whole runs."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dmoe_jax.data.corpora import Corpus
from dmoe_jax.data.vocabulary import Vocabulary
from dmoe_jax.layer_config import LayerConfig, Recipe
from experiments.moshpit_sgd.tasks import Task
from experiments.transformer_xl.presets import PRESETS, Preset
from experiments.transformer_xl.settings import Model

VOCAB_SIZE = 60
POINT = np.linspace(-1, 1, 100).astype(np.float32)
IN_LAYERS = {"dropout": 0.1, "attention_dropout": 0.1, "position_dropout": 0.1}
IN_TRUNK = {"embedding_dropout": 0.1, "input_dropout": 0.1, "output_dropout": 0.1}
UNBOUNDED = Recipe(learning_rate=1e-2, warmup_steps=0, weight_decay=0.0, grad_clip=math.inf)
"""From its first step on at its full step size."""


def small_corpus(seed: int = 0) -> Corpus:
    """A text of random words, frequent ones first."""
    rng = np.random.default_rng(seed)
    train, valid, test = (
        np.minimum(rng.geometric(0.08, size) - 1, VOCAB_SIZE - 1).astype(np.int32) for size in (2000, 300, 200)
    )
    return Corpus(
        name="small",
        description="random words",
        train=train,
        valid=valid,
        test=test,
        vocabulary=Vocabulary(tuple(f"word{index:02d}" for index in range(VOCAB_SIZE))),
    )


def small_preset(model: Model, *, layer: dict[str, Any] | None = None, **sizes: Any) -> Preset:
    """The tiny preset, made smaller: two layers, a grid of four experts, two of them for each sequence.

    Args:
      layer: other values of the layers' configuration. sizes: of the model's.
    """
    preset = PRESETS[model, "tiny"]
    if model == "dmoe":
        sizes = {"grid_size": (2, 2), "k_best": 2} | sizes
    own = LayerConfig(d_model=16, num_heads=2, d_ff=24, seq_len=6, mem_len=6, **(layer or {}))
    return replace(
        preset,
        config=replace(preset.config, layer=own, **({"cutoffs": (20,)} | sizes)),
        batch_size=3,
        recipe=replace(preset.recipe, learning_rate=1e-2),
        expert_recipe=replace(preset.expert_recipe, learning_rate=1e-2),
    )


def quadratic() -> Task:
    """Half the squared distance to `POINT`, seen with noise by each peer: the gradient is the way to it."""

    def batches(peer: int, num_peers: int, seed: int) -> Iterator[Any]:
        rng = np.random.default_rng([seed, peer, num_peers])
        while True:
            yield (POINT + 0.1 * rng.normal(size=POINT.size)).astype(np.float32)

    def loss(params: Any, batch: Any, carry: Any) -> Any:
        return 0.5 * jnp.sum((params["w"] - batch) ** 2), carry

    return Task(
        init=lambda key: {"w": jax.random.normal(key, POINT.shape)},
        carry=(),
        loss=loss,
        batches=batches,
        evaluate=lambda params: 0.5 * jnp.mean((params["w"] - POINT) ** 2),
        optimizer=optax.sgd(0.1),
        target=0.05,
    )
