"""The small problem of the experiments about steps and not about learning: 16 parameters, every sample drawn anew."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dmoe_jax.arrays import PyTree
from dmoe_jax.optim import collaborative
from experiments.collaborative.world import Problem

_TARGET = np.arange(12, dtype=np.float32).reshape(3, 4)


def loss(params: PyTree, x: Any, y: Any) -> Any:
    """Return the mean squared error of tanh(x w) + b."""
    return jnp.mean(jnp.sum((jnp.tanh(x @ params["w"]) + params["b"] - y) ** 2, -1))


_gradient = jax.jit(jax.grad(loss))


def samples_of(peer: str, number: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw micro-batch `number` of a peer: x [count, 3], y [count, 4]."""
    rng = np.random.default_rng([number, *peer.encode()])
    x = rng.normal(size=(count, 3)).astype(np.float32)
    return x, np.sin(2 * x @ _TARGET).astype(np.float32)


def gradient(params: PyTree, peer: str, number: int, count: int) -> PyTree:
    """Return the gradient of one micro-batch."""
    return _gradient(params, *samples_of(peer, number, count))


def batch_gradient(params: PyTree, micro_batches: Sequence[tuple[str, int, int]]) -> PyTree:
    """Return the gradient of several micro-batches in one batch."""
    x, y = (np.concatenate(each) for each in zip(*(samples_of(*each) for each in micro_batches), strict=True))
    with jax.disable_jit():  # every batch has its own size
        return jax.grad(loss)(params, x, y)


def regression() -> Problem:
    """Return the problem, trained by Adam with a schedule, in which a wrong count of steps would show."""
    return Problem(
        params={"w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), "b": jnp.zeros(4)},
        gradient=gradient,
        batch_gradient=batch_gradient,
        together=collaborative(optax.adam(optax.linear_schedule(0.05, 0.01, 20))),
    )
