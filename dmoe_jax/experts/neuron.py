"""The smallest expert, one hidden unit, of which PEER has a million (He 2024, section 2.2).

    x + gelu(<down, x>) up

k of them behind one router are a hidden layer of k units, chosen anew for each sample. A call over a network would
carry the input and a vector back for two products of its width: such experts are for one machine, where their
parameters are looked up like an embedding's (`dmoe_jax.mixture.neurons`). They can be served all the same.
"""

import math
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from dmoe_jax.arrays import PyTree
from dmoe_jax.checks import check_positive
from dmoe_jax.experts.adapters import expert_from_functions
from dmoe_jax.experts.base import Expert
from dmoe_jax.machine.remembered import remembered


def apply_neuron(params: PyTree, x: Float[Array, "batch d_model"]) -> Float[Array, "batch d_model"]:
    """The output of one neuron, its residual connection included."""
    return x + jax.nn.gelu(x @ params["down"])[:, None] * params["up"]


@remembered(16)
def _init_of(d_model: int) -> Callable[[PRNGKeyArray], PyTree]:
    def init(key: PRNGKeyArray) -> PyTree:
        # The unit gets its input's scale, and what the mixture adds, a mean over the chosen units, is about 1.
        down, up = jax.random.normal(key, (2, d_model))
        return {"down": down / math.sqrt(d_model), "up": up}

    return init


def neuron(*, d_model: int) -> Expert:
    """The expert of one hidden unit; equal widths return the same object. Raises ValueError if d_model is not a
    positive integer."""
    check_positive(d_model=d_model)
    example = jax.ShapeDtypeStruct((1, d_model), np.float32)
    return expert_from_functions(_init_of(d_model), apply_neuron, example, name="neuron", check=False)
