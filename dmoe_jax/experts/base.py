"""Definition of an expert: a pair of pure functions and the shapes that it speaks.

An expert node, the in-process mixture and the remote mixture all see experts only through `Expert`. All inputs are
batch-first and samples are independent of each other, so that a node may join the rows of many trainers into one call
and a mixture may call an expert for one sample.
"""

import functools
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Int, Integer, PRNGKeyArray

from dmoe_jax.arrays import PyTree


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape and type of one input or output."""

    name: str
    """Name in error messages."""
    shape: tuple[int, ...]
    """Extents after the batch axis."""
    dtype: str
    """NumPy's name of the type, such as "float32" or "bool"."""
    differentiable: bool
    """True if a backward request returns a gradient for it."""


class Expert(NamedTuple):
    """An expert network: `apply(params, *inputs) -> output`, pure.

    Every array has the batch axis first, and the rows are independent of one another: a node joins the rows of many
    trainers and pads them with zeros. Equal configurations should give the same object, because compiled code is
    cached by the identity of `apply`. `dmoe_jax.experts.adapters` makes experts of Flax modules and of functions.

    Attributes:
      name: name of this kind of expert in logs and figures.
      init: (key) -> params.
      apply: (params, *inputs) -> output, [batch, *output.shape]. With `takes_key` it has the further argument `keys`:
        uint32 [batch, 2], the data of one dropout key for each row, or None (the default) in evaluation.
      inputs: specification of each input, in order.
      output: specification of the output, of any shape and floating type.
      takes_key: True if `apply` draws random numbers, such as dropout masks.
      meaning: meaning of its parameters' numbers beyond names and shapes, such as a number of heads, a fact a
        line. Trainers, replicas and checkpoints of another meaning are refused.
    """

    name: str
    init: Callable[..., PyTree]
    apply: Callable[..., Any]
    inputs: tuple[TensorSpec, ...]
    output: TensorSpec
    takes_key: bool = False
    meaning: str = ""

    @property
    def is_residual(self) -> bool:
        """True if the mixture passes the first input on where experts are missing.

        If the output has the first input's shape and type, what the combine weights leave over passes the input
        through: x + sum_k weights_k (outputs_k - x), and a sample without any answer goes through unchanged. Otherwise
        the mixture is sum_k weights_k outputs_k, and a sample without any answer is 0.
        """
        first = self.inputs[0]
        return (first.shape, first.dtype) == (self.output.shape, self.output.dtype)


def init_by_uid(key: PRNGKeyArray, expert: Expert, prefix: str, coordinates: Sequence[int | Int[Array, ""]]) -> PyTree:
    """Initial parameters of the expert `prefix.u0.u1...`: the key and the uid decide them, not who makes them.

    So a swarm of nodes and a mixture on one machine that share a key, the whole model's, start from the same experts,
    and a node that takes an expert over starts it as the first one did. The coordinates may be traced.
    """
    return expert.init(folded_in(key, numbers_of_uid(prefix, coordinates)))


def numbers_of_uid(prefix: str, coordinates: Sequence[int | Int[Array, ""]]) -> list[int | Int[Array, ""]]:
    """Numbers that name an expert where random keys are drawn: one for the prefix, and its coordinates."""
    return [zlib.crc32(prefix.encode()), *coordinates]


def folded_in(key: PRNGKeyArray, numbers: Iterable[int | Integer[Array, ""]]) -> PRNGKeyArray:
    """A key with these numbers folded in, one after the other."""
    return functools.reduce(jax.random.fold_in, numbers, key)
