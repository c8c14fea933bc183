"""Problems trained in the emulator: the papers' MNIST classifier, and a small Transformer-XL on WikiText-2."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from dmoe_jax import Model
from dmoe_jax.data import Images, SegmentStream, evaluation_segments, load_corpus, load_mnist
from dmoe_jax.emulator import Data, Emulator, take_batches
from dmoe_jax.models import MLP, MLPConfig, TransformerXL, mlp
from dmoe_jax.optim import make_optimizer, scale_by_stale_adam, scale_by_staleness
from dmoe_jax.routing import Router, product_key, steer_biases
from experiments.transformer_xl.presets import PRESETS, model_config

MNIST_MEAN, MNIST_SPREAD = 0.1307, 0.3081
"""Mean and standard deviation of the training images' pixels between 0 and 1, as everybody subtracts and divides."""
BATCH_SIZE = 4
"""Images of a step, as in the paper."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Remedy for stale gradients.

    Attributes:
      power: of `scale_by_staleness`; 0: updates are not scaled.
      momentum: decay of Adam's first moment.
      yields: True if stale gradients go without it, see `scale_by_stale_adam`.
      step_size: times the problem's, of trunk and experts.
    """

    power: float = 0.5
    momentum: float = 0.9
    yields: bool = True
    step_size: float = 1.0


DEFAULT = Remedy()
"""Remedy of recipes and commands."""
PLAIN = Remedy(power=0.0, yields=False)
"""No remedy, as in the papers."""


class Optimizers(NamedTuple):
    """Optimisers of the trunk, and of each expert; None for experts that never change."""

    trunk: optax.GradientTransformation
    expert: optax.GradientTransformation | None


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model with remote mixtures, its batches, and how it is trained.

    Attributes:
      name: what figures call it.
      make_model: (swarm, **settings of the mixtures) -> the model.
      batch_size: samples of a step, as its mixtures have them.
      streams: (trainers, seed) -> the batches of each, without end.
      evaluation: batches, always the same.
      optimizers: of trunk and experts.
    """

    name: str
    make_model: Callable[..., Model]
    batch_size: int
    streams: Callable[[int, int], Sequence[Iterator[Any]]]
    evaluation: Sequence[Any]
    optimizers: Optimizers

    def emulator(self, num_trainers: int, **options: Any) -> Emulator:
        """The emulator of a swarm with so many trainers."""
        own = self.optimizers
        return Emulator(
            self.make_model, optimizer=own.trunk, expert_optimizer=own.expert, num_trainers=num_trainers, **options
        )

    def data(self, num_trainers: int, *, steps: int, seed: int) -> Data:
        """So many batches of each trainer."""
        model = self.emulator(num_trainers).stages.model
        return take_batches(model, self.streams(num_trainers, seed), steps=steps, seed=seed)


def mnist(
    *,
    d_model: int = 32,
    grid_size: tuple[int, ...] = (8, 8),
    num_layers: int = 4,
    router: Router | None = None,
    remedy: Remedy = DEFAULT,
    num_evaluated: int = 10_000,
    dtype: str = "float32",
) -> Problem:
    """The classifier of Learning@home (section 4.2): amsgrad everywhere, batches drawn at random for each trainer.

    Args:
      d_model: width; 512 in the paper. grid_size: of the experts of each layer. num_layers: 4 in the paper.
      router: None for product keys, trained.
      remedy: against staleness.
      num_evaluated: of the test images, the first so many.
      dtype: "float64" where the answer must not depend on rounding, see `MLPConfig`.
    """
    sizes = {"input_dim": 784, "num_classes": 10, "k_best": 4}
    config = MLPConfig(**sizes, d_model=d_model, num_layers=num_layers, grid_size=grid_size, dtype=dtype)
    router = router or product_key(grid_size)
    return Problem(
        name="MNIST",
        make_model=lambda swarm, **options: MLP.on(swarm, config, router, **options),
        batch_size=BATCH_SIZE,
        streams=lambda num_trainers, seed: [
            image_stream(seed=seed, trainer=trainer, dtype=dtype) for trainer in range(num_trainers)
        ],
        evaluation=(evaluation_images(num_evaluated, dtype=dtype),),
        optimizers=Optimizers(amsgrad(remedy), amsgrad(remedy)),
    )


def transformer_xl(
    *,
    num_updates: int,
    d_model: int = 64,
    d_ff: int = 144,
    seq_len: int = 128,
    dropout: float = 0.0,
    remedy: Remedy = DEFAULT,
    num_evaluated: int = 16_384,
) -> Problem:
    """The tiny mixture of `experiments.transformer_xl`: one sequence a step, Adam with warm-up and a cosine.

    Args:
      num_updates: of the run, for the schedules.
      d_model, d_ff, seq_len: sizes; memory is as long as a segment. dropout: in the layers.
      remedy: against staleness; whether stale gradients go without momentum follows from its power, as in any recipe.
      num_evaluated: words of the validation text.
    """
    corpus, preset = load_corpus(), PRESETS["dmoe", "tiny"]
    config = model_config(preset, len(corpus.vocabulary))
    layer = replace(config.layer, d_model=d_model, d_ff=d_ff, seq_len=seq_len, mem_len=seq_len, dropout=dropout)
    config = replace(config, layer=layer)
    router = product_key(config.grid_size)
    counts = np.bincount(corpus.train, minlength=config.vocab_size)
    recipes = [
        replace(
            recipe,
            learning_rate=remedy.step_size * recipe.learning_rate,
            total_steps=num_updates,
            staleness_power=remedy.power,
        )
        for recipe in (preset.recipe, preset.expert_recipe)
    ]
    return Problem(
        name="Transformer-XL",
        make_model=lambda swarm, **options: TransformerXL.on(swarm, config, router, word_counts=counts, **options),
        batch_size=1,
        streams=lambda num_trainers, seed: [
            SegmentStream(
                corpus.train, batch_size=1, seq_len=seq_len, shard=trainer, num_shards=num_trainers, seed=seed
            )
            for trainer in range(num_trainers)
        ],
        evaluation=tuple(evaluation_segments(corpus.valid[: num_evaluated + 1], batch_size=8, seq_len=seq_len)),
        optimizers=Optimizers(*(optax.flatten(make_optimizer(recipe)) for recipe in recipes)),
    )


def amsgrad(remedy: Remedy) -> optax.GradientTransformation:
    """Amsgrad at 1e-3, over all parameters as one vector: the same figures with fewer operations."""
    moments = functools.partial(scale_by_stale_adam, amsgrad=True) if remedy.yields else optax.scale_by_amsgrad
    step_size = optax.scale(-1e-3 * remedy.step_size)
    chain = optax.chain(moments(b1=remedy.momentum), step_size, scale_by_staleness(remedy.power))
    return steer_biases(optax.flatten(chain))


def image_stream(*, seed: int, trainer: int, dtype: str = "float32") -> Iterator[mlp.Batch]:
    """Training images drawn at random, without end; of this trainer."""
    images = _mnist().train
    rng = np.random.default_rng([seed, trainer])
    while True:
        yield _batch(images, rng.integers(0, len(images.labels), BATCH_SIZE), dtype)


def evaluation_images(count: int, *, dtype: str = "float32") -> mlp.Batch:
    """The first `count` test images."""
    return _batch(_mnist().test, np.arange(count), dtype)


_mnist = functools.cache(load_mnist)


def _batch(images: Images, rows: np.ndarray, dtype: str) -> mlp.Batch:
    pixels = images.pixels[rows].astype(dtype) / 255
    return mlp.Batch((pixels - MNIST_MEAN) / MNIST_SPREAD, images.labels[rows])


def keys_of(seed: int) -> tuple[Any, Any]:
    """The keys of trunk and experts."""
    trunk, experts = jax.random.split(jax.random.key(seed))
    return trunk, experts
