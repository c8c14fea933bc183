"""What an expert is: a pair of pure functions and the shapes that it speaks.

An expert node, the in-process mixture and the remote mixture all see experts only through `Expert`. All inputs are
batch-first and samples are independent of each other, so that a node may join the rows of many trainers into one call
and a mixture may call an expert for one sample.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Int, PRNGKeyArray

from dmoe_jax.types import PyTree


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape and type of one input or output, without the batch axis."""

    name: str
    """What error messages call it."""
    shape: tuple[int, ...]
    """Extents after the batch axis."""
    dtype: str
    """NumPy's name of the type, such as "float32" or "bool"."""
    differentiable: bool
    """Whether a backward request returns a gradient for it."""

    @property
    def size(self) -> int:
        """Number of elements in one sample."""
        return math.prod(self.shape)


class Expert(NamedTuple):
    """An expert network: `apply(params, *inputs) -> output`, pure.

    Factories return the same object for equal configurations: compiled code is cached by the identity of `apply`.

    Attributes:
      name: the kind, a key of `dmoe_jax.experts.EXPERTS`.
      init: (key) -> params.
      apply: (params, *inputs) -> output, [batch, *output.shape]. Experts carry their own residual connection.
      inputs: specification of each input, in order.
      output: specification of the output; its shape is that of the first input.
    """

    name: str
    init: Callable[..., PyTree]
    apply: Callable[..., Any]
    inputs: tuple[TensorSpec, ...]
    output: TensorSpec


def init_by_uid(key: PRNGKeyArray, expert: Expert, prefix: str, coordinates: Sequence[int | Int[Array, ""]]) -> PyTree:
    """Initial parameters of the expert `prefix.u0.u1...`: the key and the uid decide them, not who makes them.

    So a swarm of nodes and a mixture on one machine that share a key start from the same experts, and a node that takes
    an expert over starts it as the first one did.

    Args:
      key: of the whole model.
      expert: the network.
      prefix: the grid's name.
      coordinates: the expert's place in the grid; may be traced.
    """
    own = jax.random.fold_in(key, zlib.crc32(prefix.encode()))
    for coordinate in coordinates:
        own = jax.random.fold_in(own, coordinate)
    return expert.init(own)
