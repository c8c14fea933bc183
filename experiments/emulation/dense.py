"""The dense classifier that Learning@home's mixtures are compared with on MNIST (section 4.2)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from dmoe_jax.arrays import PyTree
from dmoe_jax.data.mnist import NUM_CLASSES
from dmoe_jax.emulator import Data
from dmoe_jax.experts.feedforward import FeedforwardBlock
from dmoe_jax.models.mlp import Batch
from experiments.emulation.problems import DEFAULT, Remedy, image_batches, image_stream, with_remedy


class DenseClassifier(nn.Module):
    """Dense, feed-forward blocks, LayerNorm, Dense: every layer of `models.mlp` with one wide block for its mixture."""

    d_model: int
    num_layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, classes], logits."""
        hidden = nn.Dense(self.d_model)(x)
        for _ in range(self.num_layers):
            hidden = FeedforwardBlock(self.d_model, 4)(hidden)
        return nn.Dense(NUM_CLASSES)(nn.LayerNorm()(hidden))


@dataclass(frozen=True, kw_only=True)
class DenseProblem:
    """The dense model, its batches, and how it is trained.

    Attributes:
      init: key -> parameters. loss: (params, batch, keys) -> a scalar, nats.
      optimizer: of all parameters.
      streams: (trainers, seed) -> the batches of each, without end.
      evaluation: batches, always the same. measure: (params, batch) -> (loss, accuracy).
    """

    init: Callable[..., PyTree]
    loss: Callable[..., Any]
    optimizer: optax.GradientTransformation
    streams: Callable[[int, int], Sequence[Iterator[Any]]]
    evaluation: Sequence[Batch]
    measure: Callable[[PyTree, Batch], tuple[Any, Any]]

    def data(self, num_trainers: int, *, steps: int, seed: int) -> Data:
        """So many batches of each trainer."""
        own = [[next(stream) for _ in range(steps)] for stream in self.streams(num_trainers, seed)]
        stacked = [jax.tree.map(lambda *leaves: np.stack(leaves), *batches) for batches in own]
        return Data(jax.tree.map(lambda *leaves: np.stack(leaves), *stacked))

    def evaluate(self, params: PyTree) -> tuple[float, float]:
        """(loss, accuracy), means over all test images."""
        figures = [(*map(float, self.measure(params, batch)), len(batch.labels)) for batch in self.evaluation]
        total = sum(count for *_, count in figures)
        return sum(loss * n for loss, _, n in figures) / total, sum(right * n for _, right, n in figures) / total


def dense_mnist(
    *,
    d_model: int = 64,
    num_layers: int = 4,
    batch_size: int = 4,
    learning_rate: float = 1e-3,
    remedy: Remedy = DEFAULT,
    num_evaluated: int = 10_000,
) -> DenseProblem:
    """The classifier with dense blocks, twice as wide as a mixture's experts: so each costs what four experts cost."""
    model = DenseClassifier(d_model, num_layers)

    def measure(params: PyTree, batch: Batch) -> tuple[Any, Any]:
        logits = cast(jax.Array, model.apply({"params": params}, jnp.asarray(batch.x)))
        labels = jnp.asarray(batch.labels)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, jnp.mean(logits.argmax(-1) == labels)

    return DenseProblem(
        init=lambda key: model.init(key, jnp.zeros((1, 784)))["params"],
        loss=lambda params, batch, keys: measure(params, batch)[0],
        optimizer=with_remedy(learning_rate, learning_rate, remedy, amsgrad=True).trunk,
        streams=lambda num_trainers, seed: [
            image_stream(batch_size, seed=seed, trainer=trainer) for trainer in range(num_trainers)
        ],
        evaluation=image_batches(num_evaluated),
        measure=jax.jit(measure),
    )
