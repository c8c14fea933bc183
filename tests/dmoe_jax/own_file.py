"""A file of a user's own, with an expert, an optimiser, and something that is neither."""

OWN_FILE = """
import flax.linen as nn, numpy as np, optax
from dmoe_jax.experts import as_expert

class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8)(x)

def expert():
    return as_expert(Block(), np.zeros((2, 8), np.float32))

optimizer = optax.adamw(1e-3)
number = 3
"""
