"""Problem of which only the size matters: a vector of parameters, whose gradient is always the same."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import optax

from dmoe_jax.arrays import PyTree
from dmoe_jax.optim.collaborative import Shared, collaborative
from experiments.collaborative.world import Problem


def vector_of(num_params: int, shared: Shared = "gradients") -> Problem:
    """A problem with so many parameters, trained by gradient descent.

    Args:
      num_params: float32.
      shared: what peers add up.
    """
    grads = {"w": np.full(num_params, 1e-3, np.float32)}

    def gradient(params: PyTree, peer: str, number: int, count: int) -> PyTree:
        del params, peer, number, count
        return grads

    def batch_gradient(params: PyTree, micro_batches: Sequence[tuple[str, int, int]]) -> PyTree:
        del params, micro_batches
        return grads

    optimizer = optax.sgd(1e-3)
    return Problem(
        params={"w": jnp.zeros(num_params)},
        gradient=gradient,
        batch_gradient=batch_gradient,
        together=collaborative(optimizer, shared=shared),
        optimizer=optimizer,
    )
