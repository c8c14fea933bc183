"""Models and a text small enough for tests of whole runs."""

import dataclasses
from typing import Any

import numpy as np

from dmoe_jax.data.corpora import Corpus
from dmoe_jax.data.vocabulary import Vocabulary
from experiments.transformer_xl.evaluation import EvaluationConfig
from experiments.transformer_xl.names import Model
from experiments.transformer_xl.presets import PRESETS, Preset

VOCAB_SIZE = 60
DROPOUT = {
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "position_dropout": 0.1,
    "embedding_dropout": 0.1,
    "input_dropout": 0.1,
    "output_dropout": 0.1,
}


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


def small_preset(model: Model, **changes: Any) -> Preset:
    """The tiny preset, made smaller: two layers, a grid of four experts, two of them for each sequence."""
    sizes: dict[str, Any] = {
        "d_model": 16,
        "num_heads": 2,
        "d_ff": 24,
        "seq_len": 6,
        "mem_len": 6,
        "cutoffs": (20,),
        "batch_size": 3,
        "learning_rate": 1e-2,
        "expert_learning_rate": 1e-2,
        "evaluation": EvaluationConfig(batch_size=2),
    }
    if model == "dmoe":
        sizes |= {"grid_size": (2, 2), "k_best": 2}
    return dataclasses.replace(PRESETS[model, "tiny"], **(sizes | changes))
