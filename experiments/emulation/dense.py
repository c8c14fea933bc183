"""The dense classifier that Learning@home's mixtures are compared with on MNIST (section 4.2)."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from dmoe_jax import Model, Outcome, expert_from_functions, product_key, score
from dmoe_jax.arrays import PyTree
from dmoe_jax.experts.feedforward import FeedforwardBlock
from dmoe_jax.models import mlp
from experiments.emulation.problems import Problem, Remedy, mnist

_NUM_CLASSES = 10
_ROW = np.zeros((1, _NUM_CLASSES), np.float32)
_NOTHING = expert_from_functions(lambda key: jnp.zeros(()), lambda zero, x: x + zero, _ROW, name="nothing")
"""Expert that returns its input."""
_ROUTER = product_key((1,))


class DenseMLP(Model[mlp.Batch, tuple[()]]):
    """Dense, feed-forward blocks, LayerNorm, Dense: every layer of `models.MLP` with one wide block for its mixture.

    All of it is trunk, and nothing else is stale: a step takes as long as two calls of an expert that does nothing.
    """

    name = "dense MLP"

    def __init__(self, swarm: Any, d_model: int, **options: Any) -> None:
        blocks = [FeedforwardBlock(d_model, 4) for _ in range(4)]
        self.blocks = nn.Sequential([nn.Dense(d_model), *blocks, nn.LayerNorm(), nn.Dense(_NUM_CLASSES)])
        self._mixture = swarm.mixture("wait0", _NOTHING, _ROUTER, k_best=1, **options)

    def init(self, key: jax.Array) -> PyTree:
        return {"blocks": self.blocks.init(key, jnp.zeros((1, 784))), "gate": _ROUTER.init(key, _NUM_CLASSES)}

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
        optimizers=problem.optimizers._replace(expert=None),
    )
