"""Problems trained in the emulator: the papers' MNIST classifier, and a small Transformer-XL on WikiText-2."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from dmoe_jax.data.batches import SegmentStream, evaluation_segments
from dmoe_jax.data.corpora import load_corpus
from dmoe_jax.data.mnist import NUM_CLASSES, Images, load_mnist
from dmoe_jax.emulator import Data, Emulator, take_batches
from dmoe_jax.emulator.stages import ModelStages
from dmoe_jax.layer_config import LayerConfig, Recipe
from dmoe_jax.model import Model
from dmoe_jax.models import mlp
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.optim.recipe import learning_rate_schedule
from dmoe_jax.optim.staleness import compensate_delay, scale_by_stale_adam, scale_by_staleness
from dmoe_jax.routing.balancing import steer_biases
from dmoe_jax.routing.base import Router
from dmoe_jax.routing.product_key import product_key

MNIST_MEAN, MNIST_SPREAD = 0.1307, 0.3081
"""Mean and standard deviation of the training images' pixels between 0 and 1, as everybody subtracts and divides."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Remedy for stale gradients.

    Attributes:
      trunk_power, expert_power: of `scale_by_staleness`; 0: updates are not scaled.
      momentum: decay of Adam's first moment. yields: whether stale gradients go without it, see
        `optim.staleness.scale_by_stale_adam`.
      compensation: strength of `compensate_delay`, of the trunk; 0: none.
      step_size: times the problem's, of trunk and experts.
    """

    trunk_power: float = 0.5
    expert_power: float = 0.5
    momentum: float = 0.9
    yields: bool = True
    compensation: float = 0.0
    step_size: float = 1.0


DEFAULT = Remedy()
"""Remedy of recipes and commands."""
PLAIN = Remedy(trunk_power=0.0, expert_power=0.0, yields=False)
"""No remedy, as in the papers."""


class Optimizers(NamedTuple):
    """Optimisers of the trunk, and of each expert."""

    trunk: optax.GradientTransformation
    expert: optax.GradientTransformation


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

    def emulator(self, num_trainers: int, optimizers: Optimizers | None = None, **options: Any) -> Emulator:
        """The emulator of a swarm with so many trainers, of these optimisers or the problem's own."""
        own = optimizers or self.optimizers
        return Emulator(
            self.make_model, optimizer=own.trunk, expert_optimizer=own.expert, num_trainers=num_trainers, **options
        )

    def data(self, num_trainers: int, *, steps: int, seed: int) -> Data:
        """So many batches of each trainer."""
        model = ModelStages(self.make_model).model
        return take_batches(model, self.streams(num_trainers, seed), steps=steps, seed=seed)


def mnist(
    *,
    d_model: int = 32,
    grid_size: tuple[int, ...] = (8, 8),
    num_layers: int = 4,
    batch_size: int = 4,
    learning_rate: float = 1e-3,
    router: Router | None = None,
    remedy: Remedy = DEFAULT,
    num_evaluated: int = 10_000,
    dtype: str = "float32",
) -> Problem:
    """The classifier of Learning@home (section 4.2): amsgrad everywhere, batches drawn at random for each trainer.

    Args:
      d_model: width; 512 in the paper. grid_size: of the experts of each layer. num_layers: 4 in the paper.
      batch_size: samples of a step; 4 in the paper, 8 with 4,096 experts.
      learning_rate: of trunk and experts.
      router: None for product keys, trained.
      remedy: against staleness.
      num_evaluated: of the test images, the first so many.
      dtype: "float64" where the answer must not depend on rounding, see `mlp.MLPConfig`.
    """
    config = mlp.MLPConfig(
        input_dim=784,
        num_classes=NUM_CLASSES,
        d_model=d_model,
        num_layers=num_layers,
        grid_size=grid_size,
        k_best=4,
        dtype=dtype,
    )
    router = router or product_key(grid_size)
    return Problem(
        name="MNIST",
        make_model=lambda swarm, **options: mlp.MLP.on(swarm, config, router, **options),
        batch_size=batch_size,
        streams=lambda num_trainers, seed: [
            image_stream(batch_size, seed=seed, trainer=trainer, dtype=dtype) for trainer in range(num_trainers)
        ],
        evaluation=image_batches(num_evaluated, dtype=dtype),
        optimizers=with_remedy(learning_rate, learning_rate, remedy, amsgrad=True),
    )


def transformer_xl(
    *,
    d_model: int = 64,
    d_ff: int = 144,
    seq_len: int = 128,
    num_layers: int = 2,
    grid_size: tuple[int, ...] = (2, 4),
    num_updates: int = 8000,
    dropout: float = 0.0,
    remedy: Remedy = DEFAULT,
    num_evaluated: int = 16_384,
) -> Problem:
    """The tiny Transformer-XL of `experiments.transformer_xl`: one sequence a step, Adam with warm-up and a cosine.

    Args:
      d_model, d_ff, seq_len, num_layers, grid_size: sizes; memory is as long as a segment.
      num_updates: of the run, for the schedules.
      dropout: in the layers. remedy: against staleness.
      num_evaluated: words of the validation text.
    """
    corpus = load_corpus()
    vocab_size = len(corpus.vocabulary)
    layer = LayerConfig(d_model=d_model, num_heads=4, d_ff=d_ff, seq_len=seq_len, mem_len=seq_len, dropout=dropout)
    config = TransformerXLConfig(
        vocab_size=vocab_size,
        num_layers=num_layers,
        layer=layer,
        cutoffs=tuple(cutoff for cutoff in (2000, 10_000) if cutoff < vocab_size),
        grid_size=grid_size,
        k_best=4,
    )
    router = product_key(grid_size)
    counts = np.bincount(corpus.train, minlength=vocab_size)
    trunk_rate, expert_rate = (
        learning_rate_schedule(Recipe(learning_rate=peak, warmup_steps=200, total_steps=num_updates))
        for peak in (1e-3, 8e-4)
    )
    return Problem(
        name="Transformer-XL",
        make_model=lambda swarm, **options: txl.TransformerXL.on(swarm, config, router, word_counts=counts, **options),
        batch_size=1,
        streams=lambda num_trainers, seed: [
            SegmentStream(
                corpus.train, batch_size=1, seq_len=seq_len, shard=trainer, num_shards=num_trainers, seed=seed
            )
            for trainer in range(num_trainers)
        ],
        evaluation=tuple(evaluation_segments(corpus.valid[: num_evaluated + 1], batch_size=8, seq_len=seq_len)),
        optimizers=with_remedy(trunk_rate, expert_rate, remedy, clip=0.25),
    )


def with_remedy(
    trunk_rate: optax.ScalarOrSchedule,
    expert_rate: optax.ScalarOrSchedule,
    remedy: Remedy,
    *,
    amsgrad: bool = False,
    clip: float = math.inf,
) -> Optimizers:
    """Optimisers of trunk and experts, over all parameters as one vector: the same figures with fewer operations.

    Args:
      trunk_rate, expert_rate: step sizes, or their schedules by update count.
      remedy: against staleness.
      amsgrad: instead of Adam. clip: bound on the norm of a gradient.
    """

    adam: Callable[..., optax.GradientTransformation] = optax.scale_by_amsgrad if amsgrad else optax.scale_by_adam
    if remedy.yields:
        adam = functools.partial(scale_by_stale_adam, amsgrad=amsgrad)

    def made(rate: optax.ScalarOrSchedule, power: float) -> optax.GradientTransformation:
        return steer_biases(
            optax.flatten(
                optax.chain(
                    optax.identity() if math.isinf(clip) else optax.clip_by_global_norm(clip),
                    adam(b1=remedy.momentum),
                    optax.scale_by_learning_rate(rate),
                    optax.scale(remedy.step_size),
                    scale_by_staleness(power) if power else optax.identity(),
                )
            )
        )

    trunk = made(trunk_rate, remedy.trunk_power)
    if remedy.compensation:
        trunk = optax.chain(compensate_delay(remedy.compensation), trunk)
    return Optimizers(trunk, made(expert_rate, remedy.expert_power))


def image_stream(batch_size: int, *, seed: int, trainer: int, dtype: str = "float32") -> Iterator[mlp.Batch]:
    """Training images drawn at random, without end; of this trainer."""
    images = _images().train
    rng = np.random.default_rng([seed, trainer])
    while True:
        yield _batch(images, rng.integers(0, len(images.labels), batch_size), dtype)


def image_batches(count: int, *, batch_size: int = 10_000, dtype: str = "float32") -> Sequence[mlp.Batch]:
    """The first `count` test images."""
    images = _images().test
    rows = np.arange(count)
    return tuple(_batch(images, rows[first : first + batch_size], dtype) for first in range(0, count, batch_size))


@functools.cache
def _images() -> Any:
    return load_mnist()


def _batch(images: Images, rows: np.ndarray, dtype: str) -> mlp.Batch:
    pixels = images.pixels[rows].astype(dtype) / 255
    return mlp.Batch((pixels - MNIST_MEAN) / MNIST_SPREAD, images.labels[rows])


def keys_of(seed: int) -> tuple[Any, Any]:
    """The keys of trunk and experts."""
    trunk, experts = jax.random.split(jax.random.key(seed))
    return trunk, experts
