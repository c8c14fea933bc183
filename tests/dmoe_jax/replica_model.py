"""The small model of `test_replicas`, without JAX's devices: its numbers, its batches and its loss."""

from typing import Any

import jax.numpy as jnp
import numpy as np

INPUTS, OUTPUTS, BATCH, WIDE = 16, 5, 32, 2**17
SPECS: dict[str, tuple[str | None, ...]] = {"w1": (None, "model"), "b1": ("model",), "w2": ("model",), "b2": ()}
"""Axes of the mesh over which each array is split; over `data` none is, so that both processes hold all of it."""


def params_of(width: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "w1": rng.normal(size=(INPUTS, width)).astype(np.float32) / 4,
        "b1": np.zeros(width, np.float32),
        "w2": rng.normal(size=(width, OUTPUTS)).astype(np.float32) / np.sqrt(width, dtype=np.float32),
        "b2": np.zeros(OUTPUTS, np.float32),
    }


def batch_of(number: int, replica: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng([number, replica]).normal(size=(BATCH, INPUTS)).astype(np.float32)
    return x, np.sin(2 * x[:, :OUTPUTS])


def loss_of(params: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] + params["b2"] - y) ** 2)
