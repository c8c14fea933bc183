"""What every engine of the experiment is made of, wherever it trains."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import optax

from dmoe_jax.data.batches import SegmentStream
from dmoe_jax.data.corpora import Corpus
from dmoe_jax.grid import all_uids, layer_prefix
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.recipe import make_optimizer
from dmoe_jax.routing.base import Router
from experiments.transformer_xl.evaluation import Evaluator, dense_evaluator, dmoe_evaluator
from experiments.transformer_xl.presets import Preset, expert_recipe, model_config, trunk_recipe


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model over a text, and how it is trained: a preset with the schedules of a run."""

    preset: Preset
    """The model."""
    corpus: Corpus
    """The text."""
    steps: int
    """Updates of the whole run, for the schedules."""
    seed: int
    """Of parameters, dropout, the router's noise and the rows' places in the text."""
    router: Router | None = None
    """Of every layer of a mixture."""
    name: str = ""
    """What figures call it; empty: the model's name."""
    compute_dtype: str = "float32"
    """Of the layers' matrix products, "float32" or "bfloat16"."""

    def __post_init__(self) -> None:
        if self.preset.grid_size and self.router is None:
            raise ValueError(f"model {self.preset.model!r} is a mixture of experts and needs a router")

    @property
    def title(self) -> str:
        """What figures call the model."""
        return self.name or self.preset.model

    @functools.cached_property
    def config(self) -> TransformerXLConfig:
        """Sizes of the model over this vocabulary."""
        return model_config(self.preset, len(self.corpus.vocabulary), compute_dtype=self.compute_dtype)

    @property
    def layers(self) -> Mapping[str, tuple[str, ...]]:
        """Layer -> uids of its experts; empty for a dense model."""
        if not self.preset.grid_size:
            return {}
        prefixes = [layer_prefix(layer) for layer in range(self.preset.num_layers)]
        return {prefix: tuple(map(str, all_uids(prefix, self.preset.grid_size))) for prefix in prefixes}

    @property
    def word_counts(self) -> np.ndarray | None:
        """Of the training text, where output biases start at the words' frequencies."""
        if not self.preset.unigram_biases:
            return None
        return np.bincount(self.corpus.train, minlength=self.config.vocab_size)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Of a dense model, or of the trunk."""
        return make_optimizer(trunk_recipe(self.preset, self.steps))

    @property
    def expert_optimizer(self) -> optax.GradientTransformation:
        """Of each expert."""
        return make_optimizer(expert_recipe(self.preset, self.steps))

    @property
    def evaluator(self) -> Evaluator:
        """Reads a text on this machine."""
        if not self.config.is_mixture:
            return dense_evaluator(self.config, self.preset.evaluation)
        assert self.router is not None
        return dmoe_evaluator(self.config, self.router, self.preset.evaluation)

    def text(self, split: str) -> np.ndarray:
        """The "valid" or "test" text."""
        text: np.ndarray = getattr(self.corpus, split)
        return text

    def stream(self, batch_size: int, *, shard: int = 0, num_shards: int = 1) -> SegmentStream:
        """A trainer's training text.

        Raises:
          ValueError: the text is too short for so many rows.
        """
        return SegmentStream(
            self.corpus.train,
            batch_size=batch_size,
            seq_len=self.config.seq_len,
            shard=shard,
            num_shards=num_shards,
            seed=self.seed,
        )
