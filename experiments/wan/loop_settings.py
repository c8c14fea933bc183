"""Settings on which both processes of part `loop` must agree."""

import jax.numpy as jnp

from dmoe_jax.arrays import PyTree
from dmoe_jax.averaging import TreeAveragerConfig

NAME = "loop"
CONFIG = TreeAveragerConfig(side=2, window_s=10.0, timeout_s=30.0)
WIDTH = 1024


def params_of(num_params: int) -> PyTree:
    """A network of square layers with about so many parameters."""
    return {f"layer{index}": jnp.zeros((WIDTH, WIDTH)) for index in range(max(1, num_params // WIDTH**2))}
