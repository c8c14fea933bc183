"""Problems trained in the emulator: the papers' MNIST classifier, and a small Transformer-XL on WikiText-2."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from dmoe_jax import Model, Outcome, expert_from_functions, score
from dmoe_jax.arrays import PyTree
from dmoe_jax.data import Images, SegmentStream, evaluation_segments, load_corpus, load_mnist
from dmoe_jax.emulator import Data, Emulator, take_batches
from dmoe_jax.experts.feedforward import FeedforwardBlock
from dmoe_jax.models import MLP, MLPConfig, TransformerXL, mlp
from dmoe_jax.optim import Recipe, make_optimizer, scale_by_stale_adam, scale_by_staleness
from dmoe_jax.routing import Router, product_key, steer_biases
from experiments.transformer_xl.presets import PRESETS, model_config

MNIST_MEAN, MNIST_SPREAD = 0.1307, 0.3081
"""Mean and standard deviation of the training images' pixels between 0 and 1, as everybody subtracts and divides."""
BATCH_SIZE, NUM_CLASSES = 4, 10
"""Images of a step, as in the paper; digits."""

_NOTHING = expert_from_functions(
    lambda key: jnp.zeros(()), lambda zero, x: x + zero, np.zeros((1, NUM_CLASSES), np.float32), name="nothing"
)
"""Expert that returns its input."""
_ROUTER = product_key((1,))


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


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model with remote mixtures, its batches, and how it is trained.

    Attributes:
      name: what figures call it.
      make_model: (swarm, **settings of the mixtures) -> the model.
      batch_size: samples of a step, as its mixtures have them.
      streams: (trainers, seed) -> the batches of each, without end.
      evaluation: batches, always the same.
      optimizer: of the trunk.
      expert_optimizer: of each expert; None for experts that never change.
    """

    name: str
    make_model: Callable[..., Model]
    batch_size: int
    streams: Callable[[int, int], Sequence[Iterator[Any]]]
    evaluation: Sequence[Any]
    optimizer: optax.GradientTransformation
    expert_optimizer: optax.GradientTransformation | None

    def emulator(self, num_trainers: int, **options: Any) -> Emulator:
        """The emulator of a swarm with so many trainers."""
        own = {"optimizer": self.optimizer, "expert_optimizer": self.expert_optimizer}
        return Emulator(self.make_model, **own, num_trainers=num_trainers, **options)

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
    sizes = {"input_dim": 784, "num_classes": NUM_CLASSES, "k_best": 4}
    config = MLPConfig(**sizes, d_model=d_model, num_layers=num_layers, grid_size=grid_size, dtype=dtype)
    router = router or product_key(grid_size)
    return Problem(
        name="MNIST",
        make_model=lambda swarm, **options: MLP.on(swarm, config, router, **options),
        batch_size=BATCH_SIZE,
        streams=lambda num_trainers, seed: [_image_stream(seed, trainer, dtype) for trainer in range(num_trainers)],
        evaluation=(_batch(_mnist().test, np.arange(num_evaluated), dtype),),
        optimizer=amsgrad(remedy),
        expert_optimizer=amsgrad(remedy),
    )


class DenseMLP(Model[mlp.Batch, tuple[()]]):
    """The dense classifier that the paper's mixtures are compared with (section 4.2): every layer of `models.MLP` with
    one wide block for its mixture.

    All of it is trunk, and nothing else is stale: a step takes as long as two calls of an expert that does nothing.
    """

    name = "dense MLP"

    def __init__(self, swarm: Any, d_model: int, **options: Any) -> None:
        blocks = [FeedforwardBlock(d_model, 4) for _ in range(4)]
        self.blocks = nn.Sequential([nn.Dense(d_model), *blocks, nn.LayerNorm(), nn.Dense(NUM_CLASSES)])
        self._mixture = swarm.mixture("wait0", _NOTHING, _ROUTER, k_best=1, **options)

    def init(self, key: jax.Array) -> PyTree:
        return {"blocks": self.blocks.init(key, jnp.zeros((1, 784))), "gate": _ROUTER.init(key, NUM_CLASSES)}

    async def forward(self, run: Any, params: Any, batch: mlp.Batch, state: tuple[()], keys: Any) -> Outcome:
        logits = run(self.blocks.apply, params["blocks"], batch.x)
        logits, _ = await self._mixture(run, run(_scores, params["gate"], logits), logits)
        loss, accuracy = run(_loss_head, logits, batch.labels)
        return Outcome(loss=loss, items=len(batch.labels), metrics={"accuracy": accuracy})


def _scores(gate: PyTree, logits: jax.Array) -> Any:
    return score(_ROUTER, gate, logits)


def _loss_head(logits: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), (logits.argmax(-1) == labels).mean()


def dense_mnist(*, d_model: int, remedy: Remedy, num_evaluated: int) -> Problem:
    """The classifier with dense blocks, twice as wide as a mixture's experts: so each costs what four of them cost."""
    problem = mnist(remedy=remedy, num_evaluated=num_evaluated)
    return replace(
        problem,
        name="dense MNIST",
        make_model=lambda swarm, **options: DenseMLP(swarm, d_model, **options),
        expert_optimizer=None,
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

    def optimizer(recipe: Recipe) -> optax.GradientTransformation:
        rate = remedy.step_size * recipe.learning_rate
        own = replace(recipe, learning_rate=rate, total_steps=num_updates, staleness_power=remedy.power)
        return optax.flatten(make_optimizer(own))

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
        optimizer=optimizer(preset.recipe),
        expert_optimizer=optimizer(preset.expert_recipe),
    )


def amsgrad(remedy: Remedy) -> optax.GradientTransformation:
    """Amsgrad at 1e-3, over all parameters as one vector: the same figures with fewer operations."""
    moments = functools.partial(scale_by_stale_adam, amsgrad=True) if remedy.yields else optax.scale_by_amsgrad
    step_size = optax.scale(-1e-3 * remedy.step_size)
    chain = optax.chain(moments(b1=remedy.momentum), step_size, scale_by_staleness(remedy.power))
    return steer_biases(optax.flatten(chain))


def _image_stream(seed: int, trainer: int, dtype: str) -> Iterator[mlp.Batch]:
    """Training images drawn at random, without end; of this trainer."""
    images = _mnist().train
    rng = np.random.default_rng([seed, trainer])
    while True:
        yield _batch(images, rng.integers(0, len(images.labels), BATCH_SIZE), dtype)


_mnist = functools.cache(load_mnist)


def _batch(images: Images, rows: np.ndarray, dtype: str) -> mlp.Batch:
    pixels = images.pixels[rows].astype(dtype) / 255
    return mlp.Batch((pixels - MNIST_MEAN) / MNIST_SPREAD, images.labels[rows])


def keys_of(seed: int) -> tuple[Any, Any]:
    """The keys of trunk and experts."""
    trunk, experts = jax.random.split(jax.random.key(seed))
    return trunk, experts
